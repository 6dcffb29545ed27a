"""Configurations and presets of GANs."""

from dataclasses import replace

import pytest
import torch
from gan_helpers import short, tiny, trained
from lab_helpers import run_of

from orthocond.lab import experiments
from orthocond.lab.config import to_json
from orthocond.lab.experiments import preset
from orthocond.lab.generation.config import GRAMMAR, GanData, GanMethod, GanModel, GanSchedule, Generation
from orthocond.lab.generation.networks import build, sample
from orthocond.lab.generation.presets import PRESETS
from orthocond.lab.presets import KINDS

# Configurations


def test_presets_have_the_numbers_of_the_paper():
    for name, size in (("eigengan-animeface", 128), ("eigengan-ffhq", 256)):
        config = preset(name, "paper")
        assert (config.data.size, config.schedule.batch_size, config.schedule.steps) == (size, 128, 500_000)
        assert (config.model.directions, config.method.name) == (6, "ol")
    for name, images, epochs in (("gan-celeba", 202_599, 200), ("gan-church", 126_227, 400)):
        config = preset(name, "paper")
        assert (config.data.size, config.schedule.batch_size, config.model.z_dim) == (128, 128, 30)
        assert config.schedule.steps == images // 128 * epochs
    assert preset("gan-celeba", "paper").data.resize == round(128 * 178 / 170)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_of_laptops_build_and_are_read_back(name):
    config = preset(name)
    assert config == experiments.preset(name)
    assert experiments.read_config(to_json(config)) == config
    assert KINDS[config.kind].grammar.names == GRAMMAR.names
    generator, discriminator = build(config.model, config.data.size)
    z, noise = sample(generator, 2, torch.Generator())
    images = generator(z) if noise is None else generator(z, noise)
    assert images.shape == (2, 3, config.data.size, config.data.size)
    assert discriminator(images).shape == (2,)
    assert sum(p.numel() for p in generator.parameters()) < 600_000


@pytest.mark.parametrize("name", PRESETS)
def test_presets_of_workstations_make_a_step(tmp_path, name):
    config = preset(name, "workstation")
    sizes = {"gan-sprites": (16, 32), "gan-celeba-64": (64, 16), "eigengan-animeface-64": (64, 16)}.get(name, (32, 16))
    assert (config.scale, config.data.size, config.schedule.batch_size) == ("workstation", *sizes)
    assert experiments.read_config(to_json(config)) == config
    data = replace(config.data, source="sprites", limit=8)
    schedule = replace(config.schedule, steps=1, batch_size=4)
    run = trained(tmp_path, replace(config, data=data, schedule=schedule, sample_every=0))
    assert run.metrics()[-1]["finished"]
    generator, discriminator = build(config.model, config.data.size)
    channels = 128 if config.model.name == "eigengan" else 8 * config.model.discriminator_width
    assert max(p.shape[0] for p in discriminator.parameters() if p.ndim == 4) <= channels
    assert sum(p.numel() for p in generator.parameters()) < 500_000


def test_settings_of_workstations_are_those_that_were_measured():
    faces, anime = preset("gan-celeba", "workstation"), preset("eigengan-animeface", "workstation")
    assert faces.schedule == GanSchedule(9500, 16, 1e-3, (0.0, 0.99), constant=0.5, ema=0.998)
    assert (faces.objective.penalty_weight, faces.objective.penalty_interval) == (0.02, 4)
    assert (faces.model.discriminator_width, faces.model.discriminator_norm) == (48, False)
    expected = GanSchedule(11_000, 16, 1e-3, (0.0, 0.99), constant=0.5, ema=0.997, end=0.05, importance_lr=0.03)
    assert anime.schedule == expected
    assert (anime.objective.penalty_weight, anime.objective.penalty_interval) == (0.05, 8)
    assert anime.method.stiefel_scale * anime.schedule.lr == pytest.approx(0.03)
    generator, discriminator = build(anime.model, 32)
    assert max(p.shape[1] for p in generator.parameters() if p.ndim == 4) == 64
    assert max(p.shape[1] for p in discriminator.parameters() if p.ndim == 4) == 128


