"""What `diagnose` says of decompositions that people write themselves, and which line replaces them."""

import math

import pytest
import torch
from diagnose_helpers import IMAGES, LABELS, HandWrittenPooling, covariances, network
from torch import nn
from torch.nn import functional as F

import orthocond as oc
from orthocond.monitor import diagnose


class Replaced(nn.Module):
    """The same after the advice."""

    def forward(self, x):
        return oc.sqrtm(covariances(x), eps=0.001).flatten(1)


class Whitening(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form = form

    def forward(self, x):
        x = x.movedim(1, -1).flatten(0, 2)
        x = x - x.mean(0)
        values, vectors = torch.linalg.eigh(torch.cov(x.T))
        inverse = {
            "rsqrt": lambda: values.rsqrt(),
            "power": lambda: values**-0.5,
            "reciprocal": lambda: 1 / values.clamp(min=1e-6).sqrt(),
            "divided": lambda: torch.div(torch.ones_like(values), torch.sqrt(values)),
            "torch.pow": lambda: torch.pow(values.diag(), -0.5).diagonal(),
        }[self.form]()
        return x @ (vectors * inverse) @ vectors.T


def tied_network():
    """Images without a pattern: all covariances are zero, which is a tie of all eigenvalues, exactly."""
    return network(HandWrittenPooling()), (torch.ones(8, 3, 6, 6), LABELS)


# Where NaN begins


def test_hand_written_pooling_with_nan_gradients():
    model, batch = tied_network()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    assert model.conv.weight.grad.isnan().any()  # the very bug that people come with
    found = diagnose(model, batch, F.cross_entropy)
    (failure,) = found.failures
    assert (failure.what, failure.stage, failure.layer) == ("NaN", "backward", "pool")
    assert failure.operation == "torch.linalg.eigh"
    assert failure.source == "values, vectors = torch.linalg.eigh(cov)"
    assert "diagnose_helpers.py" in failure.location
    assert math.isnan(found["conv"].gradient_condition)
    assert found["conv"].gradient_rank is None
    (call,) = found.decompositions
    assert (call.layer, call.shape, call.matrices, call.ties) == ("pool", (8, 12, 12), 8, 8)
    assert call.advice[0].code == "oc.sqrtm(cov, eps=0.001)"
    text = str(found)
    assert text.startswith("NaN begins in the backward of torch.linalg.eigh, called in layer 'pool' (")
    assert "oc.CovariancePool2d()" in text
    assert "- **pool**: The gradient of torch.linalg.eigh" in found.to_markdown()


def test_the_advice_cures_it():
    model, batch = tied_network()
    model.pool = Replaced()
    found = diagnose(model, batch, F.cross_entropy)
    assert not found.failures
    assert not found.decompositions
    different = network(HandWrittenPooling()), network(Replaced())
    different[1].load_state_dict(different[0].state_dict())
    outputs = [m.double()(IMAGES.double()) for m in different]
    assert torch.allclose(*outputs, atol=1e-9)


@pytest.mark.parametrize("form", ["rsqrt", "power", "reciprocal", "divided", "torch.pow"])
def test_whitening_by_hand_is_an_inverse_root(form):
    model = nn.Sequential(nn.Conv2d(3, 5, 3), Whitening(form))
    (call,) = diagnose(model, IMAGES).decompositions
    assert call.advice[0].code == "oc.inv_sqrtm(torch.cov(x.T))"
    assert "oc.DecorrelatedBatchNorm2d(5)" in call.advice[0].text


class Decomposed(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.function = function

    def forward(self, x):
        return x @ self.function(self.weight)


def orthogonal_by_svd(w):
    u, _, vh = torch.linalg.svd(w, full_matrices=False)
    return u @ vh


def test_svd_of_a_rectangular_matrix_is_a_polar_factor():
    found = diagnose(Decomposed(orthogonal_by_svd), torch.randn(5, 4))
    assert found.decompositions[0].operation == "torch.linalg.svd"
    assert found.decompositions[0].advice[0].code == "oc.polar(w)"


def test_old_names_and_methods_are_seen():
    found = diagnose(Decomposed(lambda w: w.svd()[0]), torch.randn(5, 4))
    assert found.decompositions[0].operation == "torch.Tensor.svd"
    found = diagnose(Decomposed(lambda w: torch.linalg.eigh(w @ w.T)[1]), torch.randn(5, 4))
    assert "oc.sqrtm(w @ w.T) and oc.inv_sqrtm(w @ w.T)" in found.decompositions[0].advice[0].text


def test_what_needs_no_replacement_is_not_listed():
    """Eigenvalues without eigenvectors have a safe gradient; ours, and those without gradient, are no matter."""
    for function in (
        lambda w: w * torch.linalg.svdvals(w).sum(),
        lambda w: w * torch.linalg.eigvalsh(w @ w.T).sum(),
        lambda w: w * torch.linalg.eigh((w @ w.T).detach())[1].sum(),
        oc.polar,
    ):
        assert not diagnose(Decomposed(function), torch.randn(5, 4)).decompositions
    model = nn.Sequential(nn.Conv2d(3, 5, 3), oc.DecorrelatedBatchNorm2d(5), oc.CovariancePool2d())
    assert not diagnose(model, IMAGES).decompositions


# What was checked


def test_it_says_what_it_did_not_check():
    plain = diagnose(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)), torch.randn(9, 4), lambda y: y.mean())
    assert plain.checked.startswith("Checked: whether all values are finite, forward and backward;")
    assert "of 2 layers" in plain.checked
    assert "no SVD layer of orthocond, nor differentiates through eigh or svd" in plain.checked
    by_hand = diagnose(network(HandWrittenPooling()), (IMAGES, LABELS), F.cross_entropy)
    assert "nor differentiates" not in by_hand.checked


# Notebooks


class Script(nn.Module):
    """A layer whose name would be markup."""

    def __init__(self):
        super().__init__()
        self.add_module("<b>", nn.Linear(3, 2))

    def forward(self, x):
        return self._modules["<b>"](x)


def test_html():
    html = diagnose(Script(), torch.randn(7, 3))._repr_html_()
    assert html.startswith("<table>")
    assert "<b>" not in html
    assert "&lt;b&gt;" in html
    assert "http" not in html
    model, batch = tied_network()
    html = diagnose(model, batch, F.cross_entropy)._repr_html_()
    assert html.startswith("<div>⚠ NaN begins in the backward of torch.linalg.eigh")
    assert ">oc.sqrtm(cov, eps=0.001)</pre>" in html
