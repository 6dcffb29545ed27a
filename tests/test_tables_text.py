"""The Markdown of a comparison: what is trained, what is not, and on which networks and data."""

import json
from dataclasses import replace

import pytest

from orthocond.lab import catalog
from orthocond.lab.classification.config import Method
from orthocond.lab.classification.presets import PRESETS
from orthocond.lab.tables.comparison import Comparison, Experiment, Fact, Measure
from orthocond.lab.tables.records import Record
from orthocond.lab.tables.table import Material
from orthocond.lab.tables.text import seeds_of

_ROWS = (Method("svd"), Method("sn"), Method("ow"))
_EXPERIMENTS = tuple(
    Experiment(label, preset, PRESETS)
    for label, preset in (("CIFAR-10", "dbn-cifar10-resnet50"), ("CIFAR-100", "dbn-cifar100-resnet50"))
)
_MEASURES = (Measure("error", "Error (%)", "error"), Measure("top5", "Top-5 error (%)", "top5", needs="It needs luck."))
_MANY = (*_MEASURES, Measure("loss", "Loss", "loss"))
_TABLE = Comparison("mine", "Mine", "Text.", _EXPERIMENTS, _ROWS, _MEASURES, (Fact("rank", "rank"),))


def _write(folder, trained, *, measures=_MEASURES, stopped=()):
    """The table of trainings by experiment, method and seed, as text and content."""
    records = {}
    for place, name, seed in (*trained, *stopped):
        config = _EXPERIMENTS[place].config("laptop", Method(name), seed)
        why = "The loss is nan" if (place, name, seed) in stopped else None
        end = {} if why else {"error": 20.0 + seed, "loss": 1.0, "finished": True}
        records[config] = Record("run", config, [{"step": 1, "rank": 27}, {"step": 2} | end], why)
    replace(_TABLE, measures=measures).write(folder, Material("laptop", 2, records))
    return (folder / "table.md").read_text(), json.loads((folder / "table.json").read_text())


def _lines(text, start):
    return [line for line in text.splitlines() if line.startswith(start)]


@pytest.mark.parametrize("measures", [_MEASURES, _MANY])
def test_an_experiment_without_trainings_is_one_line(tmp_path, measures):
    text, content = _write(tmp_path, [(1, "svd", 0), (1, "ow", 0)], measures=measures)
    assert _lines(text, "CIFAR-10:") == ["CIFAR-10: not trained yet."]
    assert "## CIFAR-10\n" not in text
    assert "## CIFAR-100\n" in text
    assert text.count("| SVD |") == len(measures) + 1 + (
        len(measures) > 2
    )  # all measures at a glance, if they are many
    assert [len(each["rows"]) for each in content["experiments"]] == [3, 3]


def test_rows_without_trainings_are_named_in_one_line(tmp_path):
    text, content = _write(tmp_path, [(0, "svd", 0), (0, "svd", 1)], stopped=[(0, "ow", 1)])
    assert _lines(text, "Not trained yet") == ["Not trained yet: SVD + SN."]
    assert not _lines(text, "| SVD + SN")
    assert [line.split(" | ")[5] for line in _lines(text, "| SVD + OW |")[:2]] == ["0 of 2, 1 stopped"] * 2
    assert [row["missing"] for row in content["experiments"][0]["rows"]] == [[], [0, 1], [0]]
    assert len((tmp_path / "table.csv").read_text().splitlines()) == 1 + 6


def test_seeds_are_those_that_have_the_measure(tmp_path):
    _, content = _write(tmp_path, [(0, "svd", 0), (0, "svd", 1)])
    (row,) = (row for row in content["experiments"][0]["rows"] if row["label"] == "SVD")
    assert [seeds_of(row, row["measures"][name], 2) for name in ("error", "top5")] == ["2", "0 of 2"]
    assert seeds_of(row, {"values": [None, 3.0]}, 2) == "1 of 2"


def test_where_all_is_trained_nothing_is_said(tmp_path):
    text, _ = _write(tmp_path, [(place, row.name, 0) for place in (0, 1) for row in _ROWS])
    assert "ot trained" not in text


def test_a_table_of_stopped_trainings_has_no_grid_without_columns(tmp_path):
    text, _ = _write(tmp_path, [], stopped=[(0, "ow", 1)])
    assert "Conditioning and cost" not in text
    assert "## CIFAR-10\n" in text


def test_the_first_lines_name_the_networks_and_data_that_were_used(tmp_path):
    text, content = _write(tmp_path, [(1, "svd", 0)])
    assert text.startswith("# Mine\n\nText. Network and data: CIFAR-100.\n\n")
    assert content["text"] == "Text. Network and data: CIFAR-100."
    text, _ = _write(tmp_path, [(0, "svd", 0), (1, "svd", 0)])
    assert text.startswith("# Mine\n\nText. Networks and data: CIFAR-10; CIFAR-100.\n\n")


def test_only_what_was_trained_can_be_unmeasured(tmp_path):
    text, _ = _write(tmp_path, [(1, "svd", 0)])
    assert _lines(text, "- CIFAR") == ["- CIFAR-100: there is no Top-5 error (%). It needs luck."]


def test_failures_of_pooling_stand_beside_those_to_be_expected(tmp_path):
    """Two trainings of 20 and 40 steps with 50 images; Newton-Schulz decomposes nothing."""
    table = replace(catalog.TABLES["gcp"], figures=())
    (experiment,) = table.experiments
    lines = {"error": 20.0, "top5_error": 5.0, "solver_failures": 2, "finished": True}
    configs = {
        experiment.config("laptop", Method(name), seed): 20 + 20 * seed for name in ("svd", "ns") for seed in (0, 1)
    }
    records = {c: Record("run", c, [{"step": steps} | lines]) for c, steps in configs.items()}
    table.write(tmp_path, Material("laptop", 2, records))
    rows = {row["label"]: row for row in json.loads((tmp_path / "table.json").read_text())["experiments"][0]["rows"]}
    assert rows["SVD"]["facts"]["expected_failures"]["mean"] == pytest.approx(30 * 50 * 5 / 77e6)
    assert rows["NS iteration"]["facts"]["expected_failures"]["mean"] is None
    head, _, svd, ns = (tmp_path / "table.md").read_text().split("| Conditioning and cost")[1].splitlines()[:4]
    assert head.endswith("| paper: solver failures | solver failures | failures expected at the paper's rate |")
    assert svd.endswith(f"| 5 | 2 | {30 * 50 * 5 / 77e6:.2g} |")
    assert ns.endswith("| 0 | 2 | – |")


@pytest.mark.parametrize(("rank", "text"), [(0.0, "0"), (0.0194, "0.019"), (0.5, "0.5"), (27.0, "27")])
def test_small_counts_do_not_become_zero(tmp_path, rank, text):
    config = _EXPERIMENTS[0].config("laptop", _ROWS[0], 0)
    record = Record("run", config, [{"step": 1, "rank": rank, "error": 1.0, "finished": True}])
    _TABLE.write(tmp_path, Material("laptop", 1, {config: record}))
    assert _lines((tmp_path / "table.md").read_text(), "| SVD |")[-1] == f"| SVD | {text} |"