@pytest.mark.parametrize("name", [name for name in PRESETS if "sprites" not in name])
def test_laptops_have_the_settings_of_workstations_for_minutes(name):
    laptop, workstation = preset(name), preset(name, "workstation")
    assert laptop == replace(workstation, scale="laptop", schedule=replace(workstation.schedule, steps=1500))


@pytest.mark.parametrize("name", ["gan-celeba", "eigengan-animeface"])
def test_presets_of_64_pixels_have_four_times_the_penalty(name):
    small, large = preset(name, "workstation"), preset(f"{name}-64", "workstation")
    assert (large.data.source, large.data.size, small.data.size) == (small.data.source, 64, 32)
    assert large.objective == replace(small.objective, penalty_weight=4 * small.objective.penalty_weight)
    assert large.data.resize == (None if small.data.resize is None else 68)
    assert large.schedule == replace(small.schedule, steps=large.schedule.steps)
    assert preset(f"{name}-64", "paper").data.size == 64


@pytest.mark.parametrize("scale", ["laptop", "workstation"])
@pytest.mark.parametrize("name", ["eigengan-animeface", "eigengan-sprites"])
def test_importances_of_eigengan_have_a_rate_with_which_they_move(name, scale):
    config = preset(name, scale)
    assert (config.model.form, config.schedule.importance_lr) == ("working", 0.03)


def test_settings_of_earlier_runs_are_read_with_what_they_meant():
    schedule = {"steps": 1000, "batch_size": 32, "lr": 1e-3, "betas": [0.0, 0.99], "constant": 1.0, "ema": 0.99}
    found = experiments.read_config({"kind": "generation", "schedule": schedule})
    assert found.schedule == preset("gan-sprites").schedule
    assert (found.schedule.end, found.schedule.importance_lr, found.schedule.discriminator_lr) == (0.0, None, None)


def test_sizes_of_the_networks_that_were_measured_to_work():
    generator, discriminator = build(preset("gan-celeba").model, 32)
    assert sum(p.numel() for p in generator.parameters()) == pytest.approx(311_000, rel=0.01)
    assert sum(p.numel() for p in discriminator.parameters()) == pytest.approx(374_000, rel=0.01)


def test_kinds_of_experiments(tmp_path):
    assert isinstance(experiments.read_config({"kind": "generation"}), Generation)
    assert experiments.read_config({}).kind == "classification"
    with pytest.raises(ValueError, match=r"no experiment of the kind 'gan'\. There are: classification, generation"):
        experiments.read_config({"kind": "gan"})
    with pytest.raises(ValueError, match=r"no preset 'gan-sprite'\. Did you mean 'gan-sprites'"):
        experiments.preset("gan-sprite")
    with pytest.raises(ValueError, match="has the scales 'paper', 'workstation', 'laptop'; got 'large'"):
        preset("gan-sprites", "large")
    config = short(tiny())
    assert experiments.train(config, run_of(tmp_path, config), evaluate=False) == 0


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: GanData(shape="disc", source="celeba-10k"), "data.shape is a setting of sprites; celeba-10k has none"),
        (lambda: GanData(resize=8), "data.resize needs at least data.size, 16; got 8"),
        (
            lambda: Generation(schedule=GanSchedule(importance_lr=0.03)),
            "schedule.importance_lr is a rate of EigenGAN's subspaces; simple has none",
        ),
        (lambda: GanModel("simpel"), "no GAN 'simpel'. Did you mean 'simple'"),
        (lambda: GanMethod("noog"), "no method 'noog'. Did you mean 'nog'"),
        (lambda: GanMethod("nog@some"), r"'nog@some' has no such layers.*nog@all, nog@inner, olr@all"),
        (lambda: GanMethod("nog@all+olr"), "are treated in the same layers"),
    ],
)
def test_settings_that_do_not_fit(make, error):
    with pytest.raises(ValueError, match=error):
        make()
