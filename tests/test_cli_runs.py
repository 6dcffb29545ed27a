"""Real trainings of a few steps through the command line: run, stop, resume, evaluate, diagnose, bench."""

import json
import os
import signal
import sys
from types import SimpleNamespace

import pytest
import torch
from data_files import write_tree
from lab_helpers import COMMAND as TINY

from orthocond.cli import main
from orthocond.lab import experiments
from orthocond.lab.classification.networks.prepare import load_model
from orthocond.lab.config import change
from orthocond.lab.display import Display
from orthocond.lab.progress import Progress
from orthocond.lab.runs import Run
from orthocond.lab.runs.finding import find_runs

pytestmark = pytest.mark.usefixtures("without_vega")


def orthocond(*tokens):
    return main([str(token) for token in tokens])


def test_train_prints_folder_progress_and_result(runs, capsys):
    assert orthocond(*TINY, "--runs", runs, "--method", "nog+ow+olr", "--seed", 1) == 0
    (folder,) = runs.iterdir()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"Run: {folder}"
    assert folder.name == "00000-dbn-sprites-small-nog+ow+olr-seed1"
    assert any(line.startswith("nog+ow+olr: step 2 of 4") and "steps/s" in line for line in lines)
    last = Run.open(folder).metrics()[-1]
    assert lines[-2].startswith("Result after 4 steps")
    assert f"error {last['error']:.4g}, " in lines[-2]
    assert lines[-1] == f"Report: {folder / 'report.html'}"
    config = experiments.read_config(Run.open(folder).config)
    assert (config.method.name, config.seed, config.data.limit) == ("nog+ow+olr", 1, 32)


def test_quiet_prints_folder_result_and_report_alone(runs, capsys):
    assert orthocond(*TINY, "--runs", runs, "--quiet") == 0
    assert [line.partition(" ")[0] for line in capsys.readouterr().out.splitlines()] == ["Run:", "Result", "Report:"]


def test_ctrl_c_saves_and_resume_ends_as_if_nothing_had_been(runs, capsys, monkeypatch):
    assert orthocond(*TINY, "--runs", runs / "whole", "--quiet") == 0
    show = Display.__call__

    def interrupt(self, index, state):
        show(self, index, state)
        if state.step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Display, "__call__", interrupt)
    assert orthocond(*TINY, "--runs", runs / "parts") == 130
    (folder,) = (runs / "parts").iterdir()
    assert f"orthocond train --resume {folder}" in capsys.readouterr().out
    monkeypatch.undo()
    assert Run.open(folder).load().step == 2
    assert orthocond("train", "--resume", folder, "--quiet") == 0
    (whole,) = (runs / "whole").iterdir()
    assert (folder / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_resume_finds_the_run_of_the_same_settings(runs, capsys):
    for _ in range(2):
        assert orthocond(*TINY, "--runs", runs, "--quiet", "--resume") == 0
    assert len(list(runs.iterdir())) == 1
    assert orthocond(*TINY, "--runs", runs, "--quiet", "--resume", "--seed", 5) == 0
    assert len(list(runs.iterdir())) == 2
    capsys.readouterr()
    assert orthocond("train", "--resume", 1, "--runs", runs) == 0  # finished: nothing is trained
    run, *_, result, _ = capsys.readouterr().out.splitlines()
    assert run.endswith("seed5")
    assert result.startswith("Result")
    assert orthocond("train", "--resume", 1, "--runs", runs, "--schedule.lr", 3) == 2
    assert "schedule.lr: 0.1 → 3.0" in capsys.readouterr().err
    assert orthocond("train", "--resume", "00000-dbn-sprites-small-svd-seed", "--runs", runs) == 2
    assert "'00000-dbn-sprites-small-svd-seed0'" in capsys.readouterr().err


def test_a_run_that_could_not_begin_leaves_no_folder(runs, capsys):
    assert orthocond(*TINY, "--runs", runs, "--data", "cifar1000", "--data.noise", 0, "--data-root", runs) == 1
    captured = capsys.readouterr()
    assert "Did you mean 'cifar100'?" in captured.err
    assert captured.out == ""  # no folder is announced that is then removed
    assert not list(runs.iterdir())


def test_missing_data_names_the_option(runs, capsys):
    assert orthocond("train", "dbn-cifar10-resnet50", "--runs", runs, "--data-root", runs) == 1
    error = capsys.readouterr().err
    assert "`orthocond data get cifar10` gets it" in error
    assert "give --data-root (in Python: root=...)" in error


def test_a_loss_that_is_not_finite_ends_with_code_3_and_a_diagnosis(runs, capsys):
    assert orthocond(*TINY, "--runs", runs, "--schedule.lr", 1e30, "--quiet") == 3
    error = capsys.readouterr().err
    assert "at step 2" in error
    assert "Try a smaller learning rate" in error
    (folder,) = runs.iterdir()
    assert "at step 2" in (folder / "log.txt").read_text()


def test_a_network_of_the_user_in_the_current_directory(runs, tmp_path, monkeypatch, capsys):
    (tmp_path / "my_networks.py").write_text(
        "from torch import nn\n"
        "def small(classes):\n"
        "    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes)]\n"
        "    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), *head)\n"
    )
    monkeypatch.chdir(tmp_path)
    mine = ("--model", "my_networks:small", "--model.meta-layer", "1", "--method", "nog")
    assert orthocond(*TINY, "--runs", runs, *mine, "--quiet", "--no-evaluate") == 0
    (folder,) = runs.iterdir()
    assert Run.open(folder).metrics()[0]["rank"] == 8
    _only_on_request(folder, tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("my_network:small", "there is no module my_network"),
        ("my_networks:big", "my_networks has no big"),
        ("my_networks:plane", "my_networks has no plane. Did you mean 'plain'?"),
        ("my_networks:nothing", "my_networks:nothing has to return a torch.nn.Module; it returned int"),
        ("my_networks:alone", "has to be a function of one argument, the number of classes: too many positional"),
        ("my_networks:plain", "has 0 SVD layers. Name the one to treat"),
        ("my_networks:broken", "my_networks:broken failed for 12, the number of classes: KeyError: 12. --debug shows"),
    ],
)
def test_a_wrong_function_is_bad_usage(runs, tmp_path, monkeypatch, capsys, function, words):
    (tmp_path / "my_networks.py").write_text(
        "from torch import nn\ndef nothing(classes): return 3\ndef alone(): pass\n"
        "def plain(classes): return nn.Linear(3, classes)\ndef broken(classes): return {}[classes]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_networks", raising=False)
    assert orthocond(*TINY, "--runs", runs, "--model", function) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""
    monkeypatch.delitem(sys.modules, "my_networks", raising=False)


