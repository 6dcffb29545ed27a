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
from orthocond.lab.tables.comparison import Measure, Outcome
from orthocond.lab.tables.figures import differences, verdicts
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
            if plan.name.startswith(("conditioning", "convergence", "weight-condition")):
                methods = {row.name for row in plan.rows or table.rows}
                shared = {drawing.color(m): m for m in methods}
                many = len(methods) > 8 and plan.name != "weight-condition"
                assert many or len(shared) == len(methods), (name, plan.name)


# Drawing


def test_conditioning_has_both_condition_numbers_and_every_method():
    figure = figures.conditioning(_outcomes("conditioning-weight"), tables.TABLES["conditioning-weight"].rows)
    ridge, on_range = figure.axes
    assert [axes.get_ylabel() for axes in (ridge, on_range)] == ["κ(P + εI)", "κ on the range of P"]
    for axes in figure.axes:
        assert axes.get_title(loc="left") == "ResNet-50, CIFAR-100, 32x32"
        assert axes.get_yscale() == "log"
        assert {text.get_text() for text in axes.texts} == {"SVD", "SN", "OL", "OW", "NS iteration"}
    curve = max((line for line in ridge.lines), key=lambda line: len(line.get_xdata()))
    assert list(curve.get_xdata()) == [10 * step + 1 for step in range(8)]


