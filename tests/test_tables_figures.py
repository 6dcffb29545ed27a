"""Figures: what is averaged, where labels stand, that every figure is drawn, small, and not empty."""

import itertools
import math
from dataclasses import replace

import pytest
from PIL import Image

from orthocond.lab import catalog as tables
from orthocond.lab.classification import figures
from orthocond.lab.classification.config import Method
from orthocond.lab.experiments import preset
from orthocond.lab.tables import drawing, records
from orthocond.lab.tables.comparison import Outcome
from orthocond.lab.tables.figures import differences
from orthocond.lab.tables.records import Record


def _record(config, steps=8, *, condition=1e3):
    half = steps // 2
    lines = []
    for step in range(steps):
        rate = 0.1 if step < half else 0.01
        line = {"step": 10 * step + 1, "epoch": step // 4, "lr": rate, "condition_on_range": 50.0 + step}
        line["condition"] = condition * (1 + 0.1 * step + 0.05 * config.seed)
        if "olr" in config.method.name:
            line |= {"eta": rate / 2, "olr_occurrence": 0.5}
        lines.append(line)
        if step % 4 == 3:
            lines.append({"step": 10 * step + 2, "epoch": step // 4 + 1, "error": 80.0, "top5_error": 50.0})
            lines[-1]["error"] += config.seed * (len(config.method.name) + (config.method.name != "svd"))
            lines[-1] |= {"best_error": 80.0 - step - config.seed}
    lines[-1]["finished"] = True
    return Record("run", config, lines)


def _outcomes(name, seeds=2, **settings):
    table = tables.TABLES[name]
    found = []
    for experiment in table.experiments:
        trained = {
            row: [_record(experiment.config("laptop", row, seed), **settings) for seed in range(seeds)]
            for row in table.rows
        }
        found.append(Outcome(table, experiment, trained, {"rows": []}))
    return found


# Values


def test_a_curve_is_the_geometric_mean_with_the_range_of_seeds():
    config = preset("dbn-cifar100-resnet50")
    one = Record(
        "a", config, [{"step": 1, "condition": 10.0}, {"step": 2, "condition": 100.0}, {"step": 2, "error": 3.0}]
    )
    two = Record("b", config, [{"step": 1, "condition": 1000.0}, {"step": 2, "condition": math.inf}])
    found = drawing.curve([one, two], "condition", log=True)
    assert found.x == [1, 2]
    assert found.mean == pytest.approx([100.0, 100.0])
    assert found.low == [10.0, 100.0]
    assert found.high == [1000.0, 100.0]
    assert drawing.curve([one, two], "condition", log=False).mean[0] == 505.0
    assert drawing.curve([two], "error", log=False) is None


def test_long_curves_are_medians_of_pieces():
    config = preset("dbn-cifar100-resnet50")
    lines = [{"step": step, "condition": 1e6 if step % 10 == 0 else 5.0} for step in range(1000)]
    found = drawing.curve([Record("a", config, lines)], "condition", log=True)
    assert len(found.x) <= 80
    assert found.mean == pytest.approx([5.0] * len(found.x))
    assert found.x == sorted(found.x)


def test_labels_are_moved_apart_and_no_further():
    assert drawing.spread_out([0.1, 0.5, 0.9], 0.1) == pytest.approx([0.1, 0.5, 0.9])
    places = drawing.spread_out([0.2, 0.2, 0.2, 0.28, 0.9], 0.1)
    assert all(b - a >= 0.1 - 1e-12 for a, b in itertools.pairwise(places))
    assert sum(places[:4]) / 4 == pytest.approx(0.22)
    assert places[4] == 0.9


def test_occurrence_is_that_of_each_rate_of_the_schedule():
    config = replace(preset("dbn-cifar100-resnet50"), method=Method("olr"))
    counts = {10: (0.1, 4), 20: (0.1, 8), 30: (0.01, 9), 40: (0.01, 10)}  # step: rate, steps at which OLR acted so far
    lines = [{"step": s, "lr": lr, "olr_occurrence": count / s} for s, (lr, count) in counts.items()]
    record = Record("a", config, [*lines, {"step": 40, "error": 1.0}])
    assert figures._share(record, 0) == pytest.approx(8 / 20)
    assert figures._share(record, 1) == pytest.approx(2 / 20)
    assert figures._share(record, 2) is None


def test_a_steady_schedule_has_three_stages():
    """It rises for four lines, stays above half of its top for four, and falls for four."""
    rates = [0.2, 0.4, 0.6, 0.8, 1.0, 0.85, 0.7, 0.55, 0.4, 0.25, 0.1, 0.0]
    assert figures._stages(rates) == [0] * 4 + [1] * 4 + [2] * 4
    acted = [10, 20, 30, 40, 40, 40, 45, 50, 50, 50, 50, 51]  # steps at which OLR acted so far, of ten for each line
    lines = [
        {"step": 10 * (i + 1), "lr": lr, "eta": lr / 4, "olr_occurrence": n / (10 * (i + 1))}
        for i, (lr, n) in enumerate(zip(rates, acted, strict=True))
    ]
    record = Record("a", replace(preset("dbn-cifar10-convnet"), method=Method("olr", stem_lr=0.5)), lines)
    assert [figures._share(record, stage) for stage in range(3)] == pytest.approx([1.0, 10 / 40, 1 / 40])
    method = Method("olr", stem_lr=0.5)
    outcome = Outcome(
        tables.TABLES["learning-rate"], tables.TABLES["learning-rate"].experiments[0], {method: [record]}, {}
    )
    (axes,) = figures.learning_rate([outcome], [method]).axes
    assert [text.get_text() for text in axes.texts[:3]] == ["100 %", "25 %", "2 %"]
    assert "in its rise,\nheight and fall" in axes.texts[3].get_text()
    assert list(axes.lines[0].get_ydata()) == pytest.approx([rate / 2 for rate in rates])  # that of the layer


def test_methods_of_one_figure_have_colors_of_their_own():
    for name, table in tables.TABLES.items():
        for plan in getattr(table, "figures", ()):
            if plan.name.startswith(("conditioning", "convergence")):
                methods = {row.name for row in plan.rows or table.rows}
                shared = {} if len(methods) > 8 else {drawing.color(m): m for m in methods}
                assert len(methods) > 8 or len(shared) == len(methods), (name, plan.name)


# Drawing


def test_conditioning_has_both_condition_numbers_and_every_method():
    figure = figures.conditioning(_outcomes("conditioning-weight"), tables.TABLES["conditioning-weight"].rows)
    ridge, on_range = figure.axes
    assert ridge.get_title(loc="left") == "ResNet-50, CIFAR-100, 32x32: κ(P + εI)"
    assert on_range.get_title(loc="left") == "ResNet-50, CIFAR-100, 32x32: κ on the range of P"
    for axes in figure.axes:
        assert axes.get_yscale() == "log"
        assert {text.get_text() for text in axes.texts} == {"SVD", "SN", "OL", "OW", "NS iteration"}
    curve = max((line for line in ridge.lines), key=lambda line: len(line.get_xdata()))
    assert list(curve.get_xdata()) == [10 * step + 1 for step in range(8)]


def test_an_infinite_condition_number_is_said():
    outcomes = _outcomes("conditioning-gcp", condition=math.inf)
    figure = figures.conditioning(outcomes, tables.TABLES["conditioning-gcp"].rows)
    assert "infinite" in figure.axes[0].texts[0].get_text()
    assert len(figure.axes[1].texts) == len(tables.TABLES["conditioning-gcp"].rows)


def test_convergence_is_accuracy_over_epochs():
    figure = figures.convergence(_outcomes("convergence"), tables.TABLES["convergence"].rows)
    assert len(figure.axes) == 3
    line = figure.axes[0].lines[0]
    assert list(line.get_xdata()) == [1, 2]
    assert list(line.get_ydata()) == [23.5, 27.5]  # mean of seeds 0 and 1: errors of 77 and 76, 73 and 72
    assert figure.axes[0].get_ylabel() == "best validation accuracy (%)"


def test_convergence_is_shown_over_seconds_of_the_processor_where_they_are_known():
    outcomes = _outcomes("convergence")
    for row, trained in outcomes[0].records.items():
        for record in trained:
            for line in record.metrics:
                if "lr" in line:
                    line["step_cpu_seconds"] = 0.5 if row.name == "svd" else 0.25
    figure = figures.convergence(outcomes, tables.TABLES["convergence"].rows)
    assert len(figure.axes) == 6
    line = figure.axes[3].lines[0]
    assert list(line.get_xdata()) == [0.5 * 32, 0.5 * 72]  # the epochs end at the steps 32 and 72
    assert list(line.get_ydata()) == [23.5, 27.5]
    assert figure.axes[3].get_xlabel() == "CPU seconds of training steps"
    assert not figure.axes[4].axison


def test_learning_rates_stand_beside_the_schedule():
    figure = figures.learning_rate(_outcomes("learning-rate"), tables.TABLES["learning-rate"].rows)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles[:3] == ["SVD, no OLR", "OLR (exact η)", "NOG + OW + OLR (exact η)"]
    assert titles[4:] == ["OLR (paper's η)", "NOG + OW + OLR (paper's η)"]
    schedule, dots = figure.axes[1].lines
    assert list(schedule.get_ydata()) == [0.1] * 4 + [0.01] * 4
    assert list(dots.get_ydata()) == pytest.approx([0.05] * 4 + [0.005] * 4 + [0.05] * 4 + [0.005] * 4)
    assert [text.get_text() for text in figure.axes[1].texts] == ["50 %", "50 %"]
    assert len(figure.axes[0].lines[1].get_xdata()) == 0


def test_learning_rates_of_several_experiments_are_those_of_the_first():
    outcomes = _outcomes("learning-rate")
    other = replace(outcomes[0], experiment=replace(outcomes[0].experiment, label="another"), records={})
    figure = figures.learning_rate([other, *outcomes], tables.TABLES["learning-rate"].rows)
    assert figure.axes[0].texts[-1].get_text().startswith("ResNet-50, CIFAR-100, 32x32\ngray")


def test_nothing_is_drawn_from_nothing():
    for name, draw in (
        ("gcp", figures.conditioning),
        ("gcp", figures.convergence),
        ("learning-rate", figures.learning_rate),
    ):
        assert draw(_outcomes(name, seeds=0), tables.TABLES[name].rows) is None
    assert figures.learning_rate(_outcomes("conditioning-weight"), tables.TABLES["conditioning-weight"].rows) is None


def test_wide_intervals_do_not_hide_the_others():
    found = [{"mean": 1.0, "low": -30.0, "high": 32.0}, {"mean": -1.5, "low": -2.0, "high": -1.0}]
    rows = [
        {"label": "SVD", "method": {"name": "svd"}, "measures": {"error": {}, "recalibrated": {}}},
        *(
            {
                "label": "SVD + OW",
                "method": {"name": "ow"},
                "measures": {"error": {"difference": d}, "recalibrated": {}},
            }
            for d in found
        ),
    ]
    (outcome,) = _outcomes("weight-treatments")
    figure = differences([replace(outcome, summary={"rows": rows})], ())
    low, high = figure.axes[0].get_xlim()
    assert (low, high) == pytest.approx((-3.75, 3.75))
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["SVD + OW", "SVD + OW"]


@pytest.mark.parametrize("name", ["optimal-lr", "cifar-resnet50"])
def test_files_are_small_and_show_something(tmp_path, name):
    configs = tables.TABLES[name].configs("laptop", 2)
    records.keep([_record(config, 40, condition=10.0 + i) for i, config in enumerate(configs)], tmp_path)
    folder = tables.make(name, seeds=2, runs=tmp_path / "none", out=tmp_path, train=False)
    for plan in tables.TABLES[name].figures:
        for ending in ("png", "svg"):
            path = folder / f"{plan.name}.{ending}"
            assert 3_000 < path.stat().st_size < 150_000, path.name
        with Image.open(folder / f"{plan.name}.png") as image:
            assert min(image.size) > 300
            shades = {pixel for _, pixel in image.convert("RGB").getcolors(1 << 16)}
        assert len(shades) > 10
        for row in plan.rows or tables.TABLES[name].rows:  # no thin line has got the color of another one
            expected = [int(drawing.color(row.name)[i : i + 2], 16) for i in (1, 3, 5)]
            nearest = min(max(abs(a - b) for a, b in zip(shade, expected, strict=True)) for shade in shades)
            assert nearest <= 8 or row.name == "svd" or plan.name == "learning-rate", (plan.name, row.name)
