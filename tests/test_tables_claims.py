"""Claims: contrasts against SciPy, every verdict, what is missing, the rates that were chosen, commands."""

import csv
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from orthocond.lab import catalog
from orthocond.lab.classification import claims, tuning
from orthocond.lab.classification.config import Method
from orthocond.lab.classification.task import ClassificationTask
from orthocond.lab.config import change, flatten, to_json
from orthocond.lab.experiments import preset
from orthocond.lab.presets import command_of
from orthocond.lab.tables import statistics
from orthocond.lab.tables.comparison import FigurePlan, LateLogarithm, Measure
from orthocond.lab.tables.contrasts import Arm, Claims, Contrast, Term, _add_verdicts, _verdict, cpu_seconds
from orthocond.lab.tables.records import Record, keep, read_kept
from orthocond.lab.tables.table import Material

RESULTS = Path(__file__).parent.parent / "results"


def _record(config, error, *, seconds=0.5, stopped=None):
    """A training of 200 steps with a line of metrics after 1, 51, 101 and 151 of them."""
    lines = [{"step": s, "epoch": 0, "lr": 0.1, "step_cpu_seconds": seconds} for s in (1, 51, 101, 151)]
    if stopped:
        return Record("run", config, lines, stopped)
    lines.append({"step": 200, "epoch": 1, "error": error, "finished": True})
    evaluation = {"error": error, "recalibrated_error": error - 1, "loss": error / 100}
    return Record("run", config, lines, None, evaluation)


def _arm(name):
    return Arm(
        name.upper(), lambda scale, seed: replace(preset("dbn-cifar10-convnet", scale), method=Method(name), seed=seed)
    )


def _table(*contrasts):
    return Claims("mine", "Mine", "Text.", contrasts, (Measure("error", "Error (%)", "error"),), {"laptop": "small"})


def _contrast(name, seeds=4, margin=0.5, **settings):
    terms = (Term(1, _arm(name)), Term(-1, _arm("svd")))
    return Contrast(f"{name} helps", f"{name} − svd", terms, {"laptop": seeds}, margin, **settings)


def _write(table, folder, errors, seeds=10, **material):
    """The table of made-up errors by method; None is a training that is not there."""
    records = {}
    for name, values in errors.items():
        for seed, error in enumerate(values):
            config = _arm(name).config("laptop", seed)
            if error is not None:
                records[config] = _record(config, error)
    table.write(folder, Material("laptop", seeds, records, **material))
    return json.loads((folder / "table.json").read_text())


# Measures


@pytest.mark.parametrize(("values", "expected"), [([7] * 9 + [10, 1e5, 1e3], 3.0), ([7, math.inf], None), ([], None)])
def test_a_late_logarithm_is_that_of_the_median_of_the_last_quarter(values, expected):
    lines = [{"step": step, "condition": value} for step, value in enumerate(values)]
    record = Record("run", preset("dbn-cifar10-convnet"), [*lines, {"step": 12, "finished": True}])
    assert LateLogarithm("range", "log10 κ", "condition").of(record) == expected


# Statistics


@pytest.mark.parametrize("values", [[0.1, -0.2, 0.3, 0.05], [0.6, 0.2, 0.5], [-0.45, -0.2], [2.0, 2.1, 1.9]])
def test_equivalence_is_two_one_sided_tests_of_scipy(values):
    found = statistics.equivalence(values, 0.5)
    above = stats.ttest_1samp(values, -0.5, alternative="greater").pvalue
    below = stats.ttest_1samp(values, 0.5, alternative="less").pvalue
    assert found.p == pytest.approx(max(above, below), rel=1e-9)
    low, high = stats.ttest_1samp(values, 0).confidence_interval(0.9)
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-9)
    assert (found.p < 0.05) == (low > -0.5 and high < 0.5)


def test_equivalence_without_spread_and_of_one_value():
    assert statistics.equivalence([0.1], 0.5) is None
    assert statistics.equivalence([0.2, 0.2], 0.5).p == 0
    assert statistics.equivalence([0.5, 0.5], 0.5).p == 1


# Verdicts


