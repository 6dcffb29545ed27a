"""`rotate` of generators that are more than their weights: parametrized, derived, hooked; what can be saved."""

import copy
import io
import warnings

import pytest
import torch
from torch import nn

import orthocond as oc
from orthocond.directions import rotate
from orthocond.directions.rotation import RotatedGenerator
from orthocond.gans import EigenGenerator, SimpleGenerator

KINDS = {
    "spectral": torch.nn.utils.parametrizations.spectral_norm,
    "orthogonal": torch.nn.utils.parametrizations.orthogonal,
    "weight": torch.nn.utils.parametrizations.weight_norm,
    "oc": oc.orthogonal,
}


class Bent(SimpleGenerator):
    """A derived class whose images are not those of its weights alone."""

    def forward(self, z):
        return super().forward(z.tanh())


class BentEigen(EigenGenerator):
    """The same of an EigenGAN."""

    def forward(self, z, noise=None):
        return super().forward(z.tanh(), noise)


class Negative(oc.Generator):
    """A derived wrapper."""

    def forward(self, z):
        return -super().forward(z)


def simple():
    return SimpleGenerator(size=8, z_dim=4, width=4)


def turn(d=4):
    return torch.linalg.qr(torch.randn(d, d))[0]


def blocks():
    return torch.block_diag(turn(3), turn(3))


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_parametrized_generator_stays_as_it_is(kind):
    g = simple()
    KINDS[kind](g.first_projection)
    g.eval()
    z, r = torch.randn(5, 4), turn()
    before = g(z)
    turned = rotate(g, r)
    assert torch.equal(g(z), before)
    torch.testing.assert_close(turned.eval()(z), g(z @ r), atol=1e-5, rtol=0)
    assert type(turned) is SimpleGenerator


@pytest.mark.parametrize("kind", ["orthogonal", "oc"])
def test_an_eigengan_with_parametrized_subspaces_stays_as_it_is(kind):
    g = EigenGenerator(16, 3, 4, 4).eval()
    for layer in g.subspaces:
        KINDS[kind](layer)
    z, r, noise = torch.randn(5, 6), blocks(), torch.randn(5, 4)
    before = g(z, noise)
    turned = rotate(g, r)
    assert torch.equal(g(z, noise), before)
    torch.testing.assert_close(turned(z, noise), g(z @ r, noise), atol=1e-5, rtol=0)


def _hooked():
    g = simple()
    g.register_forward_pre_hook(lambda module, args: (args[0].tanh(),))
    return g


def _hooked_inside():
    g = simple()
    g.first_projection.register_forward_pre_hook(lambda module, args: (args[0].tanh(),))
    return g


@pytest.mark.parametrize(
    "make",
    [
        lambda: Bent(size=8, z_dim=4, width=4),
        _hooked,
        _hooked_inside,
        lambda: Negative(simple()),
        lambda: oc.Generator(Bent(size=8, z_dim=4, width=4)),
    ],
)
def test_what_a_derived_class_or_a_hook_does_stays(make):
    g = make().eval()
    z, r = torch.randn(5, 4), turn()
    torch.testing.assert_close(rotate(g, r).eval()(z), g(z @ r), atol=1e-6, rtol=0)


def test_a_derived_eigengan_keeps_its_noise():
    g = BentEigen(16, 3, 4, 4).eval()
    z, r, noise = torch.randn(5, 6), turn(6), torch.randn(5, 4)  # wrapped, so its layers may mix
    turned = rotate(g, r)
    assert isinstance(turned, RotatedGenerator)
    torch.testing.assert_close(turned(z, noise), g(z @ r, noise), atol=1e-6, rtol=0)


def test_a_latent_without_effect_can_learn_again():
    g = EigenGenerator(16, 3, 4, 4).eval()
    with torch.no_grad():
        g.subspaces[0].scale[1] = 0
    turned = rotate(g, torch.eye(6))
    torch.testing.assert_close(turned.subspaces[0].weight, g.subspaces[0].weight)
    turned(torch.randn(5, 6), torch.randn(5, 4)).square().sum().backward()
    assert turned.subspaces[0].scale.grad[1] != 0


# --- life cycle ------------------------------------------------------------------------------------------------------


def test_a_rotated_prior_can_be_saved_and_samples_the_same():
    g = oc.Generator(simple(), prior="uniform")
    r = turn()
    turned = rotate(g, r)
    torch.testing.assert_close(turned.sample(7, 3), g.sample(7, 3) @ r.mT)
    file = io.BytesIO()
    torch.save(turned, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert torch.equal(again.sample(7, 3), turned.sample(7, 3))
    assert torch.equal(copy.deepcopy(turned).sample(7, 3), turned.sample(7, 3))


class Bright(nn.Module):
    """Pixels in (0.5, 1), as a bright picture has them after a sigmoid."""

    z_dim = 4

    def forward(self, z):
        return (z / 4).sigmoid().reshape(-1, 1, 2, 2) / 4 + 0.7


def test_a_warning_of_the_range_is_not_said_again():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        g = oc.Generator(Bright(), range=(0, 1))
        assert rotate(g, turn()).range == (-1.0, 1.0)


@pytest.mark.parametrize("training", [True, False])
def test_a_wrapped_generator_has_the_mode_of_its_parts(training):
    turned = rotate(Bent(size=8, z_dim=3, width=4).train(training), torch.eye(3))
    assert isinstance(turned, RotatedGenerator)
    assert {m.training for m in turned.modules()} == {training}
