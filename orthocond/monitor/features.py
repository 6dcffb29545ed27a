"""The covariance of a layer's output channels."""

import torch
from torch import Tensor, nn

from orthocond.layers.base import flatten
from orthocond.layers.statistics import moments


def covariance_of(module: nn.Module, output: object) -> Tensor:
    """Covariance ``(1, C, C)`` of the output channels over batch and positions, in float64.

    Channels are the last dimension of the output of a linear layer and of two-dimensional output, the second one of
    everything else, as in convolutions.
    """
    if not isinstance(output, Tensor) or output.ndim < 1:
        raise TypeError(
            f"Only layers that return one tensor can be watched; {type(module).__name__} returned "
            f"{type(output).__name__}."
        )
    x = output.detach()
    if isinstance(module, nn.Linear) or x.ndim <= 2:
        flat = x.reshape(-1, x.shape[-1], 1)
    else:
        flat, _ = flatten(x if not _without_batch(module, x) else x.unsqueeze(0))
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    return moments(flat)[1].covariance


def feature_tolerance(dtype: torch.dtype) -> float:
    """Fraction of the largest variance below which variances are rounding of features of this dtype."""
    return max(1e-12, torch.finfo(dtype).eps ** 2)


def _without_batch(module: nn.Module, x: Tensor) -> bool:
    """Whether a convolution got one sample without a batch dimension."""
    kernel = getattr(module, "kernel_size", None)
    return isinstance(kernel, tuple) and x.ndim == len(kernel) + 1
