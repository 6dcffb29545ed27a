"""Spectral normalization and orthogonality loss, each: values, gradients, shapes and dtypes, errors, life cycle."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck
from torch.nn.utils import parametrizations, parametrize

from orthocond.matrix import matrix_view, polar
from orthocond.weights import orthogonal, orthogonality_loss, spectral
from tests.test_weights_orthogonal import LAYERS, move, view


def largest(w):
    return torch.linalg.matrix_norm(w, 2).max()


# spectral: values


@pytest.mark.parametrize("layer", LAYERS)
def test_spectral_is_exact_from_the_start(layer):
    module = LAYERS[layer]().double()
    own = view(module)
    spectral(module)
    torch.testing.assert_close(view(module), own / largest(own))


@pytest.mark.parametrize("layer", ["linear-wide", "conv2d-tall", "conv2d-groups", "transposed2d"])
def test_spectral_converges_and_follows(layer):
    module = move(spectral(LAYERS[layer]().double()))
    for _ in range(300):
        module.weight  # noqa: B018  # each access in training mode is one power iteration
    torch.testing.assert_close(largest(view(module)), torch.tensor(1.0, dtype=torch.float64))
    exact = module.weight.detach().clone()
    module.eval()
    before = copy.deepcopy(module.state_dict())
    torch.testing.assert_close(module.weight.detach(), exact)
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("layer", ["linear-wide", "conv2d-wide", "conv3d"])
def test_spectral_equals_torch_where_the_matrix_is_the_same(layer):
    module = LAYERS[layer]().double()
    other = parametrizations.spectral_norm(copy.deepcopy(module), n_power_iterations=500)
    torch.testing.assert_close(spectral(module).weight, other.weight)


def test_spectral_of_a_transposed_convolution_takes_its_matrix_view():
    module = nn.ConvTranspose2d(3, 8, 4).double()
    torchs = parametrizations.spectral_norm(copy.deepcopy(module), n_power_iterations=500)
    spectral(module)
    assert abs(largest(matrix_view(module.weight)) - 1) < 1e-12
    assert abs(largest(matrix_view(torchs.weight)) - 1) > 1e-2


# spectral: gradients


@pytest.mark.parametrize("layer", ["linear-wide", "conv2d-groups"])
def test_spectral_gradient(layer):
    """At the exact singular vectors the gradient is that of W / σ, with σ from a decomposition."""
    module = LAYERS[layer]().double()
    w = module.weight.detach().clone().requires_grad_()
    g = torch.randn_like(w)
    groups = getattr(module, "groups", 1)
    ((w / largest(matrix_view(w, groups))) * g).sum().backward()
    spectral(module)
    (module.weight * g).sum().backward()
    torch.testing.assert_close(module.parametrizations.weight.original.grad, w.grad)


def test_spectral_two_forwards_and_one_backward():
    module = spectral(nn.Linear(4, 3))
    (module(torch.randn(2, 4)) + module(torch.randn(2, 4))).sum().backward()


@pytest.mark.parametrize("layer", ["linear-wide", "conv2d-groups"])
def test_spectral_through_zero(layer):
    """A weight that becomes zero gives zero and a finite gradient; afterwards the norm is 1 again."""
    module = spectral(LAYERS[layer]())
    raw = module.parametrizations.weight.original
    own = raw.detach().clone()
    with torch.no_grad():
        raw.zero_()
    for _ in range(3):
        weight = module.weight
        weight.sum().backward()
        assert (weight == 0).all()
        assert raw.grad.isfinite().all()
    with torch.no_grad():
        raw.copy_(own)
    for _ in range(200):
        weight = module.weight
        assert weight.norm() < 10
    assert abs(largest(matrix_view(weight.detach(), getattr(module, "groups", 1))) - 1) < 1e-4
    assert abs(largest(matrix_view(module.eval().weight.detach(), getattr(module, "groups", 1))) - 1) < 1e-4


def test_spectral_where_the_followed_vector_is_lost():
    """The weight moves to where the followed vector is mapped to zero: the iteration starts anew."""
    module = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]]))
    spectral(module)
    with torch.no_grad():
        module.parametrizations.weight.original.copy_(torch.tensor([[0.0, 0.0, 0.0], [0.0, 3.0, 4.0]]))
    torch.testing.assert_close(module.weight, torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.6, 0.8]]))


@pytest.mark.parametrize("scale", [1e-15, 1e15])
def test_spectral_at_all_scales(scale):
    module = nn.Linear(5, 3)
    with torch.no_grad():
        module.weight.mul_(scale)
    assert abs(largest(view(move(spectral(module), 0.0))) - 1) < 1e-5


# spectral: shapes and dtypes, errors, life cycle


def test_spectral_half_precision_and_autocast():
    module = spectral(nn.Conv2d(3, 8, 3).bfloat16())
    assert module.weight.dtype == torch.bfloat16
    assert abs(largest(view(module).float()) - 1) < 0.02
    module = spectral(nn.Conv2d(3, 8, 3))
    with torch.autocast("cpu", torch.bfloat16):
        w = view(module)
    assert abs(largest(w) - 1) < 1e-6


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: spectral(nn.ReLU()), ValueError, "spectral needs a module with a parameter 'weight'"),
        (lambda: spectral(nn.LayerNorm(3)), ValueError, "at least two dimensions"),
        (lambda: spectral(spectral(nn.Linear(3, 3))), RuntimeError, "already parametrized"),
        (lambda: spectral(orthogonal(nn.Linear(3, 3))), RuntimeError, "already parametrized"),
        (lambda: spectral(nn.Linear(3, 3), iterations=0), ValueError, "at least 1"),
        (lambda: spectral(nn.Linear(3, 3).requires_grad_(False).apply(lambda m: m.weight.zero_())), ValueError, "zero"),
    ],
)
def test_spectral_errors(call, kind, text):
    with pytest.raises(kind, match=text):
        call()


def test_spectral_life_cycle():
    module = nn.Conv2d(3, 8, 3)
    parameter = module.weight
    spectral(module)
    other = spectral(nn.Conv2d(3, 8, 3))
    other.load_state_dict(module.state_dict())
    module.eval()
    other.eval()
    torch.testing.assert_close(other.weight, module.weight, rtol=0, atol=0)
    torch.testing.assert_close(copy.deepcopy(module).weight, module.weight, rtol=0, atol=0)
    w = torch.randn(8, 3, 3, 3)
    module.weight = w
    torch.testing.assert_close(view(module)[0], w.flatten(1) / largest(w.flatten(1)))
    assert "iterations=1" in repr(module)
    parametrize.remove_parametrizations(module, "weight")
    assert type(module) is nn.Conv2d
    assert module.weight is parameter


# orthogonality loss: values


@pytest.mark.parametrize("form", ["squared", "paper"])
@pytest.mark.parametrize("layer", LAYERS)
def test_loss_equals_its_definition(layer, form):
    module = LAYERS[layer]().double()
    w = view(module)
    rows = w.shape[-2] <= w.shape[-1] or form == "paper"
    grams = [m @ m.mT if rows else m.mT @ m for m in w]
    squares = sum(((g - torch.eye(len(g), dtype=g.dtype)) ** 2).sum() for g in grams)
    expected = squares if form == "squared" else squares.sqrt()
    groups = getattr(module, "groups", 1)
    torch.testing.assert_close(orthogonality_loss(module, form=form).detach(), expected)
    torch.testing.assert_close(orthogonality_loss(module.weight.detach(), form=form, groups=groups), expected)


def test_loss_reaches_zero_only_on_the_smaller_side():
    w = polar(torch.randn(64, 27, dtype=torch.float64))
    assert orthogonality_loss(w) < 1e-24
    assert orthogonality_loss(w, side="columns", form="paper") < 1e-12
    assert abs(orthogonality_loss(w, form="paper") - 37**0.5) < 1e-12
    assert abs(orthogonality_loss(w, side="rows") - 37) < 1e-12
    assert orthogonality_loss(w.mT) < 1e-24


# orthogonality loss: invariants, gradients


def test_both_sides_have_the_same_gradient():
    w = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    rows, columns = (torch.autograd.grad(orthogonality_loss(w, side=s), w)[0] for s in ("rows", "columns"))
    torch.testing.assert_close(rows, columns)


@pytest.mark.parametrize("form", ["squared", "paper"])
@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 2, 3)])
def test_loss_gradient(shape, form):
    w = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda w: orthogonality_loss(w, form=form), w)


@pytest.mark.parametrize("form", ["squared", "paper"])
def test_gradient_is_zero_at_an_orthogonal_weight(form):
    w = torch.eye(4, 6, requires_grad=True)
    orthogonality_loss(w, form=form).backward()
    assert torch.equal(w.grad, torch.zeros(4, 6))


def test_descent_makes_a_weight_orthogonal():
    module = nn.Conv2d(3, 40, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for _ in range(200):
        optimizer.zero_grad()
        orthogonality_loss(module).backward()
        optimizer.step()
    assert orthogonality_loss(module).item() < 1e-6


# orthogonality loss: shapes and dtypes, errors


def test_loss_half_precision_and_parametrized():
    w = torch.eye(3, 5, dtype=torch.bfloat16)
    assert orthogonality_loss(w).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        w = polar(torch.randn(8, 50))
        assert orthogonality_loss(w) < 1e-10
    assert orthogonality_loss(orthogonal(nn.Linear(3, 5))).item() < 1e-10


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: orthogonality_loss(nn.ReLU()), ValueError, "ReLU has none"),
        (lambda: orthogonality_loss(nn.BatchNorm1d(3)), ValueError, "two dimensions"),
        (lambda: orthogonality_loss([1.0]), TypeError, "torch.Tensor"),
        (lambda: orthogonality_loss(torch.ones(3, 3, dtype=torch.int64)), TypeError, "floating-point"),
        (lambda: orthogonality_loss(torch.eye(3), form="norm"), ValueError, "'squared', 'paper'"),
        (lambda: orthogonality_loss(torch.eye(3), side="left"), ValueError, "'rows', 'columns'"),
        (lambda: orthogonality_loss(torch.eye(3), groups=2), ValueError, "divide"),
        (lambda: orthogonality_loss(nn.Linear(3, 3), groups=3), ValueError, "of a module the groups are read"),
    ],
)
def test_loss_errors(call, kind, text):
    with pytest.raises(kind, match=text):
        call()
