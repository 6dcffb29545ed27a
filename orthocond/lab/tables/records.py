"""Trainings as tables read them: from run folders, or from the compact copies that are kept beside the tables."""

import contextlib
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any
from warnings import warn

from orthocond.lab.config import Config, to_json
from orthocond.lab.presets import read_config
from orthocond.lab.runs import Run
from orthocond.lab.runs.files import locked, remove_temporaries, write_atomically
from orthocond.lab.runs.finding import find_runs
from orthocond.lab.runs.folder import METRICS
from orthocond.lab.runs.metrics import from_json_safe, json_safe
from orthocond.lab.task import EVALUATION

_DIGITS = 6  # of each number; enough for a tenth of an image in ten thousand, and a third of the space of all


@dataclass(frozen=True)
class Record:
    """What is known of one training.

    Attributes:
        name: Name of its folder.
        config: Its configuration.
        metrics: Its lines of metrics, with the timings of the same steps; numbers have six digits.
        stopped: The message of its status if it has diverged; None otherwise.
        evaluation: What `experiments.assess` found at its end; None if it was not asked.
        path: Its folder; None for a kept copy.
    """

    name: str
    config: Config
    metrics: list[dict[str, Any]]
    stopped: str | None = None
    evaluation: dict[str, Any] | None = None
    path: Path | None = None

    @property
    def finished(self) -> bool:
        """Whether it reached its end."""
        return bool(self.metrics and self.metrics[-1].get("finished"))

    @property
    def usable(self) -> bool:
        """Whether nothing more will come: it has finished, or its loss was not finite."""
        return self.finished or self.stopped is not None

    @property
    def complete(self) -> bool:
        """Whether its result is there: it was evaluated at its end, or its loss was not finite."""
        return self.stopped is not None or (self.finished and self.evaluation is not None)

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of the lines that have a quantity."""
        lines = [line for line in self.metrics if line.get(key) is not None]
        return [line["step"] for line in lines], [float(line[key]) for line in lines]


def read_run(run: Run, config: Config) -> Record:
    """The record of a run folder; the run is only read.

    The evaluation of an earlier step is not the one of a finished run: it is left out, with a warning.

    Raises:
        ValueError: If a file is damaged; the text names it.
    """
    lines = run.metrics()
    for line, timing in zip(lines, run.times(), strict=False):  # a process may be writing the last one
        line |= {key: value for key, value in timing.items() if key not in ("step", "seconds")}
    status = run.status
    if status.state == "finished" and not (lines and lines[-1].get("finished")):
        raise ValueError(
            f"{run.path / METRICS} has lost its end: the run finished at step {status.step}. Restore the file, or "
            "delete the run's folder, so that it is trained again."
        )
    stopped = status.message if status.state == "diverged" else None
    metrics = [_rounded(line) for line in lines]
    record = Record(run.path.name, config, metrics, stopped, _read_evaluation(run.path / EVALUATION), run.path)
    if record.finished and record.evaluation is not None:
        step, last = record.evaluation.get("step", metrics[-1]["step"]), metrics[-1]["step"]
        if step != last:
            text = f"{run.path / EVALUATION} is of step {step} and the run ended at step {last}: it was left out."
            warn(f"{text} Evaluate the run again: orthocond evaluate {run.path}", RuntimeWarning, stacklevel=2)
            return replace(record, evaluation=None)
    return record


def _read_evaluation(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_bytes())
        if not isinstance(values, dict):
            raise ValueError("it is no JSON object")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}); delete it and evaluate the run again.") from error
    return dict(_rounded(from_json_safe(values)))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(v) for key, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list) else value


def gather(
    configs: Sequence[Config], runs: str | PathLike[str], out: str | PathLike[str]
) -> tuple[dict[Config, Record], dict[Config, Record]]:
    """What there is of some trainings: for each the newest run that has ended, else its kept copy.

    A run that was not evaluated counts only where neither another run nor the kept copy is complete. A run with a
    damaged file is left out with a warning that names the file.

    Args:
        configs: The trainings.
        runs: Folder of runs; it need not exist.
        out: Folder of results, in which copies are kept; it need not exist.

    Returns:
        Records from run folders, and records from kept copies, of those that have ended.
    """
    wanted = set(configs)
    found = {}
    for run, config in find_runs(runs):
        if config in wanted:
            try:
                record = read_run(run, config)
            except ValueError as error:
                warn(f"A run was left out: {error}", RuntimeWarning, stacklevel=2)
                continue
            if record.usable and (record.complete or config not in found):
                found[config] = record
    kept = {r.config: r for r in read_kept(out) if r.config in wanted and r.usable}
    found = {config: record for config, record in found.items() if record.complete or not _is_complete(kept, config)}
    return found, {config: record for config, record in kept.items() if config not in found}


def _is_complete(records: Mapping[Config, Record], config: Config) -> bool:
    return config in records and records[config].complete


def read_kept(out: str | PathLike[str]) -> Iterator[Record]:
    """All trainings that are kept in a folder of results; those of configurations that no longer exist are passed over.

    Raises:
        ValueError: If a file is damaged; the text names it.
    """
    for path in sorted((Path(out) / "runs").glob("*.jsonl.gz")):
        for line in _read_lines(path):
            try:
                config = read_config(line["config"])
            except (TypeError, ValueError):
                continue
            evaluation = from_json_safe(line.get("evaluation"))
            yield Record(line["run"], config, from_json_safe(line["metrics"]), line["stopped"], evaluation)


def keep(records: Iterable[Record], out: str | PathLike[str]) -> None:
    """Add compact copies of trainings to a folder of results, in one file for each preset and scale.

    A copy replaces the one of an equal configuration; others stay. Equal contents are equal bytes. Processes that keep
    copies in the same folder at the same time wait for each other, so that none is lost.

    Raises:
        ValueError: If a file that is there is damaged.
        OSError: If the disk is full or read-only; files are then as before.
        RuntimeError: If another process holds the folder's lock for a minute.
    """
    files: dict[Path, list[Record]] = {}
    for record in records:
        name = f"{record.config.preset}-{record.config.scale}.jsonl.gz"
        files.setdefault(Path(out) / "runs" / name, []).append(record)
    for path, new in files.items():
        with locked(path.parent):
            remove_temporaries(path.parent)
            _merge(path, new)


def _merge(path: Path, new: Iterable[Record]) -> None:
    """Write what a file of copies has, with new ones."""
    lines = {_key(line["config"]): line for line in _read_lines(path)} if path.exists() else {}
    for record in new:
        config = to_json(record.config)
        metrics = json_safe(record.metrics, "metrics")
        line = {"run": record.name, "config": config, "stopped": record.stopped, "metrics": metrics}
        if record.evaluation is not None:
            line["evaluation"] = json_safe(record.evaluation, "evaluation")
        lines[_key(config)] = line
    text = "".join(json.dumps(lines[key], separators=(",", ":")) + "\n" for key in sorted(lines))
    write_atomically(path, gzip.compress(text.encode(), mtime=0))


def _key(config: dict[str, Any]) -> str:
    """Equal for equal configurations, also where one was written before a setting with a default was added."""
    with contextlib.suppress(TypeError, ValueError):
        config = to_json(read_config(config))
    return json.dumps(config, sort_keys=True)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    try:
        lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().splitlines()]
        if not lines:
            raise ValueError("it is empty")
        for number, line in enumerate(lines, 1):
            if not isinstance(line, dict) or not line.keys() >= {"run", "config", "stopped", "metrics"}:
                raise ValueError(f"line {number} is no training")
    except (OSError, EOFError, ValueError, zlib.error, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}); restore it, or delete it and make the table again.") from error
    return lines
