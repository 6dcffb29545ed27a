"""What decorrelated batch normalization does, for any number of position dimensions (paper: section 6.1)."""

import warnings
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, fx, nn

from orthocond._checks import (
    all_true,
    at_least_float32,
    check_choice,
    check_count,
    check_not_negative,
    in_transform,
    without_autocast,
)
from orthocond._distributed import several_processes
from orthocond.layers.base import SVDLayer, affine, as_leaf, check_features, flatten
from orthocond.layers.following import RunningStatistics, check_origin, moved, obstacle, weight_of
from orthocond.layers.statistics import Moments, moments
from orthocond.layers.whitening import (
    are_finite,
    batch_whitening,
    check_groups,
    check_moments,
    check_samples,
    covered,
    stored_whitening,
)
from orthocond.matrix import Eigh, Solver

_EIGH = Eigh()
_KEPT = ("running_mean", "running_covariance", "running_whitening", "running_weight", "excess")
_STORED = ("whitening", "center")  # what evaluation derives from them
_Sources = tuple[Tensor | None, ...]


class _Derived(NamedTuple):
    """Copies of what evaluation has stored and of what that was derived from, and with which settings.

    It is no buffer: what copies, averages or restores buffers must not reach it.
    """

    sources: _Sources
    settings: object


def _diagonal_blocks(covariance: Tensor, groups: int) -> Tensor:
    """Covariances ``(k, n, n)`` of more groups, if k divides them; else as they are."""
    parts, rest = divmod(groups, len(covariance))
    size = covariance.shape[-1] // parts if parts else 0
    if rest or parts < 2 or size * parts != covariance.shape[-1]:
        return covariance
    blocks = covariance.reshape(-1, parts, size, parts, size).diagonal(dim1=1, dim2=3)
    return blocks.movedim(-1, 1).reshape(groups, size, size)


class Transform(NamedTuple):
    """The affine map ``matrix @ x + offset`` of the channels: ``(groups, C / groups, C / groups)`` and ``(C,)``."""

    matrix: Tensor
    offset: Tensor