def _only_on_request(folder, tmp_path, monkeypatch, capsys):
    """A run folder of somebody else names a function; nothing imports it unless the user names it too."""
    (tmp_path / "my_networks.py").write_text("import pathlib\npathlib.Path('imported').touch()\nsmall = None\n")
    monkeypatch.delitem(sys.modules, "my_networks")
    capsys.readouterr()
    asked = ([], ["--allow-import", "my_networks:other"])
    for command in (["evaluate"], ["diagnose"], ["train", "--resume"]):
        for options in asked:
            assert orthocond(*command, folder, *options) == 2
            error = capsys.readouterr().err
            assert "my_networks:small would be imported and called" in error
            assert "--allow-import my_networks:small" in error
    assert not (tmp_path / "imported").exists()
    assert orthocond("evaluate", folder, "--allow-import", "my_networks:small") == 2
    assert "small of my_networks is not a function" in capsys.readouterr().err
    assert (tmp_path / "imported").exists()


def test_presets_for_images_of_your_own(runs, tmp_path, capsys):
    write_tree(
        tmp_path / "mine", [f"{split}/{c}/{i}.png" for split in ("train", "val") for c in "ab" for i in range(8)]
    )
    small = ("--data.resize", 18, "--data.size", 16, "--schedule.batch-size", 4, "--quiet", "--runs", runs)
    network = ("--model.depths", 1, "--model.width", 4, "--data.in-memory", 18, "--schedule.epochs", 1)
    assert orthocond("train", "dbn-images", "--data", tmp_path / "mine", *small, *network) == 0
    gan = ("--model.channels", 8, 8, 4, "--schedule.steps", 2, "--no-evaluate", "--no-report")
    assert orthocond("train", "gan-images", "--data", tmp_path / "mine", *small, *gan) == 0
    assert [run.status.state for run, _ in find_runs(runs)] == ["finished", "finished"]
    capsys.readouterr()
    for preset, words in (
        ("dbn-images", "dbn-images trains on images of your own: pass --data FOLDER, with a subfolder for each class."),
        ("gan-images", "gan-images trains on images of your own: pass --data FOLDER."),
    ):
        assert orthocond("train", preset, "--data-root", tmp_path, "--runs", runs) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(("preset", "known"), [("dbn-cifar100-resnet50", False), ("gan-celeba", True)])
