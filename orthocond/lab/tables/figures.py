"""The paper's figures of classifiers: conditioning, best accuracy, learning rates; and differences with intervals."""

import math
from collections.abc import Sequence
from typing import Any

from orthocond.lab.tables.comparison import Outcome
from orthocond.lab.tables.drawing import (
    Curve,
    color,
    curve,
    draw_curve,
    dress,
    ink,
    label_ends,
    new_figure,
    panels,
    save,
    title,
)

_SIZES = {"o": 5.5, "D": 3.5}
_ABREAST = 4  # panels
_CONDITIONS = {"condition": "κ(P + εI)", "condition_on_range": "κ on the range of P"}


def _is_paper_form(method: Any) -> bool:
    return method.olr == "paper" and "olr" in method.name.split("+")


def all_curves(
    outcome: Outcome, rows: Sequence[Any], key: str, *, log: bool, x: str = "step"
) -> list[tuple[Any, Curve]]:
    """The curves of a quantity for the rows that have it."""
    found = [(row, curve(outcome.records.get(row, ()), key, log=log, x=x)) for row in rows]
    return [(row, c) for row, c in found if c is not None]


def draw_all(axes: Any, outcome: Outcome, curves: Sequence[tuple[Any, Curve]], marker: str | None = None) -> None:
    """Draw curves with the names of their rows at the right."""
    low, high = min(min(c.low) for _, c in curves), max(max(c.high) for _, c in curves)
    if high - low <= 1e-6 * abs(high):  # matplotlib finds no limits for a flat line
        axes.set_ylim(0.5 * low, 2 * high)
    for row, found in curves:
        draw_curve(axes, found, row.name, dashed=_is_paper_form(row) or row.nog_of == "update", marker=marker)
    label_ends(axes, [(found.mean[-1], outcome.short(row), color(row.name)) for row, found in curves])


def conditioning(outcomes: Sequence[Outcome], rows: Sequence[Any]) -> Any:
    """Condition numbers over training: of ``P + εI``, and of P on its range; lines are means, bands all seeds."""
    shown = [o for o in outcomes if all_curves(o, rows, "condition_on_range", log=True)]
    if not shown:
        return None
    figure, grid = panels(len(shown), len(_CONDITIONS), [outcomes[0].short(row) for row in rows])
    for outcome, line in zip(shown, grid, strict=True):
        for axes, (key, name) in zip(line, _CONDITIONS.items(), strict=True):
            title(axes, f"{outcome.experiment.label}: {name}")
            axes.set_xlabel("training step")
            axes.set_yscale("log")
            if curves := all_curves(outcome, rows, key, log=True):
                draw_all(axes, outcome, curves)
            else:
                axes.set(xticks=[], yticks=[])
                axes.minorticks_off()
                words = "infinite: P is singular\nand there is no ridge"
                axes.text(0.5, 0.5, words, ha="center", va="center", color="0.4", transform=axes.transAxes)
    return figure


def convergence(outcomes: Sequence[Outcome], rows: Sequence[Any]) -> Any:
    """Best validation accuracy so far, after each epoch."""
    drawn = [(o, curves) for o in outcomes if (curves := all_curves(o, rows, "best_error", log=False, x="epoch"))]
    if not drawn:
        return None
    figure, grid = panels(1, len(drawn), [outcomes[0].short(row) for row in rows])
    for axes, (outcome, curves) in zip(grid[0], drawn, strict=True):
        title(axes, outcome.experiment.label)
        axes.set_xlabel("epoch")
        axes.set_ylabel("best validation accuracy (%)")
        few = max(len(found.x) for _, found in curves) <= 12
        if few:
            axes.set_xticks(curves[0][1].x)
        accuracies = [
            (row, Curve(c.x, *([100 - e for e in column] for column in (c.mean, c.high, c.low)))) for row, c in curves
        ]
        draw_all(axes, outcome, accuracies, marker="." if few else None)
    return figure


def learning_rate(outcomes: Sequence[Outcome], rows: Sequence[Any]) -> Any:
    """Step lengths of the Pre-SVD layer beside the schedule of all other layers, and how often OLR chose them.

    A column for each method, a line for each form of OLR.
    """
    shown = {row: records for o in outcomes for row in rows if (records := o.records.get(row))}
    if not any("olr" in row.name.split("+") for row in shown):
        return None
    columns = list(dict.fromkeys(row.name for row in shown))
    forms = sorted({_is_paper_form(row) for row in shown})
    figure, grid = panels(len(forms), len(columns))
    low = min(v for records in shown.values() for r in records for k in ("lr", "eta") for v in r.series(k)[1] if v > 0)
    for form, line in zip(forms, grid, strict=True):
        for axes, column in zip(line, columns, strict=True):
            row = next((r for r in shown if r.name == column and _is_paper_form(r) == form), None)
            if row is None:
                axes.axis("off")
                continue
            _rates(axes, shown[row], row)
            axes.set_ylim(bottom=low / 2)
            name = outcomes[0].short(row)
            title(axes, name if "olr" in row.name.split("+") else f"{name}, no OLR")
            axes.set_xlabel("training step")
    text = "gray: the learning rate\ndots: step length η of the Pre-SVD layer,\nat logged steps of all seeds"
    text += "\n%: of the steps at this rate, how many OLR changes"
    corner = grid[0][0]
    corner.text(0.03, 0.04, text, transform=corner.transAxes, size=8.5, color="0.35", linespacing=1.5, va="bottom")
    grid[0][0].set_ylabel("step length η")
    return figure


