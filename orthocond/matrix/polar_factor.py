"""The nearest orthogonal matrix: the orthogonal factor of the polar decomposition (paper: section 4.1)."""

import math
from functools import lru_cache

import torch
from torch import Tensor

from orthocond._checks import (
    all_true,
    at_least_float32,
    check_choice,
    check_count,
    check_floating,
    check_not_negative,
    without_autocast,
)
from orthocond.matrix import decompose
from orthocond.matrix.eigh import all_above, apply_root, root_eigenvalues

_METHODS = ("gram", "svd", "newton-schulz", "polar-express")

# Cubic Newton-Schulz multiplies a small singular value by 1.5 a step: 30 steps bring 1e-4 of the norm to 1.
_NEWTON_SCHULZ_STEPS = 30
# Singular values of at least this fraction of the Frobenius norm converge under "polar-express". Smaller ones are lost
# to float32 rounding anyway: the iteration sees their squares.
_POLAR_EXPRESS_LOWER = 1e-4
# The quintic Newton-Schulz step, third order at 1: (15 x - 10 x³ + 3 x⁵) / 8.
_QUINTIC = (1.875, -1.25, 0.375)


def polar(g: Tensor, *, method: str = "gram", rank_tol: float | None = None, steps: int | None = None) -> Tensor:
    r"""Nearest matrix with orthonormal rows or columns: NOG of the paper.

    For :math:`G = U S V^T` (thin) returns :math:`U V^T`, the minimizer of :math:`\|G - R\|_F` over all R with
    orthonormal columns (or rows, if G is wide).

    ``"gram"`` and ``"svd"`` give 0 to directions whose singular value is at or below the rank tolerance: noise is not
    promoted to a direction, and a zero matrix gives zero. They can be differentiated twice. The gradient of the other
    two is that of their iteration.

    Args:
        g: Matrices ``(*, m, n)``, wide or tall.
        method: ``"gram"``: eigendecomposition of the smaller Gram matrix in float64, the fastest on CPUs.
            ``"svd"``: singular value decomposition in float64, for condition numbers above 1e6.
            ``"newton-schulz"``: cubic iteration in the input's precision (float32 for half precision).
            ``"polar-express"``: minimax-optimal quintic iteration of Amsel et al. (2025), finished by Newton-Schulz
            steps so that it converges; matrix products alone, for GPUs.
        rank_tol: Singular values at or below ``rank_tol * largest`` count as zero. None takes the rounding error of
            the input, its machine epsilon times the root of the longer side. Not for the iterations: they cannot see
            single directions, and leave one of size s below 1e-4 of the norm at less than 1.
        steps: Number of iterations of the two iterations; None takes 30 for ``"newton-schulz"`` and as many as the
            minimax recursion needs for ``"polar-express"``.

    Returns:
        The polar factors, with shape, dtype and device of ``g``.

    Raises:
        TypeError: If ``g`` is not a real floating-point tensor.
        ValueError: If ``g`` has fewer than two dimensions or is not finite, or a setting is not valid.

    Accuracy:
        Of ``"gram"``: about 1e-16 times the squared condition number, and the rounding of the input's dtype. In
        float32 and at a condition number of 1e3 the relative error measured on 64 x 27 matrices is 3e-8 for
        ``"gram"`` and ``"svd"``, 1e-5 for the iterations.

    Example:
        >>> g = torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.1, 0.0]])
        >>> polar(g)
        tensor([[1., 0., 0.],
                [0., 1., 0.]])

    References:
        Song, Sebe, Wang (2022), section 4.1. Higham, *Functions of Matrices* (2008), chapter 8.
    """
    g = check_floating(g, "polar")
    if g.ndim < 2:
        raise ValueError(
            f"polar needs matrices (*, m, n); got shape {tuple(g.shape)}. Flatten a convolution weight with "
            ".flatten(1) first."
        )
    check_choice(method, "polar(method=...)", _METHODS)
    if g.numel() == 0:
        return g.clone()
    with without_autocast(g.device):
        if method in ("gram", "svd"):
            if steps is not None:
                raise ValueError(f"polar(steps=...) is for the iterations; method={method!r} has none.")
            return _by_decomposition(g, method, rank_tol)
        if rank_tol is not None:
            raise ValueError(f"polar(rank_tol=...) needs method='gram' or 'svd'; method={method!r} sees no ranks.")
        return _by_iteration(g, method, steps)


