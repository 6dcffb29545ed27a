"""Pieces of figures: colors that stay with their method, curves over seeds, labels at the ends of lines."""

import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from orthocond.lab.tables.records import Record

# Okabe and Ito's colors, which people with any kind of color vision can tell apart, and two of Tol's.
_BLACK, _ORANGE, _SKY, _GREEN, _BLUE, _RED, _PURPLE = (
    *("#000000", "#E69F00", "#56B4E9", "#009E73"),
    *("#0072B2", "#D55E00", "#CC79A7"),
)
_GRAY, _WINE, _TEAL = "#8C8C8C", "#882255", "#44AA99"
# Methods that stand in the same figure differ; those of the same kind are alike in all figures.
_COLORS = (
    {"svd": _BLACK, "ns": _GRAY, "bn": _SKY}
    | {"sn": _ORANGE, "ol": _SKY, "ow": _GREEN, "wi": _WINE, "mow": _TEAL, "bn+wi": _WINE}
    | {"nog": _BLUE, "nog+sn": _ORANGE, "nog+ol": _SKY, "nog+ow": _GREEN}
    | {"olr": _RED, "nog+olr": _ORANGE, "ow+olr": _GREEN, "nog+ow+olr": _PURPLE}
    | {"none": _BLACK, "stiefel": _GRAY, "hp": _PURPLE, "orojar": _WINE, "lvp": _TEAL}
    | {"ol+hp": _PURPLE, "ol+orojar": _WINE, "ol+lvp": _TEAL}
)
_MANY = 80  # points of a curve, so that files stay small
_FONT = 8.5
_LARGE = 100_000  # bytes of a PNG

LETTER = 0.0715
"""Inches that a letter of a label takes."""
_PANEL, _HEIGHT = 3.4, 2.9  # inches of a panel
_LINE = 0.17  # inches of another line of a heading


class Curve(NamedTuple):
    """A quantity over training: its mean over seeds, and the lowest and highest seed."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def color(name: str) -> str:
    """The color of a method; one that is not in the paper's tables gets one by its name."""
    rest = (_BLUE, _RED, _GREEN, _PURPLE, _ORANGE, _SKY, _WINE, _TEAL)
    return _COLORS.get(name, rest[sum(map(ord, name)) % len(rest)])


def ink(tint: str) -> str:
    """A darker form of a color, for text on white.

    Example:
        >>> ink("#E69F00")
        '#b17a00'
    """
    return "#" + "".join(f"{int(0.77 * int(tint[i : i + 2], 16)):02x}" for i in (1, 3, 5))


def curve(records: Sequence[Record], key: str, *, log: bool, x: str = "step") -> Curve | None:
    """A quantity over training, from all seeds; None if no value of it is finite.

    Long trainings are divided into pieces, of which each seed gives its median.

    Args:
        records: The seeds.
        key: Name in the lines of metrics.
        log: Whether the mean is that of logarithms; values of 0 and below are then left out.
        x: Key of the horizontal axis.
    """
    points: dict[float, list[list[float]]] = {}
    for seed, record in enumerate(records):
        for line in record.metrics:
            value = line.get(key)
            if value is not None and math.isfinite(value) and (value > 0 or not log):
                points.setdefault(line[x], [[] for _ in records])[seed].append(value)
    if not points:
        return None
    steps = sorted(points)
    size = math.ceil(len(steps) / _MANY)
    found = Curve([], [], [], [])
    for start in range(0, len(steps), size):
        piece = steps[start : start + size]
        seeds = [[v for step in piece for v in points[step][seed]] for seed in range(len(records))]
        values = [median(v) for v in seeds if v]
        center = math.exp(sum(map(math.log, values)) / len(values)) if log else sum(values) / len(values)
        for column, number in zip(found, (median(piece), center, min(values), max(values)), strict=True):
            column.append(number)
    return found


