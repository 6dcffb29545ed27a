r"""Treatments that know the layer's input: the patch covariance, a start that whitens it, and a metric that follows it.

Output positions of a linear layer or convolution are :math:`y = W x` with x the input patch that the kernel sees, so
their covariance is :math:`W \Sigma W^T` with :math:`\Sigma` the patch covariance. With an orthogonal W its eigenvalues
are those of :math:`\Sigma` (tall W) or interlace with them (wide W), and natural images make them differ by 1e4 and
more. With a W that is orthogonal in the metric :math:`\Sigma` they are all the same.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from orthocond._checks import check_not_negative, in_backward, without_autocast
from orthocond._distributed import several_processes, sum_across
from orthocond._layers import (
    CONVOLUTIONS,
    TRANSPOSED_CONVOLUTIONS,
    check_full_rank,
    find_parameter,
    groups_of,
    matrices,
)
from orthocond.matrix import inv_sqrtm, polar, square_roots
from orthocond.matrix.decompose import check_finite_batch
from orthocond.matrix.spectra import spectrum
from orthocond.matrix.symmetric import symmetric_part
from orthocond.weights._common import check_gain, eye_like

# Entries of the unfolded patches that are held at once: 2 MB in float64, which stays in the cache.
_CHUNK = 2**18


@torch.no_grad()
def patch_covariance(module: nn.Module, batch: Tensor | Iterable[Any]) -> Tensor:
    r"""Covariance of the input patches that a linear layer or convolution multiplies by its weight.

    With x the patches as vectors, in the order of the columns of `matrix_view`,
    :math:`\Sigma = \frac{1}{N} \sum (x - \mu)(x - \mu)^T` over all images and positions. Stride, padding and its mode,
    dilation and groups are those of the layer, so :math:`W \Sigma W^T` is the covariance of its output.

    Batches are streamed and their means merged in float64; the patches of one batch are unfolded in pieces of 2 MB.

    Args:
        module: ``Linear``, ``Conv1d``, ``Conv2d`` or ``Conv3d``.
        batch: Input of this layer, or an iterable of inputs: tensors, or tuples and lists whose first item is one, as a
            data loader gives.

    Returns:
        Float64 covariance ``(columns, columns)``, or ``(groups, columns, columns)`` for more than one group.

    Raises:
        TypeError: If ``module`` is none of these layers, or a batch is not a tensor.
        ValueError: If a batch has the wrong shape, or there is no data.

    Example:
        >>> conv = torch.nn.Conv2d(3, 16, 3, padding=1)
        >>> images = torch.randn(8, 3, 32, 32)
        >>> sigma = patch_covariance(conv, images)
        >>> w = conv.weight.detach().flatten(1).double()
        >>> output = conv(images).transpose(0, 1).flatten(1)
        >>> torch.allclose(w @ sigma @ w.mT, torch.cov(output, correction=0).double(), atol=1e-5)
        True
    """
    moments = _InputMoments(module)
    for x in _batches(batch):
        moments.add(x)
    return moments.covariance()


@torch.no_grad()
def whitening_init_(
    module: nn.Module,
    batch: Tensor | Iterable[Any],
    *,
    ridge: float = 1e-4,
    gain: float = 1.0,
    rng: torch.Generator | None = None,
) -> nn.Module:
    r"""Start a layer with a weight that whitens its own input.

    Sets :math:`W = g\, Q\, (\Sigma + \rho I)^{-1/2}` with :math:`\Sigma` the `patch_covariance` of the data, Q with
    orthonormal rows (columns, if W is tall) and :math:`\rho` the ridge times the mean eigenvalue of :math:`\Sigma`. The
    layer's output then has the covariance :math:`W \Sigma W^T \approx g^2 I` (for a tall W, on its range).

    Q is the polar factor of :math:`W_0 (\Sigma + \rho I)^{1/2}`, where :math:`W_0` is the current weight. Among all
    whitening weights, this one has outputs nearest to the current ones. The bias is left as it is.

    Args:
        module: ``Linear``, ``Conv1d``, ``Conv2d`` or ``Conv3d``.
        batch: Input of this layer, or an iterable of inputs, as in `patch_covariance`. A few thousand images are enough
            for the covariance of a stem; a deep layer needs many more positions than columns.
        ridge: Fraction of the mean eigenvalue added to each, so that directions without variance are not amplified.
        gain: Standard deviation of the outputs.
        rng: Draws Q at random instead (uniformly over orthogonal matrices).

    Returns:
        The module, changed in place.

    Raises:
        TypeError: If ``module`` is none of these layers, or a batch is not a tensor.
        ValueError: If a batch has the wrong shape, there is no data, it is constant or not finite, the weight does not
            have full rank, or a setting is not valid.
        RuntimeError: If the weight is parametrized: start it first, then treat it.

    Accuracy:
        :math:`W \Sigma W^T` differs from :math:`g^2 I` by the share of the ridge in the smallest eigenvalues, and by
        float rounding times the root of the condition number of :math:`\Sigma`.

    Example:
        >>> import orthocond
        >>> conv = torch.nn.Conv2d(3, 16, 3, padding=1, bias=False)
        >>> images = torch.randn(64, 3, 8, 8).cumsum(-1)  # neighboring pixels are correlated
        >>> output = conv(images).transpose(0, 1).flatten(1)
        >>> print(f"{orthocond.spectrum(torch.cov(output)).condition:.0e}")
        2e+02
        >>> output = whitening_init_(conv, images)(images).transpose(0, 1).flatten(1)
        >>> print(f"{orthocond.spectrum(torch.cov(output)).condition:.1f}")
        1.0
    """
    check_layer(module, "whitening_init_")
    weight = find_parameter(module, "weight", "whitening_init_")
    check_not_negative(ridge, "whitening_init_(ridge=...)")
    gain = check_gain(gain, "whitening_init_")
    sigma = patch_covariance(module, batch)
    check_finite_batch(sigma)
    metric = check_positive(add_relative_ridge(sigma, ridge), "whitening_init_")
    roots = square_roots(metric)
    w = matrices(weight, groups_of(module)).double()
    if rng is None:
        start = w @ roots.sqrt
    else:
        start = torch.randn(w.shape, dtype=w.dtype, device=rng.device, generator=rng).to(w.device)
    q = polar(start)
    check_full_rank(q, "whitening_init_")
    weight.copy_((gain * q @ roots.inv_sqrt).reshape(weight.shape))
    return module


class Metric(nn.Module):
    """A covariance and its inverse root, given once or followed as a running average.

    Args:
        covariance: Matrices ``(groups, n, n)``, symmetric and positive definite with the ridge.
        ridge: Share of the mean eigenvalue that is added to each.
        dtype: Dtype of the buffers.
        momentum: Weight of the newest batch in the running average. While fewer batches than ``1 / momentum`` were
            seen, all count the same, so the first batch replaces the start and 0 is the plain average.
    """

    covariance: Tensor
    root: Tensor
    num_batches_tracked: Tensor

    def __init__(self, covariance: Tensor, ridge: float, dtype: torch.dtype, momentum: float | None = None) -> None:
        super().__init__()
        self.ridge = ridge
        self.momentum = momentum
        self.register_buffer("covariance", covariance.to(dtype, copy=True))
        self.register_buffer("root", self._inverse_root(covariance).to(dtype))
        if momentum is not None:
            self.register_buffer("num_batches_tracked", torch.tensor(0, device=covariance.device))

    def _inverse_root(self, covariance: Tensor) -> Tensor:
        return inv_sqrtm(add_relative_ridge(covariance.double(), self.ridge))

    def square_root(self) -> Tensor:
        """The inverse of ``root``, in float64."""
        return square_roots(add_relative_ridge(self.covariance.double(), self.ridge)).sqrt

    def update(self, covariance: Tensor) -> None:
        """Take one batch into the running average. Nothing changes if its root cannot be computed."""
        assert self.momentum is not None
        rate = (1 / (self.num_batches_tracked + 1.0)).clamp(min=self.momentum)
        average = self.covariance.double().lerp(covariance, rate.double())
        root = self._inverse_root(average)
        self.covariance.copy_(average)
        self.root.copy_(root)
        self.num_batches_tracked.add_(1)

    def extra_repr(self) -> str:
        followed = "" if self.momentum is None else f", momentum={self.momentum}"
        return f"{self.root.shape[-1]}, ridge={self.ridge}{followed}"


class FollowInput:
    """Forward-pre-hook that takes the covariance of the input of each training forward into the layer's metric.

    It removes itself when the parametrization was removed. With several processes the batch is all of theirs. A forward
    that activation checkpointing repeats in the backward pass is not counted again.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.name = name
        self.handle: RemovableHandle = module.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not parametrize.is_parametrized(module, self.name):
            self.handle.remove()
        elif module.training and not in_backward():
            x = args[0] if args else kwargs["input"]
            metric = module.get_submodule(f"parametrizations.{self.name}.0.metric")
            assert isinstance(metric, Metric)
            with torch.no_grad(), without_autocast(x):
                moments = _InputMoments(module)
                moments.add(x)
                moments.synchronize()
                metric.update(moments.covariance().view_as(metric.covariance))


