"""How good a trained classifier is: on held-out images, with the statistics it has kept and with refreshed ones."""

import copy
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from os import PathLike, fspath
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from orthocond.lab.classification.data import pipeline
from orthocond.lab.classification.networks.prepare import load_model, prepare
from orthocond.lab.data import Pipeline
from orthocond.lab.progress import Progress, stages
from orthocond.lab.runs import Run
from orthocond.lab.task import Score, write_evaluation
from orthocond.layers import DecorrelatedBatchNorm2d, update_statistics
from orthocond.matrix import matrix_view, singular_spectrum
from orthocond.monitor import diagnose

_BATCHES = 32  # of training images, from which statistics are taken anew; no more than it was trained for
_SETTLING = 40  # batches after which a running average has forgotten what was before them
_TOP = 5  # guesses of which one has to be right; an error of as many classes is 0
_FACTS = ("size", "rank", "condition", "condition_on_range", "eps")


class Errors(NamedTuple):
    """Mean loss, and errors in percent, on held-out images."""

    loss: float
    error: float
    top5_error: float


@torch.no_grad()
def score(
    model: nn.Module,
    batches: Pipeline,
    accelerator: Any = None,
    layout: torch.memory_format = torch.contiguous_format,
    progress: Callable[[int, int], None] | None = None,
) -> Errors:
    """Loss and errors of a classifier on held-out images, over all processes.

    Args:
        model: The classifier; it is in evaluation mode afterwards.
        batches: The images.
        accelerator: Accelerate's view of devices and processes, where several processes share the images.
        layout: Memory format of the images.
        progress: Called with the number of batches so far, and of all.
    """
    model.eval()
    device = next(model.parameters()).device
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    for done, (images, labels) in enumerate(batches.batches(), 1):
        output = model(images.to(device, memory_format=layout)).float()
        labels = labels.to(device)
        top = output.topk(min(_TOP, output.shape[1])).indices == labels[:, None]
        sums += torch.stack(
            [
                F.cross_entropy(output, labels, reduction="sum"),
                top[:, 0].sum(),
                top.sum(),
                labels.new_tensor(len(labels)),
            ]
        )
        if progress is not None:
            progress(done, len(batches))
    total, top1, top5, count = (sums if accelerator is None else accelerator.reduce(sums)).tolist()
    return Errors(total / count, 100 * (1 - top1 / count), 100 * (1 - top5 / count))


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


@torch.no_grad()
def settle(model: nn.Module, batches: Pipeline, count: int = _SETTLING) -> None:
    """Let the running averages follow the weights as they are, and leave the model in evaluation mode.

    It is what training does to them at a learning rate of 0: what is lost by the running average itself, and not by its
    lag, is lost here too.

    Args:
        model: The model, changed in place.
        batches: Training images.
        count: Number of batches.
    """
    model.train()
    device = next(model.parameters()).device
    epochs = itertools.chain.from_iterable(map(batches.batches, itertools.count()))
    for images, _ in itertools.islice(epochs, count):
        model(images.to(device))
    model.eval()


def _without_excess(model: nn.Module) -> nn.Module:
    """A copy whose layers whiten by their running covariance alone, as with ``lag="ignore"``."""
    model = copy.deepcopy(model)
    for layer in model.modules():
        if isinstance(layer, DecorrelatedBatchNorm2d) and layer.excess is not None:
            layer.excess.zero_()
    return model


