"""The solvers of the literature: what they compute, and how far it is from exact."""

import dataclasses

import pytest
import scipy.linalg
import torch
from torch.autograd import gradcheck, gradgradcheck

import orthocond as oc
from tests.helpers import gradient, reference_gradient, relative_error, spd

FUNCTIONS = {"sqrtm": oc.sqrtm, "inv_sqrtm": oc.inv_sqrtm}
SVDS = [oc.SVD(gradient=g) for g in ("plain", "truncated", "top", "taylor", "pade")] + [
    oc.SVD(gradient="taylor", degree=100)
]

both_functions = pytest.mark.parametrize("name", FUNCTIONS)


@pytest.mark.parametrize(
    ("solver", "sqrt_error", "inverse_error"),
    [
        # Bounds: the errors of the literature at condition number 10 (n = 64), rounded up.
        (oc.NewtonSchulz(steps=5), 0.25, 0.45),
        (oc.NewtonSchulz(steps=8), 0.01, 0.05),
        (oc.NewtonSchulz(steps=20), 1e-12, 1e-12),
        (oc.Pade(degree=5), 0.011, 0.03),
        (oc.Taylor(degree=10), 0.09, 0.40),
    ],
    ids=str,
)
def test_error_of_approximate_solvers(solver, sqrt_error, inverse_error):
    a = spd(64, 10.0)
    root, inverse = scipy.linalg.sqrtm(a.numpy()), scipy.linalg.inv(scipy.linalg.sqrtm(a.numpy()))
    assert relative_error(oc.sqrtm(a, solver=solver), torch.from_numpy(root)) < sqrt_error
    assert relative_error(oc.inv_sqrtm(a, solver=solver), torch.from_numpy(inverse)) < inverse_error


@pytest.mark.parametrize("degree", [1, 3, 5])
def test_pade_of_zero_eigenvalue(degree):
    """Its value at zero is known: the norm's root over 2 degree + 1."""
    found = oc.sqrtm(torch.diag(torch.tensor([4.0, 0.0])).double(), solver=oc.Pade(degree=degree))
    torch.testing.assert_close(found[1, 1], torch.tensor(2.0 / (2 * degree + 1)).double())


def test_newton_schulz_inverse_is_capped():
    """N steps multiply a vanishing direction by 1.5^N at most: the regularization that the docs promise."""
    found = oc.inv_sqrtm(torch.diag(torch.tensor([1.0, 0.0])).double(), solver=oc.NewtonSchulz(steps=5))
    torch.testing.assert_close(found[1, 1], torch.tensor(1.5**5).double())


@both_functions
def test_literature_gradients_at_a_tie_are_wrong_and_ours_is_not(name):
    """At exactly equal eigenvalues K is 0, so every remedy drops the part of the gradient between the tied pair."""
    a, g = torch.diag(torch.tensor([1.0, 2.0, 2.0])).double(), torch.ones(3, 3).double()
    expected = reference_gradient(a, g, name == "inv_sqrtm")
    assert relative_error(gradient(FUNCTIONS[name], a, g), expected) < 1e-14
    for remedy in ("plain", "truncated", "taylor", "pade"):
        found = gradient(FUNCTIONS[name], a, g, solver=oc.SVD(gradient=remedy))
        assert found.isfinite().all()
        assert relative_error(found, expected) > 0.1


def test_inverse_gaps_are_antisymmetric_and_zero_at_ties():
    values = torch.tensor([4.0, 4.0, 2.0, 1.0, 1.0 - 1e-15, 0.5], dtype=torch.float64)
    for solver in SVDS:
        k = solver.inverse_gaps(values)
        assert k.isfinite().all()
        torch.testing.assert_close(k, -k.mT, rtol=0, atol=0)
        assert k[0, 1] == 0


