"""What each part of a method does to weight, gradient and loss; the layers on which it acts come from the task."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from orthocond.lab.grammar import ALL, INNER
from orthocond.steps import NearestOrthogonal, OptimalLR, RandomLR, Stiefel, Treatment, treat
from orthocond.weights import orthogonal, orthogonality_loss, patch_covariance, spectral, whitening_init_

# Decay of the raw parameter would turn these weights back to where they started, or do nothing.
_OWN_METRIC = ("ow", "mow", "stiefel")


class Settings(Protocol):
    """The settings that methods of all tasks have."""

    @property
    def name(self) -> str: ...
    @property
    def parts(self) -> Mapping[str, str | None]: ...
    @property
    def olr(self) -> str: ...
    @property
    def nog_of(self) -> str: ...
    @property
    def nog_scale(self) -> str | None: ...
    @property
    def short(self) -> tuple[float, float]: ...
    @property
    def stiefel_scale(self) -> float: ...
    @property
    def ol(self) -> str: ...
    @property
    def ol_weight(self) -> float: ...


def treat_weights(
    method: Settings,
    layers: Sequence[nn.Module],
    inputs: Callable[[nn.Module], Iterable[Tensor]] | None = None,
) -> None:
    """Treat the weights of layers in place, before an optimizer is made.

    Args:
        method: The method.
        layers: The layers.
        inputs: Gives inputs of a layer, for the treatments that know them.

    Raises:
        TypeError: If the treatment does not fit the kind of layer.
    """
    for layer in layers:
        if "sn" in method.parts:
            spectral(layer)
        elif "ow" in method.parts:
            orthogonal(layer)
        elif inputs is not None and "wi" in method.parts:
            whitening_init_(layer, inputs(layer))
        elif inputs is not None and "mow" in method.parts:
            # A small ridge: directions of the patches that carry no variance would get weights without bound.
            orthogonal(layer, metric=patch_covariance(layer, inputs(layer)), ridge=1e-4)


def is_spared_decay(method: Settings) -> bool:
    """Whether weight decay must not reach the treated weights."""
    return any(part in method.parts for part in _OWN_METRIC)


def treat_steps(
    method: Settings,
    layers: Sequence[nn.Module],
    optimizer: Optimizer,
    *,
    model: nn.Module,
    gain: float | None = 1.0,
    seed: int = 0,
) -> Treatment | None:
    """Treat gradients and step lengths, after the optimizer was made.

    Args:
        method: The method.
        layers: The layers of a part without scope.
        optimizer: Their optimizer.
        model: The model whose layers are meant by ``@all`` and ``@inner``.
        gain: The multiple of an orthogonal matrix that OLR aims at (see `OptimalLR`); the paper's formula has none.
        seed: Seed of the steps that ``short`` shortens.

    Returns:
        The treatment, or None if the method has none.
    """
    if "stiefel" in method.parts:
        return treat(layers, optimizer, manifold=Stiefel(scale=method.stiefel_scale, gain=gain))
    gradient = NearestOrthogonal(of=method.nog_of, scale=method.nog_scale) if "nog" in method.parts else None
    lr: OptimalLR | RandomLR | None = None
    if "short" in method.parts:
        lr = RandomLR(*method.short, seed=seed)
    if "olr" in method.parts:
        lr = OptimalLR("paper") if method.olr == "paper" else OptimalLR(method.olr, gain=gain)
    if gradient is None and lr is None:
        return None
    return treat(scoped_layers(method, layers, model), optimizer, gradient=gradient, lr=lr)


def step_facts(treatment: Treatment | None) -> dict[str, float]:
    """What OLR, or a control of it, did so far: means over the treated weights.

    Returns:
        ``eta``, the last step length; ``olr_occurrence``, the part of the steps that it shortened; and
        ``olr_at_floor``, the part at which it took its floor, where it has one. Nothing before the first step, or
        without OLR.
    """
    if treatment is None or treatment.lr is None:
        return {}
    found = [s for s in treatment.statistics if s.steps]
    if not found:
        return {}
    facts = {"eta": fmean(s.rates[-1] for s in found), "olr_occurrence": fmean(s.occurrence for s in found)}
    if isinstance(treatment.lr, OptimalLR) and treatment.lr.form != "paper":
        facts["olr_at_floor"] = fmean(s.at_floor / s.steps for s in found)
    return facts


def scoped_layers(method: Settings, layers: Sequence[nn.Module], model: nn.Module) -> Sequence[nn.Module]:
    """The layers whose steps a method treats: those given, or the ones that its scope names."""
    if ALL in method.parts.values():
        return [layer for layer in model.modules() if isinstance(layer, (nn.Conv2d, nn.Linear))]
    if INNER in method.parts.values():
        return [m for m in model.modules() if isinstance(m, nn.Conv2d) and not any(m is layer for layer in layers)]
    return layers


def weight_penalty(method: Settings, layers: Sequence[nn.Module]) -> Tensor | None:
    """The orthogonality loss of all layers times its factor, or None."""
    if "ol" not in method.parts or not layers:
        return None
    return method.ol_weight * torch.stack([orthogonality_loss(layer, form=method.ol) for layer in layers]).sum()
