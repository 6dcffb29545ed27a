"""Tables of GANs from run folders: numbers of the evaluation, the paper's, protocols, figures."""

import json
import math
from dataclasses import replace

import pytest
from gan_helpers import tiny
from lab_helpers import train
from PIL import Image
from scipy import stats

from orthocond.lab import catalog as tables
from orthocond.lab.data import FACTORS
from orthocond.lab.experiments import preset
from orthocond.lab.generation import paper as gan_paper
from orthocond.lab.generation import tables as generation
from orthocond.lab.generation.config import GRAMMAR, GanMethod
from orthocond.lab.generation.figures import (
    effect_matrices,
    predictability_and_truth,
    samples,
    traversals,
    weight_condition,
)
from orthocond.lab.generation.tables import GanExperiment, label
from orthocond.lab.report.tabled import _figures
from orthocond.lab.runs import Run
from orthocond.lab.tables.comparison import Comparison, Fact, FigurePlan, Measure

_VP = {"none": [0.30, 0.32, 0.31], "nog": [0.41, 0.44, 0.42], "hp": [0.29, 0.33, 0.31]}
_SCORES = ("mig", "disentanglement", "completeness", "informativeness", "sap", "modularity")


def _evaluation(config, vp, protocol="fid2k-inception"):
    name = "eigengan" if config.model.name == "eigengan" else "axes"
    count = 3
    effects = [[float(i == j) + 0.1 * len(config.method.name) for j in range(6)] for i in reversed(range(count))]
    measured = {"names": [f"z{i}" for i in range(count)], "vp": {"protocol": "vp2k-difference", "final": vp}}
    measured |= dict.fromkeys(_SCORES, vp / 2) | {"effects": effects}
    values = {"condition": 1 + vp, "directions": {name: measured}, "factors": {"distance": 0.5 - vp}}
    if config.data.source != "sprites" and protocol is not None:
        values["frechet"] = {"protocol": protocol, "value": 100 * (1 - vp), "real": 2000}
    return values


def _run(root, config, vp=0.3, **settings):
    """A run folder as a training of four logged steps leaves it."""
    run = Run.create(root, "run", config)
    for step in range(4):
        last = {"finished": True} if step == 3 else {}
        timing = {"step_seconds": 0.5 if step == 0 else 0.02}
        run.log(10 * step + 1, 0, condition=2.0 + step + config.seed, generator_loss=0.7, timing=timing, **last)
    (run.path / "evaluation.json").write_text(json.dumps(_evaluation(config, vp, **settings)))
    return run


def _config(name, method, seed, scale="laptop"):
    base = preset(name, scale)
    return replace(base, method=replace(base.method, name=method), seed=seed)


def _make(folder, name, **settings):
    return tables.make(name, **{"seeds": 3, "runs": folder / "runs", "out": folder / "out", "train": False} | settings)


def _rows(folder, experiment=0):
    content = json.loads((folder / "table.json").read_text())
    return {row["method"]["name"]: row for row in content["experiments"][experiment]["rows"]}


@pytest.fixture
def without_figures(monkeypatch):
    for table in generation.TABLES:
        monkeypatch.setitem(tables.TABLES, table.name, replace(table, figures=()))


@pytest.fixture
def celeba(tmp_path):
    for method, values in _VP.items():
        for seed, vp in enumerate(values):
            _run(tmp_path / "runs", _config("gan-celeba", method, seed), vp)
    return tmp_path


# Values


def test_numbers_of_the_evaluation_stand_beside_the_papers(celeba, without_figures):
    folder = _make(celeba, "vanilla-gan")
    row = _rows(folder)["nog"]
    vp, fid = row["measures"]["vp"], row["measures"]["fid"]
    assert vp["values"] == pytest.approx([41.0, 44.0, 42.0])
    assert fid["values"] == pytest.approx([59.0, 56.0, 58.0])
    assert (vp["paper"]["mean"], fid["paper"]["mean"]) == (25.33, 29.69)
    low, high = stats.ttest_rel(_VP["nog"], _VP["none"]).confidence_interval()
    assert (vp["difference"]["low"], vp["difference"]["high"]) == pytest.approx((100 * low, 100 * high))
    assert vp["difference"]["verdict"] == fid["difference"]["verdict"] == "better"
    assert vp["paper_difference"] is None  # the paper has no row without treatment
    assert row["facts"]["step_seconds"]["values"] == [0.02] * 3
    assert row["facts"]["step_seconds"]["paper"] == 8
    assert row["facts"]["condition"]["values"] == [5.0, 6.0, 7.0]
    text = (folder / "table.md").read_text()
    assert "## vanilla GAN, CelebA, 32x32\n" in text
    assert "CelebA, 32x32 was measured as directions axes vp: vp2k-difference; frechet: fid2k-inception." in text
    assert "Missing: 39 of 48 trainings" in text


