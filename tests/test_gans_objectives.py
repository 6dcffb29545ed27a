"""Objectives, gradient penalties and moving averages: values, gradients, shapes and dtypes, errors, life cycle."""

import copy
import math
from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F

from orthocond.gans import (
    EMA,
    Hinge,
    LazyR1,
    LeastSquares,
    NonSaturating,
    SimpleDiscriminator,
    SimpleGenerator,
    Wasserstein,
    gradient_penalty,
    r1,
    r1_weight,
    r2,
)
from orthocond.weights import orthogonal

REAL, FAKE = torch.tensor([2.0, -1.0, 0.5]).double(), torch.tensor([-3.0, 0.0]).double()
OBJECTIVES = [Hinge(), Hinge(saturating=True), LeastSquares(), NonSaturating(), Wasserstein()]


def log1pexp(x):
    return math.log1p(math.exp(x))


# objectives: values


@pytest.mark.parametrize(
    ("objective", "discriminator", "generator"),
    [
        (Hinge(), (0 + 2 + 0.5) / 3 + (0 + 1) / 2, 1.5),
        (Hinge(saturating=True), (0 + 2 + 0.5) / 3 + (0 + 1) / 2, (4 + 1) / 2),
        (LeastSquares(), (1 + 4 + 0.25) / 6 + 9 / 4, (16 + 1) / 4),
        (Wasserstein(), -1.5 - 0.5, 1.5),
        (
            NonSaturating(),
            (log1pexp(-2) + log1pexp(1) + log1pexp(-0.5)) / 3 + (log1pexp(-3) + log1pexp(0)) / 2,
            (log1pexp(3) + log1pexp(0)) / 2,
        ),
    ],
)
def test_objectives_equal_their_definitions(objective, discriminator, generator):
    assert objective.discriminator(REAL, FAKE).item() == pytest.approx(discriminator, rel=1e-12)
    assert objective.generator(FAKE).item() == pytest.approx(generator, rel=1e-12)


def test_non_saturating_is_cross_entropy():
    expected = F.binary_cross_entropy_with_logits(REAL, torch.ones(3).double())
    expected += F.binary_cross_entropy_with_logits(FAKE, torch.zeros(2).double())
    torch.testing.assert_close(NonSaturating().discriminator(REAL, FAKE), expected)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_directions_of_descent(objective):
    """The discriminator raises real and lowers fake logits; the generator raises fake ones."""
    real, fake = torch.zeros(3, requires_grad=True), torch.full((2,), 0.1, requires_grad=True)
    for_real, for_fake = torch.autograd.grad(objective.discriminator(real, fake), (real, fake))
    (for_generator,) = torch.autograd.grad(objective.generator(fake), fake)
    assert (for_real < 0).all()
    assert (for_fake > 0).all()
    assert (for_generator < 0).all()
    assert objective == copy.copy(objective)


def test_saturating_hinge_stops_at_the_margin():
    fake = torch.tensor([1.5], requires_grad=True)
    assert torch.autograd.grad(Hinge(saturating=True).generator(fake), fake)[0] == 0
    assert torch.autograd.grad(Hinge().generator(fake), fake)[0] == -1


# gradient penalties: values


def quadratic(seed=0, n=12):
    """d(x) = xᵀ A x / 2 + bᵀ x, with gradient A x + b."""
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(n, n, dtype=torch.float64, generator=g), torch.randn(n, dtype=torch.float64, generator=g)
    a = a + a.mT
    return a, b, lambda x: ((x.flatten(1) @ a) * x.flatten(1)).sum(1) / 2 + x.flatten(1) @ b


