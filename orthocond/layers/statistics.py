"""Mean and covariance of features in one pass, in float64, over one or several processes (paper: appendix A)."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.forward_ad import unpack_dual

from orthocond._checks import can_read_freely, in_transform
from orthocond._distributed import sum_across
from orthocond.layers.base import add_affine_, affine

# Entries that are converted to float64 and multiplied at a time: half a megabyte, which stays in a core's cache.
_CHUNK = 2**16
# Samples of one product in float32: a longer sum loses digits, a shorter one time. With at least so many samples,
# the errors of the products average out to 1e-8 of the largest second moment and less.
_BLOCK, _LONGEST_BLOCK, _LEAST_SAMPLES = 256, 1024, 2**13
# Float32 is enough where the smallest eigenvalue is above this fraction of the largest second moment:
# the covariance after whitening is then off by 3e-6 at most, no more than rounding the whitening matrix gives.
_RESOLVED = 2.0**-10
# Samples for each channel that tell beforehand whether float32 will be enough.
_PROBE = 4


class Moments(NamedTuple):
    """Mean ``(C,)`` and biased covariance ``(groups, C / groups, C / groups)`` in float64, and how many samples."""

    mean: Tensor
    covariance: Tensor
    samples: int | Tensor


def moments(x: Tensor, groups: int = 1, group: Any = None, *, synchronize: bool = False) -> tuple[Tensor, Moments]:
    r"""Mean :math:`\mu` and covariance :math:`E[(x - \mu)(x - \mu)^T]` of each group of channels.

    They are accumulated in float64 from one pass over the features, and keep no copy of them for the gradient, which
    can be differentiated again. On a CPU the products of float32 features are in float32 where the covariance is so
    well conditioned that whitening does not show it.

    Args:
        x: Features ``(batch, C, positions)``.
        groups: Number of equal groups of channels.
        group: Process group; None is the default group.
        synchronize: Whether the samples of all processes of the group count.

    Returns:
        The features, to be used from here on, and their moments. The gradient of both then meets in one place, where
        it needs one tensor of the size of the features instead of three.
    """
    count = x.shape[0] * x.shape[2]
    size = x.shape[1] // groups
    if _needs_composed(x):
        mean, covariance = _composed(x, groups)
    elif count or not synchronize:
        x, mean, covariance = _Moments.apply(x, groups)
    else:  # a process without samples still takes part in the sum, and in its gradient
        mean = x.sum((0, 2), dtype=torch.float64)
        covariance = mean.new_zeros(groups, size, size)
    if not synchronize:
        return x, Moments(mean, covariance, count)
    # In float64 the raw second moment loses nothing that float32 features have, so that one message is enough.
    raw = covariance + _outer(mean, groups)
    total = sum_across(torch.cat([mean.new_ones(1), mean, raw.flatten()]) * count, group)
    samples, mean, raw = total[0].detach(), total[1 : 1 + len(mean)], total[1 + len(mean) :]
    mean = mean / samples
    return x, Moments(mean, raw.reshape(groups, size, size) / samples - _outer(mean, groups), samples)


def _needs_composed(x: Tensor) -> bool:
    """Whether a transform of torch.func or forward-mode differentiation is on, which need operations of torch."""
    return not torch.compiler.is_compiling() and (in_transform() or unpack_dual(x).tangent is not None)


def _composed(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    wide = x.double()
    mean = wide.mean((0, 2))
    z = (wide - mean.unsqueeze(-1)).transpose(0, 1).reshape(groups, x.shape[1] // groups, -1)
    return mean, z @ z.mT / z.shape[-1]


def _outer(mean: Tensor, groups: int) -> Tensor:
    blocks = mean.reshape(groups, -1, 1)
    return blocks @ blocks.mT


def _batch_moments(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Mean and biased covariance in float64, from products of the least precision that is enough."""
    if _may_use_float32(x) and _probe_resolves(x[: -(-_PROBE * x.shape[1] // x.shape[2])], groups):
        found = _float32_moments(x, groups)
        if _resolves(*found):
            return found
    return _float64_moments(x, groups)


@torch.library.custom_op("orthocond::moments", mutates_args=())
def _opaque_moments(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """The same as one node of a compiled graph, in which it can read values and take chunks."""
    return _batch_moments(x, groups)


@_opaque_moments.register_fake
def _(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    size = x.shape[1] // groups
    return x.new_empty(x.shape[1], dtype=torch.float64), x.new_empty(groups, size, size, dtype=torch.float64)


@torch.library.custom_op("orthocond::add_affine_", mutates_args=("total",))
def _opaque_add_affine(total: Tensor, x: Tensor, matrix: Tensor, offset: Tensor) -> None:
    """`add_affine_` as one node of a compiled graph, which would make a third tensor of the size of the features."""
    add_affine_(total, x, matrix, offset)


def _may_use_float32(x: Tensor) -> bool:
    batch, _, positions = x.shape
    large = batch * positions >= _LEAST_SAMPLES and (positions == 1 or positions >= _BLOCK // 4)
    return large and x.dtype == torch.float32 and can_read_freely(x)


def _probe_resolves(x: Tensor, groups: int) -> bool:
    """The same of a part of the features, from one product."""
    z = x.transpose(0, 1).reshape(groups, x.shape[1] // groups, -1)
    mean = z.mean(-1)
    return _resolves(mean.flatten(), z @ z.mT / z.shape[-1] - _outer(mean, groups))


def _resolves(mean: Tensor, covariance: Tensor) -> bool:
    """Whether the smallest eigenvalue is well above the errors of products in float32."""
    largest = (covariance.diagonal(dim1=-2, dim2=-1).flatten() + mean.square()).amax()
    excess = covariance.clone()
    excess.diagonal(dim1=-2, dim2=-1).sub_(_RESOLVED * largest)
    return not torch.linalg.cholesky_ex(excess).info.any()  # positive definite; NaN is not


def _float32_moments(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    batch, channels, positions = x.shape
    size = channels // groups
    together = 1  # blocks that make one product
    if positions == 1:
        whole = batch - batch % _LONGEST_BLOCK
        both = x[:whole, :, 0].view(-1, _LONGEST_BLOCK, channels).mT, x[whole:].permute(2, 1, 0)
        parts = [part for part in both if part.numel()]
    else:
        parts = list(x.split(_LONGEST_BLOCK, dim=2))
        together = max(1, _BLOCK // positions)
    total = x.new_zeros(channels, dtype=torch.float64)
    scatter = total.new_zeros(groups, size, size)
    for part in parts:  # (blocks, C, samples)
        for blocks in part.split(together * max(1, _CHUNK // (size * size))):
            total += blocks.sum(2).double().sum(0)
            short = blocks.shape[0] * blocks.shape[2] <= _LONGEST_BLOCK  # its sum may stay in float32
            for index, block in enumerate(blocks.split(size, dim=1)):
                products = _products(block, together)
                scatter[index] += (products if short else products.double()).sum(0)
    mean = total / (batch * positions)
    return mean, scatter / (batch * positions) - _outer(mean, groups)


def _products(block: Tensor, together: int) -> Tensor:
    """``X Xᵀ`` of ``(blocks, C, samples)`` in its own precision, with the sum of so many blocks in each product."""
    first, *others = [block[start::together] for start in range(min(together, len(block)))]
    products = torch.bmm(first, first.mT)
    for other in others:
        products[: len(other)].baddbmm_(other, other.mT)
    return products


def _float64_moments(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    batch, channels, positions = x.shape
    size = channels // groups
    if torch.compiler.is_compiling():
        samples, width = batch, positions  # a loop would be unrolled
    else:
        samples, width = max(1, _CHUNK // (channels * positions)), max(1, _CHUNK // channels)
    # Shifted by the mean of a part, the products do not cancel even where the mean is much above the deviation.
    shift = x[:samples].mean((0, 2), dtype=torch.float64)
    total = torch.zeros_like(shift)
    scatter = shift.new_zeros(groups, size, size)
    for images in x.split(samples):
        for part in images.split(width, dim=2):
            if positions == 1:
                z = (part.double() - shift.unsqueeze(-1)).transpose(0, 1)
            else:
                z = part.transpose(0, 1).to(torch.float64, memory_format=torch.contiguous_format, copy=True)
                z.sub_(shift.reshape(-1, 1, 1))
            z = z.reshape(groups, size, -1)
            total += z.sum(-1).flatten()
            scatter.baddbmm_(z, z.mT)
    mean = total / (batch * positions)
    return shift + mean, scatter / (batch * positions) - _outer(mean, groups)


class _Moments(Function):
    """The features ``(batch, C, positions)`` as they are, their mean and covariance; saves only the features."""

    @staticmethod
    def forward(x: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
        if x.is_cpu and torch.compiler.is_dynamo_compiling():  # not in torch.export
            return x.view_as(x), *_opaque_moments(x, groups)
        return x.view_as(x), *_batch_moments(x, groups)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(inputs[0], output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_mean: Tensor, grad_covariance: Tensor) -> tuple[Tensor, None]:
        # dL/dx = (G + Gᵀ)(x - μ) / n + g / n, an affine map of the features like the whitening itself.
        x, mean = ctx.saved_tensors
        count = x.shape[0] * x.shape[2]
        matrix = (grad_covariance + grad_covariance.mT) / count
        offset = grad_mean / count - (matrix @ mean.reshape(len(matrix), -1, 1)).reshape(-1)
        matrix, offset = matrix.to(x.dtype), offset.to(x.dtype)
        if x.is_cpu and torch.compiler.is_dynamo_compiling():
            total = grad.contiguous()
            _opaque_add_affine(total, x, matrix, offset)
            return total, None
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return grad + affine(x, matrix, offset), None
        # Nobody else sees the gradient that comes from the one use of the features returned above.
        return add_affine_(grad, x, matrix, offset), None
