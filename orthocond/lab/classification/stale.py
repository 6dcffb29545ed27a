"""Stale statistics: what the running covariance of a whitening layer costs in evaluation, and what helps."""

from collections.abc import Callable, Iterator
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
    "All five are test errors of the same weights; only the statistics of the normalization layers differ. As "
    'trained: the layer as it is, whose default `lag="cover"` adds to the running covariance what the last batch '
    'has in excess of it. Lag ignored: the running covariance alone, `lag="ignore"`. Settled: running averages of '
    "the same momentum after 40 more batches at a rate of 0, so that nothing lags. Refreshed: plain averages over 32 "
    "batches, by `update_statistics`. Following: the same training with `model.follow`, which changes no weight: "
    "running statistics go along with the weight of the stem, by `DecorrelatedBatchNorm2d.follow`.",
    "If settled equals refreshed, the running average itself costs nothing, and what as trained loses is the lag. "
    "What the cover saves is lag ignored less as trained; brackets are 95 % intervals over seeds.",
    "Constant: the rate rises for a quarter of the training and stays. Falling: it falls to 0 from there, so that "
    "weights hardly move at the end.",
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
    """Errors of the same weights with five kinds of statistics, for methods, momenta, ridges and schedules."""

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
    twins = [row.following(material.scale, record.config.seed) for record in records]
    following = [r for c in twins if row.may_follow and (r := material.records.get(c)) is not None and r.finished]
    return {
        "label": row.label,
        "epochs": schedule.epochs,
        "rate": "constant" if schedule.fall == "steps" else "falling",
        "momentum": configs[0].model.momentum,
        "eps": configs[0].model.eps,
        "seeds": [record.config.seed for record in records],
        "errors": {measure.name: _center(records, measure) for measure in _MEASURES},
        "following": _center(following, _MEASURES[1]),
        "left": _difference(following, _MEASURES[1], _MEASURES[3]),
        "lost": _difference(records, _MEASURES[1], _MEASURES[3]),
        "saved": _difference(records, _MEASURES[0], _MEASURES[1]),
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
    pairs = [(a, b) for r in records if (a := first.of(r)) is not None and (b := second.of(r)) is not None]
    return asdict(statistics.paired(*map(list, zip(*pairs, strict=True)))) if pairs else None


def _verdict(rows: list[dict[str, Any]]) -> list[str]:
    """What the lag costs where it is ignored, how much of that the cover saves, and where the default fails."""
    known = [row for row in rows if row["lost"] and row["saved"]]
    if not known:
        return ["Nothing is known yet: no training has been evaluated with all kinds of statistics."]
    ignored = {id(row): row["lost"]["mean"] + row["saved"]["mean"] for row in known}
    worst = max(known, key=lambda row: ignored[id(row)])
    left = max(known, key=lambda row: row["lost"]["mean"])
    followed = sorted((row for row in rows if row["left"]), key=lambda row: -row["left"]["mean"])
    return [
        f"Where the lag is ignored, stale statistics cost up to {ignored[id(worst)]:.1f} points ({_named(worst)}); of "
        f"these the cover saves {worst['saved']['mean']:.1f}.",
        f"As trained, with the cover, they cost at most {left['lost']['mean']:.1f} points ({_named(left)}).",
        *(
            f"With statistics that follow the weight they cost {row['left']['mean']:.1f} at most ({_named(row)})."
            for row in followed[:1]
        ),
    ]


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
        "lag costs as trained [95 %]",
        "following [95 %]",
        "seeds",
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
            interval(row["saved"]),
            interval(row["lost"]),
            interval(row["left"]),
            str(len(row["seeds"])),
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
