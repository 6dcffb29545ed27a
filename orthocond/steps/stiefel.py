"""Steps on the Stiefel manifold: a weight that stays orthogonal, moved by an orthogonal step."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from orthocond._checks import at_least_float32, check_choice, check_floating, without_autocast
from orthocond._layers import check_full_rank
from orthocond.matrix import polar
from orthocond.matrix.decompose import eigh
from orthocond.matrix.polar_factor import GramPolar
from orthocond.steps.nearest import polar_of_gradient

_FLOAT32_WORK = 2**20  # multiplications from which the direction is computed in float32
_NEAR = 0.1  # squared singular values from which, and up to whose inverse, a matrix counts as near the manifold
_METHODS = ("gram", "svd", "newton-schulz", "polar-express")


@dataclass(frozen=True)
class Stiefel:
    r"""Setting for `treat`: an orthogonal weight takes orthogonal steps and stays orthogonal.

    The Stiefel manifold is the set of matrices with orthonormal rows (columns, if tall). With W = g Q the weight, Q on
    the manifold, and G the gradient at each step,

    .. math::

        M \leftarrow \beta M + (1 - \beta) G, \qquad
        T = M - \tfrac12 (M Q^T + Q M^T) Q, \qquad
        Q \leftarrow \operatorname{polar}(Q - \eta \operatorname{polar}(T)).

    M is the average gradient, T its part along the manifold (for tall weights :math:`T = M - \tfrac12 Q (Q^T M + M^T
    Q)`), its `polar` factor the direction in which all singular values are 1, and the last polar factor the way back
    onto the manifold. The loss falls by :math:`\eta \|T\|_*` to first order. All singular values of the weight are g
    after every step.

    The learning rate of the parameter group, times ``scale``, is η. It is nearly an angle: a square weight turns no
    direction by more than arctan η in a step, whatever the size of the gradient, and other weights not much more.
    Values of 0.01 to 0.1 are typical, where Adam has 1e-3: give the weight its own parameter group, or set ``scale``. A
    learning rate schedule works as usual.

    A gradient that is normal to the manifold gives no step: T is 0 where its Frobenius norm is no more than
    :math:`\varepsilon^{3/4}` of that of M, with :math:`\varepsilon` the rounding of the weight's dtype. Directions of T
    whose singular value is at most :math:`2 \varepsilon` of its largest one give none either. Where T is much smaller
    than M, rounding of M can exceed that: a null direction of T then takes a step along noise.

    The optimizer's own update of the weight is replaced: its momentum, its scaling of entries and its weight decay have
    no effect on this weight. M is stored unprojected and projected at each step, which is how it is transported along
    the manifold. It is part of the optimizer's state, so ``optimizer.state_dict()`` is all that resuming needs.

    `treat` replaces a weight that is not on the manifold at once by the nearest one that is, g times its polar factor.

    Args:
        momentum: β, the fraction of the average that is kept; 0 uses each gradient alone.
        scale: Factor of the learning rate.
        gain: g, the scale of the weight; None keeps the scale that it has, the root mean square of its singular values,
            which is measured at each step.
        method: How `polar` computes the factors: ``"gram"``, ``"svd"``, ``"newton-schulz"`` or ``"polar-express"``.

    Raises:
        ValueError: If a setting is not valid.

    Accuracy:
        The way back onto the manifold is computed in float64, the direction of large matrices (more than a million
        multiplications) in float32 unless they are float64 themselves, all else in float64. Singular values of a
        float32 weight deviate from g by some 1e-8 of it after each step, and the deviation does not grow. In half
        precision a step that is shorter than the rounding of the weight
        is lost, as under every optimizer: keep such weights in float32.

    Example:
        >>> from orthocond.steps import Stiefel, treat
        >>> layer = torch.nn.Linear(8, 4)
        >>> optimizer = torch.optim.Adam([{"params": [layer.bias]}, {"params": [layer.weight], "lr": 0.03}])
        >>> handle = treat(layer, optimizer, manifold=Stiefel())
        >>> for _ in range(10):
        ...     optimizer.zero_grad()
        ...     layer(torch.randn(16, 8)).square().sum().backward()
        ...     optimizer.step()
        >>> torch.linalg.svdvals(layer.weight.detach())
        tensor([1.0000, 1.0000, 1.0000, 1.0000])

    References:
        Absil, Mahony, Sepulchre, *Optimization Algorithms on Matrix Manifolds* (2008), sections 3.5.7 and 4.1.
    """

    momentum: float = 0.9
    scale: float = 1.0
    gain: float | None = 1.0
    method: str = "gram"

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"Stiefel(momentum=...) needs a number in [0, 1); got {self.momentum!r}.")
        for name, value in (("scale", self.scale), ("gain", self.gain)):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"Stiefel({name}=...) needs a finite number above 0; got {value!r}.")
        check_choice(self.method, "Stiefel(method=...)", _METHODS)

    def nearest(self, weight: Tensor) -> Tensor:
        """Return the nearest weights on the manifold, g times the polar factor.

        Args:
            weight: Matrices ``(*, m, n)``; see `matrix_view` for the weight of a convolution.

        Returns:
            A tensor of the same shape, dtype and device.

        Raises:
            ValueError: If a weight does not have full rank, so that the nearest one is not unique, or has no entries.
        """
        w = check_floating(weight, "Stiefel").double()
        if w.numel() == 0:
            raise ValueError(f"Stiefel needs a weight with entries; got matrices of shape {tuple(w.shape)}.")
        q = self._polar(w, at_least_float32(weight.dtype))  # it is exact, whatever was rounded before
        check_full_rank(q, "Stiefel")
        return (self._gain(w) * q).to(weight.dtype)

    def tangent(self, weight: Tensor, average: Tensor) -> Tensor:
        """Return the part T of an average gradient along the manifold.

        Args:
            weight: Weights on the manifold ``(*, m, n)``.
            average: Average gradients of the same shape.

        Returns:
            A tensor of the same shape, in the precision of the work. The components of the gradients that would change
            the singular values of the weight are missing. It is 0 where it would be no more than their rounding.
        """
        w = _work(weight)
        m = average.to(w.dtype)
        twice = 2 * self._gain(w) ** 2  # divides the small products: the weight is g times Q
        with without_autocast(w):
            if w.shape[-2] <= w.shape[-1]:
                product = m @ w.mT
                tangent = m - (product + product.mT) / twice @ w
            else:
                product = w.mT @ m
                tangent = m - w @ ((product + product.mT) / twice)
        # Averages that decay for long end in numbers with few digits. Those of NaN are kept, and told later.
        size = m.abs().amax((-2, -1), keepdim=True)  # ten times as fast as vector_norm
        vanished = size < torch.finfo(at_least_float32(average.dtype)).tiny
        share = torch.linalg.matrix_norm(tangent / size, keepdim=True) / torch.linalg.matrix_norm(
            m / size, keepdim=True
        )
        return tangent.mul_(~(vanished | (share <= torch.finfo(weight.dtype).eps ** 0.75)))

    def step(self, weight: Tensor, average: Tensor, lr: float | Tensor) -> Tensor:
        """Return the weights after a step of length ``lr`` against the polar factors of their tangents.

        Args:
            weight: Weights on the manifold ``(*, m, n)``.
            average: Average gradients of the same shape, or what `tangent` returned for them.
            lr: The step length η, without ``scale``: a number or a tensor of the batch shape ``(*)``.

        Returns:
            The new weights, of shape, dtype and device of ``weight``.
        """
        w = _work(weight)
        gain = self._gain(w)
        eta = lr[..., None, None].to(w) if isinstance(lr, Tensor) else lr
        direction = self._polar(self.tangent(weight, average), weight.dtype)
        return self._nearest_of(w - (gain * self.scale * eta) * direction, gain).to(weight.dtype)

    def _nearest_of(self, moved: Tensor, gain: float | Tensor) -> Tensor:
        """The weights nearest to matrices near the manifold; their errors are those of the weight's orthogonality.

        In float32 it is X plus its small change ((XXᵀ / g²)^(-1/2) - I) X: with the Gram matrix and its root in
        float64, and only the last product in float32, the errors are those of rounding the entries.
        """
        if self.method != "gram":
            return gain * polar(moved, method=self.method)
        if moved.dtype == torch.float32:
            wide = moved if moved.shape[-2] <= moved.shape[-1] else moved.mT
            with without_autocast(moved):
                x = wide.double()
                values, vectors = eigh(x @ x.mT / gain**2)
                if bool(((values > _NEAR) & (values < 1 / _NEAR)).all()):
                    change = vectors * (values.rsqrt() - 1).unsqueeze(-2) @ vectors.mT
                    nearest = wide + change.to(wide.dtype) @ wide
                    return nearest if wide is moved else nearest.mT
        return gain * polar(moved, method=GramPolar(precision="float64"))

    def _polar(self, matrices: Tensor, dtype: torch.dtype) -> Tensor:
        """Polar factors, in which singular values of the size of the rounding of ``dtype`` are no directions."""
        rank_tol = 2 * torch.finfo(dtype).eps if self.method in ("gram", "svd") else None
        return polar(matrices, method=polar_of_gradient(self.method, rank_tol, matrices))

    def _gain(self, weight: Tensor) -> float | Tensor:
        """The scale g ``(*, 1, 1)`` of the weight on the manifold."""
        if self.gain is not None:
            return self.gain
        return (weight.square().sum((-2, -1), keepdim=True) / min(weight.shape[-2:])).sqrt()


def _work(matrices: Tensor) -> Tensor:
    """The matrices in the precision to work in: float32 where float64 would cost time, as `GramPolar` has it."""
    short, long = sorted(matrices.shape[-2:])
    return matrices.to(at_least_float32(matrices.dtype)) if short * short * long > _FLOAT32_WORK else matrices.double()
