"""The demo: shortened, but every part of it."""

import base64
import json
import re
import statistics
from pathlib import Path

import pytest

from orthocond.cli import main
from orthocond.lab import demo as module
from orthocond.lab.experiments import preset
from orthocond.lab.runs import Run
from orthocond.lab.runs.finding import find_runs

_RESULTS = Path(__file__).parent.parent / "results"


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
    rows = [line.split() for line in text.splitlines() if line.endswith(" 12 ms")]
    assert [row[0] for row in rows] == ["svd", "nog", "nog+ow+olr"]
    assert "singular" in text
    assert str(folder / "report.html") in text
    assert str(folder / "explore.html") in text
    assert "orthocond explore RUN" in text
    stages = re.findall(r"^(\d) of 4: .* …$\n(?:.*\n)*?  took \d+ s$", text, re.M)
    assert stages == ["1", "2", "3", "4"]
    said = " ".join(text.split())
    assert "a generator that was trained before and comes with the package" in said
    assert "A few steps only: the numbers say nothing." in said
    assert "Verdict, each method against svd: nog has a κ on the range" in said
    assert " ".join(module._KNOWN) in said
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


_SVD = module.Result(90.0, 91.0, 8000.0, 100.0, 27, 5.0, None, 10.0)


def _words(config=None, *, nog=_SVD, full=_SVD):
    """What the demo says of made-up rows."""
    return module._words({"svd": _SVD, "nog": nog, "nog+ow+olr": full}, config or preset("dbn-sprites-small"))


def test_words_compare_what_was_measured():
    nog = _SVD._replace(condition=4000.0, condition_on_range=300.0)
    full = _SVD._replace(condition=1000.0, condition_on_range=102.0, olr_occurrence=0.5)
    words = " ".join(_words(nog=nog, full=full))
    assert "8 times smaller with all treatments, 2 times smaller with nog alone" in words
    assert "about the same with all treatments, 3 times larger with nog alone" in words


def test_words_of_a_short_demo_begin_with_what_its_numbers_are_worth():
    assert not any("say nothing" in text for text in _words())
    short = module._config("svd", short=True)
    assert _words(short)[0] == "These trainings had a few steps only: their numbers say nothing."


def test_the_demo_trains_with_statistics_that_follow_the_weight():
    """What its words say about them."""
    assert all(module._config(name, short).model.follow for name in module.METHODS for short in (True, False))
    assert any("the statistics are converted to the new weight (`model.follow`)" in text for text in _words())


@pytest.mark.parametrize(
    ("as_trained", "expected"),
    [(90.6, "They differ by at most 1.0 points."), (86.0, "They differ by up to 5.0 points (nog), which the")],
)
def test_words_tell_how_nearly_both_kinds_of_statistics_agree(as_trained, expected):
    """Made-up svd has 90.0 and 91.0 %."""
    (text,) = (text for text in _words(nog=_SVD._replace(accuracy=as_trained)) if text.startswith("Accuracies are"))
    assert expected in text
    assert ("do not follow" in text) == ("5.0" in expected)


@pytest.mark.parametrize("method", ["nog", "full"])
@pytest.mark.parametrize(
    ("as_trained", "refreshed", "expected"),
    [
        (90.5, 91.5, "+0.5 points as trained and +0.5 with refreshed statistics: no difference that 1000 images can"),
        (95.0, 96.0, "+5.0 with refreshed statistics: better by more than 1000 images leave to chance (±2.2), but of"),
        (80.0, 81.0, "-10.0 with refreshed statistics: worse by more than 1000 images leave to chance (±3.1), but of"),
        (80.0, 91.0, "and +0.0 with refreshed statistics: worse as trained by more than 1000 images leave to chance"),
        (90.0, 80.0, "-11.0 with refreshed statistics: worse with refreshed statistics by more than 1000 images leave"),
        (80.0, 98.0, ": worse as trained and better with refreshed statistics by more than 1000 images leave to"),
        (95.0, 80.0, ": better as trained and worse with refreshed statistics by more than 1000 images leave to"),
    ],
)
def test_the_verdict_of_each_method_follows_from_its_own_numbers(method, as_trained, refreshed, expected):
    """With a mean of p right of 1000 images, 95 % of chance differences are within 196 √(2 p (1 - p) / 1000)."""
    row = _SVD._replace(accuracy=as_trained, refreshed=refreshed, condition_on_range=25.0)
    (text,) = (text for text in _words(**{method: row}) if text.startswith("Verdict"))
    treated, other = text.partition("against svd: ")[2].split(" nog+ow+olr ")
    if method == "full":
        treated, other = other, treated
    assert "has a κ on the range that is 4 times smaller, and its accuracy changes by" in treated
    assert expected in treated
    assert "has a κ on the range that is about the same" in other
    assert "no difference that 1000 images can tell from chance (±2.6)" in other


