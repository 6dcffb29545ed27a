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
from orthocond.lab.generation import truth
from orthocond.lab.generation.directions import find_directions, kinds_of
from orthocond.lab.generation.evaluate import MEASURES, chosen, evaluate, predictability
from orthocond.lab.generation.networks import load_generator
from orthocond.lab.runs import Run
from orthocond.metrics import VariationalPredictability, factor_report

KINDS = ["axes", "sefa", "jacobian", "joint"]
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


def turned(seed):
    """A perfect generator whose latents are rotated."""
    generator = Renderer().requires_grad_(False)
    nn.init.orthogonal_(generator.first_projection.weight, generator=torch.Generator().manual_seed(seed))
    return generator


def discs(tmp_path, monkeypatch, generator):
    monkeypatch.setattr(gan_evaluate, "load_generator", lambda run, **_: generator)
    return run_of(tmp_path, tiny(data=replace(tiny().data, shape="disc", limit=None)))


def test_a_perfect_generator_gets_perfect_marks(tmp_path, monkeypatch):
    run = discs(tmp_path, monkeypatch, Renderer().requires_grad_(False))
    result = evaluate(run, vp=VP, samples=600)
    factors = result["factors"]
    assert factors["read"] == 1
    assert factors["residual"] < 0.02
    assert factors["distance"] < 0.05
    for name in FACTORS:
        assert factors[name]["fake"] == pytest.approx(factors[name]["real"], rel=0.1, abs=0.02)
    assert list(result["directions"]) == KINDS
    found = result["directions"]["axes"]
    effects = torch.tensor(found["effects"])
    assert effects.argmax(1).tolist() == [0, 1, 2, 3, 4, 5]
    assert (effects - effects.diag().diag()).max() < 0.2 * effects.diag().min()
    assert found["mig"] > 0.5
    assert found["disentanglement"] > 0.8
    assert found["energy"] < 0.1
    # The MIG of rotated axes is nearly 0, and each disturbs several factors.
    assert result["chance"]["rotations"] == 20
    assert result["chance"]["mean"]["mig"] < 0.1
    assert found["above_rotated"]["mig"] == pytest.approx(found["mig"] - result["chance"]["mean"]["mig"])
    assert found["above_rotated"]["disentanglement"] > 0.4
    assert result["condition"] == result["trained"]["condition"] == pytest.approx(1)
    assert result["directions"]["sefa"]["ties"] == [[0, 1, 2, 3, 4, 5]]
    assert json.loads((run.path / "evaluation.json").read_text()) == json.loads(json.dumps(result))
    names = {f"{what}-{kind}.png" for what in ("effects", "traversal") for kind in KINDS}
    assert names <= {p.name for p in run.figures.iterdir()}


def test_joint_directions_find_the_factors_that_rotated_axes_hide(tmp_path, monkeypatch):
    run = discs(tmp_path, monkeypatch, turned(1))
    result = evaluate(run, only=["factors", "chance", "energy"], skip=["sefa", "jacobian"], samples=600)
    found = result["directions"]
    assert found["joint"]["energy"] < 0.5 * found["axes"]["energy"]
    assert found["joint"]["mig"] > 0.4 > 0.2 > found["axes"]["mig"]
    assert found["joint"]["above_rotated"]["disentanglement"] > 0.3
    # Rotated axes score as other rotated axes.
    assert abs(found["axes"]["above_rotated"]["mig"]) < 0.1
    assert abs(found["axes"]["above_rotated"]["disentanglement"]) < 0.2


def test_scores_are_those_of_the_library():
    generator = Renderer().requires_grad_(False)
    z = torch.randn(600, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).float()
    expected = factor_report(generator, None, truth.read, samples=600, effect_samples=2).scores()
    found = truth.scores(z, truth.read(generator(z)))
    assert found == pytest.approx({name: expected[name] for name in found})


def test_chance_rotates_the_layers_of_latents_among_themselves():
    """Factors that are the two latents of the first layer stay unknown to the second one."""
    z = torch.randn(500, 4, generator=torch.Generator().manual_seed(0))
    factors = torch.stack([z[:, 0], z[:, 1]], 1)
    whole, layered = truth.chance(z, factors, [4], 5), truth.chance(z, factors, [2, 2], 5)
    assert layered["mean"]["completeness"] > whole["mean"]["completeness"] + 0.1
    assert layered["std"]["mig"] > 0
    assert truth.chance(z, factors, [4], 5) == whole


