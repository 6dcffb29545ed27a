"""Signs of a dead discriminator and of collapsed samples: values, invariants, errors."""

import math

import pytest
import torch
from scipy.spatial.distance import pdist

from orthocond.gans import (
    EigenDiscriminator,
    Hinge,
    discriminator_health,
    health_warnings,
    sample_spread,
)


def test_mean_logits():
    real, fake = torch.tensor([1.0, 2.0, 6.0], requires_grad=True), torch.tensor([-2.0, 0.0])
    found = discriminator_health(real, fake)
    assert (found["real_logit"].item(), found["fake_logit"].item(), found["cannot_tell"].item()) == (3, -1, 0)
    assert not any(value.requires_grad for value in found.values())


@pytest.mark.parametrize("offset", [0.0, 0.7, -30.0])
def test_equal_logits_cannot_tell(offset):
    logits = torch.full((8,), offset)
    assert discriminator_health(logits, logits)["cannot_tell"] == 1


@pytest.mark.parametrize(("gap", "expected"), [(0.0039, 1), (0.0042, 0), (-0.0039, 1), (-0.0042, 0)])
def test_the_border_lies_at_a_loss_of_0_002(gap, expected):
    """Near 0 softplus has slope 1/2: the loss is 2 ln 2 - gap / 2."""
    real, fake = torch.full((4,), gap / 2, dtype=torch.float64), torch.full((4,), -gap / 2, dtype=torch.float64)
    loss = math.log1p(math.exp(-gap / 2)) * 2
    assert (abs(loss - 2 * math.log(2)) < 0.002) == expected
    assert discriminator_health(real, fake)["cannot_tell"] == expected


def test_logits_that_vary_are_alive_without_a_difference_of_means():
    torch.manual_seed(0)
    logits = torch.randn(1000) * 0.3
    assert discriminator_health(logits, logits.flip(0))["cannot_tell"] == 0


@pytest.mark.parametrize(("form", "dead"), [("faithful", 1), ("working", 0)])
def test_initial_discriminators(form, dead):
    torch.manual_seed(0)
    d = EigenDiscriminator(32, 8, form=form)
    real, fake = torch.rand(16, 3, 32, 32), -torch.rand(16, 3, 32, 32)
    assert discriminator_health(d(real), d(fake))["cannot_tell"] == dead


def test_a_hinge_discriminator_at_any_constant_is_dead():
    """All constants between the margins have the loss 2, so its value alone would tell nothing."""
    constant = torch.full((4,), 0.5)
    assert Hinge().discriminator(constant, constant) == 2
    assert discriminator_health(constant, constant)["cannot_tell"] == 1


def test_half_precision_logits():
    found = discriminator_health(torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.bfloat16))
    assert found["cannot_tell"] == 1


def test_spread_equals_the_ratio_of_mean_distances():
    torch.manual_seed(0)
    samples, images = torch.rand(7, 3, 4, 4), torch.randn(9, 3, 4, 4)
    expected = pdist(samples.flatten(1).numpy()).mean() / pdist(images.flatten(1).numpy()).mean()
    assert sample_spread(samples, images).item() == pytest.approx(expected, rel=1e-5)
    assert sample_spread(images, images).item() == 1
    assert sample_spread(0.25 * images + 3, images).item() == pytest.approx(0.25, rel=1e-5)


def test_warnings_name_what_is_wrong():
    assert health_warnings(0.0) == health_warnings(0.5, 0.1) == []
    (dead,) = health_warnings(0.74)
    assert "dead: in 74 % of the steps" in dead
    (collapsed,) = health_warnings(0.0, 0.03)
    assert "0.03 times that of real images" in collapsed
    assert len(health_warnings(1.0, 0.0)) == len(health_warnings(1.0, math.nan)) == 2


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: discriminator_health(torch.zeros(0), torch.zeros(2)), ValueError, "got none"),
        (lambda: discriminator_health([0.0], torch.zeros(2)), TypeError, "torch.Tensor"),
        (lambda: sample_spread(torch.zeros(1, 3), torch.zeros(2, 3)), ValueError, "at least two images"),
        (lambda: sample_spread(torch.zeros(2, 3), torch.zeros(2, 4)), ValueError, "of one shape"),
    ],
)
def test_errors(call, kind, text):
    with pytest.raises(kind, match=text):
        call()
