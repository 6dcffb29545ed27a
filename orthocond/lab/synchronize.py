"""Batch normalization over all processes, on a CPU too, where torch's own needs a GPU."""

from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from orthocond._distributed import sum_across
from orthocond.layers import DecorrelatedBatchNorm1d, DecorrelatedBatchNorm2d, DecorrelatedBatchNorm3d, convert_sync


class _Synchronized(_BatchNorm):
    """Batch normalization with mean and variance over all processes; parameters and buffers are the same."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        self._check_input_dim(x)
        y, mean, variance, n = _Normalize.apply(x, self.weight, self.bias, self.eps)
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked += 1
            momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.to(self.running_mean), momentum)
            self.running_var.lerp_((variance * n / (n - 1)).to(self.running_var), momentum)
        return y


class SynchronizedBatchNorm1d(_Synchronized, nn.BatchNorm1d):
    """`nn.BatchNorm1d` over all processes."""


class SynchronizedBatchNorm2d(_Synchronized, nn.BatchNorm2d):
    """`nn.BatchNorm2d` over all processes."""


class SynchronizedBatchNorm3d(_Synchronized, nn.BatchNorm3d):
    """`nn.BatchNorm3d` over all processes."""


_KINDS: dict[type, type[_Synchronized]] = {
    nn.BatchNorm1d: SynchronizedBatchNorm1d,
    nn.BatchNorm2d: SynchronizedBatchNorm2d,
    nn.BatchNorm3d: SynchronizedBatchNorm3d,
}


class _Normalize(Function):
    """Normalized features, and their mean, variance and count over all processes, with torch's kernels for one."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, ...]:
        wide = _wide(x)
        moments = torch.zeros(2, x.shape[1], dtype=torch.double, device=x.device)  # of a process without images
        if x.numel():
            moments = torch.stack(torch.ops.aten.batch_norm_update_stats(wide, None, None, 0.0)).double()
        mean, variance = moments
        count = mean.new_full((1,), x.numel() / x.shape[1])
        total = sum_across(torch.cat([count, count * mean, count * (variance + mean.square())]))
        mean, square = (total[1:] / total[0]).chunk(2)
        variance = (square - mean.square()).clamp(min=0)
        weight, bias = (a if a is None else _wide(a) for a in (weight, bias))
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
        of_weight = of_bias = torch.zeros_like(fixed[0])  # those of a process without images
        if x.numel():
            of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
                wide_g, wide_x, *fixed, None, None, False, ctx.eps, [False, True, True]
            )[1:]
        with_x, alone = (sum_across(torch.cat([of_weight, of_bias]).double()) / n).chunk(2)
        # The gradient of x is weight · (g − alone − normalized · with_x) / deviation: in each channel a sum of g and x.
        root = (variance + ctx.eps).rsqrt()
        of_g = root if weight is None else root * weight
        of_x = -of_g * root * with_x
        offset = -of_g * alone - of_x * mean
        offset, of_x, of_g = (a.to(wide_x.dtype).reshape(1, -1, *[1] * (x.ndim - 2)) for a in (offset, of_x, of_g))
        gradient = torch.addcmul(offset, wide_x, of_x).addcmul_(wide_g, of_g).to(x.dtype)
        _, has_weight, has_bias, _ = ctx.needs_input_grad
        return gradient, of_weight if has_weight else None, of_bias if has_bias else None, None


def _wide(a: Tensor) -> Tensor:
    """At least float32."""
    return a.to(torch.promote_types(a.dtype, torch.float32))


def synchronize(model: nn.Module, *, plain: bool = True) -> nn.Module:
    """Let the decorrelated batch normalizations of a model, and the plain ones too, see the images of all processes.

    The names and tensors of its ``state_dict`` stay, so checkpoints fit any number of processes. A class derived from a
    batch normalization may compute something else, so it stays as it is, with a warning.
    """
    modules = list(model.modules())
    others = set()
    for module in modules if plain else []:
        if kind := _KINDS.get(type(module)):
            module.__class__ = kind
        elif isinstance(module, _BatchNorm) and not isinstance(module, (nn.SyncBatchNorm, _Synchronized)):
            others.add(type(module).__name__)
    if others:
        text = f"The statistics of {', '.join(sorted(others))} are those of each process by itself"
        warn(f"{text}: only nn.BatchNorm1d, 2d and 3d are taken over all processes.", RuntimeWarning, stacklevel=2)
    if any(isinstance(m, (DecorrelatedBatchNorm1d, DecorrelatedBatchNorm2d, DecorrelatedBatchNorm3d)) for m in modules):
        convert_sync(model)
    return model
