import copy
import gc
import math
import pickle
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode

from orthocond.matrix import matrix_view, polar
from orthocond.steps import NearestOrthogonal, OptimalLR, optimal_lr, treat

NOG = NearestOrthogonal()
UPDATE = NearestOrthogonal(of="update")
EXACT = OptimalLR()
PAPER = OptimalLR("paper")
SHAPES = {"square": (16, 16), "tall": (24, 9), "wide": (9, 24), "column": (12, 1), "row": (1, 12), "scalar": (1, 1)}


def haar(*shape):
    """Orthonormal columns (rows, if wide), uniformly distributed."""
    m, n = shape[-2:]
    q, r = torch.linalg.qr(torch.randn(*shape[:-2], max(m, n), min(m, n), dtype=torch.float64))
    q = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    return q if m >= n else q.mT


def error(w, gain=1.0):
    """||W Wᵀ - gain² I||² of the smaller Gram matrix, as written in the paper."""
    gram = w @ w.mT if w.shape[-2] <= w.shape[-1] else w.mT @ w
    return (gram - gain**2 * torch.eye(gram.shape[-1], dtype=w.dtype)).square().sum((-2, -1))


def best_rate(w, d, low, high, gain=1.0):
    """The minimiser by another way: the quartic through five values, the roots of its derivative by NumPy."""
    nodes = torch.linspace(-1, 1, 5, dtype=torch.float64) * high
    values = torch.stack([error(w - t * d, gain) for t in nodes])
    quartic = np.polynomial.Polynomial.fit(nodes.numpy(), values.numpy(), 4)
    roots = [r.real for r in quartic.deriv().roots() if abs(r.imag) < 1e-6 * abs(r) and low < r.real < high]
    return min((low, high, *roots), key=quartic)


WEIGHTS = {
    "random": lambda m, n: torch.randn(m, n, dtype=torch.float64) / math.sqrt(n),
    "orthogonal": lambda m, n: haar(m, n),
    "near-orthogonal": lambda m, n: haar(m, n) + 0.01 * torch.randn(m, n, dtype=torch.float64),
    "over-scaled": lambda m, n: 3 * haar(m, n),
    "under-scaled": lambda m, n: 0.3 * haar(m, n),
    "rank-1": lambda m, n: torch.ones(m, n, dtype=torch.float64) / n,
    "zero": lambda m, n: torch.zeros(m, n, dtype=torch.float64),
}
DIRECTIONS = {
    "random": lambda w: torch.randn_like(w),
    "orthogonal": lambda w: haar(*w.shape),
    "weight": lambda w: w.clone(),
    "against": lambda w: -0.3 * w,
    "penalty": lambda w: w @ w.mT @ w - w,
    "tiny": lambda w: 1e-7 * torch.randn_like(w),
    "huge": lambda w: 1e7 * torch.randn_like(w),
}


# --- values: the nearest orthogonal matrix ---------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["gram", "svd", "newton-schulz", "polar-express"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_nearest_is_u_vt(shape, method):
    g = torch.randn(3, *shape, dtype=torch.float64)
    u, s, vh = torch.linalg.svd(g, full_matrices=False)
    g = u @ ((s + 1)[..., None] * vh)  # condition numbers that the iterations reach too
    torch.testing.assert_close(NearestOrthogonal(method).nearest(g), u @ vh, atol=1e-6, rtol=0)


@pytest.mark.parametrize("shape", [(16, 16), (24, 9), (9, 24)])
def test_nearest_beats_random_orthogonal_matrices(shape):
    g = torch.randn(shape, dtype=torch.float64)
    nearest = torch.dist(g, NOG.nearest(g))
    others = (haar(1000, *shape) - g).flatten(1).norm(dim=1)
    assert nearest < others.min()
    near = NOG.nearest(NOG.nearest(g) + 1e-3 * torch.randn(1000, *shape, dtype=torch.float64))
    assert nearest <= (near - g).flatten(1).norm(dim=1).min()


