"""Sprites: drawn as defined, read back to the stated accuracy, independent, reproducible."""

import pytest
import torch

from orthocond.lab.data import FACTORS, SHAPES, load, read_factors, render, sprites
from orthocond.lab.data.rendering import _color, _cover

LOW, HIGH = torch.tensor(list(FACTORS.values())).unbind(1)


# Values


@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_cover_is_the_area_of_the_shape(shape):
    """Against the outline itself, on a raster 8 times as fine."""
    inside = {
        "disc": lambda u, v: u**2 + v**2 < 1 / torch.pi,
        "square": lambda u, v: (u.abs() < 0.5) & (v.abs() < 0.5),
        # height h and half base h / sqrt(3), area h^2 / sqrt(3) = 1, centroid a third above the base
        "triangle": lambda u, v: (v < 3**0.25 / 3) & (u.abs() < (v + 2 * 3**0.25 / 3) / 3**0.5),
        # five squares of area 1/5
        "plus": lambda u, v: (
            (torch.maximum(u.abs(), v.abs()) < 1.5 / 5**0.5) & (torch.minimum(u.abs(), v.abs()) < 0.5 / 5**0.5)
        ),
    }[SHAPES[shape]]
    factors = torch.tensor([[0.47, 0.53, 0.3, 0.4, 0.0, 0.0]])
    fine = (torch.arange(512) + 0.5) / 512
    u = (fine[None, :] - 0.47) / (0.3 * 2**0.2)
    v = (fine[:, None] - 0.53) / (0.3 * 2**-0.2)
    exact = inside(u, v).float().reshape(64, 8, 64, 8).mean((1, 3))
    cover = _cover(factors, torch.tensor([shape]), 64)[0]
    assert (cover - exact).abs().max() < 0.35  # at corners, where the distance is to one side only
    assert (cover - exact).abs().mean() < 1e-3
    assert cover.sum() / 64**2 == pytest.approx(0.09, rel=0.01)


def test_colors_of_known_hues():
    hues = torch.tensor([0, 1 / 6, 1 / 3, 1 / 2, 2 / 3])
    expected = torch.tensor([[1, 0.2, 0.2], [1, 1, 0.2], [0.2, 1, 0.2], [0.2, 1, 1], [0.2, 0.2, 1]])
    torch.testing.assert_close(_color(hues), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("size", "stated"),
    [(16, [0.0021, 0.0021, 0.0033, 0.054, 0.0003, 0.0012]), (32, [0.0006, 0.0006, 0.0009, 0.015, 0.0003, 0.0012])],
)
def test_factors_are_read_back_to_the_stated_accuracy(size, stated):
    data = sprites(2000, size=size, split="test")
    read = read_factors(data.images)
    error = (read.values - data.factors).square().mean(0).sqrt()
    assert (error < torch.tensor(stated)).all(), error
    assert torch.equal(read.shapes, data.shapes)
    assert read.residual.max() < 0.02


def test_factors_of_float_images_as_generators_make_them():
    data = sprites(50)
    floats = data.images.float() / 127.5 - 1
    torch.testing.assert_close(read_factors(floats).values, read_factors(data.images).values, atol=1e-5, rtol=1e-5)


# Invariants


def test_moving_one_factor_moves_its_reading_alone():
    start = (LOW + HIGH) / 2
    tolerance = (HIGH - LOW) * torch.tensor([0.01, 0.01, 0.02, 0.05, 0.01, 0.01])
    for index in range(len(FACTORS)):
        factors = start.repeat(9, 1)
        factors[:, index] = torch.linspace(LOW[index], HIGH[index], 9)
        for shape in range(len(SHAPES)):
            values = read_factors(render(factors, torch.full((9,), shape), 32) * 2 - 1).values
            assert ((values - factors).abs() < tolerance).all(), (SHAPES[shape], list(FACTORS)[index])


def test_shapes_stay_away_from_the_border():
    corners = torch.cartesian_prod(*torch.stack([LOW, HIGH], 1)[:4])
    factors = torch.cat([corners, torch.zeros(len(corners), 2)], 1)
    for shape in range(len(SHAPES)):
        cover = _cover(factors, torch.full((len(factors),), shape), 32)
        assert cover[:, [0, -1]].max() == cover[:, :, [0, -1]].max() == 0


def test_factors_are_uniform_and_independent():
    data = sprites(10_000, size=16)
    scaled = (data.factors - LOW) / (HIGH - LOW)
    quantiles = torch.quantile(scaled, torch.tensor([0.1, 0.5, 0.9]), dim=0)
    torch.testing.assert_close(quantiles, torch.tensor([[0.1], [0.5], [0.9]]).expand(3, 6), atol=0.02, rtol=0)
    both = torch.cat([scaled, data.shapes[:, None]], 1)
    assert (torch.corrcoef(both.T) - torch.eye(7)).abs().max() < 0.04
    assert data.labels.bincount(minlength=12).min() > 700


def test_classes_are_shape_and_third_of_the_hue():
    data = sprites(300)
    for label, shape, hue in zip(data.labels, data.shapes, data.factors[:, 4], strict=True):
        color = "warm" if hue < 0.25 else "green" if hue < 0.5 else "blue"
        assert data.classes[label] == f"{color} {SHAPES[shape]}"


# Life cycle and errors


def test_seeds_and_splits():
    assert torch.equal(sprites(20, seed=1).images, sprites(20, seed=1).images)
    assert not torch.equal(sprites(20, seed=1).images, sprites(20, seed=2).images)
    assert not torch.equal(sprites(20).images, sprites(20, split="test").images)
    noisy = sprites(20, noise=0.1).images.float() - sprites(20).images.float()
    assert noisy.std() / 255 == pytest.approx(0.1, rel=0.3)  # clipping takes some


def test_parts_keep_their_factors():
    data = load("sprites", limit=40, size=16)
    train, held_out = data.split_off(0.25)
    assert len(train.factors) == 30
    for part in (train, held_out):
        assert torch.equal(read_factors(part.images).shapes, part.shapes)


def test_nothing_to_see():
    read = read_factors(torch.full((3, 3, 16, 16), 128, dtype=torch.uint8))
    assert read.values.isnan().all()
    assert read.shapes.tolist() == [-1, -1, -1]


def test_errors():
    with pytest.raises(ValueError, match=r"sprites\(size=...\) needs an integer of at least 16; got 8"):
        sprites(4, size=8)
    with pytest.raises(ValueError, match=r"no split 'val'"):
        sprites(4, split="val")
    with pytest.raises(ValueError, match=r"needs images \(N, 3, H, H\); got \(2, 1, 16, 16\)"):
        read_factors(torch.zeros(2, 1, 16, 16))
