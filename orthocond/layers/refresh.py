"""Running statistics taken anew, with the weights as they are."""

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from orthocond._checks import check_count
from orthocond.layers.decorrelated import _DecorrelatedBatchNorm


@torch.no_grad()
def update_statistics(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    batches: int | None = None,
    forward: Callable[[nn.Module, Any], object] | None = None,
) -> int:
    """Refresh the running statistics of all batch normalizations, plain and decorrelated, from training batches.

    Running averages lag behind weights that move, and averaged weights (SWA, EMA) have none of their own. This runs
    the model in training mode, without gradients, and keeps the plain average over all batches. It is the counterpart
    of ``torch.optim.swa_utils.update_bn``, which silently skips decorrelated batch normalization.

    Modes and momenta are restored afterward. If something fails, the statistics are restored too. A layer that no
    batch reaches keeps its statistics, with a warning.

    Args:
        model: The model, whose buffers are changed in place.
        loader: Batches: a tensor, a tuple or list whose first item is the input, or a dict of keyword arguments. They
            are moved to the device of the model.
        batches: How many of them to use at most; None means all.
        forward: For all other kinds of batches, a callable that runs a batch from the loader through the model.

    Returns:
        The number of batches used.

    Raises:
        TypeError: If a batch is of another kind and there is no ``forward``.
        ValueError: If the model has no running statistics to update, the loader is empty, ``batches`` is below 1, or
            NaN or infinity reached a plain batch normalization; a decorrelated one leaves such batches out.

    Example:
        >>> from orthocond.layers import DecorrelatedBatchNorm2d
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), DecorrelatedBatchNorm2d(8)).eval()
        >>> update_statistics(model, [torch.randn(16, 3, 8, 8) for _ in range(5)])
        5
    """
    if batches is not None:
        check_count(batches, "update_statistics(batches=...)", 1)
    layers = {name: layer for name, layer in model.named_modules() if _keeps_statistics(layer)}
    if not layers:
        raise ValueError(
            "update_statistics needs a model with batch normalization that keeps running statistics; "
            f"{type(model).__name__} has none."
        )
    used = 0
    with _averaging(model, layers) as unreached:
        for batch in itertools.islice(loader, batches):
            _run(model, batch) if forward is None else forward(model, batch)
            used += 1
        if not used:
            raise ValueError("update_statistics needs batches; the loader gave none. Is it an exhausted iterator?")
        broken = [name for name, layer in layers.items() if not _is_finite(layer)]
        if broken:
            raise ValueError(
                f"update_statistics needs finite features; NaN or infinity reached {', '.join(broken)}. The statistics "
                "are as before. Leave such batches out; orthocond.diagnose(model, batch) says where it begins in one."
            )
        names = unreached()
    if names:
        warnings.warn(
            f"No finite batch reached {', '.join(names)}: the running statistics there stay as they were.", stacklevel=2
        )
    return used


def _is_finite(layer: nn.Module) -> bool:
    return all(bool(buffer.isfinite().all()) for buffer in layer.buffers())


def _keeps_statistics(layer: nn.Module) -> bool:
    return (
        isinstance(layer, (_BatchNorm, _DecorrelatedBatchNorm))
        and layer.track_running_stats
        and layer.running_mean is not None
    )


@contextmanager
def _averaging(model: nn.Module, layers: Mapping[str, Any]) -> Iterator[Callable[[], list[str]]]:
    """Training mode with fresh statistics that average all batches equally; what was not updated is put back.

    Yields:
        A function that gives the names of the layers that no batch has reached, and puts their statistics back.
    """
    modes = [(module, module.training) for module in model.modules()]
    momenta = [(layer, layer.momentum) for layer in layers.values()]
    before = {name: {key: b.clone() for key, b in layer.named_buffers()} for name, layer in layers.items()}

    def put_back(names: Iterable[str]) -> None:
        for name in names:
            for key, buffer in layers[name].named_buffers():
                buffer.copy_(before[name][key])

    def unreached() -> list[str]:
        names = [name for name, layer in layers.items() if not layer.num_batches_tracked]
        for layer in layers.values():
            if getattr(layer, "excess", None) is not None:
                layer.excess.zero_()  # of weights that do not move there is none
        put_back(names)
        return names

    try:
        model.train()
        for layer in layers.values():
            layer.reset_running_stats()
            layer.momentum = None
        yield unreached
    except BaseException:
        put_back(layers)
        raise
    finally:
        for layer, momentum in momenta:
            layer.momentum = momentum
        for module, training in modes:
            module.training = training
        for layer in layers.values():
            layer.train(layer.training)  # evaluation derives from the statistics


def _run(model: nn.Module, batch: Any) -> None:
    tensor = next(itertools.chain(model.parameters(), model.buffers()))
    if isinstance(batch, Mapping):
        model(**{key: _to(value, tensor.device) for key, value in batch.items()})
        return
    x = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    if not isinstance(x, Tensor):
        raise TypeError(
            "update_statistics needs batches that are a tensor, a tuple or list that begins with one, or a dict of "
            f"keyword arguments; got {type(batch).__name__}. Pass forward=lambda model, batch: ... for others."
        )
    model(x.to(tensor.device))


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
