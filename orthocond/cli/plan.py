"""``orthocond train --dry-run``: what a training would be, and how long it would take."""

import contextlib
import itertools
import statistics
import tempfile
import time

import torch
from rich.console import Console

from orthocond.cli.settings import settings
from orthocond.lab import experiments
from orthocond.lab.classification.config import Classification
from orthocond.lab.config import replace_at
from orthocond.lab.display import duration
from orthocond.lab.experiments import Config
from orthocond.lab.generation.config import Generation
from orthocond.lab.progress import Progress
from orthocond.lab.runs import Run

_TIMED_BATCHES = (8, 16)  # images of the steps that are timed on a CPU, for larger batches the time grows as here
_TIMED_STEPS = 4  # the first is not counted: it allocates


def show(config: Config, root: str | None) -> int:
    """Print configuration, sizes of data and model, number of steps, and an estimate of the time."""
    console = Console(highlight=False, soft_wrap=True)
    preset = experiments.preset(config.preset, config.scale)
    defaults = {setting.path: setting.value for setting in settings(preset)}
    console.print(f"preset = {config.preset}, scale = {config.scale}", markup=False)
    for setting in settings(config):
        changed = "" if setting.value == defaults[setting.path] else f"   (preset: {defaults[setting.path]})"
        console.print(f"{setting.path} = {setting.value}{changed}", markup=False)
    steps, text = _gan(config, root) if isinstance(config, Generation) else _classifier(config, root)
    console.print(f"\n{text}", markup=False)
    seconds = _estimate(config, root)
    console.print(
        f"Time: about {duration(steps * seconds)} on this machine, {1e3 * seconds:.0f} ms a step, without evaluation",
        markup=False,
    )
    return 0


def _estimate(config: Config, root: str | None) -> float:
    """Seconds of a step; on a CPU a large batch is not waited for, but estimated from two small ones."""
    batch = config.schedule.batch_size
    small, large = _TIMED_BATCHES
    if torch.accelerator.is_available() or batch <= 2 * large:
        return step_seconds(config, root)
    first, second = (step_seconds(replace_at(config, "schedule.batch_size", size), root) for size in (small, large))
    return second + max(second - first, 0.0) / (large - small) * (batch - large)


def _classifier(config: Classification, root: str | None) -> tuple[int, str]:
    from orthocond.lab.classification.task import load_data, pipeline, prepare

    pair = load_data(config.data, root)
    network = prepare(config, pair)
    epochs, epoch_steps = config.schedule.epochs, len(pipeline(config, pair.train, train=True))
    steps = min(epochs * epoch_steps, config.schedule.steps or epochs * epoch_steps)
    classes, parameters = len(pair.train.classes), sum(p.numel() for p in network.module.parameters())
    return steps, (
        f"Data: {len(pair.train)} training and {len(pair.held_out)} held-out images of {classes} classes\n"
        f"Model: {parameters:,} parameters; SVD layer {network.svd_layer}, layer before it {network.pre_svd}\n"
        f"Steps: {steps}, {epoch_steps} an epoch"
    )


def _gan(config: Generation, root: str | None) -> tuple[int, str]:
    from orthocond.lab.generation.networks import prepare
    from orthocond.lab.generation.task import load_images

    images = load_images(config.data, root)
    sizes = [f"{sum(p.numel() for p in module.parameters()):,}" for module in prepare(config)]
    steps = config.schedule.steps
    return steps, (
        f"Data: {len(images)} images\nModel: {sizes[0]} parameters in the generator, {sizes[1]} in the discriminator\n"
        f"Steps: {steps}"
    )


class _EnoughError(Exception):
    """The steps that were wanted are made."""


def step_seconds(config: Config, root: str | None) -> float:
    """The median time of a few steps of a real training, which is then given up."""
    times: list[float] = []

    def watch(state: Progress) -> None:
        times.append(time.perf_counter())
        if state.step == _TIMED_STEPS:
            raise _EnoughError

    # One step more than needed, so that none of them ends with an evaluation.
    config = replace_at(config, "schedule.steps", _TIMED_STEPS + 1)
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(_EnoughError):
        experiments.train(config, Run.create(folder, "timed", config), root=root, progress=watch)
    return statistics.median(after - before for before, after in itertools.pairwise(times))
