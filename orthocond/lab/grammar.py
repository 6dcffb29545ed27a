"""One grammar of methods: parts joined by ``+``, and which go together.

A task says which parts it has (its `Grammar`). To add a part, describe it in `PARTS`, list it in the grammar of a task,
and let a function of `orthocond.lab.methods`, or the task, act on it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from orthocond.lab.text import nearest

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
_STIEFEL = ("svd", "ns", "hp", "orojar", "lvp")  # what may stand beside it: gradient and step are its own


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
        Part("stiefel", "weight", "orthogonal steps of an orthogonal weight (beyond the paper)", only_with=_STIEFEL),
        Part("nog", "gradient", "the nearest orthogonal gradient", scoped=True),
        Part("olr", "step", "the step length that brings the weight closest to orthogonal", scoped=True),
        Part("short", "step", "steps that are shortened at random, the control of OLR"),
        Part("hp", "rival", "the Hessian Penalty: latents that act on the image apart from each other"),
        Part("orojar", "rival", "Orthogonal Jacobian regularization: latents that move the image orthogonally"),
        Part("lvp", "rival", "latent variational predictability: latents whose change can be told from the images"),
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
