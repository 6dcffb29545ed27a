"""Inverse roots of matrices whose eigenvalues lie close together: a polynomial by products, and half of each product.

A large Gram matrix of independent entries has such eigenvalues, and so has that of a matrix that is nearly orthogonal.
A polynomial of degree 12 costs five products, half of what an eigendecomposition of 512 rows takes.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

# Rows from which half of a product is worth its loop, and from which the polynomial is quicker than a decomposition.
LEAST_ROWS = 192
# Rows of a product that are computed at a time, up to the diagonal.
_BLOCK = 128
# Largest error of the polynomial, relative to the root, and what its check by random vectors may show: their number
# makes that right to a third where a few directions are to blame.
_TOLERANCE = 3e-6
_SHOWN = 2e-6
_PROBES = 16
# Degrees with the powers that are computed for them: powers + degree / powers - 2 products.
_DEGREES = {2: 2, 4: 2, 6: 3, 9: 3, 12: 4, 16: 4}


def symmetric_product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """``a @ b`` where it is known to be symmetric, not differentiable: 5/8 of the product of 512 rows.

    Args:
        a: A matrix ``(n, k)``.
        b: A matrix ``(k, n)``.
        out: A symmetric matrix to which it is added, in place. None starts from nothing.
    """
    n = len(a)
    found = a.new_empty(n, n) if out is None else out
    for start in range(0, n, _BLOCK):
        end = min(start + _BLOCK, n)
        lower = found[start:end, :end]
        torch.addmm(lower, a[start:end], b[:, :end], beta=0 if out is None else 1, out=lower)
        found[:start, start:end] = lower[:, :start].mT
    return found


def even_inverse_root(a: Tensor) -> Tensor | None:
    r"""``A^-1/2`` of a positive definite matrix, where a polynomial does it to 3e-6; else None. Not differentiable.

    Mean and variance of the eigenvalues are known without them. For a Gram matrix of independent entries they give the
    two ends of the spectrum, :math:`\mu (1 \pm s)^2` with :math:`s^2` the variance over :math:`\mu^2` (Marchenko and
    Pastur). Whether this holds is not assumed: the result X is checked by :math:`v^T X A X = v^T` for random vectors.

    Args:
        a: A symmetric matrix ``(n, n)`` whose values can be read.
    """
    n = len(a)
    mean = float(a.trace()) / n
    if not 0 < mean < math.inf:
        return None
    variance = (float(torch.linalg.vector_norm(a)) / mean) ** 2 / n - 1
    if not variance < 1:
        return None
    found = _polynomial(math.ceil(100 * math.sqrt(max(variance, 0.0)) + 0.5))
    if found is None:
        return None
    middle, half, coefficients = found
    x = a / (mean * half)
    x.diagonal().sub_(middle / half)
    root = _evaluate(x, [c / math.sqrt(mean) for c in coefficients])
    vectors = _probes(n)
    error = vectors @ root @ a @ root - vectors
    return root if float(torch.linalg.vector_norm(error)) < 2 * _SHOWN * math.sqrt(n * _PROBES) else None


@lru_cache
def _polynomial(percent: int) -> tuple[float, float, list[float]] | None:
    """Middle and half length of ``[(1 - s)², (1 + s)²]``, and the polynomial on it, mapped to [-1, 1], for 1 / √x.

    It interpolates at Chebyshev's points, with the least degree that is precise enough; None if there is none.
    """
    s = percent / 100
    middle, half = 1 + s * s, 2 * s
    fine = torch.linspace(-1, 1, 1000, dtype=torch.float64)
    for degree in _DEGREES:
        powers = torch.arange(degree + 1, dtype=torch.float64)
        points = torch.cos(math.pi * (powers + 0.5) / (degree + 1))
        coefficients = torch.linalg.solve(points[:, None] ** powers, (middle + half * points).rsqrt())
        error = (fine[:, None] ** powers) @ coefficients * (middle + half * fine).sqrt() - 1
        if error.abs().max() < _TOLERANCE:
            return middle, half, coefficients.tolist()
    return None


def _evaluate(x: Tensor, coefficients: list[float]) -> Tensor:
    """The polynomial of a symmetric matrix, by the method of Paterson and Stockmeyer."""
    degree = len(coefficients) - 1
    count = _DEGREES[degree]
    powers = [x]
    while len(powers) < count:
        powers.append(symmetric_product(powers[-1], x))
    result = powers[-1] * coefficients[degree]
    for start in range(degree - count, -1, -count):
        part = powers[0] * coefficients[start + 1]
        for power, coefficient in zip(powers[1:-1], coefficients[start + 2 :], strict=False):
            part.add_(power, alpha=coefficient)
        part.diagonal().add_(coefficients[start])
        result = part.add_(result) if start == degree - count else symmetric_product(result, powers[-1], part)
    return result


@lru_cache
def _probes(n: int) -> Tensor:
    return torch.randn(_PROBES, n, generator=torch.Generator().manual_seed(0))
