"""Reports that commands write by themselves, and metrics that a tracker gets while a training runs."""

import json
import os
import re
import signal

import pytest
from gan_helpers import tiny as tiny_gan
from lab_helpers import COMMAND, tiny, train
from report_helpers import Page

from orthocond.cli import main
from orthocond.cli import report as module
from orthocond.lab.display import Display
from orthocond.lab.runs import Run

pytestmark = pytest.mark.usefixtures("without_vega")

TINY = [*COMMAND, "--no-evaluate"]
GAN = [
    *("train", "gan-sprites", "--schedule.steps", 2, "--schedule.batch-size", 4, "--data.limit", 16),
    *("--model.width", 4, "--model.discriminator-width", 4, "--quiet"),
]


@pytest.fixture
def explored(monkeypatch):
    """The names of runs whose explorer was asked for, in place of an export that takes seconds."""
    found = []

    def write(run, allow_import=None):
        found.append(run.path.name)
        (run.path / "explore.html").write_text("")

    monkeypatch.setattr(module, "add_explorer", write)
    return found


def orthocond(*tokens):
    return main([str(token) for token in tokens])


def test_train_writes_its_report(runs, capsys):
    assert orthocond(*TINY, "--runs", runs) == 0
    (folder,) = runs.iterdir()
    assert capsys.readouterr().out.splitlines()[-1] == f"Report: {folder / 'report.html'}"
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert "Nothing can be told from that: 4 steps are too few." in text
    assert orthocond(*TINY, "--runs", runs, "--seed", 1, "--no-report") == 0
    assert "Report" not in capsys.readouterr().out
    assert not list(runs.glob("*seed1/report.html"))


def test_a_report_that_fails_spoils_no_training(runs, capsys, monkeypatch):
    def fail(*_, **__):
        raise KeyError("a bug of the report")

    monkeypatch.setattr("orthocond.lab.report.write_report", fail)
    assert orthocond(*TINY, "--runs", runs, "--quiet") == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1].startswith("Result after 4 steps")
    (folder,) = runs.iterdir()
    (line,) = captured.err.splitlines()
    assert line.startswith("The report could not be written: KeyError('a bug of the report')")
    assert line.endswith(f"to try again: orthocond report {folder}")
    assert Run.open(folder).status.state == "finished"


def test_a_training_that_diverges_has_a_report_too(runs, capsys):
    assert orthocond(*TINY, "--runs", runs, "--schedule.lr", 1e30, "--quiet") == 3
    (folder,) = runs.iterdir()
    assert f"Report: {folder / 'report.html'}" in capsys.readouterr().out
    assert "This training diverged at step 2" in (folder / "report.html").read_text(encoding="utf-8")


def test_evaluate_writes_the_report_of_its_run(runs, capsys):
    assert orthocond(*TINY, "--runs", runs, "--quiet", "--no-report") == 0
    (folder,) = runs.iterdir()
    assert orthocond("evaluate", folder, "--quiet", "--no-report") == 0
    assert not (folder / "report.html").exists()
    assert orthocond("evaluate", folder, "--quiet") == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"Report: {folder / 'report.html'}"
    values = json.loads((folder / "evaluation.json").read_bytes())
    assert (values["classes"], values["images"]) == (12, 24)
    assert "before and after the training" in (folder / "report.html").read_text(encoding="utf-8")


def test_table_writes_its_report(tmp_path, capsys, monkeypatch):
    def make(name, **_):
        (tmp_path / "table.md").write_text("# T\n\n| a | b |\n|---|---|\n| 1 | 2 |\n")
        (tmp_path / "table.json").write_text('{"title": "T", "table": "time"}')
        return tmp_path

    monkeypatch.setattr("orthocond.lab.catalog.make", make)
    assert orthocond("table", "time", "--no-train") == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"Report: {tmp_path / 'report.html'}"


def test_the_explorer_of_a_gan_is_one_click_away(runs, capsys, explored):
    assert orthocond(*GAN, "--runs", runs, "--no-evaluate") == 0
    (folder,) = runs.iterdir()
    assert explored == [folder.name]
    assert 'href="explore.html">Open the explorer</a>' in (folder / "report.html").read_text(encoding="utf-8")


