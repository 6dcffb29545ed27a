"""Real processes that are killed, interrupted or out of disk, and what a resumed run makes of it.

pytest starts this file once as a program; it imports torch and forks a process for each attempt, as starting torch
anew for each would take minutes.
"""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from orthocond.lab.runs import (
    Guard,
    Run,
    capture_rng,
    restore_rng,
)
from orthocond.layers import DecorrelatedBatchNorm2d
from orthocond.steps import NearestOrthogonal, OptimalLR, treat

STEPS, EVERY = 5, 2
ABORTED = 99


def train(root, steps=STEPS, every=EVERY, pause=0.0):
    """Train a tiny whitened network with everything that has a state; go on where the folder says."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), DecorrelatedBatchNorm2d(4, eps=1e-3), nn.Dropout(0.2), nn.Flatten(), nn.Linear(36, 3)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    handle = treat(model[0], optimizer, gradient=NearestOrthogonal(), lr=OptimalLR(), spectrum_every=3)
    existing = sorted(root.glob("*-tiny"))
    run = Run.open(existing[0]) if existing else Run.create(root, "tiny", {"steps": steps})
    found = run.resume()
    first = 1
    if found is not None:
        first = found.step + 1
        model.load_state_dict(found.state["model"])
        optimizer.load_state_dict(found.state["optimizer"])
        schedule.load_state_dict(found.state["schedule"])
        handle.load_state_dict(found.state["treatment"])
        restore_rng(found.state["rng"])
    with Guard(run, model) as guard:
        for step in range(first, steps + 1):
            x = torch.randn(8, 3, 5, 5) + random.random() + float(np.random.rand())  # noqa: NPY002
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), torch.randint(3, (8,)))
            loss.backward()
            guard.check(step, loss)
            optimizer.step()
            schedule.step()
            statistics = handle.statistics[0]
            spectra = list(statistics.spectra)
            run.log(step, step / 4, loss=loss, olr=statistics.occurrence, spectra=spectra, rates=statistics.rates)
            time.sleep(pause)
            stop = guard.should_stop()
            if stop or step % every == 0 or step == steps:
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "schedule": schedule.state_dict(),
                    "treatment": handle.state_dict(),
                    "rng": capture_rng(),
                }
                run.save(state, step)
            if stop:
                break
    if not guard.exit_code:
        run.set_status("finished", steps)
    return guard.exit_code


def fork(action):
    """Run an action in a process of its own; its result is the exit code."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        code = action() or 0
    except KeyboardInterrupt:
        code = ABORTED
    except OSError as error:
        print(f"OSError: {error}", flush=True)
        code = 2
    finally:
        os._exit(code)


def wait(process):
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def die_at(number, when):
    """Make the process kill itself at its nth change of a file: before it, after it, or with half a write done."""
    count = 0

    def wrapped(name, original):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count == number and when == "half" and name == "write":
                original(args[0], args[1][: len(args[1]) // 2])
            if count == number and when != "after":
                os.kill(os.getpid(), signal.SIGKILL)
            result = original(*args, **kwargs)
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    for name in ("write", "fsync", "replace", "rename", "mkdir", "rmdir", "unlink", "truncate", "ftruncate"):
        setattr(os, name, wrapped(name, getattr(os, name)))
    return lambda: count


def kill_at_every_operation(root):
    def count_operations():
        count = die_at(0, "before")
        train(root / "count")
        (root / "operations").write_text(str(count()))

    assert wait(fork(count_operations)) == 0
    operations = int((root / "operations").read_text())
    for number in range(1, operations + 1):
        when = ("before", "after", "half")[number % 3]

        def attempt(number=number, when=when):
            die_at(number, when)
            train(root / f"operation-{number}")

        assert wait(fork(attempt)) == -signal.SIGKILL
        assert wait(fork(lambda number=number: train(root / f"operation-{number}"))) == 0


def kill_at_random(root):
    """Kill until the run has ended all the same. It takes 1.2 seconds or more, three kills come earlier than that."""
    rng = random.Random(1)
    kills = 0
    while True:
        process = fork(lambda: train(root / "random", steps=60, every=5, pause=0.02))
        deadline = time.monotonic() + rng.uniform(0.05, 0.3) * 1.2**kills
        while time.monotonic() < deadline:
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                assert status == 0
                (root / "kills").write_text(str(kills))
                return
            time.sleep(0.002)
        os.kill(process, signal.SIGKILL)
        code = wait(process)
        if code == 0:  # it ended by itself between the last look and the kill
            (root / "kills").write_text(str(kills))
            return
        assert code == -signal.SIGKILL
        kills += 1


def ask_to_stop(root):
    for number in (signal.SIGINT, signal.SIGTERM):
        folder = root / number.name
        process = fork(lambda folder=folder: train(folder, pause=0.1))
        wait_for(folder, 1)
        os.kill(process, number)
        assert wait(process) == 128 + number
        (status,) = (Run.open(path).status for path in folder.glob("*-tiny"))
        assert (status.state, status.message) == ("stopped", f"Stopped by {number.name}")
        assert status.saved == status.step >= 1
        assert wait(fork(lambda folder=folder: train(folder))) == 0
    process = fork(lambda: train(root / "twice", pause=30))
    wait_for(root / "twice", 1)
    os.kill(process, signal.SIGINT)
    time.sleep(0.2)  # two signals at once would be one
    os.kill(process, signal.SIGINT)
    start = time.monotonic()
    assert wait(process) == ABORTED
    (status,) = (Run.open(path).status for path in (root / "twice").glob("*-tiny"))
    assert (status.state, status.message) == ("stopped", "Aborted by KeyboardInterrupt")
    assert time.monotonic() - start < 5
    assert wait(fork(lambda: train(root / "twice"))) == 0


def wait_for(folder, lines):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if any(len(p.read_bytes().splitlines()) >= lines for p in folder.glob("*-tiny/metrics.jsonl")):
            return
        time.sleep(0.01)
    raise AssertionError("no metrics")


def fill_the_disk(root):
    """A limit on the size of files, which lets the metrics pass and stops a checkpoint in its middle."""

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))
        return train(root / "full")

    assert wait(fork(lambda: train(root / "full", steps=3))) == 0  # saves after steps 2 and 3
    assert wait(fork(limited)) == 2
    assert sorted(p.name for p in (root / "full").glob("*/checkpoints/*.json")) == [
        "0000000002.json",
        "0000000003.json",
    ]
    assert not list((root / "full").glob("*/checkpoints/.*"))
    assert wait(fork(lambda: train(root / "full"))) == 0


