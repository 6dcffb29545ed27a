"""What a generator is: shapes, priors, ranges, noise, and errors that say which of them is wrong."""

import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import orthocond as oc
from orthocond.directions import axes, effect_sizes, jacobian_directions, traverse
from orthocond.generators import as_generator, images_of, seeded
from orthocond.metrics import VariationalPredictability, activeness, effect_matrix, factor_report, path_length
from tests.metrics_helpers import Tiles, read_tiles


class Flat(nn.Module):
    """Images (n, 1, 2, 2) in [0, 1] of latents (n, 4)."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, z):
        return (z * self.scale).reshape(-1, 1, 2, 2).sigmoid()


def dcgan(z_dim=10):
    layers = [nn.ConvTranspose2d(z_dim, 8, 4), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1)]
    return nn.Sequential(*layers, nn.Tanh())


class Dead(oc.gans.EigenGenerator):
    """An EigenGAN whose last two latents do nothing."""

    def forward(self, z, noise=None):
        return super().forward(torch.cat([z[:, :-2], 0 * z[:, -2:]], 1), noise)


def dead():
    return Dead(size=8, directions=4, noise_dim=4, base_channels=4)


class Counting(Tiles):
    """Images that differ from call to call, whatever torch's random state is."""

    calls = 0

    def forward(self, z):
        self.calls += 1
        return super().forward(z) + 1e-3 * self.calls


# shapes and ranges


def test_latents_of_both_shapes():
    flat, square = oc.Generator(Flat(), 4, range=(0, 1)), oc.Generator(dcgan(), 10)
    assert (flat.latent_shape, square.latent_shape) == ((4,), (10, 1, 1))
    z = square.sample(3)
    assert torch.equal(square.eval()(z), square.module(z[:, :, None, None]))
    rows = oc.Generator(lambda z: z.repeat(1, 1, 2, 1).tanh(), 6, latent_shape=(1, 2, 3))
    assert rows(torch.zeros(2, 6)).shape == (2, 1, 4, 3)


def test_images_are_scaled_to_plus_and_minus_one():
    z = torch.randn(5, 4)
    torch.testing.assert_close(oc.Generator(Flat(), 4, range=(0, 1))(z), 2 * Flat()(z) - 1)
    torch.testing.assert_close(oc.Generator(lambda z: 255 * Flat()(z), 4, range=(0, 255))(z), 2 * Flat()(z) - 1)
    assert torch.equal(oc.Generator(lambda z: 9 * Flat()(z), 4, range=None)(z), 9 * Flat()(z))


@pytest.mark.parametrize(("scale", "declared"), [(1, (-1, 1)), (1, (0, 255)), (0.9, (-5, 5))])
def test_pixels_of_a_sigmoid_with_another_range_are_a_warning(scale, declared):
    with pytest.warns(UserWarning, match=r"pixels of two images go from 0\.\d+ to 0\.\d+\..* range=\(0, 1\)\)") as told:
        oc.Generator(lambda z: scale * Flat()(z), 4, range=declared)
    assert told[0].filename == __file__
    # Nothing is said where the declaration is right, where nothing was declared, of faint images and of dead ones.
    oc.Generator(Flat(), 4, range=(0, 1))
    oc.Generator(Flat(), 4, range=None)
    oc.Generator(lambda z: 0.1 * Flat()(z), 4)
    oc.Generator(lambda z: 0 * z.reshape(-1, 1, 2, 2), 4)


def test_a_range_that_is_too_small_names_the_likely_one():
    for scale, likely in ((2, r"\(-1, 1\)"), (500, r"\(0, 255\)"), (2000, r"\(low, high\)")):
        with pytest.raises(ValueError, match=f"range={likely}"):
            oc.Generator(lambda z, s=scale: s * (Flat()(z) - 0.4 * (s == 2)) / 2, 4, range=(0, 1))


def test_the_attribute_z_dim_serves():
    assert oc.Generator(oc.gans.SimpleGenerator(size=8, z_dim=5, width=4)).z_dim == 5


def test_the_trial_leaves_module_and_random_state():
    module = dcgan()
    module[1].eval()
    before = torch.get_rng_state()
    oc.Generator(module, 10)
    assert torch.equal(torch.get_rng_state(), before)
    assert module.training
    assert not module[1].training
    assert module[1].num_batches_tracked == 0


# priors


@pytest.mark.parametrize(("prior", "sigma", "largest"), [("normal", 1.0, math.inf), ("uniform", 1 / math.sqrt(3), 1.0)])
def test_priors(prior, sigma, largest):
    g = oc.Generator(Flat().double(), 4, prior=prior, range=(0, 1))
    z = g.sample(4000, 3)
    assert z.dtype == torch.float64
    assert z.abs().max() <= largest
    assert g.sigma == sigma == pytest.approx(float(z.std()), rel=0.02)
    assert float(z.mean()) == pytest.approx(0, abs=0.03)
    assert torch.equal(z, g.sample(4000, torch.Generator().manual_seed(3)))
    assert not torch.equal(z, g.sample(4000, 4))


