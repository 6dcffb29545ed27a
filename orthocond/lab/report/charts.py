"""Charts with hover: curves over the steps, differences with their intervals, spectra."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import altair as alt

from orthocond.lab.report.content import Chart, Grid, color, dashes
from orthocond.lab.report.quantities import Quantity, listed, number
from orthocond.lab.report.sources import Group, Training

_POINTS = 400  # of a line; more cannot be seen
_MEAN_FROM = 13  # trainings from which lines are means over seeds
_FEW = 4  # lines, each of which is told in the sentence under a chart
_DOTS = 10  # points of a line up to which they are drawn: a single one makes no line
_WIDE = 5  # largest over smallest value from which an axis may be logarithmic; below, it would have one tick
_HEIGHT = 210


def curves(groups: Sequence[Group], quantity: Quantity, names: Sequence[str]) -> Chart | None:
    """A quantity over the steps: a line for each training, or their mean over seeds where there are many.

    Args:
        groups: The trainings.
        quantity: What is drawn.
        names: Labels of all groups of the page, on whose places the colors depend.

    Returns:
        The chart; None if there is nothing to draw, or one value only.
    """
    averaged = sum(len(g.trainings) for g in groups) >= _MEAN_FROM
    rows: list[dict[str, Any]] = []
    ends = []
    for each in groups:
        lines = [("mean over seeds", _mean(each.trainings, quantity))] if averaged else _single(each, quantity)
        for run, points in lines:
            shown = [(s, v) for s, v in points if math.isfinite(v) and (quantity.style != "log" or v > 0)]
            shown = _thinned(shown)
            rows += [_point(each.label, run, step, quantity.factor * value) for step, value in shown]
            if shown:
                values = [v for _, v in shown]
                name = each.label if len(lines) == 1 else f"{each.label}, {run}"
                ends.append((name, shown[0], shown[-1], min(values), max(values)))
    if len({row["value"] for row in rows}) < 2:
        return None
    head = ("", "first", "last", "smallest", "largest", "last step")
    grid = Grid(
        head,
        [[name, *map(quantity.write, (a[1], b[1], low, high)), f"{b[0]:,}"] for name, a, b, low, high in ends],
        "Values",
        folded=True,
    )
    title = f"{quantity.title}{quantity.unit}{', mean over seeds' if averaged else ''}"
    meaning = f"{quantity.meaning[0].upper()}{quantity.meaning[1:]}. " if quantity.meaning else ""
    last = {name: end[1] for name, _, end, *_ in ends}
    return Chart(title, f"{meaning}{_ending(last, quantity)}.", _curve_spec(rows, quantity, names), grid)


def _ending(last: Mapping[str, float], quantity: Quantity) -> str:
    """Where the lines end, in a sentence: all of a few, both ends of many."""
    if len(last) == 1:
        return f"It ends at {quantity.write(next(iter(last.values())))}"
    if len(last) <= _FEW:
        return listed([f"{name} ends at {quantity.write(value)}" for name, value in last.items()])
    low, high = min(last, key=last.__getitem__), max(last, key=last.__getitem__)
    return (
        f"Lowest at the end is {low} with {quantity.write(last[low])}, highest {high} with {quantity.write(last[high])}"
    )


def _point(line: str, of: str, step: int, value: float) -> dict[str, Any]:
    """A row of the data, as hovering shows it."""
    return {"line": line, "of": of, "step": step, "value": float(f"{value:.5g}")}


def _single(each: Group, quantity: Quantity) -> list[tuple[str, list[tuple[int, float]]]]:
    return [(f"seed {t.config.get('seed', '–')}", t.series(quantity.key)) for t in each.trainings]


def _mean(trainings: Sequence[Training], quantity: Quantity) -> list[tuple[int, float]]:
    """The mean of the steps that all have; of logarithms where the axis is logarithmic."""
    columns: dict[int, list[float]] = {}
    for training in trainings:
        for step, value in training.series(quantity.key):
            columns.setdefault(step, []).append(value)
    full = {step: values for step, values in columns.items() if len(values) == len(trainings)}
    log = quantity.style == "log"
    return [
        (step, math.exp(fmean(map(math.log, values))) if log else fmean(values))
        for step, values in sorted(full.items())
        if all(math.isfinite(v) and (v > 0 or not log) for v in values)
    ]


def _thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    every = math.ceil(len(points) / _POINTS)
    return points if every < 2 else [*points[:-1:every], points[-1]]


def _curve_spec(rows: list[dict[str, Any]], quantity: Quantity, names: Sequence[str]) -> dict[str, Any]:
    near = alt.selection_point(name="near", nearest=True, on="pointerover", clear="pointerout", encodings=["x", "y"])
    values = [row["value"] for row in rows]
    log = quantity.style == "log" and max(values) >= _WIDE * min(values)
    scale = alt.Scale(type="log", nice=False) if log else alt.Scale(zero=quantity.style == "part")
    sparse = max(Counter((row["line"], row["of"]) for row in rows).values()) <= _DOTS
    base = _switchable().encode(
        x=alt.X("step:Q", title="step", scale=alt.Scale(nice=False), axis=alt.Axis(tickCount=5, grid=False)),
        y=alt.Y("value:Q", title=None, scale=scale, axis=_axis(values, log)),
        color=alt.Color("line:N", scale=_scale(names, [color(i) for i in range(len(names))]), legend=None),
    )
    line = base.mark_line(strokeWidth=1.8, clip=True).encode(
        detail="of:N",
        strokeDash=alt.StrokeDash(
            "line:N", scale=_scale(names, [list(dashes(i)) for i in range(len(names))]), legend=None
        ),
    )
    # Vega-Lite's own list of fields is wrong where the nearest point is sought, hence the whole of a row.
    dots = (
        base.mark_point(filled=True, size=60, tooltip=alt.TooltipContent("data"))
        .encode(opacity=alt.condition(near, alt.value(1), alt.value(0.8 if sparse else 0), empty=False))
        .add_params(near)
    )
    return _finished(alt.layer(line, dots).add_params(_hidden()).properties(width="container", height=_HEIGHT), rows)


def _switchable() -> alt.Chart:
    """The beginning of a chart whose lines the legend of the page switches on and off."""
    return alt.Chart(alt.NamedData("rows")).transform_filter("indexof(hidden, datum.line) < 0")


def _hidden() -> alt.Parameter:
    return alt.param(name="hidden", value=[])


def _scale(names: Sequence[str], values: Sequence[Any]) -> alt.Scale:
    return alt.Scale(domain=list(names), range=list(values))


def _axis(values: Sequence[float], log: bool) -> alt.Axis:
    if log:
        form = ".0e" if max(values) >= 1e5 else ",.6~g"
        return alt.Axis(values=_log_ticks(min(values), max(values)), labelExpr=f"format(datum.value, '{form}')")
    return alt.Axis(format=".3~s" if max(map(abs, values)) >= 1e4 else ",.6~g", tickCount=5)


def _log_ticks(low: float, high: float) -> list[float]:
    """About five round numbers: powers of ten, with 2 and 5 times them where the range is short.

    Example:
        >>> _log_ticks(1.1, 7.6), _log_ticks(90, 6e5)
        ([2, 5], [100, 1000, 10000, 100000])
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = math.ceil((last - first) / 6)
    powers = [10.0**e for e in range(first, last + 1, every)]
    steps = (1, 2, 5) if last - first <= 2 else (1,)
    found = [s * p for p in powers for s in steps if low <= s * p <= high]
    return [int(v) if v == int(v) else v for v in found]


