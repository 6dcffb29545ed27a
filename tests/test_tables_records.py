"""Kept copies of trainings: nothing is lost when several tables write, and damage is named."""

import gzip
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from orthocond.lab.classification.config import Method
from orthocond.lab.experiments import preset
from orthocond.lab.runs import Run
from orthocond.lab.tables import records


def _config(name, seed):
    return replace(preset("dbn-cifar100-resnet50"), method=Method(name), seed=seed)


def _train(root, config, evaluated=True):
    run = Run.create(root, "run", config)
    run.log(1, error=80.0, finished=True)
    if evaluated:
        (run.path / "evaluation.json").write_text(json.dumps({"recalibrated_error": 75}))
    run.set_status("finished", 1)
    return run


def test_tables_that_keep_at_the_same_time_lose_nothing(tmp_path, monkeypatch):
    """Threads stand for processes: the lock knows no difference."""
    read, barrier = records._read_lines, threading.Barrier(4)

    def slow(path):
        lines = read(path)
        time.sleep(0.05)
        return lines

    monkeypatch.setattr(records, "_read_lines", slow)

    def keep(seed):
        config = _config("ow", seed)
        record = records.Record("run", config, [{"step": 1, "finished": True}])
        barrier.wait()
        records.keep([record], tmp_path)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(keep, range(4)))
    assert sorted(record.config.seed for record in records.read_kept(tmp_path)) == [0, 1, 2, 3]
    assert [path.name for path in (tmp_path / "runs").iterdir() if path.suffix == ".tmp"] == []


def test_an_evaluation_of_an_earlier_step_is_not_the_final_one(tmp_path):
    run, config = _train(tmp_path, _config("ow", 0)), _config("ow", 0)
    (run.path / "evaluation.json").write_text(json.dumps({"step": 1, "recalibrated_error": 75}))
    assert records.read_run(run, config).evaluation == {"step": 1, "recalibrated_error": 75}
    (run.path / "evaluation.json").write_text(json.dumps({"step": 0, "recalibrated_error": 75}))
    with pytest.warns(RuntimeWarning, match="evaluation.json is of step 0 and the run ended at step 1"):
        assert records.read_run(run, config).evaluation is None


def test_a_run_without_evaluation_yields_to_a_result_that_is_there(tmp_path):
    config, out = _config("ow", 0), tmp_path / "out"
    bare = _train(tmp_path / "runs", config, evaluated=False)
    found, kept = records.gather([config], tmp_path / "runs", out)
    assert (found[config].evaluation, kept) == (None, {})
    records.keep([replace(records.read_run(bare, config), evaluation={"error": 70})], out)
    found, kept = records.gather([config], tmp_path / "runs", out)
    assert (found, kept[config].evaluation) == ({}, {"error": 70})
    _train(tmp_path / "runs", config)
    _train(tmp_path / "runs", config, evaluated=False)
    found, kept = records.gather([config], tmp_path / "runs", out)
    assert (found[config].evaluation, kept) == ({"recalibrated_error": 75}, {})


@pytest.mark.parametrize("name", ["metrics.jsonl", "times.jsonl", "evaluation.json", "status.json"])
def test_a_damaged_run_is_named_and_the_others_go_on(tmp_path, name):
    configs = [_config("ow", seed) for seed in range(2)]
    runs = [_train(tmp_path / "runs", config) for config in configs]
    (runs[0].path / name).write_bytes(b"garbage\n")
    with pytest.warns(RuntimeWarning, match=f"A run was left out: .*{runs[0].path.name}/{name}"):
        found, kept = records.gather(configs, tmp_path / "runs", tmp_path / "out")
    assert (list(found), kept) == ([configs[1]], {})


def test_a_finished_run_whose_metrics_were_cut_off_is_named(tmp_path):
    config = _config("ow", 0)
    run = _train(tmp_path / "runs", config)
    file = run.path / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.warns(RuntimeWarning, match=rf"A run was left out: {file} has lost its end: .* delete the run's"):
        assert records.gather([config], tmp_path / "runs", tmp_path / "out") == ({}, {})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        *(gzip.compress(text, mtime=0) for text in (b"", b"[]\n", b"{}\n")),
        b"garbage",
        gzip.compress(b"x", mtime=0)[:-9],
    ],
    ids=["empty", "nothing", "list", "no record", "garbage", "cut off"],
)
def test_a_damaged_file_of_copies_is_named(tmp_path, content):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "a.jsonl.gz").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz is damaged .*restore it"):
        list(records.read_kept(tmp_path))
