"""The small plain network, and the schedules and controls of the scale between laptop and paper."""

import math
from dataclasses import replace

import pytest
import torch
from lab_helpers import TINY, tiny, train
from torch import nn

from orthocond import DecorrelatedBatchNorm2d, matrix_view
from orthocond.lab.classification.config import Method, Model, Schedule
from orthocond.lab.classification.data import load_data, pipeline
from orthocond.lab.classification.networks.build import build
from orthocond.lab.classification.networks.convnet import ConvNet
from orthocond.lab.classification.networks.prepare import prepare
from orthocond.lab.classification.task import ClassificationTask
from orthocond.lab.devices import make_accelerator
from orthocond.lab.experiments import preset
from orthocond.lab.runs import Run

SMALL = Model("convnet", depths=(1, 1), width=4, momentum=0.3)


def training(tmp_path, config):
    run = Run.create(tmp_path, "run", config)
    pair = load_data(config.data)
    return ClassificationTask(config, pair, make_accelerator("no", run))


# Values


def test_every_layer_is_as_wide_as_said():
    net = ConvNet(7, stem_channels=5, width=3, depths=(1, 2))
    shapes = [tuple(m.weight.shape[:2]) for m in net.modules() if isinstance(m, nn.Conv2d)]
    assert shapes == [(5, 3), (3, 5), (6, 3), (6, 6)]
    assert net(torch.randn(2, 3, 32, 32)).shape == (2, 7)


@pytest.mark.parametrize("fall", ["linear", "cosine"])
def test_rate_rises_and_falls_to_zero(tmp_path, fall):
    schedule = Schedule(epochs=2, batch_size=40, lr=0.5, fall=fall, warmup=0.25, nesterov=True)
    loop = training(tmp_path, tiny("svd", schedule=schedule, model=SMALL))
    assert loop.steps == 8
    rates = [loop.learning_rate(step) for step in range(1, 9)]
    assert rates[:3] == pytest.approx([0.1, 0.3, 0.5])  # a fifth, halfway up, all of it
    left = [1 - i / 6 for i in range(6)]
    expected = left if fall == "linear" else [0.5 - 0.5 * math.cos(math.pi * x) for x in left]
    assert rates[2:] == pytest.approx([0.5 * x for x in expected])


def test_stem_has_a_rate_of_its_own(tmp_path):
    loop = training(tmp_path, replace(tiny("svd", model=SMALL), method=Method("svd", stem_lr=0.1)))
    stem = loop.network.module.conv1.weight
    (group,) = [g for g in loop.optimizers[0].param_groups if any(p is stem for p in g["params"])]
    assert len(group["params"]) == 1
    assert group["factor"] == 0.1
    assert sum(len(g["params"]) for g in loop.optimizers[0].param_groups) == len(list(loop.network.module.parameters()))


def test_a_smaller_rate_moves_the_stem_less(tmp_path):
    moved = []
    for factor in (1.0, 0.1):
        config = tiny("svd", model=SMALL, schedule=Schedule(epochs=1, batch_size=32, milestones=(), steps=1))
        config = replace(config, method=Method("svd", stem_lr=factor))
        before = prepare(config, load_data(config.data)).module.conv1.weight.detach().clone()
        run = Run.create(tmp_path, f"run{factor}", config)
        train(config, run)
        moved.append(run.resume().state["model"]["conv1.weight"] - before)
    torch.testing.assert_close(moved[1], 0.1 * moved[0], rtol=1e-4, atol=1e-7)


def test_label_smoothing_raises_the_least_loss(tmp_path):
    losses = []
    for smoothing in (0.0, 0.9):
        config = tiny(
            "bn", model=SMALL, schedule=replace(TINY.schedule, steps=1, label_smoothing=smoothing), log_every=1
        )
        run = Run.create(tmp_path, f"run{smoothing}", config)
        train(config, run)
        losses.append(run.metrics()[0]["loss"])
    assert losses[0] != losses[1]


def test_validation_images_are_kept_out_of_training():
    data = replace(TINY.data, validation=40)
    train_images, held_out = load_data(data)
    assert (len(train_images), len(held_out)) == (120, 40)
    kept = {bytes(image.numpy()) for image in held_out.images}
    assert not kept & {bytes(image.numpy()) for image in train_images.images}
    assert load_data(data).held_out.labels.tolist() == held_out.labels.tolist()


def test_momentum_reaches_every_normalization():
    module = build(SMALL, Method("svd"), 10, torch.randn(4, 3, 16, 16)).module
    momenta = [m.momentum for m in module.modules() if isinstance(m, (nn.BatchNorm2d, DecorrelatedBatchNorm2d))]
    assert momenta == [0.3] * 3


def test_all_normalizations_whiten_in_groups():
    model = replace(SMALL, width=6, whiten_all=4)
    module = build(model, Method("svd"), 10, torch.randn(4, 3, 16, 16)).module
    sizes = {m.num_features // m.groups for m in module.modules() if isinstance(m, DecorrelatedBatchNorm2d)}
    assert sizes == {64, 3, 4}  # the stem as a whole; 6 channels in groups of 3, 12 in groups of 4
    assert not any(isinstance(m, nn.BatchNorm2d) for m in module.modules())


def test_plain_batch_normalization_can_start_from_whitened_patches():
    config = tiny("bn+wi", model=SMALL)
    module = prepare(config, load_data(config.data)).module
    plain = prepare(tiny("bn", model=SMALL), load_data(config.data)).module
    assert isinstance(module.bn1, nn.BatchNorm2d)
    images = torch.cat([b.images for b in pipeline(config, load_data(config.data).train, train=True).batches()])
    spread = []
    for network in (module, plain):
        values = torch.linalg.svdvals(torch.cov(network.conv1(images).detach().movedim(1, 0).flatten(1)))[:10]
        spread.append((values[0] / values[-1]).item())
    assert spread[0] < 0.1 * spread[1]
    assert matrix_view(module.conv1.weight).shape == (64, 27)


def test_the_scale_between_has_the_full_images():
    config = preset("dbn-cifar10-resnet50", "workstation")
    assert (config.data.size, config.data.in_memory, config.model.name) == (32, None, "convnet")
    for name in ("densenet121", "mobilenetv2"):
        config = preset(f"dbn-cifar100-{name}", "workstation")
        assert (config.data.size, config.data.in_memory, config.model.name) == (32, None, name)
        assert (config.schedule.fall, config.schedule.warmup) == ("linear", 0.25)


# Errors


def test_sizes_that_are_none():
    with pytest.raises(ValueError, match=r"ConvNet\(depths=...\) needs an integer of at least 1; got 0"):
        ConvNet(10, depths=(1, 0))
    with pytest.raises(ValueError, match=r"ConvNet\(width=...\) needs an integer of at least 1; got 0"):
        ConvNet(10, width=0)


def test_whitening_is_the_only_treatment_of_plain_batch_normalization():
    with pytest.raises(ValueError, match="bn takes no treatment but wi"):
        build(SMALL, Method("bn+ow"), 10, torch.randn(4, 3, 16, 16))
