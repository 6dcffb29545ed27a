"""Activeness, path length and the spectrum of the first projection: closed forms, invariants, errors."""

import math

import pytest
import torch
from torch import nn

from orthocond.metrics import activeness, path_length, pixel_mse, projection_spectrum
from orthocond.weights import orthogonal
from tests.metrics_helpers import Linear, Tiles, rotation

F64 = torch.float64
MATRIX = torch.randn(4, 12, generator=torch.Generator().manual_seed(0), dtype=F64)


def linear():
    return Linear(MATRIX.clone(), (3, 2, 2))


# activeness


@pytest.mark.parametrize("extent", [2.0, 0.5])
def test_activeness_of_a_linear_generator(extent):
    """Three values -e, 0, e of a coordinate have the variance e², times the mean square of the direction's image."""
    torch.testing.assert_close(activeness(linear(), samples=7, extent=extent), extent**2 * MATRIX.square().mean(1))
    directions = rotation(4).double()[:3]
    expected = extent**2 * (directions @ MATRIX).square().mean(1)
    found = activeness(linear(), directions, samples=7, extent=extent)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_activeness_is_the_variance_over_the_set_coordinate():
    generator = Tiles()
    z = torch.randn(20, 4, generator=torch.Generator().manual_seed(3))
    expected = []
    for index in range(4):
        three = []
        for value in (-2.0, 0.0, 2.0):
            moved = z.clone()
            moved[:, index] = value
            three.append(generator(moved))
        expected.append(torch.stack(three).double().var(0).mean())
    torch.testing.assert_close(activeness(generator, samples=20, seed=3, batch_size=7), torch.stack(expected))


def test_a_latent_that_does_nothing_has_no_activeness():
    assert activeness(Tiles(z_dim=6), samples=5)[4:].tolist() == [0, 0]


# path length


def exact_speeds(interpolation, t, seed, samples):
    random = torch.Generator().manual_seed(seed)
    start, end = torch.randn(2, samples, 4, generator=random, dtype=F64)
    if t is None:
        t = torch.rand(samples, 1, generator=random, dtype=F64)
    if interpolation == "lerp":
        velocity = end - start
    else:
        angle = torch.nn.functional.cosine_similarity(start, end).acos()[:, None]
        velocity = angle / angle.sin() * ((t * angle).cos() * end - ((1 - t) * angle).cos() * start)
    return (velocity @ MATRIX).square().mean(1)


@pytest.mark.parametrize("interpolation", ["slerp", "lerp"])
@pytest.mark.parametrize(("where", "t"), [("full", None), ("end", 0.0)])
def test_path_length_of_a_linear_generator(interpolation, where, t):
    found = path_length(linear(), samples=200, interpolation=interpolation, where=where, eps=1e-5, trim=0, seed=4)
    expected = exact_speeds(interpolation, t, 4, 200)
    torch.testing.assert_close(found.speeds, expected, rtol=1e-4, atol=1e-6)
    assert found.mean == pytest.approx(float(expected.mean()), rel=1e-4)
    assert found.standard_error == pytest.approx(float(expected.std()) / math.sqrt(200), rel=1e-4)
    assert found.protocol == f"pl200-pixel_mse-{interpolation}-{where}"


def test_slerp_stays_where_normal_latents_are():
    norms = []

    def generator(z):
        norms.append(z.norm(dim=1))
        return torch.zeros(len(z), 1, 1, 1)

    generator.z_dim = 64
    path_length(generator, samples=200)
    assert float(torch.cat(norms).mean()) == pytest.approx(8, rel=0.02)


def test_tails_are_trimmed_and_any_distance_serves():
    found = path_length(linear(), samples=100, trim=0.1)
    assert found.mean == pytest.approx(float(found.speeds.sort().values[10:90].mean()))

    class Perceptual(nn.Module):
        def forward(self, a, b):
            return 3 * pixel_mse(a, b)[:, None, None, None]  # the shape of LPIPS

    scaled = path_length(linear(), samples=100, trim=0.1, distance=Perceptual())
    assert scaled.mean == pytest.approx(3 * found.mean)
    assert scaled.protocol == "pl100-Perceptual-slerp-full"
    assert path_length(linear(), samples=100, distance=Perceptual(), name="lpips").protocol.startswith("pl100-lpips")
    assert str(found).startswith("pl100-pixel_mse-slerp-full: ")


def test_float32_keeps_the_default_step():
    precise = path_length(linear(), samples=100)
    assert path_length(linear().float(), samples=100).mean == pytest.approx(precise.mean, rel=1e-3)


def test_one_latent_has_only_straight_paths():
    generator = Linear(torch.ones(1, 1, dtype=F64), (1, 1, 1))
    found = path_length(generator, samples=50)
    assert torch.isfinite(found.speeds).all()
    assert found.mean > 0


# the first projection


def test_the_first_projection_is_that_of_the_latent():
    first = nn.ConvTranspose2d(5, 8, 4)
    generator = nn.Sequential(nn.Conv2d(3, 3, 1), first, nn.Linear(5, 2))
    generator.z_dim = 5
    expected = torch.linalg.cond(first.weight.detach().flatten(1).double())
    for target in (generator, first, first.weight):
        found = projection_spectrum(target)
        torch.testing.assert_close(found.condition, expected)
        assert found.size == 5
    orthogonal(first)
    assert float(projection_spectrum(generator).condition) == pytest.approx(1, abs=1e-5)


def test_a_linear_layer_counts_its_inputs():
    generator = nn.Sequential(nn.Linear(6, 40))
    generator.z_dim = 6
    expected = torch.linalg.svdvals(generator[0].weight.detach().double())
    torch.testing.assert_close(projection_spectrum(generator).eigenvalues, expected)


# errors


def test_errors():
    generator = linear()
    for call in (activeness, path_length):
        with pytest.raises(TypeError, match="generator with z_dim"):
            call(nn.Identity())
        with pytest.raises(ValueError, match="samples"):
            call(generator, samples=0)
        with pytest.raises(ValueError, match="batch_size"):
            call(generator, batch_size=0)
    with pytest.raises(ValueError, match="length 1"):
        activeness(generator, torch.ones(2, 4))
    for setting, text in (({"eps": 0}, "eps"), ({"trim": 0.5}, "trim"), ({"interpolation": "cubic"}, "cubic")):
        with pytest.raises(ValueError, match=text):
            path_length(generator, **setting)
    with pytest.raises(ValueError, match="one distance for each of 100 pairs"):
        path_length(generator, samples=100, distance=lambda a, b: (a - b).square())
    with pytest.raises(TypeError, match="a weight, a layer or a generator; got int"):
        projection_spectrum(3)
    with pytest.raises(ValueError, match="no linear layer or convolution with 4 inputs"):
        projection_spectrum(generator)
