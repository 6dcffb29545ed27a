"""Tables whose numbers are measured when they are made, from no training."""

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orthocond.lab.config import Config, Scale
from orthocond.lab.runs.files import write_atomically
from orthocond.lab.tables.table import Material, Table
from orthocond.lab.tables.text import to_csv, write_json


@dataclass(frozen=True)
class Measured(Table):
    """A table that trains nothing: it measures, or takes the numbers of the table that is there."""

    def configs(self, scale: Scale, seeds: int) -> list[Config]:
        """None: nothing is trained."""
        return []

    @abstractmethod
    def measure(self, material: Material) -> dict[str, Any]:
        """Measure the content of the table."""

    @abstractmethod
    def lines(self, content: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """The lines of its CSV."""

    @abstractmethod
    def markdown(self, content: Mapping[str, Any]) -> str:
        """The table to read."""

    def draw(self, content: Mapping[str, Any], folder: Path) -> None:
        """Draw its figures, if it has some."""
        return

    def write(self, folder: Path, material: Material) -> None:
        """Write table.md, table.json, table.csv and its figures."""
        path = folder / "table.json"
        if material.measure:
            content = self.measure(material)
        elif path.exists():
            content = json.loads(path.read_text())
        else:
            raise FileNotFoundError(f"There is no {path}; run without --no-train to measure it.")
        write_json(content, path)
        write_atomically(folder / "table.csv", to_csv(self.lines(content)).encode())
        write_atomically(folder / "table.md", self.markdown(content).encode())
        self.draw(content, folder)
