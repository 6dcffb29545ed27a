import io
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from data_files import write_tree
from gan_helpers import EIGEN, eigen, short, tiny, trained
from lab_helpers import NanGradient, run_of, train
from PIL import Image
from torch import nn
from torch.nn import functional as F

from orthocond.gans import SimpleDiscriminator, SimpleGenerator
from orthocond.lab.config import from_json
from orthocond.lab.data import Pipeline
from orthocond.lab.factories import NotAllowedError
from orthocond.lab.generation import task as generation
from orthocond.lab.generation.config import GRAMMAR, GanData, GanMethod, GanModel, GanObjective, Generation
from orthocond.lab.generation.data import load_images
from orthocond.lab.generation.networks import build, latent_layers, load_generator, prepare, sample
from orthocond.lab.generation.pictures import picture
from orthocond.lab.generation.rivals import rival_penalty
from orthocond.lab.methods import treat_steps, weight_penalty
from orthocond.lab.runs import Run
from orthocond.matrix import matrix_view

# Values


@pytest.mark.parametrize(
    ("method", "rival"),
    [(name, "image") for name in (*GRAMMAR.names, "stiefel", "ol+hp", "ol+orojar", "stiefel+lvp")]
    + [(name, "paper") for name in ("hp", "orojar", "lvp")],
)
@pytest.mark.parametrize("make", [tiny, eigen])
def test_every_method_trains(tmp_path, make, method, rival):
    config = short(make(method))
    run = trained(tmp_path, replace(config, method=replace(config.method, rival=rival)))
    lines = run.metrics()
    assert [m["step"] for m in lines] == [1, 2]
    assert "finished" not in lines[0]
    assert lines[1]["finished"]
    assert all(math.isfinite(m["generator_loss"] + m["discriminator_loss"]) for m in lines)
    assert ("olr_occurrence" in lines[1]) == ("olr" in method)
    assert ("method_penalty" in lines[1]) == bool(GRAMMAR.read(method).keys() & {"ol", "hp", "orojar", "lvp"})
    assert len(lines[1]["conditions"]) == (1 if make is tiny else 2)
    assert lines[1]["condition"] == max(lines[1]["conditions"])
    if method == "ow" or ("stiefel" in method and make is eigen):  # the other weights begin where they are
        assert lines[1]["condition"] == pytest.approx(1, abs=1e-4)
    assert "step_seconds" in run.times()[1]


