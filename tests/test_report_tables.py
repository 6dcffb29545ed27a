"""Reports of tables, and the commands that write reports."""

import gzip
import json
import re
from collections import Counter
from pathlib import Path

import pytest
from report_helpers import classifier, opened

from orthocond.cli import main
from orthocond.lab.report.sources import (
    read,
)
from orthocond.lab.report.tabled import _markdown
from orthocond.lab.report.tabled import verdict as table_verdict

pytestmark = pytest.mark.usefixtures("without_vega")

RESULTS = Path(__file__).parent.parent / "results"


# Tables


@pytest.fixture
def table(tmp_path):
    """A table with one experiment of a kept folder, small enough to be changed."""
    content = json.loads((RESULTS / "cifar100-all" / "table.json").read_bytes())
    folder = tmp_path / "results" / "cifar100-all"
    folder.mkdir(parents=True)
    (folder / "table.json").write_text(json.dumps(content))
    return folder


def test_table_of_kept_results(tmp_path):
    page = opened(RESULTS / "cifar100-all", out=tmp_path / "r.html")
    content = json.loads((RESULTS / "cifar100-all" / "table.json").read_bytes())
    assert content["title"] in page.text
    for row in content["experiments"][0]["rows"]:
        assert row["label"] in page.text
    assert "paper ours seeds" in page.text
    assert "how sure" in page.text
    assert "Curves" in page.text
    assert re.search(r"What differs method\.name .*SVD \+ NOG \+ OW \+ OLR \(paper's η\) nog\+ow\+olr", page.text)
    assert "What all have in common" in page.text
    assert "orthocond table cifar100-all" in page.text


@pytest.mark.parametrize("name", sorted(p.parent.name for p in RESULTS.glob("*/table.json")))
def test_every_kept_table_has_a_report(tmp_path, name, monkeypatch):
    monkeypatch.setattr("orthocond.lab.report.sources.read_kept", lambda _: [])  # reading all of them takes long
    page = opened(RESULTS / name, out=tmp_path / "r.html")
    assert "Verdict" in page.text
    assert ("Time a preset of yours" in page.text) == (name in ("time", "gan-time", "paper-scale"))  # tables of times


def _cells(content):
    measure = content["measures"][0]["name"]
    return [row["measures"][measure] for row in content["experiments"][0]["rows"] if row["method"]["name"] != "svd"]


def test_verdict_of_a_table_follows_from_its_numbers(table):
    content = json.loads((table / "table.json").read_bytes())
    for cell in _cells(content):
        cell["difference"] |= {"verdict": "not significant", "mean": 0.1, "low": -0.9, "high": 1.1}
        cell["paper_difference"] = None
    first, second, third = table_verdict(content)
    assert "none of 17 differences from SVD is more than chance can explain" in first
    assert "The paper gives no number for the baseline" in second
    assert "±1 around a difference" in third
    for cell, paper in zip(_cells(content)[:3], (-3.0, -4.0, 5.0), strict=True):
        cell["difference"] |= {"verdict": "better", "mean": -2.0}
        cell["paper_difference"] = {"mean": paper, "low": None, "high": None}
    first, second, third = table_verdict(content)
    assert "BN, NS iteration and SVD + SN are better than SVD" in first
    assert "the other 14 differences may be chance" in first
    assert "2 of the paper's 3 differences have the same sign here, 2 of them by more than chance" in second
    assert "1 has surely the opposite sign" in second
    assert "the paper's typical size, 4, could be seen" in third


def test_kept_trainings_with_a_dead_discriminator_are_told(tmp_path):
    page = opened(RESULTS / "eigengan", out=tmp_path / "r.html")
    # Its loss stays at 2 ln 2, as the results' own notes say.
    assert re.search(r"AnimeFace, NOG, 2 trainings: The discriminator looks dead", page.text)
    assert "Before you believe it, read the" in page.text


def test_missing_and_stopped_trainings_of_a_table(table):
    content = json.loads((table / "table.json").read_bytes())
    content["experiments"][0]["rows"][0] |= {"missing": [4], "stopped": [{"seed": 3, "why": "The loss is nan"}]}
    (table / "table.json").write_text(json.dumps(content))
    page = opened(table)
    assert "BN: seeds 4 are missing" in page.text
    assert "BN, seed 3 did not finish: The loss is nan" in page.text


@pytest.mark.parametrize("value", [3, [3], [{}], [{"preset": "x", "label": "y", "rows": [{}]}]], ids=str)
def test_a_table_of_the_wrong_kind_is_a_sentence_that_names_the_file(table, value):
    content = json.loads((table / "table.json").read_bytes())
    (table / "table.json").write_text(json.dumps(content | {"experiments": value}))
    with pytest.raises(ValueError, match=r"cifar100-all/table.json is damaged \(.+\); make the table again"):
        opened(table)


def test_claims_are_told_in_three_sentences_and_rows_without_numbers_are_folded(tmp_path):
    content = json.loads((RESULTS / "cifar10-claims" / "table.json").read_bytes())
    page = opened(RESULTS / "cifar10-claims", out=tmp_path / "r.html")
    count = Counter(row["verdict"] for row in content["contrasts"])
    assert f"Of {len(content['contrasts'])} contrasts, by test error as trained (%), {count['holds']} hold" in page.text
    assert f"{count['cannot tell']} cannot be told yet" in page.text
    first = "OLR lowers the error more than a smaller rate does (OLR − SVD, stem rate x0.1: −0.56, small)"
    assert f"These hold: {first}" in page.text
    assert page.text.count("whitening beats BN (SVD − BN: −2.13, small)") == 1
    assert "These fail: whitening gains no more than its initial weight (BN + WI − SVD: +1.18, small)" in page.text
    assert "**" not in page.text
    assert "`" not in page.text
    assert f"orthocond table cifar10-claims --seeds {content['seeds']} --no-train" in page.text


