"""Runs that are resumed: only by one process, only with their own configuration, never from nothing by mistake."""

import hashlib
import json
import shutil

import pytest
import torch

from orthocond.lab.runs import Run, checkpoint
from orthocond.lab.runs.packing import dump_json


@pytest.fixture
def run(tmp_path):
    return trained(Run.create(tmp_path, "tiny", {"lr": 0.1, "seed": 0}))


def trained(run, steps=(1, 2, 3)):
    run.resume()
    for step in steps:
        run.log(step, loss=1 / step)
        run.save({"weight": torch.full((10,), float(step))}, step)
    return run


# The configuration


def edit(run, **values):
    (run.path / "config.json").write_text(json.dumps(run.config | values))
    return Run.open(run.path)


def test_an_edited_configuration_is_refused(run):
    edited = edit(run, seed=1)
    before = (run.path / "metrics.jsonl").read_bytes()
    for action in (edited.load, edited.resume):
        with pytest.raises(RuntimeError, match=r"saved with another configuration(.|\n)*seed: 0 → 1"):
            action()
    assert (run.path / "metrics.jsonl").read_bytes() == before
    assert edit(run).resume().step == 3


def test_the_checkpoint_of_another_run_is_refused(run, tmp_path):
    other = trained(Run.create(tmp_path, "other", {"lr": 0.2, "seed": 0}))
    shutil.rmtree(other.checkpoints)
    shutil.copytree(run.checkpoints, other.checkpoints)
    with pytest.raises(RuntimeError, match=r"lr: 0\.1 → 0\.2"):
        Run.open(other.path).resume()


def test_a_checkpoint_without_configuration_is_taken_with_a_note(run):
    for path in run.checkpoints.glob("*.json"):
        body = json.loads(path.read_text())["body"]
        del body["config"]
        path.write_bytes(dump_json({"sha256": hashlib.sha256(dump_json(body)).hexdigest(), "body": body}))
    edited = edit(run, seed=1)
    assert edited.resume().step == 3
    assert "does not say which configuration it belongs to" in (run.path / "log.txt").read_text()


# Checkpoints that are missing


@pytest.mark.parametrize("folder", ["emptied", "missing"])
@pytest.mark.parametrize("record", ["status.json", "no status.json"])
def test_missing_checkpoints_are_no_new_beginning(run, folder, record):
    shutil.rmtree(run.checkpoints)
    if folder == "emptied":
        run.checkpoints.mkdir()
    if record == "no status.json":
        (run.path / "status.json").unlink()
    again = Run.open(run.path)
    with pytest.raises(RuntimeError, match="its checkpoints are missing"):
        again.resume()
    assert len(run.metrics()) == 3
    assert again.resume(restart=True) is None
    assert run.metrics() == []
    assert run.status.state == "running"
    trained(again, [1])
    assert Run.open(run.path).resume().step == 1


def test_restart_removes_good_checkpoints_too(run):
    again = Run.open(run.path)
    assert again.resume(restart=True) is None
    assert (list(run.checkpoints.iterdir()), run.metrics(), run.times()) == ([], [], [])
    assert Run.open(run.path).resume() is None  # killed before its first checkpoint: it begins again


def test_a_run_without_a_checkpoint_yet_begins_again(tmp_path):
    run = Run.create(tmp_path, "tiny", {})
    run.resume()
    run.log(1, loss=0.1)
    run.set_status("diverged", 1, "The loss is nan at step 1")
    assert Run.open(run.path).resume() is None
    assert run.metrics() == []


# One process at a time


def test_the_lock_is_taken_before_the_checkpoint_is_read(run, monkeypatch):
    """Else a process that ends between reading and locking would have its last checkpoint cut off."""
    again, read = Run.open(run.path), checkpoint.read

    def checked(folder):
        assert again._locked
        return read(folder)

    monkeypatch.setattr(checkpoint, "read", checked)
    assert again.resume().step == 3


def test_leftovers_of_killed_writers_are_removed(run):
    (run.path / ".status.json.0123456789ab.tmp").write_bytes(b"half")
    Run.open(run.path).resume()
    assert not list(run.path.glob(".*.tmp"))
