"""One grammar of methods: parts joined by ``+``, which go together, and what each does to weight, gradient and loss.

A task says which parts it has (its `Grammar`) and on which layers they act. To add a part, describe it in `PARTS`, list
it in the grammar of a task, and let one of the functions below, or the task, act on it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from orthocond.lab.text import nearest
from orthocond.steps import NearestOrthogonal, OptimalLR, RandomLR, Stiefel, Treatment, treat
from orthocond.weights import orthogonal, orthogonality_loss, patch_covariance, spectral, whitening_init_

Slot = Literal["network", "weight", "gradient", "step", "rival"]
_SLOTS: dict[Slot, str] = {
    "network": "kind of network",
    "weight": "treatment of the weight",
    "gradient": "treatment of the gradient",
    "step": "treatment of the step length",
    "rival": "rival",
}
ALL, INNER = "all", "inner"
"""The scopes of a part that acts on all convolutions and linear layers, or on all convolutions but the treated layers
themselves: ``nog@all``, ``nog@inner``."""

# Decay of the raw parameter would turn these weights back to where they started, or do nothing.
_OWN_METRIC = ("ow", "mow", "stiefel")


@dataclass(frozen=True)
class Part:
    """A part of a method's name.

    Attributes:
        name: What people type.
        slot: What it acts on; a method has at most one part for each slot.
        text: What it does.
        only_with: The parts that may stand beside it; None for all of other slots.
        scoped: Whether ``@all`` or ``@inner`` may follow its name.
    """

    name: str
    slot: Slot
    text: str
    only_with: tuple[str, ...] | None = None
    scoped: bool = False


PARTS: dict[str, Part] = {
    part.name: part
    for part in (
        Part("none", "network", "no treatment", only_with=()),
        Part("bn", "network", "ordinary batch normalization, or average pooling: no SVD layer", only_with=("wi",)),
        Part("svd", "network", "the SVD layer, untreated"),
        Part("ns", "network", "the SVD layer with Newton-Schulz iterations instead of a decomposition"),
        Part("sn", "weight", "spectral normalization of the weight"),
        Part("ol", "weight", "a loss that pulls the weight towards orthogonality"),
        Part("ow", "weight", "an orthogonal weight"),
        Part("wi", "weight", "a weight that starts by whitening its input (beyond the paper)"),
        Part("mow", "weight", "a weight that is orthogonal in the metric of its input (beyond the paper)"),
        Part(
            "stiefel",
            "weight",
            "an orthogonal weight that takes orthogonal steps (beyond the paper)",
            only_with=("svd", "ns", "hp", "orojar", "lvp"),
        ),
        Part("nog", "gradient", "the nearest orthogonal gradient", scoped=True),
        Part("olr", "step", "the step length that brings the weight closest to orthogonal", scoped=True),
        Part("short", "step", "steps that are shortened at random, the control of OLR"),
        Part("hp", "rival", "the Hessian Penalty: latents that act on the image apart from each other"),
        Part(
            "orojar",
            "rival",
            "Orthogonal Jacobian regularization: latents that move the image in orthogonal directions",
        ),
        Part(
            "lvp", "rival", "latent variational predictability: latents whose change a network can tell from the images"
        ),
    )
}


@dataclass(frozen=True)
class Grammar:
    """The methods of a task.

    Attributes:
        parts: The names of its parts.
        names: The rows of the paper's tables, and what goes beyond them at the end.

    Example:
        >>> grammar = Grammar(("bn", "svd", "sn", "ow", "nog", "olr", "wi"), ("svd", "nog"))
        >>> grammar.read("nog@all+ow")
        {'nog': 'all', 'ow': None}
        >>> grammar.read("sn+ow")
        Traceback (most recent call last):
        ValueError: One treatment of the weight at a time; 'sn+ow' has sn and ow.
        >>> grammar.read("nog+bn")
        Traceback (most recent call last):
        ValueError: bn takes no treatment but wi; got 'nog+bn'.
    """

    parts: tuple[str, ...]
    names: tuple[str, ...]

    def read(self, name: str) -> dict[str, str | None]:
        """The parts of a method's name with their scopes, checked.

        Raises:
            ValueError: If a part is unknown or they do not go together.
        """
        found: dict[str, str | None] = {}
        for word in name.split("+"):
            part, at, scope = word.partition("@")
            if part not in self.parts:
                known = ", ".join(self.parts)
                raise ValueError(f"There is no method {part!r}.{nearest(part, self.parts)} There are: {known}.")
            if at and (scope not in (ALL, INNER) or not PARTS[part].scoped):
                scoped = ", ".join(f"{p}@{s}" for p in self.parts if PARTS[p].scoped for s in (ALL, INNER))
                raise ValueError(f"{word!r} has no such layers; there are: {scoped}.")
            if part in found:
                raise ValueError(f"Each treatment counts once; got {name!r}.")
            found[part] = scope or None
        self._check_company(name, found)
        return found

    def _check_company(self, name: str, found: Mapping[str, str | None]) -> None:
        for part in found:
            allowed = PARTS[part].only_with
            if allowed is not None and (others := set(found) - {part}) and not others <= set(allowed):
                words = f"takes no treatment but {', '.join(allowed)}" if allowed else "stands alone"
                raise ValueError(f"{part} {words}; got {name!r}.")
        for slot, words in _SLOTS.items():
            if len(same := [part for part in found if PARTS[part].slot == slot]) > 1:
                raise ValueError(f"One {words} at a time; {name!r} has {' and '.join(same)}.")
        if len({found[part] for part in found if PARTS[part].scoped}) > 1:
            raise ValueError(f"Gradient and step length are treated in the same layers; got {name!r}.")

    def check(self, name: str) -> str:
        """The name, if it is a method."""
        self.read(name)
        return name

    def texts(self) -> dict[str, str]:
        """What each part does, by its name."""
        return {name: PARTS[name].text for name in self.parts}


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
    method: Settings, layers: Sequence[nn.Module], optimizer: Optimizer, *, model: nn.Module, gain: float | None = 1.0
) -> Treatment | None:
    """Treat gradients and step lengths, after the optimizer was made.

    Args:
        method: The method.
        layers: The layers of a part without scope.
        optimizer: Their optimizer.
        model: The model whose layers are meant by ``@all`` and ``@inner``.
        gain: The multiple of an orthogonal matrix that OLR aims at (see `OptimalLR`); the paper's formula has none.

    Returns:
        The treatment, or None if the method has none.
    """
    if "stiefel" in method.parts:
        return treat(layers, optimizer, manifold=Stiefel(scale=method.stiefel_scale, gain=gain))
    gradient = NearestOrthogonal(of=method.nog_of, scale=method.nog_scale) if "nog" in method.parts else None
    lr: OptimalLR | RandomLR | None = None
    if "short" in method.parts:
        lr = RandomLR(*method.short)
    if "olr" in method.parts:
        lr = OptimalLR("paper") if method.olr == "paper" else OptimalLR(method.olr, gain=gain)
    if gradient is None and lr is None:
        return None
    return treat(scoped_layers(method, layers, model), optimizer, gradient=gradient, lr=lr)


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
