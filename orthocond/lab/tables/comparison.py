"""Methods beside each other on the same data, over seeds: what each reached, and how sure the differences are."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

from orthocond.lab.config import Config, Scale, find_scale, to_json
from orthocond.lab.tables import statistics
from orthocond.lab.tables.drawing import save
from orthocond.lab.tables.records import Record
from orthocond.lab.tables.table import Material, Number, Table
from orthocond.lab.tables.text import write_text

_WORDS = {"ns": "NS iteration", "bn": "BN"}


@dataclass(frozen=True)
class Measure:
    """What counts at the end of a training.

    Attributes:
        name: Its name in files.
        title: Its name for people.
        key: Name in the last line of metrics or in the evaluation; a path with dots in a tree.
        higher: Whether more is better.
        from_hundred: Whether the measure is 100 minus the metric.
        factor: By which the metric is multiplied, as 100 for percent.
        needs: What a reader is told if no training has it.
    """

    name: str
    title: str
    key: str
    higher: bool = False
    from_hundred: bool = False
    factor: float = 1.0
    needs: str = ""

    def of(self, record: Record) -> float | None:
        """The measure of a training that has finished; None if its evaluation was not made, or has no such number."""
        found: Any = record.metrics[-1] | (record.evaluation or {})
        for part in self.key.split("."):
            if part not in found:
                return None
            found = found[part]
        value = self.factor * float(found)
        return round(100 - value, 9) if self.from_hundred else value


@dataclass(frozen=True)
class Fact:
    """What a training is described by besides.

    Attributes:
        key: Name in the lines of metrics.
        title: Its name for people.
        over: ``late``: the median of the last quarter of the lines. ``last``: the last line. ``all``: the median of all
            but the first.
        style: How numbers are written; those of style ``log`` are averaged and compared as logarithms.
        compared: Whether the ratio to the baseline is shown, of style ``log``.
        paper_title: What the paper's number is called, where it measures something else.
    """

    key: str
    title: str
    over: Literal["late", "last", "all"] = "late"
    style: Literal["log", "count", "percent", "milliseconds"] = "count"
    compared: bool = False
    paper_title: str | None = None

    def of(self, record: Record) -> float | None:
        """The fact of a training, or None if it has no such metric."""
        _, values = record.series(self.key)
        if not values:
            return None
        if self.over == "last":
            return values[-1]
        return median(values[-math.ceil(len(values) / 4) :] if self.over == "late" else values[1:] or values)


@dataclass(frozen=True)
class LateLogarithm(Measure):
    """The decimal logarithm of a metric late in training, as `Fact` reads it: for what is compared by ratios."""

    def of(self, record: Record) -> float | None:
        """See `Measure.of`; None also where the metric is not a positive number, as the condition of a zero matrix."""
        value = Fact(self.key, self.title).of(record)
        return math.log10(value) if value is not None and 0 < value < math.inf else None


@dataclass(frozen=True)
class Experiment:
    """One network on one data set.

    Attributes:
        label: Its heading.
        preset: Name of the preset.
        presets: The presets by name and scale, among which it is.
        numbers: The paper's numbers by the name of a measure and of a method.
        facts: The paper's facts by the key of a fact and the name of a method.
        paper_runs: Trainings behind each of the paper's means.
        labels: Its heading at the scales whose network and data are others.
    """

    label: str
    preset: str
    presets: Mapping[str, Mapping[Scale, Any]]
    numbers: Mapping[str, Mapping[str, Number]] = field(default_factory=dict)
    facts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    paper_runs: int = 1
    labels: Mapping[Scale, str] = field(default_factory=dict)

    def at(self, scale: Scale) -> "Experiment":
        """The experiment with the heading of a scale."""
        return replace(self, label=self.labels.get(scale, self.label))

    def config(self, scale: Scale, method: Any, seed: int) -> Config:
        """The configuration of one training."""
        return replace(find_scale(self.presets, self.preset, scale), method=method, seed=seed)


@dataclass(frozen=True)
class Outcome:
    """An experiment as figures see it.

    Attributes:
        table: The table that it belongs to.
        experiment: The experiment.
        records: Its trainings that have ended, by method.
        summary: What the table says about it.
    """

    table: Any
    experiment: Experiment
    records: Mapping[Any, Sequence[Record]]
    summary: dict[str, Any]

    def short(self, method: Any) -> str:
        """The name of a method without the SVD that all have."""
        return self.table.label(method).removeprefix("SVD + ")


@dataclass(frozen=True)
class FigurePlan:
    """A figure.

    Attributes:
        name: Name of its files.
        draw: Gives a figure of matplotlib, a picture of pillow, or None where there is nothing to draw.
        rows: The rows in it; None for all.
        of_checkpoints: Whether it needs run folders with checkpoints; without them an earlier one stays.
    """

    name: str
    draw: Callable[[Sequence[Outcome], Sequence[Any]], Any]
    rows: tuple[Any, ...] | None = None
    of_checkpoints: bool = False


def label(method: Any) -> str:
    """What a method is called in the paper's tables; step lengths say by which form they are computed.

    Example:
        >>> from orthocond.lab.classification.config import Method
        >>> label(Method("nog+ow+olr", olr="paper")), label(Method("ns")), label(Method("bn+wi"))
        ("SVD + NOG + OW + OLR (paper's η)", 'NS iteration', 'BN + WI')
    """
    if method.name in _WORDS:
        return _WORDS[method.name]
    parts = [part.upper() for part in method.name.split("+") if part != "svd"]
    form = {"paper": "paper's"}.get(method.olr, method.olr)
    names = parts if "BN" in parts else ["SVD", *parts]
    return " + ".join(names) + (f" ({form} η)" if "OLR" in parts else "")


@dataclass(frozen=True)
class Comparison(Table):
    """A table whose rows are methods and whose numbers are means over seeds.

    Each row is compared with the baseline, seed by seed: equal seeds have equal data in equal order.

    Attributes:
        experiments: Its parts, each a table of its own.
        rows: The methods.
        measures: What counts.
        facts: What else is shown.
        figures: What is drawn.
        notes: What a reader has to know.
        baseline: Name of the method that others are compared with.
        label: Gives the name of a method for people.
        findings: Gives notes that follow from the trainings.
    """

    experiments: tuple[Experiment, ...]
    rows: tuple[Any, ...]
    measures: tuple[Measure, ...]
    facts: tuple[Fact, ...]
    figures: tuple[FigurePlan, ...] = ()
    notes: tuple[str, ...] = ()
    baseline: str = "svd"
    label: Callable[[Any], str] = label
    findings: Callable[[Sequence[Outcome]], Sequence[str]] = lambda _: ()

    def configs(self, scale: Scale, seeds: int) -> list[Config]:
        """All rows of a seed before those of the next, so that a table can be looked at early."""
        return [config for _, config in self.named(scale, seeds)]

    def named(self, scale: Scale, seeds: int) -> Iterator[tuple[str, Config]]:
        """By experiment and method."""
        for seed in range(seeds):
            for experiment in self.experiments:
                for row in self.rows:
                    words = f"{experiment.at(scale).label}: {self.label(row)}"
                    yield words, experiment.config(scale, row, seed)

    def write(self, folder: Path, material: Material) -> None:
        """Write table.md, table.json, table.csv and the figures."""
        outcomes = [self._outcome(experiment, material) for experiment in self.experiments]
        figures = []
        for plan in self.figures:
            if (figure := plan.draw(outcomes, plan.rows or self.rows)) is not None:
                save(figure, folder / plan.name)
                figures.append(plan.name)
            elif plan.of_checkpoints and (folder / f"{plan.name}.png").exists():
                figures.append(plan.name)
        content = self.header(material) | {
            "text": f"{self.text}{_settings(outcomes)}",
            "seeds": material.seeds,
            "baseline": self.baseline,
            "measures": [asdict(measure) for measure in self.measures],
            "facts": [asdict(fact) for fact in self.facts],
            "experiments": [outcome.summary for outcome in outcomes],
            "figures": figures,
            "notes": [
                *self.notes,
                *self.findings(outcomes),
                *_scale_notes(material.scale),
                *_protocols(outcomes),
                *_unmeasured(outcomes),
                *_stopped(outcomes),
                *material.remarks,
            ],
        }
        write_text(content, folder)

    def _outcome(self, experiment: Experiment, material: Material) -> Outcome:
        experiment = experiment.at(material.scale)
        records: dict[Any, list[Record]] = {}
        rows = []
        for method in self.rows:
            configs = [experiment.config(material.scale, method, seed) for seed in range(material.seeds)]
            records[method] = [material.records[config] for config in configs if config in material.records]
            missing = [config.seed for config in configs if config not in material.records]
            rows.append(self._row(experiment, configs[0].method, records[method]) | {"missing": missing})
        self._compare(rows, experiment.paper_runs)
        summary = {"label": experiment.label, "preset": experiment.preset, "rows": rows}
        return Outcome(self, experiment, records, summary)

    def _row(self, experiment: Experiment, method: Any, records: Sequence[Record]) -> dict[str, Any]:
        finished = [record for record in records if record.finished]
        measures, facts = {}, {}
        for measure in self.measures:
            values = [measure.of(record) for record in finished]
            known = [value for value in values if value is not None]
            best = (max if measure.higher else min)(known, default=None)
            number = experiment.numbers.get(measure.name, {}).get(method.name)
            measures[measure.name] = {
                "paper": None if number is None else number._asdict(),
                "values": values,
                "mean": fmean(known) if known else None,
                "std": statistics.std(known),
                "best": best,
            }
        for fact in self.facts:
            found = [fact.of(record) for record in finished]
            facts[fact.key] = {
                "paper": experiment.facts.get(fact.key, {}).get(method.name),
                "values": found,
                **_center([v for v in found if v is not None], log=fact.style == "log"),
            }
        return {
            "method": to_json(method),
            "label": self.label(method),
            "seeds": [record.config.seed for record in finished],
            "stopped": [{"seed": r.config.seed, "why": r.stopped} for r in records if not r.finished],
            "measures": measures,
            "facts": facts,
        }

    def _compare(self, rows: list[dict[str, Any]], paper_runs: int) -> None:
        """Add to each row how it differs from the baseline; p-values are corrected for the number of rows."""
        base = next((row for row in rows if row["method"]["name"] == self.baseline), None)
        if base is None:
            return
        others = [row for row in rows if row is not base]
        for measure in self.measures:
            for row in others:
                cell, reference = row["measures"][measure.name], base["measures"][measure.name]
                cell["difference"] = _difference(row, base, cell["values"], reference["values"])
                cell["paper_difference"] = _paper_difference(cell["paper"], reference["paper"], paper_runs)
            tested = [d for row in others if (d := row["measures"][measure.name]["difference"]) and d["p"] is not None]
            for difference, p in zip(tested, statistics.holm([d["p"] for d in tested]), strict=True):
                better = (difference["mean"] > 0) == measure.higher
                difference["p_holm"] = p
                difference["verdict"] = ("better" if better else "worse") if p < statistics.LEVEL else "not significant"
        for fact in self.facts:
            for row in others if fact.compared else ():
                cell, reference = row["facts"][fact.key], base["facts"][fact.key]
                cell["ratio"] = _ratio(row, base, cell["values"], reference["values"])


def _center(values: Sequence[float], *, log: bool) -> dict[str, float | None]:
    """The mean over seeds, of logarithms if asked for, and both ends."""
    if not values:
        return {"mean": None, "low": None, "high": None}
    if log and min(values) > 0 and math.isfinite(max(values)):
        center = math.exp(fmean([math.log(v) for v in values]))
    else:
        center = median(values) if log else fmean(values)
    return {"mean": center, "low": min(values), "high": max(values)}


def _pairs(row: dict[str, Any], base: dict[str, Any], values: list[Any], reference: list[Any]) -> list[Any]:
    """Values of both rows for the seeds that both have."""
    other = dict(zip(base["seeds"], reference, strict=True))
    return [(v, other[seed]) for seed, v in zip(row["seeds"], values, strict=True) if seed in other]


def _difference(
    row: dict[str, Any], base: dict[str, Any], values: list[Any], reference: list[Any]
) -> dict[str, Any] | None:
    pairs = [pair for pair in _pairs(row, base, values, reference) if None not in pair]
    return asdict(statistics.paired(*zip(*pairs, strict=True))) if pairs else None


def _ratio(row: dict[str, Any], base: dict[str, Any], values: list[Any], reference: list[Any]) -> Any:
    """The ratio to the baseline as a geometric mean with its 95 % interval, from paired logarithms."""
    pairs = [p for p in _pairs(row, base, values, reference) if all(v and math.isfinite(v) and v > 0 for v in p)]
    if not pairs:
        return None
    a, b = ([math.log(v) for v in side] for side in zip(*pairs, strict=True))
    found = statistics.paired(a, b)
    return {
        key: None if v is None else math.exp(v)
        for key, v in (("mean", found.mean), ("low", found.low), ("high", found.high))
    }


def _paper_difference(number: Any, reference: Any, runs: int) -> dict[str, Any] | None:
    if number is None or reference is None:
        return None
    if number["std"] is None:
        return asdict(statistics.Difference(number["mean"] - reference["mean"]))
    found = statistics.pooled((number["mean"], number["std"]), (reference["mean"], reference["std"]), runs)
    return asdict(found)


def _settings(outcomes: Sequence[Outcome]) -> str:
    """The networks and data of the trainings that there are, as a sentence."""
    labels = [outcome.experiment.label for outcome in outcomes if any(outcome.records.values())]
    return f" Network{'s' * (len(labels) > 1)} and data: {'; '.join(labels)}." if labels else ""


def _scale_notes(scale: Scale) -> tuple[str, ...]:
    if scale == "paper":
        return ()
    return (
        f"Network, images and epochs are those of a {scale}: our absolute numbers cannot be compared with the paper's, "
        "only the signs and sizes of differences between rows.",
    )


def _protocols(outcomes: Sequence[Outcome]) -> list[str]:
    """By which protocols the evaluations of an experiment were made; a warning where a quantity has several."""
    notes = []
    for outcome in outcomes:
        found: dict[str, set[str]] = {}
        for record in (r for records in outcome.records.values() for r in records if r.finished):
            for path, protocol in _find_protocols(record.evaluation or {}):
                found.setdefault(path, set()).add(protocol)
        if found:
            texts = [f"{path}: {', '.join(sorted(names))}" for path, names in sorted(found.items())]
            notes.append(f"{outcome.experiment.label} was measured as {'; '.join(texts)}.")
        for path, names in found.items():
            if len(names) > 1:
                notes.append(f"Warning: the values of {path} were measured differently and cannot be compared.")
    return notes


def _find_protocols(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The protocols in a tree, each with the path of what was measured so."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _find_protocols(value, f"{prefix} {key}".lstrip())
        elif key == "protocol":
            yield prefix, str(value)


def _unmeasured(outcomes: Sequence[Outcome]) -> list[str]:
    """What it needs to measure that which no training of an experiment has."""
    return [
        f"{outcome.experiment.label}: there is no {measure.title}. {measure.needs}"
        for outcome in outcomes
        for measure in outcome.table.measures
        if measure.needs
        and any(outcome.records.values())
        and all(row["measures"][measure.name]["mean"] is None for row in outcome.summary["rows"])
    ]


def _stopped(outcomes: Sequence[Outcome]) -> list[str]:
    """A note for each training that ended because its loss was not finite."""
    return [
        f"{outcome.experiment.label}, {row['label']}, seed {stop['seed']} is not in the means: {stop['why']}."
        for outcome in outcomes
        for row in outcome.summary["rows"]
        for stop in row["stopped"]
    ]
