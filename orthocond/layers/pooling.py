"""Global covariance pooling: the square root of each image's covariance (paper: section 6.1, GCP)."""

import math

import torch
from torch import Tensor, fx

from orthocond._checks import at_least_float32, check_choice, check_not_negative, without_autocast
from orthocond.layers import base
from orthocond.matrix import Eigh, NewtonSchulz, Pade, Solver, Taylor, inv_sqrtm, sqrtm
from orthocond.matrix.solver import check_solver
from orthocond.matrix.symmetric import add_ridge

_EIGH = Eigh()
_OUTPUTS = ("triu", "matrix")


def covariance_pool(x: Tensor, *, output: str = "triu", eps: float = 0.0, solver: Solver = _EIGH) -> Tensor:
    r"""Square root of the covariance of the channels over the positions of each image.

    Returns :math:`(P + \varepsilon I)^{1/2}` with :math:`P = X J X^T`, :math:`J = (I - 1 1^T / N) / N`, for X the
    ``(d, N)`` features of an image.

    P is singular if there are fewer positions than channels. A decomposition of P then returns noise for its zero
    eigenvalues, whose root is large, and whose gradient is larger still. Here these eigenvalues never appear. Let Z be
    the centered features over :math:`\sqrt N`, so that :math:`P = Z Z^T`. The default solver decomposes the smaller
    :math:`Z^T Z` and returns :math:`P^{1/2} = Z (Z^T Z)^{-1/2} Z^T`. Eigenvalues below the rounding of the features
    count as zero. The gradient to the features is exact, and can be differentiated twice.

    Args:
        x: Features ``(B, d, *)`` with at least one dimension of positions.
        output: ``"triu"`` gives the upper triangle with the diagonal, row by row, ``(B, d(d+1)/2)``; ``"matrix"`` the
            whole matrix, ``(B, d, d)``.
        eps: Ridge added to every eigenvalue, at least 0.
        solver: How the root is computed. Solvers other than `Eigh` always take the ``d x d`` covariance.

    Returns:
        The pooled features, with dtype and device of ``x``.

    Raises:
        TypeError: If ``x`` is not a real floating-point tensor or ``solver`` is not a `Solver`.
        ValueError: If there are no two positions, a choice or ``eps`` is not valid, or features are not finite.

    Accuracy:
        Computed in float64; the error is that of rounding the result to the dtype of ``x``. Without ridge, variances
        below the rounding of the features (2e-13 of the largest in float32) count as zero. The approximate solvers
        compute in float32.

    Example:
        >>> covariance_pool(torch.randn(2, 256, 7, 7)).shape
        torch.Size([2, 32896])

    References:
        Song, Sebe, Wang (2022), section 6.1 and appendix A.
    """
    check_choice(output, "covariance_pool(output=...)", _OUTPUTS)
    check_solver(solver, "covariance_pool")
    x = _check_positions(x, "covariance_pool", 3)
    eps = check_not_negative(eps, "covariance_pool(eps=...)")
    return _pool(_centered(x, solver), x, output, eps, solver, "raise")


def _check_positions(x: object, name: str, dims: tuple[int, ...] | int) -> Tensor:
    x = base.check_features(x, name, dims)
    if math.prod(x.shape[2:]) < 2:
        raise ValueError(
            f"{name} needs at least two positions in each image to compute a covariance; got shape {tuple(x.shape)}."
        )
    return x


def _centered(x: Tensor, solver: Solver) -> Tensor:
    """Z of shape ``(B, d, N)`` whose product with its transpose is the covariance, in the working precision."""
    # What approximates the root gains nothing from float64, and its matrix products are the cost of the layer.
    approximate = isinstance(solver, (NewtonSchulz, Pade, Taylor))
    features = x.flatten(2).to(at_least_float32(x.dtype) if approximate else torch.float64)
    return (features - features.mean(-1, keepdim=True)) / math.sqrt(features.shape[-1])


