import copy
import math

import pytest
import torch
from torch import nn

from orthocond.matrix import GramPolar, matrix_view, polar
from orthocond.steps import NearestOrthogonal, OptimalLR, optimal_lr, treat
from tests.steps_helpers import batch, best_rate, error, haar, network, train, train_scaled

NOG = NearestOrthogonal()
UPDATE = NearestOrthogonal(of="update")
EXACT = OptimalLR()
PAPER = OptimalLR("paper")


# --- invariants: treat equals a learning rate set by hand ------------------------------------------------------------

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.3}),
    "momentum": (torch.optim.SGD, {"lr": 0.2, "momentum": 0.9}),
    "dampening": (torch.optim.SGD, {"lr": 0.2, "momentum": 0.9, "dampening": 0.5}),
    "nesterov": (torch.optim.SGD, {"lr": 0.2, "momentum": 0.9, "nesterov": True}),
    "weight-decay": (torch.optim.SGD, {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.1}),
    "maximize": (torch.optim.SGD, {"lr": 0.2, "maximize": True}),
    "adam": (torch.optim.Adam, {"lr": 0.05, "weight_decay": 0.01}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.05, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.3}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.02, "centered": True, "momentum": 0.5, "weight_decay": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}),
}
VARIANTS = {"single": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
UNFUSED = {"rmsprop"}


def by_hand(model, optimizer, weight, x, y, nog, form):
    """One step with gradient and learning rate set by hand; the weight is alone in the last group."""
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    if nog:
        u, _, vh = torch.linalg.svd(weight.grad.flatten(1), full_matrices=False)
        weight.grad = (u @ vh).reshape(weight.shape)
    lr = optimizer.param_groups[-1]["lr"]
    if form == "paper":
        up = optimizer.param_groups[-1].get("maximize", False)  # the step goes along the gradient, not against it
        w, g = weight.detach().flatten(), (-weight.grad if up else weight.grad).flatten()
        eta = float(w @ w * (g @ w) / (w @ w * (g @ g) + 2 * (g @ w) ** 2))
        eta = eta if 0 < eta < lr else lr
    else:
        trial_weight, trial = copy.deepcopy((weight, optimizer))
        trial_weight.grad = weight.grad.clone()
        trial.step()
        direction = (weight - trial_weight).detach() / lr
        eta = best_rate(weight.detach().flatten(1), direction.flatten(1), 0.1 * lr, lr)
    optimizer.param_groups[-1]["lr"] = eta
    optimizer.step()
    optimizer.param_groups[-1]["lr"] = lr
    return eta


@pytest.mark.parametrize(
    ("name", "variant"), [(n, v) for n in OPTIMIZERS for v in VARIANTS if not (v == "fused" and n in UNFUSED)]
)
@pytest.mark.parametrize("form", ["exact", "paper"])
@pytest.mark.parametrize("nog", [False, True])
def test_treat_equals_a_rate_set_by_hand(name, variant, form, nog):
    make, settings = OPTIMIZERS[name]
    model = network()
    model[0].weight.data *= 2
    twin = copy.deepcopy(model)
    optimizer = make(model.parameters(), **settings, **VARIANTS[variant])
    weight = twin[0].weight
    others = [p for p in twin.parameters() if p is not weight]
    twin_optimizer = make([{"params": others}, {"params": [weight]}], **settings, **VARIANTS[variant])
    handle = treat(model[0], optimizer, gradient=NOG if nog else None, lr=OptimalLR(form))
    rates = []
    for _ in range(5):
        x, y = batch()
        train(model, optimizer, [(x, y)])
        rates.append(by_hand(twin, twin_optimizer, weight, x, y, nog, form))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    assert handle.statistics[0].rates == pytest.approx(rates, rel=1e-5)


def test_a_rate_that_is_not_changed_changes_no_bit():
    model, data = network(), [batch() for _ in range(3)]
    twin = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters())
    handle = treat(model[0], optimizer, lr=OptimalLR(floor=1.0))
    assert train(model, optimizer, data) == train(twin, torch.optim.Adam(twin.parameters()), data)
    assert torch.equal(model[0].weight, twin[0].weight)
    assert handle.statistics[0].occurrence == 0


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adam])
def test_the_update_form_makes_the_step_orthogonal_under_any_optimizer(optimizer_class):
    model = network()
    twin = copy.deepcopy(model)
    optimizer = optimizer_class(model.parameters(), lr=0.01, weight_decay=0.1)
    treat(model[0], optimizer, gradient=UPDATE)
    before = model[0].weight.detach().clone()
    data = [batch()]
    train(model, optimizer, data)
    train(twin, optimizer_class(twin.parameters(), lr=0.01, weight_decay=0.1), data)
    step, plain = (m[0].weight.detach() - before for m in (model, twin))
    singular = torch.linalg.svdvals(step.flatten(1))
    torch.testing.assert_close(singular, plain.norm().expand(6) / math.sqrt(6))
    torch.testing.assert_close(step.flatten(1) / singular[0], polar(plain.flatten(1)))
    torch.testing.assert_close(model[0].bias, twin[0].bias, rtol=0, atol=0)


