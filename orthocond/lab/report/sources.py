"""What a report is about, as plain values: read from run folders, tables and kept trainings, which stay as they are."""

import json
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from orthocond.lab import experiments
from orthocond.lab.config import flatten, to_json
from orthocond.lab.presets import command_of, has_generator, read_config
from orthocond.lab.runs import Run
from orthocond.lab.runs.folder import CONFIG, LOG, METRICS
from orthocond.lab.runs.metrics import from_json_safe
from orthocond.lab.tables.records import Record, read_kept
from orthocond.lab.task import EVALUATION
from orthocond.matrix import matrix_view, singular_spectrum

TABLE = "table.json"
_SEED = ("seed",)
_SPECTRUM = ("conditions", "largest", "smallest")  # of the treated weights of a GAN, in a line of metrics
_SINGULAR_VALUES = ("singular_values", "initial_singular_values")  # in an evaluation


class NothingToReportError(ValueError):
    """A path at which there is neither a run, nor a folder of runs, nor a table; the text says what is needed."""


@dataclass(frozen=True)
class Training:
    """What is known of one training.

    Attributes:
        name: Name of its folder.
        config: Its configuration as JSON values.
        metrics: Its lines of metrics, with the timings of the same steps.
        state: One of the words of `orthocond.lab.runs.status.Status`.
        step: How far it has come.
        message: Why it stopped, diverged or failed; empty otherwise.
        log: The lines of its log.
        evaluation: What its evaluation found; empty if there is none.
        trouble: What could not be read, in one sentence each.
        folder: Its folder; None for a kept copy.
    """

    name: str
    config: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    state: str
    step: int
    message: str = ""
    log: tuple[str, ...] = ()
    evaluation: Mapping[str, Any] | None = None
    trouble: tuple[str, ...] = ()
    folder: Path | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration with a dotted path for each value."""
        return flatten(self.config)

    @property
    def is_gan(self) -> bool:
        """Whether it trains a generator."""
        return has_generator(self.config)

    @property
    def method(self) -> str:
        """The name of its method; empty for a run of another program."""
        method = self.config.get("method")
        return str(method.get("name", "")) if isinstance(method, Mapping) else ""

    def without(self, keys: Collection[str]) -> "Training":
        """The same without some of its metrics."""
        return replace(self, metrics=[{k: v for k, v in line.items() if k not in keys} for line in self.metrics])

    def series(self, key: str) -> list[tuple[int, float]]:
        """Steps and values of the lines that have a quantity; those that are not finite are among them."""
        return [(line.get("step", 0), float(line[key])) for line in self.metrics if _is_number(line.get(key))]

    def number(self, path: str) -> float | None:
        """A number of the evaluation by its dotted path; None if there is none."""
        found: Any = self.evaluation
        for part in path.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return float(found) if _is_number(found) else None


@dataclass(frozen=True)
class WrittenTable:
    """A table that `orthocond table` has written.

    Attributes:
        content: What its ``table.json`` holds.
        markdown: Its ``table.md``; empty if there is none.
        trainings: The trainings behind it that are kept beside it, by the label of the experiment and of the row.
        folder: Its folder.
    """

    content: Mapping[str, Any]
    markdown: str
    trainings: Mapping[tuple[str, str], Sequence[Training]]
    folder: Path


def read(paths: Iterable[Path]) -> WrittenTable | list[Training]:
    """A table, or all runs at some paths.

    Args:
        paths: Run folders and folders of runs, or one folder of a table.

    Raises:
        NothingToReportError: If there is nothing at a path, or a table is not alone.
        ValueError: If a file is damaged; the text names it.
    """
    paths = list(paths)
    trainings: dict[Path, Training] = {}
    for path in paths:
        folder = path.parent if path.name in (TABLE, CONFIG) else path
        if (folder / CONFIG).is_file():
            trainings.setdefault(folder.resolve(), read_run(folder))
        elif (folder / TABLE).is_file():
            if len(paths) > 1:
                raise NothingToReportError(f"{folder} is a table, which needs its own report; pass it alone.")
            return read_table(folder)
        else:
            inner = [p for p in sorted(folder.iterdir()) if (p / CONFIG).is_file()] if folder.is_dir() else []
            if not inner:
                problem = "is no folder" if folder.exists() else "does not exist"
                problem = "has neither runs nor a table in it" if folder.is_dir() else problem
                raise NothingToReportError(
                    f"A report needs a run folder, a folder of runs or the folder of a table; {path} {problem}."
                )
            for each in inner:
                trainings.setdefault(each.resolve(), read_run(each))
    return list(trainings.values())


def read_run(folder: Path) -> Training:
    """A run folder; files of it that are damaged or missing are told in `Training.trouble`.

    Raises:
        ValueError: If its configuration is damaged.
    """
    run = Run.open(folder)
    trouble: list[str] = []
    metrics: list[dict[str, Any]] = []
    state, step, message = "unknown", 0, ""
    evaluation = None
    try:
        metrics = run.metrics()
        for line, timing in zip(metrics, run.times(), strict=False):  # a process may be writing the last one
            line |= {key: value for key, value in timing.items() if key not in ("step", "seconds")}
    except ValueError as error:
        trouble.append(str(error))
    if odd := [number for number, line in enumerate(metrics, 1) if layers_of(line) is None]:
        trouble.append(
            f"{folder / METRICS}, line {odd[0]}: {', '.join(_SPECTRUM)} need a list with a number for each layer; "
            f"the spectra leave {'this line' if len(odd) == 1 else f'{len(odd)} such lines'} out."
        )
    try:
        status = run.status
        state, step, message = status.state, status.step, status.message
    except ValueError as error:
        trouble.append(str(error))
    if state not in ("running", "unknown") and _is_cut(folder / METRICS):  # nothing is being written any more
        trouble.append(f"{folder / METRICS} ends in the middle of a line: the last values are lost.")
    if (folder / EVALUATION).is_file():
        try:
            evaluation = from_json_safe(json.loads((folder / EVALUATION).read_bytes()))
            if not isinstance(evaluation, dict):
                raise ValueError("it is no JSON object")
            for key in _SINGULAR_VALUES:
                layers = evaluation.get(key, [])
                if not isinstance(layers, list) or not all(map(_are_numbers, layers)):
                    raise ValueError(f"{key} needs a list of numbers for each layer")
        except (ValueError, RecursionError) as error:
            trouble.append(f"{folder / EVALUATION} is damaged ({error}); evaluate the run again.")
            evaluation = None
    if state == "finished" and evaluation is not None and evaluation.get("step", step) != step:
        trouble.append(
            f"{folder / EVALUATION} is of step {evaluation['step']} and the run ended at step {step}: it was left out."
        )
        evaluation = None
    step = max([step, *(line.get("step", 0) for line in metrics[-1:])])
    log = (folder / LOG).read_text(errors="replace").splitlines() if (folder / LOG).is_file() else []
    return Training(
        folder.resolve().name,
        run.config,
        metrics,
        state,
        step,
        message,
        tuple(log),
        evaluation,
        tuple(trouble),
        folder,
    )


def read_table(folder: Path) -> WrittenTable:
    """The folder of a table.

    Raises:
        ValueError: If a file is damaged; the text names it.
    """
    file = folder / TABLE
    try:
        content = from_json_safe(json.loads(file.read_bytes()))
        if not isinstance(content, dict) or not isinstance(content.get("title"), str):
            raise ValueError("it has no title")
        given = content.get("experiments", ())
        presets, scale = {experiment["preset"] for experiment in given}, content["scale"] if given else ""
        rows = [
            (experiment["preset"], (experiment["label"], row["label"]), list(row["seeds"]), dict(row["method"]))
            for experiment in given
            for row in experiment["rows"]
        ]
    except (ValueError, RecursionError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"{file} is damaged ({error!r}); make the table again.") from error
    text = folder / "table.md"
    records = read_kept(folder.parent) if presets else ()
    kept = [_from_record(r) for r in records if r.config.preset in presets and r.config.scale == scale]
    behind = {
        labels: [
            training
            for training in kept
            if training.config["preset"] == preset
            and training.config["seed"] in seeds
            and _has(training.config["method"], method)
        ]
        for preset, labels, seeds, method in rows
    }
    return WrittenTable(content, text.read_text(encoding="utf-8") if text.is_file() else "", behind, folder)


def _from_record(record: Record) -> Training:
    state = "diverged" if record.stopped is not None else "finished" if record.finished else "stopped"
    step = record.metrics[-1].get("step", 0) if record.metrics else 0
    return Training(
        record.name,
        to_json(record.config),
        record.metrics,
        state,
        step,
        record.stopped or "",
        evaluation=record.evaluation,
    )


def _has(method: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether a method is the wanted one; settings that were added since have their defaults."""
    return all(method.get(key, value) == value for key, value in wanted.items())