def _pool(z: Tensor, x: Tensor, output: str, eps: float, solver: Solver, nonfinite: str) -> Tensor:
    with without_autocast(x):
        try:
            root = _root(z, eps, base.with_rank_tolerance(solver, eps, x.dtype, max(z.shape[1:])), nonfinite)
        except (ValueError, RuntimeError) as error:
            base.blame_features(x, "Covariance pooling", error)
            raise
        if output == "triu":
            rows, columns = torch.triu_indices(z.shape[1], z.shape[1], device=z.device)
            root = root.flatten(1).index_select(1, rows * z.shape[1] + columns)
        return root.to(x.dtype)


def _root(z: Tensor, eps: float, solver: Solver, nonfinite: str) -> Tensor:
    """``(Z Zᵀ + eps I)^1/2``, from the smaller of the two products of Z if the solver is exact."""
    small = isinstance(solver, Eigh) and z.shape[1] > z.shape[2]
    gram = z.mT @ z if small else z @ z.mT
    if nonfinite == "raise":
        return _root_of(gram, z, eps, solver, small)
    gram, finite = base.without_nonfinite(gram)
    return torch.where(finite, _root_of(gram, z, eps, solver, small), torch.nan)


def _root_of(gram: Tensor, z: Tensor, eps: float, solver: Solver, small: bool) -> Tensor:
    if not small:
        return sqrtm(gram, eps=eps, solver=solver)
    if eps == 0:
        return z @ inv_sqrtm(gram, solver=solver) @ z.mT
    # sqrt(λ + eps) = sqrt(eps) + λ / (sqrt(λ + eps) + sqrt(eps)), and the left-out directions of P have λ = 0.
    divisor = add_ridge(sqrtm(gram, eps=eps, solver=solver), math.sqrt(eps))
    return add_ridge(z @ torch.cholesky_solve(z.mT, torch.linalg.cholesky(divisor)), math.sqrt(eps))


class CovariancePool2d(base.CountingSVDLayer):
    r"""Global covariance pooling of feature maps: `covariance_pool` as a layer, in place of average pooling.

    It has no parameters; the 1x1 convolution that usually reduces the channels before it is part of your model.

    An image with NaN or infinity makes its own output NaN and leaves the other images as they are, so that a gradient
    scaler skips the step. The buffer ``nonfinite_batches`` (not in the state) counts such batches of training.

    Args:
        solver: How the root is computed.
        output: ``"triu"`` for the upper triangle ``(B, d(d+1)/2)``, ``"matrix"`` for ``(B, d, d)``.
        eps: Ridge added to every eigenvalue, at least 0.
        nonfinite: What happens with NaN or infinity in an image: ``"propagate"`` it to its output, or ``"raise"``.

    Raises:
        TypeError: As `covariance_pool`.
        ValueError: As `covariance_pool`; for features that are not finite only with ``nonfinite="raise"``.

    Example:
        >>> pool = CovariancePool2d(output="matrix")
        >>> x = torch.randn(2, 64, 7, 7)
        >>> root = pool(x)
        >>> covariance = torch.stack([torch.cov(image.flatten(1), correction=0) for image in x])
        >>> bool(torch.dist(root @ root, covariance) < 1e-4)
        True

    References:
        Song, Sebe, Wang (2022), section 6.1 and appendix A.
    """

    def __init__(
        self, *, solver: Solver = _EIGH, output: str = "triu", eps: float = 0.0, nonfinite: str = "propagate"
    ) -> None:
        super().__init__(solver=solver, nonfinite=nonfinite)
        check_choice(output, "CovariancePool2d(output=...)", _OUTPUTS)
        self.output = output
        self.eps = check_not_negative(eps, "CovariancePool2d(eps=...)")

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, fx.Proxy):
            return base.as_leaf(self, x)
        z = _centered(_check_positions(x, "CovariancePool2d", (4,)), self.solver)
        if self.training and self.observer is not None:
            with torch.no_grad(), without_autocast(x):
                self._observe((z @ z.mT).double())
        y = _pool(z, x, self.output, self.eps, self.solver, self.nonfinite)
        self._count(y)
        return y

    def extra_repr(self) -> str:
        text = f"solver={self.solver}, output={self.output!r}, eps={self.eps}"
        return text if self.nonfinite == "propagate" else f"{text}, nonfinite={self.nonfinite!r}"
