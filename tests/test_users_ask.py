"""What users of neighboring projects asked for, as small tests: each says what was asked and shows that it works here.

Numbers are those of issues on GitHub, in the form owner/name#number.
"""

import time

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

import orthocond as oc
from tests.helpers import gradient, reference_gradient, relative_error, with_spectrum


def root_through_eigh(a):
    values, u = torch.linalg.eigh(a)
    return (u * values.sqrt().unsqueeze(-2)) @ u.mT


# gradients at repeated eigenvalues


def test_nan_in_the_backward_of_eigh():
    """pytorch/pytorch#76531: a triple eigenvalue of -1/3; the gradient through the eigenvectors is NaN or noise.

    Here it is asked for a function of the matrix, the root of the matrix plus one half, which has a gradient.
    """
    v = torch.tensor([0.0218, 0.0992, -0.0823, 0.9914], dtype=torch.float64)
    v = v / v.norm()
    k = 4 / 3 * torch.outer(v, v) + (0.5 - 1 / 3) * torch.eye(4, dtype=torch.float64)
    g = torch.zeros(4, 4, dtype=torch.float64)
    g[:, 3] = torch.tensor([7.27e-5, -1.12e-4, -5.10e-4, 4.23e-4])
    assert relative_error(gradient(oc.sqrtm, k, g), reference_gradient(k, g, inverse=False)) < 1e-13
    assert relative_error(gradient(oc.inv_sqrtm, k, g), reference_gradient(k, g, inverse=True)) < 1e-13


def test_wrong_gradient_of_a_degenerate_subspace():
    """pytorch/pytorch#47599: a loss of the projector on the subspace of a double eigenvalue; gradcheck fails there.

    The projector is a difference of two matrix signs, and the sign of a symmetric matrix is its polar factor.
    """
    eye = torch.eye(5, dtype=torch.float64)
    mixing = torch.randn(5, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(5, 5, dtype=torch.float64, requires_grad=True)
    values = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64, requires_grad=True)

    def loss(values, mixing, weights):
        p, _ = torch.linalg.qr(mixing)
        a = p.mT @ torch.diag(values[[0, 1, 1, 2, 2]]) @ p
        projector = (oc.polar(a - 0.75 * eye) - oc.polar(a - 1.5 * eye)) / 2
        return (weights * projector).sum()

    with torch.no_grad():
        p, _ = torch.linalg.qr(mixing)
        assert loss(values, mixing, weights).item() == pytest.approx(((weights @ p[1:3].mT) * p[1:3].mT).sum().item())
    assert gradcheck(loss, (values, mixing, weights))


def test_nan_of_symeig_with_large_pairs_of_eigenvalues():
    """pytorch/pytorch#23133: eigenvalues from 2e5 to 4e8, each twice; no small number added tells them apart."""
    values = [2.2283e5, 2.3873e6, 4.0675e8]
    a = with_spectrum(sorted(2 * values))
    g = torch.randn(6, 6, dtype=torch.float64)
    for function, inverse in ((oc.sqrtm, False), (oc.inv_sqrtm, True)):
        expected = reference_gradient(a, g, inverse)
        assert relative_error(gradient(function, a, g), expected) < 1e-10
        exact = reference_gradient(a.float(), g.float(), inverse)
        assert relative_error(gradient(function, a.float(), g.float()), exact) < 1e-3


def test_symmetric_square_root_with_stable_second_derivatives():
    """pytorch/pytorch#25481: a root in torch.linalg; that of the proposal has no stable second derivative."""
    a = torch.diag(torch.tensor([1.0, 1.0, 3.0, 3.0], dtype=torch.float64)).requires_grad_()
    (plain,) = torch.autograd.grad(root_through_eigh(a).sum(), a)
    assert plain.isnan().any()
    for function in (oc.sqrtm, oc.inv_sqrtm):
        assert gradcheck(function, a, check_forward_ad=True)
        assert gradgradcheck(function, a)


# several singular values that are zero


def rank_three():
    """15 x 15 of rank 3, from the issue: three blocks of equal columns."""
    y = torch.zeros(15, 15, dtype=torch.float64)
    for block in range(3):
        y[block, 5 * block : 5 * block + 5] = block + 1
    return y