class _DecorrelatedBatchNorm(SVDLayer):
    _dims: ClassVar[tuple[int, ...]]

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor | None
    running_covariance: Tensor | None
    running_whitening: Tensor | None
    running_weight: Tensor | None
    excess: Tensor | None
    num_batches_tracked: Tensor | None
    whitening: Tensor | None
    center: Tensor | None
    skipped_batches: Tensor | None
    _version = 2  # as nn.BatchNorm: since then with num_batches_tracked

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        groups: int = 1,
        solver: Solver = _EIGH,
        average: str = "covariance",
        lag: str = "cover",
        nonfinite: str = "propagate",
        synchronize: bool = False,
        process_group: Any = None,
    ) -> None:
        super().__init__(solver=solver, nonfinite=nonfinite)
        name = type(self).__name__
        check_count(num_features, f"{name}(num_features=...)", 1)
        check_groups(num_features, groups, name)
        check_choice(average, f"{name}(average=...)", ("covariance", "whitening"))
        check_choice(lag, f"{name}(lag=...)", ("cover", "ignore"))
        if momentum is not None and not 0 <= momentum <= 1:
            raise ValueError(f"{name}(momentum=...) needs a number from 0 to 1, or None; got {momentum!r}.")
        self.num_features = num_features
        self.eps = check_not_negative(eps, f"{name}(eps=...)")
        self.momentum = momentum
        self.affine = affine
        self.track_running_stats = track_running_stats
        self.groups = groups
        self.average = average
        self.lag = lag
        self.synchronize = synchronize
        self.process_group = process_group
        for parameter, wanted in (("weight", affine), ("bias", affine and bias)):
            value = nn.Parameter(torch.empty(num_features, device=device, dtype=dtype)) if wanted else None
            self.register_parameter(parameter, value)
        self._followed: tuple[nn.Module, ...] = ()  # a tuple, so that it is no part of this layer
        self._doubted = False  # whether no batch has shown yet that the followed layer made it
        self._derived: _Derived | None = None
        self._warned = False
        self._register_statistics(device, at_least_float32(dtype or torch.get_default_dtype()))
        self.reset_parameters()

    def _register_statistics(self, device: Any, dtype: torch.dtype) -> None:
        size = self.num_features // self.groups
        there: dict[str, Tensor] = {}
        if self.track_running_stats:
            square = torch.eye(size, device=device, dtype=dtype).repeat(self.groups, 1, 1)
            there["running_mean"] = torch.zeros(self.num_features, device=device, dtype=dtype)
            if self.average == "covariance":
                there |= {"running_covariance": square, "whitening": square.clone()}
                if self.lag == "cover":
                    there["excess"] = torch.zeros_like(square)
            else:
                there["running_whitening"] = square
            there |= {name: torch.tensor(0, device=device) for name in ("num_batches_tracked", "skipped_batches")}
        names = (*_KEPT, *_STORED, "num_batches_tracked", "skipped_batches")
        for name in sorted(names, key=lambda name: name not in there):  # torch.export needs those that are None last
            self.register_buffer(name, there.get(name), persistent=name not in (*_STORED, "skipped_batches"))

    def reset_running_stats(self) -> None:
        """Set the running mean and the excess to 0 and the running covariance, or whitening matrix, to the identity."""
        if self.running_mean is None or self.num_batches_tracked is None or self.skipped_batches is None:
            return
        self.running_mean.zero_()
        size = self.num_features // self.groups
        for square in (self.running_covariance, self.running_whitening):
            if square is not None:
                square.copy_(torch.eye(size, device=square.device, dtype=square.dtype))
        for unknown in (self.excess, self.running_weight):
            if unknown is not None:
                unknown.zero_()
        self.num_batches_tracked.zero_()
        self.skipped_batches.zero_()
        if not self.training:
            self._refresh()

    def reset_parameters(self) -> None:
        """Reset the statistics, the weight to 1 and the bias to 0."""
        self.reset_running_stats()
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def follow(self, layer: nn.Module | None) -> Self:
        r"""Let the running statistics go along with the weight of the layer whose output this layer normalizes.

        Running statistics belong to weights of some steps ago, and whitening multiplies the difference. Where the
        weight :math:`W` has full column rank, the features tell their inputs, and statistics of one weight are those of
        another one by :math:`A = W' W^+`: mean :math:`A (\mu - b) + b'`, covariance :math:`A P A^T`. So training takes
        them along from step to step, and evaluation to the weight as it is then, be it the last one, an average, or
        parametrized. What still lags is the input itself, as in plain batch normalization. The weight of the
        statistics, with the bias as last column, is kept in the buffer ``running_weight``.

        `convert_batchnorm` calls it for layers right after a convolution or linear layer, where it sees that.

        Args:
            layer: The convolution or linear layer whose output is normalized, as it is; None ends it. It is the object
                that is followed: call ``follow`` anew if another one takes its place, or for a copy of this layer
                without it. A weight with as many rows as columns could have made any features, so nothing tells a
                layer that is not the right one.

        Returns:
            This layer.

        Raises:
            TypeError: If ``layer`` is no module.
            ValueError: If the statistics cannot go along: the layer has more inputs (kernel size included) than
                outputs in a group, or is of another kind, or this layer keeps no running covariance.

        Warns:
            UserWarning: At the first batch in training, if the weight cannot have made a tenth of its variance.

        Example:
            >>> conv = torch.nn.Conv2d(3, 64, 3)
            >>> from orthocond.layers import DecorrelatedBatchNorm2d
            >>> norm = DecorrelatedBatchNorm2d(64).follow(conv)
            >>> norm.running_weight.shape
            torch.Size([1, 64, 28])
        """
        name = f"{type(self).__name__}.follow"
        if layer is None:
            self._followed, self.running_weight, self.center = (), None, None
            if not self.training:
                self._refresh()
            return self
        if not isinstance(layer, nn.Module):
            raise TypeError(f"{name} needs the layer before this one, a torch.nn.Module; got {type(layer).__name__}.")
        if self.running_covariance is None or self.running_mean is None:
            raise ValueError(f"{name} needs a layer that keeps a running covariance; this one has {self.extra_repr()}.")
        reason = obstacle(layer, self.num_features, self.groups)
        if reason is not None:
            raise ValueError(
                f"{name} needs a convolution or linear layer with at most as many inputs as outputs, so that the "
                f"statistics can follow; {reason}. Use orthocond.update_statistics(model, loader) before evaluation."
            )
        weight = weight_of(layer, self.groups)
        if layer is self.follows and self.running_weight is not None and weight.shape == self.running_weight.shape:
            return self
        self._followed, self._doubted = (layer,), True
        self.running_weight = torch.zeros_like(weight, dtype=self.running_covariance.dtype)
        self.center = self.running_mean.clone()
        return self

    @property
    def follows(self) -> nn.Module | None:
        """The layer whose weight the running statistics go along with; None if there is none."""
        return self._followed[0] if self._followed else None

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, fx.Proxy):
            return as_leaf(self, x)
        x = check_features(x, type(self).__name__, self._dims, self.num_features)
        flat, layout = flatten(x.to(at_least_float32(x.dtype)))
        with without_autocast(x):
            if self.training or self.running_mean is None:
                flat, transform = self._batch_transform(flat, x)
            else:
                transform = self.inference_transform()
        matrix, offset = (part.to(flat.dtype) for part in transform)
        return layout.restore(affine(flat, matrix, offset)).to(x.dtype)

    def inference_transform(self) -> Transform:
        """The map ``matrix @ x + offset`` of evaluation mode: whitening, mean and affine parameters in one.

        Raises:
            RuntimeError: If the layer keeps no running statistics.
        """
        if self.running_mean is None:
            raise RuntimeError(
                f"{type(self).__name__} was built with track_running_stats=False and whitens by the batch in "
                "evaluation too, so it has no fixed transform."
            )
        return self._combine(*self._running())

    def _combine(self, mean: Tensor, whitening: Tensor) -> Transform:
        """``γ W x + (β - γ W μ)``."""
        shape = (self.groups, self.num_features // self.groups, 1)
        matrix = whitening
        if self.weight is not None:
            matrix = self.weight.to(matrix.dtype).reshape(shape) * matrix
        offset = -(matrix @ mean.reshape(shape)).flatten()
        if self.bias is not None:
            offset = self.bias.to(offset.dtype) + offset
        return Transform(matrix, offset)

    def _batch_transform(self, flat: Tensor, x: Tensor) -> tuple[Tensor, Transform]:
        name = type(self).__name__
        synchronize = self.synchronize and self.training and several_processes(self.process_group)
        count = flat.shape[0] * flat.shape[2]
        if not synchronize:
            if count == 0:  # as nn.BatchNorm: nothing in, nothing out, and a gradient of zeros
                return flat, self._combine(flat.new_zeros(self.num_features), self._identity(flat))
            check_samples(count, x.shape, name)
            self._warn_of_rank(count)
        flat, found = moments(flat, self.groups, self.process_group, synchronize=synchronize)
        if count < 2 and all_true(torch.as_tensor(found.samples) < 2):
            check_samples(count, x.shape, name)
        if self.nonfinite == "raise":
            check_moments(found, x, name)
        self._observe(found.covariance)
        whitening = batch_whitening(found, x.dtype, self.eps, self.solver)
        if self.training and self.track_running_stats:
            self._update(found, whitening)
        return flat, self._combine(found.mean, whitening)

    def _identity(self, like: Tensor) -> Tensor:
        size = self.num_features // self.groups
        return torch.eye(size, device=like.device, dtype=like.dtype).repeat(self.groups, 1, 1)

    def _warn_of_rank(self, count: int) -> None:
        size = self.num_features // self.groups
        if count > size or self._warned or not self.training or torch.compiler.is_compiling():
            return
        self._warned = True
        warnings.warn(
            f"{type(self).__name__} got {count} samples (batch times positions) for groups of {size} channels: their "
            "covariance is singular, and whitening moves all samples equally far apart, whatever they were. Use more "
            "samples, or more groups.",
            stacklevel=2,
        )

    @torch.no_grad()
    def _update(self, found: Moments, whitening: Tensor) -> None:
        """Average the running statistics with those of a batch, unless these are not finite in their dtype."""
        if self.running_mean is None or self.num_batches_tracked is None or self.skipped_batches is None:
            return
        self._go_along()
        if self._doubted and self.follows is not None:
            self._doubted = not check_origin(found.covariance, self.follows, type(self).__name__)
        pairs = [(self.running_mean, found.mean)]
        if self.running_covariance is not None:
            unbiased = found.samples / (found.samples - 1)
            pairs.append((self.running_covariance, found.covariance * unbiased))
        if self.running_whitening is not None:
            pairs.append((self.running_whitening, whitening))
        pairs = [(running, new.to(running.dtype)) for running, new in pairs]
        sound = are_finite(*(new for _, new in pairs))
        self.num_batches_tracked.add_(sound)
        self.skipped_batches.add_(~sound)
        for running, new in pairs:
            share: Any = self.momentum
            if share is None:
                share = self.num_batches_tracked.clamp(min=1).to(running.dtype).reciprocal()
            running.copy_(torch.lerp(running, torch.where(sound, new, running), share))
        if self.excess is not None and self.momentum != 0:
            running, new = pairs[1]
            # Largest eigenvalue of the covariance of so few samples of unit variance (Marchenko and Pastur): what is
            # below is chance.
            noise = (1 + (running.shape[-1] / found.samples) ** 0.5) ** 2
            self.excess.copy_(torch.where(sound, new - noise * running, self.excess))

    def _present(self) -> tuple[RunningStatistics, Tensor | None]:
        """The running statistics and their weight; those of the weight as it is now, if they follow one."""
        assert self.running_mean is not None
        assert self.running_covariance is not None
        kept = RunningStatistics(self.running_mean, self.running_covariance, self.excess)
        then = self.running_weight
        if then is None or self.follows is None:
            return kept, then
        return moved(kept, then, self.follows)

    def _go_along(self) -> None:
        """Bring the running statistics to the weight that they follow."""
        if self.running_weight is None:
            return
        statistics, weight = self._present()
        buffers = self.running_mean, self.running_covariance, self.excess, self.running_weight
        for old, new in zip(buffers, (*statistics, weight), strict=True):
            if old is not None and new is not None:
                old.copy_(new)

    def _running(self) -> tuple[Tensor, Tensor]:
        """Mean and whitening matrix of evaluation."""
        assert self.running_mean is not None
        if self.running_whitening is not None:
            return self.running_mean, self.running_whitening
        if not torch.compiler.is_compiling():  # exported and compiled graphs hold what is stored
            derived = self._is_derived()
            if derived is None or (in_transform() and not derived):
                return self._derive()  # tensors of torch.func must not be kept
            if not derived:
                self._refresh()
        assert self.whitening is not None
        return self.running_mean if self.center is None else self.center, self.whitening

    def _sources(self) -> _Sources:
        """What evaluation derives from, and what it has stored."""
        followed = None if self.follows is None else weight_of(self.follows, self.groups)
        kept = (self.running_mean, self.running_covariance, self.running_weight, self.excess, followed)
        return *kept, self.center, self.whitening

    def _is_derived(self) -> bool | None:
        """Whether what evaluation has stored is that of the statistics; None where values cannot be read.

        It compares values, since an in-place change through ``.data``, a NumPy view or a collective leaves no trace.
        """
        covariance, derived = self.running_covariance, self._derived
        if covariance is None:
            return True
        if derived is None or derived.settings != self._settings(covariance):
            return False
        pairs = list(zip(self._sources(), derived.sources, strict=True))
        if any((a is None) != (b is None) for a, b in pairs):
            return False
        present = [(a, b) for a, b in pairs if a is not None and b is not None]
        if any(type(a) is not type(b) for a, b in present):  # a fake tensor, or one of a tracer
            return None
        return all_true(torch.stack([((a == b) | (a.isnan() & b.isnan())).all() for a, b in present]))

    def _settings(self, covariance: Tensor) -> object:
        return self.eps, self.solver, covariance.dtype, covariance.device

    def _derive(self) -> tuple[Tensor, Tensor]:
        owner = f"{type(self).__name__}({self.num_features})"
        try:
            mean, covariance, excess = self._present()[0]
            covariance = covariance.detach()
            if excess is not None:
                covariance = covered(covariance, excess.detach())
            return mean, stored_whitening(covariance, self.eps, self.solver, owner)
        except (ValueError, RuntimeError) as error:
            raise RuntimeError(
                f"{owner} cannot compute the whitening matrix of its running covariance: {error} Load a sound state, "
                "or refresh the statistics with orthocond.update_statistics(model, loader)."
            ) from error

    @torch.inference_mode(False)
    @torch.no_grad()
    def _refresh(self) -> None:
        """Store the whitening matrix of the statistics, as a tensor that every mode can use."""
        covariance = self.running_covariance
        if covariance is not None:
            mean, self.whitening = self._derive()
            if self.center is not None:
                self.center = mean.clone()
            copies = tuple(None if each is None else each.detach().clone() for each in self._sources())
            self._derived = _Derived(copies, self._settings(covariance))

    def train(self, mode: bool = True) -> "_DecorrelatedBatchNorm":
        """Switch between training and evaluation; entering evaluation computes the whitening matrix once."""
        super().train(mode)
        if not mode and self._is_derived() is False:
            self._refresh()
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "_DecorrelatedBatchNorm":
        before = {name: self._buffers[name] for name in (*_KEPT, *_STORED)}
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and at_least_float32(new.dtype) != new.dtype:
                # half() and bfloat16() would leave too few digits of a covariance to invert it.
                self._buffers[name] = old.to(new.device)
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        state_dict = self._from_batchnorm(dict(state_dict), prefix)
        count = prefix + "num_batches_tracked"
        if self.num_batches_tracked is not None and (local_metadata.get("version") or 0) < 2:
            known = torch.tensor(0) if self.num_batches_tracked.is_meta else self.num_batches_tracked
            state_dict.setdefault(count, known)  # a state from before it was counted, or a plain dict of tensors
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        if not self.training:
            self._refresh()

    def _from_batchnorm(self, state: dict[str, Any], prefix: str) -> dict[str, Any]:
        """Accept the state of an ``nn.BatchNorm``, whose variances are a diagonal, and of a layer with fewer groups."""
        if prefix + "running_var" in state and self.running_mean is not None:
            variance = state.pop(prefix + "running_var")
            name, diagonal = "running_covariance", variance
            if self.average == "whitening":
                name, diagonal = "running_whitening", (variance + self.eps).rsqrt()
            state[prefix + name] = torch.diag_embed(diagonal.reshape(self.groups, -1))
        covariance = state.get(prefix + "running_covariance")
        if covariance is not None and self.running_covariance is not None:
            state[prefix + "running_covariance"] = covariance = _diagonal_blocks(covariance, self.groups)
        excess = state.pop(prefix + "excess", None)
        if covariance is not None and self.excess is not None:
            # A state from elsewhere has no excess.
            excess = torch.zeros_like(covariance) if excess is None else _diagonal_blocks(excess, self.groups)
            state[prefix + "excess"] = excess
        weight = state.pop(prefix + "running_weight", None)
        if covariance is not None and self.running_weight is not None:
            # Nor does it say which weight its statistics are of.
            weight = covariance.new_zeros(self.running_weight.shape) if weight is None else weight
            state[prefix + "running_weight"] = weight
        return state

    def extra_repr(self) -> str:
        text = (
            f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.affine}, "
            f"track_running_stats={self.track_running_stats}, groups={self.groups}, solver={self.solver}"
        )
        if self.average != "covariance":
            text += f", average={self.average!r}"
        if self.lag != "cover":
            text += f", lag={self.lag!r}"
        if self.weight is not None and self.bias is None:
            text += ", bias=False"
        if self.nonfinite != "propagate":
            text += f", nonfinite={self.nonfinite!r}"
        if self.synchronize:
            text += ", synchronize=True"
        if self.follows is not None:
            text += f", follows={type(self.follows).__name__}"
        return text
