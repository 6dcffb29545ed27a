"""The nearest orthogonal matrix: the orthogonal factor of the polar decomposition (paper: section 4.1)."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from orthocond._checks import (
    NotFiniteError,
    all_true,
    at_least_float32,
    can_read_freely,
    check_choice,
    check_count,
    check_floating,
    check_not_negative,
    smallest,
    without_autocast,
)
from orthocond.matrix import decompose
from orthocond.matrix.eigh import all_above, apply_root, root_eigenvalues
from orthocond.matrix.even_root import LEAST_ROWS, even_inverse_root, symmetric_product

# Largest condition number of the Gram matrix for which float32 is enough: the relative error measured is 4e-6.
_FLOAT32_CONDITION = 64.0
# Smallest eigenvalue of it for which float32 is enough: below 1e-38 products lose digits, and vanish.
_FLOAT32_SMALLEST = 1e-30
# Products of float32 sum up so many terms at most: longer sums lose digits.
_BLOCK = 2**13
# Rows or columns that are overwritten at a time: they stay in the cache.
_PIECE = 512
# Evenness of the eigenvalues, mean² / mean(λ²), from which float32 is worth an attempt: 0.5 where their logarithms are
# evenly spaced over the largest condition number, 0.14 over 1e6.
_EVENNESS = 0.3
# Rows of a Gram matrix up to which a decomposition costs no more than to look at its evenness, and float64 hardly more
# than an attempt in float32.
FEW_ROWS = 32
# Singular values of at least this fraction of the Frobenius norm converge under "polar-express". Smaller ones are lost
# to float32 rounding anyway: the iteration sees their squares.
_POLAR_EXPRESS_LOWER = 1e-4
# Each step is made for an interval longer by this factor: rounding can put a singular value above the interval's end,
# where a minimax polynomial grows so steeply that a few steps reach infinity.
_POLAR_EXPRESS_SAFETY = 1.01
# A step never shrinks a large singular value below about this share of the largest: it would lose as many digits.
_POLAR_EXPRESS_CUSHION = 0.1
# The quintic Newton-Schulz step, third order at 1: (15 x - 10 x³ + 3 x⁵) / 8.
_QUINTIC = (1.875, -1.25, 0.375)


@dataclass(frozen=True, kw_only=True)
class PolarMethod(ABC):
    """How a polar factor is computed: a frozen dataclass whose fields are its settings.

    A method of your own is a subclass with the method `factor`; `polar` accepts it.
    """

    @abstractmethod
    def factor(self, g: Tensor) -> Tensor:
        """Return the polar factors of matrices ``(*, m, n)`` with at least one entry, in their dtype, differentiably.

        Args:
            g: The matrices, wide or tall, not checked for NaN and infinity.
        """

    def prepare(self, g: Tensor, factor: float | Tensor = 1.0) -> Callable[[], Tensor]:
        """Do all that can fail, and return the call that gives ``factor`` times the polar factors.

        That call may overwrite ``g``, which then costs neither memory nor a copy. Not differentiable.

        Args:
            g: As for `factor`.
            factor: A number, or one on the device.
        """
        nearest = self.factor(g)
        return lambda: nearest * factor


@dataclass(frozen=True, kw_only=True)
class GramPolar(PolarMethod):
    r"""Eigendecomposition of the smaller Gram matrix, the fastest on CPUs: the default method of `polar`.

    :math:`(G G^T)^{-1/2} G` for wide G, :math:`G (G^T G)^{-1/2}` for tall G. Directions whose singular value is at or
    below the rank tolerance get 0. It can be differentiated twice.

    Attributes:
        rank_tol: Singular values at or below ``rank_tol * largest`` count as zero. None takes the rounding error of
            the input, its machine epsilon times the root of the longer side. It is never below 1e-8 times the root of
            twice the shorter side: the Gram matrix does not resolve smaller ones, even in float64.
        precision: ``"auto"`` computes in float32 where the condition number of a float32 or half-precision matrix is
            below 8, else in float64; ``"float64"`` always.

    Accuracy:
        About 1e-16 times the squared condition number in float64; below 1e-5 in float32 (measured: 4e-6).
    """

    rank_tol: float | None = None
    precision: str = "auto"

    def __post_init__(self) -> None:
        check_choice(self.precision, "GramPolar(precision=...)", ("auto", "float64"))
        if self.rank_tol is not None:
            check_not_negative(self.rank_tol, "GramPolar(rank_tol=...)")

    def factor(self, g: Tensor) -> Tensor:
        """See `PolarMethod.factor`."""
        root, work = self._root(g)
        nearest = _apply(root, work)
        return nearest if nearest.dtype == g.dtype else nearest.to(g.dtype)  # for a small matrix `to` costs a tenth

    def prepare(self, g: Tensor, factor: float | Tensor = 1.0) -> Callable[[], Tensor]:
        """See `PolarMethod.prepare`."""
        if not g.is_cpu or g.dtype == torch.float64:
            return super().prepare(g, factor)
        root = self._root(g)[0] * factor
        return lambda: _apply_(root, g)

    def _root(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """The inverse root of the smaller Gram matrix, and the matrices in its precision, of any size."""
        if self.precision == "auto" and g.dtype != torch.float64 and not torch.compiler.is_compiling():
            work = g.float()
            root = _root_in_float32(work)
            if root is not None:
                return root, work
        # Eigenvalues of the Gram matrix carry a rounding error of this size: smaller ones are noise.
        tol = max(_tolerance(self.rank_tol, g), math.sqrt(torch.finfo(torch.float64).eps * min(g.shape[-2:])))
        work = _of_unit_size(g)
        gram = _gram(work)
        values, vectors = decompose.eigh(gram.detach())
        return _inverse_root(work, gram, values, vectors, tol), work


@dataclass(frozen=True, kw_only=True)
class SVDPolar(PolarMethod):
    """Singular value decomposition in float64, for condition numbers above 1e6.

    Directions whose singular value is at or below the rank tolerance get 0. It can be differentiated twice.

    Attributes:
        rank_tol: Singular values at or below ``rank_tol * largest`` count as zero. None takes the rounding error of
            the input, its machine epsilon times the root of the longer side.
    """

    rank_tol: float | None = None

    def __post_init__(self) -> None:
        if self.rank_tol is not None:
            check_not_negative(self.rank_tol, "SVDPolar(rank_tol=...)")

    def factor(self, g: Tensor) -> Tensor:
        """See `PolarMethod.factor`."""
        work = _of_unit_size(g)
        wide = g.shape[-2] <= g.shape[-1]
        singular, vectors = decompose.svd((work if wide else work.mT).detach())
        values, vectors = singular.square().flip(-1), vectors.flip(-1)  # ascending, as those of eigh
        root = _inverse_root(work, _gram(work), values, vectors, _tolerance(self.rank_tol, g))
        return _apply(root, work).to(g.dtype)


@dataclass(frozen=True, kw_only=True)
class NewtonSchulzPolar(PolarMethod):
    """Cubic Newton-Schulz iteration ``X ← (3 X - X Xᵀ X) / 2`` in the input's precision, at least float32.

    It does not separate directions: it has no rank tolerance, and its gradient is that of the iteration.

    Attributes:
        steps: Number of steps. Each multiplies a small singular value by 1.5: 30 bring 1e-4 of the norm to 1.
    """

    steps: int = 30

    def __post_init__(self) -> None:
        check_count(self.steps, "NewtonSchulzPolar(steps=...)", 1)

    def factor(self, g: Tensor) -> Tensor:
        """See `PolarMethod.factor`."""
        return _iterate(g, ((1.5, -0.5, 0.0),) * self.steps)


@dataclass(frozen=True, kw_only=True)
class PolarExpress(PolarMethod):
    """Minimax-optimal quintic iteration of Amsel et al. (2025), finished by Newton-Schulz steps so that it converges.

    It needs only matrix products, which suits GPUs, in the input's precision, at least float32. It does not separate
    directions: it has no rank tolerance, leaves a singular value below 1e-4 of the Frobenius norm at less than 1, and
    its gradient is that of the iteration.

    Attributes:
        steps: Number of steps; None takes as many as singular values from 1e-4 of the norm need.
    """

    steps: int | None = None

    def __post_init__(self) -> None:
        if self.steps is not None:
            check_count(self.steps, "PolarExpress(steps=...)", 1)

    def factor(self, g: Tensor) -> Tensor:
        """See `PolarMethod.factor`."""
        schedule = polar_express_coefficients()
        if self.steps is not None:
            schedule = (schedule + (_QUINTIC,) * self.steps)[: self.steps]
        return _iterate(g, schedule)


_GRAM = GramPolar()
_DECOMPOSITIONS: dict[str, type[GramPolar | SVDPolar]] = {"gram": GramPolar, "svd": SVDPolar}
_ITERATIONS: dict[str, PolarMethod] = {"newton-schulz": NewtonSchulzPolar(), "polar-express": PolarExpress()}


def polar_method(name: str, rank_tol: float | None = None) -> PolarMethod:
    """The method with this name and rank tolerance, which only ``"gram"`` and ``"svd"`` can have."""
    check_choice(name, "polar(method=...)", (*_DECOMPOSITIONS, *_ITERATIONS))
    if name in _DECOMPOSITIONS:
        return _DECOMPOSITIONS[name](rank_tol=rank_tol)
    if rank_tol is not None:
        raise ValueError(f"A rank tolerance needs method='gram' or 'svd'; {name!r} has no ranks.")
    return _ITERATIONS[name]


def polar(g: Tensor, *, method: PolarMethod | str = _GRAM) -> Tensor:
    r"""Nearest matrix with orthonormal rows or columns: NOG of the paper.

    For :math:`G = U S V^T` (thin) returns :math:`U V^T`, the minimizer of :math:`\|G - R\|_F` over all R with
    orthonormal columns (or rows, if G is wide).

    `GramPolar` and `SVDPolar` give 0 to directions whose singular value is at or below the rank tolerance: noise is not
    promoted to a direction, and a zero matrix gives zero. They can be differentiated twice. The gradient of the other
    two is that of their iteration.

    Args:
        g: Matrices ``(*, m, n)``, wide or tall.
        method: How to compute it: `GramPolar`, `SVDPolar`, `NewtonSchulzPolar`, `PolarExpress`, or a `PolarMethod` of
            your own. The names ``"gram"``, ``"svd"``, ``"newton-schulz"`` and ``"polar-express"`` stand for the four
            with their default settings.

    Returns:
        The polar factors, with shape, dtype and device of ``g``.

    Raises:
        TypeError: If ``g`` is not a real floating-point tensor, or ``method`` is not a `PolarMethod` or a name.
        ValueError: If ``g`` has fewer than two dimensions or is not finite, or no method has that name.

    Accuracy:
        In float32 and at a condition number of 1e3 the relative error measured on 64 x 27 matrices is 3e-8 for the
        decompositions and 1e-5 for the iterations.

    Example:
        >>> g = torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.1, 0.0]])
        >>> polar(g)
        tensor([[1., 0., 0.],
                [0., 1., 0.]])
        >>> polar(g, method=GramPolar(rank_tol=0.05))
        tensor([[1., 0., 0.],
                [0., 0., 0.]])

    References:
        Song, Sebe, Wang (2022), section 4.1. Higham, *Functions of Matrices* (2008), chapter 8.
    """
    g = check_floating(g, "polar")
    if g.ndim < 2:
        raise ValueError(
            f"polar needs matrices (*, m, n); got shape {tuple(g.shape)}. Flatten a convolution weight with "
            ".flatten(1) first."
        )
    if isinstance(method, str):
        method = polar_method(method)
    if not isinstance(method, PolarMethod):
        hint = f" Add parentheses: {method.__name__}()." if isinstance(method, type) else ""
        raise TypeError(f"polar(method=...) needs a method such as GramPolar() or 'gram'; got {method!r}.{hint}")
    if g.numel() == 0:
        return g.clone()
    with without_autocast(g):
        return method.factor(g)


def _tolerance(rank_tol: float | None, g: Tensor) -> float:
    """The given tolerance, or the rounding error of the matrix."""
    return torch.finfo(g.dtype).eps * math.sqrt(max(g.shape[-2:])) if rank_tol is None else rank_tol


def _of_unit_size(g: Tensor) -> Tensor:
    """The matrices in float64. Those that are float64 already are divided by a power of two of about their size.

    The polar factor does not depend on the size. The squares of its float64 entries would overflow above 1e154.
    """
    if g.dtype != torch.float64:
        return g.double()
    largest = g.detach().abs().amax((-2, -1), keepdim=True)
    return g / torch.where((largest > 0) & (largest < math.inf), largest.log2().floor().exp2(), 1)


def _gram(x: Tensor) -> Tensor:
    """The smaller Gram matrix."""
    return _times_transpose(x if x.shape[-2] <= x.shape[-1] else x.mT)


def _times_transpose(x: Tensor) -> Tensor:
    """``X Xᵀ``; half of it on a CPU, where it has many rows."""
    if _is_large(x, x.shape[-2]):
        return _one_by_one(lambda one: symmetric_product(one, one.mT), x)
    return x @ x.mT


def _is_large(x: Tensor, rows: int) -> bool:
    """Whether a Gram matrix of so many rows is one of those that are worth some care, and nobody asks for gradients."""
    if rows < LEAST_ROWS or (x.requires_grad and torch.is_grad_enabled()):
        return False
    return type(x) is Tensor and can_read_freely(x)


def _one_by_one(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A function of each matrix."""
    found = [function(one) for one in x.reshape(-1, *x.shape[-2:])]
    return (torch.stack(found) if len(found) > 1 else found[0]).reshape(*x.shape[:-2], *found[0].shape)


