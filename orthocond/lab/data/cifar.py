"""CIFAR-10 and CIFAR-100 in their official Python files, as a folder or as tar.gz; read without running any code."""

import io
import math
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np
import torch

from orthocond.lab.data.archives import Entry, entries, is_archive
from orthocond.lab.data.images import ImageData
from orthocond.lab.data.options import Options, choose_split
from orthocond.lab.text import printable

_TEN = {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)}
_HUNDRED = {"train": ("train",), "test": ("test",)}
_SIGNS = (("batches.meta",), ("data_batch_1",), ("meta", "train"), ("meta", "test"))
_NAMES = {"batches.meta", "meta", *_TEN["train"], *_TEN["test"], "train", "test"}


# What a pickle of an array calls, in place of what NumPy would call. Nothing of NumPy's is made from what a file says
# but an array of unsigned bytes. All of them are classes that refuse to be changed by a pickle: one could change the
# attributes of a function.


class _Dtype:
    """Stands for a dtype: unsigned bytes, and no other."""

    __slots__ = ()

    def __init__(self, kind: object, *_: object) -> None:
        if kind not in ("u1", b"u1", "uint8", b"uint8"):
            raise pickle.UnpicklingError(f"its numbers are of the kind {str(kind)[:40]}, and only bytes are allowed")

    def __setstate__(self, state: object) -> None:
        plain = isinstance(state, tuple) and len(state) == 8 and state[0] == 3 and state[1] in ("|", b"|")
        if not plain or state[2:5] != (None, None, None):  # type: ignore[index]
            raise pickle.UnpicklingError("its numbers have fields of their own, and only bytes are allowed")


class _Array:
    """Stands for an array that is made empty and then filled, as pickles of protocols below 5 do."""

    __slots__ = ("value",)

    def __init__(self, *_: object) -> None:
        self.value: np.ndarray | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, content = state
        self.value = _bytes_as_array(content, dtype, shape, "F" if fortran else "C")


class _Filled(_Array):
    """Stands for an array that is made from a buffer, as pickles of protocol 5 do."""

    __slots__ = ()

    def __init__(self, content: Any, dtype: Any, shape: Any, order: Any) -> None:
        self.value = _bytes_as_array(content, dtype, shape, order)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it changes an array that is made already")


class _Encoded(bytes):
    """Stands for ``codecs.encode``, by which Python 3 writes bytes for Python 2."""

    __slots__ = ()

    def __new__(cls, text: Any, encoding: Any) -> "_Encoded":
        if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
            raise pickle.UnpicklingError("it encodes something else than Latin-1 text")
        return super().__new__(cls, text.encode("latin1"))

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it changes bytes")


# The modules were renamed in NumPy 2, and the files were written by NumPy 1.
_ALLOWED: dict[tuple[str, str], type] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _Encoded,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _Array for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _Filled for core in ("core", "_core")},
}


def _bytes_as_array(content: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray:
    if not isinstance(dtype, _Dtype):
        raise pickle.UnpicklingError("its numbers are not bytes")
    if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
        raise pickle.UnpicklingError("the shape of its array is not made of whole numbers")
    if not isinstance(content, bytes | bytearray) or len(content) != math.prod(shape) or order not in ("C", "F"):
        raise pickle.UnpicklingError(f"its array does not have the bytes of its shape {shape[:4]}")
    return np.frombuffer(bytes(content), np.uint8).reshape(shape, order=order)


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it wants to call {module}.{name}, and only NumPy arrays are allowed")
        return _ALLOWED[module, name]


def _check_memo(content: bytes) -> None:
    """Refuse places of the memo beyond what a pickle of this length needs: the memo is as long as its last place."""
    stored = 0
    for operation, argument, _ in pickletools.genops(content):
        stored += operation.name == "MEMOIZE"
        if operation.name in ("PUT", "BINPUT", "LONG_BINPUT"):
            stored += 1
            if not isinstance(argument, int) or not 0 <= argument <= 2 * stored + 256:
                raise pickle.UnpicklingError(f"it stores object {stored} at place {argument} of its memo")


def unpickle(content: bytes, name: object) -> Any:
    """Numbers, strings, containers and arrays of bytes from a pickle; anything else is refused before it can run.

    Raises:
        ValueError: If the pickle is broken or asks for anything else.
    """
    try:
        _check_memo(content)
        return _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # a broken pickle can raise nearly anything
        raise ValueError(
            f"{name} is not a CIFAR file ({printable(error)}). Download the official Python version again."
        ) from error


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
    classes = _class_names(files[meta], b"label_names" if ten else b"fine_label_names")
    parts = [_batch(files[name], b"labels" if ten else b"fine_labels") for name in layout[split]]
    images = torch.from_numpy(np.concatenate([images for images, _ in parts]))
    labels = torch.tensor([label for _, labels in parts for label in labels], dtype=torch.int64)
    return ImageData(images, labels, classes, split, str(path))


def _content(file: Entry) -> dict[Any, Any]:
    try:
        content = unpickle(file.read(), file)
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({printable(error)}). Copy it again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} is not a CIFAR file: it holds a {type(content).__name__}, not a dictionary.")
    return content


def _field(content: dict[Any, Any], key: bytes, file: Entry) -> Any:
    for name in (key, key.decode()):
        if name in content:
            return content[name]
    raise ValueError(f"{file} is not a CIFAR file: it lacks {key.decode()!r}.")


def _class_names(file: Entry, key: bytes) -> tuple[str, ...]:
    names = _field(_content(file), key, file)
    if not isinstance(names, list) or not all(isinstance(name, bytes | str) for name in names):
        raise ValueError(f"{file}: {key.decode()!r} must be a list of names.")
    return tuple(name if isinstance(name, str) else name.decode(errors="backslashreplace") for name in names)


def _batch(file: Entry, key: bytes) -> tuple[np.ndarray, list[int]]:
    batch = _content(file)
    array, labels = _field(batch, b"data", file), _field(batch, key, file)
    pixels = getattr(array, "value", None) if isinstance(array, _Array) else None
    if pixels is None or pixels.ndim != 2 or pixels.shape[1] != 3072:
        got = type(array).__name__ if pixels is None else pixels.shape
        raise ValueError(f"{file}: 'data' must be uint8 (N, 3072); got {got}.")
    if not isinstance(labels, list) or not all(type(label) is int and abs(label) < 2**31 for label in labels):
        raise ValueError(f"{file}: {key.decode()!r} must be a list of whole numbers.")
    if len(labels) != len(pixels):
        raise ValueError(f"{file}: {len(pixels)} images and {len(labels)} labels.")
    return pixels.reshape(-1, 3, 32, 32), labels
