"""Runs as people name them on the command line."""

from pathlib import Path
from typing import TYPE_CHECKING

from orthocond.lab.config import Config
from orthocond.lab.errors import UsageError

if TYPE_CHECKING:
    from orthocond.lab.runs import Run


def find_run(name: str | Path, runs: str | Path = "runs") -> "Run":
    """A run by its folder, by the name of that folder, or by its number; the first process looks.

    Raises:
        UsageError: If there is none; the text gives the nearest name.
    """
    from orthocond.lab.runs import Run, ranks
    from orthocond.lab.runs.finding import find_run as find

    def path() -> bytes:
        try:
            return str(find(name, runs)).encode()
        except (OSError, ValueError) as error:  # no such run, or a name that no file can have
            raise UsageError(str(error)) from error

    return Run.open(ranks.from_rank_0(path).decode())


def last_run_with(config: Config, runs: str | Path) -> "Run | None":
    """The last run in a folder that has this configuration, or None; the first process looks."""
    from orthocond.lab.runs import Run, ranks
    from orthocond.lab.runs.finding import runs_with

    def path() -> bytes:
        found = runs_with(config, runs)
        return str(found[-1].path).encode() if found else b""

    last = ranks.from_rank_0(path).decode()
    return Run.open(last) if last else None