def _apply(inverse: Tensor, x: Tensor) -> Tensor:
    """The inverse root of the smaller Gram matrix times X, from the side where it fits."""
    return inverse @ x if x.shape[-2] <= x.shape[-1] else x @ inverse


def _apply_(inverse: Tensor, x: Tensor) -> Tensor:
    """The same in place of X, where it can be viewed as a batch, piece by piece, in the precision of the root."""
    wide = x.shape[-2] <= x.shape[-1]
    batch = x.reshape(-1, *x.shape[-2:])
    for one, root in zip(batch, inverse.reshape(-1, *inverse.shape[-2:]), strict=True):
        for piece in one.split(_PIECE, dim=1 if wide else 0):
            work = piece.to(root.dtype)
            piece.copy_(root @ work if wide else work @ root)
    return batch.reshape(x.shape)


def _root_in_float32(work: Tensor) -> Tensor | None:
    """The inverse root by float32 work; None where the condition number is too large for it or cannot be read."""
    gram = _gram_by_blocks(work)
    found = gram.detach()
    if found.shape[-1] > FEW_ROWS and not _are_even(found):
        return None
    if _is_large(gram, gram.shape[-1]) and gram.numel() == gram.shape[-1] ** 2:
        root = even_inverse_root(gram.reshape(gram.shape[-2:]))
        if root is not None:
            return root.reshape(gram.shape)
    try:
        values, vectors = decompose.eigh(found)
    except NotFiniteError:  # float64 may still hold the squares, or tells which entries are to blame
        return None
    if not all_above(values, -_FLOAT32_SMALLEST, 1 / _FLOAT32_CONDITION):
        return None
    return apply_root(gram, values, values, vectors, True, True)


