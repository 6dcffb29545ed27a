"""Penalties of the latents: values, invariants, gradients, shapes and dtypes, errors.

Oracles: closed forms of quadratic and linear networks, and exact Hessians and Jacobians from torch.func.
"""

import math

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck
from torch.func import hessian, jacrev

from orthocond.gans import (
    EigenGenerator,
    LatentPredictor,
    SimpleGenerator,
    hessian_penalty,
    latent_predictability,
    orthogonal_jacobian,
)
from orthocond.gans.penalties._derivatives import along

DERIVATIVES = ("exact", "difference")
PENALTIES = {"hessian": hessian_penalty, "jacobian": orthogonal_jacobian}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=seeded(seed))


def off_diagonal(a):
    """2 Σ_{i≠j} A_ij² of the last two dimensions."""
    return 2 * (a.square().sum((-2, -1)) - a.diagonal(dim1=-2, dim2=-1).square().sum(-1))


def smooth(**settings):
    """A small generator with normalizations, whose leaky ReLUs are replaced by a smooth function."""
    g = SimpleGenerator(8, 4, 3, **settings).double()
    for block in g.blocks:
        block[-1] = nn.Softplus()
    return g


# values: closed forms


@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_hessian_penalty_of_a_quadratic_network(derivative):
    """x_e = zᵀ A_e z has the Hessian A_e + A_eᵀ everywhere, and central differences are exact.

    The mean over many samples of the estimate from two vectors shows that it is unbiased.
    """
    a, z = normal(5, 3, 3), normal(20_000, 3, seed=1)

    def network(z):
        return torch.einsum("ni,eij,nj->ne", z, a, z)

    expected = off_diagonal(a + a.mT).mean()
    value = hessian_penalty(network, z, derivative=derivative, rng=seeded())
    torch.testing.assert_close(value, expected, rtol=0.03, atol=0)


@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_orthogonal_jacobian_of_a_linear_network(derivative):
    w, z = normal(3, 7), normal(20_000, 3, seed=1)
    value = orthogonal_jacobian(lambda z: z @ w, z, derivative=derivative, rng=seeded())
    torch.testing.assert_close(value, off_diagonal(w @ w.mT), rtol=0.03, atol=0)


@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_two_vectors_by_hand(derivative):
    """With two latents vᵀHv = H11 + H22 ± 2 H12: two vectors give 0 or 8 H12²."""
    z = normal(1, 2)
    found = {
        round(float(hessian_penalty(lambda z: 3 * z.prod(1), z, derivative=derivative, rng=seeded(s))), 6)
        for s in range(20)
    }
    assert found == {0.0, 72.0}
    w = torch.tensor([[1.0, 0.0], [2.0, 1.0]], dtype=torch.float64)
    found = {
        round(float(orthogonal_jacobian(lambda z: z @ w, z, derivative=derivative, rng=seeded(s))), 6)
        for s in range(20)
    }
    assert found == {0.0, 32.0}  # |Jv|² is 6 ± 4


@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_nothing_to_penalize(derivative):
    z = normal(3, 4)
    q = torch.linalg.qr(normal(9, 4)).Q.mT
    assert hessian_penalty(lambda z: (z**2) @ q, z, derivative=derivative) < 1e-20
    assert orthogonal_jacobian(lambda z: z @ (q * normal(4, 1)), z, derivative=derivative) < 1e-20


# values: exact derivatives from torch.func


@pytest.mark.parametrize("blocks", ["transposed", "upsample"])
def test_exact_forms_equal_full_hessian_and_jacobian(blocks):
    """Whole Hessians and Jacobians; each sample is repeated so that the mean is over many vectors."""
    g, z = smooth(blocks=blocks), normal(2, 4)
    with torch.no_grad():
        full = [hessian(lambda x: g(x[None])[0])(x) for x in z]
        jacobians = [jacrev(lambda x: g(x[None])[0].flatten())(x) for x in z]
        many = z.repeat(1000, 1)
        value = hessian_penalty(g, many, derivative="exact", rng=seeded())
        other = orthogonal_jacobian(g, many, rng=seeded())
    torch.testing.assert_close(value, torch.stack([off_diagonal(h) for h in full]).mean(), rtol=0.1, atol=0)
    expected = torch.stack([off_diagonal(j.mT @ j) for j in jacobians]).mean()
    torch.testing.assert_close(other, expected, rtol=0.1, atol=0)


