"""What every treatment of a weight shares: which parameter it is, which groups it has, and which checks it passes."""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from orthocond._checks import check_floating
from orthocond.matrix import matrix_view

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED_CONVOLUTIONS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
# A vector that a matrix shortens to less than this share of its longest row is lost to the power iteration.
_LOST = 1e-6


def find_parameter(module: nn.Module, name: str, caller: str) -> nn.Parameter:
    """Return the parameter that a treatment may act on, else raise what is wrong with it."""
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"{caller} needs a torch.nn.Module; got {type(module).__name__}. Pass the layer, not its weight."
        )
    if parametrize.is_parametrized(module, name):
        raise RuntimeError(
            f"{caller} needs a plain parameter; {name!r} of {type(module).__name__} is already parametrized. Take the "
            f"parametrization off with torch.nn.utils.parametrize.remove_parametrizations(module, {name!r}) first."
        )
    parameter = dict(module.named_parameters(recurse=False)).get(name)
    if parameter is None:
        names = [n for n, p in module.named_parameters(recurse=False) if is_lazy(p) or p.ndim > 1]
        has = f"it has {', '.join(map(repr, names))}" if names else "it has no matrices of its own"
        raise ValueError(
            f"{caller} needs a module with a parameter {name!r}; {type(module).__name__} has none ({has}). Pass the "
            "Linear or convolution itself, and name= if its weight has another name."
        )
    if is_lazy(parameter):
        raise RuntimeError(f"{caller} needs an initialized {name!r}; run one batch through the lazy module first.")
    check_floating(parameter, caller)
    if parameter.ndim < 2 or parameter.numel() == 0:
        raise ValueError(
            f"{caller} needs a non-empty weight of at least two dimensions; {name!r} of {type(module).__name__} has "
            f"shape {tuple(parameter.shape)}. Biases and norm scales are not matrices."
        )
    return parameter


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


def groups_of(module: nn.Module, name: str = "weight") -> int:
    """Number of groups of a convolution's weight; 1 for everything else."""
    grouped = name == "weight" and isinstance(module, CONVOLUTIONS + TRANSPOSED_CONVOLUTIONS)
    return int(module.groups) if grouped else 1  # type: ignore[arg-type]


def matrices(weight: Tensor, groups: int) -> Tensor:
    """The matrix view ``(groups, rows, columns)``, with the dimension of groups also for one group."""
    view = matrix_view(weight, groups)
    return view if groups > 1 else view.unsqueeze(0)


def check_full_rank(q: Tensor, caller: str) -> None:
    """Raise a `ValueError` if polar factors ``(groups, m, n)`` left out a direction that had no singular value."""
    size = min(q.shape[-2:])
    rank = round(float(q.square().sum((-2, -1)).min()))
    if rank < size:
        raise ValueError(
            f"{caller} needs a weight of full rank, whose nearest orthogonal matrix is unique; this one has rank "
            f"{rank} of {size}. Initialize it first, for example with torch.nn.init.orthogonal_(module.weight)."
        )


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
