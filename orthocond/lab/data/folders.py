"""Folders, zips and tars of images: class folders, train/val/test folders, or images without classes."""

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from orthocond.lab.data.archives import Entry, entries
from orthocond.lab.data.encoded import (
    Encoded,
    EncodedImages,
    check_on_error,
    describe_modes,
    in_threads,
    look_at_headers,
)
from orthocond.lab.data.images import ImageData, balanced
from orthocond.lab.data.options import SPLITS, Options, choose_split

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")


class Part(NamedTuple):
    """One split: its files, and the class folder of each (None without classes)."""

    files: list[Entry]
    classes: list[str] | None


def read_images(path: Path, options: Options) -> ImageData:
    """Images of a folder, zip or tar.

    Raises:
        ValueError: If there are no images, the folders do not fit together, or an image is broken.
    """
    parts, empty = layout(path)
    split = choose_split(options.split, parts, path)
    names = sorted({name for part in parts.values() for name in part.classes or ()}) if parts[split].classes else []
    train = parts.get("train")
    if train is not None and train.classes is not None:
        _same_classes(path, split, parts[split], set(train.classes))
        names = sorted(set(train.classes))
    if empty and options.on_error == "raise":
        raise ValueError(
            f"{path}/{empty[0]} holds no images ({len(empty)} empty class folders in all). "
            "Fill or remove them, or load with on_error='skip'."
        )
    index = {name: i for i, name in enumerate(names)}
    files, classes = parts[split]
    labels = torch.tensor([index[name] for name in classes] if classes else [-1] * len(files))
    return build(files, labels, tuple(names), split, str(path), options)


def layout(path: Path) -> tuple[dict[str, Part], list[str]]:
    """The splits of a folder or archive (``"all"`` if it has none), and its empty class folders.

    Raises:
        ValueError: If there are no images, or loose images beside class folders.
    """
    files, others = entries(path, _is_image)
    if not files:
        found = f" It holds {len(others)} other files, such as {others[0]}." if others else ""
        raise ValueError(f"{path} holds no images ({' '.join(SUFFIXES)}).{found}")
    names = [entry.name.split("/") for entry in files]
    skip = 0  # folders that wrap everything, as archives often have
    while len({name[skip] for name in names}) == 1 and len(names[0]) > skip + 1 and names[0][skip] not in SPLITS:
        skip += 1
    found_splits = {SPLITS[name[skip]] for name in names if len(name) > skip + 1 and name[skip] in SPLITS}
    if not found_splits:
        return {"all": _classes(path, files, skip)}, _empty(others, skip)
    parts = {}
    for split in ("train", "val", "test"):
        chosen = [
            entry
            for entry, name in zip(files, names, strict=True)
            if len(name) > skip + 1 and SPLITS.get(name[skip]) == split
        ]
        if chosen:
            parts[split] = _classes(path, chosen, skip + 1)
    return parts, _empty(others, skip + 1)


def _is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES)


def _classes(path: Path, files: list[Entry], depth: int) -> Part:
    loose = [entry.name for entry in files if entry.name.count("/") == depth]
    if len(loose) == len(files):
        return Part(files, None)
    if loose:
        raise ValueError(
            f"{path} has {len(loose)} images beside class folders, such as {loose[0]}. "
            "Move every image into the folder of its class, or all of them into one folder for data without classes."
        )
    return Part(files, [entry.name.split("/")[depth] for entry in files])


def _empty(others: list[str], depth: int) -> list[str]:
    return [name for name in others if name.endswith("/") and name.count("/") == depth + 1]


def _same_classes(path: Path, split: str, part: Part, known: set[str]) -> None:
    if part.classes is None:
        raise ValueError(
            f"{path}: train has class folders, {split} has none, so that its labels are unknown. "
            f"Sort the images of {split} into folders named like those of train."
        )
    unknown = sorted(set(part.classes) - known)
    if unknown:
        raise ValueError(
            f"{path}: {split} has {len(unknown)} class folders that train does not have, such as {unknown[0]!r}. "
            f"Name them like those of train, such as {min(known)!r}."
        )


def build(
    files: Sequence[Encoded], labels: Tensor, classes: tuple[str, ...], split: str, source: str, options: Options
) -> ImageData:
    """Encoded images as data: checked, then decoded into memory if they fit and have one size, else when asked for."""
    check_on_error(options.on_error)
    if options.limit is not None and options.limit < len(files):
        chosen = balanced(labels, options.limit, options.seed).sort().values
        files, labels = [files[i] for i in chosen.tolist()], labels[chosen]
    notes: list[str] = []
    sizes: Counter[tuple[int, int]] = Counter()
    broken: tuple[str, ...] = ()
    if options.check or options.in_memory:
        good, sizes, modes = look_at_headers(files, options.on_error)
        notes += describe_modes(modes)
        if len(good) < len(files):
            broken = _report_broken(files, good, source)
            files, labels = [files[i] for i in good], labels[torch.tensor(good)]
    own_size = next(iter(sizes)) if len(sizes) == 1 else None
    lazy = EncodedImages(files, size=options.size, own_size=own_size, on_error=options.on_error)
    if options.size and set(sizes) != {lazy.size}:
        notes.append(f"{_sizes(sizes)}: shorter side scaled to {options.size}, middle cut out")
    elif len(sizes) > 1:
        notes.append(f"{_sizes(sizes)}: batches need size=..., which scales and crops")
    data = ImageData(lazy, labels, classes, split, source, tuple(notes), broken)
    if _into_memory(data, options):
        return _decoded(data, lazy)
    return data


def _report_broken(files: Sequence[Encoded], good: list[int], source: str) -> tuple[str, ...]:
    broken = tuple(str(files[i]) for i in sorted(set(range(len(files))) - set(good)))
    if not good:
        raise ValueError(f"{source}: none of {len(files)} files can be read as an image, such as {broken[0]}.")
    warnings.warn(f"{len(broken)} broken files skipped, the first is {broken[0]}", stacklevel=5)
    return broken


def _sizes(sizes: Counter[tuple[int, int]]) -> str:
    if not sizes:
        return "images of unknown sizes"
    (height, width), count = sizes.most_common(1)[0]
    return f"images of {len(sizes)} sizes, {count} of {height}x{width}"


def _into_memory(data: ImageData, options: Options) -> bool:
    if options.in_memory is False or (options.in_memory is None and not options.check):
        return False
    if data.size is None:
        if options.in_memory:
            raise ValueError(
                f"{data.source}: in_memory=True needs images of one size; {data.notes[-1]}. Give size=... to load too."
            )
        return False
    fits = 3 * data.size[0] * data.size[1] * len(data) <= options.memory_limit
    return fits or options.in_memory is True


def _decoded(data: ImageData, lazy: EncodedImages) -> ImageData:
    assert lazy.size is not None
    pixels = torch.empty(len(lazy), 3, *lazy.size, dtype=torch.uint8)

    def fill(index: int) -> bool:
        image = lazy.try_decode(index)
        if image is not None:
            pixels[index] = image
        return image is not None

    kept = torch.tensor(in_threads(fill, range(len(lazy))))
    if not kept.all():
        pixels, data = pixels[kept], data.subset(kept.nonzero().flatten())
    return replace(data, images=pixels, left_out=(*data.left_out, *lazy.skipped))