def images(n=5, seed=1):
    return torch.randn(n, 3, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("penalty", [r1, r2])
def test_r1_and_r2_of_a_quadratic(penalty):
    a, b, d = quadratic()
    x = images()
    expected = (x.flatten(1) @ a + b).square().sum(1).mean()
    torch.testing.assert_close(penalty(d, x).detach(), expected)
    with torch.no_grad():
        value = penalty(d, x)
    torch.testing.assert_close(value, expected)
    assert not value.requires_grad


@pytest.mark.parametrize("center", [0.0, 1.0, 2.5])
def test_gradient_penalty_of_a_linear_discriminator(center):
    b = torch.randn(12, dtype=torch.float64)
    value = gradient_penalty(lambda x: x.flatten(1) @ b, images(), images(seed=2), center=center)
    torch.testing.assert_close(value.detach(), (b.norm() - center).square())


@pytest.mark.parametrize("center", [0.0, 1.0])
def test_gradient_penalty_is_taken_between_the_images(center):
    a, b, d = quadratic()
    real, fake = images(), images(seed=2)
    t = torch.rand(5, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    norms = ((t * real.flatten(1) + (1 - t) * fake.flatten(1)) @ a + b).norm(dim=1)
    value = gradient_penalty(d, real, fake, center=center, rng=torch.Generator().manual_seed(3))
    torch.testing.assert_close(value.detach(), (norms - center).square().mean())
    state = torch.get_rng_state()
    for given in (t, t.flatten(), t[:, :, None, None].float()):
        torch.testing.assert_close(gradient_penalty(d, real, fake, center=center, t=given), value, rtol=1e-6, atol=0)
    assert torch.equal(torch.get_rng_state(), state)  # nothing is drawn


def test_lazy_r1_means_the_same_at_every_interval():
    _, _, d = quadratic()
    x = images()
    full = 0.5 * 48 * r1(d, x)
    for interval in (1, 4, 16):
        lazy = LazyR1(0.5, interval)
        total = sum(lazy(d, x, step) for step in range(48))
        torch.testing.assert_close(total, full)
        assert sum(lazy.factor(step) > 0 for step in range(48)) == 48 // interval
    assert LazyR1(10, 16, scaled=False).factor(32) == 10
    assert LazyR1(10, 16).factor(32) == 160


def test_weight_of_r1_follows_resolution_and_batch():
    assert r1_weight(32, 16) == pytest.approx(0.0128)
    assert r1_weight(64, 16) == pytest.approx(4 * r1_weight(32, 16))
    assert r1_weight(64, 64) == pytest.approx(r1_weight(32, 16))


def test_lazy_r1_does_no_work_between():
    def never(x):
        raise AssertionError

    assert LazyR1(1.0, 4)(never, images(), 3) == 0


# gradient penalties: gradients


PENALTIES = {
    "r1": lambda d, x: r1(d, x),
    "r2": lambda d, x: r2(d, x),
    "one": lambda d, x: gradient_penalty(d, x, -x, rng=torch.Generator().manual_seed(0)),
    "zero": lambda d, x: gradient_penalty(d, x, -x, center=0, rng=torch.Generator().manual_seed(0)),
}


@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_are_twice_differentiable(name):
    x = images(2)
    w = torch.randn(4, 12, dtype=torch.float64, requires_grad=True)
    v = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def value(w, v):
        return PENALTIES[name](lambda x: (x.flatten(1) @ w.mT).tanh() @ v, x)

    assert gradcheck(value, (w, v))
    assert gradgradcheck(value, (w, v))


@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_reach_the_parameters_of_a_network(name):
    d = SimpleDiscriminator(8, 4, norm=False)
    x = torch.randn(3, 3, 8, 8, requires_grad=True)
    PENALTIES[name](d, x).backward()
    assert d.net[0].weight.grad.abs().sum() > 0
    assert x.grad is None


def test_gradient_penalty_at_a_flat_discriminator_has_no_nan():
    w = torch.zeros(12, dtype=torch.float64, requires_grad=True)
    value = gradient_penalty(lambda x: x.flatten(1) @ w, images(), -images())
    value.backward()
    assert value == 1
    assert w.grad.isfinite().all()


# errors


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: r1(lambda x: x, images()), ValueError, "r1 needs one logit per image; 5 images gave"),
        (lambda: r2(lambda x: x.sum(), [1]), TypeError, "torch.Tensor"),
        (lambda: gradient_penalty(lambda x: x, images(5), images(4)), ValueError, "as many fake images"),
        (lambda: gradient_penalty(lambda x: x, images(), images(), center=-1), ValueError, "at least 0"),
        (lambda: gradient_penalty(lambda x: x, images(5), images(5), t=torch.rand(4)), ValueError, "one t per pair, 5"),
        (
            lambda: gradient_penalty(lambda x: x, images(), images(), t=torch.rand(5), rng=torch.Generator()),
            ValueError,
            "got both",
        ),
        (lambda: r1_weight(0, 16), ValueError, "size"),
        (lambda: r1_weight(32, 0), ValueError, "batch_size"),
        (lambda: LazyR1(interval=0), ValueError, "at least 1"),
        (lambda: LazyR1(weight=math.nan), ValueError, "finite"),
        (lambda: EMA(nn.Linear(1, 1)), ValueError, "got none"),
        (lambda: EMA(nn.Linear(1, 1), decay=0.9, half_life=10), ValueError, "got both"),
        (lambda: EMA(m := nn.Linear(1, 1), decay=0.9).load_state_dict(m.state_dict()), ValueError, "got 'bias', 'we"),
        (lambda: EMA(nn.Linear(1, 1), decay=1.0), ValueError, "below 1"),
        (lambda: EMA(nn.Linear(1, 1), half_life=0), ValueError, "above 0"),
        (lambda: EMA(nn.Linear(1, 1), half_life=9).update(nn.Linear(1, 1)), ValueError, "needs images="),
        (lambda: EMA(nn.Linear(1, 1), decay=0.9).update(nn.Linear(1, 1), images=3), ValueError, "fixed decay"),
        (lambda: EMA(nn.Linear(1, 1), decay=0.9).update(nn.Linear(1, 1, bias=False)), ValueError, "'bias'"),
        (lambda: EMA(nn.Linear(1, 1), decay=0.9).update(nn.Sequential(nn.Linear(1, 1))), ValueError, "Unwrap it"),
    ],
)
def test_errors(call, kind, text):
    with pytest.raises(kind, match=text):
        call()


