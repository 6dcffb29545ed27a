"""Figures of any comparison: curves of its rows, and differences with intervals."""

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from orthocond.lab.tables.comparison import Measure, Outcome
from orthocond.lab.tables.drawing import (
    LETTER,
    Curve,
    color,
    curve,
    draw_curve,
    dress,
    label_ends,
    new_figure,
    title,
)
from orthocond.lab.tables.statistics import LEVEL
from orthocond.lab.tables.text import lowered

_SIZES = {"o": 5.5, "D": 3.5}
_ABREAST = 4  # panels


def is_paper_form(method: Any) -> bool:
    """Whether a method has step lengths by the paper's formula."""
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
        draw_curve(axes, found, row.name, dashed=is_paper_form(row) or row.nog_of == "update", marker=marker)
    label_ends(axes, [(found.mean[-1], outcome.short(row), color(row.name)) for row, found in curves])


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
        title(axes, f"{outcome.experiment.label}: {lowered(measure.title.removesuffix(' (%)'))}", pad=20)
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


def verdicts(rows: Sequence[dict[str, Any]], measure: Measure) -> Any:
    """The contrasts of a table of claims with 95 % intervals, filled where significant; margins are shaded."""
    shown = [row for row in rows if row["measures"][measure.name]["difference"]]
    if not shown:
        return None
    labels = [f"{row['contrast']}, {row['setting'].partition(' (')[0]}" for row in shown]
    left, wide, height = 0.3 + LETTER * max(map(len, labels)), 4.6, 0.27 * len(shown)
    full, tall = left + wide + 0.3, height + 0.9
    figure = new_figure(full, tall)
    axes = figure.add_axes((left / full, 0.5 / tall, wide / full, height / tall))
    dress(axes)
    axes.axvline(0, color="0.35", linewidth=0.9)
    for place, row in enumerate(shown):
        found = row["measures"][measure.name]["difference"]
        if row["margin"]:
            axes.fill_betweenx([place - 0.4, place + 0.4], -row["margin"], row["margin"], color="0.93", linewidth=0)
        tint = {"holds": "#009E73", "fails": "#D55E00", "cannot tell": "0.45"}.get(row["verdict"], "#0072B2")
        _dot(axes, found, place, tint, tint if found.get("p_holm", 1) < LEVEL else "white", "o")
    # Intervals that are much longer than the others tell little, and end at the border.
    cells = [row["measures"][measure.name]["difference"] for row in shown]
    ends = [max(abs(cell[end] or 0.0) for end in ("mean", "low", "high")) for cell in cells]
    clear = (abs(cell["mean"]) for cell, row in zip(cells, shown, strict=True) if row["verdict"] != "cannot tell")
    reach = max(2 * median(ends), 2.5 * max(clear, default=0.0), *(1.15 * abs(cell["mean"]) for cell in cells)) or 1.0
    low, high = axes.get_xlim()
    axes.set_xlim(max(low, -reach), min(high, reach))
    axes.set_yticks(range(len(shown)), labels)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.grid(False, axis="y")
    side = "right" if measure.higher else "left"
    axes.set_xlabel(f"{lowered(measure.title)}: difference with its 95 % interval; {side} is better")
    title(axes, "green: holds, red: fails, blue: equivalent; filled: significant")
    return figure


def _dot(axes: Any, found: dict[str, Any], y: float, tint: str, fill: str, marker: str) -> None:
    if found["low"] is not None:
        axes.plot([found["low"], found["high"]], [y, y], color=tint, linewidth=1.3, solid_capstyle="butt")
    axes.plot([found["mean"]], [y], marker, color=tint, markerfacecolor=fill, markersize=_SIZES[marker])
