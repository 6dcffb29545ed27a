"""Effect matrices and factor reports: closed forms, unreadable images, the picture, errors."""

import sys

import matplotlib
import pytest
import torch

from orthocond.directions import Directions
from orthocond.lab.data.rendering import FACTORS, SHAPES, read_factors, render
from orthocond.metrics import EffectMatrix, activeness, effect_matrix, factor_report, plot_effect_matrix
from tests.metrics_helpers import Tiles, read_tiles, rotation

FAST = 40  # trees of DCI
NORMAL = 2**0.5 / 3.141592653589793**0.5  # mean of |N(0, 1)|


class Sprites:
    """The renderer as a generator: each latent is one factor, through the normal distribution function."""

    z_dim = 6

    def __call__(self, z):
        low, high = torch.tensor(list(FACTORS.values())).unbind(1)
        shapes = torch.zeros(len(z), dtype=torch.long)
        return render(low + (high - low) * torch.special.ndtr(z), shapes, 32) * 2 - 1


def read_sprites(images):
    return read_factors(images).values


# values


def test_latents_that_are_factors_give_the_identity():
    found = effect_matrix(Tiles(), None, read_tiles, spread=torch.ones(4), samples=50)
    torch.testing.assert_close(found.values, torch.eye(4, dtype=torch.float64), rtol=1e-3, atol=1e-4)
    assert found.read == 1
    assert found.factors == ("factor 0", "factor 1", "factor 2", "factor 3")


