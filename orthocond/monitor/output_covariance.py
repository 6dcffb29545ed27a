"""The covariance of a layer's output channels."""

import torch
from torch import Tensor, nn

from orthocond.layers.base import flatten
from orthocond.layers.statistics import moments


def covariance_of(module: nn.Module, output: object) -> Tensor:
    """Covariance ``(1, C, C)`` of the output channels over batch and positions, in float64 and detached.

    Raises:
        TypeError: If the output is not one tensor.
    """
    if not isinstance(output, Tensor) or output.ndim < 1:
        raise TypeError(
            f"Only layers that return one tensor can be watched; {type(module).__name__} returned "
            f"{type(output).__name__}."
        )
    x = output.detach()
    x = x.to(torch.promote_types(x.dtype, torch.float32)).movedim(_channel_dim(module, x), -1)
    if x.is_contiguous():
        flat = x.reshape(-1, x.shape[-1], 1)
    else:
        flat, _ = flatten(x.reshape(1, *x.shape).movedim(-1, 1) if x.ndim == 2 else x.movedim(-1, 1))
    return moments(flat)[1].covariance


def channels_of(module: nn.Module, output: Tensor) -> int:
    """Number of channels of the output: the size of its covariance."""
    return output.shape[_channel_dim(module, output)]


def _channel_dim(module: nn.Module, x: Tensor) -> int:
    """The last dimension for linear layers and matrices, the second one otherwise, the first one without a batch."""
    if isinstance(module, nn.Linear) or x.ndim <= 2:
        return -1
    kernel = getattr(module, "kernel_size", None)
    return -x.ndim if isinstance(kernel, tuple) and x.ndim == len(kernel) + 1 else 1


def feature_tolerance(dtype: torch.dtype) -> float:
    """Fraction of the largest variance below which variances are rounding of features of this dtype."""
    return max(1e-12, torch.finfo(dtype).eps ** 2)
