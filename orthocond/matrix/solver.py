"""The interface that all solvers of square roots share."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd import Function


@dataclass(frozen=True, kw_only=True)
class Solver(ABC):
    """How a square root is computed: a frozen dataclass whose fields are its settings.

    A solver of your own is a subclass with the method `roots`; every function and layer accepts it.
    """

    @abstractmethod
    def roots(self, a: Tensor, eps: float, kinds: tuple[str, ...]) -> tuple[Tensor, ...]:
        """Return the roots of the symmetric part of ``a`` plus ``eps`` times the identity, differentiably.

        Args:
            a: Matrices ``(*, n, n)`` with at least one entry.
            eps: Ridge added to every eigenvalue, at least 0.
            kinds: Which roots: ``"sqrt"`` and/or ``"inv_sqrt"``.

        Returns:
            One tensor ``(*, n, n)`` of the dtype of ``a`` for each kind, in that order.
        """


def check_solver(solver: object, name: str) -> Solver:
    """Return ``solver`` if it is a `Solver`, else raise a `TypeError`."""
    if not isinstance(solver, Solver):
        hint = f" Add parentheses: {solver.__name__}()." if isinstance(solver, type) else ""
        raise TypeError(f"{name} needs a solver such as Eigh() or NewtonSchulz(steps=5); got {solver!r}.{hint}")
    return solver


class DifferentiableOnce(Function):
    """Pass a gradient on, and raise if it is differentiated.

    ``apply(gradient, a, g, name)``: the matrix ``a`` and the incoming gradient ``g`` are what it depends on. (torch's
    ``once_differentiable`` looks at ``g`` alone and lets a second derivative in ``a`` be dropped in silence.)
    """

    @staticmethod
    def forward(gradient: Tensor, a: Tensor, g: Tensor, name: str) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.name = inputs[3]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            f"Square roots by {ctx.name}() can be differentiated once; a second derivative was requested. "
            "Use Eigh() or NewtonSchulz()."
        )
