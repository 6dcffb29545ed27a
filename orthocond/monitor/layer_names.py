"""Modules of a model by name, as the user wrote it: wrappers of DataParallel and torch.compile left out."""

from difflib import get_close_matches

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from orthocond.layers import SVDLayer


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside DistributedDataParallel, DataParallel and torch.compile."""
    while (inner := _inside(model)) is not None:
        model = inner[1]
    return model


def _inside(module: nn.Module) -> tuple[str, nn.Module] | None:
    """The module that a wrapper holds and the attribute it has there; None if it is no wrapper."""
    if isinstance(module, (DataParallel, DistributedDataParallel)):
        return "module", module.module
    inner = module._modules.get("_orig_mod")
    return None if inner is None else ("_orig_mod", inner)


def named_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of an unwrapped model by name, those inside torch.compile as if it were not there."""
    return {
        ".".join(part for part in name.split(".") if part != "_orig_mod"): module
        for name, module in model.named_modules()
        if "_orig_mod" not in module._modules
    }


def path_of(model: nn.Module, name: str) -> str:
    """The expression for a layer of a model that may be wrapped, such as ``model.layer1[0].conv1``."""
    path, module = "model", model
    for part in ["", *name.split(".")] if name else [""]:
        if part:
            path += f"[{part}]" if part.isdigit() else f".{part}" if part.isidentifier() else f"[{part!r}]"
            module = module.get_submodule(part)
        while (inner := _inside(module)) is not None:
            path, module = f"{path}.{inner[0]}", inner[1]
    return path


def find_layer(model: nn.Module, layer: nn.Module | str, caller: str) -> tuple[str, nn.Module]:
    """Name and module of a layer that is given as either."""
    layers = named_layers(model)
    if isinstance(layer, str):
        if layer not in layers:
            near = [name for name in layers if name.rpartition(".")[2] == layer.rpartition(".")[2]]
            near = near or get_close_matches(layer, layers)
            hint = f" Did you mean {', '.join(map(repr, near))}?" if near else ""
            raise ValueError(f"{caller} needs a layer of the model; it has none named {layer!r}.{hint}")
        return layer, layers[layer]
    if not isinstance(layer, nn.Module):
        raise TypeError(f"{caller} needs a layer or its name; got {type(layer).__name__}.")
    for name, module in layers.items():
        if module is unwrap(layer):
            return name, module
    raise ValueError(f"{caller} needs a layer of the model; this {type(layer).__name__} is not part of it.")


def svd_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The SVD layers of an unwrapped model by name."""
    return {name: module for name, module in named_layers(model).items() if isinstance(module, SVDLayer)}
