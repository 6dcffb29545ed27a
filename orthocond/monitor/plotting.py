"""The paper's conditioning figure: condition number over training steps, one line a run."""

import math
from collections.abc import Mapping
from os import PathLike
from typing import Any

from orthocond._checks import check_choice
from orthocond.monitor.history import KEYS, History

_LABELS = {
    "rank": "Rank of the covariance",
    "largest": "Largest eigenvalue of the covariance",
    "smallest": "Smallest eigenvalue of the covariance",
    "condition": "Condition number of the covariance",
    "condition_on_range": "Condition number of the covariance on its range",
    "weight_condition": "Condition number of the weight",
    "gradient_condition": "Condition number of the gradient",
    "eta": "Step length η",
    "olr_occurrence": "Fraction of steps with optimal learning rate",
    "solver_failures": "Solver failures",
}
_LINEAR = ("rank", "weight_rank", "gradient_rank", "olr_occurrence", "solver_failures")
# Okabe and Ito's colors, which stay apart for color-blind readers; the yellow is left out: too pale for a line.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_STYLES = ("-", "--", ":", "-.")


def plot(
    target: Any = None,
    *,
    compare: Mapping[str, History],
    quantity: str = "condition",
    layer: str | None = None,
    title: str | None = None,
) -> Any:
    """Draw a quantity of histories, by their name in the legend, over the steps; see `ConditionMonitor.plot`.

    Layers are named in the legend where a history has several.
    """
    check_choice(quantity, "plot(quantity=...)", KEYS)
    lines = [line for name, history in compare.items() for line in _lines(name, history, quantity, layer)]
    if not lines:
        count = sum(map(len, compare.values()))
        raise ValueError(f"plot needs finite values of {quantity!r}; there are none in the {count} records given.")
    to_file = isinstance(target, (str, PathLike))
    own = target is None or to_file
    axes = _new_axes(shown=not to_file) if own else target
    for index, (label, steps, values) in enumerate(lines):
        style = {"color": _COLORS[index % len(_COLORS)], "linestyle": _STYLES[index // len(_COLORS) % len(_STYLES)]}
        axes.plot(steps, values, label=label, linewidth=1.6, marker="o" if len(steps) == 1 else None, **style)
    if quantity.removesuffix("_worst") not in _LINEAR:
        axes.set_yscale("log")
    axes.set_xlabel("Training step")
    axes.set_ylabel(_label(quantity))
    axes.margins(x=0.01)
    axes.grid(True, which="major", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if title:
        axes.set_title(title)
    if len(lines) > 1:
        # Beside the lines, which fill the height of a logarithmic axis; beside the user's axes there may be others.
        beside = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "borderaxespad": 0.0}
        axes.legend(frameon=False, **(beside if own else {}))
    if to_file:
        axes.figure.savefig(target, dpi=150, bbox_inches="tight")
    return axes


def _lines(name: str, history: History, quantity: str, layer: str | None) -> list[tuple[str, list[int], list[float]]]:
    """Label, steps and values of each layer that has the quantity; infinite values leave a gap."""
    lines = []
    layers = history.layers() if layer is None else [layer]
    for one in layers:
        columns = history.columns(one)
        pairs = zip(columns["step"], columns[quantity], strict=True)
        points = [(s, v if math.isfinite(v) else math.nan) for s, v in pairs if isinstance(v, (int, float))]
        if any(math.isfinite(v) for _, v in points):
            label = " · ".join(filter(None, (name, one if len(layers) > 1 or not name else "")))
            lines.append((label, [s for s, _ in points], [v for _, v in points]))
    return lines


def _label(quantity: str) -> str:
    label = _LABELS.get(quantity.removesuffix("_worst"), quantity.replace("_", " "))
    return f"{label} (worst)" if quantity.endswith("_worst") else label


def _new_axes(*, shown: bool) -> Any:
    """Axes of a new figure; only one that is to be shown needs pyplot, which takes the user's display."""
    try:
        from matplotlib.figure import Figure

        if shown:
            from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(
            "plot needs matplotlib, which is not installed; pip install matplotlib. to_csv and to_json work without."
        ) from error
    size = (7.0, 4.0)
    return (pyplot.figure(figsize=size) if shown else Figure(figsize=size)).add_subplot()
