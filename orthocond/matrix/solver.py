"""The interface that all solvers of square roots share."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
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
