"""What all SVD layers share: the base class, the features' layout, and errors that name the layer."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from orthocond._checks import (
    all_true,
    at_least_float32,
    check_choice,
    check_floating,
    in_transform,
    without_autocast,
)
from orthocond.matrix import Eigh, Solver
from orthocond.matrix.solver import check_solver

Observer = Callable[[Tensor], None]


def check_features(x: object, name: str, dims: tuple[int, ...] | int, channels: int | None = None) -> Tensor:
    """Return ``x`` if it is a batch of features ``(N, C, ...)``; ``dims`` lists its dimensions, or is the least."""
    x = check_floating(x, name)
    if (x.ndim < dims) if isinstance(dims, int) else (x.ndim not in dims):
        wanted = f"at least {dims}-D" if isinstance(dims, int) else " or ".join(f"{d}-D" for d in dims)
        raise ValueError(f"{name} needs {wanted} features (N, C, ...); got shape {tuple(x.shape)}.")
    if channels is not None and x.shape[1] != channels:
        raise ValueError(f"{name} was built for {channels} channels; got features of shape {tuple(x.shape)}.")
    return x


class SVDLayer(nn.Module):
    """Base class of the SVD layers, which decompose a covariance; the paper calls them SVD meta-layers.

    Attributes:
        solver: How its matrix roots are computed.
        nonfinite: What happens with NaN or infinity in features: ``"propagate"`` to the output, or ``"raise"``.
        observer: A callable that each training forward calls with the covariance ``(*, d, d)`` that the layer
            computed, detached, in float64 and without ridge, unless it is not finite; None calls nothing. It is not
            part of the state: ``state_dict``, ``copy.deepcopy`` and pickle leave it out.
    """

    observer: Observer | None

    def __init__(self, *, solver: Solver, nonfinite: str) -> None:
        super().__init__()
        check_choice(nonfinite, f"{type(self).__name__}(nonfinite=...)", ("propagate", "raise"))
        self.solver = check_solver(solver, type(self).__name__)
        self.nonfinite = nonfinite
        self.observer = None

    def _observe(self, covariance: Tensor) -> None:
        if self.training and self.observer is not None and all_true(covariance.isfinite()) is not False:
            self.observer(covariance.detach())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "observer": None}


class CountingSVDLayer(SVDLayer):
    """An `SVDLayer` without statistics, which counts the training batches of which an output is NaN."""

    nonfinite_batches: Tensor

    def __init__(self, *, solver: Solver, nonfinite: str) -> None:
        super().__init__(solver=solver, nonfinite=nonfinite)
        self.register_buffer("nonfinite_batches", torch.tensor(0), persistent=False)

    def _count(self, y: Tensor) -> None:
        if self.training and self.nonfinite == "propagate" and not in_transform():
            # Without parameters the layer works on any device without being moved there.
            self.nonfinite_batches = self.nonfinite_batches.to(y.device)
            self.nonfinite_batches.add_(y.detach().isnan().any())


def as_leaf(layer: nn.Module, *inputs: Any) -> Any:
    """Record the call of a layer as one node in a graph of torch.fx, as torch does for its own layers."""
    tracer: Any = next(x.tracer for x in inputs if isinstance(x, fx.Proxy))
    return tracer.create_proxy("call_module", tracer.path_of_module(layer), inputs, {})


class Layout(NamedTuple):
    """How features ``(N, C, ...)`` became ``(batch, C, positions)`` without a copy, and the way back."""

    shape: torch.Size
    channels_last: bool

    def restore(self, y: Tensor) -> Tensor:
        """Give ``(batch, C, positions)`` the shape and memory format of the features it came from.

        Autograd does not take the result for a view, of which an activation in place would copy the gradient thrice.
        So nothing else may use ``y``. In traces a view is right, since its shape follows that of other features.
        """
        if self.channels_last:
            y = y.reshape(self.shape[0], *self.shape[2:], self.shape[1]).movedim(-1, 1)
        if torch.jit.is_tracing():  # type: ignore[attr-defined]
            return y.reshape(self.shape)
        return torch.ops.aten._unsafe_view(y, self.shape)


def flatten(x: Tensor) -> tuple[Tensor, Layout]:
    """View features ``(N, C, ...)`` as ``(batch, C, positions)``.

    Where the channels are the fastest dimension (channels_last, or no positions at all), every position becomes a
    sample of its own, ``(N · positions, C, 1)``; both forms are views of the same memory as ``x``.
    """
    rows = x.movedim(1, -1)
    if x.ndim == 2 or rows.is_contiguous():
        return rows.reshape(-1, x.shape[1], 1), Layout(x.shape, True)
    return x.flatten(2), Layout(x.shape, False)


def affine(x: Tensor, matrix: Tensor, offset: Tensor) -> Tensor:
    """``matrix @ x + offset`` at each position of ``(batch, C, positions)``, as one batched product.

    Args:
        x: Features ``(batch, C, positions)``.
        matrix: One matrix for each group of channels, ``(groups, C / groups, C / groups)``.
        offset: ``(C,)``.
    """
    with without_autocast(x):
        if x.shape[2] > 1:
            offsets = offset.reshape(len(matrix), -1, 1).expand(x.shape[0], -1, -1, -1).reshape(-1, matrix.shape[-1], 1)
            return torch.baddbmm(offsets, *_by_image(matrix, x)).reshape(x.shape)
        rows = _by_group(x, matrix)
        return torch.baddbmm(offset.reshape(len(matrix), 1, -1), rows, matrix.mT).transpose(0, 1).reshape(x.shape)


def add_affine_(total: Tensor, x: Tensor, matrix: Tensor, offset: Tensor) -> Tensor:
    """``total + affine(x, matrix, offset)``, in the memory of ``total``; not differentiable."""
    total = total.contiguous()
    with without_autocast(x):
        if x.shape[2] > 1:
            blocks, images = _by_image(matrix, x)
            total.view(images.shape).baddbmm_(blocks, images)
        else:
            _by_group(total, matrix).baddbmm_(_by_group(x, matrix), matrix.mT)
    return total.add_(offset.unsqueeze(-1))


def _by_image(matrix: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix for each image and group, and what it multiplies, ``(batch · groups, C / groups, positions)``."""
    size = matrix.shape[-1]
    return matrix.expand(x.shape[0], -1, -1, -1).reshape(-1, size, size), x.reshape(-1, size, x.shape[2])


