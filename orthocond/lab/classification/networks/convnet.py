"""A small plain network that learns CIFAR-10 within minutes on one core."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from orthocond._checks import check_count


class ConvNet(nn.Module):
    """A stem of stride 2 and stages of convolution, max-pooling, batch normalization and ReLU.

    Half of the stem's outputs are computed compared with a stride of 1, so that the SVD layer behind it, and all
    that follows, costs a quarter. Nothing is lost by that: a 3x3 patch of 3 colors has 27 numbers, four pixels have 12.

    Args:
        num_classes: Number of classes.
        stem_channels: Channels of the first convolution, those that the SVD layer whitens.
        stem_norm: Called with the number of channels, gives the normalization after the first convolution.
        width: Channels of the first stage; each stage has twice as many as the one before it.
        depths: Convolutions of each stage, of which the first is followed by max-pooling.

    Raises:
        ValueError: If a size is not positive.

    Example:
        >>> ConvNet(10)(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        num_classes: int,
        *,
        stem_channels: int = 64,
        stem_norm: Callable[[int], nn.Module] = nn.BatchNorm2d,
        width: int = 48,
        depths: Sequence[int] = (1, 2, 2),
    ) -> None:
        super().__init__()
        for name, value in (("num_classes", num_classes), ("stem_channels", stem_channels), ("width", width)):
            check_count(value, f"ConvNet({name}=...)", 1)
        self.conv1 = nn.Conv2d(3, stem_channels, 3, 2, 1, bias=False)
        self.bn1 = stem_norm(stem_channels)
        stages: list[nn.Module] = []
        channels = stem_channels
        for stage, depth in enumerate(depths):
            check_count(depth, "ConvNet(depths=...)", 1)
            for index in range(depth):
                out = width * 2**stage
                stages.append(nn.Conv2d(channels, out, 3, padding=1, bias=False))
                if index == 0:
                    stages.append(nn.MaxPool2d(2))
                stages += [nn.BatchNorm2d(out), nn.ReLU(inplace=True)]
                channels = out
        self.stages = nn.Sequential(*stages)
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.stages(torch.relu_(self.bn1(self.conv1(x)))).amax((2, 3)))
