"""Images by name or path; the format is found out."""

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

from orthocond._checks import check_count
from orthocond.lab.data.archives import ARCHIVES, is_archive
from orthocond.lab.data.cifar import is_cifar, read_cifar
from orthocond.lab.data.folders import read_images
from orthocond.lab.data.hub import is_hub, read_hub
from orthocond.lab.data.idx import FASHION, is_idx, read_idx
from orthocond.lab.data.images import ImageData
from orthocond.lab.data.known import KNOWN, data_root, names
from orthocond.lab.data.options import MissingSplitError, Options
from orthocond.lab.data.rendering import sprites
from orthocond.lab.text import nearest


class Pair(NamedTuple):
    """Images to train on, and images to evaluate on."""

    train: ImageData
    held_out: ImageData


def load(
    source: str | os.PathLike[str],
    *,
    split: str | None = None,
    root: str | os.PathLike[str] | None = None,
    size: int | None = None,
    limit: int | None = None,
    in_memory: bool | None = None,
) -> ImageData:
    """Images by name or path; the format is found out.

    Names: ``"sprites"`` (built in), ``"cifar10"``, ``"cifar100"``, ``"fashion-mnist"`` (the official files in
    ``root``), ``"hf:name"`` or ``"hf:name:configuration"`` (Hugging Face datasets), and whatever folder or archive lies
    in ``root``. Paths: a folder, zip or tar with a folder for each class, with ``train``, ``val`` and ``test`` folders
    of these, or with images alone; the folder or tar.gz of CIFAR; a folder of IDX files; what ``datasets`` saves.

    All images become RGB. Every file is opened before anything else, so that a broken one does not stop a training.
    Nothing is downloaded (but by ``datasets``), unpacked or executed.

    Args:
        source: The name or path.
        split: ``"train"``, ``"val"`` or ``"test"``; if None, ``"train"`` or all of data without splits.
        root: Folder in which names are looked up; the environment variable ``ORTHOCOND_DATA``, else ``data``, if None.
        size: Scale the shorter side to it and cut out the middle; for sprites, their side.
        limit: Take this many images at random, each class in its share.
        in_memory: Whether to decode now or when asked for; if None, now if all have one size and fit into 2 GiB.

    Raises:
        FileNotFoundError: If there is no such name or path; the message gives the nearest name.
        ValueError: If an argument is not valid, or the data is broken, empty, or lacks the split; the message names
            the file and the remedy.
        ImportError: If Hugging Face datasets is needed and missing.

    Example:
        >>> load("sprites", limit=50)
        Sprites 'sprites', split 'train': 50 images 3x32x32 in memory (153600 bytes), 12 classes
    """
    for name, value in (("size", size), ("limit", limit)):
        if value is not None:
            check_count(value, f"load({name}=...)", 1)
    options = Options(split, size, limit, in_memory)
    source = os.fspath(source)
    if source == "sprites":
        _check_in_memory(source, in_memory)
        return sprites(limit, size=size or 32, split=split)
    cache = Path(root) if root else None
    if source.startswith("hf:"):
        return read_hub(source[3:], options, cache)
    path = _find(source, data_root(root))
    if is_hub(path):
        return read_hub(path, options, cache)
    if is_idx(path):
        data = read_idx(path, options, FASHION if source == "fashion-mnist" else ())
    elif is_cifar(path):
        data = read_cifar(path, options)
    else:
        return read_images(path, options)
    _check_in_memory(source, in_memory)
    if limit is not None and limit < len(data):
        data = data.sample(limit)
    return data.resized(size) if size else data


def load_pair(
    source: str | os.PathLike[str],
    *,
    root: str | os.PathLike[str] | None = None,
    size: int | None = None,
    limit: int | None = None,
) -> Pair:
    """Training and held-out images: the splits ``train`` and ``val``, else ``test``, else a tenth of each class.

    Args:
        source: The name or path, as for `load`.
        root: Folder of names.
        size: Side of the images.
        limit: Number of training images; all held-out images are taken.

    Raises:
        FileNotFoundError: As `load`.
        ValueError: As `load`.

    Example:
        >>> [len(data) for data in load_pair("sprites", limit=100)]
        [100, 2000]
    """

    def part(split: str | None, count: int | None) -> ImageData:
        return load(source, split=split, root=root, size=size, limit=count)

    for split in ("val", "test"):
        try:
            held_out = part(split, None)
        except MissingSplitError:
            continue
        return Pair(part("train", limit), held_out)
    train, held_out = part(None, None).split_off()
    return Pair(train.sample(limit) if limit is not None and limit < len(train) else train, held_out)


def _check_in_memory(source: str, in_memory: bool | None) -> None:
    if in_memory is False:
        raise ValueError(f"{source} is always in memory; leave out in_memory=False.")


def _folders_beside(source: str) -> list[str]:
    """Folders that may be meant by a path that does not exist."""
    parent = Path(source).expanduser().parent
    with contextlib.suppress(OSError):  # no such folder, or one that cannot be read
        return [str(path) for path in parent.iterdir() if path.is_dir()]
    return []


def _find(source: str, root: Path) -> Path:
    if source in KNOWN:
        found = KNOWN[source].find(root)
        if found is not None:
            return found
        raise FileNotFoundError(
            f"{source} needs {' or '.join(KNOWN[source].places[:2])} in {root}. `orthocond data get {source}` gets it "
            "or says how; if it lies elsewhere, give --data-root (in Python: root=...) or the environment variable "
            "ORTHOCOND_DATA."
        )
    candidates = [Path(source).expanduser(), *(root / (source + ending) for ending in ("", *ARCHIVES))]
    for path in candidates:
        if path.exists():
            if path.is_dir() or is_archive(path) or is_hub(path):
                return path
            raise ValueError(f"{path} is not a data set: a folder, {', '.join(ARCHIVES)} or .parquet is needed.")
    known = names(root)
    raise FileNotFoundError(
        f"there is no data set or path {source!r}.{nearest(source, [*known, *_folders_beside(source)])} "
        f"Known are {', '.join(known)}, hf:<name of a Hugging Face data set>, and paths."
    )
