"""The kinds of directions of a trained generator."""

from typing import Literal

from torch import nn

from orthocond.directions import Directions, axes, eigengan_directions, jacobian_directions, joint_directions, sefa
from orthocond.directions.basis import in_blocks
from orthocond.directions.factorize import subspaces_of
from orthocond.lab.generation.networks import latent_layers

Kind = Literal["own", "axes", "sefa", "jacobian", "joint"]


def is_layered(generator: nn.Module) -> bool:
    """Whether latents come in layers, as those of EigenGAN."""
    return hasattr(generator, "subspaces")


def kinds_of(generator: nn.Module) -> tuple[str, ...]:
    """The kinds that an evaluation measures; those of EigenGAN, whose axes are its own, layer by layer."""
    return ("eigengan" if is_layered(generator) else "axes", "sefa", "jacobian", "joint")


def directions_of(generator: nn.Module, kind: str, k: int | None = None) -> Directions:
    """All directions of a kind, or the k most important ones."""
    size = int(generator.z_dim)  # type: ignore[arg-type]
    if kind == "eigengan":
        return eigengan_directions(generator)[:k]
    if kind == "axes":
        return axes(size)[:k]
    layers = subspaces_of(generator)
    if kind == "jacobian":
        return jacobian_directions(generator, k=k, blocks=[len(layer.weight) for layer in layers] or None)
    if kind == "joint":
        return joint_directions(generator)[:k]
    if layers:
        maps = [(layer.scale[:, None] * layer.weight).detach().mT for layer in layers]
        return in_blocks([sefa(one, normalize=False) for one in maps])[:k]
    (layer,) = latent_layers(generator)
    return sefa(layer, normalize=False, k=k)


def find_directions(generator: nn.Module, kind: Kind = "own", k: int | None = None) -> Directions:
    """Directions by the name of their kind, with measured effects.

    Args:
        generator: The generator.
        kind: ``own`` are EigenGAN's, or else the ``axes``; ``sefa`` those of the first projection; ``jacobian`` those
            in which images move most; ``joint`` those whose effects on the image are orthogonal at most latents.
        k: How many: of a basis that training chose those with the largest effect, else the most important ones. None
            takes all.

    Raises:
        ValueError: If there are not so many.
    """
    size = int(generator.z_dim)  # type: ignore[arg-type]
    if k is not None and not 0 < k <= size:
        raise ValueError(f"This generator has {size} latents, so there are 1 to {size} directions; got k={k}.")
    if kind not in ("own", "axes"):
        return directions_of(generator, kind, k).measure(generator)
    chosen = "eigengan" if kind == "own" and is_layered(generator) else "axes"
    found = directions_of(generator, chosen).measure(generator)
    assert found.effect is not None
    return found[found.effect.argsort(descending=True)[:k].tolist()]
