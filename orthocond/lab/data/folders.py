"""Folders, zips and tars of images: class folders, train/val/test folders, or images without classes."""

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
    describe_modes,
    in_threads,
    read_headers,
)
from orthocond.lab.data.images import ImageData, balanced
from orthocond.lab.data.options import SPLITS, Options, choose_split
from orthocond.lab.text import printable

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")


_MEMORY = 2**31  # bytes up to which images are decoded at once
_SEED = 0  # of the choice of fewer images


class Member(NamedTuple):
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
    if empty:
        raise ValueError(
            f"{path}/{printable(empty[0])} holds no images ({len(empty)} empty class folders in all). "
            "Fill or remove them."
        )
    index = {name: i for i, name in enumerate(names)}
    files, classes = parts[split]
    labels = torch.tensor([index[name] for name in classes] if classes else [-1] * len(files))
    return build(files, labels, tuple(names), split, str(path), options)


def layout(path: Path) -> tuple[dict[str, Member], list[str]]:
    """The splits of a folder or archive (``"all"`` if it has none), and its empty class folders.

    Raises:
        ValueError: If there are no images, or loose images beside class folders.
    """
    files, others = entries(path, _is_image)
    if not files:
        found = f" It holds {len(others)} other files, such as {printable(others[0])}." if others else ""
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


def _classes(path: Path, files: list[Entry], depth: int) -> Member:
    loose = [entry.name for entry in files if entry.name.count("/") == depth]
    if len(loose) == len(files):
        return Member(files, None)
    if loose:
        raise ValueError(
            f"{path} has {len(loose)} images beside class folders, such as {printable(loose[0])}. "
            "Move every image into the folder of its class, or all of them into one folder for data without classes."
        )
    return Member(files, [entry.name.split("/")[depth] for entry in files])


def _empty(others: list[str], depth: int) -> list[str]:
    return [name for name in others if name.endswith("/") and name.count("/") == depth + 1]


def _same_classes(path: Path, split: str, part: Member, known: set[str]) -> None:
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
    if options.limit is not None and options.limit < len(files):
        chosen = balanced(labels, options.limit, _SEED).sort().values
        files, labels = [files[i] for i in chosen.tolist()], labels[chosen]
    sizes, modes = read_headers(files)
    notes = describe_modes(modes)
    own_size = next(iter(sizes)) if len(sizes) == 1 else None
    encoded = EncodedImages(files, size=options.size, own_size=own_size)
    if options.size and set(sizes) != {encoded.size}:
        notes.append(f"{_sizes(sizes)}: shorter side scaled to {options.size}, middle cut out")
    elif len(sizes) > 1:
        notes.append(f"{_sizes(sizes)}: batches need size=..., which scales and crops")
    data = ImageData(encoded, labels, classes, split, source, tuple(notes))
    return replace(data, images=_decoded(encoded)) if _into_memory(data, options) else data


def _sizes(sizes: Counter[tuple[int, int]]) -> str:
    (height, width), count = sizes.most_common(1)[0]
    return f"images of {len(sizes)} sizes, {count} of {height}x{width}"


def _into_memory(data: ImageData, options: Options) -> bool:
    if options.in_memory is False:
        return False
    if data.size is None:
        if options.in_memory:
            raise ValueError(
                f"{data.source}: in_memory=True needs images of one size; {data.notes[-1]}. Pass size=... to load too."
            )
        return False
    fits = 3 * data.size[0] * data.size[1] * len(data) <= _MEMORY
    return fits or options.in_memory is True


def _decoded(images: EncodedImages) -> Tensor:
    assert images.size is not None
    pixels = torch.empty(len(images), 3, *images.size, dtype=torch.uint8)

    def fill(index: int) -> None:
        pixels[index] = images.decode(index)

    in_threads(fill, range(len(images)))
    return pixels