def evaluate(
    run: Run,
    *,
    root: str | PathLike[str] | None = None,
    allow_import: str | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> dict[str, Any]:
    """Evaluate the newest checkpoint of a classifier and write ``evaluation.json`` into its folder.

    Args:
        run: The run.
        root: Folder of data sets.
        allow_import: The function of a user's network that may be imported and called, as the run names it.
        progress: Called with each stage.

    Returns:
        ``step``; number of ``classes`` and of held-out ``images``; ``loss``, ``error`` and ``top5_error`` in percent on
        them; the same with ``recalibrated_`` before them, after `recalibrate`, which people read as refreshed; for a
        network with an SVD layer ``size``, ``rank``, ``condition``, ``condition_on_range`` and ``eps`` of its
        covariance on a batch of training images, and ``singular_values`` of the weight before it, with ``initial_``
        before them as they were before the training; and for decorrelated batch normalization, and plain one in its
        place, the loss and errors that tell where the difference comes from: ``settled_`` after `settle`,
        ``uncovered_`` as trained, but with ``lag="ignore"``.

    Raises:
        NotAllowedError: If the run names another function.
        RuntimeError: If it has no checkpoint yet.
        ValueError: If it is not the run of a classifier.
    """
    enter = stages(progress)
    enter("loading network and images")
    restored = load_model(run, root=None if root is None else fspath(root), allow_import=allow_import)
    model, config = restored.model, restored.config
    train = pipeline(config, restored.pair.train, train=True)
    # As in training: normalized by the statistics of the training images.
    held_out = replace(train, data=restored.pair.held_out, train=False)
    counts = {"classes": len(held_out.data.classes), "images": len(held_out.data)}

    def scored(stage: str, model: nn.Module) -> Errors:
        enter(stage)
        return score(model, held_out, progress=partial(enter, stage))

    values: dict[str, Any] = {"step": restored.step} | counts | scored("errors as trained", model)._asdict()
    enter("condition of the SVD layer")
    if restored.network.svd_layer is not None:
        batch = next(iter(train.batches()))
        row = diagnose(model, (batch.images, batch.labels), F.cross_entropy)[restored.network.svd_layer]
        values |= {key: getattr(row, key) for key in _FACTS}
    if config.model.application == "dbn":
        if restored.network.svd_layer is not None:
            values |= _named("uncovered", scored("errors with the lag ignored", _without_excess(model)))
        enter("settling statistics")
        settled = copy.deepcopy(model)
        settle(settled, train, min(_SETTLING, restored.step))
        values |= _named("settled", scored("errors with settled statistics", settled))
    if (pre_svd := restored.network.pre_svd) is not None:
        values["singular_values"] = _singular_values(model.get_submodule(pre_svd))
        before = prepare(config, restored.pair).module.get_submodule(pre_svd)
        values["initial_singular_values"] = _singular_values(before)
    enter("refreshing statistics")
    recalibrate(model, train, min(_BATCHES, restored.step))
    values |= _named("recalibrated", scored("errors with refreshed statistics", model))
    write_evaluation(run, values)
    return values


def _named(prefix: str, errors: Errors) -> dict[str, float]:
    return {f"{prefix}_{name}": value for name, value in errors._asdict().items()}


def _singular_values(layer: nn.Module) -> list[list[float]]:
    weight: Any = layer.weight
    matrices = matrix_view(weight.detach(), getattr(layer, "groups", 1))
    return [singular_spectrum(matrices).eigenvalues.flatten().tolist()]


def scores(evaluation: Mapping[str, Any]) -> list[Score]:
    """What `evaluate` found, for people."""
    found = []
    for prefix, when in (("", "as trained"), ("recalibrated_", "refreshed")):
        error = f"{evaluation[prefix + 'error']:.2f} %"
        found.append(Score(f"error, {when}", error, "held-out images with a wrong class"))
        if evaluation["classes"] > _TOP:
            error = f"{evaluation[prefix + 'top5_error']:.2f} %"
            found.append(Score(f"top-5 error, {when}", error, "images whose class is not among the first five"))
        loss = f"{evaluation[prefix + 'loss']:.4f}"
        found.append(Score(f"loss, {when}", loss, "mean cross-entropy of held-out images"))
    if "rank" in evaluation:
        found += [
            Score("rank", f"{evaluation['rank']} of {evaluation['size']}", "directions that the features really have"),
            Score(
                "κ(P + εI)",
                f"{evaluation['condition']:.3g}",
                f"condition of what the SVD layer takes a root of, ε = {evaluation['eps']:g}",
            ),
            Score(
                "κ on the range",
                f"{evaluation['condition_on_range']:.3g}",
                "how unequal the directions are that exist",
            ),
        ]
    return found