def test_the_first_step_is_what_the_definition_says(tmp_path):
    """Losses, gradient penalty and both steps of Adam, written out with torch alone."""
    config = short(tiny(seed=3), 1)
    run = trained(tmp_path, config)
    line, state = run.metrics()[0], run.load().state
    generator, discriminator = prepare(config)
    random = generation.random(generation._STEP, 3, 1)
    real = next(Pipeline(data=load_images(config.data), batch_size=8, train=True, crop_padding=0, seed=3).batches())
    x = real.images.requires_grad_()
    fake = generator(sample(generator, 8, random)[0]).detach()
    logits = discriminator(x)
    loss = F.binary_cross_entropy_with_logits(logits, torch.ones(8))
    loss = loss + F.binary_cross_entropy_with_logits(discriminator(fake), torch.zeros(8))
    (slope,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
    penalty = slope.square().sum((1, 2, 3)).mean()
    assert line["discriminator_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert line["discriminator_penalty"] == pytest.approx(penalty.item(), rel=1e-4)
    optimizer = torch.optim.Adam(discriminator.parameters(), 1e-3, (0.0, 0.99))
    (loss + 4 * penalty).backward()
    optimizer.step()
    for name, value in discriminator.state_dict().items():
        assert state["discriminator"][name] == pytest.approx(value, abs=1e-6), name
    logits = discriminator(generator(sample(generator, 8, random)[0]))
    loss = F.binary_cross_entropy_with_logits(logits, torch.ones(8))
    assert line["generator_loss"] == pytest.approx(loss.item(), rel=1e-5)
    before = {name: value.clone() for name, value in generator.state_dict().items()}
    optimizer = torch.optim.Adam(generator.parameters(), 1e-3, (0.0, 0.99))
    loss.backward()
    optimizer.step()
    for name, value in generator.state_dict().items():
        assert state["generator"][name] == pytest.approx(value, abs=2e-5), name
        assert state["ema"]["model"][name] == pytest.approx(0.1 * before[name] + 0.9 * value, abs=1e-5), name
    expected = np.linalg.cond(state["generator"]["first_projection.weight"].flatten(1).double().numpy())
    assert line["condition"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("of", ["gradient", "update"])
def test_gradient_or_update_is_orthogonal(tmp_path, monkeypatch, of):
    config = short(eigen("nog"), 1)
    config = replace(config, method=GanMethod("nog", nog_of=of))
    start = [matrix_view(layer.weight.detach()) for layer in latent_layers(prepare(config).generator)]
    seen = []
    real = torch.optim.Adam.step

    def step(self, *args):
        result = real(self, *args)
        seen.append({tuple(p.shape): p.grad.clone() for p in self.param_groups[0]["params"]})
        return result

    monkeypatch.setattr(torch.optim.Adam, "step", step)
    run = trained(tmp_path, config)
    for i, before in enumerate(start):
        gradient = seen[1][tuple(before.shape)]
        update = run.load().state["generator"][f"blocks.{i}.subspace.weight"] - before
        values = torch.linalg.svdvals(gradient if of == "gradient" else update)
        assert values / values[0] == pytest.approx(torch.ones(2), abs=1e-3)


def test_the_orthogonality_loss_is_that_of_eigengan():
    layers = latent_layers(prepare(eigen()).generator)
    with torch.no_grad():
        layers[0].weight.mul_(2)  # U Uᵀ = 4 I: 9 for each of two directions
    assert weight_penalty(GanMethod("ol", ol_weight=0.5), layers).item() == pytest.approx(0.5 * 18, rel=1e-5)
    assert weight_penalty(GanMethod("nog"), layers) is None


@pytest.mark.parametrize("make", [tiny, eigen])
def test_a_rival_can_see_a_part_of_the_latents(tmp_path, make, monkeypatch):
    seen = []

    def penalty(network, z, **settings):
        seen.append((len(z), len(network(z))))
        return network(z).square().mean()

    monkeypatch.setattr("orthocond.lab.generation.rivals.hessian_penalty", penalty)
    config = short(make("hp"))
    for count in (None, 3):
        trained(tmp_path, replace(config, method=replace(config.method, rival_batch=count)))
    whole = config.schedule.batch_size
    assert seen == [(whole, whole)] * 2 + [(3, 3)] * 2


def test_a_part_that_the_processes_cannot_share():
    with pytest.raises(ValueError, match="multiple of the number of processes, 2; got 3"):
        generation.share(3, 2)


def test_rivals_vanish_where_they_should():
    """A linear generator has no Hessian; one with orthogonal rows an orthogonal Jacobian."""

    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.first_projection = nn.Linear(4, 48, bias=False)
            nn.init.orthogonal_(self.first_projection.weight)

        def forward(self, z):
            return self.first_projection(z).unflatten(1, (3, 4, 4))

    generator, z = Linear(), torch.randn(16, 4)

    def value(name):
        random = torch.Generator().manual_seed(0)
        return rival_penalty(GanMethod(name), generator, generator, z, None, random).item()

    assert value("orojar") == pytest.approx(0, abs=1e-9)
    assert value("hp") == pytest.approx(0, abs=1e-4)
    with torch.no_grad():
        generator.first_projection.weight.copy_(torch.ones(48, 4))
    assert value("orojar") > 0.01
    with pytest.raises(ValueError, match=r"has neither convolutions nor blocks.*--method\.rival image"):
        rival_penalty(GanMethod("hp", rival="paper"), generator, generator, z, None, torch.Generator())


@pytest.mark.parametrize("name", [*GRAMMAR.names[:2], *GRAMMAR.names[3:6], "orojar"])
def test_treatments_cannot_tell_axes_from_rotated_axes(name):
    """Training on rotated latents from a rotated weight is the same training: only the rivals know of axes."""
    rotation = nn.init.orthogonal_(torch.empty(4, 4, dtype=torch.float64))
    weight = torch.randn(48, 4, dtype=torch.float64)
    codes, target = torch.randn(3, 16, 4, dtype=torch.float64), torch.randn(16, 48, dtype=torch.float64)
    method = GanMethod(name)

    def trained_weight(turn):
        layer = nn.Linear(4, 48, bias=False, dtype=torch.float64)
        layer.weight.data = weight @ turn
        optimizer = torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9)
        treatment = treat_steps(method, [layer], optimizer, model=layer, gain=method.olr_gain)
        random = torch.Generator().manual_seed(0)
        for z in codes:

            def network(z):
                return torch.tanh(layer(z)).unflatten(1, (3, 4, 4))

            loss = F.mse_loss(network(z @ turn).flatten(1), target)
            extra = weight_penalty(method, [layer]), rival_penalty(method, layer, network, z @ turn, None, random)
            optimizer.zero_grad()
            sum((x for x in extra if x is not None), loss).backward()
            optimizer.step()
        assert (treatment is not None) == ("nog" in name or "olr" in name)
        return layer.weight.detach()

    same = torch.allclose(trained_weight(rotation), trained_weight(torch.eye(4, dtype=torch.float64)) @ rotation)
    assert same == (name != "orojar")


def test_lvp_trains_its_predictor(tmp_path):
    config = short(tiny("lvp"), 1)
    before = trained(tmp_path, config).load().state["predictor"]
    after = trained(tmp_path, short(tiny("lvp"), 3)).load().state["predictor"]
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_penalties_of_the_discriminator_come_at_their_intervals(tmp_path):
    for penalty, expected in (("r1", [1, 5]), ("gp0", [1, 5]), ("none", [])):
        config = short(tiny(objective=GanObjective(penalty=penalty)), 6)
        lines = trained(tmp_path, config).metrics()
        assert [m["step"] for m in lines if "discriminator_penalty" in m] == expected


def test_a_step_with_a_gradient_penalty_draws_nothing_from_the_global_state(tmp_path):
    states = []
    for penalty in ("none", "gp"):
        config = short(tiny(objective=GanObjective(penalty=penalty, penalty_interval=1)), 2)
        states.append(trained(tmp_path, config).load().state["rng"]["ranks"][0]["torch"])
    assert torch.equal(*states)


def test_the_learning_rate_falls_to_zero_in_the_end(tmp_path):
    config = short(tiny(), 6)
    config = replace(config, schedule=replace(config.schedule, constant=0.5))
    rates = [m["lr"] for m in trained(tmp_path, config).metrics()]
    assert rates == pytest.approx([1e-3, 1e-3, 1e-3, 0.75e-3, 0.5e-3, 0.25e-3])
    assert {m["lr"] for m in trained(tmp_path, short(tiny())).metrics()} == {1e-3}


def test_every_rate_follows_the_schedule(tmp_path, monkeypatch):
    """The rates that Adam uses, and all parameters once."""
    config = short(eigen("lvp"), 4)
    own = {"discriminator_lr": 2e-3, "subspace_lr": 0.01, "importance_lr": 0.03}
    config = replace(config, schedule=replace(config.schedule, constant=0.5, end=0.1, **own))
    seen, real = [], torch.optim.Adam.step

    def step(self, *args):
        seen.append({group.get("name", ""): group["lr"] for group in self.param_groups})
        moved.append({id(p) for group in self.param_groups for p in group["params"]})
        return real(self, *args)

    moved = []
    monkeypatch.setattr(torch.optim.Adam, "step", step)
    run = trained(tmp_path, config)
    for i, part in enumerate([1, 1, 0.7, 0.4]):
        assert seen[2 * i] == pytest.approx({"": 2e-3 * part})
        rates = {"rest": 1e-3, "subspaces": 0.01, "importances": 0.03, "": 1e-3}  # the last one is LVP's network
        assert seen[2 * i + 1] == pytest.approx({name: rate * part for name, rate in rates.items()})
    assert [m["lr"] for m in run.metrics()] == pytest.approx([1e-3, 1e-3, 0.7e-3, 0.4e-3])
    predictor = run.load().state["predictor"]
    assert len(moved[1]) == len(list(prepare(config).generator.parameters())) + len(predictor)
    start = prepare(config).generator.state_dict()
    state = run.load().state["generator"]
    scale, weight = "blocks.0.subspace.scale", "blocks.0.subspace.weight"
    assert (state[scale] - start[scale]).abs().max() > 0.03
    assert (state[weight] - start[weight]).abs().max() < 0.04


def test_stiefel_steps_have_the_rate_of_the_subspaces(tmp_path):
    for rate, length in ((None, 0.03), (0.005, 0.15)):
        config = short(eigen("stiefel"), 1)
        config = replace(config, schedule=replace(config.schedule, subspace_lr=rate, importance_lr=0.03))
        run = trained(tmp_path, config)
        before, after = prepare(config).generator.state_dict(), run.load().state["generator"]
        update = (after["blocks.0.subspace.weight"] - before["blocks.0.subspace.weight"]).double()
        # The polar retraction of a step of this length turns by its arctangent.
        expected = 2 * math.sin(math.atan(length) / 2)
        assert torch.linalg.svdvals(update) == pytest.approx([expected] * 2, rel=1e-3)
        assert run.metrics()[-1]["condition"] == pytest.approx(1, abs=1e-5)


def test_an_average_without_memory_is_the_generator(tmp_path):
    config = short(tiny())
    state = trained(tmp_path, replace(config, schedule=replace(config.schedule, ema=0.0))).load().state
    assert all(torch.equal(state["ema"]["model"][name], value) for name, value in state["generator"].items())


def test_pictures_show_the_average_at_the_same_latents(tmp_path):
    config = replace(tiny(), sample_every=3)
    run = trained(tmp_path, config)
    names = ["samples-0000003.png", "samples-0000006.png", "samples-0000007.png"]
    assert sorted(p.name for p in run.figures.iterdir()) == names
    pixels = np.asarray(Image.open(run.figures / names[-1]))
    assert pixels.shape == (8 * 18 * 6, 8 * 18 * 6, 3)
    generator = load_generator(Run.open(run.path))
    z, _ = sample(generator, 64, generation.random(generation._PICTURE, config.seed))
    expected = (generator(z)[8] + 1) * 127.5  # the first of the second row
    assert pixels[19 * 6 + 2 : 35 * 6 : 6, 8 : 17 * 6 : 6] == pytest.approx(expected.permute(1, 2, 0).numpy(), abs=0.51)


def test_pictures_hold_all_images():
    images = torch.stack([torch.full((3, 96, 96), v) for v in (-1.0, 0.0, 2.0)])
    pixels = np.asarray(Image.open(io.BytesIO(picture(images, columns=2))))
    assert pixels.shape == (196, 196, 3)
    assert [pixels[y, x, 0] for y, x in ((50, 50), (50, 150), (150, 50), (150, 150))] == [0, 128, 255, 255]


def dead_networks(size):
    """A discriminator that gives all images the same logit."""
    discriminator = SimpleDiscriminator(size, 4, norm=False)
    with torch.no_grad():
        for parameter in discriminator.parameters():
            parameter.zero_()
    return SimpleGenerator(size, 3, channels=(8, 8, 4)), discriminator


def collapsed_networks(size):
    """A generator that nearly always draws the same image."""
    generator = SimpleGenerator(size, 3, channels=(8, 8, 4))
    with torch.no_grad():
        generator.first_projection.weight.mul_(1e-12)
    return generator, SimpleDiscriminator(size, 4, norm=False)


@pytest.mark.parametrize(
    ("networks", "text", "number"),
    [
        ("dead_networks", "The discriminator is dead: in 100 % of the steps", "dead discriminator: cannot tell"),
        ("collapsed_networks", "The samples have collapsed: their distance", "collapsed samples: spread"),
        ("own_networks", None, None),
    ],
)
def test_what_is_wrong_is_noted_and_shown(tmp_path, networks, text, number):
    config = short(tiny(model=GanModel(f"test_generation:{networks}"), log_every=10), 61)
    config = replace(config, schedule=replace(config.schedule, lr=1e-9, batch_size=4))
    run, seen = run_of(tmp_path, config), []
    train(config, run, progress=lambda state: seen.append(state.numbers))
    log = (run.path / "log.txt").read_text()
    last = run.metrics()[-1]
    if text is None:
        assert "discriminator is dead" not in log
        assert "collapsed" not in log
        assert set(seen[-1]) == {"discriminator_loss", "generator_loss"}
        assert last["cannot_tell"] < 0.5
        assert last["sample_spread"] > 0.1
        return
    assert log.count(text) == 1  # not again at every line
    assert number in seen[-1]
    assert number not in seen[20]  # a few steps may be chance, and initial weights draw nearly one image
    if networks == "dead_networks":
        assert (last["cannot_tell"], last["real_logit"], last["fake_logit"]) == pytest.approx((1, 0, 0), abs=1e-4)
    else:
        assert last["sample_spread"] < 0.1


def test_signs_of_health_are_those_of_the_first_step(tmp_path):
    config = short(tiny(seed=3), 6)
    lines = trained(tmp_path, config).metrics()
    generator, discriminator = prepare(config)
    real = next(Pipeline(data=load_images(config.data), batch_size=8, train=True, crop_padding=0, seed=3).batches())
    fake = generator(sample(generator, 8, generation.random(generation._STEP, 3, 1))[0])
    assert lines[0]["real_logit"] == pytest.approx(discriminator(real.images).mean().item(), rel=1e-4)
    assert lines[0]["fake_logit"] == pytest.approx(discriminator(fake).mean().item(), rel=1e-4)
    spreads = [torch.cdist(x, x).sum().item() for x in (fake.flatten(1), real.images.flatten(1))]
    assert lines[0]["sample_spread"] == pytest.approx(spreads[0] / spreads[1], rel=1e-3)
    penalties = [line.get("discriminator_penalty") for line in lines]
    assert [line["last_penalty"] for line in lines] == [penalties[0]] * 4 + [penalties[4]] * 2


# Errors, and networks of users


def test_images_of_all_kinds_become_squares(tmp_path):
    write_tree(tmp_path / "data", [f"{i}.png" for i in range(9)])
    Image.new("L", (40, 30), 100).save(tmp_path / "data" / "gray.png")
    Image.new("RGBA", (20, 50), (255, 0, 0, 128)).save(tmp_path / "data" / "clear.png")
    Image.new("RGB", (3, 1), (0, 255, 0)).save(tmp_path / "data" / "small.png")
    data = GanData(str(tmp_path / "data"), 16, resize=18)
    assert load_images(data).size == (18, 18)
    run = trained(tmp_path, short(tiny(data=data)))
    assert run.metrics()[-1]["finished"]
    (tmp_path / "data" / "torn.png").write_bytes((tmp_path / "data" / "gray.png").read_bytes()[:60])
    with pytest.raises(ValueError, match=r"torn\.png"):
        load_images(data)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"data": GanData(size=24)}, "power of two"),
        ({"data": GanData(limit=4)}, "4 images make no batch of 8"),
        ({"model": replace(EIGEN, directions=1000)}, "1000 directions needs at least as many dimensions"),
        ({"model": GanModel("test_generation:nothing")}, "test_generation has no nothing"),
        ({"model": GanModel("test_generation:headless")}, "neither a layer first_projection nor layers subspaces"),
    ],
)
def test_errors(tmp_path, settings, error):
    config = replace(tiny(), **settings)
    with pytest.raises(ValueError, match=error):
        train(config, run_of(tmp_path, config))


