"""A configuration that trains in a second."""

import contextlib
import json
import os
import signal
import warnings
from dataclasses import replace
from pathlib import Path

import processes
import pytest
import torch
from accelerate.state import AcceleratorState

from orthocond.lab import experiments
from orthocond.lab.classification.config import Classification, Data, Method, Model, Schedule
from orthocond.lab.launch import worker
from orthocond.lab.runs import Run
from orthocond.lab.runs.finding import open_or_create

TINY = Classification(
    data=Data("sprites", size=16, crop_padding=2, flip=True, limit=160, held_out=100),
    model=Model("resnet18", depths=(1,), width=4),
    schedule=Schedule(epochs=2, batch_size=32, milestones=(1,)),
    log_every=2,
)


COMMAND = [
    *("train", "dbn-sprites-small", "--data.size", 16, "--data.limit", 32, "--data.held-out", 24),
    *("--schedule.batch-size", 8, "--schedule.epochs", 1, "--log-every", 1),
]


def run_of(root: Path, config, name: str = "tiny") -> Run:
    """A run that has not begun."""
    return Run.create(root, name, config)


def train(config, run: Run, **settings) -> int:
    """Train without the evaluation at the end."""
    return experiments.train(config, run, evaluate=False, **settings)


def is_left_as_it_is(root: Path, config, files) -> bool:
    """Whether training a finished run again changes none of its files."""
    run = run_of(root, config)
    train(config, run)
    before = files(run)
    return train(config, Run.open(run.path)) == 0 and files(run) == before


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


def killed_and_interrupted(config, root: Path) -> Run:
    """A run that was trained by processes of which one was killed and one interrupted, and then to its end."""
    run = open_or_create(root, config)
    for number, code, least in ((signal.SIGKILL, -9, 10), (signal.SIGINT, 130, 20)):
        reports = root / f"reports-{code}"
        process = processes.start(worker.main, [str(run.path)], output=reports)
        processes.wait_for(reports, lambda lines, least=least: any(json.loads(x)["step"] >= least for x in lines))
        os.kill(process.pid, number)
        process.join()
        assert process.exitcode == code
        assert "finished" not in run.metrics()[-1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the kill may have come in the middle of a checkpoint
        train(config, Run.open(run.path))
    return run


@contextlib.contextmanager
def other_precision():
    """Here a training may have another precision than those before: Accelerate keeps one for a whole process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


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
