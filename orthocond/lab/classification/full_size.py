"""The networks of the paper at their full size for a few real steps: every method runs on them, and what it costs."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from orthocond.lab.classification.config import GRAMMAR, Classification, Method
from orthocond.lab.classification.networks.build import build
from orthocond.lab.classification.presets import PRESETS
from orthocond.lab.config import Config, Scale
from orthocond.lab.runs.files import write_atomically
from orthocond.lab.tables.comparison import label
from orthocond.lab.tables.records import Record
from orthocond.lab.tables.table import Material, Table
from orthocond.lab.tables.text import grid, write_json

_STEPS = 3
# Preset, its name for people, images of a batch: as many as a CPU gets through in seconds.
_NETWORKS = (
    ("dbn-cifar100-resnet50", "ResNet-50", 16),
    ("dbn-cifar100-densenet121", "DenseNet-121", 16),
    ("dbn-cifar100-mobilenetv2", "MobileNet-v2", 16),
    ("gcp-imagenet-resnet18", "ResNet-18, covariance pooling", 8),
)
_NOTES = (
    f"{_STEPS} steps of each method with the networks, image sizes, learning rates and augmentation of the paper; only "
    "batches are smaller: 16 images of 32x32 from CIFAR-100, 8 images of 224x224 from Tiny-ImageNet.",
    "Losses are those before each step, on different batches. Seconds are the median of the steps after the first, "
    "where several processes share the machine: they tell the order of magnitude, and are no benchmark.",
)


@dataclass(frozen=True)
class Steps(Table):
    """A few steps of every method on every network of the paper, at its scale whatever scale is asked for."""

    def configs(self, scale: Scale, seeds: int) -> list[Config]:
        """One training for each network and method."""
        return [_config(name, method, batch) for name, _, batch in _NETWORKS for method in GRAMMAR.names]

    def write(self, folder: Path, material: Material) -> None:
        """Write table.md and table.json."""
        networks = []
        for name, title, batch in _NETWORKS:
            configs = {method: _config(name, method, batch) for method in GRAMMAR.names}
            rows = {m: _row(material.records[c]) for m, c in configs.items() if c in material.records}
            networks.append({"preset": name, "title": title, "parameters": _parameters(configs["svd"]), "rows": rows})
        content = {"table": self.name, "title": self.title, "networks": networks, "remarks": list(material.remarks)}
        write_json(content, folder / "table.json")
        write_atomically(folder / "table.md", self._markdown(content).encode())

    def _markdown(self, content: dict[str, Any]) -> str:
        parts = [f"# {self.title}", self.text]
        for network in content["networks"]:
            rows = [
                [
                    label(Method(name)),
                    ", ".join(f"{loss:.3f}" for loss in row["losses"]),
                    "yes" if row["finite"] else "no",
                    "-" if row["rank"] is None else f"{row['rank']:g}",
                    f"{row['seconds']:.2f}",
                ]
                for name, row in network["rows"].items()
            ]
            parts.append(f"## {network['title']}: {network['parameters']:,} parameters")
            parts.append(grid(["method", "losses", "finite", "rank of P", "seconds a step"], rows))
        parts += ["## Notes", "\n".join(f"- {note}" for note in (*_NOTES, *content["remarks"])) + "\n"]
        return "\n\n".join(parts)


def _config(name: str, method: str, batch: int) -> Classification:
    config = PRESETS[name]["paper"]
    source = PRESETS[name]["laptop"].data.source
    limit = 1000 if config.model.application == "gcp" else None  # images that are decoded before the first step
    return replace(
        config,
        data=replace(config.data, source=source, limit=limit, held_out=16),
        schedule=replace(config.schedule, steps=_STEPS, batch_size=batch),
        method=Method(method),
        log_every=1,
    )


def _row(record: Record) -> dict[str, Any]:
    losses = record.series("loss")[1]
    seconds = sorted(record.series("step_seconds")[1][1:])
    ranks = record.series("rank")[1]
    return {
        "losses": losses,
        "finite": record.finished and all(map(math.isfinite, losses)),
        "rank": ranks[-1] if ranks else None,
        "seconds": seconds[len(seconds) // 2] if seconds else math.nan,
    }


def _parameters(config: Classification) -> int:
    classes = 1000 if config.model.application == "gcp" else 100
    module = build(config.model, config.method, classes, torch.zeros(1, 3, 32, 32)).module
    return sum(p.numel() for p in module.parameters())


TABLES: tuple[Table, ...] = (
    Steps(
        "paper-scale",
        "Every method on the paper's networks",
        "A few real steps at full size: shapes fit, losses are finite, and what a step costs on a CPU.",
    ),
)