def _are_even(gram: Tensor) -> bool:
    """Whether the eigenvalues look even enough for float32, told without them. NaN and overflow are not even."""
    needed = _EVENNESS * gram.shape[-1]
    if gram.numel() == gram.shape[-1] ** 2 and type(gram) is Tensor and can_read_freely(gram):
        norm = float(torch.linalg.vector_norm(gram))  # the same in fewer operations
        return norm > 0 and (float(gram.reshape(gram.shape[-2:]).trace()) / norm) ** 2 > needed
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    evenness = smallest(trace.square() / gram.square().sum((-2, -1)))
    return evenness is not None and evenness > needed


def _gram_by_blocks(x: Tensor) -> Tensor:
    """The smaller Gram matrix in float32, of sums that are no longer than `_BLOCK` and added up in float64."""
    if max(x.shape[-2:]) <= 2 * _BLOCK:
        return _gram(x)
    if x.ndim > 2:
        return torch.stack([_gram_by_blocks(one) for one in x.flatten(0, -3)]).unflatten(0, x.shape[:-2])
    rows = x if x.shape[0] <= x.shape[1] else x.mT
    whole = rows.shape[1] - rows.shape[1] % _BLOCK
    blocks, rest = rows[:, :whole].unflatten(1, (-1, _BLOCK)).transpose(0, 1), rows[:, whole:]
    return (torch.bmm(blocks, blocks.mT).sum(0, dtype=torch.float64) + rest @ rest.mT).to(x.dtype)


