"""Stale statistics: what the running covariance of a whitening layer costs in evaluation, and what helps."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from orthocond.lab.classification.claims import CONTRASTS
from orthocond.lab.classification.config import Classification, Method
from orthocond.lab.classification.presets import PRESETS
from orthocond.lab.config import Config, Scale, change, find_scale
from orthocond.lab.runs.files import write_atomically
from orthocond.lab.tables import statistics
from orthocond.lab.tables.comparison import Measure, label
from orthocond.lab.tables.records import Record
from orthocond.lab.tables.table import Material, Table
from orthocond.lab.tables.text import grid, interval, spread, write_json

_PRESET = "dbn-cifar10-convnet"
_MEASURES = (
    Measure("ignored", "lag ignored", "uncovered_error"),
    Measure("error", "as trained", "error"),
    Measure("settled", "settled", "settled_error"),
    Measure("recalibrated", "refreshed", "recalibrated_error"),
)
_NOTES = (
    "The first four are test errors of the same weights; only the statistics of the normalization layers differ. "
    'As trained: the layer as it is, whose default `lag="cover"` adds to the running covariance what the last batch '
    'has in excess of it. Lag ignored: the running covariance alone, `lag="ignore"`. Settled: running averages of '
    "the same momentum after 40 more batches at a rate of 0, so that nothing lags. Refreshed: plain averages over 32 "
    "batches, by `update_statistics`.",
    "Following is the error as trained of another training with the same configuration and seed, and `model.follow`: "
    "running statistics go along with the weight of the stem, by `DecorrelatedBatchNorm2d.follow`. Training computes "
    "the same, but the rounding of another machine can make its weights differ. The weights of a pair count as the "
    "same if all losses that both have logged are equal.",
    "If settled equals refreshed, the running average itself costs nothing, and what as trained loses is the lag. "
    "The cover saves lag ignored less as trained. Following saves as trained less following, on the seeds that have "
    "both. The lag costs as trained less refreshed, each of the same training. Brackets are 95 % intervals over seeds.",
    "Constant: the rate rises for a quarter of the training and stays. Falling: it falls to 0 from there, so that "
    "weights hardly move at the end. Trainings of one epoch have one rate for all layers; in those of four the rate of "
    "the stem was tuned.",
)
# Method, momentum of running statistics, ridge, whether the rate falls.
_SHORT = (
    *((Method("svd"), momentum, eps, False) for eps in (1e-2, 1e-5) for momentum in (0.1, 0.3)),
    *((Method("svd"), 0.1, eps, True) for eps in (1e-2, 1e-5)),
    *((Method(name), 0.1, eps, False) for name in ("nog", "nog+ow+olr") for eps in (1e-2, 1e-5)),
    (Method("svd", solver="ns"), 0.1, 1e-5, False),
    (Method("bn"), 0.1, 1e-2, False),
)
_LONG = ("SVD", "SVD, exact, ε 1e-5", "NOG", "NOG + OW + OLR", "BN")  # arms of the claims


class _Training(NamedTuple):
    label: str
    config: Callable[[Scale, int], Classification]
    may_follow: bool = False

    def following(self, scale: Scale, seed: int) -> Classification:
        """The same training with statistics that follow the weight."""
        return change(self.config(scale, seed), {"model.follow": True})


def _short(method: Method, momentum: float, eps: float, falls: bool) -> _Training:
    """A training of one epoch."""

    def config(scale: Scale, seed: int) -> Classification:
        base: Classification = find_scale(PRESETS, _PRESET, scale)
        fall = base.schedule.fall if falls else "steps"
        settings = {"schedule.epochs": 1, "schedule.fall": fall, "model.momentum": momentum, "model.eps": eps}
        return change(replace(base, method=method, seed=seed), settings)

    return _Training("NS iteration" if method.solver == "ns" else label(method), config, method.name != "bn")


def _rows() -> Iterator[_Training]:
    yield from (_short(*each) for each in _SHORT)
    arms = {term.arm.label: term.arm for contrast in CONTRASTS for term in contrast.terms}
    yield from (_Training(name.partition(",")[0], arms[name].config, name == "SVD, exact, ε 1e-5") for name in _LONG)


@dataclass(frozen=True)
class StaleStatistics(Table):
    """Errors of the same weights with kinds of statistics, and of a twin that follows, for methods and settings."""

    def configs(self, scale: Scale, seeds: int) -> list[Config]:
        """All rows of a seed before those of the next."""
        plain = [row.config(scale, seed) for seed in range(seeds) for row in _rows()]
        following = [row.following(scale, seed) for seed in range(seeds) for row in _rows() if row.may_follow]
        return list(dict.fromkeys((*plain, *following)))

    def write(self, folder: Path, material: Material) -> None:
        """Write table.md and table.json."""
        rows = [_summary(row, material) for row in _rows()]
        content = {
            "table": self.name,
            "title": self.title,
            "text": self.text,
            "scale": material.scale,
            "stale": rows,
            "verdict": _verdict(rows),
            "notes": [*_NOTES, *_unmeasured(rows), *material.remarks],
        }
        write_json(content, folder / "table.json")
        write_atomically(folder / "table.md", _markdown(content).encode())


def _summary(row: _Training, material: Material) -> dict[str, Any]:
    configs = [row.config(material.scale, seed) for seed in range(material.seeds)]
    records = [r for c in configs if (r := material.records.get(c)) is not None and r.finished]
    schedule = configs[0].schedule
    twins = [(record, row.following(material.scale, record.config.seed)) for record in records if row.may_follow]
    pairs = [(r, t) for r, c in twins if (t := material.records.get(c)) is not None and t.finished]
    following = [twin for _, twin in pairs]
    return {
        "label": row.label,
        "epochs": schedule.epochs,
        "rate": "constant" if schedule.fall == "steps" else "falling",
        "momentum": configs[0].model.momentum,
        "eps": configs[0].model.eps,
        "seeds": [record.config.seed for record in records],
        "errors": {measure.name: _center(records, measure) for measure in _MEASURES},
        "following": _center(following, _MEASURES[1]),
        "pairs": {
            "seeds": [twin.config.seed for twin in following],
            "same_weights": sum(r.series("loss") == t.series("loss") for r, t in pairs),
        },
        "saved": _difference(records, _MEASURES[0], _MEASURES[1]),
        "gained": _gained(pairs),
        "lost": _difference(records, _MEASURES[1], _MEASURES[3]),
        "left": _difference(following, _MEASURES[1], _MEASURES[3]),
        "unexplained": _difference(records, _MEASURES[2], _MEASURES[3]),
    }


def _center(records: list[Record], measure: Measure) -> dict[str, Any]:
    values = [value for record in records if (value := measure.of(record)) is not None]
    return {
        "values": values,
        "mean": fmean(values) if values else None,
        "std": statistics.std(values),
    }


def _difference(records: list[Record], first: Measure, second: Measure) -> dict[str, Any] | None:
    """How much larger the first error is than the second, for the trainings that have both."""
    return _paired((first.of(record), second.of(record)) for record in records)


def _gained(pairs: Iterable[tuple[Record, Record]]) -> dict[str, Any] | None:
    """How much larger the error is as trained than that of the twin that follows, seed by seed."""
    return _paired((_MEASURES[1].of(record), _MEASURES[1].of(twin)) for record, twin in pairs)


def _paired(values: Iterable[tuple[float | None, float | None]]) -> dict[str, Any] | None:
    known = [(a, b) for a, b in values if a is not None and b is not None]
    return asdict(statistics.paired([a for a, _ in known], [b for _, b in known])) if known else None


def _verdict(rows: list[dict[str, Any]]) -> list[str]:
    """What the lag costs where it is ignored, what the cover and following save, and what the lag does not explain."""
    known = [row for row in rows if row["lost"] and row["saved"]]
    if not known:
        return ["Nothing is known yet: no training has been evaluated with all kinds of statistics."]
    ignored = {id(row): row["lost"]["mean"] + row["saved"]["mean"] for row in known}
    worst = max(known, key=lambda row: ignored[id(row)])
    left = max(known, key=lambda row: row["lost"]["mean"])
    return [
        f"Where the lag is ignored, stale statistics cost up to {ignored[id(worst)]:.1f} points ({_named(worst)}); of "
        f"these the cover saves {worst['saved']['mean']:.1f}.",
        f"As trained, with the cover, they cost at most {left['lost']['mean']:.1f} points ({_named(left)}).",
        *_of_following([row for row in rows if row["left"] and row["gained"]]),
        *_of_the_rest([row for row in rows if row["unexplained"]]),
    ]


def _of_following(rows: list[dict[str, Any]]) -> list[str]:
    """What the lag costs where statistics follow, and what that saves on the same seeds."""
    if not rows:
        return []
    left, most = (max(rows, key=lambda row: row[key]["mean"]) for key in ("left", "gained"))
    pairs, same = (sum(counts) for counts in zip(*map(_pairs, rows), strict=True))
    return [
        f"With statistics that follow the weight they cost {left['left']['mean']:.1f} at most ({_named(left)}).",
        f"On the same seeds, following saves up to {most['gained']['mean']:.1f} points ({_named(most)}); in {same} of "
        f"{pairs} pairs of trainings the weights are the same.",
    ]


def _of_the_rest(rows: list[dict[str, Any]]) -> list[str]:
    """What of the gap between as trained and refreshed is left once nothing lags."""
    if not rows:
        return []
    row = max(rows, key=lambda row: abs(row["unexplained"]["mean"]))
    return [
        "Stale statistics explain the gap between as trained and refreshed errors but for "
        f"{abs(row['unexplained']['mean']):.2f} points: by so much, at most, settled and refreshed differ in the mean "
        f"of a row ({_named(row)})."
    ]


def _pairs(row: dict[str, Any]) -> tuple[int, int]:
    """How many trainings have a twin that follows, and how many of these the same weights."""
    return len(row["pairs"]["seeds"]), row["pairs"]["same_weights"]


def _named(row: dict[str, Any]) -> str:
    epochs = f"{row['epochs']} epoch{'s' if row['epochs'] > 1 else ''}"
    return f"{row['label']}, {epochs} at a {row['rate']} rate, momentum {row['momentum']:g}, ε {row['eps']:g}"


def _unmeasured(rows: list[dict[str, Any]]) -> list[str]:
    """A note if trainings were evaluated before these errors were known."""
    lacking = [row["label"] for row in rows if row["seeds"] and not row["errors"]["settled"]["values"]]
    if not lacking:
        return []
    return [f"Not all errors of {', '.join(lacking)} were measured: `orthocond evaluate RUN` measures them."]


def _markdown(content: dict[str, Any]) -> str:
    titles = [f"{measure.title} (%)" for measure in _MEASURES]
    head = [
        "method",
        "epochs",
        "rate",
        "momentum",
        "ε",
        *titles,
        "following (%)",
        "cover saves [95 %]",
        "following saves [95 %]",
        "lag costs as trained [95 %]",
        "lag costs following [95 %]",
        "seeds",
        "of these following (same weights)",
    ]
    rows = [
        [
            row["label"],
            str(row["epochs"]),
            row["rate"],
            f"{row['momentum']:g}",
            f"{row['eps']:g}",
            *(spread(row["errors"][measure.name]) for measure in _MEASURES),
            spread(row["following"]),
            *(interval(row[key]) for key in ("saved", "gained", "lost", "left")),
            str(len(row["seeds"])),
            "{} ({})".format(*_pairs(row)) if row["pairs"]["seeds"] else "–",
        ]
        for row in content["stale"]
    ]
    notes = "\n".join(f"- {note}" for note in content["notes"]) + "\n"
    verdict = "\n".join(content["verdict"])
    return "\n\n".join([f"# {content['title']}", content["text"], verdict, grid(head, rows), "## Notes", notes])


TABLES: tuple[Table, ...] = (
    StaleStatistics(
        "stale-statistics",
        "Stale statistics of whitening layers",
        "What the lag of running statistics costs in evaluation, on the small plain ConvNet, CIFAR-10, 32x32: for "
        "methods, momenta of the statistics, ridges and schedules, as trained, with the lag ignored, settled, "
        "refreshed, and with statistics that follow the weight.",
    ),
)