def test_any_sampler():
    def large(count, rng):
        return 7 * torch.randn(count, 4, generator=rng)

    g = oc.Generator(Flat(), 4, prior=large, range=(0, 1))
    assert g.sigma == pytest.approx(7, rel=0.03)
    torch.testing.assert_close(g.sample(2, 5), large(2, torch.Generator().manual_seed(5)))


def test_steps_are_in_sigma_of_the_prior():
    """A linear generator with uniform latents is one with normal latents whose rows are √3 times smaller."""
    matrix = 0.1 * torch.randn(4, 12, dtype=torch.float64)

    def paint(z):
        return (z.double() @ matrix).reshape(-1, 3, 2, 2)

    def smaller(z):
        return paint(z) / math.sqrt(3)

    uniform, normal = oc.Generator(paint, 4, prior="uniform", range=None), oc.Generator(smaller, 4, range=None)
    for measure in (
        lambda g: effect_sizes(g, axes(4), 5),
        lambda g: jacobian_directions(g, 5).importance,
        lambda g: activeness(g, samples=5),
        lambda g: effect_matrix(g, None, lambda x: x.flatten(1), spread=torch.ones(12), samples=5).values,
        lambda g: traverse(g, torch.zeros(1, 4), axes(4), (1.0,)),
    ):
        torch.testing.assert_close(measure(uniform), measure(normal), rtol=1e-5, atol=1e-6)
    assert path_length(uniform, samples=20).protocol.endswith("lerp-full")
    assert path_length(normal, samples=20).protocol.endswith("slerp-full")


# noise


def test_dead_latents_of_a_generator_that_draws_noise_have_no_effect():
    generator = dead()
    state = torch.get_rng_state()
    active = activeness(generator, samples=5, batch_size=2)
    assert active[-2:].tolist() == [0, 0]
    assert active[:-2].min() > 0
    found = effect_matrix(generator, None, lambda x: x.mean((2, 3)), samples=5, batch_size=2)
    assert found.values[-2:].abs().max() == 0
    one, two, labels, _ = VariationalPredictability(pairs=40).make_pairs(generator)
    assert torch.equal(one[labels >= 2], two[labels >= 2])
    assert not torch.equal(one, two)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_path_length_does_not_see_noise():
    generator = dead()

    class Fixed:
        z_dim = generator.z_dim

        def __call__(self, z):
            return generator(z, torch.zeros(4))

    fixed, noisy = path_length(Fixed(), samples=50), path_length(generator, samples=50)
    assert 0.1 < noisy.mean / fixed.mean < 10  # noise that changes between both ends makes it 1e4 times larger


def test_noise_differs_from_batch_to_batch():
    generator = as_generator(dead(), "test")
    first, second = images_of(generator, torch.zeros(6, 4), 3, "test")
    assert not torch.equal(first, second)
    for again, images in zip(images_of(generator, torch.zeros(6, 4), 3, "test"), (first, second), strict=True):
        assert torch.equal(again, images)


def test_fixed_noise():
    inner, noise = dead(), torch.randn(4)
    g = oc.Generator(inner, noise=noise)
    z = torch.randn(3, 4)
    assert torch.equal(g(z), inner(z, noise))
    assert torch.equal(g(z), g(z))


def test_noise_as_latent():
    inner = dead()
    whole = oc.NoiseAsLatent(inner)
    z, noise = torch.randn(5, 4), torch.randn(5, 4)
    assert whole.z_dim == 8
    assert torch.equal(whole(torch.cat([z, noise], 1)), inner(z, noise))
    with pytest.raises(TypeError, match="noise_dim; Tiles has none"):
        oc.NoiseAsLatent(Tiles())


@pytest.mark.parametrize(
    "measure",
    [
        activeness,
        path_length,
        VariationalPredictability(pairs=40).measure,
        lambda g: effect_matrix(g, None, read_tiles),
        lambda g: factor_report(g, None, read_tiles),
        lambda g: effect_sizes(g, axes(4)),
        lambda g: traverse(g, 2, axes(4)),
        jacobian_directions,
    ],
)
def test_noise_from_elsewhere_is_an_error(measure):
    with pytest.raises(ValueError, match="two calls in eval mode differ"):
        measure(Counting())


