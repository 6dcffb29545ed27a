"""Turn the batch normalizations of a model into decorrelated ones, and those into synchronized ones."""

import collections
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from orthocond._checks import check_count
from orthocond._layers import CONVOLUTIONS
from orthocond.layers.batchnorm import (
    DecorrelatedBatchNorm1d,
    DecorrelatedBatchNorm2d,
    DecorrelatedBatchNorm3d,
)
from orthocond.layers.decorrelated import _DecorrelatedBatchNorm
from orthocond.layers.following import obstacle
from orthocond.matrix import Eigh, Solver

_EIGH = Eigh()
_TWINS: dict[type[nn.Module], type[_DecorrelatedBatchNorm]] = {
    nn.BatchNorm1d: DecorrelatedBatchNorm1d,
    nn.BatchNorm2d: DecorrelatedBatchNorm2d,
    nn.BatchNorm3d: DecorrelatedBatchNorm3d,
    nn.SyncBatchNorm: DecorrelatedBatchNorm2d,
}

Names = str | Iterable[str] | Callable[[str, nn.Module], bool]


def convert_batchnorm(
    module: nn.Module,
    names: Names | None = None,
    *,
    groups: int | Mapping[str, int] = 1,
    group_size: int | None = None,
    solver: Solver = _EIGH,
    average: str = "covariance",
) -> nn.Module:
    """Replace batch normalizations by decorrelated ones that start from the same parameters and statistics.

    In evaluation the model computes the same as before, until training changes the statistics: the variances become a
    diagonal covariance. Weights and biases are the same objects, so an optimizer that owns them still does; one that is
    None stays None. A layer that comes right after a convolution or linear layer follows its weight where it can
    (`DecorrelatedBatchNorm2d.follow`). Which layer comes before is read from an ``nn.Sequential``, or by torch.fx from
    the code of the model; where neither can tell, call `follow` yourself.

    Layers of exactly the types ``nn.BatchNorm1d/2d/3d`` and ``nn.SyncBatchNorm`` are replaced. The latter, which does
    not say how many dimensions it expects, becomes a `DecorrelatedBatchNorm2d` that is synchronized over the same
    processes. A subclass may compute something else (an activation, for example), and hooks or parametrizations
    belong to the old layer. It is an error to name such a layer; otherwise it stays as it is, with a warning.

    Args:
        module: A model, changed in place, or one batch normalization.
        names: The layers to replace: a name as in ``module.named_modules()``, several of them, or a predicate that is
            called with name and layer; None replaces all. The paper replaces the one after the first convolution.
        groups: As for `DecorrelatedBatchNorm2d`, for all layers, or by name (1 for those that are not listed).
        group_size: The largest number of channels of a group, in place of ``groups``: each layer gets the fewest equal
            groups that are no larger.
        solver: As for `DecorrelatedBatchNorm2d`.
        average: As for `DecorrelatedBatchNorm2d`.

    Returns:
        The model, or the new layer if ``module`` is itself a batch normalization.

    Raises:
        ValueError: If a name is not that of a batch normalization that can be replaced, there is none at all, or
            ``groups`` and ``group_size`` do not fit.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
        >>> convert_batchnorm(model, "1", groups=2)[1]
        DecorrelatedBatchNorm2d(8, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True, groups=2,
        solver=Eigh(precision='auto', rank_tol=None))
    """
    modules = module.named_modules(remove_duplicate=False)
    layers = {name: layer for name, layer in modules if isinstance(layer, _BatchNorm)}
    wanted = _choose(layers, names)
    by_name = _groups_by_name(groups, group_size, {name: layers[name] for name in wanted})
    twins = {layers[name]: _twin(layers[name], by_name[name], solver, average) for name in wanted}
    if module in twins:
        return twins[module]
    for name, layer in layers.items():  # a layer that is used in several places is replaced in all of them
        if layer in twins:
            module.set_submodule(name, twins[layer])
    uses = collections.Counter(layers.values())
    _let_follow(module, {twin for layer, twin in twins.items() if uses[layer] == 1})
    return module


def _let_follow(module: nn.Module, new: set[_DecorrelatedBatchNorm]) -> None:
    """Let layers follow the weight of the layer before, where the model shows which one that is."""
    sources: dict[nn.Module, set[nn.Module | None]] = {}
    for layer, before in _traced(module) or _chained(module):
        sources.setdefault(layer, set()).add(before)
    for layer in new & sources.keys():
        before, *others = sources[layer]
        if others or before is None or not _is_plain(before) or layer.running_covariance is None:
            continue
        if obstacle(before, layer.num_features, layer.groups) is None:
            layer.follow(before)