def differences(rows: Sequence[Mapping[str, Any]], title: str, text: str, x_title: str) -> Chart | None:
    """Differences from a baseline with their intervals, ours and the paper's.

    Args:
        rows: ``label``, ``who`` (``ours`` or ``paper``), ``mean``, ``low``, ``high``, and ``sure`` in words.
        title: Title of the chart.
        text: What it shows, in a sentence.
        x_title: Title of the axis.
    """
    if not rows:
        return None
    labels = list(dict.fromkeys(row["label"] for row in rows))
    both = any(row["who"] == "paper" for row in rows)
    who = alt.Scale(domain=["ours", "paper"], range=[color(0), color(1)])
    legend = alt.Legend(title=None, orient="top") if both else None
    base = alt.Chart(alt.NamedData("rows")).encode(
        y=alt.Y("label:N", sort=labels, title=None, axis=alt.Axis(labelLimit=190)),
        yOffset=alt.YOffset("who:N", sort=["ours", "paper"]),
        color=alt.Color("who:N", scale=who, legend=legend),
        tooltip=[
            alt.Tooltip("label:N", title="method"),
            alt.Tooltip("who:N", title="of"),
            alt.Tooltip("mean:Q", title="difference", format="+.3~g"),
            alt.Tooltip("low:Q", title="95 % from", format="+.3~g"),
            alt.Tooltip("high:Q", title="to", format="+.3~g"),
            alt.Tooltip("sure:N", title="how sure"),
        ],
    )
    zero = alt.Chart(alt.InlineData([{"zero": 0}])).mark_rule(strokeDash=[4, 3], color="currentColor", opacity=0.5)
    bars = base.mark_rule(strokeWidth=2).encode(
        x=alt.X("low:Q", title=x_title, axis=alt.Axis(tickCount=8)), x2="high:Q"
    )
    dots = base.mark_point(filled=True, size=70, opacity=1).encode(
        x="mean:Q",
        shape=alt.Shape("who:N", scale=alt.Scale(domain=["ours", "paper"], range=["circle", "diamond"]), legend=legend),
    )
    height = 30 * len(labels)
    chart = alt.layer(zero.encode(x=alt.X("zero:Q")), bars, dots).properties(width="container", height=height)
    return Chart(title, text, _finished(chart, [dict(row) for row in rows]), wide=True)


