"""What the table of solvers under stress says: verdict, grids, notes and a figure, from its cells."""

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from orthocond.lab.classification.stress_cases import FRESH, LARGE, PAIRS, POOLED, SEEDS, TRAINED
from orthocond.lab.tables.drawing import dress, new_figure, title
from orthocond.lab.tables.text import grid, power

KINDS = {
    "unsolved": "no convergence",
    "refused": "matrix refused",
    "root": "root not finite",
    "gradient": "gradient not finite",
    "wrong_root": "root wrong",
    "wrong_gradient": "gradient wrong",
}
"""What can go wrong, with its words; the first one that applies counts."""

STEM, POOLING = "stem", "pooling"
"""The two places of a covariance."""

LAYER = "Eigh, float64, as the layer"
"""The solver that layers use by default."""

AUTOGRAD = {name: f"torch.linalg.{name}, autograd" for name in ("svd", "eigh")}
"""Autograd through torch's own decompositions."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Precisions of the features."""

RIDGES = (1e-2, 1e-5, 0.0)
"""Ridges on the covariance."""

_UNTREATED = "SVD"  # the arm of the trainings without treatment
_TREATMENTS: dict[str, dict[str, str]] = {
    STEM: {
        **{name: f"fresh: {words}" for name, words in FRESH.items()},
        **{f"trained {arm}": f"trained: {'none' if arm == _UNTREATED else arm}" for arm in TRAINED},
        PAIRS: PAIRS,
    },
    POOLING: {name: f"fresh: {words}" for name, words in POOLED.items()},
}
_PLACES = {STEM: "Stem", POOLING: "Covariance pooling"}
_NETWORKS = {
    STEM: "3x3 convolution of 3 colors to 64 channels, stride 2, the stem of the small plain ConvNet",
    POOLING: "256 channels at 64 positions, the end of a small ResNet-18 that is not trained",
}
_FINITE = ("wrong_root", "wrong_gradient")
_TINTS = {AUTOGRAD["svd"]: "#D55E00", AUTOGRAD["eigh"]: "#E69F00", LAYER: "#0072B2"}
_NOTES = (
    "A cell is the share of covariances of which something goes wrong. After it, the median relative error of the "
    "gradients that are finite. What goes wrong is the first of these: the decomposition does not converge, the matrix "
    "is refused, a number of the root is not finite, or one of its gradient; or root or gradient differ by more than "
    "a tenth from what exact arithmetic gives.",
    "Stem: whitening, by the inverse root. Each covariance is of a batch of 64 images, in float32, as a plain "
    "implementation has it, or in float64 where that is said. Fresh: a new weight for each covariance. Trained: "
    f"weights at steps of the second half of {SEEDS} trainings of one epoch, of the small plain ConvNet of the claims, "
    "each arm with the rate of the stem that was tuned for it; weights of one training resemble each other. Errors are "
    "those on the features: of the whitened ones, and of the gradient that reaches them for random gradients of the "
    "output.",
    "Covariance pooling, by the root: of an image each, of the features after the 1x1 convolution to 256 channels, "
    "batch normalization and ReLU of a ResNet-18 with fresh weights, one block a stage, of 16, 32 and 64 channels. The "
    "1x1 convolution is what is treated. NOG and OLR act in trainings, and this network is not trained. The layer gets "
    "the features and decomposes the smaller product, of their positions. The gradient is that which reaches the "
    "features, for random gradients of the root.",
    "Without a ridge (ε = 0) exact arithmetic has 27 directions in a stem and 63 in pooling. With one, the other "
    "eigenvalues are the ridge, equal up to rounding: in float32 they often tie, and what a gradient makes of ties "
    "reaches the features. The larger a weight is, the more does rounding separate these eigenvalues, and the fewer "
    "tie: so a fresh weight fails less if it is only made larger. What ties differs between machines. With a smaller "
    "ridge the same rounding makes gradients wrong.",
    "With bfloat16, features of a stem are compared with those that were not rounded, which have 27 directions; those "
    "of pooling are taken as they are rounded. Where all solvers have the same error, it is that of this rounding. "
    "Without a ridge no solver can tell directions whose variance is below it.",
    "Pairs of equal eigenvalues: covariances of full rank whose 32 pairs of eigenvalues, from 1 to 100, differ by "
    "rounding alone.",
    "Five steps of Newton-Schulz are no root at these condition numbers, but a function of their own: they are wrong "
    "here, and never fail.",
)


