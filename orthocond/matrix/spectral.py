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
from torch.autograd import Function

from orthocond.matrix import decompose
from orthocond.matrix._common import at_least_float32, check_choice, check_not_negative, look, symmetric_part
from orthocond.matrix.solver import Solver

# Above this condition number float32 loses digits that users see: the gradient of the inverse root is off by 1e-3 at
# 1e4 and by 15 % at 1e6, so "auto" repeats the decomposition in float64.
_FLOAT32_CONDITION = 1e3


@dataclass(frozen=True)
class Eigh(Solver):
    """Eigendecomposition with the exact gradient: the default solver.

    The gradient divides by sums of roots, never by eigenvalue gaps: it is exact where eigenvalues repeat, finite where
    they vanish, and can be differentiated a second time, in forward mode, under vmap and torch.compile.

    Eigenvalues at or below the rank tolerance count as zero: both roots are 0 in their directions, so `inv_sqrtm` of a
    singular matrix without ``eps`` is the root of its pseudo-inverse.

    Attributes:
        precision: ``"input"`` computes in the input's dtype (float32 for half precision), ``"float64"`` in float64,
            ``"auto"`` in float32 while all condition numbers are below 1e3 and else again in float64. Where values
            cannot be read (torch.compile, vmap) ``"auto"`` means ``"float64"``.
        rank_tol: Eigenvalues at or below ``rank_tol * largest`` count as zero. None takes the rounding error of the
            input, its machine epsilon times the root of n, if ``eps`` is 0, and no tolerance if ``eps`` is positive.

    Accuracy:
        Error of value and gradient grow like machine epsilon times the condition number; see the precision table in
        the documentation.
    """

    precision: str = "auto"
    rank_tol: float | None = None

    def __post_init__(self) -> None:
        check_choice(self.precision, "Eigh(precision=...)", ("auto", "input", "float64"))
        if self.rank_tol is not None:
            check_not_negative(self.rank_tol, "Eigh(rank_tol=...)")

    def roots(self, a: Tensor, eps: float, kinds: tuple[str, ...]) -> tuple[Tensor, ...]:
        """See `Solver.roots`."""
        values, vectors = self._decompose(symmetric_part(a.detach()), eps)
        tol = self.rank_tol
        if tol is None and eps == 0:
            # Measured on rank-deficient covariances of size 64 to 512: rounding makes eigenvalues of 1 to 5 machine
            # epsilons of what is zero.
            tol = torch.finfo(a.dtype).eps * a.shape[-1] ** 0.5
        root = root_eigenvalues(values, eps, tol)
        work = a.to(vectors.dtype)
        return tuple(apply_root(work, values + eps, root, vectors, kind == "inv_sqrt").to(a.dtype) for kind in kinds)

    def _decompose(self, a: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Eigenvalues and eigenvectors in the working precision; reads one value to choose or check it."""
        if self.precision == "auto" and a.dtype != torch.float64 and not torch.compiler.is_compiling():
            values, vectors = decompose.eigh(a.float())
            well = values[..., 0] + eps >= (values[..., -1] + eps) / _FLOAT32_CONDITION
            if look((well & self._is_semidefinite(values, eps, a.dtype)).all()):
                return values, vectors
        work = at_least_float32(a.dtype) if self.precision == "input" else torch.float64
        values, vectors = decompose.eigh(a.to(work))
        semidefinite = self._is_semidefinite(values, eps, a.dtype)
        if look(semidefinite.all()) is False:
            _raise_for_spectrum(a, values, semidefinite)
        return values, vectors

    def _is_semidefinite(self, values: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        """Whether all is finite and, with the ridge, as little negative as rounding or the rank tolerance allows."""
        size = values.abs().amax(-1)
        limit = max(torch.finfo(dtype).eps ** 0.5, self.rank_tol or 0.0)
        return (size < torch.inf) & (values[..., 0] + eps >= -limit * size)


def _raise_for_spectrum(a: Tensor, values: Tensor, semidefinite: Tensor) -> None:
    """Raise a `ValueError` that names the first matrix that is not finite or not positive semi-definite."""
    decompose.check_finite_batch(a)
    low, size = values[..., 0].reshape(-1), values.abs().amax(-1).reshape(-1)
    index = int((~semidefinite).reshape(-1).nonzero()[0])
    raise ValueError(
        f"Square roots need positive semi-definite matrices; matrix {index} of {len(low)} has eigenvalues down to "
        f"{float(low[index]):.3g} (largest size {float(size[index]):.3g}). Pass a covariance or a @ a.mT, or "
        f"shift it by more than {-float(low[index]):.3g} times the identity first."
    )


def root_eigenvalues(values: Tensor, eps: float, tol: float | None) -> Tensor:
    """Return ``sqrt(λ + eps)``, and 0 for each λ to leave out: at or below ``tol`` times the largest, or negative."""
    root = (values + eps).clamp(min=0).sqrt()
    if tol is None:
        return root
    return torch.where(values > tol * values[..., -1:].clamp(min=0), root, 0)


def _inverse(root: Tensor) -> Tensor:
    """1/r, and 0 where r is 0."""
    return torch.where(root > 0, 1 / root, 0)


def _sums(root: Tensor) -> Tensor:
    """``1 / (r_i + r_j)``, and 0 where both are 0."""
    return _inverse(root.unsqueeze(-1) + root.unsqueeze(-2))


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


def apply_root(a: Tensor, values: Tensor, root: Tensor, u: Tensor, inverse: bool) -> Tensor:
    """``f(A)`` for f the square root or its inverse, differentiable in A.

    Args:
        a: Symmetric matrices ``(*, n, n)``; only their gradient is of interest.
        values: Eigenvalues ``(*, n)`` of ``a``, with the ridge.
        root: Their square roots, 0 for those that are left out.
        u: Eigenvectors ``(*, n, n)`` of ``a``.
        inverse: Whether f is the inverse root.
    """
    if torch.compiler.is_compiling():  # torch.compile cannot trace a Function with a jvp
        return _RootReverse.apply(a, values, root, u, inverse)
    return _Root.apply(a, values, root, u, inverse)


def _derivative(a: Tensor, g: Tensor, values: Tensor, root: Tensor, u: Tensor, inverse: bool) -> Tensor:
    """``Df(A)[g]``, the derivative of f at A in the direction of the symmetric part of g."""
    if torch.compiler.is_compiling():
        return _DerivativeReverse.apply(a, g, values, root, u, inverse)
    return _Derivative.apply(a, g, values, root, u, inverse)


class _RootReverse(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, values: Tensor, root: Tensor, u: Tensor, inverse: bool) -> Tensor:
        f = _inverse(root) if inverse else root
        return (u * f.unsqueeze(-2)) @ u.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.inverse = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        a, values, root, u = ctx.saved_tensors
        return _derivative(a, g, values, root, u, ctx.inverse), None, None, None, None


class _Root(_RootReverse):
    @staticmethod
    def jvp(ctx: Any, ta: Tensor, *_: Any) -> Tensor:
        # The derivative is self-adjoint: forward and reverse mode apply the same operator.
        a, values, root, u = ctx.saved_tensors
        return _derivative(a, ta, values, root, u, ctx.inverse)


class _DerivativeReverse(Function):
    """Linear and self-adjoint in g."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, g: Tensor, values: Tensor, root: Tensor, u: Tensor, inverse: bool) -> Tensor:
        with torch.autocast(u.device.type, enabled=False):
            return u @ (_first_differences(values, root, inverse) * _rotate(u, g)) @ u.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.inverse = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, h: Tensor) -> tuple[Tensor | None, ...]:
        a, g, values, root, u = ctx.saved_tensors
        grad_a = SecondDerivative.apply(a, g, h, root, u, ctx.inverse) if ctx.needs_input_grad[0] else None
        grad_g = _derivative(a, h, values, root, u, ctx.inverse) if ctx.needs_input_grad[1] else None
        return grad_a, grad_g, None, None, None, None


class _Derivative(_DerivativeReverse):
    @staticmethod
    def jvp(ctx: Any, ta: Tensor | None, tg: Tensor | None, *_: Any) -> Tensor | int:
        a, g, values, root, u = ctx.saved_tensors
        along_g = 0 if tg is None else _derivative(a, tg, values, root, u, ctx.inverse)
        along_a = 0 if ta is None else SecondDerivative.apply(a, g, ta, root, u, ctx.inverse)
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
        with torch.autocast(u.device.type, enabled=False):
            half = _half_second(_rotate(u, g), _rotate(u, h), root, inverse)
            # For symmetric g and h the sum with g and h exchanged is the transpose.
            return u @ (half + half.mT) @ u.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError("Square roots by Eigh() can be differentiated twice; a third derivative was asked for.")

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise RuntimeError("Square roots by Eigh() can be differentiated twice; a third derivative was asked for.")


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
