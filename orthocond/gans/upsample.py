"""Upsampling and a convolution in one step."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class UpsampleConv2d(nn.Conv2d):
    """Double the size of an image by nearest neighbors, then take a 3x3 convolution with zero padding.

    The upsampled image has four equal pixels for each pixel of the input, so the nine weights of an output pixel meet
    only four different values. One transposed 4x4 convolution of stride 2, whose weights are sums of these nine, gives
    the same output with 4/9 of the products and without the upsampled image. It takes half the time on one core of a
    CPU, in full precision. On other devices and in half precision, for which this was not measured, the two steps are
    taken one after the other.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        bias: Whether to add an offset to each channel.

    Attributes:
        weight: ``(out_channels, in_channels, 3, 3)``, as that of the convolution of the upsampled image.

    Example:
        >>> from torch.nn.functional import conv2d, interpolate
        >>> from orthocond.gans.upsample import UpsampleConv2d
        >>> layer, x = UpsampleConv2d(3, 5, bias=False), torch.randn(2, 3, 8, 8)
        >>> torch.allclose(layer(x), conv2d(interpolate(x, scale_factor=2), layer.weight, padding=1), atol=1e-5)
        True
    """

    sums: Tensor

    def __init__(self, in_channels: int, out_channels: int, *, bias: bool = True) -> None:
        super().__init__(in_channels, out_channels, 3, padding=1, bias=bias)
        # Which of three weights in a row meet one input pixel, for four outputs around it; then in two dimensions.
        line = torch.tensor([[0.0, 0.0, 1.0], [0.0, 1.0, 1.0], [1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
        self.register_buffer("sums", torch.einsum("ai,bj->ijab", line, line).reshape(9, 16), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``(N, in, r, r)`` to ``(N, out, 2r, 2r)``."""
        if x.device.type != "cpu" or torch.is_autocast_enabled("cpu") or self.weight.dtype.itemsize < 4:
            return super().forward(F.interpolate(x, scale_factor=2))
        weight = (self.weight.flatten(2) @ self.sums).unflatten(2, (4, 4))
        return F.conv_transpose2d(x, weight.transpose(0, 1), self.bias, stride=2, padding=1)