def _inverse_root(work: Tensor, gram: Tensor, values: Tensor, vectors: Tensor, tol: float) -> Tensor:
    """The inverse root of the Gram matrix from its ascending eigenvalues; small ones count as zero."""
    complete = all_above(values, 0.0, tol**2)
    if complete is False and not all_true(values < math.inf):
        decompose.check_finite_batch(work)
    root = values if complete else root_eigenvalues(values, 0.0, tol**2)
    return apply_root(gram, values, root, vectors, True, bool(complete))


def _iterate(g: Tensor, schedule: tuple[tuple[float, float, float], ...]) -> Tensor:
    """Odd polynomials ``a x + b x³ + c x⁵`` of the singular values, which all tend to 1, by matrix products."""
    if g.shape[-2] < g.shape[-1]:
        return _iterate(g.mT, schedule).mT
    if all_true(g.isfinite()) is False:
        decompose.check_finite_batch(g)
    x = g.to(at_least_float32(g.dtype))
    # Two divisions, so that neither the squares of huge entries overflow nor those of tiny ones vanish.
    for norm in (x.abs().amax((-2, -1), keepdim=True), None):
        norm = torch.linalg.matrix_norm(x, keepdim=True) if norm is None else norm
        x = x / torch.where(norm == 0, 1, norm)
    for a, b, c in schedule:
        gram = x.mT @ x
        x = a * x + x @ (b * gram + c * gram @ gram if c else b * gram)
    return x.to(g.dtype)


