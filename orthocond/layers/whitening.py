"""Features whitened by P^-1/2 of their own batch, and the matrices that do it (paper: section 6.1)."""

import warnings

import torch
from torch import Tensor

from orthocond._checks import (
    all_true,
    at_least_float32,
    can_read_freely,
    check_count,
    check_not_negative,
    without_autocast,
)
from orthocond.layers.base import (
    affine,
    blame_features,
    check_features,
    flatten,
    identity_like,
    with_rank_tolerance,
    without_nonfinite,
)
from orthocond.layers.statistics import Moments, moments
from orthocond.matrix import Eigh, Solver, inv_sqrtm
from orthocond.matrix.decompose import eigh
from orthocond.matrix.solver import check_solver
from orthocond.matrix.symmetric import symmetric_part

_EIGH = Eigh()


def check_groups(channels: int, groups: int, name: str) -> None:
    """Raise a `ValueError` if ``groups`` does not divide the channels."""
    check_count(groups, f"{name}(groups=...)", 1)
    if channels % groups:
        raise ValueError(
            f"{name} needs groups that divide the channels; got {channels} channels and {groups} groups. "
            f"Divisors are {[d for d in range(1, channels + 1) if channels % d == 0]}."
        )


def whiten(x: Tensor, *, groups: int = 1, eps: float = 1e-5, solver: Solver = _EIGH) -> Tensor:
    r"""Whiten features by their own batch statistics (ZCA).

    Returns :math:`(P + \varepsilon I)^{-1/2} (x - \mu)` with the mean :math:`\mu` and the biased covariance
    :math:`P` of the channels over batch and positions. It is what `DecorrelatedBatchNorm2d` computes in training,
    without affine parameters and running statistics.

    Args:
        x: Features ``(N, C, *)`` with any number of position dimensions, or none.
        groups: Number of equal groups of channels, each whitened by itself.
        eps: Ridge added to every eigenvalue, at least 0.
        solver: How the inverse root is computed.

    Returns:
        The whitened features, with shape, dtype and memory format of ``x``.

    Raises:
        TypeError: If ``x`` is not a real floating-point tensor or ``solver`` is not a `Solver`.
        ValueError: If ``groups`` does not divide the channels, there is one value per channel, or features are not
            finite.

    Accuracy:
        As `DecorrelatedBatchNorm2d`.

    Example:
        >>> y = whiten(torch.randn(8, 3, 16, 16) + 5, eps=0.0)
        >>> print(torch.cov(y.movedim(1, 0).flatten(1), correction=0).round(decimals=4).abs())
        tensor([[1., 0., 0.],
                [0., 1., 0.],
                [0., 0., 1.]])
    """
    x = check_features(x, "whiten", 2)
    check_groups(x.shape[1], groups, "whiten")
    check_solver(solver, "whiten")
    flat, layout = flatten(x.to(at_least_float32(x.dtype)))
    check_samples(flat.shape[0] * flat.shape[2], x.shape, "whiten")
    eps = check_not_negative(eps, "whiten(eps=...)")
    with without_autocast(x):
        flat, found = moments(flat, groups)
    check_moments(found, x, "whiten")
    matrix = batch_whitening(found, x.dtype, eps, solver)
    offset = -(matrix @ found.mean.reshape(groups, -1, 1)).flatten()
    return layout.restore(affine(flat, matrix.to(flat.dtype), offset.to(flat.dtype))).to(x.dtype)


def check_samples(count: int, shape: torch.Size, name: str) -> None:
    """Raise a `ValueError` if there is one sample or none."""
    if count < 2:
        raise ValueError(
            f"{name} needs more than one value per channel to compute a covariance; got features of shape "
            f"{tuple(shape)}. Use a larger batch, drop_last=True in the loader, or eval()."
        )


def check_moments(found: Moments, x: Tensor, name: str) -> None:
    """Raise a `ValueError` that says what is wrong with the features if their moments are not finite."""
    if all_true(are_finite(found.mean, found.covariance)) is False:
        blame_features(x, name)
        raise ValueError(f"{name} needs features whose squares are finite in float64; got sizes up to {x.abs().max()}.")


def are_finite(*tensors: Tensor) -> Tensor:
    """Whether all entries are finite, as a tensor: nothing is read."""
    return torch.stack([tensor.isfinite().all() for tensor in tensors]).all()


def batch_whitening(found: Moments, dtype: torch.dtype, eps: float, solver: Solver) -> Tensor:
    """``(P + eps I)^-1/2`` in float64, without ridge that of the pseudo-inverse; NaN if the moments are not finite.

    Args:
        found: Moments of the batch.
        dtype: Dtype of its features.
        eps: The ridge.
        solver: How the inverse root is computed.
    """
    covariance = found.covariance
    finite = are_finite(found.mean, covariance)
    solver = with_rank_tolerance(solver, eps, dtype, covariance.shape[-1])
    if can_read_freely(covariance) and all_true(finite):
        return inv_sqrtm(covariance, eps=eps, solver=solver)
    whitening = inv_sqrtm(torch.where(finite, covariance, identity_like(covariance)), eps=eps, solver=solver)
    return torch.where(finite, whitening, torch.nan)


def covered(covariance: Tensor, excess: Tensor) -> Tensor:
    """``P + E₊``, the covariance and the positive part of what it lacks; NaN where the excess is not finite."""
    sound, finite = without_nonfinite(excess.double())
    values, vectors = eigh(sound)
    added = vectors * values.clamp(min=0).unsqueeze(-2) @ vectors.mT
    return torch.where(finite, covariance.double() + added, torch.nan).to(covariance.dtype)


def stored_whitening(covariance: Tensor, eps: float, solver: Solver, owner: str) -> Tensor:
    """``(P + eps I)^-1/2`` of a running covariance, with a ridge for what its entries cannot tell.

    Entries are rounded, so eigenvalues are known up to that fraction of the largest variance, which is added to them.
    A covariance with a negative eigenvalue, which averages never have, gets as much added as makes it 0, with a
    warning. The result is NaN, with a warning, if an entry is NaN or infinite.

    Args:
        covariance: ``(groups, C / groups, C / groups)``.
        eps: The ridge.
        solver: How the inverse root is computed.
        owner: Name of the layer, for the warnings.

    Returns:
        The whitening matrices in the dtype of the covariance.
    """
    finite = are_finite(covariance)
    identity = identity_like(covariance.double())
    sound = symmetric_part(torch.where(finite, covariance.double(), identity))
    rounding = torch.finfo(covariance.dtype).eps * sound.diagonal(dim1=-2, dim2=-1).abs().amax(-1)
    missing = -torch.linalg.eigvalsh(sound).select(-1, 0)
    if all_true(finite) is False:
        _warn(owner, "holds NaN or infinity, so evaluation gives NaN")
    elif all_true(missing <= covariance.shape[-1] * rounding) is False:  # more than rounding of the dtype explains
        _warn(owner, f"has the eigenvalue {-float(missing.max()):.3g}, so that much is added to all (was it rounded?)")
    ridge = (rounding + missing.clamp(min=0)).reshape(-1, 1, 1)
    whitening = inv_sqrtm(sound + ridge * identity, eps=eps, solver=solver).to(covariance.dtype)
    return torch.where(finite, whitening, torch.nan)


def _warn(owner: str, finding: str) -> None:
    warnings.warn(
        f"The running covariance of {owner} {finding}. Load a sound state in float32, or refresh the statistics with "
        "orthocond.update_statistics(model, loader).",
        stacklevel=3,
    )