def test_faint_color_does_not_move_the_factors():
    data = sprites(200, size=16)
    noise = 0.06 * torch.rand(data.images.shape)
    clean = truth.read(data.images)
    noisy = truth.read(data.images / 127.5 - 1 + noise)
    assert (noisy - clean).abs().mean(0)[:3].tolist() == pytest.approx([0, 0, 0], abs=0.01)


class Pool(nn.Module):
    name = "pool"

    def forward(self, images):
        return images.float().mean((2, 3))


def test_eigengan_and_the_distance_of_images(tmp_path):
    run = run_of(tmp_path, eigen("nog"))
    result = evaluate(run, vp=VP, samples=40, extractor=Pool().eval(), images=20, reference=tmp_path)
    found = result["frechet"]
    assert (found["protocol"], found["real"], found["floor"]["images"]) == ("fd20-pool", 20, 20)
    assert found["value"] > found["floor"]["value"] > 0
    assert found["kernel"] > found["floor"]["kernel"]
    assert list(result["directions"]) == ["eigengan", "sefa", "jacobian", "joint"]
    own, joint = result["directions"]["eigengan"], result["directions"]["joint"]
    assert sorted(own["names"]) == ["L0 D0", "L0 D1", "L1 D0", "L1 D1"]
    assert sorted(joint["names"]) == ["L0 joint 0", "L0 joint 1", "L1 joint 0", "L1 joint 1"]
    assert joint["energy"] <= own["energy"] + 0.05
    assert len(result["singular_values"]) == len(result["trained"]["singular_values"]) == 2
    assert "mig" not in own  # after one step there is nothing to read
    written = (run.path / "evaluation.json").read_text()
    evaluate(run, vp=VP, samples=40, extractor=Pool().eval(), images=20, reference=tmp_path)
    assert (run.path / "evaluation.json").read_text() == written


def test_only_what_is_asked_for_is_measured_and_the_rest_stays(tmp_path, monkeypatch):
    run = run_of(tmp_path, tiny())
    first = evaluate(run, only=["condition", "activeness", "axes"])
    assert list(first) == ["step", "condition", "conditions", "singular_values", "trained", "directions"]
    assert list(first["directions"]) == ["axes"]
    monkeypatch.setattr(gan_evaluate, "activeness", None)  # not called again
    both = evaluate(run, only=["energy", "axes", "joint"])
    assert both["condition"] == first["condition"]
    assert both["directions"]["axes"]["activeness"] == first["directions"]["axes"]["activeness"]
    assert both["directions"]["axes"].keys() - first["directions"]["axes"].keys() == {"energy"}
    assert json.loads((run.path / "evaluation.json").read_text()) == json.loads(json.dumps(both))


def test_names_of_measures():
    assert chosen() == frozenset(MEASURES)
    assert chosen(["joint"]) == {"factors", "chance", "vp", "activeness", "energy", "pictures", "joint"}
    assert chosen(["fid"]) == {"fid", "axes", "sefa", "jacobian", "joint", "eigengan"}
    assert chosen(skip=["vp"]) == frozenset(MEASURES) - {"vp"}
    with pytest.raises(ValueError, match="no measure 'kappa'; there are condition, "):
        chosen(["kappa"])
    with pytest.raises(ValueError, match="Nothing is left"):
        chosen(["vp"], ["vp"])


def test_noise_as_latent(tmp_path):
    generator = load_generator(run_of(tmp_path, eigen()))
    whole = NoiseAsLatent(generator)
    z, noise = torch.randn(5, 4), torch.randn(5, 3)
    assert whole.z_dim == 7
    assert torch.equal(whole(torch.cat([z, noise], 1)), generator(z, noise))
    assert kinds_of(generator) == ("eigengan", "sefa", "jacobian", "joint")


def test_protocols():
    assert predictability(preset("gan-celeba", "paper")) == VariationalPredictability()
    assert predictability(preset("eigengan-ffhq", "paper")).extent == 4
    assert predictability(preset("gan-sprites", "paper")).train_pairs == 200
    assert predictability(preset("gan-celeba", "workstation")).train_pairs == 200


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
