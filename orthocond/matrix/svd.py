r"""The SVD layer of the literature: the gradient of appendix A and the remedies for its 1/(λi - λj).

They are here to be compared with; `Eigh` is right where each of them is not.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from orthocond._checks import all_true, at_least_float32, check_choice, check_count
from orthocond.matrix import decompose
from orthocond.matrix.solver import DifferentiableOnce, Solver
from orthocond.matrix.symmetric import add_ridge, symmetric_part

# What the releases' Padé approximant has in place of 1 - x = 0: a rounding error of float64.
_PADE_ROUNDING = 1e-16
_GRADIENTS = ("plain", "truncated", "top", "taylor", "pade")


@dataclass(frozen=True, kw_only=True)
class SVD(Solver):
    r"""Singular value decomposition with a gradient from the literature (paper: appendix A).

    The gradient is :math:`U (K^T \circ (U^T \partial l/\partial U) + \operatorname{diag}(\partial l/\partial \lambda))
    U^T`, symmetrized, with :math:`K_{ij} = 1 / (\lambda_i - \lambda_j)`, which explodes for close eigenvalues, or one
    of the remedies. Differentiable once; use `Eigh` for exact results.

    Attributes:
        gradient: What K is.

            * ``"plain"``: :math:`1 / (\lambda_i - \lambda_j)`.
            * ``"truncated"``: the plain one, clipped to ±1e10.
            * ``"top"``: the plain one; only the ``keep`` largest eigenvalues and their vectors carry gradient.
            * ``"taylor"``: :math:`\sum_{k=0}^{K} x^k / \lambda_{max}`, with x the ratio of the smaller to the larger
              eigenvalue of the pair and K the ``degree``; 9 and 100 are the degrees of the literature. Bounded, biased.
            * ``"pade"``: what the paper uses. Its [50/50] approximant of 1/(1 - x) is 1/(1 - x) itself, since that is
              a rational function already: this is the plain gradient, except at ties and for pairs with 1 - x below
              1e-12, where the releases' coefficients are rounding noise.
        ties: What K is for two equal eigenvalues.

            * ``"zero"``: 0, for ``"pade"`` also where 1 - x is below 1e-12. K is antisymmetric.
            * ``"released"``: what the authors' code does. Both entries of a tied pair are positive, so K is not
              antisymmetric there and the gradient is wrong by many orders of magnitude: for ``"plain"`` the largest
              finite entry of K in the batch, for ``"truncated"`` 1e10, for ``"taylor"`` the degree + 1 over the
              eigenvalue, for ``"pade"`` 1e16 over it (the releases compute a quotient of rounding errors, of this size
              and any sign). ``"top"`` overwrites the eigenvalues it leaves out by machine epsilon, in the value too,
              which ties them.
        degree: Degree K of ``"taylor"``.
        keep: Number of eigenvalues of ``"top"``; None keeps all but 50, as the releases do (all, if there are at most
            50).
        precision: ``"float64"``, as the releases, or ``"input"``.

    Eigenvalues at or below machine epsilon are set to it, as in the releases: those of a singular matrix are tied.
    """

    gradient: str = "plain"
    ties: str = "zero"
    degree: int = 9
    keep: int | None = None
    precision: str = "float64"

    def __post_init__(self) -> None:
        check_choice(self.gradient, "SVD(gradient=...)", _GRADIENTS)
        check_choice(self.ties, "SVD(ties=...)", ("zero", "released"))
        check_choice(self.precision, "SVD(precision=...)", ("float64", "input"))
        check_count(self.degree, "SVD(degree=...)", 0)
        if self.keep is not None:
            check_count(self.keep, "SVD(keep=...)", 1)

    def roots(self, a: Tensor, eps: float, kinds: tuple[str, ...]) -> tuple[Tensor, ...]:
        """See `Solver.roots`."""
        work = torch.float64 if self.precision == "float64" else at_least_float32(a.dtype)
        p = add_ridge(symmetric_part(a.to(work)), eps)
        values, u = decompose.svd(p.detach())
        self._check_definite(p.detach(), values, a.dtype)
        values = values.clamp(min=torch.finfo(work).eps)
        if self.gradient == "top" and self.ties == "released":
            values = torch.where(self._carries_gradient(values), values, torch.finfo(work).eps)
        return tuple(_SVDRoot.apply(p, values, u, kind == "inv_sqrt", self).to(a.dtype) for kind in kinds)

    def _check_definite(self, p: Tensor, values: Tensor, dtype: torch.dtype) -> None:
        """The sum of the singular values is the trace if, and only if, no eigenvalue is negative."""
        total = values.sum(-1)
        trace = p.diagonal(dim1=-2, dim2=-1).sum(-1)
        if all_true(total - trace <= torch.finfo(dtype).eps ** 0.5 * total) is False:
            decompose.check_finite_batch(p)
            raise ValueError(
                "Square roots need positive semi-definite matrices; the singular values of at least one matrix add up "
                "to more than its trace, so it has negative eigenvalues. Pass a covariance or a @ a.mT."
            )

    def inverse_gaps(self, values: Tensor) -> Tensor:
        """The matrix K for descending eigenvalues ``(*, n)``, diagonal 0."""
        rows, columns = values.unsqueeze(-1), values.unsqueeze(-2)
        gap = rows - columns
        if self.gradient in ("taylor", "pade"):
            larger = torch.maximum(rows, columns)
            k = gap.sign() / larger * self._geometric_sum(torch.minimum(rows, columns) / larger)
        else:
            k = torch.where(gap == 0, 0, 1 / gap)
        if self.ties == "released":
            k = torch.where(gap == 0, self._released(k, values), k)
            k = k - torch.diag_embed(k.diagonal(dim1=-2, dim2=-1))
        if self.gradient == "truncated":
            k = k.clamp(-1e10, 1e10)
        if self.gradient == "top" and self.ties == "zero":
            kept = self._carries_gradient(values)
            k = k * (kept.unsqueeze(-1) & kept.unsqueeze(-2))
        return k

    def _released(self, k: Tensor, values: Tensor) -> Tensor:
        """What the releases have at a tie: the same number, and sign, in both entries."""
        if self.gradient == "taylor":
            return (self.degree + 1) / values.unsqueeze(-1)
        if self.gradient == "pade":
            return 1 / (_PADE_ROUNDING * values.unsqueeze(-1))
        return k.new_full((), 1e10) if self.gradient == "truncated" else k.amax()

    def _geometric_sum(self, ratio: Tensor) -> Tensor:
        """1 + x + x² + ... for a ratio x in [0, 1]: to the degree for "taylor", to its limit 1/(1-x) for "pade"."""
        if self.gradient == "pade":
            least = 1e-12 if self.ties == "zero" else 0.0
            return torch.where(1 - ratio <= least, 0, 1 / (1 - ratio))
        # (1 - x^(K+1)) / (1 - x) without cancellation near x = 1.
        log = ratio.log()
        return torch.where(ratio == 1, self.degree + 1.0, torch.expm1((self.degree + 1) * log) / torch.expm1(log))

    def _carries_gradient(self, values: Tensor) -> Tensor:
        """Which of the descending eigenvalues carry gradient, ``(n,)``."""
        n = values.shape[-1]
        return torch.arange(n, device=values.device) < self.kept(n)

    def kept(self, n: int) -> int:
        """How many eigenvalues of n carry gradient."""
        if self.gradient != "top":
            return n
        if self.keep is None:
            return n - 50 if n > 50 else n
        return min(self.keep, n)


class _SVDRoot(Function):
    """The forward and backward pass of appendix A, term by term."""

    @staticmethod
    def forward(p: Tensor, values: Tensor, u: Tensor, inverse: bool, solver: SVD) -> Tensor:
        power = -0.5 if inverse else 0.5
        return (u * values.pow(power).unsqueeze(-2)) @ u.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.inverse, ctx.solver = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        p, values, u = ctx.saved_tensors
        with torch.no_grad():
            gradient = _appendix_gradient(g, values, u, ctx.inverse, ctx.solver)
        return DifferentiableOnce.apply(gradient, p, g, "SVD"), None, None, None, None


def _appendix_gradient(g: Tensor, values: Tensor, u: Tensor, inverse: bool, solver: SVD) -> Tensor:
    power = -0.5 if inverse else 0.5
    grad_u = (g + g.mT) @ (u * values.pow(power).unsqueeze(-2))
    grad_values = power * values.pow(power - 1) * (u * (g @ u)).sum(-2)
    if solver.ties == "zero":
        grad_values = grad_values * solver._carries_gradient(values)
    inner = solver.inverse_gaps(values).mT * (u.mT @ grad_u) + torch.diag_embed(grad_values)
    return symmetric_part(u @ inner @ u.mT)
