"""How far a run has come: a small record in its folder, replaced as a whole whenever it changes."""

import json
import re
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from orthocond.lab.runs.files import write_atomically

State = Literal["created", "running", "stopped", "finished", "diverged", "failed"]
FILE = "status.json"
_SAVED = (int, type(None))
_BEGIN = re.compile(r"Started from the beginning\.|Resumed after step \d+\.")
_NOT_FINITE = re.compile(r"The loss is \S+ at step \d+")


@dataclass(frozen=True)
class Status:
    """How far a run has come.

    ============  =====================================================================================================
    ``created``   It has a folder and has not begun.
    ``running``   A process has begun or resumed it. If that process was killed, nobody has changed this word.
    ``stopped``   A signal ended it after its state was saved, or at once at a second Ctrl-C; it can be resumed.
    ``finished``  It made its last step.
    ``diverged``  A loss or gradient was not finite.
    ``failed``    Another error ended it.
    ============  =====================================================================================================

    Attributes:
        state: One of these words.
        step: The last step that was known when the record was written.
        message: Why it stopped, diverged or failed, in one line; empty otherwise.
        saved: The step of its last checkpoint; None if it has none.
        config: The `config_hash` of the configuration that it has finished or diverged with; empty before.
        updated: When the record was written, as UTC time in ISO 8601; empty for folders that have no record.
    """

    state: State
    step: int = 0
    message: str = ""
    saved: int | None = None
    config: str = ""
    updated: str = ""


def write(folder: Path, status: Status) -> None:
    """Replace the record in a run folder, with the present time.

    Raises:
        ValueError: If there is no such state.
        OSError: If it cannot be written; the record is then as before.
    """
    if status.state not in get_args(State):
        raise ValueError(f"A run's state needs one of {', '.join(get_args(State))}; got {status.state!r}.")
    updated = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    write_atomically(folder / FILE, json.dumps(asdict(replace(status, updated=updated)), indent=2).encode() + b"\n")


def read(folder: Path) -> Status | None:
    """The record in a run folder; None if the folder has none.

    Raises:
        ValueError: If the file is damaged; the text names it.
    """
    path = folder / FILE
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        status = Status(**json.loads(content))
        known = status.state in get_args(State) and type(status.step) is int and type(status.saved) in _SAVED
        if not known or {type(text) for text in (status.message, status.config, status.updated)} != {str}:
            raise ValueError(f"it holds {content[:80]!r}")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}); delete it, and the status follows from the metrics.") from error
    return status


def from_metrics(lines: list[dict[str, Any]], log: Path) -> Status:
    """The status of a folder without a record, from its last line of metrics and what its log says at the end."""
    step = lines[-1].get("step", 0) if lines else 0
    if lines and lines[-1].get("finished"):
        return Status("finished", step)
    last = _BEGIN.split(log.read_text(errors="replace"))[-1] if log.is_file() else ""
    if found := _NOT_FINITE.search(last):
        return Status("diverged", step, found[0])
    return Status("stopped" if lines else "created", step)