def test_the_explorer_is_written_once_for_a_checkpoint(tmp_path, capsys, monkeypatch):
    config = tiny_gan()
    run = Run.create(tmp_path, "gan", config)
    asked = []

    def write(path, allow_import):
        asked.append(path.name)
        (path / "explore.html").write_text("page")

    monkeypatch.setattr("orthocond.lab.explorer.write_explorer", write)
    module.add_explorer(run)  # without a checkpoint there is no generator
    assert asked == []
    train(config, run)
    for _ in range(2):
        module.add_explorer(run)
    assert asked == [run.path.name]
    assert capsys.readouterr().out.count(f"orthocond explore {run.path}") == 1
    os.utime(run.path / "explore.html", (0, 0))  # older than the checkpoint
    module.add_explorer(run)
    assert len(asked) == 2
    newer = (run.path / "explore.html").stat().st_mtime + 10
    (run.path / "evaluation.json").write_text("{}")
    os.utime(run.path / "evaluation.json", (newer, newer))  # scores that the page does not know
    module.add_explorer(run)
    assert len(asked) == 3


def test_an_explorer_that_fails_leaves_the_report(tmp_path, capsys, monkeypatch):
    config = tiny_gan()
    run = Run.create(tmp_path, "gan", config)
    train(config, run)

    def fail(*_, **__):
        raise ValueError("gan cannot be exported to ONNX.")

    monkeypatch.setattr("orthocond.lab.explorer.write_explorer", fail)
    module.add_report(run.path)
    captured = capsys.readouterr()
    assert captured.out == f"Report: {run.path / 'report.html'}\n"
    assert captured.err.startswith("The explorer could not be written: gan cannot be exported to ONNX. Nothing else")
    page = Page((run.path / "report.html").read_text(encoding="utf-8"))
    assert f"orthocond explore {run.path}" in page.text


def test_ctrl_c_in_an_evaluation_keeps_the_training(runs, capsys, monkeypatch, explored):
    show = Display.__call__
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background processes without it

    def interrupt(self, index, state):
        show(self, index, state)
        if state.stage:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Display, "__call__", interrupt)
    assert orthocond(*[token for token in GAN if token != "--quiet"], "--runs", runs) == 130
    (folder,) = runs.iterdir()
    text = capsys.readouterr().out
    assert "Ctrl-C leaves it out, and so does --no-evaluate" in text
    assert f"The training is complete. To evaluate it later: orthocond evaluate {folder}" in text
    assert Run.open(folder).status.state == "finished"


# Live


def test_tensorboard_gets_condition_rank_eta_and_occurrence_step_by_step(runs, capsys):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert orthocond(*TINY, "--runs", runs, "--method", "nog+ow+olr", "--tracker", "tensorboard", "--no-report") == 0
    (folder,) = runs.iterdir()
    assert f"Watch it: tensorboard --logdir {folder}" in capsys.readouterr().out
    (events,) = folder.rglob("events.out.tfevents*")
    found = event_accumulator.EventAccumulator(str(events)).Reload()
    lines = [line for line in Run.open(folder).metrics() if "condition" in line]
    assert len(lines) == 4
    for key in ("condition", "condition_on_range", "rank", "eta", "olr_occurrence", "olr_at_floor", "weight_condition"):
        logged = [(event.step, event.value) for event in found.Scalars(key)]
        assert [step for step, _ in logged] == [1, 2, 3, 4]
        assert [value for _, value in logged] == pytest.approx([line[key] for line in lines], rel=1e-5)


def test_events_are_there_while_the_training_runs(tmp_path):
    pytest.importorskip("tensorboard")
    config = tiny()
    run = Run.create(tmp_path, "live", config)
    sizes = []

    def watch(state):
        sizes.append(sum(file.stat().st_size for file in run.path.rglob("events.out.tfevents*")))

    train(config, run, tracker="tensorboard", progress=watch)
    assert len(set(sizes)) > 2
    assert sizes == sorted(sizes)


def test_a_tracker_that_is_not_installed(runs, capsys, monkeypatch):
    monkeypatch.setattr("accelerate.tracking._available_trackers", [])
    with pytest.warns(UserWarning, match="no supported trackers"):
        assert orthocond(*TINY, "--runs", runs, "--tracker", "tensorboard") == 1
    assert re.search(r"'tensorboard' is not installed: pip install .orthocond\[lab\]", capsys.readouterr().err)
    assert not list(runs.iterdir())
