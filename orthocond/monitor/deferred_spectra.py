"""Spectra that are recorded in training: matrices are kept, and decomposed together when it is time."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]  # public, but missing from the stubs

from orthocond.matrix import matrix_view
from orthocond.matrix.spectra import Spectrum, rank_tolerance, summarize
from orthocond.monitor.history import QUANTITIES, Record

# Bytes of matrices that wait for their decomposition: enough for hundreds of steps, little beside any model.
_LIMIT = 2**24


@dataclass
class _Pending:
    """Matrices ``(k, n, n)`` whose eigenvalues belong into a record."""

    record: Record
    prefix: str
    matrices: Tensor
    eps: float
    tol: float
    singular: bool  # Gram matrices: the facts are those of the roots of their eigenvalues
    worst: bool


class DeferredSpectra:
    """Fills records with the facts of spectra, late and in batches, so that a step waits for no device."""

    def __init__(self) -> None:
        self._pending: list[_Pending] = []
        self._scalars: list[tuple[Record, str, Tensor, float]] = []

    def add_covariances(self, record: Record, covariances: Tensor, eps: float, tol: float) -> None:
        """The facts of covariances ``(k, n, n)``, median and worst."""
        self._pending.append(_Pending(record, "", covariances, eps, tol, singular=False, worst=True))

    def add_matrix(self, record: Record, prefix: str, tensor: Tensor, groups: int) -> None:
        """The facts of the singular values of a weight or gradient, the median over its groups."""
        gram, tol = gram_matrices(tensor, groups)
        self._pending.append(_Pending(record, prefix, gram, 0.0, tol, singular=True, worst=False))

    def add_scalar(self, record: Record, key: str, value: Tensor, divisor: float = 1.0) -> None:
        """One number that is still on a device."""
        self._scalars.append((record, key, value, divisor))

    @property
    def full(self) -> bool:
        """Whether it is time to decompose what waits."""
        return sum(pending.matrices.nbytes for pending in self._pending) > _LIMIT

    def settle(self) -> None:
        """Decompose what waits, and write all facts into their records."""
        waiting, self._pending = self._pending, []
        alike: dict[Any, list[_Pending]] = {}
        for pending in waiting:
            alike.setdefault((pending.matrices.shape[-1], pending.matrices.device), []).append(pending)
        for batch in alike.values():
            values = eigenvalues_or_nan(torch.cat([pending.matrices for pending in batch])).cpu()
            for pending, part in zip(batch, values.split([len(pending.matrices) for pending in batch]), strict=True):
                _write(pending, part)
        scalars, self._scalars = self._scalars, []
        for record, key, value, divisor in scalars:
            record[key] = float(value) / divisor


def gram_matrices(tensor: Tensor, groups: int) -> tuple[Tensor, float]:
    """The smaller Gram matrices ``(groups, n, n)`` of a weight in float64, and the tolerance of its rank."""
    whole: Any = tensor.detach()
    if hasattr(whole, "full_tensor"):  # a DTensor: a condition number needs all of it
        whole = whole.full_tensor()
    matrix = matrix_view(whole.double(), groups)
    matrix = matrix if groups > 1 else matrix.unsqueeze(0)
    longer = max(matrix.shape[-2:])
    # The Gram matrix squares the singular values, so that float64 resolves them to the root of its rounding.
    tol = max(rank_tolerance(None, longer, tensor.dtype), rank_tolerance(None, longer, torch.float64) ** 0.5)
    return (matrix.mT @ matrix if matrix.shape[-2] > matrix.shape[-1] else matrix @ matrix.mT), tol


def spectrum_of(values: Tensor, eps: float, tol: float) -> Spectrum:
    """The `Spectrum` of ascending eigenvalues ``(*, n)``."""
    return summarize(values.flip(-1), values.shape[-1], eps, tol)


def eigenvalues_or_nan(matrices: Tensor) -> Tensor:
    """Ascending eigenvalues; NaN for matrices that are not finite or do not converge, so that nothing stops."""
    finite = matrices.isfinite().all(-1).all(-1)
    safe = torch.where(finite[:, None, None], matrices, 0)
    try:
        values = torch.linalg.eigvalsh(safe)
    except LinAlgError:
        if len(matrices) == 1:
            return matrices.new_full(matrices.shape[:-1], torch.nan)
        values = torch.cat([eigenvalues_or_nan(matrix.unsqueeze(0)) for matrix in safe])
    return torch.where(finite[:, None], values, torch.nan)


def _write(pending: _Pending, values: Tensor) -> None:
    found = spectrum_of(values.clamp(min=0).sqrt() if pending.singular else values, pending.eps, pending.tol)
    known = ~values.isnan().any(-1)
    for key in QUANTITIES:
        each = torch.where(known, getattr(found, key).double(), torch.nan)
        number = int if key == "rank" and bool(known.any()) else float
        pending.record[pending.prefix + key] = number(each.nanmedian())
        if pending.worst:
            some = each[~each.isnan()]
            least = key in ("rank", "smallest")
            worst = (some.min() if least else some.max()) if len(some) else each[0]
            pending.record[f"{key}_worst"] = number(worst)
