r"""Square roots by eigendecomposition, with the exact gradient (paper: appendix A, done without 1/(λi - λj)).

With :math:`A = U \operatorname{diag}(\lambda) U^T` and :math:`r = \sqrt\lambda`, the derivative of a matrix function
:math:`f` in the direction :math:`E` is :math:`U (F \circ U^T E U) U^T` with the divided differences
:math:`F_{ij} = (f_i - f_j) / (\lambda_i - \lambda_j)` (Daleckii and Krein). For the two roots they simplify to

* :math:`1 / (r_i + r_j)` for :math:`A^{1/2}`,
* :math:`-1 / (r_i r_j (r_i + r_j))` for :math:`A^{-1/2}`,

sums instead of differences, so equal eigenvalues are nothing special. A direction whose eigenvalue is zero (``r = 0``
below) is left out: both functions are 0 there and constant near it, which gives the finite differences
:math:`f_i / \lambda_i` between a kept and a left-out direction and 0 between two left-out ones.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.autograd.forward_ad import unpack_dual

from orthocond._checks import (
    all_true,
    at_least_float32,
    can_read_freely,
    check_choice,
    check_not_negative,
    in_transform,
    smallest,
    without_autocast,
)
from orthocond.matrix import decompose
from orthocond.matrix.solver import Solver
from orthocond.matrix.symmetric import symmetric_part

# Above this condition number float32 loses digits that users see: the gradient of the inverse root is off by 1e-3 at
# 1e4 and by 15 % at 1e6, so "auto" repeats the decomposition in float64.
_FLOAT32_CONDITION = 1e3


@dataclass(frozen=True, kw_only=True)
class Eigh(Solver):
    r"""Eigendecomposition with the exact gradient: the default solver.

    The gradient divides by sums of roots, never by eigenvalue gaps: it is exact where eigenvalues repeat, finite where
    they vanish, and can be differentiated a second time, in forward mode, under vmap and torch.compile.

    What counts as zero: rounding of the entries moves eigenvalues by about machine epsilon times the square root of n
    times the largest one. So a singular matrix in float32 has small eigenvalues of both signs.

    * Without ``eps``, eigenvalues at or below that size are left out: both roots are 0 in their directions, so
      `inv_sqrtm` of a singular matrix is the root of its pseudo-inverse.
    * With an ``eps`` below that size, they count as zero and get the ridge: the inverse root is ``1 / sqrt(eps)``.
    * A larger ``eps`` is added to the eigenvalues as they are.

    The gradient between a kept and a left-out direction is :math:`f_i / (\lambda_i - \lambda_j)`. Where two such
    eigenvalues are within a factor of 2, on both sides of the tolerance, :math:`\lambda_i / 2` takes the place of the
    gap: the gradient there is smaller than the true one, by 53 % of its norm in one test. An ``eps``, or a tolerance
    in a gap of the spectrum, avoids it.

    Attributes:
        precision: ``"input"`` computes in the input's dtype (float32 for half precision), ``"float64"`` in float64,
            ``"auto"`` in float32 while all condition numbers are below 1e3 and else again in float64. Where values
            cannot be read (torch.compile, vmap) ``"auto"`` means ``"float64"``.
        rank_tol: Eigenvalues at or below ``rank_tol * largest`` are left out, whatever ``eps`` is. None uses the rule
            above, in which the rounding error is that of the input's dtype.

    Accuracy:
        The errors of value and gradient grow like machine epsilon times the condition number; see the precision table
        in the documentation.
    """

    precision: str = "auto"
    rank_tol: float | None = None

    def __post_init__(self) -> None:
        check_choice(self.precision, "Eigh(precision=...)", ("auto", "input", "float64"))
        if self.rank_tol is not None:
            check_not_negative(self.rank_tol, "Eigh(rank_tol=...)")

    def roots(self, a: Tensor, eps: float, kinds: tuple[str, ...]) -> tuple[Tensor, ...]:
        """See `Solver.roots`."""
        # Measured on rank-deficient covariances of size 64 to 512: rounding makes eigenvalues of 1 to 5 machine
        # epsilons of what is zero.
        rounding = torch.finfo(a.dtype).eps * a.shape[-1] ** 0.5
        left_out = rounding if self.rank_tol is None and eps == 0 else self.rank_tol
        values, vectors, complete = self._decompose(symmetric_part(a.detach()), eps, rounding, left_out or 0.0)
        shifted = values + eps if eps else values
        root = shifted if complete else root_eigenvalues(values, eps, left_out)
        if vectors.dtype == a.dtype:
            return tuple([apply_root(a, shifted, root, vectors, kind == "inv_sqrt", complete) for kind in kinds])
        work = a.to(vectors.dtype)
        return tuple(
            [apply_root(work, shifted, root, vectors, kind == "inv_sqrt", complete).to(a.dtype) for kind in kinds]
        )

    def _decompose(self, a: Tensor, eps: float, rounding: float, left_out: float) -> tuple[Tensor, Tensor, bool]:
        """Eigenvalues and eigenvectors in the working precision, and whether it is known that none is left out."""
        ridge = 0.0 if left_out else eps  # the tolerance applies without the ridge
        if self.precision == "auto" and a.dtype != torch.float64 and not torch.compiler.is_compiling():
            values, vectors = decompose.eigh(a if a.dtype == torch.float32 else a.float())
            if all_above(values, ridge, max(left_out, 1 / _FLOAT32_CONDITION)):
                return values, vectors, True
        work = at_least_float32(a.dtype) if self.precision == "input" else torch.float64
        values, vectors = decompose.eigh(a if a.dtype == work else a.to(work))
        counts_zero = eps > 0 and self.rank_tol is None
        if counts_zero and all_above(values, 0.0, rounding):
            return values, vectors, True
        complete = all_above(values, ridge, left_out)
        if complete is False:
            self._check_semidefinite(a, values, eps)
        if counts_zero:
            values = count_rounding_as_zero(values, eps, rounding)
        return values, vectors, complete is True

    def _check_semidefinite(self, a: Tensor, values: Tensor, eps: float) -> None:
        """Raise a `ValueError` that names the first matrix that is not finite or not positive semi-definite."""
        low, size = values[..., 0].reshape(-1), values.abs().amax(-1).reshape(-1)
        # With the ridge, an eigenvalue may be as negative as rounding of the input or the rank tolerance explains.
        limit = max(torch.finfo(a.dtype).eps ** 0.5, self.rank_tol or 0.0)
        sound = low + eps >= -limit * size
        if all_true(sound.all() & a.isfinite().all()):  # one value is read where all is well
            return
        decompose.check_finite_batch(a)
        bad = (~sound).nonzero()
        if len(bad):
            index = int(bad[0])
            raise ValueError(
                f"Square roots need positive semi-definite matrices; matrix {index} of {len(low)} has eigenvalues down "
                f"to {float(low[index]):.3g} (largest size {float(size[index]):.3g}). Pass a covariance or a @ a.mT, "
                f"or shift it by more than {-float(low[index]):.3g} times the identity first."
            )


def all_above(values: Tensor, eps: float, fraction: float) -> bool | None:
    """Whether all ascending eigenvalues, with the ridge, are finite and above a fraction of the largest.

    This is the only value that is read, and in the usual case it is all that is needed; None where it cannot be read.
    An infinite eigenvalue makes the margin NaN or negative, so that the answer is no. A NaN does the same: LAPACK
    leaves one between sound eigenvalues where a row of the matrix is NaN on the diagonal and 0 elsewhere.
    """
    if values.numel() == values.shape[-1] and type(values) is Tensor and can_read_freely(values):
        entries = (values if values.ndim == 1 else values.flatten()).tolist()  # the same without small operations
        margin = entries[0] - fraction * entries[-1] + 0 * sum(entries)
    else:
        margin = smallest(torch.sub(values.amin(-1), values.select(-1, -1), alpha=fraction))
    return None if margin is None else margin > (fraction - 1) * eps


def count_rounding_as_zero(values: Tensor, eps: float, rounding: float) -> Tensor:
    """Set ascending eigenvalues up to the rounding error to 0 in matrices whose rounding error is above eps."""
    error = rounding * values[..., -1:]
    return torch.where((values <= error) & (error > eps), 0, values)


def root_eigenvalues(values: Tensor, eps: float, tol: float | None) -> Tensor:
    """Return ``sqrt(λ + eps)``, and 0 for each λ to leave out: at or below ``tol`` times the largest, or negative."""
    root = (values + eps).clamp(min=0).sqrt()
    if tol is None:
        return root
    return root * (values > tol * values[..., -1:])


def _inverse(root: Tensor) -> Tensor:
    """1/r, and 0 where r is 0."""
    return root / root.square().clamp(min=torch.finfo(root.dtype).tiny)


def _sums(root: Tensor) -> Tensor:
    """``1 / (r_i + r_j)``, and 0 where both are 0."""
    return _inverse(root.unsqueeze(-1) + root.unsqueeze(-2))


def _first_derivative(g: Tensor, values: Tensor, root: Tensor, u: Tensor, inverse: bool, complete: bool) -> Tensor:
    """``U (F ∘ Uᵀ sym(g) U) Uᵀ`` with F the divided differences of the root or of the inverse root.

    Where ``complete``, no direction is left out, and F is 1 / (r_i + r_j), or -1 / (r_i r_j (r_i + r_j)).
    """
    if not complete:
        return u @ (_rotate(u, g) * _first_differences(values, root, inverse)) @ u.mT
    root = values.sqrt()
    return _complete_derivative(g, root, u, u / root.unsqueeze(-2) if inverse else u, inverse)


def _complete_derivative(g: Tensor, root: Tensor, u: Tensor, v: Tensor, inverse: bool) -> Tensor:
    """The same where no direction is left out, with ``v = U diag(1 / r)`` for the inverse root and ``v = U`` else."""
    t = _product(_product(v.mT, g), v)
    t = (t + t.mT).div_(root.unsqueeze(-1) + root.unsqueeze(-2))
    return _product(_product(u, t), u.mT, -0.5 if inverse else 0.5)


def _product(a: Tensor, b: Tensor, factor: float = 1.0) -> Tensor:
    """``factor * a @ b`` by one operation: for batches ``a @ b`` takes several to find its way to it."""
    if a.ndim > 3:
        return a @ b if factor == 1 else (a @ b).mul_(factor)
    if factor == 1:
        return torch.bmm(a, b) if a.ndim == 3 else torch.mm(a, b)
    add = torch.baddbmm if a.ndim == 3 else torch.addmm
    return add(b, a, b, beta=0, alpha=factor)  # beta=0: its first argument is not read


def _first_differences(values: Tensor, root: Tensor, inverse: bool) -> Tensor:
    """Divided differences ``f[λi, λj]`` of the root or the inverse root, with f = 0 at left-out eigenvalues."""
    f = _inverse(root) if inverse else root
    kept = _sums(root)
    if inverse:
        kept = -f.unsqueeze(-1) * f.unsqueeze(-2) * kept
    # Between a kept i and a left-out j: f_i / (λi - λj). A gap below half of λi, of two eigenvalues on both sides of
    # the tolerance, counts as half of it: the jump of f there is no slope to follow.
    gap = torch.maximum(values.unsqueeze(-1) - values.unsqueeze(-2), values.unsqueeze(-1) / 2)
    border = torch.where((root > 0).unsqueeze(-1) & (root == 0).unsqueeze(-2), f.unsqueeze(-1) / gap, 0)
    both_kept = (root > 0).unsqueeze(-1) & (root > 0).unsqueeze(-2)
    return torch.where(both_kept, kept, border + border.mT)


def _rotate(u: Tensor, g: Tensor) -> Tensor:
    """The symmetric part of ``g`` in the eigenbasis."""
    return u.mT @ symmetric_part(g) @ u


def apply_root(a: Tensor, values: Tensor, root: Tensor, u: Tensor, inverse: bool, complete: bool) -> Tensor:
    """``f(A)`` for f the square root or its inverse, differentiable in A.

    Args:
        a: Symmetric matrices ``(*, n, n)``; only their gradient is of interest.
        values: Eigenvalues ``(*, n)`` of ``a``, with the ridge.
        root: Their square roots, 0 for those that are left out; not read where ``complete``.
        u: Eigenvectors ``(*, n, n)`` of ``a``.
        inverse: Whether f is the inverse root.
        complete: Whether it is known that no direction is left out, which makes the gradient cheaper.
    """
    if torch.compiler.is_compiling():  # torch.compile cannot trace a Function with a jvp
        return _RootReverse.apply(a, values, root, u, inverse, complete)
    if in_transform() or _has_tangent(a):
        return _Root.apply(a, values, root, u, inverse, complete)
    if not a.requires_grad or not torch.is_grad_enabled():
        return _Root.forward(a, values, root, u, inverse, complete)
    if complete:
        return _CompleteRoot.apply(a, values, u, inverse)
    return _Root.apply(a, values, root, u, inverse, complete)


def _derivative(a: Tensor, g: Tensor, values: Tensor, root: Tensor, u: Tensor, inverse: bool, complete: bool) -> Tensor:
    """``Df(A)[g]``, the derivative of f at A in the direction of the symmetric part of g."""
    if torch.compiler.is_compiling():
        return _DerivativeReverse.apply(a, g, values, root, u, inverse, complete)
    if _is_recorded(a, g):
        return _Derivative.apply(a, g, values, root, u, inverse, complete)
    return _Derivative.forward(a, g, values, root, u, inverse, complete)


def _is_recorded(*tensors: Tensor) -> bool:
    """Whether someone may ask for a derivative: not in a plain backward pass, an optimizer's step or for constants."""
    if torch.is_grad_enabled() and (in_transform() or any(t.requires_grad for t in tensors)):
        return True
    return _has_tangent(*tensors)


