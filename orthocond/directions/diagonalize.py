"""One rotation that makes many symmetric matrices as diagonal as possible."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from orthocond._checks import check_count, check_not_negative, check_square
from orthocond.directions.basis import TIE_TOL, with_positive_largest
from orthocond.matrix.decompose import eigh
from orthocond.matrix.symmetric import symmetric_part

_MOST_STEPS = 300
_HALVINGS = 8


@dataclass(frozen=True, eq=False)
class JointDiagonalization:
    """What `jointly_diagonalize` finds.

    Attributes:
        rotation: Orthogonal R ``(d, d)``, a row for each common direction, the largest mean diagonal entry first.
        diagonals: Diagonals ``(n, d)`` of the matrices R A Rᵀ.
        energies: Part of the squared entries that is off the diagonal, from 0 to 1: ``"axes"`` before, ``"mean"`` with
            the eigenvectors of the mean matrix, ``"joint"`` with R.
        ties: Groups of rows that the matrices do not tell apart: any rotation within a group is as good.
        agreement: Smallest cosine between a row that is not tied and its partner from another start; near 1 if the
            optimum is unique. NaN with one start, or if all rows are tied.
        converged: Whether the best start ended before the limit of steps.
    """

    rotation: Tensor
    diagonals: Tensor
    energies: dict[str, float]
    ties: tuple[tuple[int, ...], ...]
    agreement: float
    converged: bool


def jointly_diagonalize(
    matrices: Tensor,
    weights: Tensor | None = None,
    *,
    starts: int = 3,
    tol: float = 1e-4,
    tie_tol: float = TIE_TOL,
    seed: int = 0,
) -> JointDiagonalization:
    r"""The orthogonal R that minimizes the energy off the diagonals of :math:`R A_k R^T`.

    .. math:: \sum_k w_k \sum_{i \ne j} (R A_k R^T)_{ij}^2

    Symmetric matrices that commute have a common basis of eigenvectors, and R is that basis. Others have none, and R is
    the best compromise. In the plane of two rows the best angle is known in closed form (Jacobi angles). A step turns
    all planes at once by their angles. If that does not lower the energy, it turns them by less. If nothing else helps,
    it turns the best single plane, which always lowers it. The conjugate direction of the step before speeds this up.
    The result is optimal in every plane.

    Args:
        matrices: Symmetric ``(n, d, d)``.
        weights: ``(n,)``, not negative; None counts all alike.
        starts: How many starts: the eigenvectors of the mean, then random rotations. The best result is taken.
        tol: Largest angle, in radians, at which all planes count as optimal.
        tie_tol: Two rows tie if the matrices' diagonal entries differ between them by at most this share, as a root
            mean square over the matrices and beyond what lies between them off the diagonal.
        seed: Seed of the random starts.

    Returns:
        A `JointDiagonalization`, in float64.

    Raises:
        TypeError: If matrices or weights are not real floating-point tensors.
        ValueError: If shapes do not fit, values are not finite, all matrices are zero, or a setting is not valid.

    Accuracy:
        Rows are within ``tol`` of the optimum where it is unique. Where diagonal entries nearly tie, directions have no
        more digits than the matrices tell, and ``agreement`` shows it.

    Example:
        >>> from orthocond.directions import jointly_diagonalize
        >>> basis = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))[0]
        >>> matrices = torch.stack([basis.mT @ torch.diag(torch.rand(3).double()) @ basis for _ in range(5)])
        >>> found = jointly_diagonalize(matrices)
        >>> (found.rotation @ basis.mT).abs().round().sum(0)  # the rows of the basis, in another order
        tensor([1., 1., 1.], dtype=torch.float64)
        >>> found.energies["joint"] < 1e-9, found.agreement > 0.999
        (True, True)

    References:
        Cardoso, Souloumiac, *Jacobi Angles for Simultaneous Diagonalization* (1996).
    """
    check_count(starts, "jointly_diagonalize(starts=...)", 1)
    check_not_negative(tol, "jointly_diagonalize(tol=...)")
    check_not_negative(tie_tol, "jointly_diagonalize(tie_tol=...)")
    a = _weighted(matrices, weights)
    d = a.shape[-1]
    rng = torch.Generator().manual_seed(seed)
    mean = eigh(a.mean(0))[1].mT.flip(0)
    turns = [torch.randn(d, d, dtype=torch.float64, generator=rng).to(a.device) for _ in range(starts - 1)]
    runs = [_descend(a, start, tol) for start in (mean, *(torch.linalg.qr(turn)[0] for turn in turns))]
    best = min(runs, key=lambda run: run[1])
    order = (best[0] @ a @ best[0].mT).diagonal(dim1=-2, dim2=-1).mean(0).argsort(descending=True, stable=True)
    rotation = with_positive_largest(best[0][order])
    turned = rotation @ a @ rotation.mT
    ties = _tied(turned, tie_tol)
    free = [i for i in range(d) if not any(i in group for group in ties)]
    partners = [(rotation[free] @ run[0].mT).abs().amax(1) for run in runs if run is not best and free]
    return JointDiagonalization(
        rotation,
        (rotation @ symmetric_part(matrices.detach().double()) @ rotation.mT).diagonal(dim1=-2, dim2=-1),
        {"axes": off_diagonal(a), "mean": off_diagonal(mean @ a @ mean.mT), "joint": off_diagonal(turned)},
        ties,
        float(torch.cat(partners).min()) if partners else math.nan,
        best[2],
    )


def off_diagonal(matrices: Tensor) -> float:
    """Part of the squared entries that is off the diagonal."""
    squares = _of_unit_size(matrices).square()
    return max(0.0, float(1 - squares.diagonal(dim1=-2, dim2=-1).sum() / squares.sum()))


def _weighted(matrices: Tensor, weights: Tensor | None) -> Tensor:
    """The symmetric parts times the roots of the weights, float64."""
    a = check_square(matrices, "jointly_diagonalize").detach().double()
    if a.ndim != 3 or not a.numel():
        raise ValueError(f"jointly_diagonalize needs matrices of shape (n, d, d); got {tuple(a.shape)}.")
    if not a.isfinite().all():
        raise ValueError(f"jointly_diagonalize needs finite matrices; some of these {len(a)} hold NaN or infinity.")
    if weights is not None:
        w = torch.as_tensor(weights, dtype=torch.float64, device=a.device)
        if w.shape != (len(a),) or not bool((w.isfinite() & (w >= 0)).all()):
            raise ValueError(f"jointly_diagonalize(weights=...) needs {len(a)} finite numbers of at least 0; got {w}.")
        a = a * w.sqrt()[:, None, None]
    a = symmetric_part(a)
    if not a.any():
        raise ValueError(f"jointly_diagonalize needs a matrix that is not zero; all {len(a)} are, or have no weight.")
    return _of_unit_size(a)


def _of_unit_size(a: Tensor) -> Tensor:
    """The matrices divided by a power of two of about the size of their largest entry: squares stay in range."""
    return a / a.abs().max().log2().floor().exp2()


def _descend(a: Tensor, start: Tensor, tol: float) -> tuple[Tensor, float, bool]:
    """The rotation that a start ends in, its energy, and whether it came to rest.

    Matrices are kept as ``(d, n, d)``, so that a rotation of all of them is two large products.
    """
    total = float(a.square().sum())
    r = start
    b = _turn(a.transpose(0, 1).contiguous(), start)
    energy = _off(b, total)
    last: tuple[Tensor, Tensor, float] | None = None  # step, angles, and slope along them
    least = tol**2  # an angle changes the energy by its square
    for _ in range(_MOST_STEPS):
        angles, slopes, gains = _plane_angles(b)
        if float(angles.abs().max()) <= tol or energy == 0:
            return r, energy, True
        step = angles
        if last is not None:
            step = angles + max(0.0, float((slopes * (angles - last[1])).sum()) / last[2]) * last[0]
            step = step if float((slopes * step).sum()) > 0 else angles
        # The angles of all planes together may overshoot; the best plane alone does not.
        taken = _search(b, step, energy, total) or _search(b, _best_plane(angles, gains), energy, total)
        if taken is None:
            return r, energy, True
        w, b, lower, whole = taken
        progress, energy, r = energy - lower, lower, w @ r
        if progress < least * energy and last is None:
            return r, energy, True
        slope = float((angles * slopes).sum())
        last = (step, angles, slope) if whole and slope > 0 and progress >= least * energy else None
    return r, energy, False


def _turn(b: Tensor, w: Tensor) -> Tensor:
    return (w @ b.flatten(1)).unflatten(1, b.shape[1:]) @ w.mT


def _off(b: Tensor, total: float) -> float:
    """The energy; rotations keep the sum of all squares, so the diagonals tell."""
    return max(0.0, 1 - float(b.diagonal(dim1=0, dim2=2).square().sum()) / total)


def _plane_angles(b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Best angle of each plane, antisymmetric; slope of the energy along it; and what the plane alone would gain."""
    diagonal = b.diagonal(dim1=0, dim2=2)  # (n, d)
    squares = diagonal.square().sum(0)
    apart = squares[:, None] + squares - 2 * diagonal.mT @ diagonal
    between = 4 * b.square().sum(1)
    cross = (diagonal.mT[:, None] @ b)[:, 0]  # sum over n of b_pp b_pq
    mixed = 4 * (cross - cross.mT)
    gap = apart - between
    angles = torch.atan2(mixed, gap).tril(-1) / 4
    gains = (torch.hypot(mixed, gap) - gap).tril(-1)
    return angles - angles.mT, mixed, gains