def test_the_condition_table_is_of_the_same_trainings(celeba, without_figures):
    rows = _rows(_make(celeba, "gan-condition"))
    assert rows["nog"]["measures"]["condition"]["values"] == pytest.approx([1.41, 1.44, 1.42])
    assert rows["nog"]["measures"]["condition"]["paper"]["mean"] == 2.28
    assert rows["nog"]["measures"]["condition"]["difference"]["verdict"] == "worse"
    assert rows["none"]["measures"]["condition"]["paper"] is None


def test_sprites_have_scores_and_an_overview(tmp_path, without_figures):
    for seed, (a, b) in enumerate(zip(_VP["none"], _VP["nog"], strict=True)):
        _run(tmp_path / "runs", _config("eigengan-sprites", "ol", seed), a)
        _run(tmp_path / "runs", _config("eigengan-sprites", "nog", seed), b)
    folder = _make(tmp_path, "eigengan-sprites")
    rows = _rows(folder)
    for name in _SCORES:
        assert rows["nog"]["measures"][name]["values"] == pytest.approx([20.5, 22.0, 21.0])
    assert rows["nog"]["measures"]["distance"]["values"] == pytest.approx([0.09, 0.06, 0.08])
    assert rows["ol"]["label"] == "EigenGAN (OL)"
    lines = (folder / "table.md").read_text().splitlines()
    head = next(line for line in lines if line.startswith("| ours; ▲"))
    assert head.count("↑") == 7
    assert head.count("↓") == 2
    assert next(line for line in lines if line.startswith("| NOG |")).startswith("| NOG | 21.17 ± 0.76 ▲ |")


_KINDS = {"axes": 0.2, "sefa": 0.3, "jacobian": 0.35, "joint": 0.5}


def _with_kinds(run, **more):
    """Let the evaluation of a run have four kinds of directions, a chance level and a distance with its floor."""
    file = run.path / "evaluation.json"
    values = json.loads(file.read_text())
    one = values["directions"]["axes"]
    values["directions"] = {
        kind: one | {"disentanglement": level + run.config["seed"] / 100, "energy": 1 - level}
        for kind, level in _KINDS.items()
    }
    values["chance"] = {"rotations": 20, "mean": {"disentanglement": 0.1}, "std": {"disentanglement": 0.01}}
    file.write_text(json.dumps(values | more))


def test_kinds_of_directions_are_measures(tmp_path, without_figures):
    for seed in range(2):
        _with_kinds(_run(tmp_path / "runs", _config("gan-sprites", "none", seed)))
    measures = _rows(_make(tmp_path, "gan-sprites", seeds=2))["none"]["measures"]
    assert list(measures)[:4] == [
        "disentanglement",
        "disentanglement_sefa",
        "disentanglement_jacobian",
        "disentanglement_joint",
    ]
    assert measures["disentanglement_joint"]["values"] == pytest.approx([50.0, 51.0])
    assert measures["energy_joint"]["values"] == pytest.approx([0.5, 0.5])


def test_measures_that_no_training_has_are_left_out(tmp_path, without_figures):
    _run(tmp_path / "runs", _config("gan-sprites", "none", 0))
    folder = _make(tmp_path, "gan-sprites", seeds=1)
    measures = _rows(folder)["none"]["measures"]
    assert "disentanglement" in measures
    assert not [name for name in measures if name.endswith(("_sefa", "_jacobian", "_joint"))]
    assert "joint |" not in (folder / "table.md").read_text()


def test_floors_stand_below_the_table(tmp_path, without_figures):
    near = {"protocol": "fd2k-alexnet", "value": 19.0, "kernel": 0.01, "real": 2000}
    near["floor"] = {"value": 3.04, "kernel": 1e-5, "images": 2000}
    _with_kinds(_run(tmp_path / "runs", _config("gan-celeba", "none", 0, "workstation")), frechet_alexnet=near)
    folder = _make(tmp_path, "vanilla-gan", seeds=1, scale="workstation")
    assert _rows(folder)["none"]["measures"]["fd_alexnet"]["mean"] == 19
    assert _rows(folder)["none"]["measures"]["kid_alexnet"]["mean"] == pytest.approx(10)
    text = (folder / "table.md").read_text()
    floor = "fd2k-alexnet 3.0, kernel distance x 1,000 0.01 (2,000 images each)"
    assert f"vanilla GAN, CelebA, 32x32, real images against other real ones: {floor}." in text