def _has_tangent(*tensors: Tensor) -> bool:
    """Whether one of them carries a derivative of forward mode, which begins by entering a level."""
    return forward_ad._current_level >= 0 and any(unpack_dual(t).tangent is not None for t in tensors)


class _KeepsInputs(Function):
    """Keeps all tensors for both modes of differentiation, and the two settings."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.inverse, ctx.complete = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)


class _RootReverse(_KeepsInputs):
    @staticmethod
    def forward(a: Tensor, values: Tensor, root: Tensor, u: Tensor, inverse: bool, complete: bool) -> Tensor:
        if complete:
            row = values.sqrt().unsqueeze(-2)
            return (u / row if inverse else u * row) @ u.mT
        return (u * (_inverse(root) if inverse else root).unsqueeze(-2)) @ u.mT

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        a, values, root, u = ctx.saved_tensors
        return _derivative(a, g, values, root, u, ctx.inverse, ctx.complete), None, None, None, None, None


class _Root(_RootReverse):
    @staticmethod
    def jvp(ctx: Any, ta: Tensor, *_: Any) -> Tensor:
        # The derivative is self-adjoint: forward and reverse mode apply the same operator.
        a, values, root, u = ctx.saved_tensors
        return _derivative(a, ta, values, root, u, ctx.inverse, ctx.complete)


class _CompleteRoot(Function):
    """The same at the least cost, for the usual case: no direction is left out, no transform, no forward mode."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, values: Tensor, u: Tensor, inverse: bool) -> Tensor:
        root = values.sqrt()
        row = root.unsqueeze(-2)
        v = u / row if inverse else u * row
        ctx.inverse = inverse
        ctx.save_for_backward(a, root, u, v if inverse else u)
        return _product(v, u.mT)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        a, root, u, v = ctx.saved_tensors
        if _is_recorded(a, g):
            return _derivative(a, g, root.square(), root, u, ctx.inverse, True), None, None, None
        with without_autocast(u):
            return _complete_derivative(g, root, u, v, ctx.inverse), None, None, None


