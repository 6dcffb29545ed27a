"""Square roots by matrix products: Newton-Schulz iteration, Padé and Taylor approximants (paper: section 2.1).

They approximate: a small eigenvalue comes out too large, which regularizes. The precision table in the documentation
gives their error at each condition number.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from orthocond._checks import at_least_float32, check_choice, check_count
from orthocond.matrix.solver import DifferentiableOnce, Solver
from orthocond.matrix.symmetric import add_ridge, symmetric_part

# Steps of the sign iteration that solves the Lyapunov equation of the backward pass, as in the literature. A step
# multiplies a small eigenvalue of the normalized root by 1.5: those below 1.5^-8 = 0.04 do not converge.
_LYAPUNOV_STEPS = 8


def _ridged(a: Tensor, eps: float) -> Tensor:
    return add_ridge(symmetric_part(a.to(at_least_float32(a.dtype))), eps)


def _divisor(norm: Tensor) -> Tensor:
    """The norm, and 1 for a zero matrix, shaped to divide matrices."""
    return torch.where(norm == 0, 1, norm)[..., None, None]


def _frobenius(p: Tensor) -> Tensor:
    """The Frobenius norm; no square overflows or vanishes, and the gradient at a zero matrix is 0, not NaN."""
    largest = p.detach().abs().amax((-2, -1))
    divisor = _divisor(largest)
    return torch.linalg.matrix_norm(p / divisor) * divisor[..., 0, 0]


@dataclass(frozen=True, kw_only=True)
class NewtonSchulz(Solver):
    r"""Coupled Newton-Schulz iteration, known as iSQRT-COV and, for whitening, IterNorm.

    :math:`Y_0 = A/c`, :math:`Z_0 = I`, then :math:`T = (3I - Z Y)/2`, :math:`Y \leftarrow Y T`,
    :math:`Z \leftarrow T Z`; the root is :math:`\sqrt c\, Y` and the inverse root :math:`Z / \sqrt c`. It needs only
    matrix products, so it suits GPUs. The gradient is that of the iteration itself, to any order.

    With N steps an eigenvalue below about :math:`1.5^{-2N} c` does not converge: 5 steps regularize, 20 solve.

    Attributes:
        steps: Number of iterations.
        normalize: What c is: the ``"trace"`` or the ``"frobenius"`` norm of each matrix.
    """

    steps: int = 5
    normalize: str = "trace"

    def __post_init__(self) -> None:
        check_count(self.steps, "NewtonSchulz(steps=...)", 1)
        check_choice(self.normalize, "NewtonSchulz(normalize=...)", ("trace", "frobenius"))

    def roots(self, a: Tensor, eps: float, kinds: tuple[str, ...]) -> tuple[Tensor, ...]:
        """See `Solver.roots`."""
        p = _ridged(a, eps)
        if self.normalize == "trace":
            norm = p.diagonal(dim1=-2, dim2=-1).sum(-1)
        else:
            norm = _frobenius(p)
        c = _divisor(norm)
        identity = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)
        y = p / c
        z = t = (3 * identity - y) / 2
        y = y @ t
        for _ in range(self.steps - 1):
            t = (3 * identity - z @ y) / 2
            y, z = y @ t, t @ z
        found = {"sqrt": y * c.sqrt(), "inv_sqrt": z / c.sqrt()}
        return tuple(symmetric_part(found[kind]).to(a.dtype) for kind in kinds)


@dataclass(frozen=True, kw_only=True)
class Pade(Solver):
    r"""Diagonal Padé approximant of the root with a Lyapunov gradient, known as MPA.

    With :math:`c = \|A\|_F` and :math:`n = 2 \cdot degree + 1`, the approximant of :math:`\sqrt{1 - z}` at
    :math:`I - A/c` is a ratio of two polynomials in :math:`A/c`, :math:`\sum_j \binom{n}{2j} (A/c)^j` over
    :math:`\sum_j \binom{n}{2j+1} (A/c)^j`; the inverse root is the inverted ratio. All coefficients are positive, so
    both are positive definite. The root of a zero eigenvalue is :math:`\sqrt c / n` instead of 0. Differentiable once,
    by 8 steps of the sign iteration for the Lyapunov equation.

    Attributes:
        degree: Degree of both polynomials.
    """

    degree: int = 5

    def __post_init__(self) -> None:
        check_count(self.degree, "Pade(degree=...)", 1)

    def roots(self, a: Tensor, eps: float, kinds: tuple[str, ...]) -> tuple[Tensor, ...]:
        """See `Solver.roots`."""
        return _approximate(self, a, eps, kinds)

    def value(self, p: Tensor, kind: str) -> Tensor:
        """The approximant of ``kind`` at matrices ``p`` of Frobenius norm at most 1."""
        n = 2 * self.degree + 1
        scale = 2.0 ** (1 - n)
        even = _polynomial(p, [math.comb(n, 2 * j) * scale for j in range(self.degree + 1)])
        odd = _polynomial(p, [math.comb(n, 2 * j + 1) * scale for j in range(self.degree + 1)])
        top, bottom = (even, odd) if kind == "sqrt" else (odd, even)
        return torch.cholesky_solve(top, torch.linalg.cholesky(symmetric_part(bottom)))


@dataclass(frozen=True, kw_only=True)
class Taylor(Solver):
    r"""Truncated power series of the root with a Lyapunov gradient, known as MTP.

    The series of :math:`\sqrt{1 - z}`, or of its inverse, at :math:`I - A/c` with :math:`c = \|A\|_F`. Less accurate
    than `Pade` of half the degree, without its linear system. Differentiable once, like `Pade`.

    Attributes:
        degree: Degree of the polynomial.
    """

    degree: int = 10

    def __post_init__(self) -> None:
        check_count(self.degree, "Taylor(degree=...)", 1)

    def roots(self, a: Tensor, eps: float, kinds: tuple[str, ...]) -> tuple[Tensor, ...]:
        """See `Solver.roots`."""
        return _approximate(self, a, eps, kinds)

    def value(self, p: Tensor, kind: str) -> Tensor:
        """The series of ``kind`` at matrices ``p`` of Frobenius norm at most 1."""
        power = 0.5 if kind == "sqrt" else -0.5
        coefficients = [1.0]
        for k in range(1, self.degree + 1):
            coefficients.append(coefficients[-1] * (k - 1 - power) / k)
        identity = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)
        return _polynomial(identity - p, coefficients)


def _polynomial(x: Tensor, coefficients: list[float]) -> Tensor:
    """``sum_k coefficients[k] x^k`` by Horner's rule."""
    identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    total = coefficients[-1] * identity.expand_as(x)
    for coefficient in reversed(coefficients[:-1]):
        total = x @ total + coefficient * identity
    return total


