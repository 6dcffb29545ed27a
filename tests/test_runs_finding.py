"""The runs in a folder: found, named, made once."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from orthocond.lab.experiments import preset
from orthocond.lab.runs import Run, files, finding
from orthocond.lab.runs.finding import find_runs, is_finished, name_of, open_or_create
from orthocond.lab.text import printable


@pytest.fixture
def config():
    return preset("dbn-sprites-small")


@pytest.mark.parametrize("state", ["finished", "diverged"])
def test_a_configuration_that_was_edited_after_the_end_is_refused(tmp_path, config, state):
    run = Run.create(tmp_path, "run", config)
    run.set_status(state, 3)
    file = run.path / "config.json"
    file.write_text(json.dumps(run.config))  # other white space, the same settings
    assert [found for _, found in find_runs(tmp_path)] == [config]
    file.write_text(json.dumps(run.config | {"seed": 5}))
    with pytest.raises(ValueError, match=r"config\.json was edited after the run had ended"):
        Run.open(run.path)
    with pytest.warns(RuntimeWarning, match="was edited after the run had ended"):
        assert list(find_runs(tmp_path)) == []
    record = run.path / "status.json"  # as it was before the hash was kept
    record.write_text(json.dumps({k: v for k, v in json.loads(record.read_text()).items() if k != "config"}))
    assert Run.open(run.path).config["seed"] == 5


def test_a_configuration_has_one_run(tmp_path, config):
    run = open_or_create(tmp_path / "runs", config)
    assert run.path.name == f"00000-{name_of(config)}"
    assert open_or_create(tmp_path / "runs", config).path == run.path
    newer = Run.create(tmp_path / "runs", "again", config)
    assert open_or_create(tmp_path / "runs", config).path == newer.path


def test_processes_that_ask_at_the_same_time_get_one_run(tmp_path, config, monkeypatch):
    """Threads stand for processes: the lock knows no difference."""
    original, barrier = finding.find_runs, threading.Barrier(4)

    def slow(root):
        found = list(original(root))
        time.sleep(0.05)
        return iter(found)

    monkeypatch.setattr(finding, "find_runs", slow)

    def ask(_):
        barrier.wait()
        return open_or_create(tmp_path, config).path

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(ask, range(4)))) == 1


def test_a_lock_that_is_held_too_long(tmp_path, config, monkeypatch):
    monkeypatch.setattr(files, "_PATIENCE", 0.05)
    with files.locked(tmp_path), pytest.raises(RuntimeError, match=r"worked on .* for 0\.05 seconds"):
        open_or_create(tmp_path, config)
    open_or_create(tmp_path, config)


@pytest.mark.parametrize("text", ["", "{", '{"a":', "[1]", "\x00\x00", "[" * 100_000, '{"kind":"?"}', '{"sead":3}'])
def test_a_broken_configuration_is_named_and_the_others_are_found(tmp_path, config, text):
    runs = [Run.create(tmp_path, "a", config) for _ in range(3)]
    (runs[1].path / "config.json").write_text(text)
    with pytest.warns(RuntimeWarning, match=r"00001-a/config\.json cannot be used: "):
        found = [run.path for run, _ in find_runs(tmp_path)]
    assert found == [runs[0].path, runs[2].path]


def test_other_folders_are_passed_over(tmp_path, config):
    (tmp_path / "notes").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "config.json").write_text(json.dumps({"kind": "another program's"}))
    assert list(find_runs(tmp_path)) == []
    assert list(find_runs(tmp_path / "nowhere")) == []


def test_finished(tmp_path, config):
    run = Run.create(tmp_path, "a", config)
    assert not is_finished(run)
    run.log(1, finished=True)
    assert not is_finished(run)
    (run.path / "status.json").unlink()  # as folders of earlier versions
    assert is_finished(run)
    run.set_status("running")
    assert not is_finished(run)
    run.set_status("finished")
    assert is_finished(run)


def test_what_terminals_would_obey_is_escaped():
    assert (
        printable("a\x1b]0;title\x07\x9b2J\u202egnp.\udcff\x7f") == "a\\x1b]0;title\\x07\\x9b2J\\u202egnp.\\udcff\\x7f"
    )
    assert printable("κ = 3 × 10⁴\n\tπ ✓ 猫") == "κ = 3 × 10⁴\n\tπ ✓ 猫"
