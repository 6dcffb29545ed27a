import csv
import json
import math
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from orthocond.layers import CovariancePool2d, DecorrelatedBatchNorm1d, DecorrelatedBatchNorm2d
from orthocond.matrix import decompose, solver_failures
from orthocond.matrix.spectra import singular_spectrum, spectrum
from orthocond.monitor import ConditionMonitor, History, PreSVDLayer
from orthocond.monitor.plotting import plot
from orthocond.steps import NearestOrthogonal, OptimalLR, treat
from orthocond.weights import orthogonal, spectral

FACTS = ("rank", "largest", "smallest", "condition", "condition_on_range")


class Net(nn.Module):
    """A stem of rank 18 of 24, whitened, and a covariance pooling head."""

    def __init__(self, groups=1):
        super().__init__()
        self.conv = nn.Conv2d(2, 24, 3, bias=False)
        self.white = DecorrelatedBatchNorm2d(24, groups=groups, eps=1e-4)
        self.reduce = nn.Conv2d(24, 6, 1)
        self.bn = nn.BatchNorm2d(6)
        self.pool = CovariancePool2d()
        self.fc = nn.Linear(21, 3)

    def forward(self, x):
        x = F.relu(self.white(self.conv(x)))
        return self.fc(self.pool(F.relu(self.bn(self.reduce(x)))))


def images(count=6):
    return torch.randn(count, 2, 9, 9).cumsum(-1)


class Inputs(dict):
    """The last input of each SVD layer, by layer."""

    def __init__(self, model):
        super().__init__()
        self.layers = [m for m in model.modules() if isinstance(m, (DecorrelatedBatchNorm2d, CovariancePool2d))]

    def __enter__(self):
        self.handles = [m.register_forward_pre_hook(self.take) for m in self.layers]
        return self

    def take(self, module, args):
        self[module] = args[0].detach()

    def __exit__(self, *_):
        for handle in self.handles:
            handle.remove()


