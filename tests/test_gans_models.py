"""Generators and discriminators: values, invariants, gradients, shapes and dtypes, errors, life cycle."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from orthocond import (
    NearestOrthogonal,
    OptimalLR,
    matrix_view,
    orthogonal,
    orthogonality_loss,
    singular_spectrum,
    treat,
)
from orthocond.gans import (
    EigenDiscriminator,
    EigenGenerator,
    NonSaturating,
    SimpleDiscriminator,
    SimpleGenerator,
    SubspaceLayer,
    discriminator_health,
    parameter_groups,
    r1,
    same_noise,
)


def tiny_eigen(**settings):
    return EigenGenerator(**{"size": 16, "directions": 3, "noise_dim": 5, "base_channels": 4} | settings)


GENERATORS = {
    "eigen": tiny_eigen,
    "faithful": lambda: tiny_eigen(form="faithful"),
    "simple": lambda: SimpleGenerator(16, 6, 8),
    "upsample": lambda: SimpleGenerator(16, 6, channels=(24, 12, 8), blocks="upsample"),
}


def parameters(model):
    return sum(p.numel() for p in model.parameters())


# values


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (lambda: EigenGenerator(32), 1_417_333),
        (lambda: EigenGenerator(32, form="faithful"), 1_417_333),
        (lambda: EigenGenerator(128), 10_262_529),
        (lambda: EigenGenerator(256), 22_994_951),
        (lambda: EigenDiscriminator(32), 557_841),
        (lambda: EigenDiscriminator(128), 8_915_985),
        (lambda: EigenDiscriminator(256), 13_635_601),
        (lambda: SimpleGenerator(), 28_416_579),
        (lambda: SimpleGenerator(64, 6, image_channels=1), 2_869_313),
        (lambda: SimpleGenerator(32, 8, 16), 53_875),
        (lambda: SimpleGenerator(32, 30, channels=(192, 96, 48, 24), blocks="upsample"), 311_067),
        (lambda: SimpleDiscriminator(), 27_927_297),
        (lambda: SimpleDiscriminator(64), 6_952_705),
        (lambda: SimpleDiscriminator(32, 24, norm=False), 95_017),
        (lambda: SimpleDiscriminator(32, 16, norm=False), 42_865),
    ],
)
def test_number_of_parameters(make, count):
    """Those of the published models, and of the laptop configurations."""
    with torch.device("meta"):
        assert parameters(make()) == count


@pytest.mark.parametrize(
    ("size", "features"),
    [(128, [8192, 16384, 32768, 65536, 131072]), (256, [8192, 32768, 65536, 131072, 262144, 524288])],
)
def test_shapes_of_the_subspaces(size, features):
    with torch.device("meta"):
        g = EigenGenerator(size)
    assert [tuple(s.weight.shape) for s in g.subspaces] == [(6, f) for f in features]
    assert (g.layers, g.z_dim) == (len(features), 6 * len(features))


def test_initial_subspace():
    layer = SubspaceLayer(4, 50)
    torch.testing.assert_close(layer.weight @ layer.weight.mT, torch.eye(4))
    assert layer.scale.tolist() == [12, 9, 6, 3]
    assert not layer.mean.any()
    assert all(p.requires_grad for p in layer.parameters())


def test_subspace_equals_its_definition():
    layer = SubspaceLayer(2, 3)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 0, 2], [0, -3, 0]]))
        layer.scale.copy_(torch.tensor([2.0, -1]))
        layer.mean.copy_(torch.tensor([0.0, 0, 1]))
    assert layer(torch.tensor([[1.0, 1], [0, 2]])).tolist() == [[2, 3, 5], [0, 6, 1]]
    torch.testing.assert_close(layer.importance, torch.tensor([2 * 5**0.5, 3.0]))
    assert not layer.importance.requires_grad


def test_eigen_generator_equals_its_definition():
    """Written out from the published description, with functional calls."""
    g = tiny_eigen(size=8, form="faithful").double()
    z, noise = torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
    p = dict(g.named_parameters())
    h = F.linear(noise, p["fc.weight"], p["fc.bias"]).view(2, 8, 4, 4)
    b = "blocks.0."
    u, scale, mean = (p[f"{b}subspace.{name}"] for name in ("weight", "scale", "mean"))
    phi = ((z * scale) @ u + mean).view(2, 8, 4, 4)

    def convolve(x, name, **settings):
        return F.conv_transpose2d(x, p[f"{b}{name}.weight"], p[f"{b}{name}.bias"], **settings)

    double = {"stride": 2, "padding": 1, "output_padding": 1}
    h = convolve(F.leaky_relu(h + convolve(phi, "subspace_conv1"), 0.2), "feature_conv1.1", **double)
    h = convolve(F.leaky_relu(h + convolve(phi, "subspace_conv2", **double), 0.2), "feature_conv2.1", padding=1)
    expected = F.conv2d(F.leaky_relu(h, 0.2), p["to_rgb.1.weight"], p["to_rgb.1.bias"], padding=3).tanh()
    torch.testing.assert_close(g(z, noise), expected)


def test_working_eigen_generator_equals_its_definition():
    """The same with upsampling and convolutions in place of transposed ones."""
    g = tiny_eigen(size=8).double()
    z, noise = torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
    p = dict(g.named_parameters())

    def convolve(x, name, **settings):
        return F.conv2d(x, p[f"{name}.weight"], p[f"{name}.bias"], **settings)

    def enlarge(x):
        return x.repeat_interleave(2, 2).repeat_interleave(2, 3)

    h = F.linear(noise, p["fc.weight"], p["fc.bias"]).view(2, 8, 4, 4)
    b = "blocks.0."
    phi = ((z * p[f"{b}subspace.scale"]) @ p[f"{b}subspace.weight"] + p[f"{b}subspace.mean"]).view(2, 8, 4, 4)
    h = convolve(
        enlarge(F.leaky_relu(h + convolve(phi, f"{b}subspace_conv1"), 0.2)), f"{b}feature_conv1.1.1", padding=1
    )
    h = F.leaky_relu(h + convolve(enlarge(phi), f"{b}subspace_conv2.1", padding=1), 0.2)
    h = F.leaky_relu(convolve(h, f"{b}feature_conv2.1", padding=1), 0.2)
    torch.testing.assert_close(g(z, noise), convolve(h, "to_rgb.1", padding=3).tanh())


def test_initial_subspaces_are_smooth_and_orthonormal():
    torch.manual_seed(0)
    roughness = {}
    for form in ("working", "faithful"):
        g = EigenGenerator(64, 6, 16, 8, form=form)
        for s in g.subspaces:
            torch.testing.assert_close(s.weight @ s.weight.mT, torch.eye(6), rtol=0, atol=1e-5)
            assert s.scale.tolist() == ([9, 7.5, 6, 4.5, 3, 1.5] if form == "working" else [18, 15, 12, 9, 6, 3])
        u = g.subspaces[-1].weight.detach().view(6, 16, 32, 32)
        roughness[form] = (u.diff(dim=3).square().mean() / u.square().mean()).item()
    assert roughness["faithful"] == pytest.approx(2, rel=0.05)  # independent neighbors
    assert roughness["working"] < 0.1


# invariants: what the networks start from


def photographs(size):
    """Smooth images in [-1, 1], as photographs are: sums of random waves of decreasing amplitude."""
    torch.manual_seed(1)
    coarse = [F.interpolate(torch.randn(32, 3, n, n) / n**0.5, size, mode="bicubic") for n in (2, 4, 8, size // 2)]
    return sum(coarse).tanh()


@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_eigen_discriminator_begins_alive_at_every_size(size, seed):
    torch.manual_seed(seed)
    d, x = EigenDiscriminator(size, 8), photographs(size)
    assert 0.03 < d(x).std().item() < 1
    assert 0.05 < r1(d, x).item() < 2


@pytest.mark.parametrize("size", [32, 64, 128])
def test_the_simple_discriminator_is_alive_after_some_steps(size):
    torch.manual_seed(0)
    d, real = SimpleDiscriminator(size, 12, norm=False), photographs(size)
    fake = real.roll(size // 2, 3)[:16].flip(2) * 0.7
    optimizer = torch.optim.Adam(d.parameters(), lr=1e-3, betas=(0.0, 0.99))
    for _ in range(20):
        optimizer.zero_grad()
        NonSaturating().discriminator(d(real), d(fake)).backward()
        optimizer.step()
    assert discriminator_health(d(real), d(fake))["cannot_tell"] == 0
    assert 0.01 < r1(d, real).item() < 100


def test_the_faithful_discriminator_begins_dead():
    d, x = EigenDiscriminator(32, form="faithful"), photographs(32)
    assert d(x).std().item() < 1e-3
    assert r1(d, x).item() < 1e-6


@pytest.mark.parametrize("size", [32, 64, 128])
def test_the_generator_begins_with_images_of_some_contrast(size):
    torch.manual_seed(0)
    g = EigenGenerator(size, 6, 64, 8, 64)
    with torch.no_grad():
        images = g(torch.randn(16, g.z_dim))
    assert 0.05 < images.std().item() < 0.6
    assert (images.abs() > 0.99).float().mean().item() < 0.01


# parameter groups


def test_parameter_groups_have_every_parameter_once():
    g = tiny_eigen()
    groups = parameter_groups(g, 1e-3, subspace_lr=0.01, importance_lr=0.03)
    names = {id(p): name for name, p in g.named_parameters()}
    found = {group["name"]: {names[id(p)] for p in group["params"]} for group in groups}
    assert found["importances"] == {"blocks.0.subspace.scale", "blocks.1.subspace.scale"}
    assert found["subspaces"] == {"blocks.0.subspace.weight", "blocks.1.subspace.weight"}
    assert sorted(name for group in found.values() for name in group) == sorted(names.values())
    assert [(group["lr"], group["initial_lr"]) for group in groups] == [(1e-3, 1e-3), (0.01, 0.01), (0.03, 0.03)]
    assert {group["lr"] for group in parameter_groups(g, 2e-4)} == {2e-4}


def test_importances_move_by_their_own_rate():
    g = tiny_eigen()
    optimizer = torch.optim.Adam(parameter_groups(g, 1e-3, importance_lr=0.03), betas=(0.0, 0.99))
    before = g.importance
    for _ in range(20):
        optimizer.zero_grad()
        sum(s.scale.sum() for s in g.subspaces).backward()
        optimizer.step()
    torch.testing.assert_close(before - g.importance, torch.full((2, 3), 0.6), rtol=1e-3, atol=0)


def test_parameter_groups_of_orthogonal_subspaces():
    g = tiny_eigen()
    for s in g.subspaces:
        orthogonal(s)
    rest, subspaces, importances = (group["params"] for group in parameter_groups(g, 1e-3))
    raw = [p for s in g.subspaces for p in s.parametrizations.parameters()]
    assert {id(p) for p in subspaces} == {id(p) for p in raw}
    assert len(rest) + len(subspaces) + len(importances) == len(list(g.parameters()))


def test_latents_are_ordered_layer_after_layer():
    g = tiny_eigen()
    z = torch.randn(2, g.layers, g.directions)
    noise = g.sample_noise(2)
    torch.testing.assert_close(g(z, noise), g(z.flatten(1), noise), rtol=0, atol=0)
    seen = []
    for s in g.subspaces:
        s.register_forward_hook(lambda module, args, output: seen.append(args[0]))
    g(z.flatten(1))
    torch.testing.assert_close(torch.stack(seen, 1), z, rtol=0, atol=0)
    assert g.importance.shape == (2, 3)
    torch.testing.assert_close(g.importance, torch.tensor([[4.5, 3, 1.5]] * 2))


@pytest.mark.parametrize("name", ["simple", "upsample"])
def test_simple_generator_begins_linear(name):
    g = GENERATORS[name]().double()
    z = torch.randn(3, g.z_dim, dtype=torch.float64)
    inputs = []
    g.blocks[0].register_forward_hook(lambda module, args, output: inputs.append(args[0]))
    g(z)
    bias = g.first_projection.bias[:, None].expand(-1, 16).flatten()
    torch.testing.assert_close(inputs[0].flatten(1), z @ matrix_view(g.first_projection.weight) + bias)


def test_default_channels_follow_the_originals():
    with torch.device("meta"):
        widths = {s: [c.weight.shape[1] for c in SimpleGenerator(s).convolutions] for s in (16, 32, 64, 128)}
        d = [m.out_channels for m in SimpleDiscriminator().net if isinstance(m, nn.Conv2d)]
    assert widths[128] == [1024, 1024, 512, 256, 128, 64]
    assert widths[64] == [512, 256, 128, 64, 64]
    assert widths[32] == [256, 128, 64, 64]
    assert widths[16] == [128, 64, 64]
    assert d == [64, 128, 256, 512, 1024]


def test_discriminator_ends_as_the_originals():
    """At 128 pixels nothing stands between the two linear layers; below, a ReLU; without norm there is one."""
    with torch.device("meta"):
        kinds = {s: [type(m) for m in SimpleDiscriminator(s).net][-3:] for s in (64, 128)}
        plain = SimpleDiscriminator(64, norm=False).net
    assert kinds[128] == [nn.Flatten, nn.Linear, nn.Linear]
    assert kinds[64] == [nn.Linear, nn.ReLU, nn.Linear]
    assert [type(m) for m in plain] == [nn.Conv2d, nn.LeakyReLU] * 4 + [nn.Flatten, nn.Linear]


# invariants: noise


def test_noise_given_or_drawn():
    g = tiny_eigen()
    z = torch.randn(4, g.z_dim)
    seeded = [g(z, rng=torch.Generator().manual_seed(s)) for s in (1, 1, 2)]
    assert torch.equal(seeded[0], seeded[1])
    assert not torch.equal(seeded[0], seeded[2])
    assert torch.equal(seeded[0], g(z, g.sample_noise(4, rng=torch.Generator().manual_seed(1))))
    assert not torch.equal(g(z), g(z))
    one = g.sample_noise(1)
    torch.testing.assert_close(g(z, one), g(z, one.repeat(4, 1)), rtol=0, atol=0)
    torch.testing.assert_close(g(z, one[0]), g(z, one.repeat(4, 1)), rtol=0, atol=0)


def test_same_noise_repeats_one_call():
    def noisy(z):
        return z + torch.randn(3)

    torch.manual_seed(5)
    alone, after = noisy(torch.zeros(3)), torch.randn(2)
    torch.manual_seed(5)
    results = same_noise(noisy, [torch.zeros(3), torch.ones(3), torch.zeros(3)])
    assert torch.equal(results[0], alone)
    assert torch.equal(results[2], alone)
    assert torch.equal(results[1], alone + 1)
    assert torch.equal(torch.randn(2), after)
    assert same_noise(noisy, []) == []


# invariants: treatments


def projections(g):
    return g.subspaces if isinstance(g, EigenGenerator) else [g.first_projection]


@pytest.mark.parametrize("name", GENERATORS)
def test_nog_and_olr_act_on_the_projections(name):
    g = GENERATORS[name]()
    optimizer = torch.optim.Adam(g.parameters(), lr=1e-3, betas=(0.0, 0.99))
    handle = treat(projections(g), optimizer, gradient=NearestOrthogonal(), lr=OptimalLR())
    before = [p.weight.detach().clone() for p in projections(g)]
    g(torch.randn(8, g.z_dim)).square().mean().backward()
    optimizer.step()
    for p, old in zip(projections(g), before, strict=True):
        assert singular_spectrum(matrix_view(p.weight.grad)).condition < 1 + 1e-4
        assert not torch.equal(p.weight, old)
    assert [s.steps for s in handle.statistics] == [1] * len(before)


@pytest.mark.parametrize("name", GENERATORS)
def test_ow_and_ol_act_on_the_projections(name):
    g = GENERATORS[name]()
    for p in projections(g):
        orthogonal(p)
    assert sum(orthogonality_loss(p) for p in projections(g)).item() < 1e-8
    optimizer = torch.optim.SGD(g.parameters(), lr=1.0)
    start = [p.weight.detach().clone() for p in projections(g)]
    images = g(torch.randn(8, g.z_dim))
    images.square().sum().backward()
    optimizer.step()
    assert sum(orthogonality_loss(p) for p in projections(g)).item() < 1e-8
    assert all(not torch.equal(p.weight, s) for p, s in zip(projections(g), start, strict=True))
    copy.deepcopy(g)(torch.randn(2, g.z_dim))


# gradients


@pytest.mark.parametrize("name", GENERATORS)
def test_every_parameter_gets_a_gradient(name):
    g = GENERATORS[name]()
    d = (
        EigenDiscriminator(16, 4)
        if isinstance(g, EigenGenerator)
        else SimpleDiscriminator(16, 4, norm=name == "simple")
    )
    d(g(torch.randn(4, g.z_dim))).sum().backward()
    for model in (g, d):
        for key, p in model.named_parameters():
            assert p.grad is not None, key
            assert p.grad.abs().sum() > 0, key


# shapes and dtypes


@pytest.mark.parametrize("size", [8, 16, 32, 64])
@pytest.mark.parametrize("channels", [1, 3])
def test_any_power_of_two(size, channels):
    generators = [
        EigenGenerator(size, 2, 4, 2, 16, image_channels=channels),
        SimpleGenerator(size, 5, 2, image_channels=channels),
        SimpleGenerator(size, 5, 2, blocks="upsample", image_channels=channels),
    ]
    discriminators = [
        EigenDiscriminator(size, 2, 16, image_channels=channels),
        SimpleDiscriminator(size, 2, image_channels=channels),
        SimpleDiscriminator(size, 2, norm=False, image_channels=channels),
    ]
    for g, d in zip(generators, discriminators, strict=True):
        images = g(torch.randn(3, g.z_dim))
        assert images.shape == (3, channels, size, size)
        assert images.abs().max() <= 1
        assert d(images).shape == (3,)


@pytest.mark.parametrize("name", GENERATORS)
def test_double_and_autocast(name):
    g = GENERATORS[name]()
    z = torch.randn(2, g.z_dim)
    with torch.autocast("cpu", torch.bfloat16):
        assert g(z).isfinite().all()
    assert g.double()(z.double()).dtype == torch.float64


# errors


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: EigenGenerator(100), ValueError, "power of two.*got 100. Resize the images to 64 or 128"),
        (lambda: EigenGenerator(4), ValueError, "at least 8"),
        (lambda: EigenGenerator(32.0), ValueError, "integer"),
        (lambda: EigenGenerator(8, 17, base_channels=1, max_channels=1), ValueError, "17 directions .* has 16"),
        (lambda: EigenGenerator(8, 0), ValueError, r"directions=\.\.\."),
        (lambda: EigenGenerator(8, noise_dim=0), ValueError, r"noise_dim=\.\.\."),
        (lambda: EigenDiscriminator(24), ValueError, "power of two"),
        (lambda: EigenDiscriminator(8, form="original"), ValueError, "'working', 'faithful'"),
        (lambda: EigenGenerator(8, form="original"), ValueError, "'working', 'faithful'"),
        (lambda: parameter_groups(nn.Linear(2, 2), 0.1), ValueError, "Linear has none"),
        (lambda: parameter_groups(tiny_eigen(), 0.1, importance_lr=-1), ValueError, "importance_lr"),
        (lambda: EigenDiscriminator(8)(torch.randn(1, 3, 16, 16)), ValueError, r"\(N, 3, 8, 8\)"),
        (lambda: tiny_eigen()(torch.randn(2, 5)), ValueError, r"latents \(N, 6\); got shape \(2, 5\)"),
        (lambda: tiny_eigen()([1.0]), TypeError, "torch.Tensor"),
        (lambda: tiny_eigen()(torch.randn(2, 6), torch.randn(2, 4)), ValueError, r"noise \(2, 5\)"),
        (lambda: tiny_eigen()(torch.randn(2, 6), torch.randn(3, 5)), ValueError, r"noise \(2, 5\)"),
        (lambda: tiny_eigen()(torch.randn(2, 6), torch.randn(5), rng=torch.Generator()), ValueError, "both"),
        (lambda: SubspaceLayer(5, 4), ValueError, "at least as many dimensions"),
        (lambda: SimpleGenerator(48), ValueError, "power of two"),
        (lambda: SimpleGenerator(16, 0), ValueError, r"z_dim=\.\.\."),
        (lambda: SimpleGenerator(16, blocks="bilinear"), ValueError, "'transposed', 'upsample'"),
        (lambda: SimpleGenerator(16, channels=(8, 8)), ValueError, "needs 3 numbers for 16 pixels"),
        (lambda: SimpleGenerator(16, 4)(torch.randn(2, 4, 1, 1)), ValueError, r"latents \(N, 4\)"),
        (lambda: SimpleDiscriminator(16, channels=(8, 8, 8)), ValueError, "needs 2 numbers"),
        (lambda: SimpleDiscriminator(16)(torch.randn(1, 1, 16, 16)), ValueError, r"\(N, 3, 16, 16\)"),
        (lambda: SimpleDiscriminator(16)(torch.zeros(1, 3, 16, 16, dtype=torch.uint8)), TypeError, "floating"),
    ],
)
def test_errors(call, kind, text):
    with pytest.raises(kind, match=text):
        call()


# life cycle


@pytest.mark.parametrize("name", GENERATORS)
def test_state_dict_round_trip(name):
    g, other = GENERATORS[name](), GENERATORS[name]()
    other.load_state_dict(g.state_dict())
    z = torch.randn(2, g.z_dim)
    settings = {"noise": torch.ones(5)} if isinstance(g, EigenGenerator) else {}
    assert torch.equal(g(z, **settings), other(z, **settings))
