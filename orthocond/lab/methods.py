"""The rows of the paper's tables: what each method does to weight, gradient and step of the Pre-SVD layer."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from orthocond.lab.classification.config import Method
from orthocond.lab.data.options import nearest
from orthocond.matrix import SVD, Eigh, NewtonSchulz, Pade, Solver, Taylor
from orthocond.steps import NearestOrthogonal, OptimalLR, Treatment, treat
from orthocond.weights import (
    SkewOrthogonalConv2d,
    orthogonal,
    orthogonality_loss,
    patch_covariance,
    spectral,
    whitening_init_,
)

BASES = {
    "bn": "ordinary batch normalization, or average pooling: no SVD layer",
    "svd": "the SVD layer, untreated",
    "ns": "the SVD layer with Newton-Schulz iterations instead of a decomposition",
}
WEIGHTS = {
    "sn": "spectral normalization of the weight",
    "ol": "a loss that pulls the weight towards orthogonality",
    "ow": "an orthogonal weight",
    "wi": "a weight that starts by whitening its input (beyond the paper)",
    "mow": "a weight that is orthogonal in the metric of its input (beyond the paper)",
}
STEPS = {
    "nog": "the nearest orthogonal gradient",
    "olr": "the step length that brings the weight closest to orthogonal",
}
# The rows of the paper's tables, and what goes beyond them at the end.
NAMES = (
    *("bn", "svd", "ns", "sn", "ol", "ow", "nog", "olr"),
    *("nog+sn", "nog+ol", "nog+ow", "nog+olr", "ow+olr", "nog+ow+olr"),
    *("wi", "mow"),
)

_SOLVERS: dict[str, Solver] = {
    "eigh": Eigh(),
    "ns": NewtonSchulz(),
    "ns7": NewtonSchulz(steps=7),
    "ns20": NewtonSchulz(steps=20),
    "pade": Pade(),
    "taylor": Taylor(),
    "svd-plain": SVD(gradient="plain"),
    "svd-truncated": SVD(gradient="truncated"),
    "svd-top": SVD(gradient="top"),
    "svd-taylor": SVD(gradient="taylor"),
    "svd-pade": SVD(gradient="pade"),
}


def parts(name: str) -> frozenset[str]:
    """The parts of a method's name, checked.

    Raises:
        ValueError: If a part is unknown or they do not go together.

    Example:
        >>> sorted(parts("nog+ow+olr"))
        ['nog', 'olr', 'ow']
        >>> parts("nog+bn")
        Traceback (most recent call last):
        ValueError: bn takes no treatment but wi, the control of whitening; got 'nog+bn'.
    """
    found = name.split("+")
    known = (*BASES, *WEIGHTS, *STEPS)
    for part in found:
        if part not in known:
            raise ValueError(f"There is no method {part!r}.{nearest(part, known)} There are: {', '.join(known)}.")
    if len(set(found)) < len(found):
        raise ValueError(f"Each treatment counts once; got {name!r}.")
    if "bn" in found and set(found) - {"bn", "wi"}:
        raise ValueError(f"bn takes no treatment but wi, the control of whitening; got {name!r}.")
    if len(weights := [part for part in found if part in WEIGHTS]) > 1:
        raise ValueError(f"One treatment of the weight at a time; {name!r} has {' and '.join(weights)}.")
    return frozenset(found)


def solver(method: Method) -> Solver:
    """How the SVD layer computes its roots."""
    return _SOLVERS["ns" if "ns" in parts(method.name) else method.solver]


def treat_weight(
    method: Method, model: nn.Module, pre_svd: str, inputs: Callable[[nn.Module], Iterable[Tensor]]
) -> None:
    """Treat the weight of the Pre-SVD layer, before the optimizer is made.

    Args:
        method: The method.
        model: The model, changed in place.
        pre_svd: Name of the Pre-SVD layer.
        inputs: Gives inputs of that layer, for the treatments that know them.

    Raises:
        TypeError: If the treatment does not fit the kind of layer.
    """
    layer = model.get_submodule(pre_svd)
    chosen = parts(method.name)
    if "sn" in chosen:
        spectral(layer)
    elif "ow" in chosen and method.ow == "skewconv":
        model.set_submodule(pre_svd, _skew(layer))
    elif "ow" in chosen:
        orthogonal(layer)
    elif "wi" in chosen:
        whitening_init_(layer, inputs(layer))
    elif "mow" in chosen:
        # A small ridge: directions of the patches that carry no variance would get weights without bound.
        orthogonal(layer, metric=patch_covariance(layer, inputs(layer)), ridge=1e-4)


def _skew(layer: nn.Module) -> SkewOrthogonalConv2d:
    if not isinstance(layer, nn.Conv2d) or layer.kernel_size[0] != layer.kernel_size[1] or layer.groups != 1:
        raise TypeError(f"--ow skewconv needs a square Conv2d without groups as Pre-SVD layer; got {layer}.")
    return SkewOrthogonalConv2d(
        layer.in_channels, layer.out_channels, layer.kernel_size[0], stride=layer.stride[0], bias=layer.bias is not None
    )


def parameter_groups(method: Method, model: nn.Module, pre_svd: str, weight_decay: float) -> list[dict[str, Any]]:
    """All parameters with the weight decay and the factor of the rate that each should have (see `Schedule`)."""
    stem: list[nn.Parameter] = []
    decay = 0.0 if parts(method.name) & {"ow", "mow"} else weight_decay
    if decay != weight_decay or method.stem_lr != 1:
        stem = [p for p in model.get_submodule(pre_svd).parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if not any(p is q for q in stem)]
    groups = [{"params": rest, "weight_decay": weight_decay, "factor": 1.0}]
    return groups + ([{"params": stem, "weight_decay": decay, "factor": method.stem_lr}] if stem else [])


def treat_steps(method: Method, layer: nn.Module, optimizer: Optimizer) -> Treatment | None:
    """Treat gradient and step length of the Pre-SVD layer, after the optimizer was made."""
    chosen = parts(method.name)
    gradient = NearestOrthogonal(of=method.nog_of) if "nog" in chosen else None
    lr = OptimalLR(form=method.olr) if "olr" in chosen else None
    return treat(layer, optimizer, gradient=gradient, lr=lr) if gradient or lr else None


def penalty(method: Method, layer: nn.Module) -> Tensor | None:
    """The term that the method adds to the loss, or None."""
    if "ol" not in parts(method.name):
        return None
    return method.ol_weight * orthogonality_loss(layer, form=method.ol)
