"""Groups of trainings beside each other: what each reached, and how sure a difference is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from orthocond.lab.report.problems import unequal_length
from orthocond.lab.report.quantities import Quantity, result, signed
from orthocond.lab.report.sources import Group
from orthocond.lab.tables.statistics import holm, paired

LEVEL = 0.05
_UNTREATED = ("svd", "none", "bn")


@dataclass(frozen=True)
class Compared:
    """A group in a comparison.

    Attributes:
        group: The group.
        values: What its finished trainings have reached, by their seeds.
        mean: Their mean; None if none has been measured.
        difference: The mean difference from the baseline, over the seeds that both have; None without such.
        low: Lower end of its 95 % interval; None with one seed.
        high: Upper end.
        p: p-value after Holm's correction; None with one seed.
        count: Seeds that both have.
    """

    group: Group
    values: dict[object, float]
    mean: float | None
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    count: int = 0


def compare(groups: Sequence[Group], quantity: Quantity | None) -> tuple[list[Compared], Group]:
    """A row for each group, compared with the untreated one or else the first, and that one.

    Groups of unequal length have no difference.
    """
    base = next((g for name in _UNTREATED for g in groups if g.first.method == name), groups[0])
    rows = [Compared(g, *_measured(g, quantity)) for g in groups]
    reference = next(row for row in rows if row.group is base).values
    compared = []
    for row in rows:
        seeds = [seed for seed in row.values if seed in reference]
        if row.group is base or not seeds or unequal_length([*row.group.trainings, *base.trainings]):
            compared.append(row)
            continue
        found = paired([row.values[s] for s in seeds], [reference[s] for s in seeds])
        compared.append(
            Compared(row.group, row.values, row.mean, found.mean, found.low, found.high, found.p, len(seeds))
        )
    tested = [row for row in compared if row.p is not None]
    corrected = dict(zip(map(id, tested), holm([row.p for row in tested if row.p is not None]), strict=True))
    return [
        Compared(r.group, r.values, r.mean, r.difference, r.low, r.high, corrected.get(id(r)), r.count)
        for r in compared
    ], base


def _measured(group: Group, quantity: Quantity | None) -> tuple[dict[object, float], float | None]:
    values = {}
    finished = [t for t in group.trainings if t.state == "finished"]  # others are not at the same point
    for training in finished if quantity is not None else ():
        value = result(training, quantity)  # type: ignore[arg-type]
        if value is not None and math.isfinite(value):
            values[training.config.get("seed")] = value
    return values, fmean(values.values()) if values else None


def interval(mean: float | None, low: float | None, high: float | None, factor: float = 1) -> str:
    """A difference with its interval.

    Example:
        >>> interval(-0.4, -2.2, 1.4), interval(0.5, None, None)
        ('−0.40 [−2.20, +1.40]', '+0.50')
    """
    if mean is None:
        return "–"
    ends = f" [{signed(factor * low)}, {signed(factor * high)}]" if low is not None and high is not None else ""
    return signed(factor * mean) + ends


def how_sure(p: float | None, count: int) -> str:
    """How sure a difference is, in words.

    Example:
        >>> how_sure(0.02, 5), how_sure(0.4, 5), how_sure(None, 1)
        ('significant, p = 0.020', 'may be chance, p = 0.40', 'one seed only')
    """
    if p is None:
        return "one seed only" if count == 1 else "–"
    text = "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < LEVEL else f"p = {p:.2f}"
    return f"{'significant' if p < LEVEL else 'may be chance'}, {text}"