def test_headings_say_what_there_is_at_a_scale():
    experiments = {e.preset: e for table in generation.TABLES for e in table.experiments}
    assert experiments["gan-celeba"].at("paper").label == "vanilla GAN, CelebA, 128x128"
    assert experiments["eigengan-ffhq"].at("workstation").label == "EigenGAN, UTKFace, 32x32"
    for experiment in experiments.values():
        for scale in ("laptop", "workstation", "paper"):
            assert experiment.at(scale).label.count(",") == 2


# Claims


def test_claims_compare_directions_within_and_between_trainings(tmp_path):
    for method, joint in (("none", 0.5), ("orojar", 0.7)):
        for seed in range(3):
            run = _run(tmp_path / "runs", _config("gan-sprites", method, seed, "workstation"))
            _with_kinds(run)
            file = run.path / "evaluation.json"
            values = json.loads(file.read_text())
            values["directions"]["axes"]["disentanglement"] = joint - 0.3 + 0.01 * seed**2
            file.write_text(json.dumps(values))
    folder = _make(tmp_path, "gan-claims", seeds=3)
    content = json.loads((folder / "table.json").read_text())
    rows = {row["contrast"]: row for row in content["contrasts"]}
    row = rows["joint of no treatment − axes of no treatment"]
    expected = [100 * (0.5 + s / 100 - (0.2 + 0.01 * s**2)) for s in range(3)]
    assert row["measures"]["disentanglement"]["values"] == pytest.approx(expected)
    assert row["verdict"] == "holds"  # more is better
    between = rows["joint of no treatment − axes of OroJaR"]
    assert between["measures"]["disentanglement"]["values"] == pytest.approx(
        [100 * (0.5 + s / 100 - (0.4 + 0.01 * s**2)) for s in range(3)]
    )
    assert rows["axes of NOG + OLR (exact η) − rotated of NOG + OLR (exact η)"]["verdict"] == "not trained"
    images = rows["sprites: OroJaR − no treatment"]
    assert images["measure"] == "distance"
    assert images["measures"]["distance"]["values"] == pytest.approx([0, 0, 0])
    assert {row["measure"] for row in content["contrasts"]} == {"disentanglement", "distance"}
    text = (folder / "table.md").read_text()
    assert "DCI disentanglement (%): +29.33" in text
    assert "Holds: significantly on the better side of 0" in text
    assert (folder / "claims.png").is_file()


def test_claims_on_faces_are_judged_by_images_predictability_and_condition(tmp_path):
    for method, distance in (("none", 17.0), ("nog+olr", 17.5), ("stiefel", 40.0)):
        for seed in range(3):
            run = _run(tmp_path / "runs", _config("gan-celeba", method, seed, "workstation"))
            near = {"protocol": "fd2k-alexnet", "value": distance + 0.1 * seed**2 * (method != "none"), "kernel": 0.01}
            _with_kinds(run, frechet_alexnet=near)
    content = json.loads((_make(tmp_path, "gan-faces", seeds=3) / "table.json").read_text())
    rows = {row["contrast"]: row for row in content["contrasts"] if row["measure"] == "fd"}
    near, far = (rows[f"CelebA: {name} − no treatment"] for name in ("NOG + OLR (exact η)", "Stiefel"))
    assert near["measures"]["fd"]["values"] == pytest.approx([0.5, 0.6, 0.9])
    assert (near["verdict"], far["verdict"]) == ("equivalent within the margin", "fails")
    joint = next(r for r in content["contrasts"] if r["contrast"].startswith("CelebA: joint"))
    assert joint["measure"] == "vp"
    assert len(joint["measures"]["vp"]["values"]) == 3
    condition = next(r for r in content["contrasts"] if r["measure"] == "condition")
    assert condition["measures"]["condition"]["values"] == pytest.approx([0, 0, 0])
    eigen = [row for row in content["contrasts"] if row["contrast"].startswith("EigenGAN")]
    assert [row["verdict"] for row in eigen] == ["not trained"] * 5


def test_chance_is_a_side_of_a_contrast(tmp_path):
    for seed in range(2):
        _with_kinds(_run(tmp_path / "runs", _config("gan-sprites", "none", seed, "workstation")))
    content = json.loads((_make(tmp_path, "gan-controls", seeds=2) / "table.json").read_text())
    row = next(r for r in content["contrasts"] if r["claim"] == "Adam prefers the axes to rotated ones")
    assert row["measures"]["disentanglement"]["values"] == pytest.approx([10.0, 11.0])
    assert row["measures"]["vp"]["values"] == []
    sgd = next(a for a in content["arms"] if a["label"] == "axes of no treatment with SGD")
    assert "--schedule.optimizer sgd" in sgd["command"]