def test_a_zero_gradient_stays_zero_and_noise_is_not_promoted():
    assert NOG.nearest(torch.zeros(4, 6)).abs().max() == 0
    rank_one = torch.outer(torch.randn(8), torch.randn(5))
    assert NOG.nearest(rank_one).norm() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("method", ["gram", "polar-express"])
def test_the_update_form_keeps_the_norm_of_the_update(method):
    before = torch.randn(1, 8, 5)
    after = before + 0.01 * torch.randn(1, 8, 5)
    update = NearestOrthogonal(method, of="update").nearest_update(before, after) - before
    singular = torch.linalg.svdvals(update)
    torch.testing.assert_close(singular, (after - before).norm().expand(1, 5) / math.sqrt(5), rtol=1e-3, atol=0)


def test_the_update_form_does_not_promote_rounding_of_the_weight():
    before = torch.randn(1, 32, 16)
    step = 1e-4 * torch.outer(torch.randn(32), torch.randn(16))  # of rank 1, before it is added to the weight
    update = UPDATE.nearest_update(before, before + step) - before
    singular = torch.linalg.svdvals(update[0])
    assert torch.linalg.svdvals(polar(before + step - before)[0])[-1] > 0.99  # what a tolerance for gradients would do
    assert singular[1] < 1e-2 * singular[0]
    torch.testing.assert_close(update[0], step, atol=1e-6, rtol=0)


def test_the_update_form_leaves_a_weight_that_does_not_move():
    before = torch.randn(2, 4, 3)
    assert torch.equal(UPDATE.nearest_update(before, before.clone()), before)


# --- values: the optimal learning rate -------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize(
    ("shape", "gain"), [((8, 8), 1.0), ((12, 5), 1.0), ((5, 12), 1.0), ((5, 12), 0.5), ((1, 1), 1.0)]
)
def test_exact_is_the_true_minimiser(weight, direction, shape, gain):
    w = WEIGHTS[weight](*shape)
    d = DIRECTIONS[direction](w)
    # Beyond this length E is above E(0): it is at least (|W - ηD|² / √r - g² √r)².
    reach = float((2 * w.norm() + 2 * gain * math.sqrt(min(shape))) / (d.norm() or 1.0))
    assert_best(optimal_lr(w, d, gain=gain), w, d, torch.linspace(-reach, reach, 1001, dtype=torch.float64), gain)
    for lr in (0.01, 1.0, reach):
        eta = OptimalLR(gain=gain, floor=0.1).rate(w, d, lr)
        grid = torch.linspace(0.1, 1, 1001, dtype=torch.float64) * lr
        assert grid[0] * (1 - 1e-12) <= eta <= lr * (1 + 1e-12)
        assert_best(eta, w, d, grid, gain)


def assert_best(eta, w, d, grid, gain):
    """No step of the grid is better than eta, but for rounding."""
    reached, least = error(w - eta * d, gain), error(w - grid[:, None, None] * d, gain).min()
    assert reached <= least + 1e-12 * (least + error(w, gain) + 1)


def test_the_step_that_needs_no_search():
    q = haar(6, 4)
    torch.testing.assert_close(optimal_lr(3 * q, q), torch.tensor(2.0, dtype=torch.float64))  # of 2 and 4 the shorter
    torch.testing.assert_close(optimal_lr(3 * q, -q), torch.tensor(-2.0, dtype=torch.float64))
    torch.testing.assert_close(optimal_lr(3 * q, q, gain=2.5), torch.tensor(0.5, dtype=torch.float64))
    assert optimal_lr(q, torch.randn(6, 4)).abs() < 1e-12  # an orthogonal weight should stay
    assert optimal_lr(q, torch.zeros(6, 4)) == 0
    assert EXACT.rate(q, torch.zeros(6, 4), lr=0.3) == 0.3  # no step to shorten