# moving average


def move(model):
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))


@pytest.mark.parametrize(
    ("settings", "images", "decay"),
    [({"decay": 0.9}, None, 0.9), ({"half_life": 10_000}, 128, 0.99117), ({"half_life": 10_000}, 64, 0.99557)],
)
def test_average_equals_the_weighted_sum(settings, images, decay):
    model = nn.Linear(3, 2).double()
    ema = EMA(model, **settings, warmup=False)
    history = [model.weight.detach().clone()]
    for _ in range(5):
        move(model)
        ema.update(model, images)
        history.append(model.weight.detach().clone())
    weights = [decay**5] + [(1 - decay) * decay ** (5 - i) for i in range(1, 6)]
    expected = sum(w * h for w, h in zip(weights, history, strict=True))
    torch.testing.assert_close(ema.model.weight, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("decay", "updates"), [(0.998, 750), (0.5, 12), (0.0, 3)])
def test_average_warms_up(decay, updates):
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(model.weight)  # all that is left of it is the share of the initial weights
    ema, constant = EMA(model, decay=decay), EMA(model, decay=decay, warmup=False)
    share = Fraction(1)
    for t in range(updates):
        nn.init.zeros_(model.weight)
        ema.update(model)
        constant.update(model)
        share *= min(Fraction(decay), Fraction(1 + t, 10 + t))
    assert ema.model.weight.item() == pytest.approx(float(share), rel=1e-9)
    assert constant.model.weight.item() == pytest.approx(decay**updates, rel=1e-9)
    assert ema.model.weight.item() < 1e-4  # a constant decay leaves 22 % of them after 750 updates


def test_average_follows_images_after_its_warmup():
    model = nn.Linear(1, 1, bias=False).double()
    ema = EMA(model, half_life=1000)
    ema.updates = 10_000
    nn.init.zeros_(ema.model.weight)
    nn.init.ones_(model.weight)
    ema.update(model, images=500)
    assert ema.model.weight.item() == pytest.approx(1 - 0.5**0.5)


def test_average_copies_buffers_and_keeps_to_itself():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    ema = EMA(model, decay=0.5)
    assert not ema.model.training
    model(torch.randn(8, 3)).sum().backward()
    move(model)
    ema.update(model)
    assert torch.equal(ema.model[1].running_mean, model[1].running_mean)
    assert ema.model[1].num_batches_tracked == 1
    assert model.training
    assert all(p.requires_grad for p in model.parameters())
    assert not any(p.requires_grad for p in ema.model.parameters())
    kept = ema.model[0].weight.clone()
    move(model)
    assert torch.equal(ema.model[0].weight, kept)


def test_average_of_an_orthogonal_weight_is_orthogonal():
    g = SimpleGenerator(8, 3, 4)
    orthogonal(g.first_projection)
    ema = EMA(g, decay=0.5)
    move(g)
    ema.update(g)
    w = ema.model.first_projection.weight.flatten(1)
    torch.testing.assert_close(w @ w.mT, torch.eye(3))
    assert not torch.equal(w, g.first_projection.weight.flatten(1))


def test_average_round_trip():
    g = SimpleGenerator(8, 3, 4)
    ema, other = EMA(g, decay=0.9), EMA(SimpleGenerator(8, 3, 4), decay=0.9)
    move(g)
    ema.update(g)
    other.load_state_dict(ema.state_dict())
    assert other.updates == 1
    move(g)
    for average in (ema, other):  # the warm-up goes on where it was
        average.update(g)
    z = torch.randn(2, 3)
    assert torch.equal(ema.model(z), other.model(z))
    assert ema.model.z_dim == 3
    assert not torch.equal(ema.model(z), g(z))
