"""The solvers of the literature: what they compute, and how far it is from exact."""

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
