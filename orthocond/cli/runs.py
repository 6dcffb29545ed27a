"""Runs as people name them."""

import json
import re
from pathlib import Path

from orthocond.cli.settings import UsageError
from orthocond.lab.config import to_json
from orthocond.lab.data.options import nearest
from orthocond.lab.experiments import Config
from orthocond.lab.runs import Run, ranks


def find_run(name: str | Path, runs: str | Path = "runs") -> Run:
    """A run by its folder, by the name of that folder, or by its number.

    Raises:
        UsageError: If there is none; the text gives the nearest name.
    """
    return Run.open(ranks.from_rank_0(lambda: str(_find(str(name), Path(runs))).encode()).decode())


def _find(name: str, runs: Path) -> Path:
    for path in (Path(name), runs / name):
        if (path / "config.json").is_file():
            return path
    folders = _folders(runs)
    numbered = [path for path in folders if name.isdecimal() and int(path.name.partition("-")[0]) == int(name)]
    if numbered:
        return numbered[0]
    there = nearest(name, [path.name for path in folders]) if folders else " There are none yet."
    raise UsageError(f"There is no run {name!r}, neither as a folder nor in {runs}.{there}")


def run_with(config: Config, runs: str | Path) -> Run | None:
    """The last run in a folder that has this configuration, or None."""
    values = to_json(config)

    def last() -> bytes:
        same = (p for p in reversed(_folders(Path(runs))) if json.loads((p / "config.json").read_bytes()) == values)
        return str(next(same, "")).encode()

    path = ranks.from_rank_0(last).decode()
    return Run.open(path) if path else None


def _folders(runs: Path) -> list[Path]:
    """The runs in a folder, in the order of their numbers."""
    found = runs.iterdir() if runs.is_dir() else ()
    return sorted(p for p in found if re.match(r"\d+-", p.name) and (p / "config.json").is_file())
