"""Two processes: one writes, both agree."""

import os
import random
import signal
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import in_two_processes

from orthocond.cli.runs import last_run_with
from orthocond.lab.config import change
from orthocond.lab.presets import preset
from orthocond.lab.runs import Guard, Run, capture_rng, ranks, restore_rng
from orthocond.lab.runs.packing import from_bytes, to_bytes


def everywhere(value):
    """The value of each rank."""
    return [from_bytes(message) for message in ranks.gather(to_bytes(value))]


def draw():
    return [random.random(), np.random.rand(), torch.rand(()).item()]  # noqa: NPY002


def check_files(rank, run):
    run.log(1, loss=float(rank))
    run.note("hello")
    run.save({"weight": torch.full((3,), float(rank)), "rank": rank}, 1)
    assert everywhere(str(run.path)) == ["runs/00000-tiny"] * 2
    assert os.path.exists("runs") == (rank == 0)
    found = run.load()
    assert found.state["rank"] == 0
    assert torch.equal(found.state["weight"], torch.zeros(3))
    if rank == 0:
        assert run.metrics() == [{"step": 1, "loss": 0.0}]
        assert len((run.path / "log.txt").read_text().splitlines()) == 1


def check_random_numbers(rank, run):
    random.seed(rank)
    np.random.seed(rank)  # noqa: NPY002
    torch.manual_seed(rank)
    run.save({"rng": capture_rng()}, 2)
    expected = draw()
    one, two = everywhere(expected)
    assert one != two
    restore_rng(run.resume().state["rng"])
    assert draw() == expected


def check_damage(rank, run):
    run.save({"step": 3}, 3)
    if rank == 0:
        (path,) = run.checkpoints.glob("*3-*.safetensors")
        path.write_bytes(b"")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run.resume()
    assert found.step == 2
    assert "Checkpoint 3 is damaged" in found.skipped[0]
    assert len(caught) == (rank == 0)
    if rank == 0:
        for path in run.checkpoints.iterdir():
            path.write_bytes(b"")
    with pytest.raises(RuntimeError, match=r"No checkpoint in .* is good"):
        run.resume()


def check_errors(rank, run):
    with pytest.raises(TypeError if rank == 0 else RuntimeError, match="'x' is a set"):
        run.save({"x": {1}}, 4)
    with pytest.raises(FileNotFoundError if rank == 0 else RuntimeError, match="is not a run"):
        Run.open("nowhere")
    Run.open("runs/00000-tiny")


def check_finding(rank, run):
    """The first process opens all runs of the folder, while the other one waits for the path that it finds."""
    config = preset("dbn-sprites-small")
    assert last_run_with(config, "runs") is None
    mine = Run.create("runs", "mine", config)
    Run.create("runs", "other", change(config, {"seed": 7}))
    found = last_run_with(config, "runs")
    assert everywhere([str(found.path), found.config == mine.config]) == [["runs/00001-mine", True]] * 2


def check_guard(rank, run):
    with Guard(run) as guard:
        for step in range(5):
            if step == 2 and rank == 1:
                os.kill(os.getpid(), signal.SIGINT)
            if guard.should_stop():
                break
    assert everywhere([step, guard.exit_code]) == [[2, 130]] * 2
    with pytest.raises(FloatingPointError) as caught:
        Guard(run).check(6, float("nan") if rank == 1 else 0.5)
    assert ("0.5 at step 6 here on rank 0, and not finite on another rank" in str(caught.value)) == (rank == 0)


def worker(rank, folder):
    own = folder / str(rank)  # no shared file system
    own.mkdir()
    os.chdir(own)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        run = Run.create("runs", "tiny", {"lr": 0.1})
        assert run.config == {"lr": 0.1}
        for check in (check_files, check_random_numbers, check_damage, check_errors, check_finding, check_guard):
            check(rank, run)
    finally:
        dist.destroy_process_group()


def test_two_processes(tmp_path):
    in_two_processes(worker, tmp_path)
