"""Eigendecompositions that are retried when they do not converge, and the count of those that did not."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]  # public, but missing from the stubs

from orthocond._checks import NotFiniteError, warn_onnx

# Relative size of the diagonal jitter of the last attempts: from the rounding level of float64 upwards, so that
# the smallest disturbance that lets LAPACK converge is the one used.
_JITTERS = (1e-14, 1e-12, 1e-10)


@dataclass
class SolverFailures:
    """How many matrices had a decomposition that did not converge; the paper's "failure times".

    Attributes:
        count: Matrices whose first attempt failed since the last `reset`.
        recovered: How many of them a retry (float64, then a diagonal jitter) solved.

    Example:
        >>> import orthocond
        >>> orthocond.solver_failures.reset()
        >>> orthocond.solver_failures
        SolverFailures(count=0, recovered=0)
    """

    count: int = 0
    recovered: int = 0

    def reset(self) -> None:
        """Set both counts to zero."""
        self.count = 0
        self.recovered = 0


solver_failures = SolverFailures()
"""The process-wide count of decompositions that did not converge."""


def eigh(a: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, ascending, and eigenvectors of symmetric ``(*, n, n)``; retried if it does not converge.

    Inside torch.compile and vmap the first failure is final.

    Raises:
        ValueError: If a matrix holds NaN or infinity.
        RuntimeError: If no attempt converges; the text names the matrix.
    """
    return _attempt("eigh", a)


def svd(a: Tensor) -> tuple[Tensor, Tensor]:
    """Singular values, descending, and left singular vectors of ``(*, m, n)``, m <= n; retried like `eigh`."""
    return _attempt("svd", a)


def _attempt(kind: str, a: Tensor) -> tuple[Tensor, Tensor]:
    if torch.compiler.is_compiling():
        warn_onnx("eigendecomposition")
        return _decompose(kind, a)
    try:
        return _decompose(kind, a)
    except LinAlgError:
        pass
    batch = a.reshape(-1, *a.shape[-2:])
    solved = [_retry(kind, matrix, index, len(batch)) for index, matrix in enumerate(batch)]
    values = torch.stack([v for v, _ in solved]).to(a.dtype)
    vectors = torch.stack([u for _, u in solved]).to(a.dtype)
    return values.reshape(*a.shape[:-2], -1), vectors.reshape(*a.shape[:-2], *vectors.shape[-2:])


def _decompose(kind: str, a: Tensor) -> tuple[Tensor, Tensor]:
    if kind == "eigh":
        values, vectors = torch.linalg.eigh(a)
        return values, vectors
    u, s, _ = torch.linalg.svd(a, full_matrices=False)
    return s, u


def _retry(kind: str, a: Tensor, index: int, total: int) -> tuple[Tensor, Tensor]:
    """Decompose one matrix: as it is, then in float64, then with growing jitter on its diagonal."""
    check_finite(a, index, total)
    try:
        return _decompose(kind, a)
    except LinAlgError:
        solver_failures.count += 1
    scale = a.abs().max().double()
    for jitter in (0.0, *_JITTERS):
        shifted = a.double()
        shifted.diagonal(dim1=-2, dim2=-1).add_(jitter * scale)
        try:
            values, vectors = _decompose(kind, shifted)
        except LinAlgError:
            continue
        solver_failures.recovered += 1
        return values, vectors
    raise RuntimeError(
        f"{kind} did not converge for {_describe(a, index, total)}, nor in float64, nor with a diagonal jitter of "
        f"{_JITTERS[-1]:g} times its largest entry. Use a larger eps, check the features that made it for "
        "overflow, or use a solver without a decomposition, such as NewtonSchulz()."
    )


def check_finite(a: Tensor, index: int = 0, total: int = 1) -> None:
    """Raise a `ValueError` if the matrix holds NaN or infinity; the text says how many and what to do."""
    bad = int((~torch.isfinite(a)).sum())
    if bad:
        raise NotFiniteError(
            f"Matrices need finite entries; {_describe(a, index, total)} has {bad} that are NaN or infinite. "
            "Look for an overflow or a division by zero before this call."
        )


def check_finite_batch(a: Tensor) -> None:
    """`check_finite` of each matrix of ``(*, m, n)``, so that the error names the first bad one."""
    batch = a.reshape(-1, *a.shape[-2:])
    for index, matrix in enumerate(batch):
        check_finite(matrix, index, len(batch))


def _describe(a: Tensor, index: int, total: int) -> str:
    rows, columns = a.shape
    entries = a[torch.isfinite(a)]
    low, high = (float(entries.min()), float(entries.max())) if entries.numel() else (math.nan, math.nan)
    return f"matrix {index} of {total} ({rows}x{columns}, {a.dtype}, finite entries in [{low:.3g}, {high:.3g}])"
