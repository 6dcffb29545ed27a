import json
from dataclasses import replace

import pytest
import torch
from gan_helpers import eigen, tiny
from lab_helpers import train
from torch import nn

from orthocond import NoiseAsLatent
from orthocond.lab.data import FACTORS, sprites
from orthocond.lab.data.rendering import render
from orthocond.lab.experiments import preset
from orthocond.lab.generation import evaluate as gan_evaluate
from orthocond.lab.generation.evaluate import evaluate, find_directions, own_directions, predictability
from orthocond.lab.generation.networks import load_generator
from orthocond.lab.runs import Run
from orthocond.metrics import VariationalPredictability, factor_report

VP = VariationalPredictability(pairs=60, test_ratio=0.5, epochs=1, widths=(4, 4, 4), repeats=1)
LOW, HIGH = torch.tensor(list(FACTORS.values())).unbind(1)


class Renderer(nn.Module):
    """A perfect generator: latent i is factor i of a disc."""

    z_dim = 6

    def __init__(self):
        super().__init__()
        self.first_projection = nn.Linear(6, 6, bias=False)
        nn.init.eye_(self.first_projection.weight)

    def forward(self, z):
        part = 0.5 + 0.5 * torch.erf(self.first_projection(z) / 2**0.5)
        factors = LOW + (HIGH - LOW) * part
        return 2 * render(factors, torch.zeros(len(z), dtype=torch.long), 16) - 1


def run_of(tmp_path, config):
    run = Run.create(tmp_path, "tiny", config)
    train(replace(config, schedule=replace(config.schedule, steps=1)), run)
    return run


def test_a_perfect_generator_gets_perfect_marks(tmp_path, monkeypatch):
    run = run_of(tmp_path, tiny(data=replace(tiny().data, shape="disc", limit=None)))
    monkeypatch.setattr(gan_evaluate, "load_generator", lambda run, **_: Renderer().requires_grad_(False))
    result = evaluate(run, vp=VP, samples=1000)
    factors = result["factors"]
    assert factors["read"] == 1
    assert factors["residual"] < 0.02
    assert factors["distance"] < 0.05
    for name in FACTORS:
        assert factors[name]["fake"] == pytest.approx(factors[name]["real"], rel=0.1, abs=0.02)
    found = result["directions"]["axes"]
    effects = torch.tensor(found["effects"])
    assert effects.argmax(1).tolist() == [0, 1, 2, 3, 4, 5]
    assert (effects - effects.diag().diag()).max() < 0.2 * effects.diag().min()
    assert found["mig"] > 0.5
    assert found["disentanglement"] > 0.8
    # Of rotated axes MIG is nearly 0, and each disturbs several factors.
    assert found["above_rotated"]["mig"] == pytest.approx(found["mig"], abs=0.1)
    assert found["above_rotated"]["disentanglement"] > 0.4
    assert result["condition"] == pytest.approx(1)
    assert result["directions"]["sefa"]["ties"] == [[0, 1, 2, 3, 4, 5]]
    assert json.loads((run.path / "evaluation.json").read_text()) == json.loads(json.dumps(result))
    names = {"effects-axes.png", "effects-sefa.png", "traversal-axes.png", "traversal-sefa.png"}
    assert names <= {p.name for p in run.figures.iterdir()}


def test_rotated_axes_are_no_better_than_rotated_axes(tmp_path):
    turned = Renderer().requires_grad_(False)
    nn.init.orthogonal_(turned.first_projection.weight, generator=torch.Generator().manual_seed(1))
    truth = gan_evaluate._Truth(tiny(data=replace(tiny().data, shape="disc", limit=None)), None, 1000)
    scores = factor_report(turned, None, truth.read, samples=1000).scores()
    above = truth.above_rotated(turned, scores)
    assert abs(above["mig"]) < 0.1
    assert abs(above["disentanglement"]) < 0.2


def test_faint_color_does_not_move_the_factors():
    data = sprites(200, size=16)
    noise = 0.06 * torch.rand(data.images.shape)
    clean = gan_evaluate._Truth.read(data.images)
    noisy = gan_evaluate._Truth.read(data.images / 127.5 - 1 + noise)
    assert (noisy - clean).abs().mean(0)[:3].tolist() == pytest.approx([0, 0, 0], abs=0.01)


def test_eigengan_and_the_distance_of_images(tmp_path):
    run = run_of(tmp_path, eigen("nog"))

    class Tiny(nn.Module):
        name = "pool"

        def forward(self, images):
            return images.mean((2, 3))

    reference = tmp_path / "real.safetensors"
    result = evaluate(run, vp=VP, samples=40, extractor=Tiny().eval(), images=30, reference=reference)
    assert result["frechet"]["protocol"] == "fd30-pool"
    assert result["frechet"]["real"] == 30
    assert list(result["directions"]) == ["eigengan"]
    assert sorted(result["directions"]["eigengan"]["names"]) == ["L0 D0", "L0 D1", "L1 D0", "L1 D1"]
    assert len(result["singular_values"]) == 2
    assert "mig" not in result["directions"]["eigengan"]  # after one step there is nothing to read
    written = (run.path / "evaluation.json").read_text()
    evaluate(run, vp=VP, samples=40, extractor=Tiny().eval(), images=30, reference=reference)
    assert (run.path / "evaluation.json").read_text() == written


def test_noise_as_latent(tmp_path):
    generator = load_generator(run_of(tmp_path, eigen()))
    whole = NoiseAsLatent(generator)
    z, noise = torch.randn(5, 4), torch.randn(5, 3)
    assert whole.z_dim == 7
    assert torch.equal(whole(torch.cat([z, noise], 1)), generator(z, noise))
    assert list(own_directions(generator)) == ["eigengan"]


def test_protocols():
    assert predictability(preset("gan-celeba", "paper")) == VariationalPredictability()
    assert predictability(preset("eigengan-ffhq", "paper")).extent == 4
    assert predictability(preset("gan-sprites", "paper")).pairs == 2000


def test_a_run_needs_a_checkpoint_and_a_gan(tmp_path):
    with pytest.raises(RuntimeError, match="has no checkpoint yet"):
        evaluate(Run.create(tmp_path, "tiny", tiny()))
    with pytest.raises(ValueError, match="Generation has no setting"):
        evaluate(Run.create(tmp_path, "other", {"lr": 1}))


def test_the_largest_effect_comes_first(tmp_path):
    generator = load_generator(run_of(tmp_path, eigen()))
    last = generator.blocks[-1]
    with torch.no_grad():  # what has the largest importance does nothing
        last.subspace.scale.fill_(100.0)
        for convolution in (last.subspace_conv1, last.subspace_conv2[-1]):
            convolution.weight.zero_()
    found = find_directions(generator, k=3)
    assert found.effect.diff().max() <= 0 < found.effect[1]
    assert [name[:2] for name in found.names] == ["L0", "L0", "L1"]
    assert found.importance[2] > found.importance[0]