def verdict(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """How often autograd fails, for each place, ridge and treatment, in which way, and how often the layer does."""
    ridges = [_of_ridge(cells, place, eps) for place in _PLACES for eps in RIDGES]
    layer = "; ".join(_of_layer(cells, dtype) for dtype in DTYPES)
    return [*ridges, _of_size(cells), f"The layer's own solver: {layer}."]


def _of_ridge(cells: Sequence[Mapping[str, Any]], place: str, eps: float) -> str:
    parts = []
    for name, solver in AUTOGRAD.items():
        row = _select(cells, place=place, eps=eps, solver=solver, features="float32")
        row = [cell for cell in row if cell["treatment"] != PAIRS]
        parts.append(f"through {name} {_listed(place, row)}{_kinds_after(row)}")
    return f"{_PLACES[place]}, ε = {eps:g}, float32: autograd fails {'; '.join(parts)}."


def _listed(place: str, row: Sequence[Mapping[str, Any]]) -> str:
    """For how many covariances it fails, the most first, with the treatments."""
    groups: dict[float, list[str]] = {}
    for cell in row:
        groups.setdefault(cell["bad"] / cell["count"], []).append(_TREATMENTS[place][cell["treatment"]])
    if len(groups) == 1:
        (share,) = groups
        return {0.0: "for none", 1.0: "for all covariances"}.get(
            share, f"for {percent(share)}"
        ) + ", whatever the weight"
    last = groups.pop(0.0, None)
    words = [f"{percent(share)} ({'; '.join(groups[share])})" for share in sorted(groups, reverse=True)]
    return f"for {', '.join(words)}" + (" and none of the others" if last else "")


def _of_size(cells: Sequence[Mapping[str, Any]]) -> str:
    """What NOG does, beside a weight that is only larger."""
    row = _select(cells, place=STEM, eps=RIDGES[0], solver=AUTOGRAD["svd"], features="float32")
    found = {_TREATMENTS[STEM][cell["treatment"]]: cell for cell in row}
    names = [_TREATMENTS[STEM][name] for name in ("svd", LARGE, f"trained {_UNTREATED}", "trained NOG")]
    shares = [percent(found[name]["bad"] / found[name]["count"]) for name in names]
    sizes = [power(found[name]["largest"]) for name in names]
    words = ", ".join(f"{share} ({name}, {size})" for share, name, size in zip(shares, names, sizes, strict=True))
    return f"The same by the largest eigenvalue, which grows with the weight: stem, ε = {RIDGES[0]:g}, svd, {words}."


def _kinds_after(row: Collection[Mapping[str, Any]]) -> str:
    return f" – {words}" if (words := kinds(row)) else ""


def kinds(cells: Collection[Mapping[str, Any]]) -> str:
    """What goes wrong, in words, with the part of it that each kind has, if there are several.

    Example:
        >>> none = dict.fromkeys(KINDS, 0)
        >>> kinds([none]), kinds([none | {"root": 2}]), kinds([none | {"gradient": 3}, none | {"wrong_root": 1}])
        ('', 'root not finite', 'gradient not finite 75 %, root wrong 25 %')
    """
    found = {kind: count for kind in KINDS if (count := sum(cell[kind] for cell in cells))}
    if len(found) == 1:
        return KINDS[next(iter(found))]
    total = sum(found.values())
    return ", ".join(f"{KINDS[kind]} {percent(count / total)}" for kind, count in found.items())


def _of_layer(cells: Sequence[Mapping[str, Any]], dtype: str) -> str:
    chosen = _select(cells, solver=LAYER, features=dtype)
    bad, count = (sum(cell[key] for cell in chosen) for key in ("bad", "count"))
    if not bad:
        return f"with {dtype} features nothing goes wrong in {count:,} cases"
    ridges = [f"{eps:g}" for eps in RIDGES if any(cell["bad"] for cell in _select(chosen, eps=eps))]
    return (
        f"with {dtype} features it fails for {percent(bad / count)} of {count:,}, all with ε = {' or '.join(ridges)}: "
        f"{kinds(chosen)}"
    )


def _select(cells: Iterable[Mapping[str, Any]], **settings: Any) -> list[Mapping[str, Any]]:
    return [cell for cell in cells if all(cell[key] == value for key, value in settings.items())]


def percent(share: float) -> str:
    """A share in percent: only what is exactly none or all is 0 or 100 %.

    Example:
        >>> percent(0.0), percent(0.004), percent(0.55), percent(0.996), percent(1.0)
        ('0 %', '0.4 %', '55 %', '99.6 %', '100 %')
    """
    digits = 0 if share in (0, 1) or 0.1 <= share < 0.99 else 1
    return f"{100 * share:.{digits}f} %"


def markdown(content: Mapping[str, Any]) -> str:
    """A grid for each place, precision and ridge: solvers down, treatments and what goes wrong across."""
    cells = content["cells"]
    parts = [f"# {content['title']}", content["text"], "\n".join(f"- {line}" for line in content["verdict"])]
    parts.append("![failures](failures.png)")
    for place, dtype, eps in itertools.product(_PLACES, DTYPES, RIDGES):
        chosen = _select(cells, place=place, features=dtype, eps=eps)
        rows = [_largest(chosen, place)]
        for solver in dict.fromkeys(cell["solver"] for cell in chosen):
            row = {cell["treatment"]: cell for cell in _select(chosen, solver=solver)}
            rows.append([solver, *(_share(row[name]) for name in _TREATMENTS[place]), kinds(row.values())])
        parts.append(f"## {_PLACES[place]}: {dtype} features, ε = {eps:g}")
        parts.append(grid(["solver", *_TREATMENTS[place].values(), "what goes wrong"], rows))
    notes = (*_NOTES, f"Images: {content['images']}.", _precision(cells), _counts(content))
    parts += ["## Notes", "\n".join(f"- {note}" for note in notes) + "\n"]
    return "\n\n".join(parts)


def _largest(cells: Sequence[Mapping[str, Any]], place: str) -> list[str]:
    """A row of the grid: how large the covariances are."""
    found = {cell["treatment"]: cell["largest"] for cell in cells}
    return ["largest eigenvalue, median", *(power(found[name]) for name in _TREATMENTS[place]), ""]


def _share(cell: Mapping[str, Any]) -> str:
    bad, median = percent(cell["bad"] / cell["count"]), cell["median_gradient_error"]
    return bad if median is None else f"{bad}, {power(median)}"


def _precision(cells: Sequence[Mapping[str, Any]]) -> str:
    counts = {place: _select(cells, place=place)[0]["count"] for place in _PLACES}
    widths = {place: 196 * math.sqrt(0.25 / count) for place, count in counts.items()}
    return (
        f"Shares are of {counts[STEM]} covariances in a stem, {counts[POOLING]} in pooling: chance moves them by up to "
        f"{widths[STEM]:.0f} and {widths[POOLING]:.0f} points (95 %)."
    )


def _counts(content: Mapping[str, Any]) -> str:
    return (
        f"{content['decompositions']:,} roots were taken by a decomposition, and {content['not_converged']} of these "
        "did not converge at first; torch's own are among them, and a root counts once where a solver decomposes again "
        f"in float64. Newton-Schulz took {content['iterations']:,} more without one. At the paper's rate, 5 in about "
        f"77 million, {power(content['expected'])} were to be expected: failures to converge are rare, gradients that "
        "are not finite or wrong are not."
    )


def figure(content: Mapping[str, Any]) -> Any:
    """Bars of the share that fails with float32 features: treatments down, ridges across, a row for each place."""
    cells = _select(content["cells"], features="float32")
    left, panel, gap, row, top, between = 2.0, 2.35, 0.25, 0.44, 1.15, 0.95  # inches
    width = left + len(RIDGES) * (panel + gap)
    tall = {place: row * len(_TREATMENTS[place]) for place in _PLACES}
    height = top + sum(tall.values()) + between + 0.5
    found = new_figure(width, height)
    y = height - top
    for place in _PLACES:
        heading = f"{_PLACES[place]}: {_NETWORKS[place]}"
        found.text(0.12 / width, (y + 0.37) / height, heading, size=10, weight="bold")
        y -= tall[place]
        for column, eps in enumerate(RIDGES):
            box = ((left + column * (panel + gap)) / width, y / height, panel / width, tall[place] / height)
            axes = found.add_axes(box)
            _bars(axes, _select(cells, place=place, eps=eps), _TREATMENTS[place], named=column == 0)
            title(axes, f"ε = {eps:g}", pad=4)
        y -= between
    heading = f"Share of covariances whose root or gradient fails; {content['images']}, float32 features"
    found.text(0.12 / width, 1 - 0.25 / height, heading, size=11.5, weight="bold")
    _legend(found, width, height)
    return found


def _bars(axes: Any, cells: Sequence[Mapping[str, Any]], treatments: Mapping[str, str], *, named: bool) -> None:
    """Three bars for each treatment, pale where the numbers are finite but wrong."""
    dress(axes)
    for place, (solver, tint) in enumerate(_TINTS.items()):
        row = {cell["treatment"]: cell for cell in _select(cells, solver=solver)}
        heights = [index + 0.27 * (place - 1) for index in range(len(treatments))]
        shares = [100 * row[name]["bad"] / row[name]["count"] for name in treatments]
        wrong = [100 * sum(row[name][kind] for kind in _FINITE) / row[name]["count"] for name in treatments]
        broken = [all_ - part for all_, part in zip(shares, wrong, strict=True)]
        axes.barh(heights, broken, color=tint, height=0.24)
        axes.barh(heights, wrong, left=broken, color=tint, height=0.24, alpha=0.4)
        for y, share in zip(heights, shares, strict=True):
            axes.annotate(f"{share:.0f}", (share, y), xytext=(2, 0), textcoords="offset points", va="center", size=6.5)
    axes.set_xlim(0, 112)
    axes.set_xticks(range(0, 101, 25))
    axes.set_ylim(-0.55, len(treatments) - 0.45)
    axes.invert_yaxis()
    axes.set_yticks(range(len(treatments)), treatments.values() if named else [""] * len(treatments))
    axes.grid(False, axis="y")
    axes.set_xlabel("% of covariances")


def _legend(found: Any, width: float, height: float) -> None:
    from matplotlib.patches import Patch

    names = {AUTOGRAD["svd"]: "autograd through svd", AUTOGRAD["eigh"]: "autograd through eigh", LAYER: "the layer"}
    handles = [Patch(color=tint, label=names[solver]) for solver, tint in _TINTS.items()]
    handles.append(Patch(color="0.3", alpha=0.4, label="pale: finite, but wrong by more than a tenth"))
    place = (0.1 / width, 1 - 0.34 / height)
    found.legend(handles=handles, ncols=4, frameon=False, fontsize=8.5, loc="upper left", bbox_to_anchor=place)