def check_layer(module: nn.Module, caller: str) -> None:
    """Raise a `TypeError` if the module's weight does not multiply patches of its input."""
    if not isinstance(module, (nn.Linear, *CONVOLUTIONS)):
        transposed = isinstance(module, TRANSPOSED_CONVOLUTIONS)
        why = " The matrix of a transposed convolution multiplies one position, not a patch." if transposed else ""
        raise TypeError(
            f"{caller} needs Linear, Conv1d, Conv2d or Conv3d, whose weight multiplies patches of the input; got "
            f"{type(module).__name__}.{why}"
        )


def add_relative_ridge(covariance: Tensor, ridge: float) -> Tensor:
    """Return ``Σ + ridge · mean(λ) I``."""
    mean = covariance.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    return covariance + ridge * mean * eye_like(covariance)


def check_positive(covariance: Tensor, caller: str) -> Tensor:
    """Return the symmetric part of matrices ``(*, n, n)`` if all are symmetric and positive definite, else raise."""
    symmetric = symmetric_part(covariance)
    rounding = torch.finfo(covariance.dtype).eps ** 0.5 * symmetric.abs().amax()
    if bool((covariance - symmetric).abs().amax() > rounding):
        raise ValueError(f"{caller} needs a symmetric covariance; this one differs from its transpose.")
    found = spectrum(symmetric)
    worst = int(found.rank.min())
    if worst < found.size:
        raise ValueError(
            f"{caller} needs a positive definite covariance; this one has rank {worst} of {found.size}, so some "
            "directions have no variance. Pass more data, or a ridge such as ridge=1e-4."
        )
    return symmetric


