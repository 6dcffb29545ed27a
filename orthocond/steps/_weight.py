"""One treated weight: where it comes from, how it is read and written, and what is counted."""

import warnings
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from orthocond._layers import matrices

MOMENTUM = "stiefel_momentum"  # under which the optimizer's state holds the average gradient
_COUNTS = ("steps", "without_gradient", "skipped", "shortened", "at_floor")
_PATIENCE = 3  # backward passes with untreated moves before them, until a warning
_LARGE = 2**16  # entries of a weight from which small calls cost nothing beside its products
_NOTHING = torch.empty(0)


@dataclass(frozen=True, eq=False)
class StepStatistics:
    """What a treatment did to one weight so far.

    Attributes:
        name: Kind and shape of the weight.
        parameter: The weight itself.
        steps: Steps at which it was treated.
        without_gradient: Steps at which it had no gradient, so that neither optimizer nor treatment did anything.
        skipped: Steps that a fused optimizer skipped because a GradScaler found an infinite gradient.
        shortened: Steps at which OLR (or a control of it) took a step length other than the learning rate.
        at_floor: Steps at which OLR took its floor. There it acts as a learning rate that is smaller by that factor.
        rates: The last step lengths η that OLR (or a control of it) chose, oldest first; empty without.
        spectra: Singular values ``(groups, min(m, n))``, descending, of gradients before NOG, by number of the step
            counted from 0; the last ones only.
    """

    name: str
    parameter: Tensor = field(repr=False)
    steps: int
    without_gradient: int
    skipped: int
    shortened: int
    at_floor: int
    rates: list[float] = field(repr=False)
    spectra: dict[int, Tensor] = field(repr=False)

    @property
    def occurrence(self) -> float:
        """Fraction of the treated steps at which OLR acted; NaN before the first."""
        return self.shortened / self.steps if self.steps else float("nan")