def test_rows_have_the_settings_of_the_preset_at_each_scale():
    table = tables.TABLES["vanilla-gan"]
    for scale in ("laptop", "workstation", "paper"):
        configs = table.configs(scale, 1)
        assert {c.preset for c in configs} == {"gan-celeba", "gan-church"}
        for config in configs:
            assert replace(config.method, name="none") == preset(config.preset, scale).method
    assert {row.name for row in tables.TABLES["gan-sprites"].rows} == {*GRAMMAR.names, "stiefel"}
    assert tables.TABLES["eigengan"].rows[0].name == tables.TABLES["eigengan"].baseline == "ol"


@pytest.mark.parametrize("name", ["eigengan", "eigengan-sprites"])
def test_rivals_of_eigengan_keep_its_orthogonality_loss(name):
    rows = [row.parts for row in tables.TABLES[name].rows]
    rivals = [parts for parts in rows if parts.keys() & {"hp", "orojar", "lvp"}]
    assert len(rivals) == 3
    assert all("ol" in parts for parts in rivals)


def test_rows_without_trainings_are_empty_beside_kept_ones(tmp_path, without_figures):
    """Kept trainings of rivals without OL are in no row; those of the other rows still make the table."""
    for method in ("ol", "nog", "hp"):
        _run(tmp_path / "runs", _config("eigengan-animeface", method, 0))
    rows = _rows(_make(tmp_path, "eigengan", seeds=1))
    assert rows["nog"]["measures"]["vp"]["mean"] == pytest.approx(30)
    assert "hp" not in rows
    assert (rows["ol+hp"]["missing"], rows["ol+hp"]["measures"]["vp"]["mean"]) == ([0], None)


def test_every_number_of_the_paper_has_a_row():
    for name, numbers in (
        ("eigengan", (gan_paper.EIGEN_ANIMEFACE, gan_paper.EIGEN_FFHQ)),
        ("vanilla-gan", (gan_paper.CELEBA, gan_paper.CHURCH)),
    ):
        rows = {row.name for row in tables.TABLES[name].rows}
        assert "stiefel" in rows
        for experiment, expected in zip(tables.TABLES[name].experiments, numbers, strict=True):
            assert experiment.numbers == expected
            assert all(set(column) <= rows for column in expected.values())


def test_labels():
    assert label(GanMethod("olr", olr="paper")) == "OLR (paper's η)"
    names = [label(GanMethod(name)) for name in GRAMMAR.names]
    assert len(set(names)) == len(GRAMMAR.names)


# What is missing


def test_a_table_without_fid_says_what_it_needs(tmp_path, without_figures):
    _run(tmp_path / "runs", _config("gan-celeba", "none", 0), protocol=None)
    folder = _make(tmp_path, "vanilla-gan")
    assert _rows(folder)["none"]["measures"]["fid"]["mean"] is None
    assert "CelebA, 32x32: there is no FID. It needs the Inception network" in (folder / "table.md").read_text()


def test_different_protocols_are_a_warning(celeba, without_figures):
    _run(celeba / "runs", _config("gan-celeba", "hp", 0), protocol="fid500-inception")
    text = (_make(celeba, "vanilla-gan") / "table.md").read_text()
    assert "frechet: fid2k-inception, fid500-inception." in text
    assert "Warning: the values of frechet were measured differently" in text


def test_missing_images_are_said_before_anything_is_started(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "launch", lambda *_, **__: pytest.fail("started"))
    with pytest.raises(FileNotFoundError, match="animeface-64"):
        _make(tmp_path, "eigengan", train=True, data_root=str(tmp_path / "nothing"))


# Figures


def _tiny_table(*figures):
    experiment = GanExperiment("Tiny", "gan-sprites", {"gan-sprites": {"laptop": tiny(preset="gan-sprites")}})
    measures, facts = (Measure("vp", "VP (%)", "directions.axes.vp.final"),), (Fact("condition", "κ(W)"),)
    rows = (GanMethod("none"), GanMethod("nog"))
    return Comparison("tiny", "Tiny", "A test.", (experiment,), rows, measures, facts, figures, (), "none", label)


