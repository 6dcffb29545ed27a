"""Hugging Face `datasets`: from the hub or its cache, saved to disk, Parquet or Arrow files."""

import importlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, overload

import torch
from torch import Tensor

from orthocond.lab.data.archives import read_file
from orthocond.lab.data.folders import build
from orthocond.lab.data.images import ImageData
from orthocond.lab.data.options import Options, choose_split

_LABELS = ("label", "labels", "fine_label")


def is_hub(path: Path) -> bool:
    """Whether a path was written by ``datasets`` or holds Parquet files."""
    if path.is_file():
        return path.suffix in (".parquet", ".arrow")
    saved = any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))
    return saved or any(path.glob("*.parquet")) or any(path.glob("data/*.parquet"))


def read_hub(source: str | Path, options: Options, root: Path | None = None) -> ImageData:
    """Images of a data set of Hugging Face ``datasets``.

    Args:
        source: A name on the hub, ``name`` or ``name:configuration``, or a path for which `is_hub` holds.
        options: What to read.
        root: Where ``datasets`` keeps its cache; its own place if None.

    Raises:
        ImportError: If ``datasets`` is not installed.
        ValueError: If the data set, the split or the column of images or labels is not found.
    """
    datasets = _import(source)
    parts = _open(datasets, source, root)
    split = choose_split(options.split, parts, source)
    part = parts[split]
    image, label = _columns(datasets, part, source)
    classes = _class_names(part.features[label]) if label else ()
    part = part.cast_column(image, datasets.Image(decode=False))
    files, labels = _Rows(part, image, str(source)), _labels(part, label, source)
    if label and not classes:
        classes = tuple(map(str, range(int(labels.max()) + 1)))
    return build(files, labels, classes, split, str(source), options)


def fetch(source: str, root: Path | None = None) -> None:
    """Let ``datasets`` download a data set of the hub into its cache.

    Raises:
        ImportError: If ``datasets`` is not installed.
        ValueError: If the data set is not found or the network fails.
    """
    _open(_import(source), source, root)


def _import(source: object) -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise ImportError(f"{source} needs Hugging Face datasets: pip install datasets") from error


def _open(datasets: Any, source: str | Path, root: Path | None) -> Any:
    try:
        if isinstance(source, str):
            name, _, configuration = source.partition(":")
            cache = str(root) if root else None
            return datasets.load_dataset(name, configuration or None, cache_dir=cache)
        if (source / "dataset_dict.json").is_file() or (source / "state.json").is_file():
            saved = datasets.load_from_disk(str(source))
            return saved if isinstance(saved, dict) else {_name(saved): saved}
        if source.is_file():
            kind = source.suffix[1:]
            part = datasets.load_dataset(kind, data_files=str(source), split="train", cache_dir=root)
            return {"all": part}
        return datasets.load_dataset(str(source), cache_dir=root)
    except Exception as error:  # the library raises its own errors, the network's and the file formats'
        raise ValueError(
            f"datasets cannot open {source} ({type(error).__name__}: {error}). Without a network only data sets that "
            "were loaded before, or saved with save_to_disk, can be used."
        ) from error


def _name(part: Any) -> str:
    return str(part.split) if part.split else "all"


def _columns(datasets: Any, part: Any, source: object) -> tuple[str, str | None]:
    features = part.features
    images = [name for name, kind in features.items() if isinstance(kind, datasets.Image)]
    if len(images) != 1:
        raise ValueError(f"{source} needs one column of images; of {', '.join(features)} these are: {images}.")
    named = [name for name in _LABELS if name in features]
    typed = [name for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
    if not named and len(typed) > 1:
        raise ValueError(
            f"{source} has several labels: {', '.join(typed)}. Save it with one "
            "of them, called label (rename_column, remove_columns and save_to_disk of datasets)."
        )
    return images[0], next(iter([*named, *typed]), None)


def _class_names(kind: Any) -> tuple[str, ...]:
    return tuple(getattr(kind, "names", None) or ())


def _labels(part: Any, label: str | None, source: object) -> Tensor:
    if label is None:
        return torch.full((len(part),), -1)
    labels = list(part[label])
    _check_whole(labels, label, source)
    return torch.tensor(labels, dtype=torch.int64)


def _check_whole(labels: list[int], label: str | None, source: object) -> None:
    wrong = next((value for value in labels if not isinstance(value, int)), None)
    if wrong is not None:
        raise ValueError(
            f"{source}: column {label!r} needs whole numbers as labels; got {wrong!r}. "
            "Convert it with class_encode_column of datasets and save it."
        )


@dataclass(frozen=True)
class _Row:
    rows: "_Rows"
    index: int

    def read(self) -> bytes:
        value = self.rows.part[self.index][self.rows.image]
        return value["bytes"] if value["bytes"] is not None else read_file(Path(value["path"]))

    def open(self) -> BinaryIO:
        return io.BytesIO(self.read())

    def __str__(self) -> str:
        return f"{self.rows.source}, row {self.index}"


class _Rows(Sequence[_Row]):
    """Encoded images in a table on disk."""

    def __init__(self, part: Any, image: str, source: str) -> None:
        self.part = part.select_columns([image])
        self.image = image
        self.source = source

    def __len__(self) -> int:
        return len(self.part)

    @overload
    def __getitem__(self, index: int) -> _Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[_Row]: ...
    def __getitem__(self, index: int | slice) -> _Row | list[_Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return _Row(self, index % len(self))

    def __iter__(self) -> Iterator[_Row]:
        return (_Row(self, i) for i in range(len(self)))