class _DerivativeReverse(_KeepsInputs):
    """Linear and self-adjoint in g."""

    @staticmethod
    def forward(a: Tensor, g: Tensor, values: Tensor, root: Tensor, u: Tensor, inverse: bool, complete: bool) -> Tensor:
        with without_autocast(u):
            return _first_derivative(g, values, root, u, inverse, complete)

    @staticmethod
    def backward(ctx: Any, h: Tensor) -> tuple[Tensor | None, ...]:
        a, g, values, root, u = ctx.saved_tensors
        needs_a, needs_g = ctx.needs_input_grad[:2]
        roots = values.sqrt() if ctx.complete else root
        grad_a = SecondDerivative.apply(a, g, h, roots, u, ctx.inverse) if needs_a else None
        grad_g = _derivative(a, h, values, root, u, ctx.inverse, ctx.complete) if needs_g else None
        return grad_a, grad_g, None, None, None, None, None


class _Derivative(_DerivativeReverse):
    @staticmethod
    def jvp(ctx: Any, ta: Tensor | None, tg: Tensor | None, *_: Any) -> Tensor | int:
        a, g, values, root, u = ctx.saved_tensors
        roots = values.sqrt() if ctx.complete else root
        along_g = 0 if tg is None else _derivative(a, tg, values, root, u, ctx.inverse, ctx.complete)
        along_a = 0 if ta is None else SecondDerivative.apply(a, g, ta, roots, u, ctx.inverse)
        return along_g + along_a


