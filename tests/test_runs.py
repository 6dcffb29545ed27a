import builtins
import errno
import json
import math
import os
import re
import signal
from dataclasses import asdict, dataclass

import numpy as np
import pytest
import torch

from orthocond.lab.runs import Guard, Run, Status, checkpoint


@pytest.fixture
def run(tmp_path):
    return Run.create(tmp_path, "tiny", {"lr": 0.1})


def state(step):
    return {"weight": torch.full((100,), float(step)), "step": step}


def filled(run, steps=(1, 2, 3)):
    for step in steps:
        run.log(step, loss=1 / step)
        run.save(state(step), step)
    return run


def names(run):
    return sorted(p.name for p in run.checkpoints.iterdir())


def file(run, step, kind):
    (path,) = run.checkpoints.glob(f"{step:010d}*.{kind}")
    return path


# The folder


def test_folders_are_numbered_and_never_used_twice(tmp_path):
    runs = [Run.create(tmp_path / "deep" / "root", name, {}) for name in ("a", "a", "nog+ow_1.0")]
    assert [r.path.name for r in runs] == ["00000-a", "00001-a", "00002-nog+ow_1.0"]
    (tmp_path / "deep/root/00041").mkdir()  # of a process that was killed while it made a run
    (tmp_path / "deep/root/figures").mkdir()
    assert Run.create(tmp_path / "deep/root", "a", {}).path.name == "00042-a"


def test_a_number_that_another_process_takes_meanwhile(tmp_path, monkeypatch):
    mkdir = os.mkdir

    def late(path, *args, **kwargs):
        if str(path).endswith("00000"):  # between looking for a number and taking it
            mkdir(tmp_path / "00000-other")
        mkdir(path, *args, **kwargs)

    monkeypatch.setattr(os, "mkdir", late)
    assert Run.create(tmp_path, "a", {}).path.name == "00001-a"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["00000-other", "00001-a"]


def test_content_of_a_folder(tmp_path):
    @dataclass(frozen=True)
    class Config:
        lr: float = 0.1
        milestones: tuple[int, ...] = (1, 2)

    run = Run.create(tmp_path, "a", Config())
    assert sorted(p.name for p in run.path.iterdir()) == ["checkpoints", "config.json", "figures", "status.json"]
    again = Run.open(str(run.path))
    assert again.config == run.config == {"lr": 0.1, "milestones": [1, 2]}
    assert again.metrics() == again.times() == []
    assert again.load() is None
    assert repr(again) == f"Run({str(run.path)!r})"


@pytest.mark.parametrize("name", ["", "a b", "../a", "a/b", "é"])
def test_names_that_are_no_names_of_folders(tmp_path, name):
    with pytest.raises(ValueError, match="letters, digits"):
        Run.create(tmp_path, name, {})