@pytest.mark.parametrize(
    ("mean", "p", "within", "same", "expected"),
    [
        (-1.0, 0.01, False, False, "holds"),
        (-0.2, 0.01, True, False, "holds"),  # small, but surely there
        (1.0, 0.01, False, False, "fails"),
        (-0.1, 0.4, True, False, "equivalent within the margin"),
        (-0.1, 0.4, False, False, "cannot tell"),
        (-0.1, 0.4, True, True, "equivalent within the margin"),
        (-0.1, 0.01, True, True, "equivalent within the margin"),
        (-1.0, 0.01, False, True, "fails"),
        (1.0, 0.01, False, True, "fails"),
        (1.0, 0.4, False, True, "cannot tell"),
    ],
)
def test_verdicts_follow_the_protocol(mean, p, within, same, expected):
    difference = {"mean": mean, "p": p, "p_holm": p}
    assert _verdict(difference, {"p": 0.01 if within else 0.2}, same=same) == expected


def test_where_more_is_better_a_claim_holds_above_zero():
    for mean, expected in ((1.0, "holds"), (-1.0, "fails")):
        assert _verdict({"mean": mean, "p": 0.01, "p_holm": 0.01}, None, same=False, higher=True) == expected


def test_one_seed_cannot_tell():
    assert _verdict({"mean": -9.0, "p": None}, None, same=False) == "cannot tell"
    assert _verdict(None, None, same=False) == "not trained"


def test_rows_are_paired_corrected_together_and_judged(tmp_path):
    """By hand: differences of equal seeds, SciPy's t, Holm over three contrasts."""
    rng = np.random.default_rng(0)
    seed_effect = rng.normal(20, 2, 4)
    errors = {"svd": seed_effect + rng.normal(0, 0.1, 4)}
    errors["bn"] = errors["svd"] + np.array([2.0, 2.2, 1.9, 2.1])
    errors["nog"] = errors["svd"] - np.array([1.0, 1.2, 0.9, 1.1])
    errors["ow"] = errors["svd"] + np.array([0.1, -0.1, 0.05, -0.05])
    table = _table(_contrast("bn"), _contrast("nog"), _contrast("ow"), _contrast("mow"))
    content = _write(table, tmp_path, {name: list(values) for name, values in errors.items()})
    rows = content["contrasts"]
    assert [row["verdict"] for row in rows] == ["fails", "holds", "equivalent within the margin", "not trained"]
    tests = [stats.ttest_rel(errors[name], errors["svd"]) for name in ("bn", "nog", "ow")]
    p = sorted(test.pvalue for test in tests)
    holm = [min(1, 3 * p[0]), max(3 * p[0], 2 * p[1]), max(3 * p[0], 2 * p[1], p[2])]
    found = [row["measures"]["error"]["difference"] for row in rows[:3]]
    assert sorted(d["p_holm"] for d in found) == pytest.approx(holm)
    for d, test in zip(found, tests, strict=True):
        low, high = test.confidence_interval(0.95)
        assert (d["low"], d["high"], d["p"]) == pytest.approx((low, high, test.pvalue), rel=1e-6)
    assert rows[3]["measures"]["error"]["difference"] is None
    text = (tmp_path / "table.md").read_text()
    assert "| nog helps | nog − svd | **holds** | −1.05 [" in text
    assert "| mow helps | mow − svd | **not trained** | – |" in text
    assert "0 of 4 | small" in text
    lines = list(csv.DictReader((tmp_path / "table.csv").read_text().splitlines()))
    assert [line["verdict"] for line in lines] == [row["verdict"] for row in rows]
    assert (tmp_path / "claims.png").exists()