def test_the_verdict_of_equal_perfect_accuracies_is_no_difference():
    rows = dict.fromkeys(module.METHODS, _SVD._replace(accuracy=100.0, refreshed=100.0))
    assert module._verdict(rows, 96).count("no difference that 96 images can tell from chance (±0.0)") == 2


# What more is known


def _contrast(table, contrast):
    """A contrast of a kept table: its verdict, its mean difference, its row."""
    rows = json.loads((_RESULTS / table / "table.json").read_text())["contrasts"]
    row = next(row for row in rows if row["contrast"] == contrast)  # the small network comes first
    return row["verdict"], row["measures"][row["measure"]]["difference"]["mean"], row


def _said(text):
    """The numbers of a text."""
    return re.findall(r"\d+\.\d+|\d+", text)


def test_what_more_is_known_has_the_numbers_of_the_kept_tables():
    text, _, where = module._KNOWN
    verdicts, gains, rows = zip(
        *(_contrast("cifar10-claims", f"SVD − {base}") for base in ("BN", "BN with more steps")), strict=True
    )
    assert verdicts == ("holds", "holds")
    assert {len(row["measures"]["error"]["seeds"]) for row in rows} == {10}
    steps, time = (f"{-gain:.1f}" for gain in gains)
    factors = [_contrast("cifar10-conditioning", f"{name} − SVD") for name in ("NOG", "OLR")]
    assert {verdict for verdict, _, _ in factors} == {"holds"}
    nog, olr = (f"{10**gain:.2f}" for _, gain, _ in factors)
    verdict, joint, _ = _contrast("gan-claims", "joint of no treatment − axes of no treatment")
    assert verdict == "holds"
    numbers = _said(text.replace("CIFAR-10", ""))
    assert numbers == [steps, time, "0.5", nog, olr, f"{joint:.0f}"]
    assert "results/README.md" in where
    assert "In a clone of the repository, `orthocond table cifar10-claims --seeds 10 --no-train`" in where


def test_what_is_known_of_gradients_and_stale_statistics_has_the_numbers_of_the_kept_tables():
    _, text, _ = module._KNOWN
    verdict, gain, row = _contrast("cifar10-pade", "SVD, exact, ε 1e-2 − SVD, Padé (stand-in at ties), ε 1e-2")
    assert (verdict, row["measure"]) == ("holds", "error")
    rows = json.loads((_RESULTS / "stale-statistics" / "table.json").read_text())["stale"]
    steady = [row for row in rows if row["rate"] == "constant" and row["label"].startswith("SVD")]
    assert len(steady) == 8
    saved = [row["gained"]["mean"] for row in steady]
    seeds = min(len(row["pairs"]["seeds"]) for row in steady)
    fresh = len(row["measures"]["error"]["seeds"])
    expected = [f"{-gain:.1f}", str(fresh), f"{min(saved):.0f}", f"{max(saved):.0f}", str(seeds)]
    assert _said(text.replace("ε 1e-2, ", "")) == expected


def test_what_more_is_known_has_the_verdicts_of_the_kept_tables():
    text = module._KNOWN[0]
    for name in ("NOG", "NOG + OW", "NOG + OW + OLR", "OLR"):
        verdict, _, row = _contrast("cifar10-claims", f"{name} − SVD")
        assert (verdict, row["margin"]) == ("equivalent within the margin", 0.5)
    assert "NOG, NOG + OW, NOG + OW + OLR and OLR are equivalent in error to no treatment, within 0.5 points" in text
    shorter = [_contrast("cifar10-conditioning", "NOG − SVD, stem rate x0.4")]
    for control in ("SVD, stem rate x0.1", "SVD, stem rate x0.4", "steps shortened at random as by OLR"):
        shorter.append(_contrast("cifar10-conditioning", f"OLR − {control}"))
    assert all(verdict in ("fails", "cannot tell") and gain > 0 for verdict, gain, _ in shorter)
    assert "nothing shows that either lowers it more than shorter steps of the stem do" in text


def test_a_training_that_fails_is_told(tmp_path, monkeypatch, capsys):
    from orthocond.lab.launch import Ending

    def launch(configs, root, **_):
        return [Ending(Run.create(root, "x", config), 3, "The loss is nan at step 7.") for config in configs]

    monkeypatch.setattr(module, "launch", launch)
    assert main(["demo", "--short", "--out", str(tmp_path), "--no-open"]) == 1
    assert "The loss is nan at step 7." in capsys.readouterr().err
