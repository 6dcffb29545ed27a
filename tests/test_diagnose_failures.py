"""What `diagnose` says of a model that does not work: where NaN begins, and which line replaces a decomposition."""

import json
import math

import pytest
import torch
from diagnose_helpers import IMAGES, WithLinear, network
from torch import nn

import orthocond as oc
from orthocond.monitor import diagnose


class Logarithm(nn.Module):
    def forward(self, x):
        return (x - 10).log()


def test_nan_in_the_forward():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(nn.ReLU(), Logarithm()), nn.Flatten(), nn.Linear(64, 2))
    found = diagnose(model, IMAGES, lambda y: y.mean())
    (failure,) = found.failures
    assert (failure.what, failure.stage, failure.layer) == ("NaN", "forward", "1.1")
    assert (failure.operation, failure.source) == ("torch.Tensor.log", "return (x - 10).log()")
    assert math.isnan(found.loss)
    assert found["3"].rank is None
    assert "Its covariance is not finite." in str(found)
    assert json.loads(found.to_json())["failures"][0]["layer"] == "1.1"


def test_a_gradient_that_is_not_finite_has_no_rank():
    class Root(nn.Module):
        def forward(self, x):
            return (x * 0).sqrt()

    found = diagnose(nn.Sequential(nn.Conv2d(3, 4, 3), Root()), IMAGES, lambda y: y.mean())
    assert (found.failures[0].stage, found["0"].gradient_rank) == ("backward", None)
    row = next(line for line in str(found).splitlines() if line.startswith("0 "))
    assert row.rstrip().endswith("-")
    assert "None" not in row


class Overflow(nn.Module):
    def forward(self, x):
        grown = (100 * x.square() + 100).exp()
        return grown / grown.sum()


def test_infinity_before_nan_is_the_cause():
    found = diagnose(nn.Sequential(nn.Conv2d(3, 4, 3), Overflow()), IMAGES, lambda y: y.mean())
    assert [(f.what, f.operation) for f in found.failures] == [
        ("infinity", "torch.Tensor.exp"),
        ("NaN", "torch.Tensor.div"),
    ]


class Masked(nn.Module):
    """Infinities that are meant, uninitialized memory, and a gradient that is infinite where nobody reads it."""

    def __init__(self, broken):
        super().__init__()
        self.fc, self.broken = nn.Linear(4, 4), broken

    def forward(self, x):
        scores = self.fc(x)
        scratch = torch.empty_like(scores).fill_(math.nan)
        mask = torch.full((4, 4), -math.inf).triu(1)
        y = torch.softmax(scores + mask, -1) + scratch.zero_()
        root = (y * 0).sqrt()
        return torch.where(y > 2, root, y) if self.broken else y + root.detach()


def test_meant_infinities_are_no_failure():
    found = diagnose(Masked(broken=False), torch.randn(4, 4), lambda y: y.square().sum())
    assert not found.failures


def test_the_gradient_of_a_branch_that_is_not_taken():
    """The classic of torch.where: 0 times infinity."""
    (failure,) = diagnose(Masked(broken=True), torch.randn(4, 4), lambda y: y.square().sum()).failures
    assert (failure.stage, failure.operation) == ("backward", "torch.Tensor.sqrt")
    assert failure.source == "root = (y * 0).sqrt()"


class FullyMasked(WithLinear):
    """Attention that may look at nothing: a softmax over infinities only, all of them meant."""

    def forward(self, x):
        scratch = torch.full_like(x, math.nan)
        scores = self.fc(x) + torch.full((4, 4), -math.inf).triu(1)
        masked = scores.masked_fill(torch.ones(4, 4, dtype=torch.bool), -math.inf)
        return torch.softmax(masked, -1) + torch.where(scratch > 0, scratch, x)


def test_constants_are_not_blamed():
    (failure,) = diagnose(FullyMasked(), torch.randn(4, 4)).failures
    assert (failure.what, failure.operation) == ("NaN", "torch.softmax")


def test_an_operation_in_place_is_blamed():
    class InPlace(WithLinear):
        def forward(self, x):
            return (self.fc(x) * 0 - 1).sqrt_()

    (failure,) = diagnose(InPlace(), torch.randn(4, 4)).failures
    assert failure.operation == "torch.Tensor.sqrt_"


class HiddenInfinity(WithLinear):
    """An infinite gradient that a ReLU stops comes before the one that reaches the parameters."""

    def forward(self, x):
        y = self.fc(x)
        reaches = (y * 0).pow(0.3).sum()
        return reaches + torch.relu(y * 0 - 1).sqrt().sum()


def test_only_what_reaches_a_parameter_counts():
    (failure,) = diagnose(HiddenInfinity(), torch.randn(4, 4)).failures
    assert failure.operation == "torch.Tensor.pow"


class Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * math.inf


class WithCustom(nn.Module):
    def forward(self, x):
        return Custom.apply(x)


def test_a_custom_function_is_named_with_its_layer():
    model = nn.Sequential(nn.Linear(4, 4), WithCustom(), nn.Linear(4, 1))
    (failure,) = diagnose(model, torch.randn(3, 4)).failures
    assert (failure.stage, failure.layer, failure.operation, failure.location) == ("backward", "1", "Custom", None)


def test_the_loss_is_no_layer():
    found = diagnose(nn.Linear(4, 1), torch.randn(3, 4), lambda y: (y * 0).sqrt().sum())
    assert str(found).startswith("NaN begins in the backward of torch.Tensor.sqrt, called in the loss (")


def test_a_broken_batch_and_a_broken_parameter():
    model = network(oc.CovariancePool2d(output="matrix"))
    model.head = nn.Sequential(nn.Flatten(), model.head)
    found = diagnose(model, IMAGES * math.nan, lambda y: y.mean())
    assert str(found).startswith("The batch itself holds NaN, in its inputs.")
    with torch.no_grad():
        model.conv.bias[0] = math.inf
    found = diagnose(model, IMAGES, lambda y: y.mean())
    assert str(found).startswith("conv.bias already holds infinity before the forward.")


class Failing(nn.Module):
    def forward(self, x):
        values, _ = torch.linalg.eigh(x.flatten(2) @ x.flatten(2).mT)
        return values


def test_failed_to_converge_is_part_of_the_result(monkeypatch):
    """Michaelvll/DeepCCA#16 and many others: LinAlgError in the middle of a training."""

    def fail(*args, **kwargs):
        raise torch.linalg.LinAlgError("linalg.eigh: The algorithm failed to converge")

    model = nn.Sequential(nn.Conv2d(3, 4, 3), Failing())
    monkeypatch.setattr(torch.linalg, "eigh", fail)
    (failure,) = diagnose(model, IMAGES).failures
    assert failure.what == "LinAlgError: linalg.eigh: The algorithm failed to converge"
    assert failure.stage == "forward"
    monkeypatch.undo()
    with torch.no_grad():
        model[0].weight.mul_(1e30)
    found = diagnose(model, IMAGES)
    assert found.failures[0].what == "infinity"
    assert "matmul" in found.failures[0].operation
    assert found.failures[0].layer == "1"


def test_errors_of_the_model_itself_pass_through():
    with pytest.raises(RuntimeError, match="shape"):
        diagnose(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(5, 5)), IMAGES)
