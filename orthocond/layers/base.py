"""What all meta-layers share: the base class, the features' layout, and errors that name the layer."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from orthocond.matrix import Solver
from orthocond.matrix._common import check_floating

Observer = Callable[[Tensor], None]


def check_solver(solver: object, name: str) -> Solver:
    """Return ``solver`` if it is a `Solver`, else raise a `TypeError`."""
    if not isinstance(solver, Solver):
        hint = f" Add parentheses: {solver.__name__}()." if isinstance(solver, type) else ""
        raise TypeError(f"{name} needs a solver such as Eigh() or NewtonSchulz(steps=5); got {solver!r}.{hint}")
    return solver


def check_features(x: object, name: str, dims: tuple[int, ...], channels: int | None = None) -> Tensor:
    """Return ``x`` if it is a batch of features ``(N, C, ...)`` with one of the numbers of dimensions ``dims``."""
    x = check_floating(x, name)
    if x.ndim not in dims:
        wanted = " or ".join(f"{d}-D" for d in dims)
        raise ValueError(f"{name} needs {wanted} features (N, C, ...); got shape {tuple(x.shape)}.")
    if channels is not None and x.shape[1] != channels:
        raise ValueError(f"{name} was built for {channels} channels; got features of shape {tuple(x.shape)}.")
    return x


class SVDLayer(nn.Module):
    """Base class of the layers that decompose a covariance: the SVD meta-layers of the paper.

    Attributes:
        solver: How its matrix roots are computed.
        observer: A callable that each training forward calls with the covariance ``(*, d, d)`` that the layer
            computed, detached, in float64 and without ridge; None calls nothing. It is not part of the state:
            ``state_dict``, ``copy.deepcopy`` and pickle leave it out.
    """

    observer: Observer | None

    def __init__(self, solver: Solver) -> None:
        super().__init__()
        self.solver = check_solver(solver, type(self).__name__)
        self.observer = None

    def _observe(self, covariance: Tensor) -> None:
        if self.training and self.observer is not None:
            self.observer(covariance.detach())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "observer": None}


class Layout(NamedTuple):
    """How features ``(N, C, ...)`` became ``(batch, C, positions)`` without a copy, and the way back."""

    shape: torch.Size
    channels_last: bool

    def restore(self, y: Tensor) -> Tensor:
        """Give ``(batch, C, positions)`` the shape and memory format of the features it came from."""
        if self.channels_last:
            return y.reshape(self.shape[0], *self.shape[2:], self.shape[1]).movedim(-1, 1)
        return y.reshape(self.shape)


def flatten(x: Tensor) -> tuple[Tensor, Layout]:
    """View features ``(N, C, ...)`` as ``(batch, C, positions)``.

    Where the channels are the fastest dimension (channels_last, or no positions at all), every position becomes a
    sample of its own, ``(N · positions, C, 1)``; both forms are views of the same memory as ``x``.
    """
    rows = x.movedim(1, -1)
    if rows.is_contiguous():
        return rows.reshape(-1, x.shape[1], 1), Layout(x.shape, True)
    return x.flatten(2), Layout(x.shape, False)


def affine(x: Tensor, matrix: Tensor, offset: Tensor) -> Tensor:
    """``matrix @ x + offset`` at each position of ``(batch, C, positions)``, as one batched product.

    Args:
        x: Features ``(batch, C, positions)``.
        matrix: One matrix for each group of channels, ``(groups, C / groups, C / groups)``.
        offset: ``(C,)``.
    """
    batch, channels, positions = x.shape
    groups, size, _ = matrix.shape
    with torch.autocast(x.device.type, enabled=False):
        if positions > 1:
            blocks = matrix.expand(batch, -1, -1, -1).reshape(-1, size, size)
            offsets = offset.reshape(groups, size, 1).expand(batch, -1, -1, -1).reshape(-1, size, 1)
            return torch.baddbmm(offsets, blocks, x.reshape(-1, size, positions)).reshape(x.shape)
        rows = x.squeeze(-1)
        if groups == 1:
            return functional.linear(rows, matrix[0], offset).unsqueeze(-1)
        product = torch.einsum("mgi,goi->mgo", rows.reshape(batch, groups, size), matrix)
        return (product.reshape(batch, channels) + offset).unsqueeze(-1)


def blame_features(x: Tensor, name: str, error: Exception) -> None:
    """Raise a `ValueError` from ``error`` if the features hold NaN or infinity; return if they do not."""
    bad = int((~torch.isfinite(x)).sum())
    if bad:
        raise ValueError(
            f"{name} needs finite features; {bad} of {x.numel()} are NaN or infinite. Look for an overflow, a too "
            "large learning rate or a division by zero before this layer."
        ) from error
