"""Residual networks for small and large images, with the places of the SVD layers open (paper: section 6.1)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from orthocond._checks import check_choice, check_count
from orthocond.layers import CovariancePool2d

_STEMS = ("imagenet", "cifar")


class ResNet(nn.Module):
    """A residual network whose stem norm and pooling can be SVD layers.

    Names and shapes of the parameters are torchvision's, whose checkpoints load into the plain versions.

    Args:
        bottleneck: Whether blocks are 1x1, 3x3, 1x1 convolutions with 4 times the width at the end, else two 3x3.
        depths: Number of blocks in each stage.
        num_classes: Number of outputs.
        stem: ``"imagenet"``: 7x7 convolution of stride 2 and max-pooling. ``"cifar"``: 3x3 convolution of stride 1.
        stem_norm: Makes the norm layer after the first convolution from its number of channels, for example
            ``DecorrelatedBatchNorm2d``; all others are ``nn.BatchNorm2d``.
        pool: Covariance pooling in place of average pooling, after a 1x1 convolution to ``reduction`` channels with
            batch normalization and ReLU.
        reduction: Number of channels whose covariance is pooled.
        last_stride: Stride of the last stage: 2, or 1 for four times as many positions to pool.
        width: Width of the first stage; each stage has twice that of the one before. The stem has 64 channels whatever
            the width is.

    Raises:
        ValueError: If a setting is not valid.
    """

    def __init__(
        self,
        bottleneck: bool,
        depths: tuple[int, ...],
        num_classes: int = 1000,
        *,
        stem: str = "imagenet",
        stem_norm: Callable[[int], nn.Module] = nn.BatchNorm2d,
        pool: CovariancePool2d | None = None,
        reduction: int = 256,
        last_stride: int = 2,
        width: int = 64,
    ) -> None:
        super().__init__()
        check_choice(stem, "ResNet(stem=...)", _STEMS)
        check_count(width, "ResNet(width=...)", 1)
        if not depths:
            raise ValueError("ResNet(depths=...) needs at least one stage; got none.")
        check_count(num_classes, "ResNet(num_classes=...)", 1)
        check_count(reduction, "ResNet(reduction=...)", 1)
        if last_stride not in (1, 2):
            raise ValueError(f"ResNet(last_stride=...) needs 1 or 2; got {last_stride!r}.")
        large = stem == "imagenet"
        self.conv1 = _convolution(3, 64, 7 if large else 3, 2 if large else 1)
        self.bn1 = stem_norm(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1) if large else nn.Identity()
        channels = 64
        self._stages = [f"layer{stage + 1}" for stage in range(len(depths))]
        for stage, depth in enumerate(depths):
            check_count(depth, "ResNet(depths=...)", 1)
            stride = 1 if stage == 0 else last_stride if stage == len(depths) - 1 else 2
            blocks = [_Block(channels, width * 2**stage, stride, bottleneck)]
            channels = blocks[0].out_channels
            blocks += [_Block(channels, width * 2**stage, 1, bottleneck) for _ in range(depth - 1)]
            self.add_module(self._stages[stage], nn.Sequential(*blocks))
        if pool is None:
            self.reduce: nn.Module = nn.Identity()
            self.avgpool: nn.Module = nn.AdaptiveAvgPool2d(1)
            features = channels
        else:
            self.reduce = nn.Sequential(
                _convolution(channels, reduction, 1), nn.BatchNorm2d(reduction), nn.ReLU(inplace=True)
            )
            self.avgpool = pool
            features = reduction * (reduction + 1) // 2 if pool.output == "triu" else reduction**2
        self.fc = nn.Linear(features, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for stage in self._stages:
            x = self.get_submodule(stage)(x)
        return self.fc(torch.flatten(self.avgpool(self.reduce(x)), 1))


class _Block(nn.Module):
    def __init__(self, in_channels: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        self.out_channels = 4 * width if bottleneck else width
        self.bottleneck = bottleneck
        # The stride is in the 3x3 convolution of a bottleneck, as in torchvision.
        self.conv1 = _convolution(in_channels, width, *((1, 1) if bottleneck else (3, stride)))
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _convolution(width, width, 3, stride if bottleneck else 1)
        self.bn2 = nn.BatchNorm2d(width)
        if bottleneck:
            self.conv3 = _convolution(width, self.out_channels, 1)
            self.bn3 = nn.BatchNorm2d(self.out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or in_channels != self.out_channels:
            self.downsample = nn.Sequential(
                _convolution(in_channels, self.out_channels, 1, stride), nn.BatchNorm2d(self.out_channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        if self.bottleneck:
            y = self.bn3(self.conv3(self.relu(y)))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


def _convolution(in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, kernel, stride, kernel // 2, bias=False)


def resnet18(num_classes: int = 1000, depths: tuple[int, ...] = (2, 2, 2, 2), **settings: Any) -> ResNet:
    """ResNet-18; the settings are those of `ResNet`.

    Example:
        >>> from orthocond.layers import DecorrelatedBatchNorm2d
        >>> model = resnet18(10, stem="cifar", stem_norm=DecorrelatedBatchNorm2d)
        >>> model(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    return ResNet(False, depths, num_classes, **settings)


def resnet50(num_classes: int = 1000, depths: tuple[int, ...] = (3, 4, 6, 3), **settings: Any) -> ResNet:
    """ResNet-50; the settings are those of `ResNet`.

    Example:
        >>> model = resnet50(10, pool=CovariancePool2d(), last_stride=1)
        >>> model(torch.randn(2, 3, 64, 64)).shape
        torch.Size([2, 10])
    """
    return ResNet(True, depths, num_classes, **settings)