def _rates(axes: Any, records: Sequence[Any], row: Any) -> None:
    """The η of every seed at the steps that were logged, over the schedule; how often OLR acts at each rate of it."""
    steps, schedule = records[0].series("lr")
    axes.step(steps, schedule, where="post", color="0.75", linewidth=4, solid_capstyle="butt")
    axes.set_yscale("log")
    axes.set_ylim(top=max(schedule) * 2.5)
    x: list[int] = []
    y: list[float] = []
    for record in records:
        pairs = list(zip(*record.series("eta"), strict=True))
        for step, eta in pairs[:: max(1, len(pairs) // 300)]:
            x.append(step)
            y.append(eta)
    # As pixels: so many dots are a large SVG.
    dots = {"markersize": 5, "alpha": 0.6, "markeredgewidth": 0, "rasterized": True}
    axes.plot(x, y, linestyle="", marker=".", color=color(row.name), **dots)
    for rate in dict.fromkeys(schedule):
        shares = [share for record in records if (share := _share(record, rate)) is not None]
        if shares:
            places = [step for step, lr in zip(steps, schedule, strict=True) if lr == rate]
            axes.annotate(
                f"{100 * sum(shares) / len(shares):.0f} %",
                (places[len(places) // 2], rate),
                xytext=(0, 5),
                textcoords="offset points",
                ha="center",
                color=ink(color(row.name)),
                size=8.5,
            )


def _share(record: Any, rate: float) -> float | None:
    """The fraction of steps at which OLR acted while the schedule had a rate, from fractions of all steps so far."""
    lines = [(0, 0.0, None)]
    lines += [(m["step"], m["step"] * m["olr_occurrence"], m["lr"]) for m in record.metrics if "olr_occurrence" in m]
    inside = [i for i, line in enumerate(lines) if line[2] == rate]
    if not inside:
        return None
    (start, before, _), (end, after, _) = lines[inside[0] - 1], lines[inside[-1]]
    return (after - before) / (end - start)


def differences(outcomes: Sequence[Outcome], rows: Sequence[Any]) -> Any:
    """How far each method is from the baseline, with 95 % intervals, beside what the paper says."""
    shown = [(o, m) for o in outcomes for m in o.table.measures if _compared(o, m.name)]
    if not shown:
        return None
    count = max(len(_compared(o, m.name)) for o, m in shown)
    left, wide, gap, height = 2.5, 3.4, 0.25, 0.29 * count
    lines = math.ceil(len(shown) / _ABREAST)
    full, tall = left + min(len(shown), _ABREAST) * (wide + gap), lines * (height + 1.25)
    figure = new_figure(full, tall)
    for index, (outcome, measure) in enumerate(shown):
        line, column = divmod(index, _ABREAST)
        corner = left + column * (wide + gap), tall - (line + 1) * (height + 1.25) + 0.55
        axes = figure.add_axes((corner[0] / full, corner[1] / tall, wide / full, height / tall))
        dress(axes)
        _forest(axes, _compared(outcome, measure.name), measure.name)
        subject = measure.title.removesuffix(" (%)")
        subject = subject if subject[:2].isupper() else subject[0].lower() + subject[1:]
        title(axes, f"{outcome.experiment.label}: {subject}", pad=20)
        base = next(r["label"] for r in outcome.summary["rows"] if r["method"]["name"] == outcome.table.baseline)
        side = "right" if measure.higher else "left"
        axes.set_xlabel(f"difference to {base}, 95 % interval; {side} is better")
        if column:
            axes.tick_params(labelleft=False)
    return figure


def _compared(outcome: Outcome, name: str) -> list[dict[str, Any]]:
    return [row for row in outcome.summary["rows"] if row["measures"][name].get("difference")]


def _forest(axes: Any, rows: Sequence[dict[str, Any]], name: str) -> None:
    """A line for each row: ours above, the paper's below; filled where significant."""
    axes.axvline(0, color="0.35", linewidth=0.9)
    axes.margins(x=0.06)
    for place, row in enumerate(rows):
        cell = row["measures"][name]
        tint = color(row["method"]["name"])
        certain = cell["difference"].get("verdict") in ("better", "worse")
        _dot(axes, cell["difference"], place - 0.12, tint, tint if certain else "white", "o")
        if cell.get("paper_difference"):
            _dot(axes, cell["paper_difference"], place + 0.22, "0.6", "0.6", "D")
    # Two or three seeds have intervals that would hide all others: those end at the border.
    found = [
        d for row in rows for d in (row["measures"][name]["difference"], row["measures"][name].get("paper_difference"))
    ]
    reach = 2.5 * max(abs(d["mean"]) for d in found if d) or 1.0
    low, high = axes.get_xlim()
    axes.set_xlim(max(low, -reach), min(high, reach))
    axes.set_yticks(range(len(rows)), [row["label"] for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(False, axis="y")
    kinds = [("o", "0.25", "ours, significant"), ("o", "white", "ours"), ("D", "0.6", "paper")]
    compared = any(row["measures"][name].get("paper_difference") for row in rows)
    for marker, fill, text in kinds if compared else kinds[:2]:
        edge = "0.6" if marker == "D" else "0.25"
        axes.plot([], [], marker, color=edge, markerfacecolor=fill, markersize=_SIZES[marker], label=text)
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(-0.02, 0.99),
        ncols=3,
        frameon=False,
        fontsize=8,
        handletextpad=0.1,
        columnspacing=0.9,
        borderaxespad=0.1,
    )


def _dot(axes: Any, found: dict[str, Any], y: float, tint: str, fill: str, marker: str) -> None:
    if found["low"] is not None:
        axes.plot([found["low"], found["high"]], [y, y], color=tint, linewidth=1.3, solid_capstyle="butt")
    axes.plot([found["mean"]], [y], marker, color=tint, markerfacecolor=fill, markersize=_SIZES[marker])


__all__ = ["conditioning", "convergence", "differences", "learning_rate", "save"]