def _batches(batch: Tensor | Iterable[Any]) -> Iterator[Tensor]:
    """The inputs in a tensor, or in an iterable of tensors or of tuples that start with one."""
    for item in [batch] if isinstance(batch, Tensor) else batch:
        x = item[0] if isinstance(item, (tuple, list)) and item else item
        if not isinstance(x, Tensor):
            raise TypeError(
                f"patch_covariance needs batches that are tensors or (input, target) tuples; got {type(x).__name__}."
            )
        yield x


class _InputMoments:
    """Count, mean and scatter of the patches seen, in float64, for each group."""

    def __init__(self, module: nn.Module) -> None:
        check_layer(module, "patch_covariance")
        self.module = module
        self.device = next(module.parameters(recurse=True)).device
        columns = _columns(module)
        self.groups = groups_of(module)
        self.count: int | Tensor = 0  # known without a look at the device until processes are merged
        self.mean = torch.zeros(self.groups, columns, dtype=torch.float64, device=self.device)
        self.scatter = torch.zeros(self.groups, columns, columns, dtype=torch.float64, device=self.device)

    def add(self, x: Tensor) -> None:
        """Merge one input, a piece at a time."""
        for piece in _pieces(self.module, x.to(self.device)):
            patches = _patches(self.module, piece.double())
            mean = patches.mean(-1)
            centered = patches - mean.unsqueeze(-1)
            total = self.count + patches.shape[-1]
            shift = mean - self.mean
            between = self.count * patches.shape[-1] / total * shift.unsqueeze(-1) * shift.unsqueeze(-2)
            self.scatter += centered @ centered.mT + between
            self.mean += shift * (patches.shape[-1] / total)
            self.count = total

    def synchronize(self) -> None:
        """Merge what all processes of the default group have seen."""
        if not several_processes(None):
            return
        total = sum_across(torch.full((), float(self.count), dtype=torch.float64, device=self.device))
        mean = sum_across(self.count * self.mean) / total
        shift = self.mean - mean
        self.scatter += self.count * shift.unsqueeze(-1) * shift.unsqueeze(-2)
        self.scatter = sum_across(self.scatter)
        self.count, self.mean = total, mean

    def covariance(self) -> Tensor:
        if isinstance(self.count, int) and self.count == 0:
            raise ValueError("patch_covariance needs data; the batch or loader held none (an exhausted iterator?).")
        covariance = self.scatter / self.count
        return covariance if self.groups > 1 else covariance[0]