def test_samples_and_traversals_are_of_checkpoints_and_stay_without_them(tmp_path, monkeypatch):
    plans = (("samples", samples), ("traversals", traversals))
    table = _tiny_table(*(FigurePlan(name, draw("gan-sprites"), of_checkpoints=True) for name, draw in plans))
    monkeypatch.setitem(tables.TABLES, "tiny", table)
    for config in table.configs("laptop", 1):
        run = Run.create(tmp_path / "runs", "tiny", config)
        train(config, run)
        (run.path / "evaluation.json").write_text("{}")
    path = _make(tmp_path, "tiny", seeds=1) / "traversals.png"
    with Image.open(path) as image:
        # Two methods of three directions, whose images of 16 pixels are enlarged to 64, and seven steps.
        assert image.height > 2 * 3 * 64
        assert image.width > 7 * 64
    with Image.open(path.with_name("samples.png")) as image:  # two lines of ten, below a heading
        assert 3 < image.width / image.height < 6
        assert len(image.convert("RGB").getcolors(1_000_000)) > 100
    pictures = _figures(path.parent, ["samples", "traversals", "differences"])
    assert [p.caption for p in pictures] == ["Samples", "Traversals"]  # of the report
    before = path.read_bytes()
    # Where only one of the methods has its checkpoint, a new picture would have lost the other one.
    gone = next((tmp_path / "runs").glob("*/checkpoints"))
    gone.parent.rename(tmp_path / "one")
    _make(tmp_path, "tiny", seeds=1)
    assert path.read_bytes() == before
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    text = (_make(tmp_path, "tiny", seeds=1) / "table.md").read_text()
    assert "![traversals](traversals.png)" in text
    assert "![samples](samples.png)" in text
    assert path.read_bytes() == before


def test_effects_are_sorted_by_factor_and_condition_is_drawn(tmp_path, monkeypatch):
    plans = (FigurePlan("effects", effect_matrices("axes")), FigurePlan("weight-condition", weight_condition))
    table = _tiny_table(*plans)
    monkeypatch.setitem(tables.TABLES, "tiny", table)
    for config in table.configs("laptop", 2):
        _run(tmp_path / "runs", config)
    figures = {}
    monkeypatch.setattr(
        "orthocond.lab.tables.comparison.save", lambda figure, stem: figures.update({stem.name: figure})
    )
    _make(tmp_path, "tiny", seeds=2)
    assert [axes.get_title(loc="left") for axes in figures["effects"].axes] == ["no treatment", "NOG"]
    axes = figures["effects"].axes[0]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["z2", "z1", "z0"]  # z2 changes the first factor
    assert [text.get_text() for text in axes.get_xticklabels()] == list(FACTORS)
    assert [text.get_text() for text in axes.texts][:2] == ["1.40", "0.40"]
    (panel,) = figures["weight-condition"].axes
    assert {text.get_text() for text in panel.texts} == {"no treatment", "NOG"}
    curve = max(panel.lines, key=lambda line: len(line.get_xdata()))
    assert list(curve.get_ydata()) == pytest.approx([math.sqrt((2 + i) * (3 + i)) for i in range(4)])


def test_predictability_is_drawn_against_truth(tmp_path, monkeypatch):
    table = _tiny_table(FigurePlan("predictability", predictability_and_truth("axes")))
    monkeypatch.setitem(tables.TABLES, "tiny", table)
    found = {"none": [], "nog": []}
    for config in table.configs("laptop", 2):
        vp = 0.2 + 0.1 * config.seed + 0.05 * (config.method.name == "nog")
        run = _run(tmp_path / "runs", config, vp)
        values = json.loads((run.path / "evaluation.json").read_text())
        values["directions"]["axes"]["disentanglement"] = 1 - vp**2
        (run.path / "evaluation.json").write_text(json.dumps(values))
        found[config.method.name].append((100 * vp, 100 * (1 - vp**2)))
    figures = {}
    monkeypatch.setattr(
        "orthocond.lab.tables.comparison.save", lambda figure, stem: figures.update({stem.name: figure})
    )
    _make(tmp_path, "tiny", seeds=2)
    (axes,) = figures["predictability"].axes
    assert axes.get_title(loc="left").endswith("4 trainings: rank correlation -1.00")
    for line, points in zip(axes.lines, found.values(), strict=True):
        assert line.get_xydata().tolist() == [pytest.approx(point) for point in points]


def test_many_measures_are_drawn_in_lines(tmp_path):
    for seed, (a, b) in enumerate(zip(_VP["none"], _VP["nog"], strict=True)):
        _run(tmp_path / "runs", _config("gan-sprites", "none", seed), a)
        _run(tmp_path / "runs", _config("gan-sprites", "nog", seed), b)
    folder = _make(tmp_path, "gan-sprites")
    names = {"differences.png", "weight-condition.png", "effects.png", "predictability.png"}
    assert {p.name for p in folder.glob("*.png")} == names
    with Image.open(folder / "differences.png") as image:
        assert image.width < 130 * 18
