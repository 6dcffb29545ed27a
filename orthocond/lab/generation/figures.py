"""Figures of GANs: condition during training, directions and true factors, samples and traversals by method."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from orthocond.directions import compare, traverse
from orthocond.lab.data import FACTORS
from orthocond.lab.generation.directions import find_directions
from orthocond.lab.generation.networks import load_generator
from orthocond.lab.runs import Run
from orthocond.lab.tables.comparison import Outcome
from orthocond.lab.tables.drawing import color, new_figure, panels, title
from orthocond.lab.tables.figures import all_curves, draw_all

_ABREAST = 3  # matrices in a line
_CELL = 0.46, 0.3  # inches: width and height of an entry
_SHOWN = 3  # directions of each method in a traversal, those with the largest effect
_TILE = 64  # pixels of an image in it, at least
_SAMPLES = 10  # images of each method
_SAMPLE, _LETTER = 0.62, 0.075  # inches: an image of them, a letter of the name before


def weight_condition(outcomes: Sequence[Outcome], rows: Sequence[Any]) -> Any:
    """Condition number of the weights that meet the latents over training; lines are means, bands all seeds."""
    shown = [(o, curves) for o in outcomes if (curves := all_curves(o, rows, "condition", log=True))]
    if not shown:
        return None
    figure, grid = panels(1, len(shown), [outcomes[0].short(row) for row in rows])
    for axes, (outcome, curves) in zip(grid[0], shown, strict=True):
        title(axes, f"{outcome.experiment.label}: κ(W)")
        axes.set_xlabel("training step")
        if max(max(c.high) for _, c in curves) > 10 * min(min(c.low) for _, c in curves):
            axes.set_yscale("log")
        draw_all(axes, outcome, curves)
    return figure


def predictability_and_truth(directions: str) -> Callable[[Sequence[Outcome], Sequence[Any]], Any]:
    """What draws VP against DCI disentanglement, a point for each training: what VP says about true factors.

    Args:
        directions: Which ones, by their name in the evaluation.
    """

    def draw(outcomes: Sequence[Outcome], rows: Sequence[Any]) -> Any:
        from scipy.stats import spearmanr  # type: ignore[import-untyped]

        (outcome,) = outcomes
        points = {row: _predicted(outcome.records.get(row, ()), directions) for row in rows}
        together = [point for found in points.values() for point in found]
        if len(together) < 3:
            return None
        figure, ((axes,),) = panels(1, 1, [outcome.short(row) for row in rows])
        for row, found in points.items():
            if found:
                marker = "s" if row.olr == "paper" else "^" if row.nog_of == "update" else "o"
                style = {"markersize": 4.5, "fillstyle": "full" if marker == "o" else "none"}
                axes.plot(*zip(*found, strict=True), marker, color=color(row.name), label=outcome.short(row), **style)
        correlation = float(spearmanr(*zip(*together, strict=True)).statistic)
        title(axes, f"{outcome.experiment.label}, {len(together)} trainings: rank correlation {correlation:.2f}")
        axes.set_xlabel("VP (%)")
        axes.set_ylabel("DCI disentanglement (%)")
        axes.margins(0.05)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8.5)
        return figure

    return draw


def _predicted(records: Sequence[Any], directions: str) -> list[tuple[float, float]]:
    """VP and DCI disentanglement of each training that has both, in percent."""
    measured = [(record.evaluation or {}).get("directions", {}).get(directions, {}) for record in records]
    return [(100 * m["vp"]["final"], 100 * m["disentanglement"]) for m in measured if "disentanglement" in m]


def effect_matrices(directions: str) -> Callable[[Sequence[Outcome], Sequence[Any]], Any]:
    """What draws the effect of each direction on each true factor, methods side by side.

    The first seed is shown: directions of different seeds have nothing to do with each other. Directions are sorted by
    the factor that they change most, so that a diagonal is what one hopes for.

    Args:
        directions: Which ones, by their name in the evaluation.
    """

    def draw(outcomes: Sequence[Outcome], rows: Sequence[Any]) -> Any:
        found = [(o.short(row), e) for o in outcomes for row in rows if (e := _effects(o.records.get(row), directions))]
        if not found:
            return None
        most = max(value for _, (_, values) in found for line in values for value in line if value == value)
        names = list(FACTORS)
        wide, tall = _CELL[0] * len(names) + 1.0, _CELL[1] * max(len(values) for _, (_, values) in found) + 1.1
        columns = min(_ABREAST, len(found))
        lines = -(-len(found) // columns)
        figure = new_figure(columns * wide, lines * tall)
        for place, (method, (labels, values)) in enumerate(found):
            line, column = divmod(place, columns)
            corner = (column * wide + 0.7) / (columns * wide), 1 - ((line + 1) * tall - 0.7) / (lines * tall)
            size = (wide - 1.0) / (columns * wide), (tall - 1.1) / (lines * tall)
            _matrix(figure.add_axes((*corner, *size)), labels, values, names, most)
            title(figure.axes[-1], method)
        return figure

    return draw


def _effects(records: Sequence[Any] | None, directions: str) -> tuple[list[str], list[list[float]]] | None:
    """Names and effects of the first training that has them, sorted by the factor that a direction changes most."""
    for record in records or ():
        measured = (record.evaluation or {}).get("directions", {}).get(directions, {})
        if "effects" in measured:
            rows = sorted(zip(measured["names"], measured["effects"], strict=True), key=lambda row: _place(row[1]))
            return [name for name, _ in rows], [line for _, line in rows]
    return None


def _place(line: Sequence[float]) -> tuple[int, float]:
    """The factor that is changed most, the larger change first; directions without a readable image come last."""
    if any(value != value for value in line):
        return len(line), 0.0
    return line.index(max(line)), -max(line)


def _matrix(axes: Any, labels: list[str], values: list[list[float]], names: list[str], most: float) -> None:
    axes.imshow(values, cmap="Blues", vmin=0, vmax=max(most, 1e-9), aspect="auto")
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            shade = "white" if value > 0.6 * most else "0.2"
            axes.text(x, y, f"{value:.2f}" if value == value else "–", ha="center", va="center", size=7, color=shade)
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(length=0, labelsize=7.5)
    axes.spines[:].set_visible(False)


def traversals(preset: str) -> Callable[[Sequence[Outcome], Sequence[Any]], Any]:
    """What draws the strongest directions of each method on one preset, from the checkpoints of its first seed."""

    def draw(outcomes: Sequence[Outcome], rows: Sequence[Any]) -> Any:
        (outcome,) = (o for o in outcomes if o.experiment.preset == preset)
        found = {}
        size = _TILE
        for name, generator in _generators(outcome, rows):
            shown = find_directions(generator, "own", _SHOWN)
            images = traverse(generator, 1, shown)  # the same latent for all
            size = images.shape[-1]
            found[name] = images, shown
        heading = f"{outcome.experiment.label}: the {_SHOWN} directions with the largest effect"
        return compare(found, title=heading, scale=-(-_TILE // size)) if found else None

    return draw


def samples(preset: str) -> Callable[[Sequence[Outcome], Sequence[Any]], Any]:
    """What draws images of each method on one preset from the same latents, by the checkpoints of its first seed."""

    def draw(outcomes: Sequence[Outcome], rows: Sequence[Any]) -> Any:
        (outcome,) = (o for o in outcomes if o.experiment.preset == preset)
        found = {name: _images(generator) for name, generator in _generators(outcome, rows)}
        if not found:
            return None
        left, top = _LETTER * max(map(len, found)) + 0.15, 0.35
        width, height = left + _SAMPLES * _SAMPLE, top + len(found) * _SAMPLE
        figure = new_figure(width, height)
        figure.text(0.01, 1 - 0.2 / height, f"{outcome.experiment.label}: samples, in a column from one latent", size=9)
        for line, (name, images) in enumerate(found.items()):
            y = 1 - (top + (line + 1) * _SAMPLE) / height
            figure.text(0.01, y + _SAMPLE / 2 / height, name, size=8.5, va="center")
            for column, image in enumerate(images):
                corner = (left + column * _SAMPLE) / width, y
                axes = figure.add_axes((*corner, 0.95 * _SAMPLE / width, 0.95 * _SAMPLE / height))
                axes.imshow(image)
                axes.set_axis_off()
        return figure

    return draw


def _images(generator: Any) -> Any:
    """Images from latents that are the same for generators of as many latents, as arrays of pixels in [0, 1]."""
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        images = generator(torch.randn(_SAMPLES, generator.z_dim, generator=rng))
    return images.add(1).div(2).clamp(0, 1).movedim(1, -1).numpy()


def _generators(outcome: Outcome, rows: Sequence[Any]) -> list[tuple[str, Any]]:
    """The name of each method and the generator of its first seed; none if one has no checkpoint any more.

    A picture of some methods, or of other seeds, would replace the one that an earlier table has drawn of all.
    """
    found = []
    for row in rows:
        records = sorted((r for r in outcome.records.get(row, ()) if r.finished), key=lambda r: r.config.seed)
        if records:
            run = None if records[0].path is None else Run.open(records[0].path)
            if run is None or not any(run.checkpoints.iterdir()):
                return []
            found.append((outcome.short(row), load_generator(run)))
    return found
