"""What every treatment of a weight shares."""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

# A vector that a matrix shortens to less than this share of its longest row is lost to the power iteration.
_LOST = 1e-6


def register(module: nn.Module, name: str, parametrization: nn.Module) -> nn.Module:
    """Register a parametrization so that it can be removed from a deep copy without harm to the original.

    torch keeps it as a property of the module's class, which copies share, and removal deletes it there: a copy gets a
    class of its own instead.
    """
    parametrize.register_parametrization(module, name, parametrization)
    cls: Any = type(module)
    if "__deepcopy__" in vars(cls):  # torch's, not one that the layer brought along
        cls.__deepcopy__ = _deepcopy_with_own_class
    return module


def _deepcopy_with_own_class(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    cls = type(module)
    replica = cls.__new__(cls)
    memo[id(module)] = replica
    replica.__dict__ = copy.deepcopy(module.__dict__, memo)
    replica.__class__ = type(cls.__name__, cls.__bases__, dict(vars(cls)))
    return replica


def check_gain(gain: float, caller: str) -> float:
    """Return ``gain`` if it is a finite positive number, else raise a `ValueError`."""
    if not 0 < gain < math.inf:
        raise ValueError(f"{caller}(gain=...) needs a finite number above 0; got {gain!r}.")
    return float(gain)


def eye_like(a: Tensor) -> Tensor:
    """The identity of the size of the last dimension of ``a``."""
    return torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)


@torch.no_grad()
def follow_singular_vector(w: Tensor, v: Tensor, steps: int) -> Tensor:
    """Steps of the power iteration for the right singular vectors ``(*, n)`` of the largest singular values.

    Vectors that the matrices ``(*, m, n)`` map to zero, where the iteration would stay for good, are replaced by the
    longest row. For a zero matrix the vector stays as it is.
    """
    longest, index = torch.linalg.vector_norm(w, dim=-1).max(-1, keepdim=True)
    row = torch.take_along_dim(w, index.unsqueeze(-1), dim=-2).squeeze(-2)
    norm = torch.linalg.vector_norm(w @ v.unsqueeze(-1), dim=(-2, -1)).unsqueeze(-1)
    v = torch.where(norm < _LOST * longest, row / _divisor(longest), v)
    for _ in range(steps):
        u = w @ v.unsqueeze(-1)
        u = u / _divisor(torch.linalg.vector_norm(u, dim=-2, keepdim=True))
        new = (w.mT @ u).squeeze(-1)
        norm = torch.linalg.vector_norm(new, dim=-1, keepdim=True)
        v = torch.where(norm == 0, v, new / _divisor(norm))
    return v


def _divisor(norm: Tensor) -> Tensor:
    """The norm, and 1 where it is 0."""
    return torch.where(norm == 0, 1, norm)