def _by_decomposition(g: Tensor, method: str, rank_tol: float | None) -> Tensor:
    """``(GGᵀ)^-1/2 G`` for wide G, ``G (GᵀG)^-1/2`` for tall G; singular values below the tolerance count as zero."""
    wide = g.shape[-2] <= g.shape[-1]
    short, long = min(g.shape[-2:]), max(g.shape[-2:])
    if rank_tol is None:
        rank_tol = torch.finfo(g.dtype).eps * math.sqrt(long)
    check_not_negative(rank_tol, "polar(rank_tol=...)")
    work = g.double()
    gram = work @ work.mT if wide else work.mT @ work
    if method == "gram":
        # Eigenvalues of the Gram matrix carry a rounding error of this size: smaller ones are noise.
        rank_tol = max(rank_tol, math.sqrt(torch.finfo(torch.float64).eps * short))
        values, vectors = decompose.eigh(gram.detach())
    else:
        singular, vectors = decompose.svd((work if wide else work.mT).detach())
        values, vectors = singular.square().flip(-1), vectors.flip(-1)  # ascending, as those of eigh
    complete = all_above(values, 0.0, rank_tol**2)
    if complete is False and not all_true(values < math.inf):
        decompose.check_finite_batch(g)
        raise ValueError("polar needs matrices whose squares are finite in float64; scale them down first.")
    root = values if complete else root_eigenvalues(values, 0.0, rank_tol**2)
    inverse = apply_root(gram, values, root, vectors, True, bool(complete))
    return (inverse @ work if wide else work @ inverse).to(g.dtype)


def _by_iteration(g: Tensor, method: str, steps: int | None) -> Tensor:
    """Odd polynomials of the singular values, which all tend to 1, by matrix products."""
    if g.shape[-2] < g.shape[-1]:
        return _by_iteration(g.mT, method, steps).mT
    if steps is not None:
        check_count(steps, "polar(steps=...)", 1)
    if all_true(g.isfinite()) is False:
        decompose.check_finite_batch(g)
    x = g.to(at_least_float32(g.dtype))
    # Two divisions, so that neither the squares of huge entries overflow nor those of tiny ones vanish.
    for norm in (x.abs().amax((-2, -1), keepdim=True), None):
        norm = torch.linalg.matrix_norm(x, keepdim=True) if norm is None else norm
        x = x / torch.where(norm == 0, 1, norm)
    if method == "newton-schulz":
        for _ in range(_NEWTON_SCHULZ_STEPS if steps is None else steps):
            x = 1.5 * x - 0.5 * x @ (x.mT @ x)
        return x.to(g.dtype)
    schedule = polar_express_coefficients()
    if steps is not None:
        schedule = (schedule + (_QUINTIC,) * steps)[:steps]
    for a, b, c in schedule:
        gram = x.mT @ x
        x = a * x + x @ (b * gram + c * gram @ gram)
    return x.to(g.dtype)


@lru_cache
def polar_express_coefficients(lower: float = _POLAR_EXPRESS_LOWER) -> tuple[tuple[float, float, float], ...]:
    """Coefficients (a, b, c) of the steps ``a x + b x³ + c x⁵`` that bring ``[lower, 1]`` to 1.

    Each step is the best uniform approximation of 1 on the interval that the step before leaves; the last two are
    Newton-Schulz steps, which take the rest from 1e-2 to below the rounding error of float32.

    Example:
        >>> [round(c, 3) for c in polar_express_coefficients(1e-3)[0]]
        [8.47, -25.108, 18.629]
    """
    steps = []
    low, high = lower, 1.0
    while high - low > 2e-2:
        step = _minimax_quintic(low, high)
        low = step[0] * low + step[1] * low**3 + step[2] * low**5
        high = 2 - low
        steps.append(step)
    return (*steps, _QUINTIC, _QUINTIC)


def _minimax_quintic(low: float, high: float) -> tuple[float, float, float]:
    """The odd quintic p with the least maximum of |1 - p| on ``[low, high]``, by the Remez exchange.

    Its error takes its extreme, with alternating sign, at both ends and at the two stationary points in between. The
    exchange solves for the coefficients with the points fixed, then moves the points to where p' = 0.
    """
    inner = ((3 * low + high) / 4, (low + 3 * high) / 4)
    error = math.inf
    while True:
        points = (low, inner[0], inner[1], high)
        rows = [[x, x**3, x**5, sign] for x, sign in zip(points, (1.0, -1.0, 1.0, -1.0), strict=True)]
        system = torch.tensor(rows, dtype=torch.float64)
        a, b, c, new_error = torch.linalg.solve(system, torch.ones(4, dtype=torch.float64)).tolist()
        if abs(new_error) <= error * (1 + 1e-12) and abs(error - abs(new_error)) < 1e-14 * (1 + error):
            return a, b, c
        error = abs(new_error)
        # p'(x) = a + 3 b x² + 5 c x⁴ = 0 has two roots x² on the interval.
        disc = math.sqrt(max(9 * b * b - 20 * a * c, 0.0))
        inner = (math.sqrt((-3 * b - disc) / (10 * c)), math.sqrt((-3 * b + disc) / (10 * c)))
