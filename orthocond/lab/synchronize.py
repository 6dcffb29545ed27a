"""Batch normalization over all processes, on a CPU too, where torch's own needs a GPU."""

import torch
from torch import Tensor, nn

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
        wide = x.to(torch.float64)
        count = wide.new_full((1,), x.numel() / x.shape[1])
        total = sum_across(torch.cat([count, wide.sum((0, 2, 3)), wide.square().sum((0, 2, 3))]), None)
        n = total[0].detach()
        mean, square = (total[1:] / n).chunk(2)
        variance = (square - mean.square()).clamp(min=0)
        with torch.no_grad():
            self.num_batches_tracked += 1
            momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.to(self.running_mean), momentum)
            self.running_var.lerp_((variance * n / (n - 1)).to(self.running_var), momentum)
        scale = (variance + self.eps).rsqrt()
        if self.affine:
            scale = scale * self.weight
        shift = -mean * scale if not self.affine else self.bias - mean * scale
        shape = (1, -1, 1, 1)
        return x * scale.to(x.dtype).reshape(shape) + shift.to(x.dtype).reshape(shape)


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