@pytest.mark.parametrize("name", ["simple", "batch-norm", "layer-norm", "eigen"])
def test_derivatives_along_vectors(name):
    """vᵀHv and Jv of every vector, to rounding; of normalizations too, which torch gets wrong when nested."""
    modules = {
        "simple": smooth,
        "batch-norm": lambda: nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6, track_running_stats=False, affine=False), nn.Tanh()
        ).double(),
        "layer-norm": lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh()).double(),
        "eigen": lambda: EigenGenerator(8, 4, 3, 2).double(),
    }
    g, z = modules[name](), normal(3, 4)
    noise = {"noise": normal(3, 3, seed=2)} if name == "eigen" else {}

    def network(z):
        return g(z, **noise)

    settings = {"layers": None, "vectors": 3, "derivative": "exact", "eps": 0.1, "caller": "test"}
    with torch.no_grad():
        (first,) = along(network, z, 1, rng=seeded(), **settings)
        (second,) = along(network, z, 2, rng=seeded(), **settings)
        draw = seeded()
        signs = [1 - 2 * (torch.rand(3, 4, dtype=torch.float64, generator=draw) < 0.5).double() for _ in range(3)]
        jacobian = jacrev(network)(z).flatten(-2)
        h = hessian(network)(z).flatten(-4, -3).flatten(-2)
    for v, jv, vhv in zip(signs, first, second, strict=True):
        torch.testing.assert_close(jv, jacobian @ v.flatten())
        torch.testing.assert_close(vhv, torch.einsum("...ij,i,j->...", h, v.flatten(), v.flatten()))


def test_differences_converge_to_the_derivative():
    g, z = smooth(), normal(2, 4)
    for penalty in PENALTIES.values():
        exact = penalty(g, z, derivative="exact", rng=seeded()).detach()
        errors = []
        for eps in (1e-2, 1e-3):
            found = penalty(g, z, derivative="difference", eps=eps, rng=seeded()).detach()
            errors.append(abs(float(found / exact) - 1))
        assert errors[1] < 1e-2
        assert errors[1] < 0.2 * errors[0]


# values: reductions, layers


@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("name", PENALTIES)
def test_reductions_and_layers(name, derivative):
    """The penalty of several layers is the sum of their penalties; max and mean are over all entries or samples."""
    g, z = smooth(), normal(3, 4)
    layers = [g.convolutions[1], g.blocks[0], g]
    settings = {"derivative": derivative, "vectors": 3, "eps": 0.1}
    order = 2 if name == "hessian" else 1
    found = along(g, z, order, layers=layers, rng=seeded(), caller="test", **settings)
    values = [d.var(0) if name == "hessian" else d.flatten(2).norm(dim=2).square().var(0) for d in found]
    assert [v.shape[1:] for v in found] == [(3, 3, 8, 8)] * 3
    for reduction, function in (("mean", torch.mean), ("max", torch.max)):
        total = PENALTIES[name](g, z, layers=layers, reduction=reduction, rng=seeded(), **settings)
        torch.testing.assert_close(total, sum(function(v) for v in values))
    alone = PENALTIES[name](g, z, rng=seeded(), **settings)
    torch.testing.assert_close(PENALTIES[name](g, z, layers=[g], rng=seeded(), **settings), alone)