def _is_cut(path: Path) -> bool:
    """Whether a file of lines ends before the end of a line."""
    content = path.read_bytes() if path.is_file() else b""
    return content != b"" and not content.endswith(b"\n")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(map(_is_number, values))


def layers_of(line: Mapping[str, Any]) -> list[tuple[float, ...]] | None:
    """κ, largest and smallest singular value of each treated weight of a GAN, from a line of metrics.

    Returns:
        A triple for each weight; nothing if the line has none; None if it is damaged.

    Example:
        >>> layers_of({"conditions": [2.0], "largest": [4.0], "smallest": [2.0]}), layers_of({"conditions": [2.0]})
        ([(2.0, 4.0, 2.0)], None)
    """
    if _SPECTRUM[0] not in line:  # a classifier logs the others as numbers of its covariance
        return []
    values: list[Any] = [line.get(key) for key in _SPECTRUM]
    if not all(map(_are_numbers, values)) or len(set(map(len, values))) > 1:
        return None
    return list(zip(*values, strict=True))


# Groups


@dataclass(frozen=True)
class Group:
    """Trainings that differ by their seed alone.

    Attributes:
        label: What tells it from the other groups.
        trainings: The trainings.
    """

    label: str
    trainings: Sequence[Training]

    @property
    def first(self) -> Training:
        """A training, for what all have in common."""
        return self.trainings[0]


