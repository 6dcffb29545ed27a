"""Gradients of the layers: by finite differences, of second order, and against the plain composition."""

import pytest
import torch
from features import F64, LAYERS, features, set_affine
from torch.autograd import gradcheck, gradgradcheck

from orthocond.layers import (
    covariance_pool,
    whiten,
    whiten_color,
)

# gradients


@pytest.mark.parametrize("dims", LAYERS)
@pytest.mark.parametrize("groups", [1, 2])
def test_gradient_of_whitening(dims, groups):
    shape = {2: (9, 4), 3: (3, 4, 4), 4: (3, 4, 2, 2), 5: (2, 4, 2, 1, 3)}[dims]
    x = features(*shape, dtype=F64, spread=3.0).requires_grad_()
    layer = set_affine(LAYERS[dims](4, eps=1e-2, groups=groups)).double()
    gradcheck(lambda x, w, b: torch.func.functional_call(layer, {"weight": w, "bias": b}, x),
              (x, layer.weight, layer.bias))  # fmt: skip


def test_gradient_that_can_be_differentiated_is_the_same():
    x = features(3, 4, 2, 2, dtype=F64).requires_grad_()
    for form in (torch.contiguous_format, torch.channels_last):
        loss = (whiten(x.to(memory_format=form), groups=2) * torch.randn(3, 4, 2, 2, dtype=F64)).sum()
        plain = torch.autograd.grad(loss, x, retain_graph=True)
        torch.testing.assert_close(torch.autograd.grad(loss, x, create_graph=True), plain)


def test_gradients_of_a_batch_of_losses():
    x = features(3, 4, 2, 2, dtype=F64, spread=2.0).requires_grad_()
    for form in (torch.contiguous_format, torch.channels_last):
        gradcheck(lambda x, form=form: whiten(x.to(memory_format=form), eps=1e-2), x, check_batched_grad=True)


def test_second_gradients():
    x = features(3, 3, 2, 2, dtype=F64, spread=2.0).requires_grad_()
    style = features(3, 3, 3, 1, dtype=F64, spread=2.0).flip(1).requires_grad_()
    wide = features(1, 5, 2, 2, dtype=F64, spread=2.0).requires_grad_()
    gradgradcheck(lambda x: whiten(x, eps=1e-2), x)
    gradgradcheck(lambda x: whiten(x.to(memory_format=torch.channels_last), eps=1e-2), x)
    gradgradcheck(covariance_pool, x)
    gradgradcheck(covariance_pool, wide)
    gradgradcheck(lambda x, s: whiten_color(x, s, eps=1e-2, per="batch"), (x, style))


@pytest.mark.parametrize("eps", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(2, 3, 3, 3), (2, 7, 2, 2), (2, 4, 2, 2)])
def test_gradient_of_pooling(shape, eps):
    x = features(*shape, dtype=F64, spread=2.0).requires_grad_()
    gradcheck(lambda x: covariance_pool(x, eps=eps), x)


@pytest.mark.parametrize("per", ["image", "batch"])
def test_gradient_of_coloring(per):
    content = features(2, 3, 2, 4, dtype=F64, spread=2.0).requires_grad_()
    style = features(2, 3, 3, 3, dtype=F64, spread=2.0).flip(1).contiguous().requires_grad_()
    gradcheck(lambda c, s: whiten_color(c, s, alpha=0.7, eps=1e-2, per=per), (content, style))


def test_gradient_equals_the_plain_composition():
    """Long features, which the one pass cuts into parts, against autograd through the definition."""
    x = features(3, 8, 160, 120, dtype=F64)
    weight = torch.randn_like(x)
    gradients = []
    for compute in (whiten, _composed):
        z = x.clone().requires_grad_()
        (compute(z) * weight).sum().backward()
        gradients.append(z.grad)
    torch.testing.assert_close(*gradients, rtol=1e-7, atol=1e-9)


def _composed(x):
    values, vectors = torch.linalg.eigh(torch.cov(x.movedim(1, 0).flatten(1), correction=0))
    whitening = (vectors * (values + 1e-5).rsqrt()) @ vectors.T
    return torch.einsum("oi,nihw->nohw", whitening, x - x.mean((0, 2, 3), keepdim=True))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dims", LAYERS)
@pytest.mark.parametrize("groups", [1, 2])
def test_an_activation_in_place_takes_no_detour(dims, groups, training):
    """Autograd copies the gradient of a view that is changed in place; the output of the layer is none."""
    shape = {2: (9, 4), 3: (3, 4, 4), 4: (3, 4, 2, 2), 5: (2, 4, 2, 1, 3)}[dims]
    layer = LAYERS[dims](4, groups=groups).train(training)
    for form in (torch.contiguous_format, {4: torch.channels_last, 5: torch.channels_last_3d}.get(dims)):
        x = features(*shape).requires_grad_()
        laid_out = x if form is None else x.to(memory_format=form)
        y = layer(laid_out)
        assert not y._is_view()
        expected = torch.autograd.grad(y.relu().square().sum(), x, create_graph=True)
        again = layer(laid_out).relu_()
        assert again.grad_fn.name() == "ReluBackward0"  # not CopySlices
        torch.testing.assert_close(torch.autograd.grad(again.square().sum(), x, create_graph=True), expected)
