"""Checks of arguments and their error messages, the precision to compute in, and when values may be read."""

import math
import warnings
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

_NO_CONTEXT = nullcontext()


class NotFiniteError(ValueError):
    """A value is NaN or infinite where only finite ones make sense: in a training the sign of a divergence."""


def check_floating(a: object, name: str) -> Tensor:
    """Return ``a`` if it is a real floating-point tensor, else raise a `TypeError` that says what to do."""
    if isinstance(a, Tensor) and a.is_floating_point():
        return a
    if not isinstance(a, Tensor):
        raise TypeError(f"{name} needs a torch.Tensor; got {type(a).__name__}. Convert it with torch.as_tensor.")
    if a.is_complex():
        raise TypeError(f"{name} needs real matrices; got {a.dtype}. Complex matrices are not supported.")
    raise TypeError(f"{name} needs floating-point matrices; got {a.dtype}. Convert them with .float() or .double().")


def check_square(a: object, name: str) -> Tensor:
    """Return ``a`` if it is a batch ``(*, n, n)`` of real matrices, else raise."""
    a = check_floating(a, name)
    if a.ndim < 2 or a.shape[-1] != a.shape[-2]:
        raise ValueError(
            f"{name} needs square matrices (*, n, n); got shape {tuple(a.shape)}. "
            "For a feature matrix x of shape (d, N), pass its covariance, torch.cov(x)."
        )
    return a


def check_not_negative(value: float, name: str) -> float:
    """Return ``value`` if it is a finite number of at least 0, else raise a `ValueError`."""
    if value is None or isinstance(value, str) or not 0 <= value < math.inf:
        raise ValueError(f"{name} needs a finite number of at least 0; got {value!r}.")
    return float(value)


def check_choice(value: str, name: str, choices: tuple[str, ...]) -> None:
    """Raise a `ValueError` that lists the choices if ``value`` is none of them."""
    if value not in choices:
        raise ValueError(f"{name} needs one of {', '.join(map(repr, choices))}; got {value!r}.")


def check_count(value: int, name: str, least: int) -> None:
    """Raise a `ValueError` if ``value`` is not an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} needs an integer of at least {least}; got {value!r}.")


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: no decomposition exists for half precision."""
    return torch.promote_types(dtype, torch.float32)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Leave the autocast of a tensor's device: no decomposition survives half precision. Quick where it is off."""
    kind = "cpu" if x.is_cpu else x.device.type
    if (x.is_cpu or torch.amp.is_autocast_available(kind)) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return _NO_CONTEXT


def all_true(flags: Tensor) -> bool | None:
    """Whether all flags are true; None where values cannot be read (see `smallest`)."""
    least = smallest(flags)
    return None if least is None else bool(least)


def smallest(x: Tensor) -> float | None:
    """The smallest entry, NaN if any is; None where values cannot be read. Synchronizes a GPU once.

    They cannot in torch.compile, torch.export and vmap, nor where there are none: meta tensors and FakeTensorMode.
    """
    if torch.compiler.is_compiling() or x.is_meta:
        return None
    try:
        return float(x.amin() if x.numel() > 1 else x)
    except RuntimeError as error:
        if "vmap" in str(error) or "_local_scalar_dense" in str(error):
            return None
        raise


def can_read_freely(x: Tensor) -> bool:
    """Whether values can be read without waiting for a device: on a CPU, not in torch.compile nor torch.func."""
    return x.is_cpu and not torch.compiler.is_compiling() and not in_transform()


def warn_onnx(what: str) -> None:
    """Warn if torch.onnx.export is at work, which will end in an error that names an operation but no remedy.

    An error here would not be shown: the exporter tries again in another way, in which this place is not reached.
    """
    if torch.compiler.is_compiling() and torch.onnx.is_in_onnx_export():
        warnings.warn(
            f"ONNX has no {what}. Fold first: export orthocond.fold(model). Layers that depend on the input, such as "
            "CovariancePool2d, need a solver that uses only matrix products: NewtonSchulz() or Taylor().",
            stacklevel=3,
        )


def in_transform() -> bool:
    """Whether a transform of torch.func is active, whose tensors must not be kept."""
    return torch._C._are_functorch_transforms_active()


def in_backward() -> bool:
    """Whether a backward pass is running: a forward is then a recomputation by activation checkpointing."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