def test_svd_backward_with_several_zero_singular_values():
    """pytorch/pytorch#49886: a matrix with a null space of dimension 12 cannot be differentiated through.

    The polar factor can: along changes within its range its derivative is that of finite differences.
    """
    y, g = rank_three(), torch.randn(15, 15, dtype=torch.float64)
    found = gradient(oc.polar, y, g)
    assert found.isfinite().all()
    u, _, v = torch.linalg.svd(y)
    for _ in range(5):
        change = u[:, :3] @ torch.randn(3, 3, dtype=torch.float64) @ v[:3]
        ahead, behind = oc.polar(y + 1e-5 * change), oc.polar(y - 1e-5 * change)
        assert (found * change).sum().item() == pytest.approx((g * (ahead - behind)).sum().item() / 2e-5, abs=1e-7)


@pytest.mark.parametrize(
    "a",
    [
        torch.ones(5, 5),  # jax-ml/jax#2311
        torch.diag(torch.tensor([1.0, 1.0, 2.0, 3.0])),  # jax-ml/jax#8732
        torch.diag(torch.tensor([0.0, 0.0, 2.0, 3.0])),
        rank_three(),
    ],
    ids=["rank-one", "equal", "zero", "rank-three"],
)
def test_norm_of_a_matrix_put_together_from_its_factors(a):
    """jax-ml/jax#2311, #8732: the norm of U S Vᵀ has a simple gradient, A / ‖A‖, and autograd gives NaN.

    Here the factors are those of the polar decomposition, A = R (AᵀA)^1/2.
    """
    a = a.double().requires_grad_()
    norm = (oc.polar(a) @ oc.sqrtm(a.mT @ a)).norm()
    torch.testing.assert_close(norm.detach(), a.detach().norm())
    (found,) = torch.autograd.grad(norm, a)
    torch.testing.assert_close(found, a.detach() / a.detach().norm())


# scales


@pytest.mark.parametrize("scale", [1e-20, 1e20])
def test_squares_of_singular_values_that_overflow_or_vanish(scale):
    """pytorch/pytorch#194705: float32 gradients are NaN where σ² is not a float32; here they scale as they must."""
    g, h = torch.randn(6, 4), torch.randn(6, 4)
    torch.testing.assert_close(oc.polar(scale * g), oc.polar(g))
    torch.testing.assert_close(gradient(oc.polar, scale * g, h) * scale, gradient(oc.polar, g, h), rtol=1e-4, atol=1e-5)
    a, h = with_spectrum([1.0, 1.0, 2.0, 30.0]).float(), torch.randn(4, 4)
    for function, power in ((oc.sqrtm, 0.5), (oc.inv_sqrtm, -0.5)):
        torch.testing.assert_close(function(scale * a) * scale**-power, function(a), rtol=1e-4, atol=1e-5)
        expected = gradient(function, a, h)
        found = gradient(function, scale * a, h * scale**0.5) * scale ** (0.5 - power)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# compilation


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # raised inside torch's compiler
def test_eigh_that_fails_under_compile_only():
    """pytorch/pytorch#188232: compiled and eager agree, for matrices with ties, zeros and a null space."""
    torch.compiler.reset()
    compiled = torch.compile(lambda a: oc.inv_sqrtm(a, eps=1e-3), backend="aot_eager", fullgraph=True)
    for a in (torch.zeros(3, 3, 3), torch.eye(3).repeat(3, 1, 1), with_spectrum([0.0, 0.0, 2.0], 3).float()):
        torch.testing.assert_close(compiled(a), oc.inv_sqrtm(a, eps=1e-3), rtol=1e-4, atol=1e-3)


# orthogonal weights


@pytest.mark.parametrize("map", ["cayley", "exponential", "polar"])
def test_orthogonality_of_the_flattened_convolution(map):
    """lezcano/geotorch#10, #38: the matrix (out, in·k·k) is to be orthogonal, not each 3x3 kernel."""
    conv = oc.orthogonal(nn.Conv2d(20, 40, 3, 3), map=map)
    optimizer = torch.optim.SGD(conv.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        conv(torch.randn(2, 20, 9, 9)).square().mean().backward()
        optimizer.step()
    w = conv.weight.detach().flatten(1)
    torch.testing.assert_close(w @ w.mT, torch.eye(40), rtol=0, atol=1e-5)


@pytest.mark.parametrize("map", ["cayley", "exponential", "polar"])
def test_a_tall_embedding(map):
    """lezcano/geotorch#30: 30000 x 50 took 20 minutes to register and was killed in training. Seconds, and no n x n."""
    start = time.perf_counter()
    table = oc.orthogonal(nn.Embedding(30000, 50), map=map)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    table(torch.arange(8)).square().sum().backward()
    optimizer.step()
    w = table.weight.detach()
    torch.testing.assert_close(w.mT @ w, torch.eye(50), rtol=0, atol=1e-5)
    assert time.perf_counter() - start < 60
