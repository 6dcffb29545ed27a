"""A configuration that trains in a second."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from orthocond.lab import experiments
from orthocond.lab.classification.config import Classification, Data, Method, Model, Schedule
from orthocond.lab.runs import Run

TINY = Classification(
    data=Data("sprites", size=16, crop_padding=2, flip=True, limit=160, held_out=100),
    model=Model("resnet18", depths=(1,), width=4),
    schedule=Schedule(epochs=2, batch_size=32, milestones=(1,)),
    log_every=2,
)


def helpers_path() -> str:
    """PYTHONPATH of processes that import these helpers."""
    return os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])


def train(config, run: Run, **settings) -> int:
    """Train without the evaluation at the end."""
    return experiments.train(config, run, evaluate=False, **settings)


class Stopped(Exception):
    """A training was broken off."""


def break_off(step: int):
    """What breaks a training off after a step, as its progress."""

    def watch(state) -> None:
        if state.step == step and not state.stage:
            raise Stopped

    return watch


def broken_off(config, run: Run, step: int) -> Run:
    """The run, broken off after a step and opened again."""
    with pytest.raises(Stopped):
        train(config, run, progress=break_off(step))
    return Run.open(run.path)


class NanGradient(torch.autograd.Function):
    """The identity, whose gradient is NaN."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        return g * float("nan")


def tiny(method: str = "nog+ow+olr", **settings) -> Classification:
    return replace(TINY, method=Method(method), **settings)


def gcp(method: str = "svd", **settings) -> Classification:
    model = Model("resnet18", "gcp", "imagenet", depths=(1, 1), width=8, reduction=8, last_stride=1)
    return replace(tiny(method), data=replace(TINY.data, size=32), model=model, **settings)
