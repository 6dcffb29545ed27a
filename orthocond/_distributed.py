"""Sums over processes that carry the gradient: the one place that talks to torch.distributed."""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function


def several_processes(group: Any) -> bool:
    """Whether a process group is running and has more than one member."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def sum_across(a: Tensor, group: Any = None) -> Tensor:
    """The sum of ``a`` over the processes of ``group``, on each of them; differentiable to any order.

    Every process has to call it with the same shape. If the loss is the sum of the processes' losses, the gradient is
    the sum of their gradients, so each process receives what its own features contribute to all of them.
    """
    return _SumAcross.apply(a, group)


class _SumAcross(Function):
    @staticmethod
    def forward(a: Tensor, group: Any) -> Tensor:
        total = a.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return sum_across(g, ctx.group), None
