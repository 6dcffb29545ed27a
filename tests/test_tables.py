"""Tables and figures from runs: numbers, what is missing or stopped, kept copies, training, errors."""

import csv
import gzip
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from scipy import stats

from orthocond.lab import catalog as tables
from orthocond.lab.bench import Cost, Ratio
from orthocond.lab.classification import paper, timing
from orthocond.lab.classification.config import GRAMMAR, Method
from orthocond.lab.classification.tables import TABLES
from orthocond.lab.classification.task import ClassificationTask
from orthocond.lab.experiments import preset
from orthocond.lab.launch import Ending
from orthocond.lab.progress import Progress
from orthocond.lab.runs import Run
from orthocond.lab.runs.finding import find_runs
from orthocond.lab.tables import records
from orthocond.lab.tables.comparison import Comparison, Experiment, Fact, Measure, label

_SEEDS = 3
_ERRORS = {"svd": [80.0, 81.0, 82.5], "sn": [79.1, 80.3, 81.4], "ol": [80.5, 80.5, 83.0], "ow": [81.0, 82.1, 83.4]}
_ERRORS["ns"] = [80.0, 81.0, 82.5]


def _config(name, seed, preset_name="dbn-cifar100-resnet50", **method):
    return replace(preset(preset_name), method=Method(name, **method), seed=seed)