def test_dry_run_without_the_data(preset, known, tmp_path, capsys):
    small = ("--schedule.batch-size", 2, "--data-root", tmp_path)
    assert orthocond("train", preset, "--dry-run", *small) == 0
    text = capsys.readouterr().out
    assert "The data is missing, and steps are timed with sprites" in text
    assert ("parameters unknown without the data" in text) != known
    assert ("parameters in the generator" in text) == known
    assert "of 12 classes" not in text
    assert ("Steps: 1500" in text) == known
    assert ("Time: about" in text) == known
    assert "ms a step" in text
    assert not list(tmp_path.iterdir())


def test_dry_run_tells_settings_size_steps_and_time_and_leaves_nothing(runs, capsys):
    assert orthocond(*TINY, "--runs", runs, "--dry-run", "--schedule.lr", 0.05) == 0
    text = capsys.readouterr().out
    assert "schedule.lr = 0.05   (preset: 0.1)" in text
    assert "32 training and 24 held-out images of 12 classes" in text
    assert "Steps: 4, 4 an epoch" in text
    assert "Time: about" in text
    assert not runs.exists()
    config = change(experiments.preset("dbn-sprites-small"), {"data.size": 16})
    from orthocond.lab.classification.data import load_data
    from orthocond.lab.classification.networks.prepare import prepare

    count = sum(p.numel() for p in prepare(config, load_data(config.data)).module.parameters())
    assert f"{count:,} parameters; SVD layer bn1, layer before it conv1" in text


def test_dry_run_refuses_a_tracker_that_the_training_would_refuse(runs, capsys, monkeypatch):
    monkeypatch.setattr("accelerate.accelerator.filter_trackers", lambda *_, **__: [])  # as if none were installed
    monkeypatch.setattr("warnings.warn", lambda *_, **__: None)
    assert orthocond(*TINY, "--runs", runs, "--dry-run", "--tracker", "tensorboard") == 1
    captured = capsys.readouterr()
    assert "The tracker 'tensorboard' is not installed: pip install" in captured.err
    assert captured.out == ""


def test_dry_run_of_a_gan(runs, capsys):
    from orthocond.lab.generation.networks import prepare

    assert orthocond("train", "gan-sprites", "--dry-run", "--schedule.batch-size", 4, "--data.limit", 16) == 0
    generator, discriminator = prepare(experiments.preset("gan-sprites"))[:2]
    sizes = [f"{sum(p.numel() for p in module.parameters()):,}" for module in (generator, discriminator)]
    text = capsys.readouterr().out
    assert "Data: 16 images" in text
    assert f"{sizes[0]} parameters in the generator, {sizes[1]} in the discriminator" in text


def test_estimate_of_a_large_batch_is_on_the_line_through_two_small_ones(monkeypatch):
    from orthocond.cli import plan

    monkeypatch.setattr(plan, "step_seconds", lambda config: 0.5 + 0.01 * config.schedule.batch_size)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    config = experiments.preset("dbn-cifar100-resnet50", "paper")
    assert plan.estimate(config) == pytest.approx(0.5 + 0.01 * 128)
    assert plan.estimate(change(config, {"schedule.batch_size": 20})) == pytest.approx(0.7)


def test_estimate_of_a_large_batch_that_is_quick_is_measured(monkeypatch):
    from orthocond.cli import plan

    timed = {8: 0.01, 16: 0.02, 128: 0.04}  # the line through the small batches says 0.16
    monkeypatch.setattr(plan, "step_seconds", lambda config: timed[config.schedule.batch_size])
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert plan.estimate(experiments.preset("dbn-cifar100-resnet50", "paper")) == 0.04


@pytest.mark.parametrize("period", [1, 4])
def test_time_of_a_step_is_a_median_without_the_first_steps(period, monkeypatch):
    from orthocond.cli import plan

    class Stepper:
        """Three slow steps, then quick ones, of which every fifth measurement is disturbed."""

        def __init__(self, *_):
            self.task = SimpleNamespace(period=period)
            self.steps = self.calls = 0

        def time(self, steps=1):
            cost = sum(1.0 if self.steps + i < 3 else 0.01 for i in range(steps)) / steps
            self.steps, self.calls = self.steps + steps, self.calls + 1
            return {"forward": cost + (self.calls % 5 == 0), "step": 0.01}

    monkeypatch.setattr(plan, "Stepper", Stepper)
    assert plan.step_seconds(experiments.preset("gan-sprites")) == pytest.approx(0.02)