# errors


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: oc.Generator(3, 4), TypeError, "can be called.*got int"),
        (lambda: oc.Generator(Flat()), TypeError, "z_dim of this Flat is None"),
        (lambda: oc.Generator(Flat(), 0), ValueError, "at least 1"),
        (lambda: oc.Generator(Flat(), 4, prior="gauss"), ValueError, "'normal', 'uniform'; got 'gauss'"),
        (lambda: oc.Generator(Flat(), 4, range=(1, 0)), ValueError, r"such as \(0, 1\), or None.* got \(1, 0\)"),
        (lambda: oc.Generator(Flat(), 4, range=5), ValueError, r"smallest and the largest pixel value.* got 5\."),
        (lambda: oc.Generator(Flat(), 4, range="ab"), ValueError, "smallest and the largest.* got 'ab'"),
        (lambda: oc.Generator(Flat(), 4, range="01"), ValueError, "smallest and the largest.* got '01'"),
        (lambda: oc.Generator(Flat(), 4, range=(0, 1, 2)), ValueError, "smallest and the largest"),
        (lambda: oc.Generator(Flat(), 4, range=(0, None)), ValueError, "smallest and the largest"),
        (lambda: oc.Generator(Flat(), 4, latent_shape=(2, 3)), ValueError, r"4 numbers in all; got \(2, 3\)"),
        (lambda: oc.Generator(dcgan(), 11), ValueError, r"\(2, 11\): .*; \(2, 11, 1, 1\): .*Check z_dim=11"),
        (lambda: oc.Generator(nn.Linear(4, 9), 4), ValueError, r"\(n, C, H, W\); of 2 latents .* shape \(2, 9\)"),
        (lambda: oc.Generator(lambda z: 3 * Flat()(z) + 1, 4), ValueError, r"as \(-1.0, 1.0\).* from 1.* to [23]"),
        (lambda: oc.Generator(lambda z: 0.5 * Flat()(z) - 1, 4, range=(0, 1)), ValueError, "from -0.9"),
        (lambda: oc.Generator(lambda z: Flat()(z) / 0, 4), ValueError, "NaN or infinite pixels"),
        (lambda: oc.Generator(lambda z: Flat()(z).long(), 4), TypeError, "floating-point"),
        (lambda: oc.Generator(Flat(), 4, prior=lambda n, rng: torch.rand(n, 3)), ValueError, r"\(n, 4\)"),
        (lambda: oc.Generator(Flat(), 4, prior=lambda n, rng: torch.ones(n, 4)), ValueError, "latents that differ"),
        (lambda: oc.Generator(Flat(), 4, range=(0, 1))(torch.zeros(2, 5)), ValueError, r"\(n, 4\); got shape \(2, 5\)"),
        (lambda: oc.Generator(Flat(), 4, range=(0, 1)).sample(0), ValueError, "at least 1"),
        (lambda: oc.Generator(Flat(), 4, noise="random"), TypeError, "Tensor; got str"),
    ],
)
def test_errors(make, kind, text):
    with pytest.raises(kind, match=text):
        make()


def test_a_range_that_is_left_later_is_an_error_too():
    g = oc.Generator(lambda z: z.reshape(-1, 1, 2, 2) / 5, 4, prior="uniform")
    with pytest.raises(ValueError, match=r"declared as \(-1.0, 1.0\); its pixels go from"):
        traverse(g, 3, axes(4), (20.0,))


# what directions need of a generator


def test_sigma_is_that_of_one_latent_where_means_differ():
    means, deviations = torch.tensor([0.0, 10.0, 20.0]), torch.tensor([1.0, 1.0, 2.0])

    def prior(count, rng):
        return torch.randn(count, 3, generator=rng) * deviations + means

    g = oc.Generator(lambda z: z[:, None, None], 3, prior=prior, range=None)
    assert g.sigma == pytest.approx(2**0.5, rel=0.05)


def test_the_random_state_of_gpus_is_not_touched(monkeypatch):
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    g = oc.gans.SimpleGenerator(size=8, z_dim=3, width=4)
    state = torch.get_rng_state()
    jacobian_directions(g, 4)
    assert seeds == []
    assert torch.equal(torch.get_rng_state(), state)


def test_noise_on_the_gpu_is_that_of_the_seed_also_for_latents_on_the_cpu(monkeypatch):
    seeds, kept = [], []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "manual_seed", seeds.append)
    monkeypatch.setattr(torch.random, "fork_rng", lambda gpus: kept.extend(gpus) or nullcontext())
    with seeded(torch.zeros(1), 5):
        pass
    assert seeds == [5]
    assert kept == [torch.device("cuda", 0)]


class InBatch(nn.Module):
    """Batch normalization by the statistics of the batch, also in eval mode."""

    z_dim = 4

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(1, track_running_stats=False)

    def forward(self, z):
        return self.norm(z.reshape(-1, 1, 2, 2))


def test_images_that_depend_on_their_batch_are_an_error():
    for find in (jacobian_directions, lambda g: effect_sizes(g, axes(4))):
        with pytest.raises(ValueError, match=r"does not depend on the other latents of a batch.*call \.eval\(\)"):
            find(InBatch())


def test_a_generator_that_fails_is_told_with_a_remedy():
    net = dcgan()
    net.z_dim = 10
    with pytest.raises(ValueError, match=r"fails on latents \(1, 10\) of torch.float32.*orthocond.Generator\(module"):
        jacobian_directions(net)
    assert len(jacobian_directions(oc.Generator(net, 10))) == 10