def _by_group(x: Tensor, matrix: Tensor) -> Tensor:
    """View samples ``(batch, C, 1)`` as rows of each group, ``(groups, batch, C / groups)``."""
    return x.reshape(x.shape[0], len(matrix), matrix.shape[-1]).transpose(0, 1)


def with_rank_tolerance(solver: Solver, eps: float, dtype: torch.dtype, size: int) -> Solver:
    """Let `Eigh` without ridge and tolerance of its own leave out what is only rounding of the features.

    Args:
        solver: The solver; any other than such an `Eigh` is returned as it is.
        eps: The ridge.
        dtype: Dtype of the features, whose covariance is computed in float64.
        size: Largest dimension of the product that gives the covariance.
    """
    if not isinstance(solver, Eigh) or solver.rank_tol is not None or eps > 0:
        return solver
    # Relative variance of rounding once to the dtype; of the sums that made the features (a convolution of rank 27 has
    # 1e-13 in its null space, 10 times the square of float32's epsilon); and of the covariance itself.
    once = torch.finfo(dtype).eps ** 2 / 12
    sums = 16 * torch.finfo(at_least_float32(dtype)).eps ** 2
    return replace(solver, rank_tol=max(once, sums, size * torch.finfo(torch.float64).eps))


def identity_like(a: Tensor) -> Tensor:
    """The identity ``(n, n)`` with dtype and device of matrices ``(*, n, n)``."""
    return torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)


def without_nonfinite(a: Tensor) -> tuple[Tensor, Tensor]:
    """Matrices ``(*, n, n)`` with the identity for those that are not finite, and which are, ``(*, 1, 1)``."""
    finite = a.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    return torch.where(finite, a, identity_like(a)), finite


def blame_features(x: Tensor, name: str, error: Exception | None = None) -> None:
    """Raise a `ValueError` from ``error`` if the features hold NaN or infinity; return if they do not."""
    bad = int((~torch.isfinite(x)).sum())
    if bad:
        raise ValueError(
            f"{name} needs finite features; {bad} of {x.numel()} are NaN or infinite. Look for an overflow, too "
            "large a learning rate or a division by zero before this layer."
        ) from error
