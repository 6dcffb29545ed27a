"""Whitening and coloring: features take the mean and covariance of others (paper: appendix A, WCT)."""

import math

import torch
from torch import Tensor, fx

from orthocond._checks import at_least_float32, check_choice, check_not_negative, without_autocast
from orthocond.layers import base
from orthocond.matrix import Eigh, Solver, inv_sqrtm, sqrtm
from orthocond.matrix.solver import check_solver
from orthocond.matrix.symmetric import add_ridge

_EIGH = Eigh()
_PER = ("image", "batch")


def whiten_color(
    content: Tensor,
    style: Tensor,
    *,
    alpha: float = 1.0,
    eps: float = 1e-5,
    per: str = "image",
    solver: Solver = _EIGH,
) -> Tensor:
    r"""Give the content features the mean and covariance of the style features.

    Returns :math:`\alpha y + (1 - \alpha) x_c` with
    :math:`y = (P_s + \varepsilon I)^{1/2} (P_c + \varepsilon I)^{-1/2} (x_c - \mu_c) + \mu_s`. The ridge is the same in
    both roots, so that features with themselves as style do not change. The map is one matrix product. Its gradient, to
    content and style, is exact, and can be differentiated again with `Eigh`.

    Args:
        content: Features ``(B, C, *)`` with at least one dimension of positions.
        style: Features ``(B, C, *)``, or ``(1, C, *)`` for one style for all; it may have other positions.
        alpha: Strength, from 0 (the content as it is) to 1.
        eps: Ridge added to every eigenvalue of both covariances, at least 0.
        per: Whether mean and covariance are those of each ``"image"`` or of the whole ``"batch"``.
        solver: How the roots are computed.

    Returns:
        The features, with shape and dtype of ``content``.

    Raises:
        TypeError: If a tensor is not a real floating-point tensor or ``solver`` is not a `Solver`.
        ValueError: If shapes do not fit, a choice, ``alpha`` or ``eps`` is not valid, or features are not finite.

    Accuracy:
        Statistics and roots are computed in float64; the covariance of the result is that of the style up to the
        ridge, relative to the smallest eigenvalue of the content's, where that has full rank.

    Example:
        >>> content, style = torch.randn(2, 3, 32, 32), torch.rand(1, 3, 20, 20)
        >>> y = whiten_color(content, style)
        >>> bool(torch.dist(torch.cov(y[0].flatten(1)), torch.cov(style[0].flatten(1))) < 1e-3)
        True

    References:
        Song, Sebe, Wang (2022), appendix A. Li et al., *Universal Style Transfer via Feature Transforms* (2017).
    """
    check_choice(per, "whiten_color(per=...)", _PER)
    check_solver(solver, "whiten_color")
    eps = check_not_negative(eps, "whiten_color(eps=...)")
    return _whiten_color(content, style, alpha, eps, per, solver, "whiten_color", "raise", None)


def _whiten_color(
    content: Tensor,
    style: Tensor,
    alpha: float,
    eps: float,
    per: str,
    solver: Solver,
    name: str,
    nonfinite: str,
    observe: base.Observer | None,
) -> Tensor:
    _check_pair(content, style, alpha, per, name)
    with without_autocast(content):
        mean, covariance = _moments(content, per)
        style_mean, style_covariance = _moments(style, per)
        if observe is not None:
            observe(covariance)
        size = content.shape[1]
        finite = None
        if nonfinite == "propagate":
            (covariance, finite), (style_covariance, finite_style) = map(
                base.without_nonfinite, (covariance, style_covariance)
            )
            finite = finite & finite_style
        try:
            inverse = inv_sqrtm(covariance, eps=eps, solver=base.with_rank_tolerance(solver, eps, content.dtype, size))
            root = sqrtm(style_covariance, eps=eps, solver=base.with_rank_tolerance(solver, eps, style.dtype, size))
        except (ValueError, RuntimeError) as error:
            base.blame_features(content, f"The content of {name}", error)
            base.blame_features(style, f"The style of {name}", error)
            raise
        color = root @ inverse
        if finite is not None:
            color = torch.where(finite, color, torch.nan)
        offset = alpha * (style_mean - color @ mean)
        matrix = add_ridge(alpha * color, 1 - alpha)
        x = content.flatten(2).to(at_least_float32(content.dtype))
        matrix, offset = (part.to(x.dtype).expand(x.shape[0], -1, -1) for part in (matrix, offset))
        return torch.baddbmm(offset, matrix, x).reshape(content.shape).to(content.dtype)


