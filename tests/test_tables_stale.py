"""The table of stale statistics: errors of the same weights, twins that follow, and what the lag costs in each."""

import json

import pytest
from scipy import stats

from orthocond.lab import catalog
from orthocond.lab.report import write_report
from orthocond.lab.tables.records import Record
from orthocond.lab.tables.table import Material

_TABLE = catalog.TABLES["stale-statistics"]


def _record(config, errors):
    """A training; the losses of the twin that follows part from its own with seed 2, in the second line."""
    keys = ("uncovered_error", "error", "settled_error", "recalibrated_error")
    evaluation = {key: error for key, error in zip(keys, errors, strict=True) if error is not None}
    lines = [{"step": 1, "loss": 2.3}, {"step": 101, "loss": 1.5 + (config.model.follow and config.seed == 2) / 1000}]
    lines.append({"step": 200, "epoch": 1, "error": errors[1], "finished": True})
    return Record("run", config, lines, None, evaluation)


def _write(folder, errors):
    """The table of trainings whose four errors a function gives."""
    configs = _TABLE.configs("laptop", 3)
    records = {config: _record(config, found) for config in configs if (found := errors(config)) is not None}
    _TABLE.write(folder, Material("laptop", 3, records))
    return json.loads((folder / "table.json").read_text())


def _errors(config):
    """Without fall, the lag costs 10 points at ε 1e-5 and 4 at 1e-2; the cover saves all but 1, and 2 with seed 2."""
    if config.method.name == "bn":
        return (None, 30.5, 30.5, 30.5) if config.schedule.epochs == 1 else None
    if config.schedule.fall == "linear":
        return (20.0, 20.0, 20.0, 20.0)
    lag = 10.0 if config.model.eps == 1e-5 else 4.0
    if config.model.follow:
        return None if config.seed == 1 else (30.25, 30.5 if config.seed == 2 else 30.25, 30.0, 30.0)
    return (30 + lag, 32.0 if config.seed == 2 else 31.0, 30.0, 30.0)


def test_what_the_lag_costs_and_what_the_cover_saves(tmp_path):
    content = _write(tmp_path, _errors)
    rows = content["stale"]
    first = rows[0]
    assert (first["label"], first["rate"], first["momentum"], first["eps"]) == ("SVD", "constant", 0.1, 0.01)
    assert first["saved"]["mean"] == pytest.approx((3 + 3 + 2) / 3)
    expected = stats.ttest_rel([34, 34, 34], [31, 31, 32]).confidence_interval(0.95)
    assert (first["saved"]["low"], first["saved"]["high"]) == pytest.approx(expected)
    assert first["lost"]["mean"] == pytest.approx(4 / 3)
    assert content["verdict"][0].startswith(
        "Where the lag is ignored, stale statistics cost up to 10.0 points (SVD, 1 epoch"
    )
    assert "the cover saves 8.7." in content["verdict"][0]
    assert "cost at most 1.3 points" in content["verdict"][1]
    assert content["verdict"][2].startswith("With statistics that follow the weight they cost 0.4 at most (SVD")
    assert first["following"]["values"] == [30.25, 30.5]
    assert first["left"]["mean"] == pytest.approx(0.375)
    assert first["pairs"] == {"seeds": [0, 2], "same_weights": 1}
    assert first["gained"]["mean"] == pytest.approx((0.75 + 1.5) / 2)  # of seeds 0 and 2 alone
    expected = stats.ttest_rel([31, 32], [30.25, 30.5]).confidence_interval(0.95)
    assert (first["gained"]["low"], first["gained"]["high"]) == pytest.approx(expected)
    assert first["unexplained"]["mean"] == 0
    assert content["verdict"][3].startswith("On the same seeds, following saves up to 1.1 points (SVD, 1 epoch")
    twins = sum(row["pairs"]["seeds"] == [0, 2] for row in rows)
    steady = sum(row["rate"] == "falling" and bool(row["pairs"]["seeds"]) for row in rows)
    assert (twins, steady) == (9, 3)  # those of the falling rate have all three seeds
    assert content["verdict"][3].endswith(
        f"in {9 + 2 * 3} of {2 * 9 + 3 * 3} pairs of trainings the weights are the same."
    )
    bn = next(row for row in rows if row["label"] == "BN")
    assert bn["pairs"]["seeds"] == []
    assert bn["gained"] is None
    assert bn["saved"] is None
    assert bn["lost"]["mean"] == 0
    text = (tmp_path / "table.md").read_text()
    assert (
        "| SVD | 1 | constant | 0.1 | 0.01 | 34.00 ± 0.00 | 31.33 ± 0.58 | 30.00 ± 0.00 | 30.00 ± 0.00 | 30.38 ± 0.18 |"
        in text
    )
    assert text.count("| 3 | 2 (1) |") == 9
    assert text.count("| 3 | 3 (2) |") == 3
    assert "| BN | 4 | falling | 0.3 | 0.01 | – | – | – | – | – | – | – | – | – | 0 | – |" in text
    bn_trainings = [config for config in _TABLE.configs("laptop", 1) if config.method.name == "bn"]
    assert not any(config.model.follow for config in bn_trainings)


def test_what_stale_statistics_do_not_explain_is_what_settled_and_refreshed_differ_by(tmp_path):
    def errors(config):
        """Settled averages of NOG cost 0.5 points, and those of BN save 0.75."""
        found = {"nog": (34.0, 33.0, 30.5, 30.0), "bn": (None, 30.5, 29.75, 30.5)}
        return found.get(config.method.name, (34.0, 33.0, 30.25, 30.0))

    content = _write(tmp_path, errors)
    unexplained = {row["label"]: row["unexplained"]["mean"] for row in content["stale"]}
    assert unexplained["BN"] == -0.75
    assert unexplained["NOG"] == 0.5
    assert content["verdict"][-1].startswith("Stale statistics explain the gap between as trained and refreshed errors")
    assert "but for 0.75 points: by so much, at most, settled and refreshed" in content["verdict"][-1]
    assert "mean of a row (BN, 1 epoch" in content["verdict"][-1]


def test_trainings_evaluated_before_are_named(tmp_path):
    content = _write(tmp_path, lambda config: (None, 30.0, None, 29.0) if config.method.name == "nog" else None)
    assert content["verdict"] == ["Nothing is known yet: no training has been evaluated with all kinds of statistics."]
    assert any(note.startswith("Not all errors of SVD + NOG, SVD + NOG") for note in content["notes"])


def test_its_report_has_its_verdict(tmp_path):
    folder = tmp_path / "stale-statistics"
    folder.mkdir()
    _write(folder, _errors)
    page = write_report(folder, out=tmp_path / "r.html")
    assert "stale statistics cost up to 10.0 points" in page.read_text()