Layers = Mapping[str, Sequence[Sequence[float]]]
"""By the label of a group the singular values of each of its layers."""


def spectra(before: Layers, after: Layers, names: Sequence[str]) -> Chart | None:
    """Singular values of weights before and after the training, the largest first.

    Args:
        before: Those before, where they are known.
        after: Those after.
        names: Labels of all groups of the page.
    """
    several = any(len(layers) > 1 for layers in after.values())
    rows, rests = [], []
    for when, values in (("before", before), ("after", after)):
        for label, layers in values.items():
            for layer, column in enumerate(layers, 1):
                ordered = sorted((v for v in column if v > 0), reverse=True)
                of = f"layer {layer}, {when}" if several else when
                rows += [_point(label, of, i, v) | {"when": when} for i, v in enumerate(ordered, 1)]
                if ordered:
                    condition = ordered[0] / ordered[-1]
                    rests.append([f"{label}, {of}", *map(number, (ordered[0], ordered[-1], condition))])
    if not rows:
        return None
    when_scale = alt.Scale(domain=["before", "after"], range=[[3, 3], [1, 0]])
    legend = alt.Legend(title=None, orient="top") if before else None
    base = _switchable().encode(
        x=alt.X("step:Q", title="place, the largest first", axis=alt.Axis(tickMinStep=1, grid=False, tickCount=6)),
        y=alt.Y("value:Q", title=None, scale=alt.Scale(zero=True), axis=alt.Axis(tickCount=5)),
        color=alt.Color("line:N", scale=_scale(names, [color(i) for i in range(len(names))]), legend=None),
        detail="of:N",
    )
    chart = alt.layer(
        base.mark_line(strokeWidth=1.5).encode(strokeDash=alt.StrokeDash("when:N", scale=when_scale, legend=legend)),
        base.mark_point(filled=True, size=45, tooltip=alt.TooltipContent("data")).encode(
            opacity=alt.condition("datum.when == 'before'", alt.value(0.45), alt.value(1))
        ),
    )
    text = listed([f"{where}: from {low} to {high}, κ = {k}" for where, high, low, k in rests], 6)
    grid = Grid(("", "largest", "smallest", "κ(W)"), rests, "Values", folded=True)
    spec = _finished(chart.add_params(_hidden()).properties(width="container", height=_HEIGHT), rows)
    title = f"Singular values of the treated weight{' before and' if before else ''} after the training"
    return Chart(title, f"{text}.", spec, grid, wide=True)


def _finished(chart: Any, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The specification with its rows inside; colors of text and axes are those of the page."""
    ink = "currentColor"
    chart = (
        chart.configure(background="transparent", font="system-ui, sans-serif")
        .configure_view(stroke=None)
        .configure_axis(
            labelColor=ink, titleColor=ink, gridColor=ink, gridOpacity=0.13, domainColor=ink, domainOpacity=0.4,
            tickColor=ink, tickOpacity=0.4, titleFontWeight="normal",
        )
        .configure_legend(labelColor=ink, titleColor=ink)
    )  # fmt: skip
    spec: dict[str, Any] = chart.to_dict(validate=False)  # which takes most of the time
    spec.pop("$schema", None)
    spec["autosize"] = {"type": "fit-x", "contains": "padding"}
    spec.setdefault("datasets", {})["rows"] = list(rows)
    return spec