def train(model, steps=3, optimizer=None, batches=None, call=None):
    """Train, and return what the SVD layers got, and weights and gradients as they were before each step."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05)
    batches = batches or [images() for _ in range(steps)]
    seen = []
    for x in batches:
        with Inputs(model) as inputs:
            optimizer.zero_grad()
            (call or model)(x).square().mean().backward()
        weights = {n: (p.detach().clone(), p.grad.clone()) for n, p in model.named_parameters()}
        optimizer.step()
        seen.append((inputs, weights))
    return seen


def covariances(x, per_image=False):
    """By torch.cov, in float64."""
    if per_image:
        return torch.stack([torch.cov(image.flatten(1).double(), correction=0) for image in x])
    return torch.cov(x.movedim(1, 0).flatten(1).double(), correction=0)


def assert_facts(record, expected, prefix="", rel=1e-6):
    for key in FACTS:
        value = getattr(expected, key)
        assert record[prefix + key] == pytest.approx(float(value), rel=rel, nan_ok=True), prefix + key


# Values


def test_numbers_are_those_of_spectrum():
    model = Net()
    with ConditionMonitor(model) as monitor:
        seen = train(model)
    history = monitor.history
    assert [(r["step"], r["layer"]) for r in history] == [(s, n) for s in range(3) for n in ("white", "pool")]
    for step, (inputs, weights) in enumerate(seen):
        record, pooled = history[2 * step : 2 * step + 2]
        expected = spectrum(covariances(inputs[model.white]), eps=1e-4, rank_tol=1e-12)
        assert record["rank"] == 18
        assert record["size"] == 24
        assert_facts(record, expected)
        assert record["pre_svd"] == "conv.weight"
        weight, gradient = weights["conv.weight"]
        assert_facts(record, singular_spectrum(weight.flatten(1)), "weight_")
        assert_facts(record, singular_spectrum(gradient.flatten(1)), "gradient_", rel=1e-5)
        assert pooled["pre_svd"] == "reduce.weight"
        assert pooled["matrices"] == 6
        found = spectrum(covariances(inputs[model.pool], per_image=True), rank_tol=1e-12)
        for key in FACTS:
            each = getattr(found, key).double()
            worst = each.min() if key in ("rank", "smallest") else each.max()
            assert pooled[key] == pytest.approx(float(each.nanmedian()), rel=1e-5)
            assert pooled[f"{key}_worst"] == pytest.approx(float(worst), rel=1e-5)


def test_groups_are_summarized():
    model = Net(groups=4)
    with ConditionMonitor(model, layers=["white"]) as monitor:
        ((inputs, _),) = train(model, steps=1)
    x = inputs[model.white]
    each = torch.stack([spectrum(covariances(x[:, i : i + 6]), eps=1e-4).condition for i in range(0, 24, 6)])
    (record,) = monitor.history
    assert record["matrices"] == 4
    assert record["condition"] == pytest.approx(float(each.median()), rel=1e-6)
    assert record["condition_worst"] == pytest.approx(float(each.max()), rel=1e-6)


def test_at_most_so_many_matrices_evenly_spaced():
    model = Net()
    with ConditionMonitor(model, layers="pool", matrices=4) as monitor:
        ((inputs, _),) = train(model, batches=[images(10)])
    picked = covariances(inputs[model.pool], per_image=True)[::3]
    assert monitor.history[0]["matrices"] == 4
    largest = spectrum(picked).largest.median()
    assert monitor.history[0]["largest"] == pytest.approx(float(largest), rel=1e-5)


def test_gradient_is_that_before_the_nearest_orthogonal_one():
    for order in ("treat first", "monitor first"):
        model = Net()
        nn.init.orthogonal_(model.conv.weight)  # OLR shortens every step from there
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        monitor = ConditionMonitor(model, layers=["white"])
        if order == "monitor first":
            monitor.start()
        handle = treat(model.conv, optimizer, gradient=NearestOrthogonal(), lr=OptimalLR())
        if order == "treat first":
            monitor.start()
        seen = train(model, optimizer=optimizer)
        monitor.stop()
        for record, (_, weights) in zip(monitor.history, seen, strict=True):
            assert_facts(record, singular_spectrum(weights["conv.weight"][1].flatten(1)), "gradient_", rel=1e-5)
        statistics = handle.statistics[0]
        assert [r["eta"] for r in monitor.history] == pytest.approx(statistics.rates)
        assert monitor.history[-1]["olr_occurrence"] == pytest.approx(statistics.occurrence)
        assert statistics.shortened == 3
        assert singular_spectrum(model.conv.weight.grad.flatten(1)).condition == pytest.approx(1, abs=1e-4)


def test_accumulated_gradient_and_all_its_forwards():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with ConditionMonitor(model, layers=["white"]) as monitor:
        for _ in range(3):
            model(images()).square().mean().backward()
        gradient = model.conv.weight.grad.clone()
        optimizer.step()
    (record,) = monitor.history
    assert record["matrices"] == 3
    assert_facts(record, singular_spectrum(gradient.flatten(1)), "gradient_", rel=1e-5)


def test_fused_optimizer_under_a_scaler_shows_unscaled_gradients():
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with ConditionMonitor(model, layers=["white"]) as monitor:
        scaler.scale(model(images()).square().mean()).backward()
        expected = singular_spectrum(model.conv.weight.grad.flatten(1) / 1024)
        scaler.step(optimizer)
    assert monitor.history[0]["gradient_largest"] == pytest.approx(float(expected.largest), rel=1e-5)


@pytest.mark.parametrize("treatment", [orthogonal, spectral])
def test_parametrized_weight_is_the_one_the_layer_uses(treatment):
    model = Net()
    treatment(model.conv)
    buffers = []
    with ConditionMonitor(model, layers=["white"]) as monitor:
        model.conv.register_forward_hook(lambda m, a, o: buffers.append([b.clone() for b in m.buffers()]))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        model(images()).square().mean().backward()
        gradient = model.conv.parametrizations.weight.original.grad.clone()
        optimizer.step()
    (record,) = monitor.history
    assert record["pre_svd"] == "conv.weight"
    assert_facts(record, singular_spectrum(gradient.flatten(1)), "gradient_", rel=1e-5)
    if treatment is orthogonal:
        assert record["weight_condition"] == pytest.approx(1, abs=1e-5)
    else:
        assert record["weight_largest"] == pytest.approx(1, abs=1e-4)
    # Reading the weight moved no power iteration.
    assert all(torch.equal(a, b) for a, b in zip(buffers[-1], model.conv.buffers(), strict=True))


def test_solver_failures_since_the_start(monkeypatch):
    model = Net()
    solver_failures.count = 7
    with ConditionMonitor(model, layers=["white"]) as monitor:
        train(model, steps=1)
        solver_failures.count += 2
        train(model, steps=1)
    assert [r["solver_failures"] for r in monitor.history] == [0, 2]
    assert decompose.solver_failures.count == 9


def test_every_kth_step():
    model = Net()
    with ConditionMonitor(model, every=2, layers=["white"]) as monitor:
        seen = train(model, steps=5)
    assert [r["step"] for r in monitor.history] == [0, 2, 4]
    expected = spectrum(covariances(seen[2][0][model.white]), eps=1e-4)
    assert monitor.history[1]["largest"] == pytest.approx(float(expected.largest), rel=1e-6)


def test_eps_and_plain_layers():
    model = Net()
    with ConditionMonitor(model, layers=[model.bn, "fc"], eps=0.5) as monitor:
        outputs = []
        model.bn.register_forward_hook(lambda m, a, o: outputs.append(o.detach()))
        model.fc.register_forward_hook(lambda m, a, o: outputs.append(o.detach()))
        train(model, steps=1)
    for record, output, source in zip(monitor.history, outputs, ("reduce.weight", "fc.weight"), strict=True):
        assert_facts(record, spectrum(covariances(output), eps=0.5, rank_tol=1e-12), rel=1e-5)
        assert record["pre_svd"] == source


def test_singular_without_ridge_is_infinite():
    model = Net()
    with ConditionMonitor(model, eps=0.0, layers=["white"]) as monitor:
        train(model, steps=1)
    assert monitor.history[0]["condition"] == math.inf
    assert monitor.history[0]["condition_on_range"] < 1e6


# Invariants


def test_training_is_the_same_bit_for_bit():
    torch.manual_seed(0)
    watched, plain = Net(), Net()
    plain.load_state_dict(watched.state_dict())
    batches = [images() for _ in range(3)]
    with ConditionMonitor(watched):
        train(watched, batches=batches)
    train(plain, batches=batches)
    for (name, a), b in zip(watched.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_a_matrix_that_is_not_finite_stops_nothing():
    model = nn.Sequential(nn.Linear(3, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ConditionMonitor(model, layers=["0"], pre_svd={}) as monitor:
        model(torch.full((5, 3), math.nan)).sum().backward()
        optimizer.step()
    assert math.isnan(monitor.history[0]["condition"])
    assert math.isnan(monitor.history[0]["rank"])
    monitor.to_tensorboard(Writer())


def test_records_wait_and_are_settled_in_time(monkeypatch):
    from orthocond.monitor import deferred_spectra

    model = Net()
    with ConditionMonitor(model, layers=["white"]) as monitor:
        train(model)
        assert monitor._history[0]["rank"] is None  # not computed in the step
        monkeypatch.setattr(deferred_spectra, "_LIMIT", 0)
        train(model, steps=1)
        assert monitor._history[0]["rank"] == 18
    assert not monitor._spectra._pending


# Export


def history():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    treat(model.conv, optimizer, lr=OptimalLR())
    with ConditionMonitor(model, eps=0.0) as monitor:
        train(model, optimizer=optimizer)
    return monitor


def test_json_round_trip(tmp_path):
    monitor = history()
    monitor.to_json(tmp_path / "h.json")
    json.loads((tmp_path / "h.json").read_text(), parse_constant=pytest.fail)  # no NaN or Infinity: standard JSON
    assert History.from_json(tmp_path / "h.json") == monitor.history
    (tmp_path / "other.json").write_text("[1]")
    with pytest.raises(ValueError, match="no list of records"):
        History.from_json(tmp_path / "other.json")


def test_csv(tmp_path):
    monitor = history()
    monitor.to_csv(tmp_path / "h.csv")
    with (tmp_path / "h.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(monitor.history) == 6
    assert float(rows[0]["condition"]) == math.inf
    assert float(rows[0]["eta"]) == monitor.history[0]["eta"]
    assert rows[1]["eta"] == ""  # the pooling's weight is not treated


def test_columns():
    found = history().history
    assert found.layers() == ["white", "pool"]
    assert found.columns("white")["rank"] == [18, 18, 18]
    assert len(found.columns()["rank"]) == 6
    with pytest.raises(ValueError, match="no layer 'conv'; it has 'white', 'pool'"):
        found.columns("conv")


class Writer(dict):
    def add_scalar(self, tag, value, step):
        assert not math.isnan(value)
        self[tag, step] = value


def test_tensorboard():
    writer = Writer()
    monitor = history()
    monitor.to_tensorboard(writer)
    assert writer["conditioning/white/rank", 2] == 18
    assert writer["conditioning/white/eta", 1] == monitor.history[2]["eta"]


def test_tensorboard_gets_only_what_is_new():
    model, writer, other = Net(), Writer(), Writer()
    with ConditionMonitor(model, layers=["white"]) as monitor:
        for step in range(3):
            train(model, steps=1)
            monitor.to_tensorboard(writer)
            assert {s for _, s in writer} == {step}
            writer.clear()
        monitor.to_tensorboard(writer)
        assert not writer
        monitor.to_tensorboard(other)  # another writer has nothing yet, nor has another name
        monitor.to_tensorboard(writer, prefix="again")
    assert {s for _, s in other} == {s for _, s in writer} == {0, 1, 2}
    monitor.history.to_tensorboard(whole := Writer())
    assert whole == other


def test_html():
    monitor = history()
    html = monitor.history._repr_html_()
    assert html.count("<tr>") == 3
    assert '<td style="text-align: left; padding: 2px 10px">white</td>' in html
    assert "0 to 2" in html
    assert "http" not in html
    assert "&lt;i&gt;" in History([monitor.history[0] | {"layer": "<i>"}])._repr_html_()
    assert History()._repr_html_() == "<div>No records.</div>"


def test_plot_draws_each_run_on_a_logarithmic_axis(tmp_path):
    pytest.importorskip("matplotlib")
    first, second = history(), history()
    axes = first.plot(
        tmp_path / "f.png", quantity="condition_on_range", layer="white", compare={"a": first, "b": second.history}
    )
    assert (tmp_path / "f.png").stat().st_size > 5000
    assert axes.get_yscale() == "log"
    assert [line.get_label() for line in axes.lines] == ["a", "b"]
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["a", "b"]
    line = list(axes.lines[1].get_ydata())
    assert line == second.history.columns("white")["condition_on_range"]
    alone = first.plot(tmp_path / "g.svg", quantity="rank")
    assert [line.get_label() for line in alone.lines] == ["white", "pool"]
    assert alone.get_yscale() == "linear"
    on_axes = first.plot(alone, quantity="eta", title="Step lengths")
    assert on_axes is alone
    assert on_axes.get_title() == "Step lengths"


def test_plot_leaves_a_gap_where_a_value_is_infinite(tmp_path):
    pytest.importorskip("matplotlib")
    found = history().history
    for record, value in zip(found, (10.0, None, math.inf, None, 20.0, None), strict=True):
        record["condition"] = value
    (line,) = plot(tmp_path / "f.png", compare={"run": found}).lines
    assert list(line.get_xdata()) == [0, 1, 2]
    assert [math.isnan(y) for y in line.get_ydata()] == [False, True, False]


def test_plot_errors(tmp_path, monkeypatch):
    monitor = history()
    with pytest.raises(ValueError, match="finite values of 'condition'; there are none in the 6 records"):
        monitor.plot(tmp_path / "f.png", layer="white")
    with pytest.raises(ValueError, match=r"quantity=...\) needs one of"):
        monitor.plot(tmp_path / "f.png", quantity="kappa")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        monitor.plot(tmp_path / "f.png", quantity="rank")


# Errors


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"every": 0}, ValueError, "every=...\\) needs an integer of at least 1"),
        ({"matrices": 0}, ValueError, "matrices=...\\) needs"),
        ({"eps": -1.0}, ValueError, "eps=...\\) needs"),
        ({"rank_tol": -1.0}, ValueError, "rank_tol=...\\) needs"),
        ({"layers": ["block.conv"]}, ValueError, "none named 'block.conv'. Did you mean 'conv'"),
        ({"layers": ["conb"]}, ValueError, "none named 'conb'. Did you mean 'conv'"),
        ({"layers": [nn.Linear(2, 2)]}, ValueError, "this Linear is not part of it"),
        ({"layers": [3]}, TypeError, "needs a layer or its name; got int"),
        ({"pre_svd": {"conv": "fc"}}, ValueError, "watched: 'white', 'pool'"),
        ({"pre_svd": {"white": "pool"}}, ValueError, "'pool' has none"),
    ],
)
def test_errors(settings, error, text):
    with pytest.raises(error, match=text):
        ConditionMonitor(Net(), **settings)


def test_nothing_to_watch():
    with pytest.raises(ValueError, match=r"no SVD layer .* layers=\['conv1'\]"):
        ConditionMonitor(nn.Sequential(nn.Conv2d(3, 4, 3)))
    with pytest.raises(TypeError, match=r"needs a torch.nn.Module; got function"):
        ConditionMonitor(train)


def test_a_loop_without_optimizer_is_told_to_call_step():
    model = Net()
    with pytest.warns(RuntimeWarning, match=r"recorded nothing. Call monitor.step"), ConditionMonitor(model):
        model(images()).mean().backward()
    with ConditionMonitor(model) as monitor:
        for _ in range(2):
            model(images()).square().mean().backward()
            monitor.step()
    assert [r["step"] for r in monitor.history] == [0, 0, 1, 1]
    assert monitor.history[0]["gradient_rank"] == 18
    with pytest.raises(RuntimeError, match="not running"):
        monitor.step()


def test_ambiguous_weight_is_said():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.white = nn.Linear(3, 4), nn.Linear(3, 4), DecorrelatedBatchNorm1d(4)

        def forward(self, x):
            return self.white(self.a(x) + self.b(x))

    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ConditionMonitor(model) as monitor:
        model(torch.randn(9, 3)).square().mean().backward()
        with pytest.warns(RuntimeWarning, match=r"feed 'white' are (a|b).weight, (a|b).weight.*pre_svd="):
            optimizer.step()
        optimizer.step()
    assert monitor.history[0]["pre_svd"] is None
    with ConditionMonitor(model, pre_svd={"white": "b"}) as monitor:
        model(torch.randn(9, 3)).square().mean().backward()
        optimizer.step()
    assert monitor.history[0]["pre_svd"] == "b.weight"
    found = PreSVDLayer("a", model.a)
    with ConditionMonitor(model, pre_svd={"white": found}) as monitor:
        model(torch.randn(9, 3)).square().mean().backward()
        optimizer.step()
    assert monitor.history[0]["pre_svd"] == "a.weight"
