"""``orthocond list``: what there is to train."""

from pathlib import Path
from typing import Literal

from rich.console import Console

from orthocond.cli import data
from orthocond.cli.terminal import make_table
from orthocond.lab.config import Scale
from orthocond.lab.presets import KINDS

_SCALES: tuple[Scale, ...] = ("laptop", "workstation", "paper")


def list_(what: Literal["presets", "methods", "data", "all"] = "all", /, *, data_root: Path | None = None) -> None:
    """Show presets, methods and data sets.

    Args:
        what: One of the three tables, or all.
        data_root: Folder of data sets; by default the environment variable ORTHOCOND_DATA, else `data`.
    """
    console = Console()
    if what in ("presets", "all"):
        rows = [
            (name, *(scales[scale].describe() if scale in scales else "" for scale in _SCALES))
            for kind in KINDS.values()
            for name, scales in kind.presets.items()
        ]
        console.print(make_table("Presets", ("name", *(f"--scale {scale}" for scale in _SCALES)), rows))
    if what in ("methods", "all"):
        for kind in KINDS.values():
            combined = ", ".join(name for name in kind.grammar.names if "+" in name)
            parts = [*kind.grammar.texts().items(), ("a+b", f"several at once; in the paper: {combined}")]
            parts.append(("a@all", "nog or olr in all convolutions and linear layers"))
            parts.append(("a@inner", "nog or olr in all convolutions but the treated layer"))
            console.print(make_table(f"\nMethods of {kind.title}", ("name", "what it does"), parts))
    if what in ("data", "all"):
        console.print()
        data.show(data_root)