def test_the_update_form_and_the_exact_rate_work_on_one_another():
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    handle = treat(model[0], optimizer, gradient=UPDATE, lr=EXACT)
    before = model[0].weight.detach().clone()
    train(model, optimizer, [batch()])
    step = (model[0].weight.detach() - before).flatten(1)
    rate = handle.statistics[0].rates[0]
    full = step * 0.05 / rate  # the orthogonal update before it was shortened
    assert torch.linalg.cond(full) == pytest.approx(1)
    assert rate == pytest.approx(best_rate(before.flatten(1), -full / 0.05, 0.005, 0.05), rel=1e-5)


MUON = NearestOrthogonal(of="update", scale="spectral")


def test_an_update_of_fixed_length_under_nesterov_momentum_is_muon():
    model = network()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.95, nesterov=True)
    treat([model[0], model[3]], optimizer, gradient=MUON)
    averages = [torch.zeros_like(twin[i].weight.flatten(1)) for i in (0, 3)]
    for x, y in [batch() for _ in range(5)]:
        twin[0].bias.data, twin[3].bias.data = model[0].bias.detach().clone(), model[3].bias.detach().clone()
        train(model, optimizer, [(x, y)])
        twin.zero_grad()
        nn.functional.mse_loss(twin(x), y).backward()
        for weight, average in zip((twin[0].weight, twin[3].weight), averages, strict=True):
            g = weight.grad.flatten(1)
            average.mul_(0.95).add_(g)
            u, _, vh = torch.linalg.svd(g + 0.95 * average, full_matrices=False)
            scale = max(1, g.shape[0] / g.shape[1]) ** 0.5
            weight.data -= 0.02 * scale * (u @ vh).reshape(weight.shape)
    torch.testing.assert_close(model[0].weight, twin[0].weight, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(model[3].weight, twin[3].weight, rtol=1e-7, atol=1e-9)


def test_the_muon_of_torch_makes_nearly_the_same_step():
    """Its five iterations leave singular values between 0.7 and 1.2."""
    steps = []
    start, gradient = torch.randn(24, 12), torch.randn(24, 12)
    for muon in (False, True):
        weight = nn.Parameter(start.clone())
        kwargs = {"lr": 0.1, "momentum": 0.9, "nesterov": True}
        if muon:
            optimizer = torch.optim.Muon([weight], weight_decay=0.0, adjust_lr_fn="original", **kwargs)
        else:
            optimizer = torch.optim.SGD([weight], **kwargs)
            treat(weight, optimizer, gradient=MUON)
        weight.grad = gradient.clone()
        optimizer.step()
        steps.append(weight.detach() - start)
    cosine = (steps[0] * steps[1]).sum() / (steps[0].norm() * steps[1].norm())
    assert cosine > 0.97
    assert steps[1].norm() / steps[0].norm() == pytest.approx(0.95, abs=0.2)


def test_a_schedule_sets_the_fixed_length():
    weight = nn.Parameter(torch.randn(4, 6, dtype=torch.float64))
    optimizer = torch.optim.Adam([weight], lr=0.2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    treat(weight, optimizer, gradient=NearestOrthogonal(of="update", scale=2.0, rank_tol=1e-3))
    for step in range(3):
        before = weight.detach().clone()
        weight.grad = torch.randn_like(weight)
        optimizer.step()
        schedule.step()
        assert torch.linalg.matrix_norm(weight.detach() - before, 2) == pytest.approx(0.4 * 0.5**step)


@pytest.mark.parametrize("nog", [NOG, UPDATE, None])
def test_accumulation_equals_the_big_batch(nog):
    model = network()
    twin = copy.deepcopy(model)
    losses = []
    for m, parts in ((model, 1), (twin, 4)):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)
        treat(m[0], optimizer, gradient=nog, lr=EXACT)
        for _ in range(4):
            x, y = batch(8)
            optimizer.zero_grad()
            for part in range(parts):
                loss = nn.functional.mse_loss(m(x.chunk(parts)[part]), y.chunk(parts)[part]) / parts
                loss.backward()
            optimizer.step()
        losses.append(nn.functional.mse_loss(m(x), y).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    torch.testing.assert_close(model[0].weight, twin[0].weight)


def test_schedulers_see_nothing():
    model, data = network(), [batch() for _ in range(6)]
    treated = torch.optim.SGD(model.parameters(), lr=0.5)
    plain = torch.optim.SGD(network().parameters(), lr=0.5)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.3) for o in (treated, plain)]
    handle = treat(model[0], treated, gradient=NOG, lr=EXACT)
    seen = []
    for step in data:
        seen.append(treated.param_groups[0]["lr"])
        train(model, treated, [step], schedules[0])
        plain.step()
        schedules[1].step()
        assert treated.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
        assert schedules[0].get_last_lr() == schedules[1].get_last_lr()
    statistics = handle.statistics[0]
    assert statistics.shortened > 0
    assert all(0.1 * lr - 1e-12 <= eta <= lr + 1e-12 for lr, eta in zip(seen, statistics.rates, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gradient_along_the_weight_does_not_turn_the_weight_round(dtype):
    weight = nn.Parameter(haar(6, 4).to(dtype))
    optimizer = torch.optim.SGD([weight], lr=6.0)
    treat(weight, optimizer, lr=OptimalLR(floor=0.0))
    for _ in range(50):
        before = haar(6, 4).to(dtype)
        weight.data = 3 * before
        weight.grad = before.clone()
        optimizer.step()
        torch.testing.assert_close(weight.detach(), before)


def test_a_learning_rate_of_zero_moves_nothing():
    for lr in (EXACT, PAPER, OptimalLR("newton")):
        model = network()
        before = model[0].weight.detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        handle = treat(model[0], optimizer, lr=lr)
        train(model, optimizer, [batch()])
        assert torch.equal(model[0].weight, before)
        assert handle.statistics[0].rates == [0.0]


@pytest.mark.parametrize("lr", [EXACT, PAPER])
def test_a_learning_rate_that_is_a_tensor(lr):
    model, data = network(), [batch() for _ in range(3)]
    twin = copy.deepcopy(model)
    for m, rate in ((model, 0.05), (twin, torch.tensor(0.05, dtype=torch.float64))):
        optimizer = torch.optim.Adam(m.parameters(), lr=rate, foreach=False)
        treat(m[0], optimizer, gradient=NOG, lr=lr)
        train(m, optimizer, data)
    torch.testing.assert_close(model[0].weight, twin[0].weight)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("lr", [EXACT, PAPER])
def test_a_gradient_scaler_changes_nothing_and_its_infinite_step_is_skipped(fused, unscale, lr):
    model = network().float()
    twin = copy.deepcopy(model)
    settings = {"lr": 0.1, "momentum": 0.9, "fused": fused}
    optimizer, plain = (torch.optim.SGD(m.parameters(), **settings) for m in (model, twin))
    handle = treat(model[0], optimizer, gradient=NOG, lr=lr)
    twin_handle = treat(twin[0], plain, gradient=NOG, lr=lr)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    train_scaled(scaler, model, optimizer, twin, plain, steps=4, unscale=unscale)
    statistics, expected = handle.statistics[0], twin_handle.statistics[0]
    assert (statistics.steps, statistics.skipped) == (3, 1 if fused else 0)
    assert statistics.rates == pytest.approx(expected.rates, rel=1e-4)


# --- shapes and dtypes -----------------------------------------------------------------------------------------------

LAYERS = {
    "linear": (lambda: nn.Linear(5, 7), (4, 5)),
    "conv1d": (lambda: nn.Conv1d(3, 8, 3), (4, 3, 9)),
    "conv2d": (lambda: nn.Conv2d(3, 8, 3), (4, 3, 5, 5)),
    "conv3d": (lambda: nn.Conv3d(2, 4, 2), (4, 2, 4, 4, 4)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 8, 2), (4, 3, 5, 5)),
    "grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), (4, 4, 5, 5)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), (4, 4, 5, 5)),
    "channels-last": (lambda: nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last), (4, 3, 5, 5)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layer", LAYERS)
def test_every_layer_is_the_matrix_of_matrix_view(layer, dtype):
    make, shape = LAYERS[layer]
    module = make().to(dtype)
    groups = getattr(module, "groups", 1)
    # Too long by another factor in each row, so that the best step is inside the interval and differs by group.
    scale = torch.linspace(1.1, 1.5, module.weight.shape[0], dtype=dtype)
    rows = polar(matrix_view(module.weight.detach(), groups)).reshape(module.weight.shape).transpose(0, -1)
    module.weight.data.copy_((rows * scale).transpose(0, -1))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    handle = treat(module, optimizer, gradient=NOG, lr=EXACT)
    module(torch.randn(shape, dtype=dtype)).square().sum().backward()
    before, gradient = (matrix_view(t.detach().clone(), groups).double() for t in (module.weight, module.weight.grad))
    optimizer.step()
    nearest = polar(gradient.to(dtype)).double()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-7  # alone and in a batch, a matrix may be rounded differently
    torch.testing.assert_close(matrix_view(module.weight.grad, groups).double(), nearest, rtol=0, atol=tolerance)
    # One rate for the layer: it minimizes the sum over its groups.
    rate = handle.statistics[0].rates[0]
    grid = torch.linspace(0.05, 0.5, 2001, dtype=torch.float64)
    total = error(before - grid.reshape(-1, *(1 for _ in before.shape)) * nearest).reshape(2001, -1).sum(1)
    coarse = dtype is torch.bfloat16
    assert 0.06 < rate < 0.49
    assert abs(rate - grid[total.argmin()]) < (0.02 if coarse else 1e-3)
    after = (before - rate * nearest).to(dtype).reshape(module.weight.shape)
    torch.testing.assert_close(module.weight.detach(), after, atol=1e-2 if coarse else 1e-5, rtol=1e-5)
    assert module.weight.stride() == make().weight.stride()


def test_the_paper_takes_a_grouped_weight_as_one_vector():
    module = nn.Conv2d(4, 6, 3, groups=2).double()
    optimizer = torch.optim.SGD(module.parameters(), lr=10.0)
    handle = treat(module, optimizer, lr=PAPER)
    module(torch.randn(4, 4, 5, 5, dtype=torch.float64)).square().sum().backward()
    expected = optimal_lr(module.weight.detach().flatten(1), module.weight.grad.flatten(1), form="paper")
    optimizer.step()
    assert handle.statistics[0].rates == [pytest.approx(float(expected))]


def test_many_weights_of_one_shape_are_one_batch(monkeypatch):
    calls = []
    eigh = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda a: calls.append(tuple(a.shape)) or eigh(a))
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)), nn.Linear(6, 3)).double()  # one attempt, in float64
    twin = copy.deepcopy(model)
    x = torch.randn(10, 6, dtype=torch.float64)
    for m, targets in ((model, [list(model)]), (twin, list(twin))):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        for target in targets:
            treat(target, optimizer, gradient=NOG, lr=EXACT, spectrum_every=0)
        m(x).square().sum().backward()
        optimizer.step()
    assert calls[:2] == [(4, 1, 6, 6), (1, 1, 3, 3)]
    assert len(calls) == 2 + 5
    for a, b in zip(model, twin, strict=True):
        torch.testing.assert_close(a.weight, b.weight)