def new_figure(width: float, height: float) -> Any:
    """A figure of matplotlib that needs no display.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Figures need matplotlib, which is not installed; pip install 'orthocond[lab]'.") from error
    return Figure(figsize=(width, height))


def panels(rows: int, columns: int, labels: Sequence[str] = (), lines: int = 1) -> tuple[Any, list[list[Any]]]:
    """A figure with panels in rows, with room to the right of each for these labels, and for headings of some lines."""
    wide, gap, left = _PANEL + LETTER * max(map(len, labels), default=0) + 0.3, 0.6, 0.85
    top, bottom = 0.35 + _LINE * (lines - 1), 0.5
    width = columns * (wide + gap) - gap + left
    height = rows * (_HEIGHT + bottom + top)
    figure = new_figure(width, height)
    grid = []
    for row in range(rows):
        y = height - (row + 1) * (_HEIGHT + top + bottom) + bottom
        boxes = [((left + column * (wide + gap)) / width, y / height) for column in range(columns)]
        grid.append([figure.add_axes((*box, _PANEL / width, _HEIGHT / height)) for box in boxes])
    for axes in (axes for line in grid for axes in line):
        dress(axes)
    return figure, grid


def dress(axes: Any) -> None:
    """The look that all panels share."""
    axes.grid(True, which="major", color="0.91", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="both", labelsize=_FONT, color="0.6")
    axes.spines[["left", "bottom"]].set_color("0.6")
    axes.margins(x=0.01)
    for text in (axes.xaxis.label, axes.yaxis.label):
        text.set_size(_FONT + 0.5)


def title(axes: Any, text: str, **settings: Any) -> None:
    """A heading at the left of a panel, above the labels of lines that end at its top."""
    axes.set_title(text, loc="left", **{"size": _FONT + 1.5, "pad": 9, **settings})


def draw_curve(axes: Any, found: Curve, name: str, *, dashed: bool, marker: str | None = None) -> None:
    """The mean as a line, the range of the seeds as a band."""
    tint = color(name)
    axes.fill_between(found.x, found.low, found.high, color=tint, alpha=0.13, linewidth=0)
    axes.plot(found.x, found.mean, color=tint, linewidth=1.7, linestyle=(0, (3, 1.3)) if dashed else "-", marker=marker)


def label_ends(axes: Any, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Names beside the ends of lines, moved apart where they would overlap.

    A name stands to the right of its end if it has room there within the panel, a little higher, since other lines go
    on below; else it stands beyond the right border.

    Args:
        axes: The panel, whose limits are final afterwards.
        ends: Both coordinates of an end in data, text and color of each.
    """
    left, right = axes.get_xlim()
    low, high = axes.get_ylim()
    scale: Callable[[float], float] = math.log if axes.get_yscale() == "log" else float
    found = [
        ((x - left) / (right - left), (scale(y) - scale(low)) / (scale(high) - scale(low)), text, tint)
        for x, y, text, tint in ends
    ]
    inside = [end for end in found if end[0] + 0.04 + LETTER * len(end[2]) / _PANEL < 1]
    for group in (inside, [end for end in found if end not in inside]):
        group.sort(key=lambda end: end[1])
        lift = 0.035 if group is inside else 0.0
        places = spread_out([y + lift for _, y, *_ in group], 1.35 * _FONT / 72 / _HEIGHT, top=1.0)
        for place, (x, y, text, tint) in zip(places, group, strict=True):
            start = x + 0.03 if group is inside else 1.05
            line = [(x, y), (start - 0.02, place), (start, place)]
            axes.plot(*zip(*line, strict=True), color=tint, linewidth=0.9, transform=axes.transAxes, clip_on=False)
            style = {"color": ink(tint), "size": _FONT, "va": "center", "transform": axes.transAxes}
            axes.text(start + 0.01, place, text, **style)
    axes.set(xlim=(left, right), ylim=(low, high))


def spread_out(heights: Sequence[float], gap: float, top: float = math.inf) -> list[float]:
    """Sorted places that are at least a gap apart, none above the top, and as near to what they mark as that allows.

    Example:
        >>> [round(y, 2) for y in spread_out([0.5, 0.5, 0.9], 0.1)]
        [0.45, 0.55, 0.9]
        >>> [round(y, 2) for y in spread_out([0.5, 0.9, 0.9], 0.1, top=0.9)]
        [0.5, 0.8, 0.9]
    """
    groups: list[list[float]] = []  # number, mean of the places that the first of each group should have
    for index, height in enumerate(heights):
        groups.append([1, height - index * gap])
        while len(groups) > 1 and groups[-2][1] >= groups[-1][1]:  # they would overlap: one group, in the middle
            n, y = groups.pop()
            m, x = groups.pop()
            groups.append([m + n, (m * x + n * y) / (m + n)])
    places = [y for n, y in groups for _ in range(int(n))]
    last = len(places) - 1
    return [min(place + index * gap, top - (last - index) * gap) for index, place in enumerate(places)]


def save(figure: Any, stem: Path) -> None:
    """Write a figure as PNG and SVG, small, a picture of pillow as PNG; equal figures are equal bytes."""
    from matplotlib import rc_context
    from PIL import Image

    if isinstance(figure, Image.Image):
        figure.save(stem.with_name(f"{stem.name}.png"), optimize=True)
        return
    pixels = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "orthocond"}):
        figure.savefig(pixels, format="png", dpi=130)
        figure.savefig(stem.with_name(f"{stem.name}.svg"), metadata={"Date": None, "Creator": None})
    image = Image.open(pixels).convert("RGB")
    if len(pixels.getvalue()) > _LARGE:  # a third of the size; but few pixels of one color could get that of others
        image = image.quantize(256, method=Image.Quantize.MEDIANCUT, kmeans=1)
    image.save(stem.with_name(f"{stem.name}.png"), optimize=True)