def test_roots_over_all_scales():
    from orthocond.steps.learning_rate import _cubic_roots

    c = torch.randn(2000, 3, dtype=torch.float64) * 10 ** (torch.rand(2000, 3, dtype=torch.float64) * 12 - 6)
    for (a2, a1, a0), found in zip(c.numpy(), _cubic_roots(*c.unbind(-1)).numpy(), strict=True):
        for root in np.roots([1, a2, a1, a0]):
            if abs(root.imag) < 1e-9 * abs(root):
                assert np.min(np.abs(found - root.real)) <= 1e-6 * abs(root)


def test_newton_is_one_newton_step_of_the_objective():
    for shape in SHAPES.values():
        w, d = 1.5 * torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
        eta = torch.zeros((), dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(error(w - eta * d), eta, create_graph=True)
        (curvature,) = torch.autograd.grad(slope, eta)
        expected = -slope / curvature if curvature > 0 else torch.tensor(math.inf, dtype=torch.float64)
        torch.testing.assert_close(optimal_lr(w, d, form="newton"), expected.detach())
    assert OptimalLR("newton").rate(0.1 * torch.eye(3), torch.eye(3), lr=0.2) == 0.2  # not convex at 0


def test_paper_is_its_equation():
    w, g = torch.randn(5, 7, dtype=torch.float64), torch.randn(5, 7, dtype=torch.float64)
    vec_w, vec_l = w.flatten(), g.flatten()
    expected = (
        vec_w @ vec_w * (vec_l @ vec_w) / (vec_w @ vec_w * (vec_l @ vec_l) + 2 * (vec_l @ vec_w) * (vec_l @ vec_w))
    )
    torch.testing.assert_close(optimal_lr(w, g, form="paper"), expected)


@pytest.mark.parametrize(("sign", "guard", "expected"), [(1, True, "eta"), (-1, True, "lr"), (-1, False, "eta")])
def test_the_switch_of_the_paper(sign, guard, expected):
    w = torch.randn(5, 7)
    g = sign * (w + 0.1 * torch.randn(5, 7))
    eta = optimal_lr(w, g, form="paper")
    assert eta * sign > 0
    small, large = abs(float(eta)) / 2, abs(float(eta)) * 2
    setting = OptimalLR("paper", guard=guard)
    assert setting.rate(w, g, large) == (eta if expected == "eta" else large)
    assert setting.rate(w, g, small) == (small if sign > 0 or guard else eta)
    assert PAPER.rate(w, torch.zeros(5, 7), 0.1) == pytest.approx(0.1)


@pytest.mark.parametrize("shape", [(6, 9), (9, 6)])
def test_own_scale_makes_the_choice_independent_of_scale(shape):
    w, d = torch.randn(shape), torch.randn(shape)
    own = OptimalLR(gain=None, floor=0)
    torch.testing.assert_close(own.rate(w, d, 0.1), own.rate(50 * w, 50 * d, 0.1), rtol=1e-5, atol=0)
    w = w.double()
    gain = float(w.norm() / math.sqrt(6))
    torch.testing.assert_close(optimal_lr(w, d, gain=None), optimal_lr(w, d, gain=gain))


# --- values: what is wrong with the paper's equation -----------------------------------------------------------------


def test_the_paper_minimises_the_norm_of_the_weight_and_nothing_else():
    w, g = torch.randn(8, 5, dtype=torch.float64), torch.randn(8, 5, dtype=torch.float64)
    eta = torch.zeros((), dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad((w - eta * g).square().sum() ** 2, eta, create_graph=True)
    (curvature,) = torch.autograd.grad(slope, eta)
    torch.testing.assert_close(optimal_lr(w, g, form="paper"), (-slope / curvature).detach())


def test_the_bound_that_holds_for_any_weight():
    w, g = torch.randn(2000, 4, 4, dtype=torch.float64), torch.randn(2000, 4, 4, dtype=torch.float64)
    g = g + 3 * torch.rand(2000, 1, 1, dtype=torch.float64) * w
    ratio = optimal_lr(w, g, form="paper").abs() * g.flatten(1).norm(dim=1) / w.flatten(1).norm(dim=1)
    assert ratio.max() <= 1 / math.sqrt(8)
    assert ratio.max() > 0.353


@pytest.mark.parametrize("n", [4, 16, 64])
def test_proposition_1_fails_in_every_second_case(n):
    count = 1000
    w, g = haar(count, n, n), haar(count, n, n)
    eta = optimal_lr(w, g, form="paper")
    lower, upper = 1 / (n**2 + 2), n**2 / (n**2 + 2)
    assert 0.45 < (eta < lower).double().mean() < 0.65  # "lower bounded by 1 / (N² + 2)"
    assert 0.4 < (eta < 0).double().mean() < 0.6  # not even positive
    inner = (w * g).sum((-2, -1))
    assert (inner < 1).double().mean() > 0.8  # the step of the proof that fails: <W, G> >= 1
    assert eta.max() <= 1 / math.sqrt(8) < upper  # "upper bounded by N² / (N² + 2)" is true and far from tight
    assert optimal_lr(w[0], w[0], form="paper") == pytest.approx(1 / 3)
    assert optimal_lr(w[0], -w[0], form="paper") == pytest.approx(-1 / 3)


def test_an_orthogonal_weight_gets_worse_with_the_paper_and_not_with_the_exact_form():
    w, g = haar(200, 64, 27), haar(200, 64, 27)
    paper = optimal_lr(w, g, form="paper")[:, None, None]
    assert (error(w - paper * g) > 1e-6 * paper.squeeze() ** 2).all()
    assert optimal_lr(w, g).abs().max() < 1e-10


def test_an_under_scaled_weight_gets_the_wrong_sign_from_the_paper():
    w = 0.5 * haar(64, 64)
    assert optimal_lr(w, 0.1 * w, form="paper") > 0  # shrinks a weight that has to grow
    assert optimal_lr(w, 0.1 * w) == pytest.approx(-10)


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


def network():
    return nn.Sequential(nn.Conv2d(2, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(54, 3)).double()


def batch(size=8):
    return torch.randn(size, 2, 5, 5, dtype=torch.float64), torch.randn(size, 3, dtype=torch.float64)


def train(model, optimizer, data, scheduler=None):
    """Train with plain loops; the losses."""
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def by_hand(model, optimizer, weight, x, y, nog, form):
    """One step with gradient and learning rate set by hand; the weight is alone in the last group."""
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    if nog:
        u, _, vh = torch.linalg.svd(weight.grad.flatten(1), full_matrices=False)
        weight.grad = (u @ vh).reshape(weight.shape)
    lr = optimizer.param_groups[-1]["lr"]
    if form == "paper":
        w, g = weight.detach().flatten(), weight.grad.flatten()
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
    for step in range(4):
        x, y = (t.float() for t in batch())
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y) * (math.inf if step == 1 else 1.0)
        before = model[0].weight.detach().clone()
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if step == 1:
            assert torch.equal(model[0].weight, before)
        else:
            train(twin, plain, [(x, y)])
    torch.testing.assert_close(model[0].weight, twin[0].weight, rtol=1e-5, atol=1e-6)
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
    torch.testing.assert_close(matrix_view(module.weight.grad, groups).double(), nearest)
    # One rate for the layer: it minimises the sum over its groups.
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
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)), nn.Linear(6, 3))
    twin = copy.deepcopy(model)
    x = torch.randn(10, 6)
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


