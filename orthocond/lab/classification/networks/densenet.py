"""DenseNet-121 with the place of the stem's norm open (paper: section 6.1, decorrelated BN on CIFAR-100)."""

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor, nn

from orthocond._checks import check_choice, check_count

_DEPTHS = (6, 12, 24, 16)


class _Layer(nn.Module):
    """BN, ReLU, 1x1, BN, ReLU, 3x3; its output is appended to its input."""

    def __init__(self, in_channels: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(self.relu(self.norm1(x)))
        return torch.cat([x, self.conv2(self.relu(self.norm2(y)))], 1)


def _transition(channels: int) -> nn.Sequential:
    parts = OrderedDict[str, nn.Module](
        norm=nn.BatchNorm2d(channels),
        relu=nn.ReLU(inplace=True),
        conv=nn.Conv2d(channels, channels // 2, 1, bias=False),
        pool=nn.AvgPool2d(2, 2),
    )
    return nn.Sequential(parts)


class DenseNet121(nn.Module):
    """DenseNet-121; names and shapes of the parameters are torchvision's.

    Args:
        num_classes: Number of outputs.
        stem: ``"imagenet"``: 7x7 convolution of stride 2 and max-pooling. ``"cifar"``: 3x3 convolution of stride 1.
        stem_norm: Makes the norm layer after the first convolution from its number of channels.
        depths: Number of layers in each dense block.
        growth: Number of channels that each layer adds. The stem has 64 channels whatever the growth is.

    Raises:
        ValueError: If a setting is not valid.

    Example:
        >>> DenseNet121(100, stem="cifar")(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 100])
    """

    def __init__(
        self,
        num_classes: int = 1000,
        *,
        stem: str = "imagenet",
        stem_norm: Callable[[int], nn.Module] = nn.BatchNorm2d,
        depths: tuple[int, ...] = _DEPTHS,
        growth: int = 32,
    ) -> None:
        super().__init__()
        check_count(growth, "DenseNet121(growth=...)", 1)
        check_choice(stem, "DenseNet121(stem=...)", ("imagenet", "cifar"))
        check_count(num_classes, "DenseNet121(num_classes=...)", 1)
        parts = OrderedDict[str, nn.Module]()
        channels = 64
        if stem == "imagenet":
            parts["conv0"] = nn.Conv2d(3, channels, 7, 2, 3, bias=False)
        else:
            parts["conv0"] = nn.Conv2d(3, channels, 3, 1, 1, bias=False)
        parts["norm0"] = stem_norm(channels)
        parts["relu0"] = nn.ReLU(inplace=True)
        parts["pool0"] = nn.MaxPool2d(3, 2, 1) if stem == "imagenet" else nn.Identity()
        for stage, depth in enumerate(depths, 1):
            block = OrderedDict[str, nn.Module]()
            for i in range(1, depth + 1):
                block[f"denselayer{i}"] = _Layer(channels, growth)
                channels += growth
            parts[f"denseblock{stage}"] = nn.Sequential(block)
            if stage < len(depths):
                parts[f"transition{stage}"] = _transition(channels)
                channels //= 2
        parts["norm5"] = nn.BatchNorm2d(channels)
        self.features = nn.Sequential(parts)
        self.classifier = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x).relu()
        return self.classifier(x.mean((2, 3)))