def _best_plane(angles: Tensor, gains: Tensor) -> Tensor:
    i, j = divmod(int(gains.argmax()), len(gains))
    step = torch.zeros_like(angles)
    step[i, j], step[j, i] = angles[i, j], angles[j, i]
    return step


def _search(b: Tensor, step: Tensor, energy: float, total: float) -> tuple[Tensor, Tensor, float, bool] | None:
    """The longest of the step, its half, its quarter, … that lowers the energy, and whether it is the whole step."""
    for halvings in range(_HALVINGS):
        w = torch.linalg.matrix_exp(step / 2**halvings)
        turned = _turn(b, w)
        lower = _off(turned, total)
        if lower < energy:
            return w, turned, lower, halvings == 0
    return None


def _tied(turned: Tensor, tie_tol: float) -> tuple[tuple[int, ...], ...]:
    """Groups of rows whose planes have no angle that is better than another."""
    diagonal = turned.diagonal(dim1=-2, dim2=-1)
    difference = (diagonal[:, :, None] - diagonal[:, None, :]).square().sum(0) - 4 * turned.square().sum(0)
    size = torch.maximum(diagonal[:, :, None], diagonal[:, None, :]).square().sum(0)
    rounding = turned.shape[-1] * torch.finfo(turned.dtype).eps * diagonal.abs().max()
    tied = difference <= (tie_tol**2 * size).clamp_min(len(turned) * float(rounding) ** 2)
    groups: list[set[int]] = []
    for i in range(len(tied)):
        linked = {i, *tied[i].nonzero().flatten().tolist()}
        apart = [group for group in groups if not group & linked]
        groups = [*apart, linked.union(*(group for group in groups if group & linked))]
    return tuple(sorted(tuple(sorted(group)) for group in groups if len(group) > 1))
