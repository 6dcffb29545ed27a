"""Which layer feeds an SVD layer: found by the flow of data, not by the order of modules (paper: section 3.1)."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import parametrize

from orthocond._layers import CONVOLUTIONS, TRANSPOSED_CONVOLUTIONS
from orthocond.layers import SVDLayer
from orthocond.monitor.layer_names import find_layer, named_layers, unwrap
from orthocond.monitor.model_call import call, split_batch, undisturbed
from orthocond.weights import SkewOrthogonalConv2d

WEIGHT_LAYERS = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED_CONVOLUTIONS, SkewOrthogonalConv2d)

# Autograd nodes in which a matrix multiplies features.
_PRODUCT = re.compile(r"^(Convolution|MkldnnConvolution|Addmm|Mm|Bmm|Baddbmm|Linear|Mv|Addmv)Backward")


@dataclass(frozen=True)
class PreSVDLayer:
    """The weight that makes the features of an SVD layer.

    Attributes:
        name: Name of the module in the model.
        module: The module that owns the weight.
        attribute: Name of the weight in the module.
    """

    name: str
    module: nn.Module
    attribute: str = "weight"

    def __str__(self) -> str:
        return f"{self.name}.{self.attribute}" if self.name else self.attribute

    @property
    def row_name(self) -> str:
        """Name of the module, with that of the weight if it is not ``weight``."""
        return self.name if self.attribute == "weight" else str(self)

    def weight(self) -> Tensor:
        """The weight that the module computes with, detached; reading it moves no power iteration."""
        parts: list[nn.Module] = []
        if parametrize.is_parametrized(self.module, self.attribute):
            parametrizations = self.module.get_submodule(f"parametrizations.{self.attribute}")
            parts = [m for m in parametrizations.modules() if m.training]
        for part in parts:
            part.training = False
        try:
            with torch.no_grad():
                return getattr(self.module, self.attribute).detach()
        finally:
            for part in parts:
                part.training = True

    def parameter(self) -> Tensor | None:
        """The parameter behind that weight; None if there is no single one of the kind."""
        if parametrize.is_parametrized(self.module, self.attribute):
            return getattr(self.module.get_submodule(f"parametrizations.{self.attribute}"), "original", None)
        return self.module._parameters.get(self.attribute)


def pre_svd_layer(model: nn.Module, svd_layer: nn.Module | str, batch: Any) -> PreSVDLayer:
    """Find the layer whose weight makes the features of an SVD layer: the paper's Pre-SVD layer.

    From the input of the SVD layer the autograd graph is followed back to the first products with a weight, through
    whatever lies between: normalization, activations, pooling, additions. The last product in the flow of data counts
    if there are several, so that after a residual block with an identity shortcut it is the last convolution of the
    block. Weights that are parametrized, frozen, or used in functional calls are found too.

    It takes one forward in training mode; modes, buffers and random state of the model are then as before.

    Args:
        model: The model; also inside DistributedDataParallel or torch.compile.
        svd_layer: The SVD layer, or any other layer, or its name. The first input counts if it has several.
        batch: A batch as for `diagnose`; targets in it are not used.

    Returns:
        A `PreSVDLayer`: ``name``, ``module`` and ``attribute`` of the weight.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If the model has no such layer, or no or more than one layer feeds it.
        RuntimeError: If the batch did not reach the layer.

    Example:
        >>> from torch import nn
        >>> from orthocond.layers import DecorrelatedBatchNorm2d
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), DecorrelatedBatchNorm2d(8))
        >>> print(pre_svd_layer(model, model[3], torch.randn(2, 3, 8, 8)))
        0.weight

    References:
        Song, Sebe, Wang (2022), section 3.1.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"pre_svd_layer needs a torch.nn.Module; got {type(model).__name__}.")
    model = unwrap(model)
    name, module = find_layer(model, svd_layer, "pre_svd_layer")
    inputs, _ = split_batch(model, batch, "pre_svd_layer")
    with undisturbed(model), FlowTrace(model, {name: module}) as trace:
        call(model, inputs)
    if name not in trace.found:
        raise RuntimeError(f"The batch did not reach {name!r}; pass one that goes through it.")
    found = trace.found[name]
    if len(found) != 1:
        raise ValueError(f"pre_svd_layer needs one layer that feeds {name!r}; found {describe(found)}.")
    return found[0]


def describe(found: Iterable[PreSVDLayer]) -> str:
    """Names of the layers found, or what it means that there are none."""
    return ", ".join(map(str, found)) or "none: its input depends on no weight"