class Reads(TorchDispatchMode):
    """Counts the values that the host reads from a device."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({"lr": EXACT}, 0), ({"lr": PAPER}, 0), ({"lr": OptimalLR("newton")}, 0), ({"gradient": NOG}, 2)],
)
def test_the_host_reads_two_flags_for_nog_and_nothing_for_olr(settings, expected):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    treat(model[0], optimizer, **settings)
    model(batch()[0]).sum().backward()
    with Reads() as reads:
        optimizer.step()
    assert reads.count <= expected


# --- errors ----------------------------------------------------------------------------------------------------------


def treated(**settings):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, treat(model[0], optimizer, **(settings or {"gradient": NOG}))


@pytest.mark.parametrize("call", [lambda o, c: o.step(c), lambda o, c: o.step(closure=c)])
def test_a_closure_is_refused(call):
    _, optimizer, _ = treated()
    with pytest.raises(RuntimeError, match=r"no closure.*backward"):
        call(optimizer, lambda: 1.0)


@pytest.mark.parametrize(
    ("target", "kind", "message"),
    [
        (lambda m: [], ValueError, "at least one weight"),
        (lambda m: m, ValueError, "Sequential has none"),
        (lambda m: m[0].bias, ValueError, "at least two dimensions"),
        (lambda m: nn.BatchNorm2d(3), ValueError, "at least two dimensions"),
        (lambda m: m.parameters(), ValueError, "at least two dimensions"),
        (lambda m: nn.LazyLinear(3), RuntimeError, "run one batch through the LazyLinear.weight first"),
        (lambda m: nn.Linear(3, 3), ValueError, "does not belong to the optimizer"),
        (lambda m: m[0].weight.flatten(1), ValueError, "computed tensor"),
        (lambda m: ["0.weight"], TypeError, "modules or parameters; got str"),
        (lambda m: 0, TypeError, "modules or parameters; got int"),
        (lambda m: [m[0], m[0].weight], RuntimeError, "two treatments of its gradient"),
        (lambda m: m[0].requires_grad_(False), ValueError, "frozen"),
        (lambda m: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), ValueError, "several parameters"),
    ],
)
def test_targets_that_cannot_be_treated(target, kind, message):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(kind, match=message):
        treat(target(model), optimizer, gradient=NOG)
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({}, ValueError, "something to do"),
        ({"gradient": NearestOrthogonal}, TypeError, r"Add parentheses: NearestOrthogonal\(\)"),
        ({"gradient": EXACT}, TypeError, r"treat\(gradient=...\) needs a setting such as NearestOrthogonal"),
        ({"lr": 0.1}, TypeError, r"OptimalLR\(\); got 0.1"),
        ({"gradient": UPDATE, "lr": PAPER}, ValueError, "along the gradient"),
        ({"lr": EXACT, "history": 0}, ValueError, "at least 1"),
        ({"lr": EXACT, "spectrum_every": -1}, ValueError, "at least 0"),
    ],
)
def test_settings_that_make_no_sense(settings, kind, message):
    model = network()
    with pytest.raises(kind, match=message):
        treat(model[0], torch.optim.SGD(model.parameters(), lr=0.1), **settings)


def test_not_an_optimizer():
    model = network()
    with pytest.raises(TypeError, match=r"torch.optim.Optimizer; got Sequential"):
        treat(model[0], model, gradient=NOG)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OptimalLR("best"), "'exact', 'newton', 'paper'; got 'best'"),
        (lambda: OptimalLR(gain=0.0), "positive number"),
        (lambda: OptimalLR(floor=1.5), r"in \[0, 1\]; got 1.5"),
        (lambda: OptimalLR("paper", gain=2.0), "no gain or floor"),
        (lambda: OptimalLR("paper", floor=0.2), "no gain or floor"),
        (lambda: OptimalLR("newton", guard=False), "form='paper'"),
        (lambda: NearestOrthogonal("qr"), "'gram', 'svd'"),
        (lambda: NearestOrthogonal(of="weight"), "'gradient', 'update'"),
        (lambda: NearestOrthogonal(rank_tol=-1.0), "at least 0"),
        (lambda: NearestOrthogonal("polar-express", rank_tol=0.1), "sees no ranks"),
        (lambda: optimal_lr(torch.ones(3, 3), torch.ones(3, 2)), "same shape"),
        (lambda: optimal_lr(torch.ones(3), torch.ones(3)), "same shape"),
        (lambda: optimal_lr(torch.ones(3, 3), torch.ones(3, 3), form="paper", gain=2.0), "no gain"),
    ],
)
def test_settings_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_two_treatments_of_one_kind_are_refused_and_two_kinds_are_not():
    model, optimizer, handle = treated()
    with pytest.raises(RuntimeError, match=r"two treatments of its gradient; remove\(\)"):
        treat(model[0].weight, optimizer, gradient=NOG)
    treat(model[0], optimizer, lr=EXACT)
    treat(model[3], optimizer, gradient=NOG)
    handle.remove()
    treat(model[0], optimizer, gradient=NOG)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_an_error_and_nothing_moves(bad):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    treat([model[3], model[0]], optimizer, gradient=NOG, lr=EXACT)
    model(batch()[0]).sum().backward()
    model[0].weight.grad[0, 0, 0, 0] = bad
    before = copy.deepcopy(model.state_dict())
    gradient = model[3].weight.grad.clone()
    with pytest.raises(ValueError, match=r"Conv2d.weight \(6, 2, 3, 3\) holds NaN or infinity"):
        optimizer.step()
    assert torch.equal(model[3].weight.grad, gradient)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    train(model, optimizer, [batch()])


def test_a_sparse_gradient_is_an_error():
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    treat(embedding, optimizer, gradient=NOG)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(TypeError, match=r"dense gradients.*sparse=False"):
        optimizer.step()


def test_a_weight_that_never_gets_a_gradient_is_said_once():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = treat([model[0], model[3]], optimizer, gradient=NOG, lr=EXACT)
    model[3](torch.randn(2, 54, dtype=torch.float64)).sum().backward()
    with pytest.warns(RuntimeWarning, match=r"Conv2d.weight \(6, 2, 3, 3\) has no gradient"):
        optimizer.step()
    optimizer.step()
    unused, used = handle.statistics
    assert (unused.steps, unused.without_gradient) == (0, 2)
    assert (used.steps, used.without_gradient) == (2, 0)
    assert math.isnan(unused.occurrence)


# --- life cycle ------------------------------------------------------------------------------------------------------


def test_remove_takes_everything_back():
    model, data = network(), [batch() for _ in range(4)]
    twin = copy.deepcopy(model)
    optimizer, plain = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, twin))
    with treat(model[0], optimizer, gradient=NOG, lr=EXACT) as handle:
        pass
    assert train(model, optimizer, data) == train(twin, plain, data)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert repr(handle).startswith("Treatment of Conv2d.weight (6, 2, 3, 3) under SGD, 0 steps, removed:")
    handle.remove()


def test_statistics():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    handle = treat([model[0], model[3].weight], optimizer, gradient=NOG, lr=EXACT, history=3, spectrum_every=2)
    spectra = []
    for _ in range(7):
        optimizer.zero_grad()
        model(batch()[0]).square().mean().backward()
        spectra.append(torch.linalg.svdvals(model[0].weight.grad.flatten(1)))
        optimizer.step()
    first, second = handle.statistics
    assert (first.name, second.name) == ("Conv2d.weight (6, 2, 3, 3)", "Parameter (3, 54)")
    assert first.parameter is model[0].weight
    assert (first.steps, first.skipped, len(first.rates)) == (7, 0, 3)
    assert first.occurrence == first.shortened / 7 > 0
    assert list(first.spectra) == [2, 4, 6]
    for step, values in first.spectra.items():
        torch.testing.assert_close(values.squeeze(0), spectra[step])
    assert "2 weights under SGD, 7 steps" in repr(handle)


def test_the_raw_parameter_of_a_parametrised_weight_is_treated():
    layer = parametrizations.spectral_norm(nn.Linear(6, 4))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    handle = treat(layer, optimizer, gradient=NOG)
    layer(torch.randn(9, 6)).square().sum().backward()
    raw = layer.parametrizations.weight.original
    expected = raw.detach() - 0.1 * polar(raw.grad)
    optimizer.step()
    torch.testing.assert_close(raw.detach(), expected)
    assert handle.statistics[0].name == "Linear.parametrizations.weight.original (4, 6)"


def test_training_continues_from_a_checkpoint():
    data = [batch() for _ in range(6)]

    def fresh():
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        return model, optimizer, treat(model[0], optimizer, gradient=NOG, lr=EXACT)

    model, optimizer, _ = fresh()
    train(model, optimizer, data[:3])
    saved = pickle.dumps((model.state_dict(), optimizer.state_dict()))
    losses = train(model, optimizer, data[3:])
    again, again_optimizer, handle = fresh()
    weights, state = pickle.loads(saved)
    again.load_state_dict(weights)
    again_optimizer.load_state_dict(state)
    assert train(again, again_optimizer, data[3:]) == losses
    assert handle.statistics[0].steps == 3


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["deepcopy", "pickle"]
)
def test_a_copy_of_the_optimizer_is_not_treated_and_can_be(clone):
    data = [batch() for _ in range(4)]
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    treat(model[0], optimizer, gradient=NOG, lr=EXACT)
    train(model, optimizer, data[:2])
    twin, twin_optimizer = clone((model, optimizer))
    treat(twin[0], twin_optimizer, gradient=NOG, lr=EXACT)
    assert train(model, optimizer, data[2:]) == train(twin, twin_optimizer, data[2:])


def test_nothing_is_kept_alive():
    model, optimizer, handle = treated(gradient=NOG, lr=EXACT)
    train(model, optimizer, [batch()])
    alive = weakref.ref(optimizer), weakref.ref(model)
    del model, optimizer, handle
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


def test_no_copy_of_the_weight_is_kept_between_steps():
    model, optimizer, handle = treated(gradient=NOG, lr=EXACT)
    train(model, optimizer, [batch()])
    assert all(w.before.numel() == 0 for w in handle._weights)


class Wrapped(torch.optim.Optimizer):
    """As training frameworks wrap optimizers: an Optimizer without state of its own."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, closure=None):
        self.optimizer.step(closure)