def test_large_weights_of_one_shape_are_not_copied(monkeypatch):
    """A stack of them would be a copy; the steps are those of each by itself, and each gradient is overwritten."""
    places = []
    prepare = GramPolar.prepare

    def watched(self, g, factor):
        finish = prepare(self, g, factor)
        return lambda: places.append((g.data_ptr(), (found := finish()).data_ptr())) or found

    monkeypatch.setattr(GramPolar, "prepare", watched)
    weights = [nn.Parameter(torch.randn(64, 1024)) for _ in range(3)]
    optimizer = torch.optim.SGD(weights, lr=1.0)
    treat(weights, optimizer, gradient=NOG)
    gradients = [torch.randn(64, 1024) for _ in weights]
    for w, g in zip(weights, gradients, strict=True):
        w.grad = g.clone()
    optimizer.step()
    assert places == [(w.grad.data_ptr(),) * 2 for w in weights]
    for w, g in zip(weights, gradients, strict=True):
        torch.testing.assert_close(w.grad, polar(g), rtol=0, atol=1e-5)


@pytest.mark.parametrize("lr", [EXACT, PAPER, OptimalLR("newton")])
def test_olr_makes_a_step_with_no_value_to_read(lr):
    model = network().to("meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    treat(model[0], optimizer, lr=lr)
    model(batch()[0].to("meta")).sum().backward()
    optimizer.step()