def _columns(module: nn.Module) -> int:
    if isinstance(module, nn.Linear):
        return module.in_features
    assert isinstance(module, CONVOLUTIONS)
    return module.in_channels // module.groups * math.prod(module.kernel_size)


def _pieces(module: nn.Module, x: Tensor) -> Iterator[Tensor]:
    """Check an input, give it its batch dimension, and split it so that the patches of a piece fit in memory."""
    if isinstance(module, nn.Linear):
        if x.shape[-1:] != (module.in_features,):
            raise ValueError(
                f"{type(module).__name__} needs inputs (*, {module.in_features}); got shape {tuple(x.shape)}."
            )
        rows = x.reshape(-1, module.in_features)
        yield from rows.split(max(1, _CHUNK // module.in_features)) if len(rows) else ()
        return
    assert isinstance(module, CONVOLUTIONS)
    spatial = len(module.kernel_size)
    if x.ndim == spatial + 1:
        x = x.unsqueeze(0)
    if x.ndim != spatial + 2 or x.shape[1] != module.in_channels:
        sizes = ("L", "H, W", "D, H, W")[spatial - 1]
        raise ValueError(
            f"{type(module).__name__} needs inputs (N, {module.in_channels}, {sizes}); got shape {tuple(x.shape)}."
        )
    entries = x[:1].numel() * math.prod(module.kernel_size) // math.prod(module.stride)
    yield from x.split(max(1, _CHUNK // max(entries, 1))) if len(x) else ()


def _patches(module: nn.Module, x: Tensor) -> Tensor:
    """All patches of an input ``(groups, columns, positions)``, in the order of the weight's columns."""
    if isinstance(module, nn.Linear):
        return x.mT.unsqueeze(0)
    assert isinstance(module, CONVOLUTIONS)
    x = _pad(module, x)
    spatial = len(module.kernel_size)
    for axis, (size, step, gap) in enumerate(zip(module.kernel_size, module.stride, module.dilation, strict=True)):
        x = x.unfold(2 + axis, gap * (size - 1) + 1, step)[..., ::gap]
    # (N, channels, *positions, *kernel) -> (channels, *kernel, N, *positions): rows of positions are copied as a whole.
    positions, kernel = range(2, 2 + spatial), range(2 + spatial, 2 + 2 * spatial)
    return x.permute(1, *kernel, 0, *positions).reshape(module.groups, _columns(module), -1)


def _pad(module: nn.Conv1d | nn.Conv2d | nn.Conv3d, x: Tensor) -> Tensor:
    """Pad as the convolution does."""
    if module.padding == "valid":
        return x
    sides: list[int] = []
    for axis in reversed(range(len(module.kernel_size))):  # F.pad starts with the last dimension
        if module.padding == "same":
            total = module.dilation[axis] * (module.kernel_size[axis] - 1)
            sides += [total // 2, total - total // 2]
        else:
            sides += [int(module.padding[axis])] * 2
    return F.pad(x, sides, mode="constant" if module.padding_mode == "zeros" else module.padding_mode)
