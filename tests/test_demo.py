"""The demo: shortened, but every part of it."""

import base64
import re
import statistics

import pytest

from orthocond.cli import main
from orthocond.lab import demo as module
from orthocond.lab.experiments import preset
from orthocond.lab.runs import Run
from orthocond.lab.runs.finding import find_runs


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The shortened demo, run once."""
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("orthocond.lab.report.write._vega", lambda: "/* Vega */")  # bundling it takes seconds
        return folder, main(["demo", "--short", "--out", str(folder), "--quiet", "--no-open"])


def test_demo_trains_three_methods_and_writes_figure_and_report(made):
    folder, code = made
    assert code == 0
    assert [config.method.name for _, config in find_runs(folder)] == ["svd", "nog", "nog+ow+olr"]
    assert (folder / "conditioning.png").read_bytes().startswith(b"\x89PNG")


def test_report_is_self_contained_and_has_all_numbers(made):
    folder, _ = made
    page = (folder / "report.html").read_text()
    body = page.partition('<script type="module">')[0]  # where Vega is, which names the addresses of its schemas
    sources = re.findall(r'src="([^"]*)"', body)
    assert len(sources) == 1
    assert base64.b64decode(sources[0].partition(",")[2]).startswith(b"\x89PNG")
    assert not re.search(r"https?:|<link", body)
    errors = [f"<td>{run.metrics()[-1]['error']:.2f} %</td>" for run, _ in find_runs(folder)]
    assert "".join(errors) in body
    assert "27 of 64" in body
    assert "What treatments do to an SVD layer" in body


def test_demo_does_not_train_again_and_prints_table_words_and_places(made, capsys, monkeypatch, without_vega):
    folder, _ = made
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(module, "_times", lambda *_, **__: dict.fromkeys(module.METHODS, 12.0))
    before = {run.path: (run.path / "metrics.jsonl").stat().st_mtime_ns for run, _ in find_runs(folder)}
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert main(["demo", "--short", "--out", str(folder)]) == 0
    assert opened == [(folder / "report.html").as_uri()]
    assert before == {run.path: (run.path / "metrics.jsonl").stat().st_mtime_ns for run, _ in find_runs(folder)}
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines() if line.startswith(("svd ", "nog ", "nog+ow+olr "))]
    assert [row[0] for row in rows] == ["svd", "nog", "nog+ow+olr"]
    assert all(row[-2:] == ["12", "ms"] for row in rows)
    assert "singular" in text
    assert str(folder / "report.html") in text
    assert str(folder / "explore.html") in text
    assert "orthocond explore RUN" in text
    stages = re.findall(r"^(\d) of 4: .* …$\n(?:.*\n)*?  took \d+ s$", text, re.M)
    assert stages == ["1", "2", "3", "4"]
    said = " ".join(text.split())
    assert "a generator that was trained before and comes with the package" in said
    assert "A few steps only: the numbers say nothing." in said
    assert "6 steps with each of three methods; all three were trained before and are not repeated …" in said


def test_the_whole_demo_announces_the_time_of_each_stage(tmp_path, capsys, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("far enough")

    monkeypatch.setattr(module, "launch", refuse)
    with pytest.raises(RuntimeError, match="far enough"):
        module.demo(tmp_path, quiet=True)
    said = " ".join(capsys.readouterr().out.split())
    assert "About 2 min on two idle cores" in said
    assert f"448 steps with each of three methods ({module._SECONDS['train']} s) …" in said


def test_the_explorer_lies_beside_the_report_one_click_away(made):
    folder, _ = made
    assert '<a class="open" href="explore.html">' in (folder / "report.html").read_text()
    assert "<title>Sprites — orthocond explorer</title>" in (folder / "explore.html").read_text()


def test_row_is_the_median_of_the_end_of_the_training(tmp_path):
    run = Run.create(tmp_path, "x", {})
    facts = {"condition_on_range": 5.0, "rank": 27, "weight_condition": 2.0}
    for step in range(1, 11):
        run.log(step, condition=float(step), olr_occurrence=step / 100, **facts)
    run.log(10, error=12.5, finished=True)
    (run.path / "evaluation.json").write_text('{"recalibrated_error": 10.0}')
    row = module._row(run, 3.0)
    assert row == module.Result(87.5, 90.0, statistics.median([9, 10]), 5.0, 27, 2.0, 0.1, 3.0)


def test_words_compare_what_was_measured():
    svd = module.Result(90.0, 91.0, 8000.0, 100.0, 27, 5.0, None, 10.0)
    nog = svd._replace(condition=4000.0, condition_on_range=300.0)
    full = svd._replace(condition=1000.0, condition_on_range=102.0, olr_occurrence=0.5)
    words = " ".join(module._words({"svd": svd, "nog": nog, "nog+ow+olr": full}, preset("dbn-sprites-small")))
    assert "8 times smaller with all treatments, 2 times smaller with nog alone" in words
    assert "about the same with all treatments, 3 times larger with nog alone" in words


@pytest.mark.parametrize(
    ("as_trained", "refreshed", "expected"),
    [
        (
            90.5,
            91.5,
            "the accuracy changes by +0.5 points as trained and +0.5 with refreshed statistics: no difference",
        ),
        (80.0, 91.0, "-10.0 points as trained and +0.0 with refreshed statistics: no difference that 1000 images"),
        (80.0, 91.0, "10.0 points of the difference as trained are stale statistics."),
        (95.0, 96.0, ": better by more than 1000 images leave to chance (±2.5), but of one seed."),
        (80.0, 81.0, ": worse by more than 1000 images leave to chance"),
    ],
)
def test_the_verdict_follows_from_the_numbers(as_trained, refreshed, expected):
    """With 91 % of 1000 images right, 95 % of chance differences are within 196 √(2 · 0.91 · 0.09 / 1000) = 2.5."""
    svd = module.Result(90.0, 91.0, 8000.0, 100.0, 27, 5.0, None, 10.0)
    full = svd._replace(accuracy=as_trained, refreshed=refreshed, condition_on_range=25.0)
    text = module._verdict({"svd": svd, "nog": svd, "nog+ow+olr": full}, 1000)
    assert text.startswith("Verdict: with all treatments κ on the range is 4 times smaller")
    assert expected in text


def test_a_training_that_fails_is_told(tmp_path, monkeypatch, capsys):
    from orthocond.lab.launch import Ending

    def launch(configs, root, **_):
        return [Ending(Run.create(root, "x", config), 3, "The loss is nan at step 7.") for config in configs]

    monkeypatch.setattr(module, "launch", launch)
    assert main(["demo", "--short", "--out", str(tmp_path), "--no-open"]) == 1
    assert "The loss is nan at step 7." in capsys.readouterr().err
