"""Folding: a trained model as plain convolutions and linears, for inference and export."""

import copy
import dataclasses
import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

from orthocond._layers import CONVOLUTIONS, TRANSPOSED_CONVOLUTIONS, own_parametrizations
from orthocond.layers import DecorrelatedBatchNorm1d, DecorrelatedBatchNorm2d, DecorrelatedBatchNorm3d
from orthocond.layers.decorrelated import Transform
from orthocond.weights.input_aware import FollowInput

# Exact types only: a subclass may compute something else in its forward.
_LAYERS = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED_CONVOLUTIONS)
_WHITENING = (DecorrelatedBatchNorm1d, DecorrelatedBatchNorm2d, DecorrelatedBatchNorm3d)
_NORMS = (*_WHITENING, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class FoldReport:
    """What `fold` did, by the names of the modules.

    Attributes:
        materialized: Parameters whose parametrization became a plain weight.
        merged: For each norm that disappeared, the layer that took it over.
        replaced: For each norm that became a fixed 1x1 convolution, why it was not merged.
        kept: For each norm that stays as it is, why.
        difference: Largest difference to the model's outputs on the example, relative to the largest output; None
            without an example.
    """

    materialized: tuple[str, ...]
    merged: dict[str, str]
    replaced: dict[str, str]
    kept: dict[str, str]
    difference: float | None = None

    def __str__(self) -> str:
        lines = [f"{name}: parametrization materialized" for name in self.materialized]
        lines += [f"{norm}: merged into {layer}" for norm, layer in self.merged.items()]
        lines += [f"{norm}: replaced by a 1x1 convolution, since {why}" for norm, why in self.replaced.items()]
        lines += [f"{norm}: kept, since {why}" for norm, why in self.kept.items()]
        if self.difference is not None:
            lines.append(f"largest difference on the example: {self.difference:.0e} of the largest output")
        if not (self.materialized or self.merged or self.replaced):
            lines.insert(0, "nothing to fold")
        return "\n".join(lines)


@torch.no_grad()
def fold(model: nn.Module, example: Any = None) -> nn.Module:
    r"""Copy a model for inference: whitening merged into the layer before it, parametrizations made plain weights.

    In evaluation a norm layer is the fixed map :math:`y = M x + b`, with :math:`M = \gamma P^{-1/2}` for whitening and
    a diagonal M for batch normalization. After a layer :math:`x = W u + c` it is the layer
    :math:`y = (M W) u + (M c + b)`, so the norm costs nothing. Each norm that gets the output of one ``Linear``,
    ``Conv*d`` or ``ConvTranspose*d`` alone is merged in this way and becomes ``nn.Identity``. A norm cannot be merged
    if the layer is used twice, if its output is needed elsewhere, or if groups of the convolution are narrower than
    those of the whitening. Then a `DecorrelatedBatchNorm2d` becomes a 1x1 convolution with fixed weights, and a plain
    batch normalization stays. Products are formed in float64.

    The copy has the attribute ``fold_report``, a `FoldReport` to print, also where there was nothing to fold.
    The model itself is left as it is.

    Args:
        model: Any model, in any mode.
        example: Input for one forward: a tensor, a tuple of arguments or a dict of keyword arguments. Without it the
            forward is traced symbolically by torch.fx with its default arguments, and a ``Linear`` before a 1-D norm
            is taken to have inputs ``(N, features)``. With it one real forward is recorded instead, which works for
            any Python code, and outputs before and after are compared.

    Returns:
        The folded copy, in evaluation mode.

    Raises:
        TypeError: If ``model`` is not a module.
        RuntimeError: If the model cannot be traced and there is no example, or the outputs on the example differ.

    Accuracy:
        Outputs agree to 1e-10 of the largest in float64. In float32 it depends on the condition number of the
        covariance that was whitened: 3e-7 at 1, 3e-6 at 1e4, 3e-5 at 1e6 for one layer.

    Example:
        >>> from orthocond.layers import DecorrelatedBatchNorm2d
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), DecorrelatedBatchNorm2d(8), torch.nn.ReLU())
        >>> deployed = fold(model)
        >>> deployed
        Sequential(
          (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
          (1): Identity()
          (2): ReLU()
        )
        >>> print(deployed.fold_report)
        1: merged into 0
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fold needs a torch.nn.Module; got {type(model).__name__}.")
    folded = copy.deepcopy(model).eval()
    expected = None if example is None else _outputs(folded, example)
    materialized = _materialize(folded)
    calls = _find_calls(folded, example)
    names = {module: name for name, module in folded.named_modules()}
    merged, replaced, kept = {}, {}, {}
    new: dict[nn.Module, nn.Module] = {}
    for norm in [module for module in names if type(module) in _NORMS]:
        bound, obstacle = _bound(norm, calls), _obstacle(norm, calls)
        if bound is None and obstacle is None:
            layer = calls.sources[norm]
            _merge(layer, _transform(norm))
            merged[names[norm]], new[norm] = names[layer], nn.Identity()
        elif bound is None and obstacle is not None and type(norm) in _WHITENING:
            replaced[names[norm]], new[norm] = obstacle, _pointwise(norm, folded)
        else:
            kept[names[norm]] = bound or str(obstacle)
    report = FoldReport(tuple(materialized), merged, replaced, kept)
    for name, module in list(folded.named_modules(remove_duplicate=False)):
        if module in new and name:
            folded.set_submodule(name, new[module])
    folded = new.get(folded, folded)
    if expected is not None:
        report = dataclasses.replace(report, difference=_compare(expected, _outputs(folded, example)))
    folded.fold_report = report  # type: ignore[assignment]
    return folded


# Weights


def _materialize(model: nn.Module) -> list[str]:
    """Make all parametrized tensors plain ones; return their names."""
    parametrized = [(n, m) for n, m in model.named_modules() if parametrize.is_parametrized(m)]
    for _, module in parametrized:
        own_parametrizations(module)
    names = []
    for prefix, module in parametrized:
        for name in list(module.parametrizations):
            with torch.enable_grad():  # torch makes a buffer of a tensor without gradient
                parametrize.remove_parametrizations(module, name)
            names.append(f"{prefix}.{name}".lstrip("."))
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, FollowInput):
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
    return names


def _transform(norm: Any) -> Transform:
    """The fixed map of a norm in evaluation; that of batch normalization has a group for each channel."""
    if type(norm) in _WHITENING:
        return norm.inference_transform()
    scale = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight
    offset = -norm.running_mean * scale
    return Transform(scale.reshape(-1, 1, 1), offset if norm.bias is None else norm.bias + offset)


def _merge(layer: Any, transform: Transform) -> None:
    """Put the map after a layer into its weight and bias."""
    matrix, offset = (part.double() for part in transform)
    weight = layer.weight
    rows = _by_output(weight.double(), layer)
    product = (matrix @ rows.reshape(len(matrix), matrix.shape[-1], -1)).reshape(rows.shape)
    if layer.bias is not None:
        offset = (matrix @ layer.bias.double().reshape(len(matrix), -1, 1)).flatten() + offset
    # empty_like keeps the memory format.
    layer.weight = nn.Parameter(torch.empty_like(weight).copy_(_by_output(product, layer)), weight.requires_grad)
    layer.bias = nn.Parameter(offset.to(weight.dtype), weight.requires_grad)


def _by_output(weight: Tensor, layer: Any) -> Tensor:
    """The weight with its output channels first, or the way back."""
    if type(layer) not in TRANSPOSED_CONVOLUTIONS:
        return weight
    return weight.unflatten(0, (layer.groups, -1)).transpose(1, 2).flatten(0, 1)


class PointwiseConv1d(nn.Conv1d):
    """1x1 convolution of ``(N, C, L)``, or of ``(N, C)``, which ``nn.Conv1d`` would take for one sample."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.ndim == 3 else super().forward(x.unsqueeze(-1)).squeeze(-1)


_POINTWISE = dict(zip(_WHITENING, (PointwiseConv1d, nn.Conv2d, nn.Conv3d), strict=True))


def _pointwise(norm: Any, model: nn.Module) -> nn.Module:
    """The map of a whitening layer as a 1x1 convolution."""
    matrix, offset = norm.inference_transform()
    # Statistics stay in float32 in a model of half precision, whose features are not.
    parameters = [p for p in (norm.weight, *model.parameters()) if p is not None and p.is_floating_point()]
    dtype = parameters[0].dtype if parameters else matrix.dtype
    channels = norm.num_features
    conv: Any = _POINTWISE[type(norm)](channels, channels, 1, groups=norm.groups, device=matrix.device, dtype=dtype)
    conv.requires_grad_(False).eval()
    conv.weight.copy_(matrix.reshape(conv.weight.shape))
    conv.bias.copy_(offset)
    return conv


# Which norm follows which layer


@dataclass
class _Calls:
    """What a forward does with linear layers, convolutions and norms.

    Attributes:
        count: How often each was called.
        sources: The layer whose output is the input of a norm.
        users: How often outputs of a layer are used, over all of its calls.
        exposed: Those whose parameters or buffers are used outside of them.
        dims: Number of dimensions of the input of a norm, where it is known.
    """

    count: Counter[nn.Module] = field(default_factory=Counter)
    sources: dict[nn.Module, nn.Module] = field(default_factory=dict)
    users: Counter[nn.Module] = field(default_factory=Counter)
    exposed: set[nn.Module] = field(default_factory=set)
    dims: dict[nn.Module, int] = field(default_factory=dict)


def _find_calls(model: nn.Module, example: Any) -> _Calls:
    norms = [module for module in model.modules() if type(module) in _NORMS]
    if not norms or norms == [model]:
        return _Calls()
    return _trace(model) if example is None else _record(model, example)


def _bound(norm: Any, calls: _Calls) -> str | None:
    """Why a norm must stay what it is; None if another module may take its place."""
    if norm.running_mean is None:
        return "it normalizes by the batch in evaluation too"
    if norm in calls.exposed:
        return "its parameters or buffers are used outside of it"
    if norm._forward_hooks or norm._forward_pre_hooks:
        return "it has forward hooks"
    return None


def _obstacle(norm: Any, calls: _Calls) -> str | None:
    """Why a norm cannot be merged into the layer before it; None if it can."""
    layer: Any = calls.sources.get(norm)
    if calls.count[norm] != 1:
        return f"it is used {calls.count[norm]} times" if calls.count[norm] else "the forward does not use it"
    if layer is None:
        return "its input is not the output of a linear layer or convolution"
    if calls.users[layer] != 1:
        return "what the layer before it computes is used elsewhere too"
    if layer in calls.exposed:
        return "the parameters of the layer before it are used outside of it"
    if layer._forward_hooks or layer._forward_pre_hooks:
        return "the layer before it has forward hooks"
    return _mismatch(norm, layer, calls.dims.get(norm))


def _mismatch(norm: Any, layer: Any, dims: int | None) -> str | None:
    """Why the channels of a norm are not the rows of the layer's weight; None if they are."""
    linear = type(layer) is nn.Linear
    channels = layer.out_features if linear else layer.out_channels
    wanted = 2 if linear else 2 + len(layer.kernel_size)
    fits = type(norm) in (DecorrelatedBatchNorm1d, nn.BatchNorm1d, nn.SyncBatchNorm) or not linear
    if not fits or channels != norm.num_features or dims not in (None, wanted):
        return "its channels are not the outputs of the layer before it"
    size = norm.num_features // norm.groups if type(norm) in _WHITENING else 1
    if not linear and channels // layer.groups % size:
        return f"the convolution before it has {layer.groups} groups that do not hold those of the whitening"
    return None


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Do not look into modules that call no others, which may well look at the values of their input."""
        return not any(True for _ in m.children()) or super().is_leaf_module(m, module_qualified_name)


def _trace(model: nn.Module) -> _Calls:
    """Follow the forward with symbols, for its default arguments."""
    parameters = inspect.signature(model.forward).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    try:
        # A copy, since a forward may store what it computes in the model: here, symbols.
        graph = _Tracer().trace(copy.deepcopy(model), defaults)
    except Exception as error:
        raise RuntimeError(
            f"fold cannot trace {type(model).__name__} symbolically ({type(error).__name__}: {error}). Pass an input "
            "as fold(model, example) to record a real forward instead; unwrap a compiled or parallel model first."
        ) from error
    calls = _Calls()
    for node in graph.nodes:
        if node.op == "get_attr":
            calls.exposed.add(model.get_submodule(node.target.rpartition(".")[0]))
        elif node.op == "call_module":
            module = model.get_submodule(node.target)
            calls.count[module] += 1
            calls.users[module] += len(node.users)
            source = node.all_input_nodes[0] if node.all_input_nodes else node
            if type(module) in _NORMS and source.op == "call_module":
                before = model.get_submodule(source.target)
                if type(before) in _LAYERS:
                    calls.sources[module] = before
    return calls


def _record(model: nn.Module, example: Any) -> _Calls:
    """Follow the tensors of one real forward."""
    modules = [module for module in model.modules() if type(module) in _LAYERS + _NORMS]
    recorder = _Recorder(modules)
    handles = [module.register_forward_pre_hook(recorder.enter, with_kwargs=True) for module in modules]
    handles += [module.register_forward_hook(recorder.leave) for module in modules]
    with recorder:
        outputs = _outputs(model, example)
    for handle in handles:
        handle.remove()
    recorder.see(outputs)
    return recorder.calls


class _Recorder(TorchDispatchMode):
    """Sees every operation on tensors, and which of them are outputs or parameters of the given modules."""

    def __init__(self, modules: list[nn.Module]) -> None:
        super().__init__()
        self.calls = _Calls()
        self.inside = False
        self.outputs: dict[int, tuple[Tensor, nn.Module]] = {}  # by id, with the tensor, whose id must stay its own
        self.owners = {
            id(tensor): module
            for module in modules
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
        }

    def see(self, values: Any) -> None:
        for tensor in _tensors(values):
            if id(tensor) in self.outputs:
                self.calls.users[self.outputs[id(tensor)][1]] += 1
            if id(tensor) in self.owners:
                self.calls.exposed.add(self.owners[id(tensor)])

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = next(_tensors((args, kwargs)))
        self.see(x)
        self.inside = True
        self.calls.count[module] += 1
        if type(module) in _NORMS:
            self.calls.dims[module] = x.ndim
            if id(x) in self.outputs:
                self.calls.sources[module] = self.outputs[id(x)][1]

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self.inside = False
        if type(module) in _LAYERS:
            self.outputs[id(output)] = (output, module)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.inside:
            self.see((args, kwargs))
        return func(*args, **(kwargs or {}))


# Outputs


def _outputs(model: nn.Module, example: Any) -> list[Tensor]:
    """The tensors that a forward returns, with the same random numbers each time."""
    args = example if isinstance(example, tuple) else () if isinstance(example, Mapping) else (example,)
    kwargs = example if isinstance(example, Mapping) else {}
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):  # the state is put back, so the next forward starts from it too
        return list(_tensors(model(*args, **kwargs)))


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value):
        yield from _tensors(vars(value))


def _compare(expected: list[Tensor], found: list[Tensor]) -> float:
    """Largest difference relative to the largest entry; raise a `RuntimeError` if it is more than rounding."""
    worst = 0.0
    for a, b in zip(expected, found, strict=True):
        if a.is_floating_point() and a.numel():
            difference = float((a - b).abs().max() / a.abs().max().clamp(min=torch.finfo(a.dtype).tiny))
            # A wrong merge differs by about 1, rounding by far less even where whitening amplifies it.
            if not difference <= torch.finfo(a.dtype).eps ** 0.25:
                raise RuntimeError(
                    f"fold changed the outputs on the example by {difference:.0e} of the largest. Check that they are "
                    "finite and the same in two evaluations of the model; leave out what is random."
                )
            worst = max(worst, difference)
    return worst
