"""What `treat` acts on: which weights a target has, and which optimizer really moves them."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.optim import LBFGS, Optimizer

from orthocond._layers import find_matrices, groups_of, raw_parameter
from orthocond.steps._weight import Weight


def find_optimizer(optimizer: object) -> Optimizer:
    """The optimizer whose ``step`` moves the weights: the innermost of those that hold one another.

    A wrapper may never call its own ``step`` (SAM has ``first_step`` and ``second_step``), or call no hooks (that of
    Accelerate), but the optimizer that it holds always makes the step. A wrapper that holds an optimizer of a part of
    its parameters (ZeRO) makes the step itself.
    """
    held = getattr(optimizer, "__dict__", {}).values()
    inner = {id(o): o for o in held if isinstance(o, Optimizer) and _parameters(optimizer) <= _parameters(o)}
    if len(inner) == 1 and id(optimizer) not in inner:
        return find_optimizer(*inner.values())
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"treat needs a torch.optim.Optimizer, or what holds one; got {type(optimizer).__name__}.")
    if hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step"):
        raise TypeError(
            f"{type(optimizer).__name__} makes its steps in first_step and second_step, where torch calls no hook, and "
            "holds no optimizer that could be treated. Use a SAM that wraps an optimizer (base_optimizer)."
        )
    if isinstance(optimizer, LBFGS):
        raise TypeError(
            "LBFGS computes many gradients in a step and searches along a direction of its own, so there is no "
            "gradient or step length to treat. Use an optimizer that takes one gradient a step, such as SGD or Adam."
        )
    return optimizer


def _parameters(optimizer: object) -> set[int]:
    groups = getattr(optimizer, "param_groups", ())
    return {id(p) for group in groups for p in group["params"]}


def find_weights(target: Any, optimizer: Optimizer, name: str | None, history: int) -> list[Weight]:
    """The weights that a target of `treat` names, in its order."""
    one = isinstance(target, (nn.Module, Tensor)) or not isinstance(target, Iterable)
    weights: list[Weight] = []
    for item in [target] if one else list(target):
        if isinstance(item, nn.Module):
            weights += _weights_of(item, optimizer, name, history)
        elif name is not None:
            raise TypeError(f"treat(name=...) is for modules; got a {type(item).__name__} in addition.")
        else:
            weights.append(_make(item, "Parameter", 1, history))
    if not weights:
        raise ValueError("treat needs at least one weight; got none. Check the filter that chose them.")
    return weights


def _weights_of(module: nn.Module, optimizer: Optimizer, name: str | None, history: int) -> list[Weight]:
    """The named weight of a module; without a name its ``weight``, or all matrices of a model that has none."""
    kind = parametrize.type_before_parametrizations(module).__name__
    if name is not None or hasattr(module, "weight"):
        name = name or "weight"
        parameter, inside = raw_parameter(module, name, "treat")
        return [_make(parameter, f"{kind}.{inside}", groups_of(module, name), history)]
    owned, seen = _parameters(optimizer), set()
    weights = []
    for path, layer, own_name in find_matrices(module):
        parameter, inside = raw_parameter(layer, own_name, "treat")
        lazy = is_lazy(parameter)
        if lazy or (parameter.requires_grad and id(parameter) in owned and id(parameter) not in seen):
            seen.add(id(parameter))
            weights.append(_make(parameter, f"{path}.{inside}".lstrip("."), groups_of(layer, own_name), history))
    if not weights:
        raise ValueError(
            f"treat found no matrix in {kind} that can be trained and belongs to the optimizer. It takes the weights "
            "of linear layers, convolutions and attention; pass others as modules with name=, or as parameters."
        )
    return weights


def _make(parameter: Any, name: str, groups: int, history: int) -> Weight:
    """The weight, if it can be treated."""
    if not isinstance(parameter, Tensor):
        raise TypeError(f"treat needs modules or parameters; got {type(parameter).__name__}.")
    if is_lazy(parameter):
        raise RuntimeError(f"treat needs an initialized weight; run one batch through the {name} first.")
    if not parameter.is_leaf:
        raise ValueError(
            f"treat needs a parameter; got a computed tensor of shape {tuple(parameter.shape)}. Pass the module: the "
            "raw parameter of a parametrized weight is treated."
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