def _train(root, config, error=80.0, condition=1e3, *, end="finished"):
    """A run folder as a training of four logged steps and two epochs leaves it."""
    run = Run.create(root, "run", config)
    run.note("Started from the beginning.")
    for step in range(4):
        facts = {"condition": condition * (step + 1), "condition_on_range": 10.0 * condition, "rank": 27}
        if "olr" in config.method.name:
            facts |= {"eta": 0.05 if step else 0.1, "olr_occurrence": step / (2 * step + 1)}
        timing = {"step_seconds": 9.0 if step == 0 else 0.2}
        run.log(2 * step + 1, step // 2, loss=4.0, lr=0.1, **facts, solver_failures=step, timing=timing)
        if step == 2 and end == "stopped":
            run.set_status("diverged", 6, "The loss is nan at step 6")
            return run
        if step % 2:
            scores = {"error": error + (step == 1), "top5_error": error / 2, "best_error": error + (step == 1)}
            last = {"finished": True} if step == 3 and end == "finished" else {}
            run.log(2 * step + 2, step // 2 + 1, **scores, solver_failures=step, **last)
    (run.path / "evaluation.json").write_text(json.dumps({"recalibrated_error": error - 5}))
    return run


@pytest.fixture(autouse=True)
def _without_figures(request, monkeypatch):
    """Figures take most of the time; a test that wants them says so."""
    if "figures" not in request.fixturenames:
        for table in TABLES:
            monkeypatch.setitem(tables.TABLES, table.name, replace(table, figures=()))


@pytest.fixture
def figures():
    """Asks for tables with figures."""


@pytest.fixture
def trained(tmp_path):
    """Run folders of all rows of weight-treatments."""
    for name, errors in _ERRORS.items():
        for seed, error in enumerate(errors):
            _train(tmp_path / "runs", _config(name, seed), error, 100.0 * (seed + 1) * (1 + len(name)))
    return tmp_path


def _make(folder, name="weight-treatments", **settings):
    settings = {"seeds": _SEEDS, "runs": folder / "runs", "out": folder / "out", "train": False} | settings
    return tables.make(name, **settings)


def _rows(folder, experiment=0):
    content = json.loads((folder / "table.json").read_text())
    return {row["label"]: row for row in content["experiments"][experiment]["rows"]}


# Values


def test_errors_and_differences(trained):
    row = _rows(_make(trained))["SVD + SN"]
    cell = row["measures"]["error"]
    assert cell["values"] == _ERRORS["sn"]
    assert cell["mean"] == pytest.approx(80.266666667)
    assert cell["std"] == pytest.approx(stats.tstd(_ERRORS["sn"]))
    assert cell["best"] == 79.1
    assert cell["paper"] == {"mean": 19.94, "std": 0.33, "best": 19.60}
    expected = stats.ttest_rel(_ERRORS["sn"], _ERRORS["svd"])
    found = cell["difference"]
    assert (found["low"], found["high"]) == pytest.approx(tuple(expected.confidence_interval()))
    assert found["p"] == pytest.approx(expected.pvalue)
    assert found["p_exact"] == 0.25
    assert cell["paper_difference"]["mean"] == pytest.approx(-0.05)


def test_p_values_are_corrected_for_all_rows_but_the_baseline(trained):
    rows = _rows(_make(trained))
    base = rows.pop("SVD")["measures"]["error"]
    assert "difference" not in base
    found = {name: row["measures"]["error"]["difference"] for name, row in rows.items()}
    p = {
        name: stats.ttest_rel(_ERRORS[n], _ERRORS["svd"]).pvalue for name, n in (("SVD + SN", "sn"), ("SVD + OW", "ow"))
    }
    assert min(p, key=p.get) == "SVD + OW"
    assert found["SVD + OW"]["p_holm"] == pytest.approx(4 * p["SVD + OW"])
    assert found["SVD + SN"]["p_holm"] == pytest.approx(3 * p["SVD + SN"])
    assert found["SVD + OW"]["verdict"] == "worse"
    assert found["SVD + SN"]["verdict"] == "better"
    assert found["SVD + OL"]["verdict"] == "not significant"
    assert found["NS iteration"]["mean"] == 0
    assert found["NS iteration"]["p_holm"] == 1


def test_facts_are_of_the_end_of_training_and_ratios_paired(trained):
    rows = _rows(_make(trained))
    facts = rows["SVD + SN"]["facts"]
    assert facts["condition"]["values"] == [4 * 300.0, 4 * 600.0, 4 * 900.0]  # the last of four logged steps
    assert facts["condition"]["mean"] == pytest.approx(1200 * 6 ** (1 / 3))
    assert facts["condition"]["paper"] == "1e5"
    assert facts["condition"]["ratio"] == pytest.approx({"mean": 3 / 4, "low": 3 / 4, "high": 3 / 4})
    assert facts["rank"]["mean"] == 27
    assert facts["solver_failures"]["values"] == [3, 3, 3]
    assert facts["step_seconds"]["values"] == [0.2, 0.2, 0.2]  # without the first step
    assert facts["olr_occurrence"]["mean"] is None


def test_accuracies_of_pooling_are_better_when_higher(tmp_path):
    for seed in range(_SEEDS):
        _train(tmp_path / "runs", _config("svd", seed, "gcp-imagenet-resnet18"), 60.0 + seed)
        _train(tmp_path / "runs", _config("nog", seed, "gcp-imagenet-resnet18"), 58.0 + seed * 1.01)
    rows = _rows(_make(tmp_path, "gcp"))
    top1, top5 = (rows["SVD + NOG"]["measures"][name] for name in ("top1", "top5"))
    assert top1["values"] == [42.0, 40.99, 39.98]
    assert top1["best"] == 42.0
    assert top1["difference"]["verdict"] == "better"
    assert top1["paper_difference"]["mean"] == pytest.approx(0.38)
    assert top1["paper_difference"]["low"] is None
    assert top5["values"] == [71.0, 70.495, 69.99]
    assert rows["SVD"]["facts"]["solver_failures"]["paper"] == 5


def test_markdown_shows_ours_beside_the_papers(trained, figures):
    text = (_make(trained) / "table.md").read_text()
    line = next(line for line in text.splitlines() if line.startswith("| SVD + OW"))
    assert line.split(" | ")[1:6] == ["20.06 ± 0.17", "19.94", "82.17 ± 1.20", "81.00", "3"]
    assert "+0.07 [−0.09, +0.23]" in line
    assert "worse" in line
    assert "rank is at most 27" in text
    assert "our absolute numbers cannot be compared with the paper's" in text
    assert "Missing" not in text
    for name in ("differences", "conditioning"):
        assert f"![{name}]({name}.png)" in text


def test_csv_has_the_same_numbers(trained):
    with (_make(trained) / "table.csv").open() as file:
        lines = {line["method"]: line for line in csv.DictReader(file)}
    assert list(lines) == list(_ERRORS)
    assert float(lines["ow"]["error_mean"]) == pytest.approx(82.1666667)
    assert float(lines["ow"]["error_paper_mean"]) == 20.06
    assert lines["ow"]["error_difference_verdict"] == "worse"


def test_labels_tell_the_forms_of_olr_apart():
    assert label(Method("nog+olr", olr="paper")) == "SVD + NOG + OLR (paper's η)"
    assert label(Method("nog+olr")) == "SVD + NOG + OLR (exact η)"
    assert label(Method("svd", olr="paper")) == "SVD"
    for table in TABLES:
        names = [label(row) for row in table.rows]
        assert len(set(names)) == len(names)


def test_cifar100_all_is_every_method_and_both_forms_of_olr():
    configs = tables.TABLES["cifar100-all"].configs("laptop", 5)
    methods = [Method(name) for name in GRAMMAR.names]
    methods += [Method(name, olr="paper") for name in ("olr", "nog+ow+olr")]
    base = preset("dbn-cifar100-resnet50", "laptop")
    assert len(configs) == 5 * len(methods)
    assert set(configs) == {replace(base, method=m, seed=s) for m in methods for s in range(5)}
    assert {c.seed for c in configs[: len(methods)]} == {0}


def test_every_row_with_a_number_of_the_paper_has_it():
    for table in TABLES:
        for experiment in table.experiments:
            shown = {row.name for row in table.rows}
            for numbers in experiment.numbers.values():
                assert set(numbers) <= shown or len(shown) < len(numbers), table.name
    tables_rows = {t.name: {row.name for row in t.rows} for t in TABLES}
    assert tables_rows["cifar-resnet50"] == set(paper.RESNET50_CIFAR10)
    assert tables_rows["gcp"] == set(paper.GCP_TOP1) == set(paper.GCP_FAILURES)


# Missing and stopped trainings


def test_what_is_missing_is_said(tmp_path, figures):
    _train(tmp_path / "runs", _config("svd", 0), 80.0)
    _train(tmp_path / "runs", _config("sn", 0), 79.0, end="unfinished")
    folder = _make(tmp_path)
    rows = _rows(folder)
    assert rows["SVD"]["missing"] == [1, 2]
    assert rows["SVD + SN"]["missing"] == [0, 1, 2]
    assert rows["SVD + SN"]["measures"]["error"]["mean"] is None
    text = (folder / "table.md").read_text()
    assert "Missing: 14 of 15 trainings: dbn-cifar100-resnet50-sn-seed0" in text
    assert "and 8 more." in text
    assert "| 1 of 3 |" in text


def test_differences_are_of_common_seeds(tmp_path):
    for seed, error in ((0, 70.0), (1, 81.0), (3, 82.0)):
        _train(tmp_path / "runs", _config("svd", seed), error)
    for seed, error in ((1, 80.5), (2, 60.0), (3, 81.0)):
        _train(tmp_path / "runs", _config("ow", seed), error)
    found = _rows(_make(tmp_path, seeds=4))["SVD + OW"]["measures"]["error"]["difference"]
    assert found["mean"] == pytest.approx(-0.75)
    assert found["count"] == 2


def test_a_loss_that_is_not_finite_is_counted_and_shown(trained):
    _train(trained / "runs", _config("ow", 1), end="stopped")  # a newer run of the same configuration
    folder = _make(trained)
    row = _rows(folder)["SVD + OW"]
    assert row["stopped"] == [{"seed": 1, "why": "The loss is nan at step 6"}]
    assert row["seeds"] == [0, 2]
    assert row["missing"] == []
    text = (folder / "table.md").read_text()
    assert "| 2 of 3, 1 stopped |" in text
    assert "SVD + OW, seed 1 is not in the means: The loss is nan at step 6." in text


def test_a_run_that_went_on_after_a_bad_loss_is_not_stopped(tmp_path):
    run = _train(tmp_path / "runs", _config("ow", 0), end="stopped")
    assert records.read_run(run, _config("ow", 0)).stopped == "The loss is nan at step 6"
    run.set_status("running")
    assert records.read_run(run, _config("ow", 0)).stopped is None


def test_a_folder_without_a_status_that_has_diverged(tmp_path):
    run = _train(tmp_path / "runs", _config("ow", 0), end="stopped")
    (run.path / "status.json").unlink()
    run.note("The loss is inf at step 6.\n  Parameters that are not finite: none.")
    assert records.read_run(run, _config("ow", 0)).stopped == "The loss is inf at step 6"
    run.note("Resumed after step 4.")
    assert records.read_run(run, _config("ow", 0)).stopped is None


# Kept copies


def test_headings_name_the_network_and_the_images_that_were_used(trained):
    """The names of the paper's networks stand at the paper's scale alone."""
    text = (_make(trained) / "table.md").read_text()
    assert "## small ResNet, CIFAR-100, 16x16" in text
    assert "ResNet-50" not in text
    for table in TABLES:
        for experiment in table.experiments:
            for scale in ("laptop", "workstation"):
                heading = experiment.at(scale).label
                assert not any(name in heading for name in ("-50", "-18", "-121", "-v2")), heading
    assert tables.TABLES["cifar-resnet50"].experiments[0].at("workstation").label == "plain ConvNet, CIFAR-10, 32x32"
    assert tables.TABLES["gcp"].experiments[0].at("paper").label == "ResNet-18, covariance pooling, ImageNet, 224x224"


def test_pooling_tells_how_many_failures_were_to_be_expected(tmp_path):
    for seed, name in ((0, "svd"), (0, "nog"), (1, "svd"), (0, "ns")):
        _train(tmp_path / "runs", _config(name, seed, "gcp-imagenet-resnet18"))
    text = (_make(tmp_path, "gcp", seeds=2) / "table.md").read_text()
    # Three trainings of 8 steps with 50 images; Newton-Schulz decomposes nothing. Each run says that 3 failed.
    assert "1,200 decompositions in training, one for each image of each step, and 9 failures" in text
    assert f"{1200 * 5 / 77e6:.2g} were to be expected" in text


def test_tables_are_made_again_from_kept_copies_byte_for_byte(trained, figures):
    folder = _make(trained)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    kept = trained / "out" / "runs" / "dbn-cifar100-resnet50-laptop.jsonl.gz"
    copy = kept.read_bytes()
    (trained / "runs").rename(trained / "elsewhere")
    for path in folder.iterdir():
        path.unlink()
    assert _make(trained) == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert kept.read_bytes() == copy
    assert tables.plan("weight-treatments", seeds=3, runs=trained / "runs", out=trained / "out") == []


def test_copies_of_other_seeds_and_tables_stay(trained):
    _make(trained)
    _make(trained, seeds=1)
    (trained / "runs").rename(trained / "elsewhere")
    _make(trained, "conditioning-solvers", seeds=1)  # needs svd and ns, which another table kept
    assert len(list(records.read_kept(trained / "out"))) == 15


def test_a_run_comes_before_its_copy(trained):
    _make(trained)
    _train(trained / "runs", _config("sn", 0), 70.0)
    assert _rows(_make(trained))["SVD + SN"]["measures"]["error"]["best"] == 70.0


def test_copies_are_small_and_keep_infinity(tmp_path):
    config = _config("svd", 0)
    lines = [{"step": i, "loss": math.pi * i, "condition": math.inf, "finished": True} for i in range(100)]
    records.keep([records.Record("00000-a", config, lines)], tmp_path)
    (again,) = records.read_kept(tmp_path)
    assert again.config == config
    assert again.metrics == lines
    assert sum(path.stat().st_size for path in (tmp_path / "runs").iterdir()) < 3000


def test_numbers_have_six_digits_from_runs_too(tmp_path):
    record = records.read_run(_train(tmp_path, _config("svd", 0), 81.23456789), _config("svd", 0))
    assert record.metrics[-1]["error"] == 81.2346


def test_a_damaged_copy_is_an_error(trained):
    _make(trained)
    path = trained / "out" / "runs" / "dbn-cifar100-resnet50-laptop.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"resnet50-laptop.jsonl.gz is damaged .*; restore it, or delete it"):
        _make(trained)


def test_copies_of_configurations_that_no_longer_exist_stay_and_are_passed_over(trained):
    _make(trained)
    path = trained / "out" / "runs" / "dbn-cifar100-resnet50-laptop.jsonl.gz"
    text = gzip.decompress(path.read_bytes()).decode()
    path.write_bytes(gzip.compress(text.replace('"momentum"', '"momentun"', 1).encode()))
    (trained / "runs").rename(trained / "elsewhere")
    assert sum(len(row["missing"]) for row in _rows(_make(trained)).values()) == 1
    assert '"momentun"' in gzip.decompress(path.read_bytes()).decode()


# Training


def _tiny():
    config = preset("dbn-sprites-small")
    return replace(
        config,
        data=replace(config.data, limit=32),
        schedule=replace(config.schedule, epochs=1, batch_size=16, steps=2),
        log_every=1,
    )


def test_what_is_missing_is_trained(tmp_path, monkeypatch):
    experiment = Experiment("sprites", "dbn-sprites-small", {"dbn-sprites-small": {"laptop": _tiny()}})
    measure, fact = Measure("error", "Error (%)", "error"), Fact("rank", "rank")
    table = Comparison("tiny", "Tiny", "A test.", (experiment,), (Method("svd"),), (measure,), (fact,))
    monkeypatch.setitem(tables.TABLES, "tiny", table)
    seen = set()
    watch = lambda i, state: seen.add((i, state.stage or state.steps))  # noqa: E731
    folder = _make(tmp_path, "tiny", seeds=1, train=True, progress=watch)
    (row,) = _rows(folder).values()
    assert row["seeds"] == [0]
    assert 0 <= row["measures"]["error"]["mean"] <= 100
    assert row["facts"]["rank"]["mean"] > 0
    assert {(0, 2), (0, "errors on held-out images"), (0, "condition of the SVD layer")} <= seen
    assert "Missing" not in (folder / "table.md").read_text()


def test_only_what_is_missing_is_trained(trained, monkeypatch):
    asked = []

    def launch(configs, root, **settings):
        asked.extend(configs)
        return [Ending(_train(root, config, 77.0), 0) for config in configs]

    monkeypatch.setattr(tables, "launch", launch)
    monkeypatch.setattr(ClassificationTask, "load_data", lambda config, root: None)
    planned = tables.plan("weight-treatments", seeds=4, runs=trained / "runs", out=trained / "out")
    rows = _rows(_make(trained, seeds=4, train=True))
    assert asked == planned == [_config(name, 3) for name in ("svd", "sn", "ol", "ow", "ns")]
    assert rows["SVD"]["measures"]["error"]["values"] == [*_ERRORS["svd"], 77.0]


def test_what_was_not_evaluated_is_launched_for_it(trained, monkeypatch):
    (run,) = (run for run, config in find_runs(trained / "runs") if config == _config("ow", 1))
    (run.path / "evaluation.json").unlink()
    assert tables.plan("weight-treatments", seeds=3, runs=trained / "runs", out=trained / "out") == [_config("ow", 1)]
    folder = _make(trained)
    measures = _rows(folder)["SVD + OW"]["measures"]
    assert f"Not evaluated: {run.path.name}." in (folder / "table.md").read_text()
    assert _config("ow", 1) not in {record.config for record in records.read_kept(trained / "out")}
    assert measures["error"]["values"] == _ERRORS["ow"]
    assert measures["recalibrated"]["values"] == [76.0, None, 78.4]
    assert measures["recalibrated"]["mean"] == pytest.approx(77.2)
    assert measures["recalibrated"]["difference"]["mean"] == pytest.approx(0.95)
    (run.path / "evaluation.json").write_text('{"recalibrated_error": 70.0}')
    _make(trained)
    kept = _rows(_make(trained, runs=trained / "none"))["SVD + OW"]["measures"]["recalibrated"]["values"]
    assert kept == [76.0, 70.0, 78.4]


def test_a_bad_loss_is_not_trained_again(trained, monkeypatch):
    _train(trained / "runs", _config("ow", 1), end="stopped")
    monkeypatch.setattr(tables, "launch", lambda *_, **__: pytest.fail("nothing is missing"))
    _make(trained, train=True)


def test_failures_are_named(trained, monkeypatch):
    def launch(configs, root, **_):
        runs = [_train(root, c, end="unfinished") for c in configs]
        return [Ending(run, 1, "Traceback\nOSError: disk full", Path("runs/job.log")) for run in runs]

    monkeypatch.setattr(tables, "launch", launch)
    monkeypatch.setattr(ClassificationTask, "load_data", lambda config, root: None)
    text = (_make(trained, seeds=4, train=True) / "table.md").read_text()
    assert "Failed: 00015-run (OSError: disk full; log: runs/job.log)" in text


# Errors


def test_names_are_checked():
    with pytest.raises(ValueError, match=r"no table 'wieght-treatments'. Did you mean 'weight-treatments'"):
        tables.make("wieght-treatments")
    with pytest.raises(ValueError, match="at least one seed; got 0"):
        tables.make("gcp", seeds=0)
    with pytest.raises(ValueError, match=r"has the scales .*; got 'desk'"):
        tables.make("gcp", scale="desk")


def test_nothing_to_show_is_an_error_and_leaves_nothing(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"no trainings for gcp at scale laptop, neither in .* nor kept in"
    ) as found:
        _make(tmp_path, "gcp")
    assert "run the command in its folder" in str(found.value)
    assert not (tmp_path / "out").exists()


def test_missing_data_is_said_before_anything_is_started(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "launch", lambda *_, **__: pytest.fail("started"))
    with pytest.raises(FileNotFoundError, match="cifar100"):
        _make(tmp_path, train=True, data_root=str(tmp_path / "nothing"))
    assert not (tmp_path / "runs").exists()


def test_if_all_fail_the_first_one_speaks(tmp_path, monkeypatch):
    def launch(configs, root, **_):
        return [Ending(_train(root, c, end="unfinished"), 1, "OSError: disk full", Path("job.log")) for c in configs]

    monkeypatch.setattr(tables, "launch", launch)
    monkeypatch.setattr(ClassificationTask, "load_data", lambda config, root: None)
    with pytest.raises(
        RuntimeError, match=r"All trainings of gcp failed. The first one said:\nOSError: disk full\nIts log is job"
    ):
        _make(tmp_path, "gcp", seeds=1, train=True)


# Times


def test_times(tmp_path, monkeypatch):
    def bench(task, config, methods, *, repeats, progress):
        progress(1, 2)
        steps = {name: 5.0 if "nog" in name else 2.0 for name in methods}
        parts = {name: {"forward": 10.0, "backward": 20.0, "step": step} for name, step in steps.items()}
        return {name: Cost(part, sum(part.values()), Ratio(1, 1, 1), None) for name, part in parts.items()}

    monkeypatch.setattr(timing, "bench", bench)
    seen = []
    folder = _make(tmp_path, "time", train=True, progress=lambda *state: seen.append(state))
    assert seen == [(0, Progress(1, 2, {}))]
    lines = (folder / "table.md").read_text().splitlines()
    assert lines[2].endswith("ours small ResNet, sprites, 16x16; the paper's ResNet-50, CIFAR-100, 32x32.")
    assert "| SVD + NOG | 44 | 97 | 1.01 | 10.0 | 20.0 | 5.0 | 35.0 | 1.09 |" in lines
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(before) == {"table.md", "table.json", "table.csv", "time.png", "time.svg"}
    monkeypatch.setattr(timing, "bench", lambda *_, **__: pytest.fail("measured"))
    _make(tmp_path, "time")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_times_that_were_not_measured_are_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="run without --no-train to measure it"):
        _make(tmp_path, "time")