def test_what_is_not_trained_is_named_once(table):
    content = json.loads((table / "table.json").read_bytes())
    (experiment,) = content["experiments"]
    nothing = {"seeds": [], "missing": [0, 1], "stopped": []}
    other = experiment | {"label": "CIFAR-10", "rows": [row | nothing for row in experiment["rows"]]}
    experiment["rows"][0] |= nothing
    (table / "table.json").write_text(json.dumps(content | {"experiments": [other, experiment]}))
    page = opened(table)
    label = experiment["label"]
    assert page.text.count("Not trained yet.") == 1
    assert f"{label} Not trained yet: BN." in page.text
    assert "CIFAR-10: not trained yet." in page.text
    assert f"{label}: not trained yet: BN." in page.text
    assert "seeds 0 and 1 are missing" not in page.text


@pytest.mark.parametrize("scale", ["laptop", "workstation", "paper"])
def test_commands_make_the_table_at_its_own_scale(table, scale):
    content = json.loads((table / "table.json").read_bytes()) | {"scale": scale, "seeds": 3}
    (table / "table.json").write_text(json.dumps(content))
    where = "" if scale == "laptop" else f" --scale {scale}"
    page = opened(table)
    for seeds in (3, 6):
        assert f"orthocond table cifar100-all{where} --seeds {seeds}" in page.text
    assert ("orthocond table cifar100-all --seeds" in page.text) == (scale == "laptop")


def test_a_table_of_times_is_made_again_at_its_own_scale(tmp_path):
    content = json.loads((RESULTS / "time" / "table.json").read_bytes())
    (tmp_path / "time-paper").mkdir()
    (tmp_path / "time-paper" / "table.json").write_text(json.dumps(content | {"scale": "paper"}))
    assert "orthocond table time --scale paper" in opened(tmp_path / "time-paper").text


def test_grids_of_a_text_have_words_on_the_left_and_fold_empty_rows():
    text = "| a | what | value | seeds |\n|---|---|---|---|\n| x | good one | −1.5 [0, 2] | 3 of 5 |\n"
    text += "".join(f"| {i} | bad | – | 0 of 5 |\n" for i in range(4))
    ((_, (known, unknown)),) = _markdown(text)
    assert (known.texts, len(known.rows), known.folded) == (frozenset({1}), 1, False)
    assert (unknown.title, len(unknown.rows), unknown.folded) == ("4 rows without numbers yet", 4, True)


def test_trainings_are_matched_with_their_rows(table):
    lines = gzip.decompress((RESULTS / "runs" / "dbn-cifar100-resnet50-laptop.jsonl.gz").read_bytes()).splitlines()
    (table.parent / "runs").mkdir()
    (table.parent / "runs" / "dbn-cifar100-resnet50-laptop.jsonl.gz").write_bytes(gzip.compress(b"\n".join(lines)))
    found = read([table]).trainings
    assert {len(trainings) for trainings in found.values()} == {5}
    rows = {t.name for trainings in found.values() for t in trainings}
    assert len(rows) == 90


# The command


def run(*tokens):
    return main([*map(str, tokens)])


def test_command(tmp_path, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    path = classifier(tmp_path / "runs")
    assert run("report", path) == 0
    assert opened == [(path / "report.html").resolve().as_uri()]
    assert str(path / "report.html") in capsys.readouterr().out
    assert run("report", "0", "--runs", tmp_path / "runs", "--out", tmp_path / "r.html", "--no-open") == 0
    assert (tmp_path / "r.html").is_file()
    assert len(opened) == 1


def test_compare_is_the_report_of_two_runs(tmp_path, monkeypatch, capsys):
    for method in ("svd", "nog"):
        classifier(tmp_path / "runs", method)
    options = ("--runs", tmp_path / "runs", "--no-open")
    assert run("compare", 0, 1, *options, "--out", tmp_path / "c.html") == 0
    assert run("report", 0, 1, *options, "--out", tmp_path / "r.html") == 0
    assert (tmp_path / "c.html").read_bytes() == (tmp_path / "r.html").read_bytes()
    assert "<h1>svd against nog</h1>" in (tmp_path / "c.html").read_text()
    capsys.readouterr()
    assert run("compare", 0, *options) == 2
    assert "SECOND" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (["report"], "needs a run"),
        (["report", "nothing"], "There is no run 'nothing'"),
        (["report", "."], "has neither runs nor a table"),
        (["report", "file.txt"], "file.txt is no folder"),
        (["report", "run", "--out", "page.txt"], "ends with .html"),
        (["report", "run", "--out", "no/page.html"], "there is no no"),
        (["report", "run", "table"], "is a table, which needs its own report"),
    ],
)
def test_wrong_values_are_one_sentence(tmp_path, monkeypatch, capsys, tokens, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "file.txt").touch()
    if "run" in tokens:
        classifier(tmp_path / "runs").rename(tmp_path / "run")
    if "table" in tokens:
        (tmp_path / "table").mkdir()
        (tmp_path / "table" / "table.json").write_text('{"title": "T"}')
    before = sorted(tmp_path.rglob("*"))
    assert run(*tokens) == 2
    error = capsys.readouterr().err
    assert text in error
    assert "Traceback" not in error
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch, capsys):
    path = classifier(tmp_path)
    (path / "report.html").write_text("old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    assert run("report", path, "--no-open") == 1
    assert "Cannot write" in capsys.readouterr().err
    assert (path / "report.html").read_text() == "old"
    assert not list(path.glob(".*.tmp"))