def own_networks(size):
    return SimpleGenerator(size, 3, 4), SimpleDiscriminator(size, 4)


def headless(size):
    generator = nn.Sequential(nn.Linear(3, 3 * size * size), nn.Unflatten(1, (3, size, size)))
    generator.z_dim = 3
    return generator, SimpleDiscriminator(size, 4)


def one_network(size):
    return SimpleGenerator(size, 3, 4)


def without_latents(size):
    return nn.Flatten(), SimpleDiscriminator(size, 4)


def test_networks_of_users(tmp_path):
    run = trained(tmp_path, short(tiny("nog+olr", model=GanModel("test_generation:own_networks"))))
    assert load_generator(run, allow_import="test_generation:own_networks").z_dim == 3
    for allowed in (None, "test_generation:headless"):
        with pytest.raises(NotAllowedError, match="test_generation:own_networks would be imported and called"):
            load_generator(run, allow_import=allowed)
    with pytest.raises(
        TypeError, match="has to return a generator and a discriminator, two modules; it returned Simple"
    ):
        build(GanModel("test_generation:one_network"), 16)
    with pytest.raises(TypeError, match="needs an attribute z_dim"):
        build(GanModel("test_generation:without_latents"), 16)


def test_a_generator_needs_a_checkpoint(tmp_path):
    with pytest.raises(RuntimeError, match="has no checkpoint yet; train it first"):
        load_generator(run_of(tmp_path, tiny()))
    with pytest.raises(ValueError, match="Generation has no setting 'lr'"):
        from_json(Generation, {"lr": 1})


def test_losses_that_are_not_finite_stop_with_a_diagnosis(tmp_path, monkeypatch):
    config = tiny(save_every=1)
    run = run_of(tmp_path, config)
    calls = []
    real = SimpleDiscriminator.forward

    def broken(self, images):
        calls.append(None)
        return real(self, images) * (float("nan") if len(calls) == 9 else 1)

    monkeypatch.setattr(SimpleDiscriminator, "forward", broken)
    with pytest.raises(FloatingPointError, match=r"The loss is nan at step [23][\s\S]*discriminator[\s\S]*step"):
        train(config, run)
    assert run.load().step in (1, 2)
    assert all(p.isfinite().all() for p in run.load().state["generator"].values())


def test_gradients_that_are_not_finite_stop_with_a_diagnosis(tmp_path, monkeypatch):
    real = SimpleGenerator.forward
    monkeypatch.setattr(SimpleGenerator, "forward", lambda self, z: NanGradient.apply(real(self, z)))
    for method, error in (
        ("nog", "NearestOrthogonal needs finite gradients"),
        ("none", "Matrices need finite entries"),
    ):
        with pytest.raises(FloatingPointError, match=rf"{error}[\s\S]*first_projection"):
            train(tiny(method), run_of(tmp_path, tiny(method)))
