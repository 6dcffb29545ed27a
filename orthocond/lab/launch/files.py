"""What a training leaves in its run folder for those who watch: its progress, what it said, its job on a cluster."""

import json
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from orthocond.lab.progress import Progress
from orthocond.lab.runs.files import write_atomically

PROGRESS, LOG, JOB = "progress.jsonl", "job.log", "job.json"
_MARK = "=== "  # how the line begins that an attempt writes first
_TEXT = 20_000  # bytes at the end of a log that are read
_LINES = 30  # of what a process said that are kept
_FIELDS = {"step", "steps", "numbers", "stage"}


def header(name: str) -> bytes:
    """The line of a log with which an attempt begins."""
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"{_MARK}{' '.join(filter(None, [name, 'started', when, 'on', socket.gethostname()]))}\n".encode()


def said(log: Path) -> str:
    """The last lines that the last attempt wrote to a log."""
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TEXT))
        text = file.read().decode(errors="replace")
    lines = text.splitlines()
    first = max((place for place, line in enumerate(lines) if line.startswith(_MARK)), default=-1)
    return "\n".join(lines[first + 1 :][-_LINES:])


class Follower:
    """What a training reports, as it reports it; also over a new attempt.

    Args:
        run: The folder of the run.
        from_end: Leave out what was reported before, but for the last line.
    """

    def __init__(self, run: Path, *, from_end: bool = False) -> None:
        self._path = run / PROGRESS
        self._from_end = from_end
        self._file = 0  # which one, by its number in the file system: a new attempt writes a new one
        self._position = 0

    def read(self) -> list[Progress]:
        """What was reported since the last call."""
        try:
            with self._path.open("rb") as file:
                facts = self._path.stat()
                if facts.st_ino != self._file or facts.st_size < self._position:
                    self._file, self._position = facts.st_ino, 0
                file.seek(self._position)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._position += len(whole)
        states = [state for line in whole.splitlines() if (state := _parse(line)) is not None]
        states, self._from_end = states[-1:] if self._from_end else states, False
        return states


def _parse(line: bytes) -> Progress | None:
    """A report; None for anything else."""
    try:
        values = json.loads(line)
        return Progress(**{name: values[name] for name in _FIELDS})
    except (ValueError, KeyError, TypeError):
        return None


def write_code(run: Path, code: int) -> None:
    """Let the reports end with the exit code, for those who do not see the process."""
    with (run / PROGRESS).open("ab") as file:
        file.write(json.dumps({"code": code}).encode() + b"\n")


def read_code(run: Path) -> int | None:
    """The exit code that `write_code` wrote; None if the process has not ended, or was lost."""
    try:
        last = (run / PROGRESS).read_bytes().splitlines()[-1]
        return int(json.loads(last)["code"])
    except (OSError, LookupError, ValueError, TypeError):
        return None


@dataclass(frozen=True)
class Job:
    """The job of a training on a cluster, kept in its run folder.

    Attributes:
        id: Its number there.
        log: What the cluster itself wrote, if the training never began.
        saved: The step of the last checkpoint when it was submitted.
        fruitless: How many jobs before it ended without a new checkpoint.
    """

    id: str
    log: str
    saved: int = 0
    fruitless: int = 0

    def write(self, run: Path) -> None:
        """Keep it in a run folder."""
        write_atomically(run / JOB, json.dumps(asdict(self), indent=1).encode() + b"\n")


def read_job(run: Path) -> Job | None:
    """The last job of a run; None if it has none, or the file is damaged."""
    try:
        return Job(**json.loads((run / JOB).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