def test_train_evaluates_what_it_has_reached(runs, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert orthocond(*TINY, "--runs", runs) == 0
    (folder,) = runs.iterdir()
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("svd: errors on held-out images") for line in lines)
    before = (folder / "evaluation.json").read_bytes()
    assert json.loads(before)["step"] == 4
    assert any("κ on the range" in line and "how unequal the directions are" in line for line in lines)
    assert orthocond("train", "--resume", folder, "--quiet") == 0
    assert (folder / "evaluation.json").read_bytes() == before
    (folder / "evaluation.json").write_text(before.decode().replace('"step": 4', '"step": 2'))  # of an earlier step
    assert orthocond("train", "--resume", folder, "--quiet") == 0
    assert (folder / "evaluation.json").read_bytes() == before


def test_evaluate_and_diagnose_the_trained_model(runs, capsys):
    assert orthocond(*TINY, "--runs", runs, "--quiet", "--no-evaluate") == 0
    (folder,) = runs.iterdir()
    run = Run.open(folder)
    assert not (folder / "evaluation.json").exists()
    capsys.readouterr()
    assert orthocond("evaluate", folder) == 0
    values = json.loads((folder / "evaluation.json").read_text())
    last = run.metrics()[-1]
    assert values["step"] == 4
    assert values["error"] == pytest.approx(last["error"])
    assert values["loss"] == pytest.approx(last["val_loss"], rel=1e-4)
    assert (values["rank"], values["size"], values["eps"]) == (27, 64, 0.01)
    text = capsys.readouterr().out
    assert f"{last['error']:.2f} %" in text
    assert "27 of 64" in text
    assert orthocond("diagnose", 0, "--runs", runs) == 0
    assert "Rank 27 of 64 by construction" in capsys.readouterr().out


def test_an_older_checkpoint_does_not_replace_the_final_evaluation(runs, capsys):
    assert orthocond(*TINY, "--runs", runs, "--quiet", "--save-every", 2) == 0
    (folder,) = runs.iterdir()
    file = folder / "evaluation.json"
    before = file.read_bytes()
    (folder / "checkpoints" / "0000000004.json").write_text("{")
    capsys.readouterr()
    with pytest.warns(RuntimeWarning, match="Checkpoint 4 is damaged"):
        assert orthocond("evaluate", folder) == 1
    assert "The checkpoint of the last step, 4, is damaged" in capsys.readouterr().err
    assert file.read_bytes() == before
    file.unlink()
    with pytest.warns(RuntimeWarning, match="Checkpoint 4 is damaged"):
        assert orthocond("evaluate", folder) == 0
    assert "its last step is 4, and the newest checkpoint that is good is of step 2" in capsys.readouterr().err
    assert json.loads(file.read_text())["step"] == 2


def test_a_finished_run_with_an_edited_configuration_is_refused(runs, capsys):
    assert orthocond(*TINY, "--runs", runs, "--quiet", "--no-evaluate") == 0
    (folder,) = runs.iterdir()
    file = folder / "config.json"
    file.write_text(file.read_text().replace('"name": "svd"', '"name": "nog"'))
    for command in (["train", "--resume", folder], ["report", folder], ["evaluate", folder]):
        capsys.readouterr()
        assert orthocond(*command) in (1, 2)
        assert "config.json was edited after the run had ended" in capsys.readouterr().err


def test_load_model_has_the_weights_of_the_checkpoint(runs, tmp_path):
    assert orthocond(*TINY, "--runs", runs, "--quiet", "--method", "ow") == 0
    (folder,) = runs.iterdir()
    run = Run.open(folder)
    restored = load_model(run)
    assert restored.step == 4
    saved = run.load().state["model"]
    state = restored.model.state_dict()
    assert state.keys() == saved.keys()
    assert all(torch.equal(state[name], saved[name]) for name in saved)
    empty = Run.create(tmp_path, "empty", restored.config)
    with pytest.raises(RuntimeError, match="no checkpoint yet"):
        load_model(empty)
    with pytest.raises(ValueError, match="a classifier is needed"):
        load_model(Run.create(tmp_path, "gan", experiments.preset("gan-sprites")))


