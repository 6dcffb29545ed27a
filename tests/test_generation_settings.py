"""Settings of GANs: steps of SGD, configurations that were written before a setting was there, larger images."""

from dataclasses import replace

import pytest
import torch
from gan_helpers import short, tiny, trained
from torch import nn

from orthocond.lab.config import change, from_json, to_json
from orthocond.lab.experiments import preset
from orthocond.lab.generation import task as generation
from orthocond.lab.generation.config import Generation
from orthocond.lab.generation.networks import build, call, sample


def test_sgd_commutes_with_rotations_of_the_latents_and_adam_does_not(tmp_path):
    """One step of SGD on a rotated weight is the rotated step; the entries that Adam scales are those of the axes."""
    turn = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))[0]
    gradient = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    off = {}
    for name in ("sgd", "adam"):
        schedule = replace(tiny().schedule, optimizer=name)
        steps = []
        for rows in (torch.eye(4), turn):
            weight = nn.Parameter(torch.zeros(4, 8))
            weight.grad = rows @ gradient
            generation._optimizer([{"params": [weight]}], schedule).step()
            steps.append(weight.detach())
        off[name] = float((steps[1] - turn @ steps[0]).norm() / steps[0].norm())
    assert off["sgd"] < 1e-6
    assert off["adam"] > 0.1
    config = short(tiny())
    run = trained(tmp_path, replace(config, schedule=replace(config.schedule, optimizer="sgd")))
    assert run.metrics()[-1]["finished"]


def test_an_older_configuration_is_one_of_adam():
    values = to_json(tiny())
    del values["schedule"]["optimizer"]
    assert from_json(Generation, values) == tiny()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gan-celeba", {"data.resize": 68, "model.channels": (192, 96, 48, 24, 16), "model.discriminator_width": 32}),
        ("eigengan-animeface", {"model.discriminator_width": 12}),
    ],
)
def test_faces_of_64_pixels(name, settings):
    config = change(preset(name, "workstation"), settings | {"data.size": 64})
    networks = build(config.model, config.data.size)
    z, noise = sample(networks.generator, 2, torch.Generator().manual_seed(0))
    images = call(networks.generator, z, noise)
    assert images.shape == (2, 3, 64, 64)
    assert networks.discriminator(images).numel() == 2
