"""Figures of any comparison: curves of its rows, and differences with intervals."""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from textwrap import wrap
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
_LETTERS = 46  # of a line of a heading


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
    """Draw curves with the names of their rows at their ends."""
    low, high = min(min(c.low) for _, c in curves), max(max(c.high) for _, c in curves)
    if high > 0 and high - low <= 1e-6 * high:  # matplotlib finds no limits for a flat line, but for one at 0
        axes.set_ylim(0.5 * low, 2 * high)
    for row, found in curves:
        draw_curve(axes, found, row.name, dashed=is_paper_form(row) or row.nog_of == "update", marker=marker)
    label_ends(axes, [(c.x[-1], c.mean[-1], outcome.short(row), color(row.name)) for row, c in curves])


def differences(outcomes: Sequence[Outcome], rows: Sequence[Any]) -> Any:
    """How far each method is from the baseline, with 95 % intervals, beside what the paper says."""
    shown = [(o, m) for o in outcomes for m in o.table.measures if _compared(o, m.name)]
    if not shown:
        return None
    count = max(len(_compared(o, m.name)) for o, m in shown)
    headings = [_heading(o, m) for o, m in shown]
    left, wide, gap, height = 2.5, 3.4, 0.25, 0.29 * count
    step = height + 1.25 + 0.17 * max(heading.count("\n") for heading in headings)
    lines = math.ceil(len(shown) / _ABREAST)
    full, tall = left + min(len(shown), _ABREAST) * (wide + gap), lines * step
    figure = new_figure(full, tall)
    for index, (outcome, measure) in enumerate(shown):
        line, column = divmod(index, _ABREAST)
        corner = left + column * (wide + gap), tall - (line + 1) * step + 0.55
        axes = figure.add_axes((corner[0] / full, corner[1] / tall, wide / full, height / tall))
        dress(axes)
        rows = _compared(outcome, measure.name)
        _forest(axes, rows, measure.name)
        title(axes, headings[index], pad=20)
        base = next(r["label"] for r in outcome.summary["rows"] if r["method"]["name"] == outcome.table.baseline)
        side = "right" if measure.higher else "left"
        what = "95 % interval" if _several(row["measures"][measure.name]["difference"] for row in rows) else "one seed"
        axes.set_xlabel(f"difference to {base}, {what}; {side} is better")
        if column:
            axes.tick_params(labelleft=False)
    return figure


def _heading(outcome: Outcome, measure: Measure) -> str:
    """The network and data, and below them the measure, in lines that a panel has room for."""
    texts = outcome.experiment.label, lowered(measure.title.removesuffix(" (%)"))
    return "\n".join(line for text in texts for line in wrap(text, _LETTERS, break_on_hyphens=False))