def test_bench_prints_ratios_and_saves_times(tmp_path, capsys):
    out = tmp_path / "new" / "bench.json"
    options = ("--preset", "dbn-sprites-small", "--repeats", 2, "--batch-size", 8, "--out", out, "--quiet")
    assert orthocond("bench", "--methods", "nog", "ol", *options) == 0
    saved = json.loads(out.read_text())
    assert (saved["preset"], saved["batch_size"], saved["repeats"]) == ("dbn-sprites-small", 8, 2)
    times = saved["milliseconds"]
    assert list(times) == ["nog", "ol", "svd", "bn"]
    printed = capsys.readouterr().out
    assert "all ratios" in printed  # two of them have no interval of 95 %
    for line in printed.splitlines():
        if line[:3] in ("nog", "ol "):
            name, *cells = line.split()
            cost = times[name]
            assert cost["total"] == pytest.approx(sum(cost["parts"].values()))
            assert [float(cell) for cell in cells[:4]] == pytest.approx(
                [*cost["parts"].values(), cost["total"]], abs=0.01
            )
            assert float(cells[4]) == pytest.approx(cost["relative"]["median"], abs=0.01)
            assert float(cells[7]) == pytest.approx(cost["total"] / times["bn"]["total"], abs=0.01)


def test_table_lists_what_there_is(capsys):
    from orthocond.lab import catalog as tables

    assert orthocond("table") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(tables.names())
    assert all(len(line.split()) > 3 for line in lines)
    assert any(line.startswith("optimal-lr ") and " Table 3 " in line for line in lines)


@pytest.mark.parametrize("options", [("--status",), ("--cancel",), ("--only", "SVD"), ("--no-train",)])
def test_table_needs_a_name_for_what_is_of_one_table(options, capsys):
    assert orthocond("table", *options) == 2
    assert f"{options[0]} needs the name of a table" in capsys.readouterr().err


def test_table_does_not_look_and_cancel_at_once(capsys):
    assert orthocond("table", "gcp", "--status", "--cancel") == 2
    assert "give one of them" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "name"), [("3", "optimal-lr"), ("Table 10", "gan-condition"), ("figure-7", "convergence")]
)
def test_table_takes_the_numbers_of_the_paper(asked, name, tmp_path, capsys, monkeypatch):
    from orthocond.lab import catalog as tables

    made = []

    def make(name, **_):
        made.append(name)
        (tmp_path / "table.md").write_text("# The table")
        return tmp_path

    monkeypatch.setattr(tables, "make", make)
    assert orthocond("table", asked, "--no-train", "--no-report") == 0
    assert made == [name]


def test_table_says_which_numbers_of_the_paper_it_has(capsys):
    assert orthocond("table", "figure 5") == 2  # a drawing
    assert "Figure 5 of the paper cannot be made here. There are: Figure 1, Table 1," in capsys.readouterr().err


@pytest.mark.parametrize(("option", "train"), [("--train", True), ("--no-train", False)])
def test_table_passes_everything_on_and_prints_the_table(option, train, tmp_path, capsys, monkeypatch):
    from orthocond.lab import catalog as tables

    asked = {}

    def make(name, **options):
        asked.update(options, name=name)
        asked["progress"](0, Progress(5, 5, {}))
        (tmp_path / "table.md").write_text("# The table")
        return tmp_path

    config = experiments.preset("gcp-imagenet-resnet18")
    monkeypatch.setattr(tables, "make", make)
    monkeypatch.setattr(tables, "plan", lambda *_, **__: [config])
    options = ("--scale", "paper", "--seeds", 3, "--jobs", 2, "--runs", tmp_path, "--out", tmp_path / "o")
    options += ("--only", "NOG OW", "--only", "OLR")
    assert orthocond("table", "gcp", *options, option, "--no-report") == 0
    del asked["progress"]
    names = {"name": "gcp", "scale": "paper", "seeds": 3, "jobs": 2, "train": train, "only": ("NOG OW", "OLR")}
    del asked["say"]
    assert asked == names | {"runs": tmp_path, "out": tmp_path / "o", "data_root": None, "executor": None}
    who = "gcp-imagenet-resnet18-svd-seed0" if train else "training 1"
    assert capsys.readouterr().out == f"{who}: step 5 of 5\n# The table\nWritten to {tmp_path}\n"
