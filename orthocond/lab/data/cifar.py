"""CIFAR-10 and CIFAR-100 in their official Python files, as a folder or as tar.gz; read without running any code."""

import codecs
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from orthocond.lab.data.archives import entries, is_archive
from orthocond.lab.data.images import ImageData
from orthocond.lab.data.options import Options, choose_split

_TEN = {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)}
_HUNDRED = {"train": ("train",), "test": ("test",)}
_SIGNS = (("batches.meta",), ("data_batch_1",), ("meta", "train"), ("meta", "test"))
_NAMES = {"batches.meta", "meta", *_TEN["train"], *_TEN["test"], "train", "test"}

# What a pickled array needs: the function that makes an empty one, or one that makes it from bytes. Their modules were
# renamed in NumPy 2, and the files were written by NumPy 1.
_ARRAY = np.zeros(1)
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): codecs.encode,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _ARRAY.__reduce__()[0] for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _ARRAY.__reduce_ex__(5)[0] for core in ("core", "_core")},
}


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it wants to call {module}.{name}, and only NumPy arrays are allowed")
        return _ALLOWED[module, name]


def unpickle(content: bytes, name: object) -> Any:
    """Numbers, strings, containers and NumPy arrays from a pickle; anything else is refused before it can run.

    Raises:
        ValueError: If the pickle is broken or asks for anything else.
    """
    try:
        return _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # a broken pickle can raise nearly anything
        raise ValueError(f"{name} is not a CIFAR file ({error}). Take the official python version again.") from error


def is_cifar(path: Path) -> bool:
    """Whether a folder or archive holds the official files."""
    if path.is_dir():
        return any(all((path / name).is_file() for name in names) for names in _SIGNS)
    return is_archive(path) and path.name.startswith("cifar-10")


def read_cifar(path: Path, options: Options) -> ImageData:
    """CIFAR-10 or CIFAR-100 (fine labels) from a folder or archive of the official files.

    Raises:
        ValueError: If a file is missing, broken or not what it should be.
    """
    found, _ = entries(path, lambda name: name.split("/")[-1] in _NAMES)
    files = {entry.name.split("/")[-1]: entry for entry in found}
    ten = "data_batch_1" in files or "test_batch" in files
    layout = _TEN if ten else _HUNDRED
    split = choose_split(options.split, [name for name, need in layout.items() if files.keys() & set(need)], path)
    meta = "batches.meta" if ten else "meta"
    missing = [name for name in (*layout[split], meta) if name not in files]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}. Unpack the official archive again.")
    key = b"label_names" if ten else b"fine_label_names"
    classes = tuple(name.decode() for name in _field(unpickle(files[meta].read(), files[meta]), key, files[meta]))
    parts = [_batch(files[name].read(), files[name], b"labels" if ten else b"fine_labels") for name in layout[split]]
    images = torch.from_numpy(np.concatenate([images for images, _ in parts]))
    labels = torch.tensor([label for _, labels in parts for label in labels], dtype=torch.int64)
    return ImageData(images, labels, classes, split, str(path))


def _field(content: Any, key: bytes, file: object) -> Any:
    if not isinstance(content, dict):
        raise ValueError(f"{file} is not a CIFAR file: it holds a {type(content).__name__}, not a dictionary.")
    for name in (key, key.decode()):
        if name in content:
            return content[name]
    raise ValueError(f"{file} is not a CIFAR file: it lacks {key.decode()!r} and has {sorted(map(str, content))}.")


def _batch(content: bytes, file: object, key: bytes) -> tuple[np.ndarray, list[int]]:
    batch = unpickle(content, file)
    pixels, labels = _field(batch, b"data", file), _field(batch, key, file)
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != 3072:
        raise ValueError(f"{file}: 'data' must be uint8 (N, 3072); got {getattr(pixels, 'shape', type(pixels))}.")
    if len(labels) != len(pixels):
        raise ValueError(f"{file}: {len(pixels)} images and {len(labels)} labels.")
    return pixels.reshape(-1, 3, 32, 32), list(labels)