@lru_cache
def polar_express_coefficients(lower: float = _POLAR_EXPRESS_LOWER) -> tuple[tuple[float, float, float], ...]:
    """Coefficients (a, b, c) of the steps ``a x + b x³ + c x⁵`` that bring ``[lower, 1]`` to 1.

    Each step is the best uniform approximation of 1 on the interval that the step before leaves, lengthened by 1 % for
    rounding and cut off at a tenth of its end, then scaled so that 1 is again in the middle of its values. The last two
    are Newton-Schulz steps, which take the rest from 1e-2 to below the rounding error of float32. Safety and cut-off
    are those of the published method, which has 0.02 for the cut-off, as it aims at bfloat16.

    Example:
        >>> [round(c, 3) for c in polar_express_coefficients(1e-3)[0]]
        [7.606, -18.473, 12.695]
    """
    steps = []
    low, high = lower, 1.0
    while high - low > 2e-2:
        end = high * _POLAR_EXPRESS_SAFETY
        start = max(low, _POLAR_EXPRESS_CUSHION * end)
        a, b, c = _minimax_quintic(start, end)
        least, most = a * low + b * low**3 + c * low**5, 2 - (a * start + b * start**3 + c * start**5)
        scale = 2 / (least + most)
        low, high = scale * least, scale * most
        steps.append((scale * a, scale * b, scale * c))
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