def group(trainings: Sequence[Training]) -> list[Group]:
    """The trainings by settings, in the order in which they came, and named by the settings that differ.

    Two trainings with the same settings and the same seed are groups of their own, named by their folders.
    """
    found: list[list[Training]] = []
    for training in trainings:
        same = next((g for g in found if _rest(g[0]) == _rest(training) and _seed(training) not in map(_seed, g)), None)
        found.append([training]) if same is None else same.append(training)
    labels = _labels([g[0] for g in found])
    return [Group(label, g) for label, g in zip(labels, found, strict=True)]


def differing(trainings: Sequence[Training], *, seeds: bool = True) -> list[str]:
    """The settings in which trainings differ, by their paths."""
    settings = [training.settings for training in trainings]
    paths = list(dict.fromkeys(path for each in settings for path in each))
    kept = [path for path in paths if seeds or path not in _SEED]
    return [path for path in kept if any(each.get(path) != settings[0].get(path) for each in settings)]


def _labels(trainings: Sequence[Training]) -> list[str]:
    paths = differing(trainings, seeds=False)
    if "preset" in paths:  # then nearly everything differs, and the name of the preset says it
        paths = [p for p in paths if p in ("preset", "scale", "method.name")]
    elif len(paths) > 3:
        paths = [p for p in paths if p == "method.name"] or paths[:3]
    labels = [
        " · ".join(_setting(p, t.settings.get(p)) for p in paths) or _called(t.method) or t.name for t in trainings
    ]
    return [
        label if labels.count(label) == 1 else f"{label} ({training.name.partition('-')[0]})"
        for label, training in zip(labels, trainings, strict=True)
    ]


def _setting(path: str, value: Any) -> str:
    if path in ("method.name", "preset"):
        return _called(str(value))
    return f"{path.rpartition('.')[2].replace('_', ' ')} {text_of(value)}"


def _called(method: str) -> str:
    return "no treatment" if method == "none" else method


def text_of(value: Any) -> str:
    """The value of a setting for people.

    Example:
        >>> text_of([0.0, 0.99]), text_of(None), text_of(True), text_of(0.001)
        ('0 0.99', 'none', 'yes', '0.001')
    """
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return " ".join(map(text_of, value)) or "none" if isinstance(value, list) else str(value)


def _rest(training: Training) -> dict[str, Any]:
    return {path: value for path, value in training.settings.items() if path not in _SEED}


def _seed(training: Training) -> Any:
    return training.config.get("seed")


# Commands


def train_command(training: Training) -> str | None:
    """The command that makes the same training; None for a run of another program."""
    try:
        return command_of(training.settings)
    except (TypeError, ValueError):
        return None


# Weights


def singular_values(training: Training) -> list[list[float]]:
    """Singular values of the treated weights at the end, by layer: from the evaluation, or from the checkpoint.

    The checkpoint is looked at for a classifier of ours whose first convolution is the layer before the SVD.

    Returns:
        The values; nothing where they are not known.
    """
    known = (training.evaluation or {}).get("singular_values")
    if isinstance(known, list):
        return [[float(v) for v in layer] for layer in known]
    model = training.config.get("model")
    if training.folder is None or not isinstance(model, Mapping) or model.get("application") != "dbn":
        return []
    if ":" in str(model.get("name", "")) or model.get("pre_svd"):
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a damaged checkpoint, in whose place the one before is taken
            found = Run.open(training.folder).load()
    except (RuntimeError, ValueError, OSError):
        return []
    weights = found.state.get("model", {}).items() if found is not None and isinstance(found.state, dict) else ()
    name, weight = next(((n, w) for n, w in weights if getattr(w, "ndim", 0) == 4), ("", None))
    if weight is None or not name.endswith(".weight"):  # a parametrization, whose parts are not the weight
        return []
    return [singular_spectrum(matrix_view(weight)).eigenvalues.tolist()]


def initial_singular_values(training: Training) -> list[list[float]]:
    """Singular values of the treated weights before the training: from the evaluation, or from the seed.

    Returns:
        The values; nothing where they are not known.
    """
    known = (training.evaluation or {}).get("initial_singular_values")
    if isinstance(known, list):
        return [[float(v) for v in layer] for layer in known]
    try:
        config = read_config(training.config)
        with torch.random.fork_rng():
            weights = experiments.task_of(config).initial_weights(config)
    except (TypeError, ValueError, RuntimeError):
        return []
    return [singular_spectrum(matrix_view(weight)).eigenvalues.tolist() for weight in weights]
