"""What is known about single directions: scores of an evaluation, and the factors of sprites that they change."""

import json
import math

import torch
from torch import Tensor

from orthocond.directions import Directions
from orthocond.generators import Generator, all_images
from orthocond.lab.data import FACTORS, read_factors
from orthocond.lab.explorer.page import Scores
from orthocond.lab.generation import truth
from orthocond.lab.runs import Run
from orthocond.lab.runs.metrics import from_json_safe
from orthocond.lab.task import EVALUATION
from orthocond.metrics import effect_matrix

_LAYERS = "eigengan"  # what an evaluation calls the kind that a page calls layers
_SAMPLES = 64  # latents, each of which is moved along every direction
_UNLIKE = 0.15  # mean difference of pixels in [0, 1] to the nearest sprite, above which factors mean nothing


def scores_of(run: Run, kind: str, directions: Directions) -> Scores:
    """What a run's evaluation says about directions of a kind, if anything.

    Scores are ``predictability``, how often the direction is told from a pair of pictures, and ``activeness``. They
    count if the evaluation is of the checkpoint's step, and has a direction of the same name and importance.

    Args:
        run: The run.
        kind: Kind of the directions, as the page names it.
        directions: The directions.

    Raises:
        ValueError: If the file is damaged.
    """
    file = run.path / EVALUATION
    if not file.is_file():
        return {}
    try:
        content = from_json_safe(json.loads(file.read_bytes()))
        found = run.load()
        measured = content.get("directions", {}).get(_LAYERS if kind == "layers" else kind)
        if measured is None or found is None or content["step"] != found.step:
            return {}
        known = dict(zip(measured["names"], measured["importance"], strict=True))
        columns = {
            "predictability": measured.get("vp", {}).get("per_direction"),
            "activeness": measured.get("activeness"),
        }
        return {
            name: {key: float(column[i]) for key, column in columns.items() if column and math.isfinite(column[i])}
            for i, name in enumerate(known)
            if name in directions.names and _same(known[name], directions.importance[directions.names.index(name)])
        }
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        text = f"{file} is damaged ({error!r}); evaluate the run again: orthocond evaluate {run.path}"
        raise ValueError(text) from error


def _same(a: float, b: Tensor) -> bool:
    return math.isclose(a, float(b), rel_tol=1e-3, abs_tol=1e-12)


def changed_factors(generator: Generator, directions: Directions) -> Scores:
    """How far each direction moves each factor of sprites, in standard deviations of the factor per sigma.

    Returns:
        For each direction by name the effects by factor; empty if the pictures show no sprites.
    """
    images = all_images(generator, generator.sample(_SAMPLES), _SAMPLES, "explore")
    if images.shape[1] != 3 or float(read_factors(images).residual.mean()) > _UNLIKE:
        return {}
    spread = torch.tensor([high - low for low, high in FACTORS.values()]) / math.sqrt(12)  # factors are uniform
    found = effect_matrix(generator, directions, truth.read, names=list(FACTORS), samples=_SAMPLES, spread=spread)
    return {
        name: dict(zip(found.factors, row.tolist(), strict=True))
        for name, row in zip(directions.names, found.values, strict=True)
        if bool(row.isfinite().all())
    }
