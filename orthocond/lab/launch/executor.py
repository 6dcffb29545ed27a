"""Where trainings run: one interface for this machine and for clusters."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from orthocond.lab.runs import Run


@dataclass(frozen=True)
class Ending:
    """How a training ended.

    Attributes:
        run: Its run.
        code: Its exit code; 0 if it is done.
        text: The last lines of what it said.
        log: The file with all of it.
    """

    run: Run
    code: int
    text: str = ""
    log: Path | None = None


class Executor(Protocol):
    """Runs trainings. `launch` submits them once, asks again and again which have ended, and tells it to stop.

    Attributes:
        pause: Seconds between two questions.
    """

    pause: float

    def submit(self, runs: Sequence[Run], data_root: str | None) -> None:
        """Take trainings on; they begin now, or when there is room."""

    def ended(self) -> list[Ending]:
        """The trainings that have ended since the last call."""

    def news(self) -> list[str]:
        """What people should know, since the last call."""

    def stop(self) -> None:
        """End, or leave, what has not ended; returns when that is done."""
