"""The guard of a training loop: a loss that is not finite, signals, and how a run ends."""

import errno
import json
import math
import os
import signal
import threading
import warnings

import pytest
import torch
from torch import nn

from orthocond.lab.runs import Guard, Run, ranks
from orthocond.layers import DecorrelatedBatchNorm2d
from orthocond.monitor import ConditionMonitor


@pytest.fixture
def run(tmp_path):
    return Run.create(tmp_path, "tiny", {"lr": 0.1})


def filled(run, steps=(1, 2, 3)):
    for step in steps:
        run.log(step, loss=1 / step)
        run.save({"weight": torch.full((100,), float(step)), "step": step}, step)
    return run


@pytest.mark.parametrize(
    ("error", "state", "message"),
    [
        (FloatingPointError("The loss is nan.\n  More."), "diverged", "The loss is nan"),
        (RuntimeError("no memory\nmore"), "failed", "RuntimeError: no memory"),
        (KeyboardInterrupt(), "stopped", "Aborted by KeyboardInterrupt"),
        (SystemExit(143), "stopped", "Aborted by SystemExit"),
    ],
)
def test_the_error_that_ends_a_loop_becomes_its_status(run, error, state, message):
    def loop():
        with Guard(run) as guard:
            guard.check(4, 0.5)
            raise error

    with pytest.raises(type(error)):
        loop()
    assert (run.status.state, run.status.step, run.status.message) == (state, 4, message)


def test_a_disk_that_takes_no_status_does_not_hide_the_error(run, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "full")

    def loop():
        with Guard(run):
            monkeypatch.setattr(os, "replace", refuse)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    monkeypatch.undo()
    assert run.status.state == "created"


def model_with(weight):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), DecorrelatedBatchNorm2d(4, eps=1e-3), nn.Flatten(), nn.Linear(36, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = ConditionMonitor(model).start()
    model(torch.randn(8, 3, 5, 5)).mean().backward()
    optimizer.step()
    with torch.no_grad():
        model[3].weight[0, :3] = weight
    optimizer.zero_grad()
    loss = model(torch.randn(8, 3, 5, 5)).square().mean()
    loss.backward()
    monitor.stop()
    return model, monitor, loss


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite(run, value):
    filled(run)
    model, monitor, loss = model_with(value)
    with Guard(run, model, monitor=monitor) as guard, pytest.raises(FloatingPointError) as caught:
        guard.check(7, loss)
    text = str(caught.value)
    assert text.startswith(f"The loss is {loss.item()} at step 7.\n")
    assert "Parameters that are not finite: 3.weight (3 of 36)." in text
    assert "Gradients that are not finite: 0.weight (" in text
    assert "Buffers that are not finite: none." in text
    assert "\n  1: Spectrum" in text
    assert "condition (+0.001)" in text
    assert "\n  1: step 0" in text
    assert "Decompositions that did not converge: 0" in text
    assert "The last one is that of step 3." in text
    assert text in (run.path / "log.txt").read_text()
    assert run.load().step == 3


def test_a_finite_loss_passes(run):
    with Guard(run) as guard:
        guard.check(1, torch.tensor(3.0))
        guard.check(2, -1e30)
        assert not guard.should_stop()
    assert guard.exit_code == 0
    with pytest.raises(FloatingPointError, match="There is none yet"):
        Guard(run).check(1, math.nan)


def test_handlers_are_put_back(run, capfd):
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    with Guard(run) as guard:
        signal.raise_signal(signal.SIGTERM)
        assert guard.should_stop()
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before
    assert guard.exit_code == 143
    assert "Stopping after this step" in capfd.readouterr().err


def test_only_the_main_thread_gets_signals(run):
    errors = []

    def loop():
        with Guard(run, signals=()):
            pass
        try:
            Guard(run).__enter__()
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    assert errors == ["Only the main thread gets signals; start the loop there, or pass signals=()."]


def test_a_history_of_conditions_survives(run):
    _, monitor, _ = model_with(1.0)
    with warnings.catch_warnings():
        run.save({"history": list(monitor.history)}, 1)
    assert run.load().state["history"] == list(monitor.history)
    assert json.loads((run.checkpoints / "0000000001.json").read_text())["body"]["step"] == 1


# Signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_ranks_agree_is_not_lost(run, monkeypatch, number):
    def agree(value):
        if not value:
            signal.raise_signal(number)  # after the value was sent, before the sum comes back
        return value

    with Guard(run) as guard:
        monkeypatch.setattr(ranks, "largest", agree)
        assert not guard.should_stop()
        assert guard.should_stop()
    assert guard.exit_code == 128 + number


def test_a_signal_after_the_last_step_is_not_lost(run):
    with Guard(run) as guard:
        assert not guard.should_stop()
        signal.raise_signal(signal.SIGTERM)
    assert guard.exit_code == 143
    assert run.status.state == "stopped"


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_second_signal_ends_at_once(run, number, error):
    def loop():
        with Guard(run):
            signal.raise_signal(number)
            signal.raise_signal(number)

    before = signal.getsignal(number)
    with pytest.raises(error):
        loop()
    assert signal.getsignal(number) is before


def test_the_echo_of_torchrun_is_no_second_signal(run, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with Guard(run) as guard:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert guard.should_stop()
    assert guard.exit_code == 130