def _inches(figure, artist):
    """Left, bottom, right and top of a text in a figure, in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure.draw_without_rendering()  # which puts the names of axes and the headings in their places
    box = artist.get_window_extent(FigureCanvasAgg(figure).get_renderer())
    return [value / figure.dpi for value in box.extents]


def test_labels_of_a_narrow_axis_are_as_small_as_others_and_leave_room_for_its_name():
    """Below a decade matplotlib labels the ticks between powers of ten, with wide numbers."""
    outcomes = _outcomes("conditioning-weight")
    figure = figures.conditioning(outcomes, tables.TABLES["conditioning-weight"].rows)
    for axes in figure.axes:
        small = [text for text in axes.get_yticklabels(minor=True) if text.get_text()]
        assert small
        assert {text.get_size() for text in small} == {axes.get_yticklabels()[0].get_size()}
        left, _, right, _ = _inches(figure, axes.yaxis.label)
        assert left > 0
        assert right < min(_inches(figure, text)[0] for text in small)


def test_a_name_stands_at_the_end_of_its_line():
    """One line ends in the middle of the panel, two at its right border, at the same height."""
    _, ((axes,),) = drawing.panels(1, 1, ["long"])
    axes.plot([0, 4], [0, 1])
    axes.plot([0, 8], [0, 2])
    ends = [(4, 1.0, "short", "#000000"), (8, 2.0, "long", "#E69F00"), (8, 2.0, "longer", "#0072B2")]
    drawing.label_ends(axes, ends)
    places = {text.get_text(): text.get_position() for text in axes.texts}
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    x, y = (4 - left) / (right - left), (1 - low) / (high - low)
    assert x < places["short"][0] < x + 0.05
    assert y < places["short"][1] < y + 0.05
    assert places["long"][0] == places["longer"][0] > 1
    assert abs(places["long"][1] - places["longer"][1]) > 0.04
    corner = (8 - left) / (right - left), (2 - low) / (high - low)
    assert sorted(tuple(line.get_xydata()[0]) for line in axes.lines[2:]) == [
        pytest.approx(p) for p in ((x, y), corner, corner)
    ]


def test_a_name_without_room_at_its_end_stands_beyond_the_border():
    _, ((axes,),) = drawing.panels(1, 1, [])
    axes.plot([0, 8], [0, 2])
    drawing.label_ends(axes, [(5, 1.0, "a name that is longer than what is left", "#000000")])
    assert axes.texts[0].get_position()[0] > 1


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
    assert figure.axes[0].get_ylabel() == "best accuracy so far on test images (%)"
    assert figure.axes[0].get_xlabel() == "epoch"


@pytest.mark.parametrize("error", [100.0, 75.0])
def test_accuracies_that_are_all_equal_are_drawn(error):
    outcomes = _outcomes("convergence")
    for line in [line for o in outcomes for trained in o.records.values() for r in trained for line in r.metrics]:
        line |= {"best_error": error} if "best_error" in line else {}
    axes = figures.convergence(outcomes, tables.TABLES["convergence"].rows).axes[0]
    low, high = axes.get_ylim()
    assert low < 100 - error < high


def test_epochs_are_whole_numbers():
    outcomes = _outcomes("convergence", steps=80)
    figure = figures.convergence(outcomes, tables.TABLES["convergence"].rows)
    assert len(figure.axes[0].lines[0].get_xdata()) == 20
    assert all(tick == int(tick) for tick in figure.axes[0].get_xticks())


def test_experiments_without_trainings_have_no_panels():
    trained = _outcomes("cifar-resnet50")
    trained[0] = replace(trained[0], records={row: [] for row in trained[0].records})
    rows = tables.TABLES["cifar-resnet50"].rows
    for draw, panels in ((figures.conditioning, 2), (figures.convergence, 1)):
        headings = [axes.get_title(loc="left") for axes in draw(trained, rows).axes]
        assert headings == ["ResNet-50, CIFAR-100, 32x32"] * panels


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
    assert figure.axes[3].get_xlabel() == "CPU seconds of training steps, as trained"
    assert figure.axes[3].get_ylabel() == "best accuracy so far on test images (%)"
    names = {text.get_text(): text.get_position()[0] for text in figure.axes[3].texts}
    assert names["NOG"] < 0.6  # it takes half the time
    assert names["SVD"] > 1
    assert not figure.axes[4].axison


def test_learning_rates_stand_beside_the_schedule():
    figure = figures.learning_rate(_outcomes("learning-rate"), tables.TABLES["learning-rate"].rows)
    titles = [axes.get_title(loc="left").splitlines() for axes in figure.axes]
    assert [found[0] for found in titles[:3]] == ["SVD, no OLR", "OLR (exact η)", "NOG + OW + OLR (exact η)"]
    assert [found[0] for found in titles[4:]] == ["OLR (paper's η)", "NOG + OW + OLR (paper's η)"]
    assert {found[1] for found in titles if found} == {"ResNet-50, CIFAR-100, 32x32"}
    assert figure.axes[0].texts[-1].get_text().startswith("gray: the learning rate of the stem\ndots")
    assert max(_inches(figure, axes._left_title)[3] for axes in figure.axes) < figure.get_figheight()
    schedule, dots = figure.axes[1].lines
    assert list(schedule.get_ydata()) == [0.1] * 4 + [0.01] * 4
    assert list(dots.get_ydata()) == pytest.approx([0.05] * 4 + [0.005] * 4 + [0.05] * 4 + [0.005] * 4)
    assert [text.get_text() for text in figure.axes[1].texts] == ["50 %", "50 %"]
    assert len(figure.axes[0].lines[1].get_xdata()) == 0


def test_learning_rates_of_several_experiments_are_those_of_the_first():
    outcomes = _outcomes("learning-rate")
    other = replace(outcomes[0], experiment=replace(outcomes[0].experiment, label="another"), records={})
    figure = figures.learning_rate([other, *outcomes], tables.TABLES["learning-rate"].rows)
    assert figure.axes[0].get_title(loc="left") == "SVD, no OLR\nResNet-50, CIFAR-100, 32x32"


def test_nothing_is_drawn_from_nothing():
    for name, draw in (
        ("gcp", figures.conditioning),
        ("gcp", figures.convergence),
        ("learning-rate", figures.learning_rate),
    ):
        assert draw(_outcomes(name, seeds=0), tables.TABLES[name].rows) is None
    assert figures.learning_rate(_outcomes("conditioning-weight"), tables.TABLES["conditioning-weight"].rows) is None


def _differences(label, found, paper=None):
    """The figure of one row with these differences, of two measures."""
    cells = {name: {"difference": found, "paper_difference": paper} for name in ("error", "recalibrated")}
    rows = [
        {"label": "SVD", "method": {"name": "svd"}, "measures": {"error": {}, "recalibrated": {}}},
        {"label": "SVD + OW", "method": {"name": "ow"}, "measures": cells},
    ]
    (outcome,) = _outcomes("weight-treatments", seeds=0)
    experiment = replace(outcome.experiment, label=label)
    return differences([replace(outcome, experiment=experiment, summary={"rows": rows})], ())


_LONG = "small ResNet, covariance pooling, Tiny-ImageNet-20, 64x64"


@pytest.mark.parametrize("label", ["plain ConvNet, CIFAR-100, 32x32", _LONG])
def test_headings_of_differences_fit_their_panel(label):
    figure = _differences(label, {"mean": 1.0, "low": 0.5, "high": 1.5})
    assert "".join(figure.axes[1].get_title(loc="left").split()) == f"{label}validation error, refreshed".replace(
        " ", ""
    )
    assert "Tiny-\n" not in figure.axes[1].get_title(loc="left")
    for axes in figure.axes:
        left, _, right, top = _inches(figure, axes._left_title)
        assert right - left < 3.4 + 0.25
        assert right < figure.get_figwidth()
        assert top < figure.get_figheight()


def test_one_seed_has_no_interval_and_is_not_significant():
    """The paper has an interval, which its dot is said to have."""
    paper = {"mean": -0.5, "low": -1.0, "high": 0.0}
    for found, several in (
        ({"mean": 1.0, "low": None, "high": None}, False),
        ({"mean": 1.0, "low": 0, "high": 2}, True),
    ):
        axes = _differences("small", found, paper).axes[0]
        words = [text.get_text() for text in axes.get_legend().get_texts()]
        assert ("95 % interval" in axes.get_xlabel()) == several
        assert ("one seed" in axes.get_xlabel()) != several
        assert words == (["ours, significant", "ours", "paper"] if several else ["ours", "paper, with its interval"])


def _verdicts(*intervals, missing=0):
    """The figure of contrasts with these intervals, and of some that are not trained."""
    rows = [
        {"contrast": "A − B", "setting": "small (net)", "margin": None, "verdict": "cannot tell"}
        | {"measures": {"error": {"seeds": [0] * (1 + (low is not None)), "difference": found}}}
        for low, high in intervals
        for found in [{"mean": 0.5, "low": low, "high": high}]
    ]
    gap = {"seeds": [], "difference": None}
    rows += [rows[0] | {"verdict": "not trained", "measures": {"error": gap}} for _ in range(missing)]
    figure = verdicts(rows, Measure("error", "Error (%)", "error"))
    assert _inches(figure, figure.axes[0].xaxis.label)[1] > 0
    return figure


def test_arrows_and_missing_contrasts_are_explained():
    first, *notes = _verdicts((0, 1), (0, 1), (-50, 51), missing=2).axes[0].get_xlabel().splitlines()
    assert first == "error (%): difference with its 95 % interval; left is better"
    assert notes == ["arrows: the interval goes beyond the axis", "2 contrasts are not trained yet and not shown"]
    assert _verdicts((0, 1), missing=1).axes[0].get_xlabel().endswith("1 contrast is not trained yet and not shown")
    axes = _verdicts((0, 1), (0, 1)).axes[0]
    assert axes.get_xlabel() == first
    assert "filled: significant" in axes.get_title(loc="left")


def test_contrasts_of_one_seed_have_no_intervals():
    axes = _verdicts((None, None)).axes[0]
    assert axes.get_xlabel() == "error (%): difference, one seed; left is better"
    assert axes.get_title(loc="left") == "small (net)"


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