def test_inverse_gaps_are_what_the_literature_says():
    values = torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(oc.SVD().inverse_gaps(values)[0], torch.tensor([0.0, 1 / 2, 1 / 3]).double())
    torch.testing.assert_close(
        oc.SVD(gradient="pade").inverse_gaps(values), oc.SVD(gradient="plain").inverse_gaps(values)
    )
    taylor = oc.SVD(gradient="taylor", degree=9).inverse_gaps(values)[0, 2]
    torch.testing.assert_close(taylor, sum(torch.tensor(0.25**k).double() for k in range(10)) / 4)
    near = torch.tensor([1.0, 1.0 - 1e-11], dtype=torch.float64)
    assert oc.SVD().inverse_gaps(near)[0, 1] > 9e10
    assert oc.SVD(gradient="truncated").inverse_gaps(near)[0, 1] == 1e10
    assert oc.SVD(gradient="taylor", degree=100).inverse_gaps(near)[0, 1] == pytest.approx(101, rel=1e-6)
    assert oc.SVD(gradient="pade").inverse_gaps(torch.tensor([1.0, 1.0 - 1e-13]).double())[0, 1] == 0


def released_inverse_gaps(s, gradient, degree=100):
    """K as the authors' code computes it, entry by entry, for one spectrum; the Padé quotient at 1 by its size."""
    n = len(s)
    k = torch.zeros(n, n, dtype=torch.float64)
    for i in range(n):
        for j in range(n):
            if i == j:
                continue
            if gradient in ("taylor", "pade"):
                x = min(s[i], s[j]) / max(s[i], s[j])
                sign = 1 / s[i] if s[i] >= s[j] else -1 / s[j]  # ">=", so that a tie is positive twice
                if gradient == "taylor":
                    k[i, j] = sign * sum(x**power for power in range(degree + 1))
                else:
                    k[i, j] = sign / (1 - x if x < 1 else 1e-16)
            else:
                gap = s[i] - s[j]
                k[i, j] = 1 / gap if gap else torch.inf
    if gradient == "truncated":
        return k.clamp(-1e10, 1e10)
    k[k == torch.inf] = k[k != torch.inf].max()
    return k


RELEASED = [oc.SVD(gradient=g, ties="released", degree=100) for g in ("plain", "truncated", "taylor", "pade")]


@pytest.mark.parametrize("solver", RELEASED, ids=str)
def test_inverse_gaps_at_ties_as_released(solver):
    values = [4.0, 4.0, 2.0, 1.0, 1.0, 1.0, 1.0 - 1e-9, 0.5, 2.2e-16, 2.2e-16]
    found = solver.inverse_gaps(torch.tensor(values, dtype=torch.float64))
    expected = released_inverse_gaps(values, solver.gradient)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert found[0, 1] == found[1, 0] > 0
    apart = torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64)  # no ties: no difference
    torch.testing.assert_close(
        solver.inverse_gaps(apart), dataclasses.replace(solver, ties="zero").inverse_gaps(apart), rtol=0, atol=0
    )


@pytest.mark.parametrize("solver", RELEASED, ids=str)
@both_functions
def test_gradient_at_ties_as_released(name, solver):
    """The backward pass of the release by hand, on a diagonal matrix, whose eigenvectors are the axes."""
    values = torch.tensor([4.0, 2.0, 2.0], dtype=torch.float64)
    a, g = torch.diag(values), torch.randn(3, 3, dtype=torch.float64)
    power = -0.5 if name == "inv_sqrtm" else 0.5
    grad_u = (g + g.mT) * values**power
    k = released_inverse_gaps(values.tolist(), solver.gradient)
    inner = k.mT * grad_u + torch.diag(power * values ** (power - 1) * g.diagonal())
    expected = (inner + inner.mT) / 2
    found = gradient(FUNCTIONS[name], a, g, solver=solver)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
    exact = reference_gradient(a, g, name == "inv_sqrtm")
    wrong = {"plain": 0.1, "truncated": 1e8, "taylor": 10.0, "pade": 1e14}
    assert relative_error(found, exact) > wrong[solver.gradient]