@pytest.mark.parametrize("step", [0.5, 2.0])
def test_a_turned_generator_shows_the_entries_of_the_rotation(step):
    turn = rotation(4)
    found = effect_matrix(Tiles(turn=turn), None, read_tiles, spread=torch.ones(4), samples=50, step=step)
    torch.testing.assert_close(found.values, turn.abs().double(), rtol=1e-2, atol=1e-3)
    back = effect_matrix(Tiles(turn=turn), turn.mT.contiguous(), read_tiles, spread=torch.ones(4), samples=50)
    torch.testing.assert_close(back.values, torch.eye(4, dtype=torch.float64), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("measure", [activeness, lambda g, d: effect_matrix(g, d, read_tiles, samples=20).values])
def test_directions_stand_for_their_rows(measure):
    turn = rotation(4)
    found = Directions(turn[:3], torch.tensor([3.0, 2.0, 1.0]))
    assert torch.equal(torch.as_tensor(measure(Tiles(), found)), torch.as_tensor(measure(Tiles(), found.vectors)))


def test_effects_are_in_units_of_the_spread():
    def scaled(images):
        return read_tiles(images) * torch.tensor([1.0, 10.0, 0.0, 1.0])

    found = effect_matrix(Tiles(), None, scaled, samples=400)
    assert found.values[1, 1] == pytest.approx(1, rel=0.1)
    assert found.values[2].tolist() == [0, 0, 0, 0]  # no spread, no effect
    assert float(found.spread[1]) == pytest.approx(10, rel=0.1)


def test_effects_are_mean_absolute_changes():
    """A factor z0² changes by 2 s |z0| over the step s: on average 2 √(2/π)."""

    def square(images):
        return read_tiles(images)[:, :1].square()

    found = effect_matrix(Tiles(), None, square, samples=4000, spread=torch.ones(1))
    assert float(found.values[0, 0]) == pytest.approx(2 * NORMAL, rel=0.05)


def test_sprites_are_read():
    found = effect_matrix(Sprites(), None, read_sprites, names=list(FACTORS), samples=60)
    assert found.factors == tuple(FACTORS)
    assert found.values.diagonal().min() > 0.7
    assert (found.values - found.values.diagonal().diag()).max() < 0.1
    assert SHAPES[0] == "disc"


# reports


def test_a_report_of_perfect_and_of_turned_directions():
    settings = {"samples": 1000, "trees": FAST, "effect_samples": 20, "names": list("abcd")}
    perfect = factor_report(Tiles(), None, read_tiles, **settings)
    turned = factor_report(Tiles(), rotation(4), read_tiles, **settings)
    assert min(perfect.scores().values()) > 0.9
    for name in ("mig", "sap", "disentanglement", "completeness"):
        assert turned.scores()[name] < 0.6 < perfect.scores()[name]
    assert turned.dci.informativeness > 0.8
    assert perfect.information.shape == perfect.effects.values.shape == (4, 4)
    assert perfect.constant == ()
    assert str(perfect).startswith("mig 0.9")
    assert "direction" in str(perfect)


def test_constant_factors_are_named():
    def with_constant(images):
        return torch.cat([read_tiles(images)[:, :2], torch.ones(len(images), 1)], 1)

    report = factor_report(
        Tiles(), None, with_constant, names=["a", "b", "c"], samples=300, effect_samples=10, trees=FAST
    )
    assert report.constant == ("c",)
    assert 0.5 < report.sap < 0.67
    assert "constant: c" in str(report)


# images that cannot be read


def test_unreadable_images_are_left_out_and_counted():
    def half(images):
        found = read_tiles(images)
        found[found[:, 0] < 0] = torch.nan
        return found

    report = factor_report(Tiles(), None, half, samples=400, effect_samples=200, trees=FAST)
    assert report.read == pytest.approx(0.5, abs=0.1)
    assert report.samples == round(report.read * 400)
    assert 0.3 < report.effects.read < 0.6
    assert report.effects.values.isfinite().all()
    with pytest.raises(ValueError, match="of 50 it read 0"):
        effect_matrix(Tiles(), None, lambda x: half(x) * torch.nan, samples=50)


# the picture


def test_the_picture(tmp_path):
    values = torch.tensor([[1.0, 0.1], [torch.nan, 0.5]], dtype=torch.float64)
    effects = EffectMatrix(values, ("size", "hue"), torch.ones(2), 1.0)
    axes = plot_effect_matrix(effects, tmp_path / "effects.png", labels=["U0", "U1"], title="none")
    assert (tmp_path / "effects.png").stat().st_size > 5000
    assert [t.get_text() for t in axes.texts] == ["1.00", "0.10", "nan", "0.50"]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["size", "hue"]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["U0", "U1"]
    assert axes.images[0].get_clim() == (0, 1)
    assert plot_effect_matrix(effects, axes.figure.add_subplot(), largest=2.0).images[0].get_clim() == (0, 2)
    with pytest.raises(ValueError, match="needs 2 names"):
        plot_effect_matrix(effects, labels=["U0"])


def test_a_missing_matplotlib_is_named(monkeypatch):
    assert matplotlib.__name__ in sys.modules
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    effects = EffectMatrix(torch.zeros(2, 2), ("size", "hue"), torch.ones(2), 1.0)
    with pytest.raises(ImportError, match=r"orthocond\[lab\]"):
        plot_effect_matrix(effects)


# errors


def test_errors():
    generator = Tiles()
    with pytest.raises(TypeError, match=r"it gave SpriteFactors\. Wrap it: lambda images: read\(images\)\.values"):
        effect_matrix(Sprites(), None, read_factors, samples=2)
    with pytest.raises(ValueError, match=r"factors \(2, k\) from read_factors; got \(2,\)"):
        effect_matrix(generator, None, lambda x: read_tiles(x)[:, 0], samples=2)
    with pytest.raises(ValueError, match="needs 4 names"):
        effect_matrix(generator, None, read_tiles, names=["a"], samples=2)
    with pytest.raises(ValueError, match="4 numbers above 0"):
        effect_matrix(generator, None, read_tiles, spread=torch.zeros(4), samples=2)
    with pytest.raises(ValueError, match="above 0; got 0"):
        effect_matrix(generator, None, read_tiles, step=0)
    with pytest.raises(ValueError, match="samples"):
        factor_report(generator, None, read_tiles, samples=3)
    with pytest.raises(ValueError, match="length 1"):
        effect_matrix(generator, torch.ones(2, 4), read_tiles)