class Weight:
    """A treated weight as matrices ``(groups, m, n)``, what is kept of it during a step, and what is counted.

    It also notices when the weight is moved by something else than the treated optimizer.
    """

    def __init__(self, parameter: Tensor, name: str, groups: int, history: int) -> None:
        self.parameter = parameter
        self.name = f"{name} {tuple(parameter.shape)}"
        self.shape = matrices(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), groups).shape
        self.before = self.after = self.average = self.fraction = _NOTHING  # set during a step
        self.lr: float | Tensor = 0.0
        self.maximize = False
        self.steps = self.without_gradient = self.skipped = 0
        self.shortened: Tensor | int = 0
        self.at_floor: Tensor | int = 0
        self.rates: deque[Tensor] = deque(maxlen=history)
        self.spectra: deque[tuple[int, Tensor]] = deque(maxlen=history)
        self._version = parameter._version
        self._moved_untreated = 0
        self.moved_by_fused = False

    def watch(self, optimizer_name: str) -> Any:
        """Warn, at backward passes, if the weight moves and no step is treated; return the handle of the hook.

        torch counts the changes of a tensor as its version, but not those by fused optimizers.
        """
        _watched[id(self.parameter)] = self
        if not _global_hooks:
            _global_hooks.append(register_optimizer_step_post_hook(_notice_fused))

        def probe(parameter: Tensor) -> None:
            if parameter._version == self._version and not self.moved_by_fused:
                return
            self._version, self.moved_by_fused = parameter._version, False
            self._moved_untreated += 1
            if self._moved_untreated == _PATIENCE:
                warnings.warn(
                    f"{self.name} has moved before each of {_PATIENCE} backward passes, but not by a step of the "
                    f"treated {optimizer_name}: its treatment does nothing. Call treat with the optimizer that moves "
                    "it; one that is copied or made anew has no treatment. Said once.",
                    RuntimeWarning,
                    stacklevel=2,
                )

        return self.parameter.register_post_accumulate_grad_hook(probe)

    def has_gradient(self) -> bool:
        """Whether there is a gradient; count it if not, and warn if there has never been one."""
        if self.parameter.grad is not None:
            return True
        if not self.steps and not self.without_gradient:
            warnings.warn(
                f"{self.name} has no gradient at the optimizer's step, so neither the optimizer nor its treatment "
                "changes it. Check that the loss depends on it and that backward() was called. Said once.",
                RuntimeWarning,
                stacklevel=2,
            )
        self.without_gradient += 1
        return False

    def gradient(self) -> Tensor:
        """The gradient as matrices."""
        return self._matrices(self._dense_gradient())

    def _dense_gradient(self) -> Any:
        gradient: Any = self.parameter.grad
        if gradient.layout is not torch.strided:
            raise TypeError(
                f"A treatment needs dense gradients; that of {self.name} is {gradient.layout}. Use sparse=False."
            )
        return gradient

    def matrices(self) -> Tensor:
        """The weight as matrices."""
        return self._matrices(self.parameter.detach())

    def average_gradient(self, state: dict[str, Any], momentum: float, scale: Tensor | None) -> Tensor:
        """The average gradient as matrices, once the present gradient is part of it; kept until the step is made."""
        gradient = self._dense_gradient() if scale is None else self._dense_gradient() / scale
        average: Any = state.get(MOMENTUM)
        before = torch.zeros_like(gradient) if average is None else average.to(gradient.dtype)  # loading casts it
        self.average = torch.lerp(before, gradient, 1 - momentum)
        return self._matrices(self.average)

    def matrices_before(self) -> Tensor:
        """The weight before the step as matrices."""
        return self._matrices(self.before)

    def _matrices(self, tensor: Any) -> Tensor:
        whole = tensor.full_tensor() if _is_sharded(tensor) else tensor
        return whole.reshape(self.shape)

    def lr_tensor(self) -> Tensor:
        """The learning rate of the group, on the device of the weight."""
        device = self.parameter.device
        if isinstance(self.lr, Tensor):
            return self.lr.reshape(()).to(device, torch.float64)
        return torch.full((), self.lr, dtype=torch.float64, device=device)  # torch.tensor would wait for the device

    def shorten_update(self, floor: float | None) -> None:
        """Keep the chosen fraction of the update; a fraction of 1 changes no bit of it."""
        after, before = _local(self.parameter.detach()), _local(self.before)
        torch.lerp(before, after, self.fraction.to(after.dtype), out=after)
        self.shortened = self.shortened + (self.fraction != 1)
        if floor is not None and floor < 1:
            self.at_floor = self.at_floor + (self.fraction <= floor * (1 + 1e-9))
        self.rates.append(self.fraction * self.lr_tensor())

    def record_spectrum(self, gradient: Tensor) -> None:
        """Record the singular values ``(groups, min(m, n))`` of the gradient, from the smaller Gram matrix."""
        if self.spectra and self.spectra[-1][0] == self.steps:
            return  # the hook was called twice for this step, and the gradient is orthogonal by now
        g = gradient.double()
        size = g.abs().amax((-2, -1), keepdim=True)  # by which its squares neither overflow nor vanish
        g = g / torch.where(size > 0, size, 1)
        gram = g.mT @ g if g.shape[-2] > g.shape[-1] else g @ g.mT
        self.spectra.append((self.steps, torch.linalg.eigvalsh(gram).clamp(min=0).sqrt().flip(-1) * size[..., 0]))

    def release(self) -> None:
        """Free what was kept during the step, and count it."""
        self.before = self.after = self.average = self.fraction = _NOTHING
        self._version, self._moved_untreated = self.parameter._version, 0
        self.steps += 1

    def state(self) -> dict[str, Any]:
        """What was counted, as plain data and tensors."""
        counts = {name: getattr(self, name) for name in _COUNTS}
        return counts | {"rates": list(self.rates), "spectra": list(self.spectra)}

    def load(self, state: dict[str, Any]) -> None:
        """Go on counting from `state`."""
        device = self.parameter.device
        for name in _COUNTS:
            value = state[name]
            setattr(self, name, value.to(device) if isinstance(value, Tensor) else value)
        self.rates.clear()
        self.rates.extend(rate.to(device) for rate in state["rates"])
        self.spectra.clear()
        self.spectra.extend((step, values.to(device)) for step, values in state["spectra"])

    def statistics(self) -> StepStatistics:
        """What was counted, read from the device."""
        return StepStatistics(
            name=self.name,
            parameter=self.parameter,
            steps=self.steps,
            without_gradient=self.without_gradient,
            skipped=self.skipped,
            shortened=int(self.shortened),
            at_floor=int(self.at_floor),
            rates=torch.stack(tuple(self.rates)).tolist() if self.rates else [],
            spectra=dict(self.spectra),
        )


# The weights that are watched, by the id of their parameters, and the hook of all optimizers that they need.
_watched: WeakValueDictionary[int, Weight] = WeakValueDictionary()
_global_hooks: list[Any] = []


def _notice_fused(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for group in optimizer.param_groups:
        if group.get("fused"):
            for parameter in group["params"]:
                weight = _watched.get(id(parameter))
                if weight is not None:
                    weight.moved_by_fused = True


def batches(weights: Iterable[Weight]) -> list[list[Weight]]:
    """Weights whose matrices can be stacked, together. On a CPU large ones stay alone, as a stack is a copy of them."""
    result: dict[object, list[Weight]] = {}
    for w in weights:
        alone = id(w) if w.parameter.is_cpu and w.parameter.numel() >= _LARGE else None
        result.setdefault((w.shape, w.parameter.dtype, w.parameter.device, alone), []).append(w)
    return list(result.values())


def stack(matrices: list[Tensor]) -> Tensor:
    """The matrices as one batch; a view of a single one."""
    return torch.stack(matrices) if len(matrices) > 1 else matrices[0].unsqueeze(0)


def assign(tensor: Any, matrices: Tensor) -> None:
    """Write matrices into a tensor, sharded or not, in place."""
    value = matrices.reshape(tensor.shape)
    if _is_sharded(tensor):
        from torch.distributed.tensor import distribute_tensor

        value = distribute_tensor(value, tensor.device_mesh, tensor.placements)
    target, value = _local(tensor), _local(value)
    if target.data_ptr() != value.data_ptr():  # else it was written in place
        target.copy_(value)


def _is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")  # a DTensor, told without importing torch.distributed


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if _is_sharded(tensor) else tensor
