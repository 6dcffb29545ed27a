"""What the library's layers and metrics say to other processes: sums that carry the gradient, and agreements.

Only DTensors, which `orthocond.steps` gathers and shards again, send messages elsewhere in the library.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function


def several_processes(group: Any) -> bool:
    """Whether a process group is running and has more than one member."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def is_first() -> bool:
    """Whether this is the first process, or the only one."""
    return not several_processes(None) or dist.get_rank() == 0


def message_device(group: Any = None) -> torch.device:
    """Where tensors have to be that the group's backend sends."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def largest_across(a: Tensor, group: Any = None) -> Tensor:
    """The entrywise largest of ``a`` over the processes of ``group``, on each of them."""
    largest = a.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest


def agree(answer: bool) -> bool:
    """Whether all processes of the default group give the same answer."""
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, answer)
    return len(set(answers)) == 1


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
