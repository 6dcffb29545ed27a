"""Batch normalization over all processes, on a CPU too, where torch's own needs a GPU."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable
from torch.nn import functional as F

from orthocond._distributed import sum_across
from orthocond.layers import DecorrelatedBatchNorm2d, convert_sync


class SynchronizedBatchNorm2d(nn.BatchNorm2d):
    """`nn.BatchNorm2d` with mean and variance over all processes; parameters and buffers are the same."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        y, mean, variance, n = _Normalize.apply(x, self.weight, self.bias, self.eps)
        self.num_batches_tracked += 1
        momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean), momentum)
        self.running_var.lerp_((variance * n / (n - 1)).to(self.running_var), momentum)
        return y


class _Normalize(Function):
    """Normalized features, and their mean, variance and count over all processes, with torch's kernels for one."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, ...]:
        wide = _wide(x)
        mean, variance = (a.double() for a in torch.ops.aten.batch_norm_update_stats(wide, None, None, 0.0))
        count = mean.new_full((1,), x.numel() / x.shape[1])
        total = sum_across(torch.cat([count, count * mean, count * (variance + mean.square())]))
        mean, square = (total[1:] / total[0]).chunk(2)
        variance = (square - mean.square()).clamp(min=0)
        y = F.batch_norm(x, mean.to(wide.dtype), variance.to(wide.dtype), weight, bias, eps=eps)
        return y, mean, variance, total[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, _, ctx.eps = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(x, weight, *output[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, variance, n = ctx.saved_tensors
        wide_x, wide_g = _wide(x), _wide(g)
        # The kernel of evaluation sums g times the normalized features, and g: the gradients of weight and bias.
        fixed = torch.ones_like(mean, dtype=wide_x.dtype), mean.to(wide_x.dtype), variance.to(wide_x.dtype)
        of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            wide_g, wide_x, *fixed, None, None, False, ctx.eps, [False, True, True]
        )[1:]
        with_x, alone = (sum_across(torch.cat([of_weight, of_bias]).double()) / n).chunk(2)
        # The gradient of x is weight · (g − alone − normalized · with_x) / deviation: in each channel a sum of g and x.
        root = (variance + ctx.eps).rsqrt()
        of_g = root if weight is None else root * weight
        of_x = -of_g * root * with_x
        offset = -of_g * alone - of_x * mean
        offset, of_x, of_g = (a.to(wide_x.dtype).reshape(1, -1, 1, 1) for a in (offset, of_x, of_g))
        gradient = torch.addcmul(offset, wide_x, of_x).addcmul_(wide_g, of_g).to(x.dtype)
        return (gradient, None, None, None) if weight is None else (gradient, of_weight, of_bias, None)


def _wide(a: Tensor) -> Tensor:
    """At least float32."""
    return a.to(torch.promote_types(a.dtype, torch.float32))


def synchronize(model: nn.Module) -> nn.Module:
    """Let all batch normalizations of a model, plain and decorrelated, see the images of all processes.

    The names and tensors of its ``state_dict`` stay, so checkpoints fit any number of processes.
    """
    for module in model.modules():
        if type(module) is nn.BatchNorm2d and module.track_running_stats:
            module.__class__ = SynchronizedBatchNorm2d
    if any(isinstance(module, DecorrelatedBatchNorm2d) for module in model.modules()):
        convert_sync(model)
    return model
