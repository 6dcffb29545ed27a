"""What the layers refuse, and how far features that are not finite reach."""

import copy

import pytest
import torch
from torch import nn

from orthocond.layers import (
    CovariancePool2d,
    DecorrelatedBatchNorm1d,
    DecorrelatedBatchNorm2d,
    WhitenColor2d,
    covariance_pool,
    whiten,
    whiten_color,
)
from orthocond.matrix import Eigh, NewtonSchulz

# errors


def test_errors_of_whitening():
    with pytest.raises(ValueError, match=r"needs groups that divide the channels; got 6 channels and 4 groups"):
        DecorrelatedBatchNorm2d(6, groups=4)
    with pytest.raises(ValueError, match="divide"):
        whiten(torch.randn(4, 6), groups=4)
    with pytest.raises(ValueError, match=r"needs one of 'covariance', 'whitening'; got 'mean'"):
        DecorrelatedBatchNorm2d(6, average="mean")
    with pytest.raises(TypeError, match=r"Add parentheses: Eigh\(\)"):
        DecorrelatedBatchNorm2d(6, solver=Eigh)
    layer = DecorrelatedBatchNorm2d(6)
    with pytest.raises(ValueError, match=r"DecorrelatedBatchNorm2d needs 4-D features .* got shape \(8, 6\)"):
        layer(torch.randn(8, 6))
    with pytest.raises(ValueError, match="2-D or 3-D"):
        DecorrelatedBatchNorm1d(6)(torch.randn(8, 6, 2, 2))
    with pytest.raises(ValueError, match="built for 6 channels"):
        layer(torch.randn(8, 5, 2, 2))
    with pytest.raises(ValueError, match="more than one value per channel"):
        layer(torch.randn(1, 6, 1, 1))
    with pytest.raises(TypeError, match="floating-point"):
        layer(torch.ones(8, 6, 2, 2, dtype=torch.int64))
    layer.eval()(torch.randn(1, 6, 1, 1))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_features_that_are_not_finite_are_named(value):
    x = torch.randn(2, 6, 4, 4)
    x[1, 2, 3, 0] = value
    other = torch.randn(2, 6, 4, 4)
    for layer in (
        *(whiten, covariance_pool, lambda x: whiten_color(other, x)),
        *(CovariancePool2d(nonfinite="raise"), lambda x: WhitenColor2d(nonfinite="raise")(x, other)),
    ):
        with pytest.raises(ValueError, match="needs finite features; 1 of 192"):
            layer(x)
    for layer in (CovariancePool2d, WhitenColor2d):
        with pytest.raises(ValueError, match="'propagate', 'raise'"):
            layer(nonfinite="ignore")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("layer", [
    CovariancePool2d(),
    CovariancePool2d(eps=0.1),
    CovariancePool2d(solver=NewtonSchulz(steps=15)),
    WhitenColor2d(),
], ids=repr)  # fmt: skip
@pytest.mark.parametrize("side", [2, 4])
def test_image_that_is_not_finite_harms_no_other(layer, value, side):
    """Output and gradient of the image are NaN, so that a gradient scaler skips the step; the others are as without."""
    layer = copy.deepcopy(layer)
    style = torch.randn(1, 6, 5, 5)

    def run(x):
        x = x.clone().requires_grad_()
        y = layer(x) if isinstance(layer, CovariancePool2d) else layer(x, style)
        (y * torch.linspace(-1, 1, y[0].numel()).reshape(y[0].shape)).sum().backward()
        return y.detach(), x.grad

    x = torch.randn(3, 6, side, side)
    sound = run(x)
    x[1, 2, 1, 0] = value
    layer.observer = pytest.fail
    for found, expected in zip(run(x), sound, strict=True):
        assert found[1].isnan().all()
        torch.testing.assert_close(found[::2], expected[::2])
    assert layer.nonfinite_batches == 1
    layer.observer = None
    layer.eval()
    run(x)
    assert layer.nonfinite_batches == 1  # of training
    assert not layer.state_dict()


def test_style_or_batch_that_is_not_finite_reaches_all_images():
    x = torch.randn(2, 6, 4, 4)
    bad = x.clone()
    bad[1, 2, 3, 0] = float("nan")
    for layer, pair in ((WhitenColor2d(per="batch"), (bad, x)), (WhitenColor2d(), (x, bad[1:]))):
        assert layer(*pair).isnan().all()
        assert layer.nonfinite_batches == 1


def test_scaler_skips_the_step_of_an_overflow_in_pooling():
    model = nn.Sequential(nn.Conv2d(3, 6, 3), CovariancePool2d(), nn.Linear(21, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for scale, moved in ((float("inf"), False), (1.0, True)):
        before = model[0].weight.detach().clone()
        x = torch.randn(8, 3, 6, 6)
        x[5] *= scale
        optimizer.zero_grad()
        scaler.scale(model(x).pow(2).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, model[0].weight) != moved
    assert scaler.get_scale() == 4.0
    assert model[1].nonfinite_batches == 1


def test_errors_of_pooling_and_coloring():
    with pytest.raises(ValueError, match="at least two positions"):
        covariance_pool(torch.randn(2, 6, 1, 1))
    with pytest.raises(ValueError, match="4-D"):
        CovariancePool2d()(torch.randn(2, 6, 5))
    with pytest.raises(ValueError, match="at least 3-D"):
        covariance_pool(torch.randn(2, 6))
    with pytest.raises(ValueError, match="'triu', 'matrix'"):
        CovariancePool2d(output="full")
    x = torch.randn(3, 6, 4, 4)
    with pytest.raises(ValueError, match="3 images or one"):
        whiten_color(x, x[:2])
    with pytest.raises(ValueError, match="6 channels"):
        whiten_color(x, x[:, :3])
    with pytest.raises(ValueError, match="0 to 1"):
        whiten_color(x, x, alpha=2.0)
    with pytest.raises(ValueError, match="'image', 'batch'"):
        WhitenColor2d(per="pixel")
