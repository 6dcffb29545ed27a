"""DenseNet-121 and MobileNet-v2: sizes of the published networks, stems, the open norm."""

import pytest
import torch
from torch import nn

from orthocond.lab.classification.networks.densenet import DenseNet121
from orthocond.lab.classification.networks.mobilenet import MobileNetV2
from orthocond.layers import DecorrelatedBatchNorm2d

BOTH = pytest.mark.parametrize("network", [DenseNet121, MobileNetV2])


@pytest.mark.parametrize(("network", "count"), [(DenseNet121, 7_978_856), (MobileNetV2, 3_504_872)])
def test_number_of_parameters_is_that_of_the_published_network(network, count):
    assert sum(p.numel() for p in network().parameters()) == count


@pytest.mark.parametrize(
    ("network", "names"),
    [
        (DenseNet121, ["features.denseblock4.denselayer16.conv2.weight", "features.transition3.norm.bias"]),
        (MobileNetV2, ["features.0.0.weight", "features.17.conv.1.0.weight", "features.18.1.running_var"]),
    ],
)
def test_names_are_those_of_torchvision(network, names):
    assert set(names) <= set(network().state_dict())


@BOTH
@pytest.mark.parametrize(("stem", "stride"), [("cifar", 1), ("imagenet", 2)])
def test_stem(network, stem, stride):
    model = network(10, stem=stem)
    first = next(m for m in model.modules() if isinstance(m, nn.Conv2d))
    assert first.stride == (stride, stride)


@BOTH
def test_decorrelated_stem_trains(network):
    torch.manual_seed(0)
    model = network(5, stem="cifar", stem_norm=DecorrelatedBatchNorm2d)
    assert sum(isinstance(m, DecorrelatedBatchNorm2d) for m in model.modules()) == 1
    for dropout in (m for m in model.modules() if isinstance(m, nn.Dropout)):
        dropout.p = 0.0  # its noise is larger than what a few steps learn
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    images, labels = torch.randn(8, 3, 16, 16), torch.arange(8) % 5
    losses = []
    for _ in range(6):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


@BOTH
def test_bad_settings(network):
    with pytest.raises(ValueError, match="stem"):
        network(stem="mnist")
    with pytest.raises(ValueError, match="num_classes"):
        network(0)
