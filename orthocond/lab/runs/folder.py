"""A run is a folder: configuration, metrics, log, checkpoints, figures."""

import contextlib
import json
import os
import re
import time
import weakref
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any
from warnings import warn

from orthocond._checks import check_count
from orthocond.lab.config import config_diff, config_hash, to_json
from orthocond.lab.runs import checkpoint, ranks, status
from orthocond.lab.runs.checkpoint import Checkpoint
from orthocond.lab.runs.files import (
    append_line,
    drop_half_line,
    explained,
    remove_temporaries,
    sync,
    truncate,
    write_atomically,
)
from orthocond.lab.runs.metrics import encode_line, json_safe, read_lines
from orthocond.lab.runs.packing import dump_json
from orthocond.lab.runs.status import State, Status

try:
    import fcntl
except ImportError:  # on Windows, where two processes are not kept apart
    fcntl = None  # type: ignore[assignment]

CONFIG, METRICS, LOG = "config.json", "metrics.jsonl", "log.txt"
_TIMES = "times.jsonl"


class Run:
    """A run folder. Make one with `Run.create`, or `Run.open` one that exists.

    ==================  ===============================================================================================
    ``config.json``     The configuration
    ``status.json``     How far it has come; see `Status`
    ``metrics.jsonl``   One JSON object a line: ``step``, ``epoch`` if given, and the metrics; the same for equal runs
    ``times.jsonl``     For each of these lines ``step``, ``seconds`` since the start of the run, and other timings
    ``log.txt``         What happened, for people
    ``checkpoints/``    The last checkpoint and the one before, safetensors and JSON
    ``figures/``        Pictures: samples that a GAN draws while it trains, and whatever you put there
    ==================  ===============================================================================================

    A process can be killed at any moment: `resume` gives back the newest good checkpoint and cuts what was logged
    after it, so that the metrics of a resumed run are those of one that was never stopped, byte for byte, if the
    training itself is deterministic and everything it depends on is in the state.

    Under torch.distributed only rank 0 touches files. All ranks have to call `create`, `open`, `save`, `load` and
    `resume`, and all get the same; they need no shared file system, and an error of rank 0 is raised on all. One
    process at a time may write to a run; a second one gets an error.

    Attributes:
        path: The folder.
        config: The configuration as JSON values.

    Example:
        >>> import tempfile
        >>> root = tempfile.TemporaryDirectory()
        >>> run = Run.create(root.name, "dbn-sprites", {"lr": 0.1})
        >>> run.path.name
        '00000-dbn-sprites'
        >>> run.log(1, loss=0.5)
        >>> run.save({"weight": torch.ones(2)}, step=1)
        >>> run.log(2, loss=0.25)
        >>> again = Run.open(run.path).resume()  # in a new process, after the first one was killed
        >>> again.step, again.state
        (1, {'weight': tensor([1., 1.])})
        >>> run.metrics()
        [{'step': 1, 'loss': 0.5}]
        >>> root.cleanup()
    """

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self.path = path
        self.config = config
        self._claimed = self._locked = False
        self._start = time.monotonic()
        self._saved = -1  # step of the newest checkpoint, once claimed

    @classmethod
    def create(cls, root: str | PathLike[str], name: str, config: object) -> "Run":
        """Make a new folder ``<number>-<name>`` in ``root``, with the next free number.

        Args:
            root: Folder of the runs; made if it is missing.
            name: Letters, digits and ``. _ + -``.
            config: A dataclass (see `orthocond.lab.config`) or a dictionary of JSON values.

        Returns:
            The run.

        Raises:
            TypeError: If ``config`` is of another kind.
            ValueError: If ``name`` has other characters.
            OSError: If the folder cannot be made.
        """
        if not re.fullmatch(r"[A-Za-z0-9._+-]+", name):
            raise ValueError(f"A run's name needs letters, digits and . _ + - only; got {name!r}.")
        values = json_safe(dict(config), "config") if isinstance(config, Mapping) else to_json(config)

        def make() -> bytes:
            return str(_make_folder(Path(root), name, values)).encode()

        return cls(Path(ranks.from_rank_0(make).decode()), values)

    @classmethod
    def open(cls, path: str | PathLike[str]) -> "Run":
        """An existing run, to read or to resume; nothing is changed yet.

        Args:
            path: The folder.

        Returns:
            The run.

        Raises:
            FileNotFoundError: If there is no run in it.
            ValueError: If its configuration is not JSON, or was edited after the run had ended.
        """
        file = Path(path) / CONFIG

        def read() -> bytes:
            if not file.is_file():
                raise FileNotFoundError(f"{path} is not a run: it has no {CONFIG}. Pass the folder of one run.")
            recorded = None
            with contextlib.suppress(ValueError):  # a damaged record is told when it is asked for
                recorded = status.read(file.parent)
            return (recorded.config if recorded else "").encode() + b"\n" + file.read_bytes()

        expected, _, text = ranks.from_rank_0(read).partition(b"\n")
        try:
            config = json.loads(text)
            if not isinstance(config, dict):
                raise ValueError(f"it holds {text[:40]!r}")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file} is not a JSON object ({error}); restore it, or start a new run.") from error
        if expected and config_hash(config).encode() != expected:
            raise ValueError(
                f"{file} was edited after the run had ended: it is not the configuration that was trained. Put back "
                f"the one whose hash {status.FILE} has, {expected.decode()}, or start a new run."
            )
        return cls(Path(path), config)

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def figures(self) -> Path:
        """The folder for figures."""
        return self.path / "figures"

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    # Status

    @property
    def status(self) -> Status:
        """How far the run has come. For a folder without ``status.json`` it follows from the metrics and the log.

        Raises:
            ValueError: If a file is damaged; the text names it.
        """
        return status.read(self.path) or status.from_metrics(self.metrics(), self.path / LOG)

    def set_status(self, state: State, step: int | None = None, message: str = "") -> None:
        """Replace the record of how far the run has come. Does nothing on other ranks than 0.

        `create` writes ``created``, `resume` writes ``running``, `Guard` writes ``stopped``, ``diverged`` and
        ``failed``. The loop itself has to write ``finished`` after its last step is saved.

        Args:
            state: The new state; see `Status`.
            step: The step; that of the record before, if None.
            message: Why, in one line.

        Raises:
            ValueError: If there is no such state, or ``step`` is not an integer of at least 0.
            RuntimeError: If another process writes to the run.
            OSError: If the disk is full or read-only; the record is then as before.
        """
        if step is not None:
            check_count(step, "Run.set_status(step=...)", 0)
        if ranks.rank() == 0:
            self._claim()
            before = self.status
            saved = self._saved if self._saved >= 0 else None
            tied = config_hash(self.config) if state in ("finished", "diverged") else ""
            status.write(self.path, Status(state, before.step if step is None else step, message, saved, tied))

    # Metrics

    def log(
        self, step: int, epoch: float | None = None, *, timing: Mapping[str, float] | None = None, **metrics: Any
    ) -> None:
        """Append a line of metrics; it is in the file when this returns. Does nothing on other ranks than 0.

        Args:
            step: The step, above that of the last checkpoint: log what belongs to a step before you save it.
            epoch: The epoch, if you like.
            timing: Seconds and rates, which differ from run to run and are written to ``times.jsonl``.
            metrics: Numbers, texts, tensors, and lists or dicts of them. NaN and infinity are written as the texts
                "NaN", "Infinity" and "-Infinity", which `metrics` turns back.

        Raises:
            TypeError: If a value is of another kind.
            ValueError: If ``step`` is not an integer of at least 0.
            RuntimeError: If this step is saved already, or another process writes to the run.
            OSError: If the disk is full or read-only; the files are then as before.
        """
        check_count(step, "Run.log(step=...)", 0)
        if ranks.rank() != 0:
            return
        self._claim()
        if step <= self._saved:
            raise RuntimeError(
                f"Step {step} cannot be logged: there is a checkpoint of step {self._saved}, and a resumed run would "
                "not repeat it. Log what belongs to a step before you save it, or call resume() to go on from there."
            )
        head: dict[str, Any] = {"step": step} if epoch is None else {"step": step, "epoch": epoch}
        line = encode_line(head | metrics)
        seconds = round(time.monotonic() - self._start, 6)
        times = encode_line({"step": step, "seconds": seconds} | dict(timing or {}))
        append_line(self.path / METRICS, line)
        append_line(self.path / _TIMES, times)

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics so far. A last one that was not finished when the process was killed is left out.

        Raises:
            ValueError: If the file is damaged; the text names the line.
        """
        return read_lines(self.path / METRICS)

    def times(self) -> list[dict[str, Any]]:
        """Step, seconds since the start and other timings for each line of metrics."""
        return read_lines(self.path / _TIMES)

    def note(self, text: str) -> None:
        """Append a text to ``log.txt``, with the time. Does nothing on other ranks than 0.

        Raises:
            OSError: If the disk is full or read-only.
        """
        if ranks.rank() == 0:
            self._claim()
            append_line(self.path / LOG, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n".encode())

    # Checkpoints

    def save(self, state: object, step: int) -> None:
        """Write a checkpoint; the one before it is kept, older ones are removed.

        All metrics so far are on the disk before it counts. Writing is atomic: killed in the middle, the run has the
        checkpoints it had before.

        Args:
            state: A tree of plain values and tensors (see `pack`): the ``state_dict`` of everything that trains,
                `capture_rng`, the position in the data. On other ranks than 0 it is not looked at.
            step: The step after which this is the state.

        Raises:
            TypeError: If the state holds anything else; the text names the place.
            ValueError: If ``step`` is not an integer of at least 0.
            RuntimeError: If another process writes to the run.
            OSError: If the disk is full or read-only; the checkpoints are then as before.
        """
        check_count(step, "Run.save(step=...)", 0)

        def write() -> bytes:
            self._claim()
            files = [p for name in (METRICS, _TIMES) if (p := self.path / name).exists()]
            for file in files:
                sync(file)
            checkpoint.save(self.checkpoints, state, step, {p.name: p.stat().st_size for p in files}, self.config)
            self._saved = step
            status.write(self.path, replace(self.status, step=step, saved=step))
            return b""

        ranks.from_rank_0(write)

    def load(self) -> Checkpoint | None:
        """The newest good checkpoint, or None if there is none yet; the run is not changed.

        A truncated or damaged one is found by its hash; the one before it is used, with a warning that says so.

        Raises:
            RuntimeError: If there are checkpoints and none is good, if one is of a newer version, or if it was saved
                with another configuration; the text names the settings that differ.
        """

        def read() -> bytes:
            found = checkpoint.read(self.checkpoints)
            if found is None:
                return b""
            text, data, skipped = found
            head = dump_json([len(text), skipped])
            return len(head).to_bytes(8, "little") + head + text + data

        message = ranks.from_rank_0(read)
        if not message:
            return None
        start = 8 + int.from_bytes(message[:8], "little")
        size, skipped = json.loads(message[8:start])
        for reason in skipped if ranks.rank() == 0 else ():
            warn(reason, RuntimeWarning, stacklevel=2)
        found = checkpoint.parse(message[start : start + size], message[start + size :], skipped)
        if found.config is not None and (changes := config_diff(found.config, self.config)):
            raise RuntimeError(
                f"The checkpoint of step {found.step} in {self.checkpoints} was saved with another configuration than "
                f"{CONFIG} has: put back the one that belongs there, or start a new run. From the checkpoint's to "
                f"{CONFIG}:\n{changes}"
            )
        return found

    def resume(self, *, restart: bool = False) -> Checkpoint | None:
        """The newest good checkpoint, as `load`; what was logged after it is cut, all of it if there is none yet.

        A run that had a checkpoint and has none any more is not begun again silently.

        Args:
            restart: Begin again: all checkpoints and metrics of the run are removed, and the result is None.

        Raises:
            RuntimeError: As `load`; if metrics from before the checkpoint, or all checkpoints, are missing; if another
                process writes to the run.
            OSError: If the folder is read-only.
        """

        def prepare() -> bytes:
            self._lock()
            if restart:
                checkpoint.remove_all(self.checkpoints)
            return b""

        ranks.from_rank_0(prepare)
        found = None if restart else self.load()

        def cut() -> bytes:
            if found is None and not restart:
                self._check_beginning()
            for name in (METRICS, _TIMES):
                _cut(self.path / name, found.sizes.get(name, 0) if found else 0)
            self._claim()
            self._saved = found.step if found else -1
            for reason in found.skipped if found else ():
                self.note(reason)
            self.note(f"Resumed after step {found.step}." if found else "Started from the beginning.")
            if found is not None and found.config is None:
                self.note("The checkpoint does not say which configuration it belongs to; it was taken as it is.")
            self.set_status("running", found.step if found else 0)
            return b""

        ranks.from_rank_0(cut)
        return found

    def _check_beginning(self) -> None:
        """Refuse to begin where there was a checkpoint, or, without a record of that, where there are metrics."""
        recorded = status.read(self.path)
        lost = self.metrics() if recorded is None else recorded.saved is not None
        if lost:
            raise RuntimeError(
                f"{self.checkpoints} is empty, but the run has been trained: its checkpoints are missing. Put them "
                "back, or start a new run. To train this one from the beginning, and lose its metrics, delete "
                f"{self.path} or call Run.resume(restart=True)."
            )

    def _claim(self) -> None:
        """Before the first change: lock the folder, cut lines that were not finished, go on with the clock."""
        if self._claimed:
            return
        self._lock()
        remove_temporaries(self.path)
        for name in (METRICS, _TIMES, LOG):
            drop_half_line(self.path / name)
        self._saved = max(checkpoint.steps(self.checkpoints), default=-1)
        times = self.times()
        self._start = time.monotonic() - (times[-1]["seconds"] if times else 0)
        self._claimed = True

    def _lock(self) -> None:
        """Hold a lock of the system on the folder until the run is forgotten or the process ends, however it ends."""
        if fcntl is None or self._locked:
            return
        path = self.path / ".lock"
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise explained(error, path, 0) from error
        weakref.finalize(self, os.close, file)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise RuntimeError(f"Another process writes to {self.path}; wait until it ends, or stop it.") from error
        except OSError:  # a file system without locks: go on without
            pass
        self._locked = True


def _make_folder(root: Path, name: str, config: dict[str, Any]) -> Path:
    """Reserve a number, fill the folder, then give it its name: a folder with a name is complete."""
    text = json.dumps(config, indent=2, allow_nan=False).encode() + b"\n"
    try:
        root.mkdir(parents=True, exist_ok=True)
        number = max(_numbers(root), default=-1) + 1
        while True:
            reserved = root / f"{number:05d}"
            try:
                reserved.mkdir()
                if _numbers(root).count(number) == 1:
                    break
                reserved.rmdir()  # another process had the number and has given its folder a name since
            except FileExistsError:
                pass
            number += 1
        (reserved / "checkpoints").mkdir()
        (reserved / "figures").mkdir()
    except OSError as error:
        raise explained(error, root / name, len(text)) from error
    write_atomically(reserved / CONFIG, text)
    status.write(reserved, Status("created"))
    return reserved.rename(root / f"{number:05d}-{name}")


def _numbers(root: Path) -> list[int]:
    return [int(m[1]) for p in root.iterdir() if (m := re.match(r"(\d+)(?:-|$)", p.name))]


def _cut(path: Path, size: int) -> None:
    present = path.stat().st_size if path.exists() else 0
    if present < size:
        raise RuntimeError(
            f"{path} has {present} bytes and had {size} at the checkpoint: lines are missing. Restore the file, or "
            "start a new run."
        )
    if present > size:
        truncate(path, size)
