"""Fashion-MNIST, MNIST and their like: IDX files, gzipped or not."""

import gzip
import io
import math
import zlib
from pathlib import Path

import numpy as np
import torch

from orthocond.lab.data.archives import Entry, check_expansion, entries
from orthocond.lab.data.images import ImageData
from orthocond.lab.data.options import Options, choose_split
from orthocond.lab.text import printable

FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_PREFIX = {"train": "train", "test": "t10k"}


def _is_idx(name: str) -> bool:
    return "ubyte" in name.split("/")[-1] and ("-images" in name or "-labels" in name)


def is_idx(path: Path) -> bool:
    """Whether a folder holds IDX files."""
    return path.is_dir() and any(_is_idx(file.name) for file in path.iterdir())


def read_idx(path: Path, options: Options, classes: tuple[str, ...] = ()) -> ImageData:
    """Gray images of IDX files as RGB.

    Args:
        path: Folder with ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte``, and ``t10k-`` for the test split.
        options: What to read.
        classes: Names of the classes; without, ``"0"``, ``"1"``, … or Fashion-MNIST's if the path says so.

    Raises:
        ValueError: If a file is missing or broken.
    """
    files, _ = entries(path, _is_idx)
    named = {split: [e for e in files if e.name.split("/")[-1].startswith(p)] for split, p in _PREFIX.items()}
    split = choose_split(options.split, [split for split, found in named.items() if found], path)
    images = _array(_one(path, named[split], "-images", split), 3)
    labels = torch.from_numpy(_array(_one(path, named[split], "-labels", split), 1)).long()
    if not classes:
        fashion = "fashion" in str(path).lower()
        classes = FASHION if fashion else tuple(map(str, range(int(labels.max()) + 1 if len(labels) else 0)))
    gray = torch.from_numpy(images)[:, None]
    # Three equal channels as a view: the memory of one.
    return ImageData(gray.expand(-1, 3, -1, -1), labels, classes, split, str(path), ("gray images became RGB",))


def _one(path: Path, files: list[Entry], kind: str, split: str) -> Entry:
    for entry in files:
        if kind in entry.name:
            return entry
    raise ValueError(f"{path} lacks the file {_PREFIX[split]}{kind}-idx{3 if kind == '-images' else 1}-ubyte(.gz).")


def _array(entry: Entry, ndim: int) -> np.ndarray:
    try:
        content = entry.read()
        if content[:2] == b"\x1f\x8b":
            content = _unpacked(content, entry)
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{entry} is broken ({printable(error)}). Copy it again.") from error
    if content[:4] != bytes((0, 0, 8, ndim)):
        raise ValueError(f"{entry} is not an IDX file of {ndim} dimensions: it begins with {content[:4].hex(' ')}.")
    start = 4 + 4 * ndim
    shape = _shape(content, ndim)
    if len(shape) < ndim or len(content) != start + math.prod(shape):
        raise ValueError(f"{entry} says {shape} and has {len(content)} bytes. It is not complete: copy it again.")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy()


def _shape(content: bytes, ndim: int) -> list[int]:
    sizes = content[4 : 4 + 4 * ndim]
    return [int.from_bytes(sizes[i : i + 4], "big") for i in range(0, len(sizes) - 3, 4)]


def _unpacked(content: bytes, entry: Entry) -> bytes:
    """The bytes of a gzipped file, as many as its head says and one more, so that a small file cannot fill memory."""
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as stream:
        head = stream.read(4)
        sizes = stream.read(4 * head[3]) if len(head) == 4 else b""
        size = math.prod(_shape(head + sizes, len(sizes) // 4))
        check_expansion(entry, len(content), size)
        return head + sizes + stream.read(size + 1)
