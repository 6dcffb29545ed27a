"""What every table is: trainings that it needs, and files that it writes from them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from orthocond.lab.config import Config, Scale
from orthocond.lab.progress import Progress
from orthocond.lab.runs.finding import name_of
from orthocond.lab.tables.records import Record


class Number(NamedTuple):
    """A mean, and where the paper gives them its standard deviation and the best of all runs."""

    mean: float
    std: float | None = None
    best: float | None = None


@dataclass(frozen=True)
class Material:
    """What a table is made of.

    Attributes:
        scale: ``paper`` or ``laptop``.
        seeds: How many seeds were asked for.
        records: The trainings that have ended, by their configuration.
        measure: Whether times may be measured now.
        remarks: What the reader of the table should know about the trainings.
        progress: Called while times are measured, as while trainings run.
    """

    scale: Scale
    seeds: int
    records: Mapping[Config, Record]
    measure: bool = True
    remarks: tuple[str, ...] = ()
    progress: Callable[[int, Progress], None] | None = None


@dataclass(frozen=True)
class Table(ABC):
    """A table or figure: to add one, write a subclass or an instance of `Comparison`, and list it in `TABLES`.

    Attributes:
        name: What people type.
        title: Its heading.
        text: What it shows, in a sentence or two.
    """

    name: str
    title: str
    text: str

    def header(self, material: Material) -> dict[str, Any]:
        """What the JSON of every table begins with."""
        return {"table": self.name, "title": self.title, "text": self.text, "scale": material.scale}

    @abstractmethod
    def configs(self, scale: Scale, seeds: int) -> list[Config]:
        """The trainings that it needs; none if it measures by itself."""

    def named(self, scale: Scale, seeds: int) -> Iterator[tuple[str, Config]]:
        """The rows by the words that a reader sees, each with one of the trainings that it needs."""
        return ((name_of(config), config) for config in self.configs(scale, seeds))

    @abstractmethod
    def write(self, folder: Path, material: Material) -> None:
        """Write its files into a folder that exists.

        Args:
            folder: The folder.
            material: What it is made of; some trainings may be missing.

        Raises:
            FileNotFoundError: If there is nothing to write.
        """
