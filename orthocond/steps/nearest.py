"""The nearest orthogonal gradient, NOG (paper: section 4.1)."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from orthocond._checks import check_choice, check_not_negative, without_autocast
from orthocond.matrix import polar
from orthocond.matrix.polar_factor import FEW_ROWS, GramPolar, PolarMethod, polar_method

_METHODS = ("gram", "svd", "newton-schulz", "polar-express")
_TINY = torch.finfo(torch.float64).tiny  # keeps 0 / 0 at 0


def polar_of_gradient(name: str, rank_tol: float | None, matrices: Tensor) -> PolarMethod:
    """The method of `polar` with this name for gradients, which are seldom even enough for float32.

    Where an attempt would not pay, they are computed in float64 at once.
    """
    if name == "gram" and min(matrices.shape[-2:]) <= FEW_ROWS:
        return GramPolar(rank_tol=rank_tol, precision="float64")
    return polar_method(name, rank_tol)


@dataclass(frozen=True)
class NearestOrthogonal:
    r"""Setting for `treat`: the gradient, or the update, is replaced by the nearest orthogonal matrix.

    For a gradient :math:`G = U S V^T` the optimizer sees :math:`U V^T`: all singular values become 1, the singular
    vectors stay. Its Frobenius norm is :math:`\sqrt{r}` with r the rank, whatever the norm of the gradient was, so the
    learning rate alone sets the length of a step, and gradient clipping before it has no effect. Directions below the
    rank tolerance get 0: a zero gradient stays zero, and rounding noise is not promoted to a direction.

    The optimizer acts after it: momentum averages orthogonal gradients, and weight decay and Adam's scaling of single
    entries come on top, so the step is only nearly orthogonal. ``of="update"`` acts last instead:
    the change :math:`\Delta` that the optimizer made, weight decay included, is replaced by
    :math:`(\|\Delta\|_F / \sqrt{r})\, U V^T` of its own singular vectors. It keeps the Frobenius norm of the update,
    hence the optimizer's own choice of step length: learning rate, schedule and warm-up need no new tuning.

    With a ``scale`` s the gradient becomes :math:`s\, U V^T`, and the update :math:`lr\, s\, U V^T`: a step of fixed
    length, whatever the optimizer wanted. ``of="update"`` under SGD with Nesterov momentum is then Muon, with an exact
    polar factor in place of its five iterations. The two names are the scales that are used with it, for a matrix of m
    rows and n columns (see `matrix_view`): ``"spectral"`` is :math:`\sqrt{\max(1, m / n)}`, which keeps the change of
    a layer's output independent of its width; ``"rms"`` is :math:`0.2 \sqrt{\max(m, n)}`, for which the entries of a
    step have a root mean square of 0.2 lr, as those of Adam do, so that learning rates of AdamW can be kept.

    Args:
        method: How `polar` computes it: ``"gram"``, ``"svd"``, ``"newton-schulz"`` or ``"polar-express"``.
        rank_tol: Singular values at or below ``rank_tol * largest`` count as zero; see `polar`.
        of: ``"gradient"``, as in the paper, or ``"update"``.
        scale: Length of the result: a number, ``"spectral"`` or ``"rms"``. None takes 1 for a gradient, and the length
            of the update for an update.

    Raises:
        ValueError: If a setting is not valid.

    Example:
        >>> from orthocond.steps import NearestOrthogonal
        >>> NearestOrthogonal().nearest(torch.tensor([[0.0, 5.0], [0.1, 0.0]]))
        tensor([[0., 1.],
                [1., 0.]])

    References:
        Song, Sebe, Wang (2022), section 4.1.
    """

    method: str = "gram"
    rank_tol: float | None = None
    of: str = "gradient"
    scale: float | str | None = None

    def __post_init__(self) -> None:
        check_choice(self.method, "NearestOrthogonal(method=...)", _METHODS)
        check_choice(self.of, "NearestOrthogonal(of=...)", ("gradient", "update"))
        if isinstance(self.scale, str):
            check_choice(self.scale, "NearestOrthogonal(scale=...)", ("spectral", "rms"))
        elif self.scale is not None and not 0 < self.scale < math.inf:
            raise ValueError(f"NearestOrthogonal(scale=...) needs a finite number above 0; got {self.scale!r}.")
        if self.rank_tol is not None:
            check_not_negative(self.rank_tol, "NearestOrthogonal(rank_tol=...)")
            if self.method not in ("gram", "svd"):
                raise ValueError(
                    f"NearestOrthogonal(rank_tol=...) needs method='gram' or 'svd'; {self.method!r} has no ranks."
                )

    def nearest(self, matrices: Tensor) -> Tensor:
        """Return the nearest orthogonal matrices, of Frobenius norm √r times the scale: what the gradient form does.

        Args:
            matrices: Gradients ``(*, m, n)``; see `matrix_view` for the weight of a convolution.

        Returns:
            A tensor of the same shape, dtype and device.

        Raises:
            ValueError: If an entry is not finite.
        """
        nearest = polar(matrices, method=polar_of_gradient(self.method, self.rank_tol, matrices))
        return nearest if self.scale is None else nearest * self._factor(matrices)

    def prepare(self, matrices: Tensor, scale: Tensor | None = None) -> Callable[[], Tensor]:
        """Do all that can fail, and return the call that gives `nearest`. It may overwrite the matrices.

        Args:
            matrices: As for `nearest`.
            scale: What a GradScaler has multiplied the gradients by, and their optimizer will divide them by.
        """
        if matrices.numel() == 0:
            return lambda: matrices
        factor = self._factor(matrices) if scale is None else self._factor(matrices) * scale
        with without_autocast(matrices):
            finish = polar_of_gradient(self.method, self.rank_tol, matrices).prepare(matrices, factor)

        def nearest() -> Tensor:
            with without_autocast(matrices):
                return finish()

        return nearest

    def nearest_update(self, before: Tensor, after: Tensor, lr: float | Tensor = 1.0) -> Tensor:
        """Return the weight after an orthogonal update of the same Frobenius norm, or of the length ``lr * scale``.

        An update is the difference of two rounded weights. Its singular values below that rounding are noise and
        count as zero too.

        Args:
            before: The weight before the step, as matrices ``(groups, m, n)``.
            after: The weight after it.
            lr: The learning rate, which a ``scale`` is multiplied by.

        Returns:
            The weight to use instead of ``after``.

        Raises:
            ValueError: If an entry is not finite.
        """
        update = after - before
        norm = update.double().square().sum((-2, -1), keepdim=True).sqrt()
        rank_tol = self.rank_tol
        if self.method in ("gram", "svd"):
            short, long = sorted(update.shape[-2:])
            eps = torch.finfo(update.dtype).eps * math.sqrt(long)
            # The largest singular value is at least |Δ|/√r. At most 1/2, so that some direction is left.
            noise = eps * before.abs().amax() * math.sqrt(short) / norm.amax().clamp(min=_TINY)
            rank_tol = max(eps if rank_tol is None else rank_tol, min(float(noise), 0.5))
        nearest = polar(update, method=polar_of_gradient(self.method, rank_tol, update)).double()
        if self.scale is None:
            length: float | Tensor = norm / nearest.square().sum((-2, -1), keepdim=True).sqrt().clamp(min=_TINY)
        else:
            length = lr * self._factor(update)
        return before + (nearest * length).to(before.dtype)

    def _factor(self, matrices: Tensor) -> float:
        """The scale as a number."""
        m, n = matrices.shape[-2:]
        if self.scale == "spectral":
            return math.sqrt(max(1.0, m / n))
        if self.scale == "rms":
            return 0.2 * math.sqrt(max(m, n))
        return 1.0 if self.scale is None else float(self.scale)
