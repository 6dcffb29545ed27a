"""Skew orthogonal convolutions: values, invariants, gradients, shapes and dtypes, errors, life cycle."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck

from orthocond.weights import SkewOrthogonalConv2d
from orthocond.weights.skew import _FOUR, _skew, _unfold


def jacobian(module, channels, size):
    """The layer as a matrix, one column for each entry of the image."""
    basis = torch.eye(channels * size * size, dtype=torch.float64).reshape(-1, channels, size, size)
    return module(basis).detach().flatten(1).mT


# values


@pytest.mark.parametrize("kernel_size", [1, 3, 5])
def test_it_is_the_exponential_of_a_skew_symmetric_matrix(kernel_size):
    module = SkewOrthogonalConv2d(3, 3, kernel_size, bias=False, eval_terms=30).double().eval()
    kernel = module.kernel().detach()
    basis = torch.eye(3 * 36, dtype=torch.float64).reshape(-1, 3, 6, 6)
    a = nn.functional.conv2d(basis, kernel, padding=kernel_size // 2).flatten(1).mT
    torch.testing.assert_close(a, -a.mT)
    assert torch.linalg.matrix_norm(a, 2) < 2.1
    torch.testing.assert_close(jacobian(module, 3, 6), torch.matrix_exp(a), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("kernel_size", "scale"), [(1, 1.0), (3, 0.7), (5, 0.42)])
def test_the_bound_is_the_least_of_four_norms(kernel_size, scale):
    """Every one of the four bounds the norm of the convolution from above; the kernel uses the least."""
    module = SkewOrthogonalConv2d(4, 4, kernel_size).double()
    for _ in range(400):
        module.kernel()
    module.eval()
    skew = _skew(module.weight.detach())
    norms = [torch.linalg.matrix_norm(_unfold(skew, *axes), 2) for axes in _FOUR]
    torch.testing.assert_close(module.kernel().detach(), scale * skew / min(norms))
    basis = torch.eye(4 * 64, dtype=torch.float64).reshape(-1, 4, 8, 8)
    operator = torch.linalg.matrix_norm(nn.functional.conv2d(basis, skew, padding=kernel_size // 2).flatten(1), 2)
    assert operator < kernel_size * min(norms) * (1 + 1e-9)


# invariants


@pytest.mark.parametrize(
    ("channels_in", "channels_out", "stride"), [(4, 4, 1), (2, 5, 1), (5, 2, 1), (1, 4, 2), (2, 3, 2)]
)
def test_singular_values_are_one(channels_in, channels_out, stride):
    module = SkewOrthogonalConv2d(channels_in, channels_out, 3, stride=stride, eval_terms=30).double().eval()
    values = torch.linalg.svdvals(jacobian(module, channels_in, 6))
    assert len(values) == min(channels_in * 36, channels_out * 36 // stride**2)
    torch.testing.assert_close(values, torch.ones_like(values), rtol=0, atol=1e-10)


def test_singular_values_with_the_authors_terms():
    module = SkewOrthogonalConv2d(8, 8, 3).double()
    assert (torch.linalg.svdvals(jacobian(module, 8, 8)) - 1).abs().max() < 2e-2
    assert (torch.linalg.svdvals(jacobian(module.eval(), 8, 8)) - 1).abs().max() < 1e-5


@pytest.mark.parametrize("terms", [1, 2, 5])
def test_the_receptive_field_grows_with_the_terms(terms):
    module = SkewOrthogonalConv2d(2, 2, 3, terms=terms).double()
    x = torch.zeros(1, 2, 15, 15, dtype=torch.float64, requires_grad=True)
    module(x)[0, 0, 7, 7].backward()
    seen = x.grad[0].abs().amax(0) > 0
    expected = torch.zeros(15, 15, dtype=torch.bool)
    expected[7 - terms : 8 + terms, 7 - terms : 8 + terms] = True
    assert torch.equal(seen, expected)


def test_the_output_of_a_stem_has_full_rank():
    """A 3x3 convolution of 3 channels gives rank 27 at most; this one sees 11x11 patches."""
    x = torch.randn(16, 3, 16, 16, dtype=torch.float64)
    for module, rank in ((nn.Conv2d(3, 64, 3, padding=1), 27), (SkewOrthogonalConv2d(3, 64, 3), 64)):
        y = module.double()(x).detach().transpose(0, 1).flatten(1)
        assert torch.linalg.matrix_rank(torch.cov(y)) == rank


def test_it_does_not_depend_on_the_scale_of_the_kernel():
    module = SkewOrthogonalConv2d(3, 4, 3).double().eval()
    x = torch.randn(1, 3, 5, 5, dtype=torch.float64)
    first = module(x)
    first.square().mul(torch.randn_like(first)).sum().backward()
    assert (module.weight.grad * module.weight).sum().abs() < 1e-10
    with torch.no_grad():
        module.weight.mul_(7)
    torch.testing.assert_close(module(x), first)


def test_training_keeps_it_orthogonal():
    module = SkewOrthogonalConv2d(4, 4, 3, bias=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.9)
    x, target = torch.randn(2, 4, 4, 8, 8)
    for _ in range(30):
        optimizer.zero_grad()
        (module(x) - target).square().mean().backward()
        optimizer.step()
    module.eval().double()
    assert (torch.linalg.svdvals(jacobian(module, 4, 6)) - 1).abs().max() < 1e-4


# gradients


def test_gradients():
    module = SkewOrthogonalConv2d(2, 3, 3, terms=3).double()
    for _ in range(500):
        module.kernel()
    module.eval()
    x = torch.randn(1, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    w = module.weight.detach().clone().requires_grad_()
    assert gradcheck(lambda x, w: torch.func.functional_call(module, {"weight": w}, (x,)), (x, w))


def test_two_forwards_and_one_backward():
    module = SkewOrthogonalConv2d(2, 3, 3)
    x = torch.randn(1, 2, 4, 4)
    (module.eval()(x) + module.train()(x) + module(x)).sum().backward()


# shapes and dtypes


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_shapes_and_dtypes(dtype, stride):
    module = SkewOrthogonalConv2d(3, 10, 3, stride=stride, dtype=dtype)
    x = torch.randn(2, 3, 8, 6, dtype=dtype)
    y = module(x)
    assert y.shape == (2, 10, 8 // stride, 6 // stride)
    assert y.dtype == dtype
    torch.testing.assert_close(module.eval()(x[0]), module(x)[0])
    assert module.weight.shape == (max(3 * stride**2, 10),) * 2 + (3, 3)


def test_autocast():
    module = SkewOrthogonalConv2d(3, 8, 3)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(torch.randn(2, 3, 8, 8))
    y.float().sum().backward()
    assert module.weight.grad.isfinite().all()


# errors


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: SkewOrthogonalConv2d(3, 4, 2), "odd number; got 2"),
        (lambda: SkewOrthogonalConv2d(0, 4, 3), "in_channels"),
        (lambda: SkewOrthogonalConv2d(3, 4, 3, terms=0), "terms"),
        (lambda: SkewOrthogonalConv2d(3, 4, 3, stride=1.5), "stride"),
        (lambda: SkewOrthogonalConv2d(3, 4, 3)(torch.randn(1, 4, 8, 8)), r"\(N, 3, H, W\)"),
        (lambda: SkewOrthogonalConv2d(3, 4, 3)(torch.randn(3, 8)), r"\(N, 3, H, W\)"),
        (lambda: SkewOrthogonalConv2d(3, 4, 3, stride=2)(torch.randn(1, 3, 8, 7)), "the stride 2 divides"),
    ],
)
def test_errors(call, text):
    with pytest.raises(ValueError, match=text):
        call()


# life cycle


def test_state_dict_holds_the_power_iteration():
    module = SkewOrthogonalConv2d(3, 6, 3)
    assert set(module.state_dict()) == {"weight", "bias", "v0", "v1", "v2", "v3"}
    assert {name for name, _ in module.named_parameters()} == {"weight", "bias"}
    other = SkewOrthogonalConv2d(3, 6, 3)
    other.load_state_dict(module.state_dict())
    x = torch.randn(2, 3, 6, 6)
    torch.testing.assert_close(other(x), module(x), rtol=0, atol=0)
    torch.testing.assert_close(copy.deepcopy(module)(x), module(x), rtol=1e-4, atol=1e-5)


def test_power_iteration_moves_in_training_only_and_converges():
    module = SkewOrthogonalConv2d(3, 6, 3).double()
    with torch.no_grad():
        module.weight.copy_(torch.randn_like(module.weight))
    exact = torch.linalg.matrix_norm(_unfold(_skew(module.weight.detach()), *_FOUR[2]), 2)
    errors = []
    for _ in range(200):
        module.kernel()
        errors.append(float((_unfold(_skew(module.weight.detach()), *_FOUR[2]) @ module.v2).norm() - exact))
    assert -1e-9 < errors[-1] < 1e-9
    assert errors[0] < -1e-3
    module.eval()
    before = module.v2.clone()
    module.kernel()
    assert torch.equal(module.v2, before)


def test_reset_norms_after_a_change_by_hand():
    module = SkewOrthogonalConv2d(3, 6, 3).double().eval()
    with torch.no_grad():
        module.weight.copy_(torch.randn_like(module.weight))
    module.reset_norms()
    skew = _skew(module.weight.detach())
    exact = min(torch.linalg.matrix_norm(_unfold(skew, *axes), 2) for axes in _FOUR)
    torch.testing.assert_close(module.kernel().detach(), 0.7 * skew / exact, rtol=0.05, atol=0)


def test_repr():
    expected = "SkewOrthogonalConv2d(3, 8, kernel_size=3, stride=1, terms=5, eval_terms=10, bias=False)"
    assert repr(SkewOrthogonalConv2d(3, 8, bias=False)) == expected


@pytest.mark.filterwarnings("ignore")  # of the compiler itself
def test_compile():
    module = SkewOrthogonalConv2d(3, 4, 3)
    compiled = torch.compile(copy.deepcopy(module), backend="aot_eager", fullgraph=True)
    for _ in range(2):
        x = torch.randn(2, 3, 6, 6)
        torch.testing.assert_close(compiled(x), module(x))


def test_a_zero_kernel_is_the_identity_with_a_finite_gradient():
    module = SkewOrthogonalConv2d(4, 4, 3, bias=False)
    own = module.weight.detach().clone()
    x = torch.randn(2, 4, 6, 6)
    with torch.no_grad():
        module.weight.zero_()
    module.reset_norms()
    for _ in range(3):
        y = module(x)
        (y * torch.randn_like(y)).sum().backward()
        torch.testing.assert_close(y, x)
        assert module.weight.grad.isfinite().all()
        assert module.weight.grad.abs().max() < 100
    with torch.no_grad():
        module.weight.copy_(own)
    for _ in range(50):
        assert module(x).norm() < 2 * x.norm()
    torch.testing.assert_close(module.eval()(x).norm(), x.norm(), rtol=1e-3, atol=0)
