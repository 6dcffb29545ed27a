"""How good a trained classifier is: on held-out images, with the statistics it has kept and with fresh ones."""

import json
from dataclasses import replace
from typing import Any

from torch import nn
from torch.nn import functional as F

from orthocond.lab.classification.task import evaluate, pipeline
from orthocond.lab.data import Pipeline
from orthocond.lab.experiments import EVALUATION
from orthocond.lab.restore import load_model
from orthocond.lab.runs import Run
from orthocond.lab.runs.files import write_atomically
from orthocond.lab.runs.metrics import json_safe
from orthocond.layers import update_statistics
from orthocond.monitor import diagnose

_BATCHES = 32  # of training images, from which statistics are taken anew; no more than it was trained for
_FACTS = ("size", "rank", "condition", "condition_on_range", "eps")


def recalibrate(model: nn.Module, batches: Pipeline, count: int = _BATCHES) -> None:
    """Take the running statistics anew by `update_statistics`, and leave the model in evaluation mode.

    Running averages lag behind weights that move. That is nothing at the end of a long schedule, but after a short one
    it can outweigh what the weights themselves are worth, above all for whitening: a direction that has just left the
    null space of the running covariance is amplified by up to ``eps ** -0.5``.

    Args:
        model: The model, changed in place.
        batches: Training images.
        count: Number of batches to average over.
    """
    update_statistics(model, batches.batches(), batches=count)
    model.eval()


def assess(run: Run, *, root: str | None = None) -> dict[str, Any]:
    """Evaluate the newest checkpoint of a classifier and write ``evaluation.json`` into its folder.

    Args:
        run: The run.
        root: Folder of data sets.

    Returns:
        ``step``; ``loss``, ``error`` and ``top5_error`` in percent on held-out images; the same with
        ``recalibrated_`` before them, after `recalibrate`; and of a network with an SVD layer ``size``, ``rank``,
        ``condition``, ``condition_on_range`` and ``eps`` of its covariance on a batch of training images.

    Raises:
        RuntimeError: If it has no checkpoint yet.
        ValueError: If it is not the run of a classifier.
    """
    restored = load_model(run, root=root)
    model, config = restored.model, restored.config
    train = pipeline(config, restored.pair.train, train=True)
    # As in training: normalized by the statistics of the training images.
    held_out = replace(train, data=restored.pair.held_out, train=False)
    values: dict[str, Any] = {"step": restored.step} | evaluate(model, held_out)._asdict()
    if restored.network.svd_layer is not None:
        batch = next(iter(train.batches()))
        row = diagnose(model, (batch.images, batch.labels), F.cross_entropy)[restored.network.svd_layer]
        values |= {key: getattr(row, key) for key in _FACTS}
    recalibrate(model, train, min(_BATCHES, restored.step))
    values |= {f"recalibrated_{name}": value for name, value in evaluate(model, held_out)._asdict().items()}
    text = json.dumps(json_safe(values, EVALUATION), indent=1) + "\n"
    write_atomically(run.path / EVALUATION, text.encode())
    return values