class FlowTrace:
    """Context in which forwards are followed, to know the layers that feed some of the model's layers.

    Hooks are global ones, so that a copy of the model made meanwhile carries none of them.

    Args:
        model: The unwrapped model.
        layers: The layers of interest, by name.
        outputs: Whether the output of a layer that is not an SVD layer is what is fed, not its input.

    Attributes:
        found: For each layer that was reached, the layers that feed it; empty if it depends on no weight.
        inputs: Autograd nodes of the model's floating-point inputs, while the context lasts.
    """

    def __init__(self, model: nn.Module, layers: Mapping[str, nn.Module], *, outputs: bool = False) -> None:
        self._outputs = outputs
        self.found: dict[str, list[PreSVDLayer]] = {}
        self._model = model
        self._targets = {id(module): name for name, module in layers.items()}
        self._owners = _owners(model)
        self._made: dict[Any, PreSVDLayer] = {}  # node of an output: the layer that made it
        self.inputs: set[Any] = set()  # nodes at which the model's input begins
        self._layers = {
            id(m): PreSVDLayer(name, m)
            for name, m in named_layers(model).items()
            if isinstance(m, (*WEIGHT_LAYERS, nn.Embedding))
        }

    def __enter__(self) -> Self:
        self._handles = [
            register_module_forward_pre_hook(self._before),  # type: ignore[arg-type]  # it may return arguments
            register_module_forward_hook(self._after, with_kwargs=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
            # torch leaves its mark of a hook with keywords, and then warns of global hooks at each torch.compile.
            module_hooks._global_forward_hooks_with_kwargs.pop(handle.id, None)
        self._forget()

    def _forget(self) -> None:
        """Let go of the nodes, which hold the graph and what it saved."""
        self._made.clear()
        self.inputs.clear()

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if module is not self._model or not torch.is_grad_enabled():
            return None
        self._forget()
        return tuple(map(self._mark, args))

    def _mark(self, x: Any) -> Any:
        """Let a graph begin at the input, so that data can be told from what is computed from weights alone."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        x = (x if x.requires_grad else x.detach().requires_grad_()).clone()
        self.inputs.add(x.grad_fn)
        return x

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if id(module) in self._layers and isinstance(output, Tensor) and output.grad_fn is not None:
            self._made[output.grad_fn] = self._layers[id(module)]
        if id(module) in self._targets:
            of_output = self._outputs and not isinstance(module, SVDLayer)
            candidates = (output,) if of_output else (*args, *kwargs.values())
            tensors = [x for x in candidates if isinstance(x, Tensor)]
            known = self.found.setdefault(self._targets[id(module)], [])
            known += [layer for x in tensors[:1] for layer in self._feeding(x.grad_fn) if layer not in known]

    def _feeding(self, start: Any) -> list[PreSVDLayer]:
        """The layers at the first products with a weight on the way back from a node, upstream ones left out."""
        data = self._data_nodes(start)
        products: dict[Any, list[PreSVDLayer]] = {}
        seen: set[Any] = set()
        stack = [start] if start in data else []
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            weights = [self._made[node]] if node in self._made else []
            if not weights and _PRODUCT.match(node.name()):
                weights = self._weights([n for n in _previous(node) if n not in data])
            if weights:
                products[node] = weights
            else:
                stack += [n for n in _previous(node) if n in data]
        upstream = set()
        for node in products:
            upstream |= set(_ancestors(_previous(node)))
        layers = [layer for node, found in products.items() if node not in upstream for layer in found]
        return list(dict.fromkeys(layers))

    def _data_nodes(self, start: Any) -> set[Any]:
        """Nodes that depend on the input or on the output of a layer, not on parameters alone."""
        data: set[Any] = set()
        for node in _ancestors([start] if start is not None else []):
            if node in self.inputs or node in self._made or any(n in data for n in _previous(node)):
                data.add(node)
        return data

    def _weights(self, starts: list[Any]) -> list[PreSVDLayer]:
        """Layers that own the matrices from which these nodes are computed."""
        leaves = [n.variable for n in _ancestors(starts) if hasattr(n, "variable")]
        return [self._owners[id(p)] for p in leaves if p.ndim > 1 and id(p) in self._owners]


def _owners(model: nn.Module) -> dict[int, PreSVDLayer]:
    """Module and attribute of each parameter, by its id; those behind a parametrized weight belong to that weight."""
    layers = named_layers(model)
    owners: dict[int, PreSVDLayer] = {}
    for name, module in layers.items():
        owner, _, attribute = name.rpartition(".parametrizations.")
        inside = isinstance(layers.get(owner), nn.Module) and parametrize.is_parametrized(layers[owner])
        for parameter_name, parameter in module.named_parameters(recurse=False):
            layer = PreSVDLayer(name, module, parameter_name)
            if inside:
                layer = PreSVDLayer(owner, layers[owner], attribute.partition(".")[0])
            owners.setdefault(id(parameter), layer)
    return owners


def _previous(node: Any) -> list[Any]:
    return [n for n, _ in node.next_functions if n is not None]


def _ancestors(starts: list[Any]) -> list[Any]:
    """All nodes from which these are computed, and these, each after those it is computed from."""
    order: list[Any] = []
    seen: set[Any] = set()
    stack = [(node, False) for node in starts]
    while stack:
        node, complete = stack.pop()
        if complete:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(n, False) for n in _previous(node)]
    return order