def test_equal_differences_have_one_p_value():
    """Two claims on the same trainings, judged by different measures, and a third one."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(1, 1, (3, 5)).tolist(), rng.normal(1, 1, (3, 5)).tolist()

    def row(measure, i):
        measures = {"a": {"values": list(a[i])}, "b": {"values": list(b[i])}}
        return {"measure": measure, "margin": None, "same": False, "measures": measures}

    rows = [row("a", 0), row("b", 0), row("a", 1), row("a", 1), row("b", 2)]
    _add_verdicts(rows, (Measure("a", "A", "a"), Measure("b", "B", "b")))
    found = [{name: cell["difference"]["p_holm"] for name, cell in each["measures"].items()} for each in rows]
    raw_a, raw_b = ([stats.ttest_1samp(values, 0).pvalue for values in both] for both in (a, b))
    corrected = statistics.holm([raw_a[0], raw_b[0], raw_a[1], raw_a[1], raw_b[2]])
    assert [found[i][each["measure"]] for i, each in enumerate(rows)] == pytest.approx(corrected)
    assert found[1]["a"] == found[0]["a"]
    assert found[0]["b"] == found[1]["b"]
    assert found[4]["a"] == pytest.approx(raw_a[2])  # the only one by A that no contrast is judged by
    assert found[2]["b"] == found[3]["b"] == pytest.approx(raw_b[1])


def test_a_table_that_is_kept_as_it_is_is_not_made_again(tmp_path, monkeypatch):
    folder = tmp_path / "weight-treatments"
    folder.mkdir()
    (folder / catalog.KEPT).write_text("Its trainings are old.\n")
    monkeypatch.setattr(catalog, "launch", None)  # nor is anything trained
    with pytest.raises(ValueError, match=r"kept as it is and not made again: Its trainings are old\. To make .*--out"):
        catalog.make("weight-treatments", seeds=1, runs=tmp_path, out=tmp_path)
    assert [path.name for path in folder.iterdir()] == [catalog.KEPT]
    with pytest.raises(FileNotFoundError, match="no trainings"):
        catalog.make("weight-treatments", scale="paper", seeds=1, runs=tmp_path, out=tmp_path, train=False)


def test_missing_seeds_are_counted_and_stopped_ones_named(tmp_path):
    table = _table(_contrast("nog"))
    config = _arm("nog").config("laptop", 3)
    records = {config: _record(config, 0.0, stopped="The loss is nan")}
    for name, values in {"svd": [20, 21, 22, 23], "nog": [19.0, 20.1]}.items():
        for seed, error in enumerate(values):
            config = _arm(name).config("laptop", seed)
            records[config] = _record(config, float(error))
    table.write(tmp_path, Material("laptop", 10, records, remarks=("Missing: something.",)))
    content = json.loads((tmp_path / "table.json").read_text())
    cell = content["contrasts"][0]["measures"]["error"]
    assert cell["seeds"] == [0, 1]
    assert cell["values"] == pytest.approx([-1.0, -0.9])
    text = (tmp_path / "table.md").read_text()
    assert "2 of 4" in text
    assert "2, 1 stopped" in text
    assert "- Missing: something." in text


def test_an_interaction_is_the_difference_of_differences(tmp_path):
    terms = [Term(w, _arm(n)) for w, n in ((1, "nog"), (-1, "bn"), (-0.5, "ow"), (-0.5, "mow"), (1, "svd"))]
    table = _table(Contrast("claim", "contrast", tuple(terms), {"laptop": 2}))
    content = _write(table, tmp_path, {"nog": [5, 6], "bn": [1, 1], "ow": [4, 4], "mow": [2, 8], "svd": [1, 2]})
    assert content["contrasts"][0]["measures"]["error"]["values"] == [5 - 1 - 2 - 1 + 1, 6 - 1 - 2 - 4 + 2]


def test_what_two_views_of_one_training_share_is_no_result(tmp_path):
    """Its difference is 0 by construction, and a test of it would weaken those of its measure."""
    svd, bn = _arm("svd"), _arm("bn")
    views = [replace(svd, view=view) for view in ("joint", "axes")]
    table = replace(
        _table(
            Contrast("claim", "joint − axes", (Term(1, views[0]), Term(-1, views[1])), {"laptop": 3}),
            Contrast("claim", "svd − bn", (Term(1, views[0]), Term(-1, replace(bn, view="axes"))), {"laptop": 3}),
        ),
        measures=(Measure("dci", "DCI", "*.dci", higher=True), Measure("loss", "Loss", "loss")),
    )
    records = {}
    for seed in range(3):
        for arm in (svd, bn):
            config = arm.config("laptop", seed)
            evaluation = {"joint": {"dci": 5.0 + seed}, "axes": {"dci": 2.0}, "loss": seed * (arm is svd)}
            records[config] = replace(_record(config, 20.0), evaluation=evaluation)
    table.write(tmp_path, Material("laptop", 3, records))
    one, two = (row["measures"] for row in json.loads((tmp_path / "table.json").read_text())["contrasts"])
    assert one["dci"]["values"] == two["dci"]["values"] == [3, 4, 5]
    assert one["loss"]["difference"] is None
    assert two["loss"]["values"] == [0, 1, 2]
    assert two["loss"]["difference"]["p_holm"] == two["loss"]["difference"]["p"]


def test_fewer_seeds_may_be_asked_for_and_no_training_is_planned_twice():
    table = catalog.TABLES["cifar10-claims"]
    configs = table.configs("laptop", 2)
    assert len(set(configs)) == len(configs)
    assert {config.seed for config in configs} == {0, 1}
    most = table.configs("laptop", 20)
    assert max(config.seed for config in most) == 9
    assert {config.scale for config in most} == {"laptop", "workstation"}
    assert {config.scale for config in table.configs("paper", 1)} == {"paper"}


@pytest.mark.parametrize(
    ("only", "count"),
    [
        (["whitening small"], 6),  # SVD, BN, BN with more steps, with 1.55 times the steps, BN + WI, SVD in all layers
        ("whitening", 10),
        (["nog ow"], 6),  # SVD, NOG + OW and NOG + OW + OLR at both scales, but not "NOG lowers the error"
        (["Newton", "Stiefel"], 5),
    ],
)
def test_rows_are_chosen_by_whole_words(tmp_path, only, count):
    assert len(catalog.plan("cifar10-claims", seeds=1, runs=tmp_path, out=tmp_path, only=only)) == count


def test_the_whole_name_of_a_row_chooses_it_alone(tmp_path):
    table = catalog.find("weight-treatments")
    row = next(row for row, _ in table.named("laptop", 1) if row.endswith("SVD"))
    (config,) = catalog.plan(table.name, seeds=1, runs=tmp_path, out=tmp_path, only=f" {row.upper()} ")
    assert config.method.name == "svd"


@pytest.mark.parametrize(
    ("name", "only", "presets"),
    [
        ("gan-claims", "sprites", {"gan-sprites"}),
        ("gan-faces", "CelebA", {"gan-celeba"}),
        ("gan-faces", "EigenGAN nog", {"eigengan-animeface"}),
    ],
)
def test_rows_of_gans_are_chosen_by_their_data(tmp_path, name, only, presets):
    found = catalog.plan(name, scale="workstation", seeds=1, runs=tmp_path, out=tmp_path, only=only)
    assert {config.preset for config in found} == presets


def test_only_rows_that_were_asked_for_are_trained(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(catalog, "launch", lambda configs, *_, **__: asked.extend(configs) or [])
    monkeypatch.setattr(ClassificationTask, "load_data", lambda config, root: None)
    with pytest.raises(FileNotFoundError, match="no trainings"):
        catalog.make("weight-treatments", seeds=2, runs=tmp_path, out=tmp_path, only=["NS iteration", "ow"])
    assert [(config.method.name, config.seed) for config in asked] == [("ow", 0), ("ns", 0), ("ow", 1), ("ns", 1)]
    standings = catalog.status("weight-treatments", seeds=2, runs=tmp_path, out=tmp_path, only="SN")
    assert [standing.name[-8:] for standing in standings] == ["sn-seed0", "sn-seed1"]


@pytest.mark.parametrize("only", ["whitning", "+", ""])
def test_words_of_no_row_are_answered_with_the_rows(tmp_path, only):
    with pytest.raises(
        ValueError, match=r"(?s)No row of cifar10-claims contains .*whitening beats BN: SVD − BN, small"
    ):
        catalog.make("cifar10-claims", seeds=1, runs=tmp_path, out=tmp_path, only=[only])


def test_a_table_without_trainings_has_no_rows_to_choose(tmp_path):
    with pytest.raises(ValueError, match="solver-stress trains nothing"):
        catalog.plan("solver-stress", runs=tmp_path, out=tmp_path, only=["svd"])


def test_figures_do_not_mix_arms_of_one_method(tmp_path):
    """BN with its own schedule and BN with more steps are two arms of one method."""
    longer = Arm("longer", lambda scale, seed: change(_arm("bn").config(scale, seed), {"schedule.epochs": 6}))
    in_figure = []
    table = replace(
        _table(Contrast("claim", "contrast", (Term(1, _arm("bn")), Term(-1, longer)), {"laptop": 2})),
        figures=(FigurePlan("curves", lambda outcomes, rows: in_figure.extend(outcomes), (Method("bn"),)),),
    )
    configs = [arm.config("laptop", seed) for arm in (longer, _arm("bn")) for seed in (0, 1)]
    table.write(tmp_path, Material("laptop", 2, {config: _record(config, 20.0) for config in configs}))
    assert [record.config for record in in_figure[0].records[Method("bn")]] == configs[2:]


# The table of CIFAR-10


def test_all_claims_from_made_up_trainings(tmp_path):
    """NOG is half a point better, BN a point worse; equal steps of all else differ by chance."""
    table = replace(catalog.TABLES["cifar10-claims"], figures=())
    rng = np.random.default_rng(1)
    found = {}
    for config in table.configs("laptop", 10):
        effect = {"bn": 1.0, "nog": -0.5}.get(config.method.name, 0.0)
        found[config] = _record(config, 20 + effect + 0.3 * config.seed + rng.normal(0, 0.05))
    table.write(tmp_path, Material("laptop", 10, found))
    content = json.loads((tmp_path / "table.json").read_text())
    verdicts = {(row["contrast"], row["scale"]): row["verdict"] for row in content["contrasts"]}
    assert verdicts["SVD − BN", "laptop"] == "holds"
    assert verdicts["BN + WI − SVD", "laptop"] == "equivalent within the margin"
    assert verdicts["NOG − SVD", "laptop"] == "holds"
    assert verdicts["NOG + OW − SVD", "laptop"] == "equivalent within the margin"
    assert verdicts["OLR − steps shortened at random as by OLR", "laptop"] == "equivalent within the margin"
    assert len(verdicts) == len(content["contrasts"]) == 37
    seeds = {row["contrast"]: len(row["measures"]["error"]["seeds"]) for row in content["contrasts"]}
    assert seeds["(OW, MOW − SVD) with Taylor − with the exact gradient, ε 1e-5"] == 3
    assert seeds["Stiefel steps of the stem − SVD"] == 5
    assert content["verdict"][0].startswith("These hold, by test error as trained (%): NOG lowers the error")


def test_arms_differ_in_what_they_are_named_after():
    arms = {t.arm.label: t.arm.config("laptop", 0) for c in claims.CONTRASTS for t in c.terms}
    plain, grid = arms["SVD"], arms["MOW, Padé (stand-in at ties), ε 1e-5"]
    assert (grid.method.name, grid.method.solver, grid.model.eps) == ("mow", "released-pade", 1e-5)
    assert arms["SVD, exact, ε 1e-2"] == plain
    olr, short = arms["OLR"].method, arms["steps shortened at random as by OLR"].method
    assert (short.name, short.stem_lr) == ("short", olr.stem_lr)
    assert arms["SVD, stem rate x0.1"].method.stem_lr == pytest.approx(0.1 * olr.stem_lr)
    assert arms["NS, 20 steps"].method.solver == "ns20"
    assert replace(arms["SVD in all layers, groups of 16"].model, whiten_all=None) == plain.model
    assert arms["Muon of the inner layers"].method.nog_of == "update"
    longer, longest = (arms[f"BN with {how} steps"].schedule for how in ("more", "1.55 times the"))
    assert (longer.steps, longer.epochs, longest.steps, longest.epochs) == (1040, 6, 1238, 7)


def test_only_steps_shortened_at_random_decide_whether_olr_acts_through_orthogonality():
    """A rate that is too small loses to OLR whatever OLR acts through."""
    decided = [c for c in claims.CONTRASTS if c.claim == "OLR acts through orthogonality"]
    assert [c.terms[1].arm.config("laptop", 0).method.name for c in decided] == ["short", "short"]
    smaller = [c for c in claims.CONTRASTS if c.claim == "OLR lowers the error more than a smaller rate does"]
    assert [c.label for c in smaller] == ["OLR − SVD, stem rate x0.1", "OLR − SVD, stem rate x0.4"]


def test_the_notes_have_what_steps_of_the_medium_network_cost():
    """The kept trainings of whitening, each against the one of BN with its seed."""
    records = {r.config: r for r in read_kept(RESULTS)}
    contrast = next(c for c in claims.CONTRASTS if c.label == "SVD − BN")
    pairs = [[records[term.arm.config("workstation", seed)] for term in contrast.terms] for seed in range(3)]
    factors = sorted(cpu_seconds(svd) / cpu_seconds(bn) for svd, bn in pairs)
    low, middle, high = (f"{factor:.2f}" for factor in factors)
    notes = " ".join(catalog.TABLES["cifar10-claims"].notes)
    assert f"three pairs of its trainings cost {low}, {middle} and {high} times." in notes


def test_the_first_interaction_is_the_mean_of_the_others():
    first, *others = [c for c in claims.CONTRASTS if c.claim == "an exact gradient makes κ irrelevant"]
    assert len(others) == 8
    mean = Counter()
    for term in (term for contrast in others for term in contrast.terms):
        mean[term.arm.label] += term.weight / len(others)
    assert {term.arm.label: term.weight for term in first.terms} == pytest.approx(dict(mean))


@pytest.mark.parametrize("scale", ["laptop", "workstation"])
def test_commands_train_the_arms(scale, monkeypatch, tmp_path):
    """What the command line makes of a command is the configuration that the table looks for."""
    from orthocond.cli import main

    started = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("orthocond.lab.experiments.train", lambda config, *_, **__: started.append(config) or 0)
    arms = {t.arm.config(scale, 1) for c in claims.CONTRASTS for t in c.terms}
    commands = {command_of(flatten(to_json(config))): config for config in arms}
    several = [c for c in commands if "--short" in c]  # a setting of two values
    for command in [*sorted(commands)[::7], *several]:
        main([*command.split()[1:], "--quiet"])
        assert started.pop() == commands[command]


def test_seconds_of_a_training_are_those_of_all_steps():
    lines = [{"step": 1, "step_cpu_seconds": 9.0}, {"step": 26, "step_cpu_seconds": 0.2}, {"step": 30, "error": 1.0}]
    config = preset("dbn-cifar10-convnet")
    assert cpu_seconds(Record("run", config, lines)) == pytest.approx(9 + 25 * 0.2 + 4 * 0.2)
    assert cpu_seconds(Record("run", config, lines[-1:])) is None


# Rates


def _tried(name, error, *, seed=tuning.SEED, validation=tuning.VALIDATION, etas=None, **method):
    config = change(preset("dbn-cifar10-convnet"), {"seed": seed, "data.validation": validation})
    record = _record(replace(config, method=Method(name, **method)), error)
    if etas is not None:
        for line, eta in zip(record.metrics, etas, strict=False):
            line |= {"eta": eta, "olr_occurrence": 0.75}
    return record


def test_the_rate_with_the_lowest_error_is_chosen():
    found = tuning.choose(
        [
            _tried("svd", 20.0, stem_lr=1.0),
            _tried("svd", 19.0, stem_lr=0.3),
            _tried("svd", 19.0, stem_lr=0.1),
            _tried("svd", 1.0, stem_lr=0.1, seed=0),
            _tried("svd", 1.0, stem_lr=0.1, validation=0),
            _tried("svd", 5.0, stem_lr=0.1, solver="ns"),
            _tried("nog@inner", 18.0, nog_of="update", nog_scale="spectral", scope_lr=0.03),
        ]
    )
    assert found.keys() == {"svd", "ns", "muon"}
    assert found["svd"]["stem_lr"] == 0.3
    assert [t["error"] for t in found["svd"]["tried"]] == [20.0, 19.0, 19.0]
    assert found["muon"]["scope_lr"] == 0.03


def test_random_steps_are_shortened_as_often_and_as_much():
    """Three of four steps are shortened, by 0.1, 0.1 and 0.4 of a rate of 0.3: 0.2 in the mean."""
    found = tuning.choose([_tried("olr", 20.0, stem_lr=0.3, etas=[0.003, 0.003, 0.012, 0.03])])
    assert found["olr"]["short"] == [0.75, 0.2]


def test_chosen_rates_are_those_of_the_kept_records(tmp_path):
    """The file in the package is what the kept trainings say."""
    if (RESULTS / "runs" / "dbn-cifar10-convnet-laptop.jsonl.gz").exists():
        tuning.write_tuning(RESULTS, tmp_path / "tuning.json")
        assert json.loads((tmp_path / "tuning.json").read_text()) == tuning.read_tuning()


def test_rates_come_from_kept_records(tmp_path):
    keep([_tried("svd", 20.0, stem_lr=0.1)], tmp_path)
    assert len(list(read_kept(tmp_path))) == 1
    tuning.write_tuning(tmp_path, tmp_path / "tuning.json")
    assert json.loads((tmp_path / "tuning.json").read_text())["svd"]["stem_lr"] == 0.1
