import itertools
import math

import numpy as np
import pytest
import torch

from orthocond.matrix import polar
from orthocond.steps import NearestOrthogonal, OptimalLR, optimal_lr
from orthocond.steps._quartic import cubic_roots, minimizer, minimizer_by_numbers
from tests.steps_helpers import error, haar

NOG = NearestOrthogonal()
UPDATE = NearestOrthogonal(of="update")
EXACT = OptimalLR()
PAPER = OptimalLR("paper")
SHAPES = {"square": (16, 16), "tall": (24, 9), "wide": (9, 24), "column": (12, 1), "row": (1, 12), "scalar": (1, 1)}

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


@pytest.mark.parametrize(
    "of", [lambda g: NOG.nearest(g), lambda g: NOG.prepare(g.clone())()], ids=["nearest", "prepare"]
)
def test_gradients_of_few_rows_are_computed_in_float64(of):
    g = haar(256, 64, 27).float()  # so even that float32 would do, with ten times this error
    torch.testing.assert_close(of(g).double(), polar(g.double()), atol=3e-8, rtol=0)


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


@pytest.mark.parametrize(
    ("scale", "shape", "expected"),
    [
        (None, (24, 6), 1.0),
        (2.5, (24, 6), 2.5),
        ("spectral", (24, 6), 2.0),
        ("spectral", (6, 24), 1.0),
        ("rms", (25, 4), 1.0),
        ("rms", (4, 25), 1.0),
    ],
)
def test_the_length_of_an_orthogonal_step(scale, shape, expected):
    g = torch.randn(2, *shape, dtype=torch.float64)
    found = NearestOrthogonal(scale=scale).nearest(g)
    torch.testing.assert_close(found, expected * polar(g))
    if scale == "rms":
        assert found[0].square().mean().sqrt() == pytest.approx(0.2)
    if scale is not None:  # the size of the update does not matter then
        before = torch.randn_like(g)
        after = NearestOrthogonal(of="update", scale=scale).nearest_update(before, before + 0.37 * g, 0.1)
        torch.testing.assert_close(after - before, 0.1 * expected * polar(g), atol=1e-8, rtol=1e-8)


# --- values: the optimal learning rate -------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize(
    ("shape", "gain"), [((8, 8), 1.0), ((12, 5), 1.0), ((5, 12), 1.0), ((5, 12), 0.5), ((1, 1), 1.0)]
)
def test_exact_is_the_true_minimizer(weight, direction, shape, gain):
    w = WEIGHTS[weight](*shape)
    d = DIRECTIONS[direction](w)
    # Beyond this length E is above E(0): it is at least (|W - ηD|² / √r - g² √r)².
    reach = float((2 * w.norm() + 2 * gain * math.sqrt(min(shape))) / (d.norm() or 1.0))
    assert_best(optimal_lr(w, d, gain=gain), w, d, torch.linspace(-reach, reach, 1001, dtype=torch.float64), gain)
    for lr, by_tensors in itertools.product((0.01, 1.0, reach), (False, True)):
        with torch.set_grad_enabled(by_tensors):
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
    for by_tensors in (False, True):
        with torch.set_grad_enabled(by_tensors):
            assert EXACT.rate(q, torch.zeros(6, 4), lr=0.3) == 0.3  # no step to shorten


@pytest.mark.parametrize("by_tensors", [False, True])
@pytest.mark.parametrize("excess", [1e-6, 1e-3, 0.01, 0.5, 2.0])
def test_of_two_equal_minima_the_shorter_step(excess, by_tensors):
    q = haar(200, 6, 4)
    with torch.set_grad_enabled(by_tensors):
        rates = OptimalLR(floor=0).rate((1 + excess) * q, q, lr=3 + excess)  # at the end W = -2 Q, before it W = -Q
    torch.testing.assert_close(rates, torch.full_like(rates, excess), rtol=1e-6, atol=1e-9)


def test_the_tensor_path_reads_no_value_on_the_host():
    """Tensors without values: whatever reads one raises."""
    w, d = torch.empty(2, 3, 6, 4, device="meta")
    for form in ("exact", "newton", "paper"):
        assert OptimalLR(form).rate(w, d, 0.1).shape == (3,)
        assert OptimalLR(form).rate(w, d, torch.empty(3, device="meta")).shape == (3,)
        assert optimal_lr(w, d, form=form).shape == (3,)


