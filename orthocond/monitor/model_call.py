"""Run a user's model once on a batch, and leave no trace of it."""

import inspect
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from orthocond.layers import SVDLayer

_TARGETS = ("target", "targets", "label", "labels", "y")


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Training mode with gradients, eager; afterwards modes, buffers, observers and random state are as before.

    Buffers are replaced by copies meanwhile, so the originals are not touched at all.
    """
    modules = list(model.modules())
    modes = [m.training for m in modules]
    observers = [(m, m.observer) for m in modules if isinstance(m, SVDLayer)]
    buffers = [(m, name, buffer) for m in modules for name, buffer in m._buffers.items() if buffer is not None]
    python_state = random.getstate()
    copies = {id(b): b.clone() for _, _, b in buffers}
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng())
            stack.enter_context(torch.enable_grad())
            if is_compiled(model):
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            for m, name, buffer in buffers:
                m._buffers[name] = copies[id(buffer)]
            for layer, _ in observers:
                layer.observer = None
            model.train()
            yield
    finally:
        for m, mode in zip(modules, modes, strict=True):
            m.training = mode
        for layer, observer in observers:
            layer.observer = observer
        for m, name, buffer in buffers:
            m._buffers[name] = buffer
        random.setstate(python_state)


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile was applied to the model or to a part of it."""
    return any("_orig_mod" in m._modules or m._compiled_call_impl is not None for m in model.modules())


def first_batch(model: nn.Module, batch: Any) -> Any:
    """The first batch of a loader, on the device of the model; anything else as it is.

    Raises:
        ValueError: If the loader gives nothing, or a list may be a batch as well as a list of batches.
    """
    if isinstance(batch, Mapping):
        return dict(batch)
    if isinstance(batch, list) and all(isinstance(item, (tuple, list, Mapping)) for item in batch):
        raise ValueError(
            f"A list of {len(batch)} tuples, lists or dictionaries may be one batch or several. Pass one batch as a "
            "tuple, (inputs, targets), and a list of batches as iter(batches)."
        )
    if isinstance(batch, (Tensor, tuple, list, str)) or not isinstance(batch, Iterable):
        return batch
    found = next(iter(batch), None)
    if found is None:
        raise ValueError("The loader gave no batch; it is empty, or an iterator that was used up.")
    device = next((p.device for p in model.parameters()), None)
    return found if device is None else _to(found, device)


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _to(item, device) for key, item in value.items()}
    return type(value)(_to(item, device) for item in value) if type(value) in (tuple, list) else value


def split_batch(model: nn.Module, batch: Any, caller: str) -> tuple[Any, Any]:
    """Inputs, as `call` takes them, and target of a batch; None where it has no target."""
    if isinstance(batch, Tensor):
        return batch, None
    if isinstance(batch, (tuple, list)):
        if len(batch) not in (1, 2):
            raise ValueError(
                f"{caller} needs a batch (inputs, targets); got {len(batch)} items. Put several inputs into a tuple "
                "or dictionary of their own, ((a, b), targets), and pass a list of batches as iter(batches)."
            )
        return batch[0], batch[1] if len(batch) == 2 else None
    if isinstance(batch, dict):
        return _split_dictionary(model, batch, caller)
    raise TypeError(
        f"{caller} needs a tensor, (inputs, targets), a dictionary or a loader of them; got {type(batch).__name__}."
    )


def _split_dictionary(model: nn.Module, batch: dict[str, Any], caller: str) -> tuple[Any, Any]:
    """What ``forward`` has an argument for goes there; of the rest, one can be the target, and one the only input."""
    parameters = inspect.signature(model.forward).parameters
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    inputs = {k: v for k, v in batch.items() if k in parameters or (anything and k not in _TARGETS)}
    rest = {k: v for k, v in batch.items() if k not in inputs}
    targets = [k for k in rest if k in _TARGETS]
    others = [k for k in rest if k not in _TARGETS]
    if len(targets) > 1 or (others if inputs else len(others) != 1):
        raise ValueError(
            f"{caller} needs to know what to do with each entry of the batch; forward takes "
            f"{', '.join(parameters) or 'nothing'}, and {', '.join(map(repr, rest))} are left. Pass (inputs, targets)."
        )
    return inputs or rest[others[0]], rest[targets[0]] if targets else None


def call(model: nn.Module, inputs: Any) -> Any:
    """``model(x)`` for a tensor, ``model(*x)`` for a tuple or list, ``model(**x)`` for a dictionary."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)