def test_first_projection_has_no_hessian_and_a_constant_gram():
    g, z = smooth(), normal(3, 4)
    first = [g.first_projection]
    w = g.first_projection.weight.flatten(1).detach()
    assert hessian_penalty(g, z, layers=first) < 1e-20
    value = orthogonal_jacobian(g, normal(5000, 4), layers=first, rng=seeded()).detach()
    torch.testing.assert_close(value, off_diagonal(w @ w.mT), rtol=0.1, atol=0)


def test_what_comes_after_the_layers_is_not_run():
    def never(*_):
        raise AssertionError

    g = smooth()
    g.to_rgb.register_forward_pre_hook(never)
    orthogonal_jacobian(g, normal(2, 4), layers=g.convolutions).backward()
    assert not any(m._forward_hooks for m in g.modules())


def test_relative_does_not_depend_on_scale_and_size():
    w, z = normal(3, 7), normal(2, 3)
    value = orthogonal_jacobian(lambda z: z @ w, z, relative=True, rng=seeded(1))
    other = orthogonal_jacobian(lambda z: 5 * (z @ w)[:, :, None].expand(-1, -1, 4), z, relative=True, rng=seeded(1))
    assert value > 1e-4
    torch.testing.assert_close(value, other)
    many = orthogonal_jacobian(lambda z: z @ w, z, relative=True, vectors=500, rng=seeded())
    gram = w @ w.mT
    torch.testing.assert_close(many, off_diagonal(gram) / gram.trace() ** 2, rtol=0.1, atol=0)


# invariants


def test_kinks_are_seen_by_differences_only():
    """|z1 + z2| has no second derivative but where it has infinite curvature."""
    z = normal(200, 2)

    def network(z):
        return z.sum(1).abs()

    assert hessian_penalty(network, z, derivative="exact") == 0
    assert hessian_penalty(network, z, rng=seeded()) > 1


@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("penalty", PENALTIES.values(), ids=PENALTIES)
def test_noise_of_the_generator_is_the_same_in_all_evaluations(penalty, derivative):
    g, z = EigenGenerator(8, 3, 4, 2).double(), normal(2, 3)
    noise = normal(2, 4, seed=3)

    torch.manual_seed(7)
    fixed = noise + torch.randn(2, 4, dtype=torch.float64)
    torch.manual_seed(7)
    value = penalty(
        lambda z: g(z, noise + torch.randn(2, 4, dtype=torch.float64)), z, derivative=derivative, rng=seeded()
    )
    torch.testing.assert_close(value, penalty(lambda z: g(z, fixed), z, derivative=derivative, rng=seeded()))
    torch.manual_seed(7)
    a = penalty(g, z, derivative=derivative, rng=seeded())
    torch.manual_seed(7)
    assert torch.equal(a, penalty(g, z, derivative=derivative, rng=seeded()))


def test_samples_do_not_mix():
    g, z = smooth(), normal(2, 4)
    signs = {"layers": None, "vectors": 2, "derivative": "exact", "eps": 0.1, "caller": "test"}
    both = along(g, z, 2, rng=seeded(), **signs)[0]
    assert both.shape == (2, 2, 3, 8, 8)
    moved = z.clone()
    moved[1] += 1
    torch.testing.assert_close(along(g, moved, 2, rng=seeded(), **signs)[0][:, 0], both[:, 0])


# gradients


@pytest.mark.parametrize("reduction", ["mean", "max"])
@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("name", PENALTIES)
def test_gradients_reach_the_parameters(name, derivative, reduction):
    """Through an instance normalization, which torch differentiates wrongly after forward mode."""
    z = normal(2, 3)
    w, scale = normal(3, 8).requires_grad_(), normal(2, seed=1).requires_grad_()

    def value(w, scale):
        def network(z):
            h = torch.nn.functional.instance_norm((z @ w).view(-1, 2, 4), weight=scale, eps=0.1)
            return h.tanh()

        return PENALTIES[name](network, z, derivative=derivative, reduction=reduction, rng=seeded(2))

    assert value(w, scale) > 1e-6
    assert gradcheck(value, (w, scale))