def test_top_as_released_overwrites_the_small_eigenvalues():
    a = torch.diag(torch.tensor([8.0, 4.0, 1.0, 0.5])).double()
    solver = oc.SVD(gradient="top", keep=2, ties="released")
    tiny = torch.finfo(torch.float64).eps
    found = oc.sqrtm(a, solver=solver)
    torch.testing.assert_close(found.diagonal(), torch.tensor([8.0, 4.0, tiny, tiny]).double().sqrt())
    g = torch.ones(4, 4).double()
    values = [8.0, 4.0, tiny, tiny]
    k = released_inverse_gaps(values, "plain")
    root = torch.tensor(values).double().sqrt()
    inner = k.mT * (2 * g * root) + torch.diag(0.5 / root)
    torch.testing.assert_close(gradient(oc.sqrtm, a, g, solver=solver), (inner + inner.mT) / 2)


def test_top_gradient_leaves_out_the_small_eigenvalues():
    a, g = torch.diag(torch.tensor([8.0, 4.0, 1.0])).double(), torch.ones(3, 3).double()
    found = gradient(oc.sqrtm, a, g, solver=oc.SVD(gradient="top", keep=2))
    expected = reference_gradient(a, g, inverse=False)
    torch.testing.assert_close(found[:2, :2], expected[:2, :2])
    assert (found[2] == 0).all()
    assert oc.SVD(gradient="top").kept(256) == 206
    assert oc.SVD(gradient="top").kept(30) == 30


@pytest.mark.parametrize("solver", [oc.Pade(), oc.Taylor()], ids=str)
@both_functions
def test_lyapunov_gradient_is_exact_where_it_converges(name, solver):
    """Near a multiple of the identity both the value and the eight sign steps converge."""
    a = spd(5, 1.2)
    g = torch.randn(5, 5, dtype=torch.float64)
    expected = reference_gradient(a, g, name == "inv_sqrtm")
    assert relative_error(gradient(FUNCTIONS[name], a, g, solver=solver), expected) < 0.02


@pytest.mark.parametrize("normalize", ["trace", "frobenius"])
@both_functions
def test_newton_schulz_gradient_is_that_of_the_iteration(name, normalize):
    a = spd(3, 100.0).requires_grad_()
    solver = oc.NewtonSchulz(steps=3, normalize=normalize)
    assert gradcheck(lambda x: FUNCTIONS[name](x, solver=solver), a, check_forward_ad=True)
    assert gradgradcheck(lambda x: FUNCTIONS[name](x, solver=solver), a)


@pytest.mark.parametrize(
    "solver", [oc.NewtonSchulz(), oc.NewtonSchulz(normalize="frobenius"), oc.Pade(), oc.Taylor()], ids=str
)
@both_functions
def test_gradient_at_a_zero_covariance_is_finite(name, solver):
    """One black image: its covariance is zero, and the others of the batch keep their gradients."""
    a = torch.stack([spd(3, 10.0), torch.zeros(3, 3).double()])
    g = torch.randn(2, 3, 3, dtype=torch.float64)
    found = gradient(FUNCTIONS[name], a, g, solver=solver)
    assert found.isfinite().all()
    torch.testing.assert_close(found[0], gradient(FUNCTIONS[name], a[0], g[0], solver=solver))


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 1e30])
@pytest.mark.parametrize(
    "solver", [oc.NewtonSchulz(), oc.NewtonSchulz(normalize="frobenius"), oc.Pade(), oc.Taylor()], ids=str
)
def test_iterations_at_all_scales(solver, scale):
    """The root of c A is √c times that of A, also where squares of entries overflow or vanish in float32."""
    a = spd(5, 10.0).float()
    expected = oc.sqrtm(a, solver=solver)
    torch.testing.assert_close(oc.sqrtm(scale * a, solver=solver) / scale**0.5, expected, rtol=1e-4, atol=1e-5)
    g = torch.randn(5, 5)
    found = gradient(oc.sqrtm, scale * a, g, solver=solver)
    torch.testing.assert_close(found * scale**0.5, gradient(oc.sqrtm, a, g, solver=solver), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("solver", [oc.SVD(), oc.Pade(), oc.Taylor()], ids=str)
def test_second_derivative_of_first_order_solvers_raises(solver):
    a = spd(2, 2.0).requires_grad_()
    (first,) = torch.autograd.grad(oc.sqrtm(a, solver=solver).sum(), a, create_graph=True)
    with pytest.raises(RuntimeError, match=f"{type(solver).__name__}.. can be differentiated once"):
        first.sum().backward()
