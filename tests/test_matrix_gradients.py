"""Gradients of the square roots: exact, at ties and at zero eigenvalues, of second order, in forward mode."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import orthocond as oc
from tests.helpers import (
    CASES,
    gradient,
    reference_gradient,
    relative_error,
    spd,
    tolerance,
    with_spectrum,
)
from tests.matrix_helpers import FUNCTIONS, both_functions, condition, exact_solvers

# gradients


@pytest.mark.parametrize("case", [c for c in CASES if c not in ("cond1e8", "empty-batch")])
@both_functions
def test_gradient_by_finite_differences(name, case):
    a, eps = CASES[case]
    a = a.clone().requires_grad_()
    function = FUNCTIONS[name]
    assert gradcheck(lambda x: function(x, eps=eps), a, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(lambda x: function(x, eps=eps), a, check_fwd_over_rev=True, check_rev_over_rev=True)


@pytest.mark.parametrize("values", [[0.0, 1.0, 2.0], [0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 3.0]], ids=str)
@both_functions
def test_gradient_at_zero_eigenvalues_with_a_rank_tolerance(name, values):
    """The tolerance is above the step of the finite differences, so the zero eigenvalues stay left out."""
    a = with_spectrum(values).requires_grad_()
    solver = oc.Eigh(rank_tol=1e-3)
    function = FUNCTIONS[name]
    assert gradcheck(lambda x: function(x, solver=solver), a, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(lambda x: function(x, solver=solver), a, check_fwd_over_rev=True, check_rev_over_rev=True)


@both_functions
@pytest.mark.parametrize(("left_out", "slope"), [(0.2, 1 / 0.8), (0.5, 2.0), (0.9, 2.0), (0.999, 2.0)])
def test_the_slope_between_a_kept_and_a_left_out_eigenvalue_is_capped(name, left_out, slope):
    """It is f(1) / (1 - λ), with a gap of at least one half: at the tolerance f jumps, which is no slope to follow."""
    a = torch.diag(torch.tensor([1.0, left_out], dtype=torch.float64))
    g = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    found = gradient(FUNCTIONS[name], a, g, solver=oc.Eigh(rank_tol=(1 + left_out) / 2))
    torch.testing.assert_close(found, slope * g)


@pytest.mark.parametrize("case", ["well", "cond1e4", "cond1e8", "identity", "two-equal", "rank-deficient", "1x1"])
@both_functions
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradient_against_high_precision(name, case, dtype):
    a, eps = CASES[case]
    a = a.to(dtype)
    if case == "cond1e8" and dtype == torch.float32:
        a = spd(5, 1e5).float()  # float32 cannot hold a condition number of 1e8
    g = torch.randn(a.shape, dtype=dtype, generator=torch.Generator().manual_seed(2))
    expected = reference_gradient(a, g, name == "inv_sqrtm", eps)
    found = gradient(FUNCTIONS[name], a, g, eps=eps)
    limit = tolerance(dtype, 5, condition(case)) if dtype == torch.float64 else 200 * tolerance(dtype, 5)
    assert relative_error(found, expected) < limit


@both_functions
@exact_solvers
def test_gradient_of_solvers_that_are_exact_on_separated_eigenvalues(name, solver):
    a = with_spectrum([1.0, 2.0, 4.0, 7.0])
    g = torch.randn(4, 4, dtype=torch.float64)
    expected = reference_gradient(a, g, name == "inv_sqrtm")
    assert relative_error(gradient(FUNCTIONS[name], a, g, solver=solver), expected) < 1e-12


@both_functions
def test_gradient_agrees_with_autograd_through_eigh_on_separated_eigenvalues(name):
    def composed(a):
        values, u = torch.linalg.eigh((a + a.mT) / 2)
        return (u * values.pow(0.5 if name == "sqrtm" else -0.5)) @ u.mT

    a, g = with_spectrum([1.0, 2.0, 4.0, 7.0]), torch.randn(4, 4, dtype=torch.float64)
    torch.testing.assert_close(gradient(FUNCTIONS[name], a, g), gradient(lambda x: composed(x), a, g))


def test_autograd_through_eigh_is_nan_at_a_tie():
    """The failure that this library exists for; if torch mends it, the docs have to change."""
    a = torch.eye(3, requires_grad=True)
    values, u = torch.linalg.eigh(a)
    ((u * values.rsqrt()) @ u.mT).sum().backward()
    assert a.grad.isnan().any()


@both_functions
def test_hessian_by_torch_func(name):
    """Forward over reverse at the identity, where every eigenvalue is tied: d²(x^p) = p (p - 1)."""
    power = 0.5 if name == "sqrtm" else -0.5
    hessian = torch.func.hessian(lambda x: FUNCTIONS[name](x).diagonal().sum())(torch.eye(2, dtype=torch.float64))
    torch.testing.assert_close(hessian[0, 0, 0, 0], torch.tensor(power * (power - 1)).double())


@both_functions
def test_forward_mode_over_a_backward_pass_that_records_nothing(name):
    """A dual number in a plain backward pass: the derivative of the gradient must not be lost."""
    a, direction, g = spd(3, 10.0), with_spectrum([1.0, -1.0, 2.0]), with_spectrum([3.0, 1.0, -1.0], seed=5)
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(a.clone().requires_grad_(), direction)
        (grad,) = torch.autograd.grad(FUNCTIONS[name](x), x, g)
        tangent = torch.autograd.forward_ad.unpack_dual(grad).tangent
    step = 1e-5
    ahead, behind = (gradient(FUNCTIONS[name], a + sign * step * direction, g) for sign in (1, -1))
    torch.testing.assert_close(tangent, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-6)


@both_functions
def test_no_grad_gives_the_same_value(name):
    a = spd(4, 10.0, 2).requires_grad_()
    expected = FUNCTIONS[name](a)
    with torch.no_grad():
        found = FUNCTIONS[name](a)
    assert not found.requires_grad
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_third_derivative_raises():
    a = spd(2, 2.0).requires_grad_()
    (first,) = torch.autograd.grad(oc.sqrtm(a).sum(), a, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), a, create_graph=True)
    with pytest.raises(RuntimeError, match="third derivative"):
        second.sum().backward()
