"""Square roots and inverse square roots of batches of matrices, by the solver that is asked for."""

from typing import NamedTuple

from torch import Tensor

from orthocond._checks import check_not_negative, check_square, without_autocast
from orthocond.matrix.eigh import Eigh
from orthocond.matrix.solver import Solver, check_solver

_EIGH = Eigh()


class SquareRoots(NamedTuple):
    """Both roots of one matrix."""

    sqrt: Tensor
    inv_sqrt: Tensor


def sqrtm(a: Tensor, *, eps: float = 0.0, solver: Solver = _EIGH) -> Tensor:
    r"""Square root of symmetric positive semi-definite matrices.

    Returns the symmetric positive semi-definite :math:`Q = (A + \varepsilon I)^{1/2}`, so that
    :math:`Q Q = A + \varepsilon I`. It normalizes the covariance in global covariance pooling.

    With the default solver the gradient :math:`X` of a loss with gradient :math:`G` at the root solves
    :math:`Q X + X Q = G`. It divides by sums of roots of eigenvalues, never by differences of eigenvalues. It is exact
    where eigenvalues repeat, and can be differentiated again. Between two directions of eigenvalue zero the root
    has no derivative, and the gradient is 0. Directions of zero variance carry no gradient to the features behind a
    covariance either.

    Args:
        a: Matrices ``(*, n, n)``, positive semi-definite up to rounding. The symmetric part ``(a + a.mT) / 2``
            is taken where one is not symmetric; the gradient is always symmetric.
        eps: Ridge added to every eigenvalue, at least 0.
        solver: How to compute it: `Eigh`, `SVD`, `NewtonSchulz`, `Pade`, `Taylor`, or a `Solver` of your own.

    Returns:
        The square roots, with shape, dtype and device of ``a``.

    Raises:
        TypeError: If ``a`` is not a real floating-point tensor or ``solver`` is not a `Solver`.
        ValueError: If ``a`` is not square, not finite or has negative eigenvalues, or ``eps`` is negative.
        RuntimeError: If the decomposition fails in all its attempts.

    Accuracy:
        The relative error is about machine epsilon. Above a condition number of 1e3 the epsilon is that of float64.

    Example:
        >>> a = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
        >>> q = sqrtm(a)
        >>> bool(torch.dist(q @ q, a) < 1e-6)
        True

    References:
        Song, Sebe, Wang (2022), appendix A. Higham, *Functions of Matrices* (2008), chapter 6.
    """
    return _roots(a, eps, solver, ("sqrt",), "sqrtm")[0]


def inv_sqrtm(a: Tensor, *, eps: float = 0.0, solver: Solver = _EIGH) -> Tensor:
    r"""Inverse square root of symmetric positive definite matrices.

    Returns the symmetric :math:`S = (A + \varepsilon I)^{-1/2}`, so that :math:`S (A + \varepsilon I) S = I`. It is
    the whitening matrix of decorrelated batch normalization. Where the matrix is singular and ``eps`` is 0, it is the
    root of the pseudo-inverse.

    The gradient of the default solver has the factors :math:`-1 / (r_i r_j (r_i + r_j))` with r the roots of the
    eigenvalues. It is exact where eigenvalues repeat (``torch.linalg.eigh`` gives NaN there), and can be differentiated
    again.

    Args:
        a: Matrices ``(*, n, n)``, positive semi-definite up to rounding. The symmetric part ``(a + a.mT) / 2``
            is taken where one is not symmetric; the gradient is always symmetric.
        eps: Ridge added to every eigenvalue, at least 0.
        solver: How to compute it: `Eigh`, `SVD`, `NewtonSchulz`, `Pade`, `Taylor`, or a `Solver` of your own.

    Returns:
        The inverse square roots, with shape, dtype and device of ``a``.

    Raises:
        TypeError: If ``a`` is not a real floating-point tensor or ``solver`` is not a `Solver`.
        ValueError: If ``a`` is not square, not finite or has negative eigenvalues, or ``eps`` is negative.
        RuntimeError: If the decomposition fails in all its attempts.

    Accuracy:
        The relative error is about machine epsilon times the condition number. Above a condition number of 1e3 the
        epsilon is that of float64.

    Example:
        >>> a = torch.eye(2, requires_grad=True)  # repeated eigenvalues: autograd through torch.linalg.eigh gives nan
        >>> inv_sqrtm(a).sum().backward()
        >>> a.grad
        tensor([[-0.5000, -0.5000],
                [-0.5000, -0.5000]])

    References:
        Song, Sebe, Wang (2022), appendix A. Higham, *Functions of Matrices* (2008), chapter 6.
    """
    return _roots(a, eps, solver, ("inv_sqrt",), "inv_sqrtm")[0]


def square_roots(a: Tensor, *, eps: float = 0.0, solver: Solver = _EIGH) -> SquareRoots:
    """Square root and inverse square root from one decomposition, for whitening and coloring.

    Args:
        a: Matrices ``(*, n, n)``, as for `sqrtm`.
        eps: Ridge added to every eigenvalue, at least 0.
        solver: How to compute them.

    Returns:
        A named tuple with the fields ``sqrt`` and ``inv_sqrt``.

    Raises:
        TypeError: As `sqrtm`.
        ValueError: As `sqrtm`.
        RuntimeError: As `sqrtm`.

    Example:
        >>> roots = square_roots(torch.diag(torch.tensor([4.0, 9.0])))
        >>> roots.sqrt.diagonal(), roots.inv_sqrt.diagonal()
        (tensor([2., 3.]), tensor([0.5000, 0.3333]))
    """
    return SquareRoots(*_roots(a, eps, solver, ("sqrt", "inv_sqrt"), "square_roots"))


def _roots(a: Tensor, eps: float, solver: Solver, kinds: tuple[str, ...], name: str) -> tuple[Tensor, ...]:
    a = check_square(a, name)
    eps = check_not_negative(eps, f"{name}(eps=...)")
    check_solver(solver, name)
    if a.numel() == 0:
        return tuple(a.clone() for _ in kinds)
    with without_autocast(a):
        return solver.roots(a, eps, kinds)