def _chained(module: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Layers of each ``nn.Sequential``, with the one before."""
    for part in module.modules():
        if isinstance(part, nn.Sequential) and type(part).forward is nn.Sequential.forward:
            yield from ((layer, before) for before, layer in itertools.pairwise(part))


def _traced(module: nn.Module) -> list[tuple[nn.Module, nn.Module | None]]:
    """Layers with the one whose output they get as it is, None for other inputs; empty where torch.fx cannot tell.

    Models with hooks are not traced: hooks would be called with what torch.fx passes through.
    """
    layers = dict(module.named_modules())
    if any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers.values()):
        return []
    try:
        nodes = fx.Tracer().trace(module).nodes
    except Exception:  # whatever the model does with values that torch.fx does not have
        return []

    def called(node: Any) -> nn.Module | None:
        return layers[node.target] if isinstance(node, fx.Node) and node.op == "call_module" else None

    return [(layer, called(node.args[0])) for node in nodes if node.args and (layer := called(node)) is not None]


def _is_plain(layer: nn.Module) -> bool:
    """Whether a layer computes what its base class of torch does: others may change the weight before they use it."""
    return any(
        all(getattr(type(layer), name, None) is getattr(base, name, None) for name in ("forward", "_conv_forward"))
        for base in (nn.Linear, *CONVOLUTIONS)
    )


def _choose(layers: Mapping[str, nn.Module], names: Names | None) -> list[str]:
    """The names of the layers to replace."""
    if names is None or callable(names):
        found = [name for name, layer in layers.items() if names is None or names(name, layer)]
        obstacles = {name: obstacle for name in found if (obstacle := _obstacle(layers[name])) is not None}
        wanted = [name for name in found if name not in obstacles]
        if obstacles and wanted:
            warnings.warn(f"convert_batchnorm leaves as they are: {_list(obstacles)}.", stacklevel=3)
    else:
        wanted = [names] if isinstance(names, str) else list(names)
        unknown = {name: "no batch normalization" for name in wanted if name not in layers}
        obstacles = unknown | {n: o for n in wanted if n in layers and (o := _obstacle(layers[n])) is not None}
        wanted = [name for name in wanted if name not in obstacles] if not obstacles else []
    if not wanted:
        raise ValueError(
            "convert_batchnorm needs BatchNorm1d/2d/3d or SyncBatchNorm layers; got "
            f"{_list(obstacles) or 'none'}. The model has {sorted(layers) or 'no batch normalization'}."
        )
    return wanted


def _list(obstacles: Mapping[str, str]) -> str:
    return ", ".join(f"{name!r} ({obstacle})" for name, obstacle in obstacles.items())


def _obstacle(layer: nn.Module) -> str | None:
    """Why a batch normalization cannot be replaced without losing something; None if it can."""
    if type(layer) not in _TWINS:
        return f"{type(layer).__name__}, which may compute more than its base class"
    if "forward" in vars(layer):
        return f"a {type(layer).__name__} with a forward of its own"
    hooks = (
        *(layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks),
        *(layer._state_dict_hooks, layer._state_dict_pre_hooks),
        *(layer._load_state_dict_pre_hooks, layer._load_state_dict_post_hooks),
    )
    return "it has hooks: remove them first and register them anew" if any(hooks) else None


def _groups_by_name(
    groups: int | Mapping[str, int], group_size: int | None, layers: Mapping[str, Any]
) -> dict[str, int]:
    if group_size is not None:
        check_count(group_size, "convert_batchnorm(group_size=...)", 1)
        if groups != 1:
            raise ValueError(f"convert_batchnorm needs groups or group_size, not both; got {groups} and {group_size}.")
        return {name: _fewest_groups(layer.num_features, group_size) for name, layer in layers.items()}
    if not isinstance(groups, Mapping):
        return dict.fromkeys(layers, groups)
    unknown = sorted(set(groups) - set(layers))
    if unknown:
        raise ValueError(f"convert_batchnorm(groups=...) names layers that are not replaced: {unknown}.")
    return {name: groups.get(name, 1) for name in layers}


def _fewest_groups(channels: int, size: int) -> int:
    return next(g for g in range(1, channels + 1) if channels % g == 0 and channels // g <= size)


def _twin(old: Any, groups: int, solver: Solver, average: str) -> _DecorrelatedBatchNorm:
    reference = next((t for t in (old.weight, old.bias, old.running_mean) if t is not None), None)
    new = _TWINS[type(old)](
        old.num_features,
        old.eps,
        old.momentum,
        old.affine,
        old.running_mean is not None,
        None if reference is None else reference.device,
        None if reference is None else reference.dtype,
        bias=old.bias is not None,
        groups=groups,
        solver=solver,
        average=average,
        synchronize=type(old) is nn.SyncBatchNorm,
        process_group=getattr(old, "process_group", None),
    )
    new.weight, new.bias = old.weight, old.bias  # either may be None, whatever ``affine`` says
    new.load_state_dict(old.state_dict())
    new.track_running_stats = old.track_running_stats
    new.train(old.training)
    return new


def convert_sync(module: nn.Module, process_group: Any = None) -> nn.Module:
    """Make all decorrelated batch normalizations of a model use the statistics of all processes.

    The counterpart of ``nn.SyncBatchNorm.convert_sync_batchnorm``, which leaves these layers alone. With one process,
    or none initialized, nothing changes in what they compute.

    Args:
        module: A model, changed in place.
        process_group: The processes to synchronize with; None means all.

    Returns:
        The model.

    Raises:
        ValueError: If the model has no decorrelated batch normalization.

    Example:
        >>> convert_sync(DecorrelatedBatchNorm2d(8)).synchronize
        True
    """
    layers = [layer for layer in module.modules() if isinstance(layer, _DecorrelatedBatchNorm)]
    if not layers:
        raise ValueError(
            "convert_sync needs a model with DecorrelatedBatchNorm layers; got one without any. "
            "Put them in first, for example with convert_batchnorm."
        )
    for layer in layers:
        layer.synchronize, layer.process_group = True, process_group
    return module