class SecondDerivative(Function):
    r"""``D²f(A)[g, h]``, symmetric in both directions; not differentiable a third time.

    In the eigenbasis it is :math:`M_{ij} = \sum_k f[\lambda_i, \lambda_k, \lambda_j] (g_{ik} h_{kj} + h_{ik} g_{kj})`.
    The second divided differences are products of functions of (i, k), (k, j) and (i, j), so the sums are matrix
    products. Which of them holds depends on how many of the three directions are left out (r = 0): with x, y, z the
    three r, p = 1/r on kept directions and 0 on the others,

    ============  =============================  ==============================================
    left out      root                           inverse root
    ============  =============================  ==============================================
    none          -1 / ((x+y)(y+z)(z+x))         (x+y+z) / (xyz (x+y)(y+z)(z+x))
    z             the same with z = 0            -(x² + xy + y²) / (x³ y³ (x+y))
    y and z       1 / x³                         1 / x⁵
    ============  =============================  ==============================================
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, g: Tensor, h: Tensor, root: Tensor, u: Tensor, inverse: bool) -> Tensor:
        with without_autocast(u):
            half = _half_second(_rotate(u, g), _rotate(u, h), root, inverse)
            # For symmetric g and h the sum with g and h exchanged is the transpose.
            return u @ (half + half.mT) @ u.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError("Square roots by Eigh() can be differentiated twice; a third derivative was requested.")

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise RuntimeError("Square roots by Eigh() can be differentiated twice; a third derivative was requested.")


def _half_second(g: Tensor, h: Tensor, root: Tensor, inverse: bool) -> Tensor:
    """``sum_k f[λi, λk, λj] g_ik h_kj`` in the eigenbasis; the table of `SecondDerivative` row by row."""
    p, sums = _inverse(root), _sums(root)
    left_out = (root == 0).to(root.dtype)
    pi, pj, ni, nj = p.unsqueeze(-1), p.unsqueeze(-2), left_out.unsqueeze(-1), left_out.unsqueeze(-2)
    both = g * nj @ h
    if inverse:
        kept = (1 - ni) * (1 - nj) * sums
        cubic = -(pi * pj.pow(3) + pi.pow(2) * pj.pow(2) + pi.pow(3) * pj) * sums
        gk, hk = kept * g, kept * h
        through_p, through = gk * pj @ hk, gk @ hk
        total = kept * (through_p * (pi + pj) + pi * pj * through)
        total = total + cubic * both + ((cubic * g) @ h) * nj + ni * (g @ (cubic * h))
        power = 5
    else:
        total = -sums * ((sums * g) @ (sums * h))
        power = 3
    wi, wj = pi.pow(power), pj.pow(power)
    return total + (wi * nj + ni * wj) * both + ni * nj * (g * wj @ h)
