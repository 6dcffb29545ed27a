"""Hard orthogonality: the weight is an orthogonal matrix by construction (paper: section 3.2, OW)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from orthocond._checks import all_true, at_least_float32, check_choice, check_not_negative, warn_onnx, without_autocast
from orthocond._layers import check_full_rank, find_parameter, groups_of, matrices
from orthocond.matrix import GramPolar, polar
from orthocond.matrix.decompose import check_finite_batch
from orthocond.weights._common import check_gain, eye_like, register
from orthocond.weights.input_aware import FollowInput, Metric, add_relative_ridge, check_layer, check_positive

# Share of the mean eigenvalue added to a running metric: single batches can have directions without variance.
_RUNNING_RIDGE = 1e-4
# Entries of a skew-symmetric matrix are angles, and an exponential of angles loses their size in machine epsilons:
# above the first its work is in float64, above the second that would not be enough.
_FLOAT32_ANGLE, _LARGEST_ANGLE = 1e3, 1e12


class Orthogonal(nn.Module):
    """The parametrization behind `orthogonal`: maps a raw weight to one that is orthogonal.

    Args:
        weight: The weight that it will be registered on.
        groups: Number of groups of the convolution.
        map: ``"cayley"``, ``"exponential"`` or ``"polar"``.
        gain: Factor of the orthogonal matrix.
        metric: The metric in which it is orthogonal; None for the usual one.
    """

    base: Tensor

    def __init__(
        self,
        weight: Tensor,
        groups: int = 1,
        map: str = "cayley",
        gain: float = 1.0,
        metric: Metric | None = None,
    ) -> None:
        super().__init__()
        check_choice(map, "orthogonal(map=...)", tuple(_MAPS))
        self.shape = weight.shape
        self.groups = groups
        self.map = map
        self.gain = check_gain(gain, "orthogonal")
        self.metric = metric
        w = matrices(weight.detach(), groups)
        self.register_buffer("base", torch.zeros_like(w, dtype=at_least_float32(w.dtype)))

    def forward(self, raw: Tensor) -> Tensor:
        """Return the orthogonal weight that the raw one stands for."""
        warn_onnx("operation for a parametrized weight")
        with without_autocast(raw):
            x = matrices(raw, self.groups).to(at_least_float32(raw.dtype))
            base = self.base.to(x.dtype)
            if x.shape[-2] < x.shape[-1]:
                q = _MAPS[self.map](x.mT, base.mT).mT
            else:
                q = _MAPS[self.map](x, base)
            if self.metric is not None:
                # A copy: the next forward may overwrite it, and a backward through this one still needs it.
                q = q @ self.metric.root.to(q.dtype, copy=True)
            return (self.gain * q).reshape(self.shape).to(raw.dtype)

    def right_inverse(self, value: Tensor) -> Tensor:
        """Take the polar factor of a weight as the base, and the weight itself as the raw one, which stands for it."""
        if value.shape != self.shape:
            raise ValueError(
                f"The orthogonal weight needs shape {tuple(self.shape)}; got a value of shape {tuple(value.shape)}."
            )
        raw = value.detach().clone()
        x = matrices(raw, self.groups).double()
        if self.metric is not None:
            x = x @ self.metric.square_root()
            raw = x.reshape(self.shape).to(value.dtype)
        q = polar(x)
        check_full_rank(q, "orthogonal")
        self.base.copy_(q)
        return raw

    def extra_repr(self) -> str:
        return f"map={self.map!r}, gain={self.gain}, groups={self.groups}"


def _tangent(x: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    """Split ``A = X Bᵀ - B Xᵀ`` into ``BᵀAB`` and ``K = (I - BBᵀ) X``: then ``A = B (BᵀAB) Bᵀ + K Bᵀ - B Kᵀ``."""
    inner = base.mT @ x
    normal = x - base @ inner
    # Once more, as rounding of long sums leaves a part along B. No gradient: that of the part is zero.
    normal = normal - base @ (base.mT @ normal.detach())
    return inner - inner.mT, normal


def _cayley(x: Tensor, base: Tensor) -> Tensor:
    """``(I - A/2)⁻¹ (I + A/2) B`` for tall X and B.

    A has rank 2k, and two block eliminations leave one k x k inverse, ``D = (I - BᵀAB/2 + KᵀK/4)⁻¹``, of a matrix
    whose symmetric part is at least I: the result is ``B (2D - I) + K D``. If X is nearly square, K has few large
    directions and that matrix a large condition number once X has grown, so float64 is used, for the base too.
    """
    dtype = x.dtype
    if x.shape[-2] < 2 * x.shape[-1]:
        x, base = x.double(), _orthonormalize(base.double())
    skew, normal = _tangent(x, base)
    eye = eye_like(skew)
    inverse = _inverse(eye - skew / 2 + normal.mT @ normal / 4)
    return (base @ (2 * inverse - eye) + normal @ inverse).to(dtype)


def _exponential(x: Tensor, base: Tensor) -> Tensor:
    """``exp(A) B`` for tall X and B.

    A maps the columns of ``[B, K / s]`` to ``[B, K / s] T`` with ``T = [[BᵀAB, -KᵀK / s], [s I, 0]]``, so the
    exponential of the 2k x 2k matrix T is enough. With s the typical length of a column of K, T is nearly
    skew-symmetric, and its exponential does not grow. What rounding leaves of a deviation from orthogonality the last
    line takes away.
    """
    rows, k = x.shape[-2:]
    dtype, largest = x.dtype, x.detach().abs().amax()
    if all_true(largest > _LARGEST_ANGLE):
        raise ValueError(
            f"orthogonal(map='exponential') needs parameters up to {_LARGEST_ANGLE:.0e}, above which rounding makes "
            f"the weight arbitrary; got {float(largest):.1e}. Lower the learning rate, or use map='cayley'."
        )
    if dtype != torch.float64 and all_true(largest > _FLOAT32_ANGLE):
        x, base = x.double(), base.double()
    if rows <= 2 * k:
        a = x @ base.mT
        q = torch.matrix_exp(a - a.mT) @ base
    else:
        skew, normal = _tangent(x, base)
        length = torch.linalg.matrix_norm(normal.detach(), keepdim=True) / k**0.5
        length = torch.where(length == 0, 1, length)
        normal = normal / length
        eye = length * eye_like(skew)
        upper = torch.cat([skew, -length * (normal.mT @ normal)], dim=-1)
        lower = torch.cat([eye, torch.zeros_like(eye)], dim=-1)
        first = torch.matrix_exp(torch.cat([upper, lower], dim=-2))[..., :k]
        q = base @ first[..., :k, :] + normal @ first[..., k:, :]
    return _orthonormalize(_orthonormalize(q)).to(dtype)


def _orthonormalize(q: Tensor) -> Tensor:
    """A Newton-Schulz step, which squares the deviation from orthonormal columns that rounding left."""
    return 1.5 * q - 0.5 * q @ (q.mT @ q)


def _polar(x: Tensor, base: Tensor) -> Tensor:
    """The polar factor of X itself, to the last digit; it needs no base."""
    return polar(x, method=GramPolar(precision="float64"))


def _inverse(a: Tensor) -> Tensor:
    """Inverses of ``(groups, k, k)``, one at a time: batched LU of MKL with several threads gives wrong results."""
    if a.shape[-1] == 1:
        return 1 / a
    return torch.stack([torch.linalg.inv(matrix) for matrix in a])


_MAPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cayley": _cayley,
    "exponential": _exponential,
    "polar": _polar,
}


def orthogonal(
    module: nn.Module,
    name: str = "weight",
    *,
    map: str = "cayley",
    gain: float = 1.0,
    metric: Tensor | str | None = None,
    ridge: float | None = None,
    momentum: float = 0.1,
) -> nn.Module:
    r"""Keep a weight orthogonal: OW of the paper, on the matrix of the whole kernel.

    With W the `matrix_view` of the weight, m x n, the module computes with a W of orthonormal rows times the gain,
    :math:`W W^T = g^2 I`, or, for a tall W, orthonormal columns, :math:`W^T W = g^2 I`. It starts at the nearest such
    matrix, g times the `polar` factor B of the module's own weight.

    The paper's :math:`\exp(W - W^T)` is for square matrices. Here the parameter X, of the shape of the weight, stands
    for :math:`W = g \exp(A)\, B` with the skew-symmetric :math:`A = X B^T - B X^T` (transposed for a wide W). For B = I
    this is the paper's form. X starts as the module's own weight, for which A = 0 and W = g B. So the parameter keeps
    its values, its place in the optimizer and its scale.

    Args:
        module: Linear, convolution, transposed convolution, or any module with a parameter of two or more dimensions.
            Each group of a grouped convolution is one matrix.
        name: Which parameter.
        map: ``"cayley"``: :math:`(I - A/2)^{-1} (I + A/2)` in place of :math:`\exp(A)`, equal to second order and the
            cheapest: one inverse of the smaller side. ``"exponential"``: as in the paper. ``"polar"``: W is the polar
            factor of X itself, without a base. It is the most accurate, but divides gradients by the singular values
            of X.
        gain: Factor of the orthogonal matrix. With ``1 / k`` a convolution with a tall matrix and a k x k kernel of
            stride 1 preserves the norm of its input (borders apart).
        metric: Makes W orthogonal in the metric of the input instead, :math:`W \Sigma W^T = g^2 I` (for a tall W,
            :math:`\Sigma^{1/2} W^T W \Sigma^{1/2} = g^2 I`: the output covariance is :math:`g^2` times a projection).
            Either :math:`\Sigma`, symmetric positive definite ``(n, n)`` or ``(groups, n, n)``, such as
            `patch_covariance` gives; or ``"running"``: the average over the layer's own input in training mode, the
            identity until the first batch, over all processes of torch.distributed.
        ridge: Fraction of the metric's mean eigenvalue that is added to each eigenvalue. None means 0 for a given
            metric and 1e-4 for the running one.
        momentum: Weight of the newest batch in the running metric; 0 for the plain average of all.

    Returns:
        The module, changed in place. Assigning ``module.weight = w`` sets it to the nearest orthogonal matrix of w.
        ``torch.nn.utils.parametrize.remove_parametrizations(module, name)`` removes the treatment.

    Raises:
        TypeError: If ``module`` is not a module, the parameter is not real floating point, or a metric is requested for
            a module whose weight does not multiply patches of its input.
        ValueError: If there is no such parameter, it has fewer than two dimensions or not full rank, or a setting is
            not valid. Later, in the forward, if the parameter of an exponential has grown above 1e12.
        RuntimeError: If the parameter is parametrized already or not initialized.

    Accuracy:
        Largest entry of :math:`W W^T - I` in float32, 64 x 27 to 512 x 4608: 2e-6 for ``"cayley"``, 5e-7 for
        ``"exponential"``, 1e-7 for ``"polar"``, also where the entries of the parameter have grown: to 1e3 for
        ``"cayley"``, to 1e12 for ``"exponential"``, above which it raises. In float32 ``torch.matrix_exp`` is off by up
        to 5e-5 (at angles of 0.6), so that this orthogonal W is as far from that of the formula. The base is stored in
        the dtype of the weight: treat a model after ``.double()``, not before.

    Example:
        >>> conv = orthogonal(torch.nn.Conv2d(3, 64, 3))
        >>> w = conv.weight.flatten(1)
        >>> bool((w.mT @ w - torch.eye(27)).abs().max() < 1e-5)
        True

    References:
        Song, Sebe, Wang (2022), section 3.2. Lezcano-Casado, *Trivializations* (2019).
    """
    weight = find_parameter(module, name, "orthogonal")
    groups = groups_of(module, name)
    found = None if metric is None else _make_metric(module, weight, groups, metric, ridge, momentum)
    parametrization = Orthogonal(weight, groups, map, gain, found)
    register(module, name, parametrization)
    if found is not None and found.momentum is not None:
        FollowInput(module, name)
    return module


def _make_metric(
    module: nn.Module, weight: Tensor, groups: int, metric: Tensor | str, ridge: float | None, momentum: float
) -> Metric:
    """Check a metric and prepare it for the weight's dtype and device."""
    n = matrices(weight, groups).shape[-1]
    if ridge is not None:
        check_not_negative(ridge, "orthogonal(ridge=...)")
    dtype = at_least_float32(weight.dtype)
    if isinstance(metric, str):
        check_choice(metric, "orthogonal(metric=...)", ("running",))
        check_layer(module, "orthogonal(metric='running')")
        if not 0 <= momentum <= 1:
            raise ValueError(f"orthogonal(momentum=...) needs a number from 0 to 1; got {momentum!r}.")
        start = torch.eye(n, dtype=torch.float64, device=weight.device).repeat(groups, 1, 1)
        return Metric(start, _RUNNING_RIDGE if ridge is None else ridge, dtype, momentum)
    if not isinstance(metric, Tensor):
        raise TypeError(f"orthogonal(metric=...) needs a tensor, 'running' or None; got {type(metric).__name__}.")
    if metric.shape not in ((n, n), (groups, n, n)):
        raise ValueError(
            f"orthogonal(metric=...) needs shape {(n, n)}, or {(groups, n, n)} for each group its own, to match the "
            f"columns of the weight; got {tuple(metric.shape)}. patch_covariance(module, batch) gives it."
        )
    sigma = metric.detach().to(weight.device, torch.float64).expand(groups, n, n)
    check_finite_batch(sigma)
    ridge = ridge or 0.0
    check_positive(add_relative_ridge(sigma, ridge), "orthogonal(metric=...)")
    return Metric(sigma, ridge, dtype)