def _approximate(solver: Pade | Taylor, a: Tensor, eps: float, kinds: tuple[str, ...]) -> tuple[Tensor, ...]:
    p = _ridged(a, eps)
    return tuple(_LyapunovRoot.apply(p, kind, solver).to(a.dtype) for kind in kinds)


class _LyapunovRoot(Function):
    """An approximate root whose backward pass solves the Lyapunov equation of the exact one."""

    @staticmethod
    def forward(p: Tensor, kind: str, solver: Pade | Taylor) -> Tensor:
        c = _divisor(_frobenius(p))
        value = symmetric_part(solver.value(p / c, kind))
        return value * c.sqrt() if kind == "sqrt" else value / c.sqrt()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        p, ctx.kind, solver = inputs
        ctx.name = type(solver).__name__
        ctx.save_for_backward(p, output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        p, root = ctx.saved_tensors
        with torch.no_grad():
            h = symmetric_part(g)
            if ctx.kind == "inv_sqrt":
                # With S = A^-1/2, the gradient X solves S X + X S = -S² g S².
                inverse = root @ root
                h = -(inverse @ h @ inverse)
            gradient = _solve_lyapunov(root, h)
        return DifferentiableOnce.apply(gradient, p, g, ctx.name), None, None


def _solve_lyapunov(q: Tensor, g: Tensor) -> Tensor:
    r"""Solve ``Q X + X Q = G`` for symmetric positive definite Q by the Newton-Schulz sign iteration.

    The sign of :math:`\begin{pmatrix} Q & G \\ 0 & -Q \end{pmatrix}` has 2X in its upper right block.
    """
    norm = _divisor(_frobenius(q))
    b, c = q / norm, g / norm
    three = 3 * torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    for _ in range(_LYAPUNOV_STEPS):
        square = b @ b
        c = (c @ (three - square) - square @ c + b @ c @ b) / 2
        b = b @ (three - square) / 2
    return c / 2