def test_roots_over_all_scales():
    c = torch.randn(2000, 3, dtype=torch.float64) * 10 ** (torch.rand(2000, 3, dtype=torch.float64) * 12 - 6)
    for (e3, e2, e1), found in zip(c.numpy(), cubic_roots(*c.split(1, -1)).numpy(), strict=True):
        roots = np.roots([4, 3 * e3, 2 * e2, e1])
        largest = np.max(np.abs(roots))
        real = roots[np.abs(roots.imag) < 1e-9 * np.abs(roots)].real
        for root in real:  # of two that nearly coincide half of the digits are lost
            assert np.min(np.abs(found - root)) <= 1e-7 * largest
        lowest, expected = (np.polyval([1, e3, e2, e1, 0], x).min() for x in (found, real))
        assert lowest - expected <= 1e-15 * largest**4


@torch.no_grad()
def test_numbers_and_tensors_agree_over_all_lengths_of_the_direction():
    w, d = torch.randn(2, 5000, 3, 5, dtype=torch.float64)
    w[:1000] = haar(1000, 3, 5)
    e = EXACT.coefficients(w, d * 10 ** (torch.rand(5000, 1, 1, dtype=torch.float64) * 10 - 8))
    low, high = 0.1, 0.9
    ends = torch.tensor([[low], [high]], dtype=torch.float64).expand(2, 5000)
    found, expected = minimizer_by_numbers(e, low, high), minimizer(e, *ends)
    a, b = (e * eta[:, None] ** torch.arange(1, 5) for eta in (found, expected))
    assert ((a.sum(1) - b.sum(1)).abs() <= 1e-13 * (a.abs().sum(1) + b.abs().sum(1))).all()
    assert ((found - expected).abs() <= 1e-7 * expected).all()
    assert ((low * (1 - 1e-12) <= found) & (found <= high * (1 + 1e-12))).all()
    assert ((found > low) & (found < high)).sum() > 250  # not only ends


@torch.no_grad()
def test_rates_where_no_value_can_be_read():
    w, d = torch.randn(2, 4, 3, 5, dtype=torch.float64)
    torch.testing.assert_close(torch.vmap(lambda w, d: EXACT.rate(w, d, 0.1))(w, d), EXACT.rate(w, d, 0.1))


@pytest.mark.parametrize("place", [0, 3])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_numbers_leave_the_step_of_what_is_not_finite(place, value):
    e = torch.ones(4, dtype=torch.float64)
    e[place] = value
    assert minimizer_by_numbers(e, 0.1, 0.9) == 0.9
    assert minimizer_by_numbers(e.new_tensor([1e300, 1.0, 1.0, 1.0]), 0.1, 0.9) == 0.9  # its square is not


@pytest.mark.parametrize("form", ["exact", "newton", "paper"])
@pytest.mark.parametrize(("size", "length"), [(1e80, 1e-80), (1e-80, 1e80), (1e160, 1e160), (1e-160, 1e-160)])
def test_sizes_whose_fourth_powers_overflow(form, size, length):
    """Scaling weight and gain by a and the direction by b scales the step by a / b."""
    w, d = torch.randn(2, 3, 6, 4, dtype=torch.float64)
    gains = ({}, {}) if form == "paper" else ({"gain": 1.5}, {"gain": 1.5 * size})
    small = optimal_lr(w, d, form=form, **gains[0])
    torch.testing.assert_close(optimal_lr(size * w, length * d, form=form, **gains[1]), small * (size / length))
    settings = ({}, {}) if form == "paper" else ({**gains[0], "floor": 0.1}, {**gains[1], "floor": 0.1})
    lr = float(small.abs().amax()) / 2
    rate = OptimalLR(form, **settings[0]).rate(w, d, lr)
    found = OptimalLR(form, **settings[1]).rate(size * w, length * d, lr * (size / length))
    torch.testing.assert_close(found, rate * (size / length))


def test_a_weight_far_below_its_gain():
    w, d = 1e-80 * torch.eye(3, dtype=torch.float64), torch.eye(3, dtype=torch.float64)
    assert float(optimal_lr(w, d)) == pytest.approx(-1)


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


def test_the_paper_minimizes_the_norm_of_the_weight_and_nothing_else():
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


# --- errors ----------------------------------------------------------------------------------------------------------


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
        (lambda: NearestOrthogonal(scale="muon"), "'spectral', 'rms'; got 'muon'"),
        (lambda: NearestOrthogonal(scale=0.0), "finite number above 0; got 0.0"),
        (lambda: NearestOrthogonal("polar-express", rank_tol=0.1), "has no ranks"),
        (lambda: optimal_lr(torch.ones(3, 3), torch.ones(3, 2)), "same shape"),
        (lambda: optimal_lr(torch.ones(3), torch.ones(3)), "same shape"),
        (lambda: optimal_lr(torch.ones(3, 3), torch.ones(3, 3), form="paper", gain=2.0), "no gain"),
    ],
)
def test_settings_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()