@pytest.mark.parametrize("name", PENALTIES)
def test_exact_gradients_of_a_generator(name):
    """Against numerical differences of the value in one direction of all parameters."""
    g, z = smooth(), normal(2, 4)
    value = lambda: PENALTIES[name](g, z, derivative="exact", rng=seeded())  # noqa: E731
    value().backward()
    direction = [normal(*p.shape, seed=i) for i, p in enumerate(g.parameters())]
    slope = sum((p.grad * d).sum() for p, d in zip(g.parameters(), direction, strict=True))
    ends = []
    for sign in (1, -2):
        with torch.no_grad():
            for p, d in zip(g.parameters(), direction, strict=True):
                p.add_(d, alpha=sign * 1e-6)
        ends.append(value().detach())
    torch.testing.assert_close((ends[0] - ends[1]) / 2e-6, slope, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", PENALTIES)
def test_descent_disentangles(name):
    w = normal(3, 6).requires_grad_()
    optimizer = torch.optim.Adam([w], lr=0.03)
    z = normal(8, 3)
    network = {"jacobian": lambda z: z @ w, "hessian": lambda z: ((z @ w[:, :3]) ** 2).sum(1)}[name]
    gram = lambda: (w @ w.mT if name == "jacobian" else w[:, :3] @ w[:, :3].mT).detach()  # noqa: E731
    before = off_diagonal(gram())
    for _ in range(200):
        optimizer.zero_grad()
        PENALTIES[name](network, z, vectors=4).backward()
        optimizer.step()
    assert off_diagonal(gram()) < 1e-3 * before


# latent predictability


class Oracle:
    """A predictor that keeps what it is shown."""

    def __init__(self, logits=None):
        self.logits = logits

    def __call__(self, before, after):
        self.before, self.after = before, after
        return torch.zeros_like(before) if self.logits is None else self.logits(after - before)


def test_one_latent_changes():
    z, oracle = normal(4000, 5), Oracle()
    latent_predictability(lambda z: z, z, oracle, step=0.5, rng=seeded())
    change = oracle.after - oracle.before
    assert torch.equal(oracle.before, z)
    assert ((change != 0).sum(1) == 1).all()
    share = (change != 0).double().mean(0)
    assert (share - 0.2).abs().max() < 4 * (0.2 * 0.8 / 4000) ** 0.5
    amounts = change[change != 0]
    assert abs(amounts.std() - 0.5) < 0.03
    assert abs(amounts.mean()) < 0.03


def test_loss_of_predictors_that_know_nothing_and_everything():
    z = normal(64, 5)
    blind = Oracle()
    assert latent_predictability(lambda z: z, z, blind).item() == pytest.approx(math.log(5))
    assert latent_predictability(lambda z: z, z, blind, loss="binary").item() == pytest.approx(math.log(2))
    sure = Oracle(lambda change: 100 * (2 * (change != 0).double() - 1))
    assert latent_predictability(lambda z: z, z, sure) < 1e-12
    assert latent_predictability(lambda z: z, z, sure, loss="binary") < 1e-12
    rate = Oracle(lambda change: torch.full_like(change, math.log(0.2 / 0.8)))
    entropy = -(0.2 * math.log(0.2) + 0.8 * math.log(0.8))
    assert latent_predictability(lambda z: z, z, rate, loss="binary").item() == pytest.approx(entropy)


def test_pairs_share_their_noise():
    oracle = Oracle(lambda change: change[:, :4])
    latent_predictability(lambda z: z + 10 * torch.randn_like(z), normal(8, 4), oracle)
    assert (((oracle.after - oracle.before).abs() > 1e-12).sum(1) == 1).all()


def test_predictor_has_the_published_size():
    assert sum(p.numel() for p in LatentPredictor(128, 30).parameters()) == 2806
    assert LatentPredictor(64, 6, inputs="both").net[0].in_channels == 6


@pytest.mark.parametrize("inputs", ["difference", "both"])
def test_predictor_sees_both_images(inputs):
    predictor = LatentPredictor(8, 3, inputs=inputs)
    a, b, c = torch.randn(3, 2, 3, 8, 8)
    assert not torch.equal(predictor(a, b), predictor(a, c))
    assert not torch.equal(predictor(b, a), predictor(c, a))
    if inputs == "difference":
        torch.testing.assert_close(predictor(a + 1, b + 1), predictor(a, b), rtol=1e-4, atol=1e-5)


def test_generator_and_predictor_learn_together():
    """Gradients reach both, and the loss falls far below chance."""
    torch.manual_seed(0)
    g, predictor = SimpleGenerator(8, 3, 4), LatentPredictor(8, 3, 8)
    optimizer = torch.optim.Adam([*g.parameters(), *predictor.parameters()], lr=1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        latent_predictability(g, torch.randn(32, 3), predictor).backward()
        assert all(p.grad is not None for p in [*g.parameters(), *predictor.parameters()])
        optimizer.step()
    assert latent_predictability(g, torch.randn(512, 3), predictor) < 0.5 * math.log(3)


# shapes and dtypes, errors


@pytest.mark.parametrize("name", PENALTIES)
def test_half_precision_is_left(name):
    g, z = SimpleGenerator(8, 4, 3), torch.randn(2, 4)
    plain = PENALTIES[name](g, z, rng=seeded())
    with torch.autocast("cpu", torch.bfloat16):
        inside = PENALTIES[name](g, z, rng=seeded())
    assert inside.dtype == torch.float32
    assert torch.equal(inside, plain)
    with torch.no_grad():
        assert not PENALTIES[name](g, z).requires_grad


NETWORK = nn.Linear(3, 3)


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: hessian_penalty(NETWORK, torch.randn(3)), ValueError, r"latents \(N, z_dim\)"),
        (lambda: hessian_penalty(NETWORK, torch.ones(1, 3, dtype=torch.int64)), TypeError, "floating"),
        (lambda: hessian_penalty(NETWORK, torch.randn(1, 3), vectors=1), ValueError, "at least 2"),
        (lambda: hessian_penalty(NETWORK, torch.randn(1, 3), eps=0.0), ValueError, "above 0"),
        (lambda: hessian_penalty(NETWORK, torch.randn(1, 3), derivative="jvp"), ValueError, "'exact', 'difference'"),
        (lambda: hessian_penalty(NETWORK, torch.randn(1, 3), reduction="sum"), ValueError, "'mean', 'max'"),
        (lambda: orthogonal_jacobian(NETWORK, torch.randn(1, 3), layers=[]), ValueError, "different modules"),
        (lambda: orthogonal_jacobian(NETWORK, torch.randn(1, 3), layers=[NETWORK] * 2), ValueError, "different"),
        (lambda: orthogonal_jacobian(NETWORK, torch.randn(1, 3), layers=[nn.Tanh()]), ValueError, "Tanh was not run"),
        (lambda: latent_predictability(NETWORK, torch.randn(3), Oracle()), ValueError, r"\(N, z_dim\)"),
        (lambda: latent_predictability(NETWORK, torch.randn(1, 3), Oracle(), loss="mse"), ValueError, "'binary'"),
        (lambda: latent_predictability(NETWORK, torch.randn(1, 3), Oracle(), step=0), ValueError, "above 0"),
        (
            lambda: latent_predictability(NETWORK, torch.randn(1, 3), Oracle(lambda c: c[:, :2])),
            ValueError,
            r"logits \(1, 3\)",
        ),
        (lambda: LatentPredictor(20, 3), ValueError, "power of two"),
        (lambda: LatentPredictor(8, 3, inputs="sum"), ValueError, "'difference', 'both'"),
        (lambda: LatentPredictor(8, 3)(torch.randn(1, 3, 8, 8), torch.randn(1, 1, 8, 8)), ValueError, "3, 8, 8"),
    ],
)
def test_errors(call, kind, text):
    with pytest.raises(kind, match=text):
        call()
