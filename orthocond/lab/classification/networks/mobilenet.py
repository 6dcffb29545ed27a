"""MobileNet-v2 with the place of the stem's norm open (paper: section 6.1, decorrelated BN on CIFAR-100)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from orthocond._checks import check_choice, check_count

# Expansion of the width, channels, number of blocks, stride of the first.
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def _unit(
    in_channels: int,
    out_channels: int,
    kernel: int,
    stride: int = 1,
    groups: int = 1,
    norm: Callable[[int], nn.Module] = nn.BatchNorm2d,
) -> nn.Sequential:
    convolution = nn.Conv2d(in_channels, out_channels, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, norm(out_channels), nn.ReLU6(inplace=True))


class _InvertedResidual(nn.Module):
    """1x1 to a wider space, 3x3 on each channel, 1x1 back; added to its input where shapes allow."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, expansion: int) -> None:
        super().__init__()
        width = expansion * in_channels
        layers: list[nn.Module] = [] if expansion == 1 else [_unit(in_channels, width, 1)]
        layers += [
            _unit(width, width, 3, stride, groups=width),
            nn.Conv2d(width, out_channels, 1, bias=False),
            nn.BatchNorm2d(out_channels),
        ]
        self.conv = nn.Sequential(*layers)
        self.residual = stride == 1 and in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.residual else self.conv(x)


class MobileNetV2(nn.Module):
    """MobileNet-v2; names and shapes of the parameters are torchvision's.

    Args:
        num_classes: Number of outputs.
        stem: ``"imagenet"``: the first convolution has stride 2. ``"cifar"``: it has stride 1.
        stem_norm: Makes the norm layer after the first convolution from its number of channels.
        stages: Expansion of the width, channels, number of blocks and stride of the first, for each stage.
        features: Number of channels before the classifier.

    Example:
        >>> sum(p.numel() for p in MobileNetV2().parameters())
        3504872

    Raises:
        ValueError: If a setting is not valid.
    """

    def __init__(
        self,
        num_classes: int = 1000,
        *,
        stem: str = "imagenet",
        stem_norm: Callable[[int], nn.Module] = nn.BatchNorm2d,
        stages: tuple[tuple[int, int, int, int], ...] = STAGES,
        features: int = 1280,
    ) -> None:
        super().__init__()
        check_choice(stem, "MobileNetV2(stem=...)", ("imagenet", "cifar"))
        check_count(num_classes, "MobileNetV2(num_classes=...)", 1)
        layers: list[nn.Module] = [_unit(3, 32, 3, 2 if stem == "imagenet" else 1, norm=stem_norm)]
        channels = 32
        for expansion, width, depth, stride in stages:
            for i in range(depth):
                layers.append(_InvertedResidual(channels, width, stride if i == 0 else 1, expansion))
                channels = width
        layers.append(_unit(channels, features, 1))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(features, num_classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0.0, 0.01)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.mean(self.features(x), (2, 3)))