class Nested(torch.optim.SGD):
    """Its step calls that of the base class, so torch calls all hooks twice."""

    def step(self, closure=None):
        return super().step(closure)


def test_wrapped_and_nested_optimizers():
    data = [batch() for _ in range(3)]
    models = [network()]
    models += [copy.deepcopy(models[0]) for _ in range(2)]
    plain, inner, nested = (
        kind(m.parameters(), lr=0.1) for kind, m in zip((torch.optim.SGD, torch.optim.SGD, Nested), models, strict=True)
    )
    handles = [
        treat(m[0], o, gradient=NOG, lr=EXACT) for m, o in zip(models, (plain, Wrapped(inner), nested), strict=True)
    ]
    train(models[0], plain, data)
    for model, optimizer, handle in zip(models[1:], (inner, nested), handles[1:], strict=True):
        train(model, optimizer, data)
        torch.testing.assert_close(model[0].weight, models[0][0].weight)
        assert handle.statistics[0].steps == 3
        torch.testing.assert_close(handle.statistics[0].spectra, handles[0].statistics[0].spectra)


def test_a_group_replaced_by_load_state_dict_is_followed():
    model, optimizer, handle = treated(lr=OptimalLR(floor=1.0))
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["lr"] = 0.025
    optimizer.load_state_dict(state)
    train(model, optimizer, [batch()])
    assert handle.statistics[0].rates == [0.025]


# --- compile ---------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor imports torch.jit
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_model_has_the_same_losses(backend):
    model, data = network(), [batch() for _ in range(4)]
    twin = copy.deepcopy(model)
    losses = []
    for m, call in ((model, model), (twin, torch.compile(twin, backend=backend))):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)
        treat(m[0], optimizer, gradient=NOG, lr=EXACT)
        losses.append(train(call, optimizer, data))
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