def _check_pair(content: object, style: object, alpha: float, per: str, name: str) -> None:
    shapes = []
    for x, role in ((content, "content"), (style, "style")):
        x = base.check_features(x, f"{name}({role})", 3)
        if math.prod(x.shape[2:]) * (len(x) if per == "batch" else 1) < 2:
            raise ValueError(f"{name} needs at least two positions per {per}; {role} has shape {tuple(x.shape)}.")
        shapes.append(x.shape)
    (batch, channels), (style_batch, style_channels) = shapes[0][:2], shapes[1][:2]
    if channels != style_channels or (per == "image" and style_batch not in (1, batch)):
        raise ValueError(
            f"{name} needs a style with {channels} channels and, per image, {batch} images or one; got content "
            f"{tuple(shapes[0])} and style {tuple(shapes[1])}."
        )
    if not 0 <= alpha <= 1:
        raise ValueError(f"{name}(alpha=...) needs a number from 0 to 1; got {alpha!r}.")


def _moments(x: Tensor, per: str) -> tuple[Tensor, Tensor]:
    """Mean ``(B, C, 1)`` and biased covariance ``(B, C, C)`` in float64, with B = 1 for the whole batch."""
    features = x.flatten(2) if per == "image" else x.movedim(1, 0).flatten(1).unsqueeze(0)
    features = features.double()
    mean = features.mean(-1, keepdim=True)
    z = features - mean
    return mean, z @ z.mT / z.shape[-1]


class WhitenColor2d(base.CountingSVDLayer):
    """Whitening and coloring of feature maps: `whiten_color` as a layer without parameters.

    Features with NaN or infinity make the output NaN, with ``per="image"`` only that of their own image, so that a
    gradient scaler skips the step. The buffer ``nonfinite_batches`` (not in the state) counts such batches of training.

    Args:
        alpha: Strength, from 0 (the content as it is) to 1.
        eps: Ridge added to every eigenvalue of both covariances, at least 0.
        per: Whether mean and covariance are those of each ``"image"`` or of the whole ``"batch"``.
        solver: How the roots are computed.
        nonfinite: What features with NaN or infinity do: ``"propagate"`` to the output, or ``"raise"``.

    Raises:
        TypeError: As `whiten_color`.
        ValueError: As `whiten_color`; for features that are not finite only with ``nonfinite="raise"``.

    Example:
        >>> layer = WhitenColor2d(alpha=0.6)
        >>> layer(torch.randn(2, 16, 32, 32), torch.randn(2, 16, 24, 24)).shape
        torch.Size([2, 16, 32, 32])

    References:
        Song, Sebe, Wang (2022), appendix A.
    """

    def __init__(
        self,
        *,
        alpha: float = 1.0,
        eps: float = 1e-5,
        per: str = "image",
        solver: Solver = _EIGH,
        nonfinite: str = "propagate",
    ) -> None:
        super().__init__(solver=solver, nonfinite=nonfinite)
        check_choice(per, "WhitenColor2d(per=...)", _PER)
        self.alpha = alpha
        self.eps = check_not_negative(eps, "WhitenColor2d(eps=...)")
        self.per = per

    def forward(self, content: Tensor, style: Tensor) -> Tensor:
        if isinstance(content, fx.Proxy) or isinstance(style, fx.Proxy):
            return base.as_leaf(self, content, style)
        base.check_features(content, "WhitenColor2d(content)", (4,))
        base.check_features(style, "WhitenColor2d(style)", (4,))
        arguments = (self.alpha, self.eps, self.per, self.solver, "WhitenColor2d", self.nonfinite, self._observe)
        y = _whiten_color(content, style, *arguments)
        self._count(y[..., 0, 0])  # NaN is in all positions or in none
        return y

    def extra_repr(self) -> str:
        text = f"alpha={self.alpha}, eps={self.eps}, per={self.per!r}, solver={self.solver}"
        return text if self.nonfinite == "propagate" else f"{text}, nonfinite={self.nonfinite!r}"