def write_twice(root):
    process = fork(lambda: train(root / "busy", pause=0.3))
    wait_for(root / "busy", 1)

    def second():
        try:
            train(root / "busy")
        except RuntimeError as error:
            return 7 if "Another process" in str(error) else 1

    assert wait(fork(second)) == 7
    assert wait(process) == 0


def main(root):
    import torch._dynamo  # the first step of an optimizer would import it, in each process anew

    torch.set_num_threads(1)
    assert wait(fork(lambda: train(root / "reference"))) == 0
    assert wait(fork(lambda: train(root / "long", steps=60, every=5))) == 0
    for part in (kill_at_every_operation, kill_at_random, ask_to_stop, fill_the_disk, write_twice):
        start = time.monotonic()
        part(root)
        print(f"{part.__name__}: {time.monotonic() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    root = tmp_path_factory.mktemp("kills")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__, str(root)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return root, done.stdout


def metrics_of(folder):
    (path,) = folder.glob("*-tiny")
    return (path / "metrics.jsonl").read_bytes()


def test_killed_at_every_change_of_a_file(outcome):
    root, _ = outcome
    reference = metrics_of(root / "reference")
    assert len(reference.splitlines()) == STEPS
    folders = list(root.glob("operation-*"))
    assert len(folders) == int((root / "operations").read_text()) > 40
    assert [f.name for f in folders if metrics_of(f) != reference] == []
    runs = [Run.open(path) for folder in folders for path in folder.glob("*-tiny")]
    assert {(run.status.state, run.status.step, run.status.saved) for run in runs} == {("finished", STEPS, STEPS)}
    assert [path for run in runs for path in run.path.rglob("*.tmp")] == []


def test_killed_at_random_moments(outcome):
    root, _ = outcome
    assert int((root / "kills").read_text()) >= 3
    assert metrics_of(root / "random") == metrics_of(root / "long")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "twice", "full", "busy"])
def test_stopped_and_resumed(outcome, name):
    root, _ = outcome
    assert metrics_of(root / name) == metrics_of(root / "reference")


def test_a_full_disk_says_so(outcome):
    _, output = outcome
    assert "OSError: [Errno 27] Cannot write" in output
    assert "raise the limit, then resume. What was written before is intact." in output


def test_times_stay_beside_the_metrics(outcome):
    root, _ = outcome
    (run,) = (Run.open(path) for path in (root / "random").glob("*-tiny"))
    assert [t["step"] for t in run.times()] == [m["step"] for m in run.metrics()]
    seconds = [t["seconds"] for t in run.times()]
    assert seconds == sorted(seconds)
    assert json.loads((run.path / "config.json").read_text()) == {"steps": 60}
