"""One treated weight: where it comes from, how it is read and written, and what is counted."""

import warnings
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from orthocond.matrix import matrix_view

MOMENTUM = "stiefel_momentum"  # under which the optimizer's state holds the average gradient
_COUNTS = ("steps", "without_gradient", "skipped", "shortened", "at_floor")
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
        shortened: Steps at which OLR (or a control of it) took another step length than the learning rate.
        at_floor: Steps at which OLR took its floor. There it acts as a learning rate that is smaller by that factor.
        rates: The last step lengths η that OLR (or a control of it) chose, oldest first; empty without.
        spectra: Singular values ``(groups, min(m, n))``, descending, of gradients before NOG, by number of the step
            counted from 0; the last ones only.
    """

    name: str
    parameter: Tensor
    steps: int
    without_gradient: int
    skipped: int
    shortened: int
    at_floor: int
    rates: list[float]
    spectra: dict[int, Tensor]

    @property
    def occurrence(self) -> float:
        """Fraction of the treated steps at which OLR acted; NaN before the first."""
        return self.shortened / self.steps if self.steps else float("nan")


class Weight:
    """A treated weight as matrices ``(groups, m, n)``, what is kept of it during a step, and what is counted."""

    def __init__(self, parameter: Tensor, name: str, groups: int, history: int) -> None:
        self.parameter = parameter
        self.name = f"{name} {tuple(parameter.shape)}"
        matrix = matrix_view(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), groups)
        self.shape = matrix.shape if groups > 1 else (1, *matrix.shape)
        self.before = self.after = self.average = self.fraction = _NOTHING  # set during a step
        self.lr: float | Tensor = 0.0
        self.maximize = False
        self.steps = self.without_gradient = self.skipped = 0
        self.shortened: Tensor | int = 0
        self.at_floor: Tensor | int = 0
        self.rates: deque[Tensor] = deque(maxlen=history)
        self.spectra: deque[tuple[int, Tensor]] = deque(maxlen=history)

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
        self.average = torch.lerp(torch.zeros_like(gradient) if average is None else average, gradient, 1 - momentum)
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
        gram = g.mT @ g if g.shape[-2] > g.shape[-1] else g @ g.mT
        self.spectra.append((self.steps, torch.linalg.eigvalsh(gram).clamp(min=0).sqrt().flip(-1)))

    def release(self) -> None:
        """Free what was kept during the step, and count it."""
        self.before = self.after = self.average = self.fraction = _NOTHING
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


def find_weight(target: nn.Module | Tensor, history: int) -> Weight:
    """The weight of a module, or a parameter, if it can be treated."""
    if isinstance(target, nn.Module):
        kind = parametrize.type_before_parametrizations(target).__name__
        parameter, name = _weight_of(target), f"{kind}.weight"
        groups = getattr(target, "groups", 1)
        if parametrize.is_parametrized(target, "weight"):
            name = f"{kind}.parametrizations.weight.original"
    else:
        parameter, name, groups = target, "Parameter", 1
    if not isinstance(parameter, Tensor):
        raise TypeError(f"treat needs modules or parameters; got {type(parameter).__name__}.")
    if is_lazy(parameter):
        raise RuntimeError(f"treat needs an initialized weight; run one batch through the {name} first.")
    if not parameter.is_leaf:
        raise ValueError(
            f"treat needs a parameter; got a computed tensor of shape {tuple(parameter.shape)}. Pass the module: of a "
            "parametrized weight the raw parameter is treated."
        )
    if not parameter.requires_grad:
        raise ValueError(
            f"{name} {tuple(parameter.shape)} is frozen (requires_grad=False), so there is no step to treat. Call "
            "requires_grad_() before treat."
        )
    if parameter.ndim < 2:
        raise ValueError(
            f"treat needs weights of at least two dimensions; {name} has shape {tuple(parameter.shape)}. Biases and "
            "norm scales are not matrices, nor are the flat parameters of FSDP1: use fully_shard."
        )
    return Weight(parameter, name, groups, history)


def _weight_of(module: nn.Module) -> Tensor:
    """The parameter behind ``module.weight``."""
    kind = parametrize.type_before_parametrizations(module).__name__
    if parametrize.is_parametrized(module, "weight"):
        originals = module.parametrizations["weight"]  # type: ignore[index]
        if not hasattr(originals, "original"):
            raise ValueError(f"{kind}.weight is parametrized by several parameters; pass the one to treat.")
        return originals.original
    weight = module._parameters.get("weight")
    if weight is None:
        raise ValueError(f"treat needs a module with a parameter named weight; {kind} has none. Pass the parameter.")
    return weight


def batches(weights: Iterable[Weight]) -> list[list[Weight]]:
    """Weights whose matrices can be stacked, together."""
    result: dict[object, list[Weight]] = {}
    for w in weights:
        result.setdefault((w.shape, w.parameter.dtype, w.parameter.device), []).append(w)
    return list(result.values())


def assign(tensor: Any, matrices: Tensor) -> None:
    """Write matrices into a tensor, sharded or not, in place."""
    value = matrices.reshape(tensor.shape)
    if _is_sharded(tensor):
        from torch.distributed.tensor import distribute_tensor

        value = distribute_tensor(value, tensor.device_mesh, tensor.placements)
    _local(tensor).copy_(_local(value))


def _is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")  # a DTensor, told without importing torch.distributed


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if _is_sharded(tensor) else tensor