def test_not_a_run(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"is not a run: it has no config\.json"):
        Run.open(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not a JSON object .*line 1 column 2"):
        Run.open(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json is not a JSON object"):
        Run.open(tmp_path)
    with pytest.raises(TypeError, match="instance of a dataclass"):
        Run.create(tmp_path, "a", [1])
    with pytest.raises(OSError, match="Cannot write"):
        Run.create(tmp_path / "config.json", "a", {})


# Status


def test_the_status_follows_a_run(run):
    assert (run.status.state, run.status.step, run.status.message) == ("created", 0, "")
    run.resume()
    assert (run.status.state, run.status.step) == ("running", 0)
    filled(run, [1, 2])
    with Guard(run) as guard:
        guard.check(2, 0.5)
        signal.raise_signal(signal.SIGTERM)
        assert guard.should_stop()
    assert (run.status.state, run.status.step, run.status.message) == ("stopped", 2, "Stopped by SIGTERM")
    again = Run.open(run.path)
    again.resume()
    assert (again.status.state, again.status.step) == ("running", 2)
    again.set_status("finished", 3)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", again.status.updated)
    assert json.loads((run.path / "status.json").read_text()) == asdict(again.status)
    again.set_status("failed", message="why")
    assert (again.status.state, again.status.step, again.status.message) == ("failed", 3, "why")


def test_the_status_of_folders_that_have_no_record(run):
    (run.path / "status.json").unlink()
    assert run.status == Status("created")
    run.log(3, loss=1.0)
    assert run.status == Status("stopped", 3)
    run.note("The loss is nan at step 4.\n  Parameters that are not finite: none.")
    assert run.status == Status("diverged", 3, "The loss is nan at step 4")
    run.note("Resumed after step 2.")
    assert run.status == Status("stopped", 3)
    run.log(4, finished=True)
    assert run.status == Status("finished", 4)


def test_a_status_that_is_none(run):
    with pytest.raises(ValueError, match=r"one of created, running, .* got 'done'"):
        run.set_status("done")
    with pytest.raises(ValueError, match="integer of at least 0; got -1"):
        run.set_status("running", -1)
    for text in ("{", "[]", '{"state":"done"}', '{"state":"running","step":"3"}', '{"state":"running","more":1}'):
        (run.path / "status.json").write_text(text)
        with pytest.raises(ValueError, match=r"00000-tiny/status\.json is damaged .* delete it"):
            _ = run.status


# Metrics


def test_metrics(run):
    run.log(0, loss=torch.tensor(0.5), rank=np.int64(3), method="svd", rates=[0.1, torch.tensor(2)], best=None)
    run.log(1, 0.25, loss=math.nan, condition=math.inf, low={"x": -math.inf}, timing={"step_seconds": 0.01})
    text = (run.path / "metrics.jsonl").read_text()
    assert text.splitlines() == [
        '{"step":0,"loss":0.5,"rank":3,"method":"svd","rates":[0.1,2],"best":null}',
        '{"step":1,"epoch":0.25,"loss":"NaN","condition":"Infinity","low":{"x":"-Infinity"}}',
    ]
    first, second = run.metrics()
    assert first == {"step": 0, "loss": 0.5, "rank": 3, "method": "svd", "rates": [0.1, 2], "best": None}
    assert math.isnan(second.pop("loss"))
    assert second == {"step": 1, "epoch": 0.25, "condition": math.inf, "low": {"x": -math.inf}}
    times = run.times()
    assert [t["step"] for t in times] == [0, 1]
    assert 0 <= times[0]["seconds"] <= times[1]["seconds"] < 60
    assert times[1]["step_seconds"] == 0.01


def test_equal_runs_have_equal_metrics_files(tmp_path):
    files = [filled(Run.create(tmp_path, "a", {})).path / "metrics.jsonl" for _ in range(2)]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("continued", ["log", "note", "resume"])
def test_half_a_line(run, continued):
    filled(run, [1, 2])
    for name in ("metrics.jsonl", "times.jsonl", "log.txt"):
        with (run.path / name).open("ab") as f:
            f.write(b'{"step":3,"lo')
    again = Run.open(run.path)
    assert [m["step"] for m in again.metrics()] == [1, 2]
    {"log": lambda: again.log(3, loss=1.0), "note": lambda: again.note("hello"), "resume": again.resume}[continued]()
    assert [m["step"] for m in again.metrics()] == ([1, 2, 3] if continued == "log" else [1, 2])
    assert (run.path / "metrics.jsonl").read_bytes().endswith(b"}\n")
    assert b"step" not in (run.path / "log.txt").read_bytes().replace(b"after step", b"")


@pytest.mark.parametrize("line", [b"3", b"\x00", b'{"step":["x"]}'])
def test_a_damaged_line_is_named(run, line):
    filled(run, [1])
    with (run.path / "metrics.jsonl").open("ab") as f:
        f.write(line + b"\n\x00\x00\n{}\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 is not a JSON object with an integer step") as caught:
        run.metrics()
    assert repr(line) in str(caught.value)
    Run.open(run.path).resume()
    assert [m["step"] for m in run.metrics()] == [1]


def test_errors_of_log(run):
    with pytest.raises(TypeError, match=r"loss\[1\] is a object"):
        run.log(1, loss=[1, object()])
    with pytest.raises(ValueError, match="integer of at least 0; got -1"):
        run.log(-1)
    with pytest.raises(ValueError, match=r"integer of at least 0; got 1\.5"):
        run.log(1.5)
    assert run.metrics() == []
    filled(run, [2])
    for opened in (run, Run.open(run.path)):
        with pytest.raises(RuntimeError, match="checkpoint of step 2"):
            opened.log(2, accuracy=1.0)
    run.log(3)


def test_seconds_go_on_after_a_break(run):
    run.log(1)
    times = run.path / "times.jsonl"
    times.write_text('{"step":1,"seconds":1000.0}\n')
    again = Run.open(run.path)
    again.log(2)
    assert 1000 <= again.times()[1]["seconds"] < 1060


# Checkpoints


def test_the_newest_two_are_kept(run):
    filled(run, range(1, 6))
    assert [n.partition("-")[0] for n in names(run)] == [
        "0000000004",
        "0000000004.json",
        "0000000005",
        "0000000005.json",
    ]
    found = run.load()
    assert (found.step, found.state["step"], found.skipped) == (5, 5, ())
    assert torch.equal(found.state["weight"], torch.full((100,), 5.0))


def test_one_step_saved_twice(run):
    filled(run, [1, 2])
    run.save({"weight": torch.ones(3)}, 2)
    assert len(names(run)) == 4
    assert torch.equal(run.load().state["weight"], torch.ones(3))


def truncate(path):
    path.write_bytes(path.read_bytes()[:-7])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)


def change_a_number(path):
    path.write_text(path.read_text().replace('"step":3', '"step":8'))


DAMAGES = {
    "cut JSON": ("json", truncate, "cut off or not JSON"),
    "empty JSON": ("json", lambda p: p.write_bytes(b""), "cut off or not JSON"),
    "other JSON": ("json", lambda p: p.write_bytes(b"[]"), "cut off or not JSON"),
    "changed JSON": ("json", change_a_number, "does not have the stored hash"),
    "cut tensors": ("safetensors", truncate, "bytes instead of"),
    "changed tensors": ("safetensors", flip, "does not have the stored hash"),
    "no tensors": ("safetensors", lambda p: p.unlink(), "No such file"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_found_and_the_one_before_used(run, damage):
    kind, destroy, text = DAMAGES[damage]
    filled(run)
    destroy(file(run, 3, kind))
    again = Run.open(run.path)
    with pytest.warns(RuntimeWarning, match=f"Checkpoint 3 is damaged and was not used: .*{text}"):
        found = again.resume()
    assert (found.step, found.state["step"]) == (2, 2)
    assert text in found.skipped[0]
    assert text in (run.path / "log.txt").read_text()
    assert [m["step"] for m in again.metrics()] == [1, 2]
    again.log(3, loss=1 / 3)
    again.save(state(3), 3)
    assert Run.open(run.path).load().step == 3
    assert [n[:10] for n in names(again)] == ["0000000002"] * 2 + ["0000000003"] * 2


def test_a_new_course_removes_what_lies_ahead(run):
    filled(run)
    truncate(file(run, 3, "json"))
    with pytest.warns(RuntimeWarning, match="damaged"):
        run.resume()
    run.save(state(2), 2)
    assert {n[:10] for n in names(run)} == {"0000000002"}


def test_no_good_checkpoint_is_no_new_beginning(run):
    filled(run)
    for step in (2, 3):
        truncate(file(run, step, "json"))
    with pytest.raises(RuntimeError, match=r"No checkpoint in .* is good"):
        run.resume()
    assert [m["step"] for m in run.metrics()] == [1, 2, 3]


def test_a_newer_format_is_not_damage(run, monkeypatch):
    monkeypatch.setattr(checkpoint, "_FORMAT", 2)
    filled(run, [1])
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="has format 2, this version reads 1"):
        run.load()


def test_metrics_are_on_the_disk_before_the_checkpoint_counts(run, monkeypatch):
    events = []
    fsync, replace = os.fsync, os.replace

    def record_sync(file):
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{file}")))
        fsync(file)

    def record_replace(old, new):
        events.append(f"replace {new.suffix}")
        replace(old, new)

    run.log(1)
    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "replace", record_replace)
    run.save({}, 1)
    tensors, text = (f".{file(run, 1, kind).name}" for kind in ("safetensors", "json"))
    assert [re.sub(r"\.[0-9a-f]{12}\.tmp", "", event) for event in events] == [
        "metrics.jsonl",
        "times.jsonl",
        *(tensors, "replace .safetensors", "checkpoints"),
        *(text, "replace .json", "checkpoints"),
        *(".status.json", "replace .json", run.path.name),
    ]


def test_loading_changes_nothing(run):
    filled(run, [1])
    run.log(2)
    before = {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()}
    Run.open(run.path).load()
    assert {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()} == before


def test_resume_cuts_what_came_after(run):
    filled(run, [1])
    run.log(2, loss=0.1)
    assert Run.open(run.path).resume().step == 1
    assert [m["step"] for m in run.metrics()] == [t["step"] for t in run.times()] == [1]


def test_resume_without_checkpoint_begins_again(run):
    run.log(1, loss=0.1)
    assert Run.open(run.path).resume() is None
    assert run.metrics() == []


def test_metrics_that_are_missing(run):
    filled(run, [1, 2])
    truncate(run.path / "metrics.jsonl")
    with pytest.raises(RuntimeError, match="lines are missing"):
        Run.open(run.path).resume()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("operation", ["fsync", "replace"])
def test_a_disk_that_takes_nothing(run, monkeypatch, code, operation):
    filled(run)
    before = {p.name: p.read_bytes() for p in run.checkpoints.iterdir()}
    original, calls = getattr(os, operation), 0

    def refuse(*args):
        nonlocal calls
        calls += 1
        if calls > (2 if operation == "fsync" else 1):  # the metrics pass, or the tensors do
            raise OSError(code, os.strerror(code))
        return original(*args)

    run.log(4)
    monkeypatch.setattr(os, operation, refuse)
    with pytest.raises(OSError, match=r"Cannot write .* What was written before is intact") as caught:
        run.save(state(4), 4)
    assert caught.value.errno == code
    monkeypatch.undo()
    assert {p.name: p.read_bytes() for p in run.checkpoints.iterdir()} == before
    assert run.load().step == 3
    run.save(state(4), 4)
    assert run.load().step == 4


def test_a_full_disk_while_logging(run, monkeypatch):
    run.log(1)
    before = (run.path / "metrics.jsonl").read_bytes()
    write = os.write
    written = []

    def half(file, data):
        if written:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(write(file, data[:5]))
        return written[0]

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(OSError, match=r"MB are free\. The disk is full: free some space, then resume"):
        run.log(2)
    monkeypatch.undo()
    assert (run.path / "metrics.jsonl").read_bytes() == before
    run.log(2)
    assert [m["step"] for m in run.metrics()] == [1, 2]


def test_a_read_only_folder_can_be_read(run, monkeypatch):
    filled(run)
    original = os.open

    def read_only(path, flags, *args, **kwargs):
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return original(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", read_only)
    again = Run.open(run.path)
    assert again.load().step == 3
    assert len(again.metrics()) == 3
    for action in (lambda: again.log(4), lambda: again.save({}, 4), again.resume, lambda: again.note("x")):
        with pytest.raises(OSError, match="read-only file system: choose another one"):
            action()


def test_nothing_is_pickled(run, monkeypatch):
    imported = builtins.__import__

    def without_pickle(name, *args, **kwargs):
        assert name not in ("pickle", "_pickle", "dill", "cloudpickle")
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_pickle)
    monkeypatch.setattr(torch, "save", None)
    monkeypatch.setattr(torch, "load", None)
    filled(run)
    assert run.resume().step == 3