def _several(differences: Iterable[Mapping[str, Any]]) -> bool:
    """Whether some difference is of several seeds, and so has an interval."""
    return any(found["low"] is not None for found in differences)


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
    ours = [row["measures"][name]["difference"] for row in rows]
    papers = [d for row in rows if (d := row["measures"][name].get("paper_difference"))]
    reach = 2.5 * max(abs(d["mean"]) for d in (*ours, *papers)) or 1.0
    low, high = axes.get_xlim()
    axes.set_xlim(max(low, -reach), min(high, reach))
    axes.set_yticks(range(len(rows)), [row["label"] for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(False, axis="y")
    _legend(axes, ours, papers)


def _legend(axes: Any, ours: Sequence[Mapping[str, Any]], papers: Sequence[Mapping[str, Any]]) -> None:
    """What the dots mean; with one seed nothing of ours is significant, and only the paper has intervals."""
    several = _several(ours)
    kinds = [("o", "0.25", "ours, significant")] * several + [("o", "white", "ours")]
    if papers:
        kinds.append(("D", "0.6", "paper, with its interval" if _several(papers) and not several else "paper"))
    for marker, fill, text in kinds:
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
    cells = [row["measures"][measure.name]["difference"] for row in shown]
    settings = list(dict.fromkeys(row["setting"] for row in shown))
    labels = [_verdict_label(row, row["measures"][measure.name]["seeds"], len(settings) > 1) for row in shown]
    reach = _reach(shown, cells)
    notes = _verdict_notes(cells, reach, len(rows) - len(shown))
    left, wide, height = 0.3 + LETTER * max(map(len, labels)), 4.6, 0.27 * len(shown)
    below = 0.5 + 0.17 * len(notes)
    full, tall = left + wide + 0.3, below + height + 0.4 + 0.17 * len(settings)
    figure = new_figure(full, tall)
    axes = figure.add_axes((left / full, below / tall, wide / full, height / tall))
    dress(axes)
    axes.axvline(0, color="0.35", linewidth=0.9)
    for place, (row, found) in enumerate(zip(shown, cells, strict=True)):
        if row["margin"]:
            axes.fill_betweenx([place - 0.4, place + 0.4], -row["margin"], row["margin"], color="0.93", linewidth=0)
        tint = {"holds": "#009E73", "fails": "#D55E00", "cannot tell": "0.45"}.get(row["verdict"], "#0072B2")
        _dot(axes, found, place, tint, tint if found.get("p_holm", 1) < LEVEL else "white", "o")
    low, high = axes.get_xlim()
    axes.set_xlim(max(low, -reach), min(high, reach))
    for place, cell in enumerate(cells):
        _arrows(axes, cell, place)
    axes.set_yticks(range(len(shown)), labels)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.grid(False, axis="y")
    what = "difference with its 95 % interval" if _several(cells) else "difference, one seed"
    side = "right" if measure.higher else "left"
    axes.set_xlabel("\n".join([f"{lowered(measure.title)}: {what}; {side} is better", *notes]))
    colors = ["green: holds, red: fails, blue: equivalent; filled: significant"] if _several(cells) else []
    title(axes, "\n".join([*settings, *colors]))
    return figure


def _reach(rows: Sequence[Mapping[str, Any]], cells: Sequence[Mapping[str, Any]]) -> float:
    """How far the axis goes to both sides: intervals that are much longer than the others tell little, and are cut."""
    ends = [max(abs(cell[end] or 0.0) for end in ("mean", "low", "high")) for cell in cells]
    clear = (abs(cell["mean"]) for cell, row in zip(cells, rows, strict=True) if row["verdict"] != "cannot tell")
    return max(2 * median(ends), 2.5 * max(clear, default=0.0), *(1.15 * abs(cell["mean"]) for cell in cells)) or 1.0


def _verdict_notes(cells: Sequence[Mapping[str, Any]], reach: float, missing: int) -> list[str]:
    """What a reader has to know of the intervals that are cut and the contrasts that are not there."""
    cut = any(abs(cell[end] or 0.0) > reach for cell in cells for end in ("low", "high"))
    notes = ["arrows: the interval goes beyond the axis"] if cut else []
    if missing:
        notes.append(f"{missing} {'contrast is' if missing == 1 else 'contrasts are'} not trained yet and not shown")
    return notes


def _verdict_label(row: dict[str, Any], seeds: Sequence[int], several: bool) -> str:
    """The contrast, its setting if there are several, and that it has one seed only."""
    parts = [row["contrast"], row["setting"].partition(" (")[0] if several else "", "1 seed" if len(seeds) == 1 else ""]
    return ", ".join(filter(None, parts))


def _arrows(axes: Any, found: dict[str, Any], y: float) -> None:
    """An arrow head at each border that an interval crosses."""
    low, high = axes.get_xlim()
    if found["low"] is not None and found["low"] < low:
        axes.plot([low], [y], "<", color="0.45", markersize=5, clip_on=False)
    if found["high"] is not None and found["high"] > high:
        axes.plot([high], [y], ">", color="0.45", markersize=5, clip_on=False)


def _dot(axes: Any, found: dict[str, Any], y: float, tint: str, fill: str, marker: str) -> None:
    if found["low"] is not None:
        axes.plot([found["low"], found["high"]], [y, y], color=tint, linewidth=1.3, solid_capstyle="butt")
    axes.plot([found["mean"]], [y], marker, color=tint, markerfacecolor=fill, markersize=_SIZES[marker])
