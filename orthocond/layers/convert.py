"""Turn the batch normalizations of a model into decorrelated ones, and those into synchronized ones."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from orthocond.layers.batchnorm import (
    DecorrelatedBatchNorm1d,
    DecorrelatedBatchNorm2d,
    DecorrelatedBatchNorm3d,
    _DecorrelatedBatchNorm,
)
from orthocond.matrix import Eigh, Solver

_EIGH = Eigh()
_TWINS: dict[type[nn.Module], type[_DecorrelatedBatchNorm]] = {
    nn.BatchNorm1d: DecorrelatedBatchNorm1d,
    nn.BatchNorm2d: DecorrelatedBatchNorm2d,
    nn.BatchNorm3d: DecorrelatedBatchNorm3d,
}


def convert_batchnorm(
    module: nn.Module,
    names: Iterable[str] | None = None,
    *,
    groups: int = 1,
    solver: Solver = _EIGH,
    average: str = "covariance",
) -> nn.Module:
    """Replace batch normalizations by decorrelated ones that start from the same parameters and statistics.

    In evaluation the model computes the same as before, until training changes the statistics: the variances become a
    diagonal covariance. Weights and biases are the same objects, so an optimizer that owns them still does.

    Args:
        module: A model, changed in place, or one ``nn.BatchNorm1d/2d/3d``.
        names: Names of the layers to replace, as in ``module.named_modules()``; None takes all. The paper replaces
            the one after the first convolution.
        groups: As for `DecorrelatedBatchNorm2d`.
        solver: As for `DecorrelatedBatchNorm2d`.
        average: As for `DecorrelatedBatchNorm2d`.

    Returns:
        The model, or the new layer if ``module`` is itself a batch normalization.

    Raises:
        ValueError: If a name is not that of a batch normalization, or there is none at all.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
        >>> convert_batchnorm(model, ["1"], groups=2)[1]
        DecorrelatedBatchNorm2d(8, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True, groups=2,
        solver=Eigh(precision='auto', rank_tol=None))
    """
    modules = module.named_modules(remove_duplicate=False)
    layers = {name: layer for name, layer in modules if isinstance(layer, tuple(_TWINS))}
    wanted = list(layers) if names is None else list(names)
    unknown = [name for name in wanted if name not in layers]
    if unknown or not wanted:
        raise ValueError(
            f"convert_batchnorm needs names of BatchNorm1d/2d/3d layers; got {unknown or 'a model without any'}. "
            f"The model has {sorted(layers) or 'none'}; convert before wrapping it or calling convert_sync_batchnorm."
        )
    twins = {layers[name]: _twin(layers[name], groups, solver, average) for name in wanted}
    if module in twins:
        return twins[module]
    for name, layer in layers.items():  # a layer that is used in several places is replaced in all of them
        if layer in twins:
            module.set_submodule(name, twins[layer])
    return module


def _twin(old: Any, groups: int, solver: Solver, average: str) -> _DecorrelatedBatchNorm:
    kind = next(new for base, new in _TWINS.items() if isinstance(old, base))
    reference = next((t for t in (old.weight, old.running_mean) if t is not None), None)
    new = kind(
        old.num_features,
        old.eps,
        old.momentum,
        old.affine,
        old.track_running_stats,
        None if reference is None else reference.device,
        None if reference is None else reference.dtype,
        groups=groups,
        solver=solver,
        average=average,
    )
    new.load_state_dict(old.state_dict())
    new.weight, new.bias = old.weight, old.bias
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
