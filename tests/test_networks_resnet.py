import pytest
import torch
from torch import nn

from orthocond.lab.classification.networks.resnet import resnet18, resnet50
from orthocond.layers import CovariancePool2d, DecorrelatedBatchNorm2d


def parameters(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("make", "count"), [(resnet18, 11_689_512), (resnet50, 25_557_032)])
def test_plain_versions_have_the_parameters_of_torchvision(make, count):
    with torch.device("meta"):
        assert parameters(make()) == count


def test_names_are_those_of_torchvision():
    with torch.device("meta"):
        names = set(resnet50().state_dict())
    assert {"conv1.weight", "bn1.running_var", "layer1.0.downsample.1.bias", "layer4.2.conv3.weight"} <= names
    assert {"fc.weight", "fc.bias"} <= names
    assert {name.partition(".")[0] for name in names} == {"conv1", "bn1", "fc", *(f"layer{i}" for i in range(1, 5))}


@pytest.mark.parametrize(
    ("stem", "last_stride", "size", "positions"),
    [("imagenet", 2, 224, 7), ("imagenet", 1, 224, 14), ("cifar", 2, 32, 4), ("cifar", 1, 32, 8)],
)
@pytest.mark.parametrize("make", [resnet18, resnet50])
def test_feature_maps_have_the_size_of_the_paper(make, stem, last_stride, size, positions):
    with torch.device("meta"):
        model = make(10, stem=stem, last_stride=last_stride).eval()
        seen = []
        model.layer4.register_forward_hook(lambda module, args, output: seen.append(output.shape[2:]))
        assert model(torch.empty(1, 3, size, size)).shape == (1, 10)
    assert seen == [(positions, positions)]


@pytest.mark.parametrize(("output", "features"), [("triu", 16 * 17 // 2), ("matrix", 16 * 16)])
def test_covariance_pooling_replaces_the_average(output, features):
    model = resnet18(10, stem="cifar", pool=CovariancePool2d(output=output), reduction=16, last_stride=1)
    assert model.fc.in_features == features
    x = torch.randn(2, 3, 16, 16)
    loss = model(x).square().sum()
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_stem_norm_is_the_only_one_replaced():
    model = resnet18(10, stem="cifar", stem_norm=DecorrelatedBatchNorm2d)
    norms = [m for m in model.modules() if isinstance(m, (nn.BatchNorm2d, DecorrelatedBatchNorm2d))]
    assert [type(m) for m in norms].count(DecorrelatedBatchNorm2d) == 1
    assert isinstance(model.bn1, DecorrelatedBatchNorm2d)
    assert len(norms) == 20


def test_settings_that_cannot_be():
    with pytest.raises(ValueError, match="stem"):
        resnet18(stem="mnist")
    with pytest.raises(ValueError, match="needs 1 or 2; got 3"):
        resnet18(last_stride=3)
    with pytest.raises(ValueError, match="num_classes"):
        resnet50(0)
