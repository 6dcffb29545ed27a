"""The kinds of directions of a trained generator."""

from typing import Literal

from torch import nn

from orthocond.directions import Directions, axes, eigengan_directions, jacobian_directions, joint_directions, sefa
from orthocond.directions.basis import TIE_TOL, from_eigenvectors, in_blocks
from orthocond.directions.factorize import blocks_of, subspaces_of
from orthocond.lab.generation.networks import latent_layers
from orthocond.matrix.decompose import eigh

Kind = Literal["own", "axes", "sefa", "jacobian", "joint"]


def kinds_of(generator: nn.Module) -> tuple[str, ...]:
    """The kinds that an evaluation measures. The axes of EigenGAN are its own; SeFa needs one layer for all latents."""
    if subspaces_of(generator):
        return ("eigengan", "sefa", "jacobian", "joint")
    return ("axes", *(("sefa",) if len(latent_layers(generator)) == 1 else ()), "jacobian", "joint")


def directions_of(generator: nn.Module, kind: str, k: int | None = None) -> Directions:
    """All directions of a kind, or the k most important ones; those of EigenGAN layer by layer.

    Raises:
        ValueError: If SeFa does not find one layer that all latents go through.
    """
    size = int(generator.z_dim)  # type: ignore[arg-type]
    if kind == "eigengan":
        return eigengan_directions(generator)[:k]
    if kind == "axes":
        return axes(size)[:k]
    layers = subspaces_of(generator)
    if kind == "jacobian":
        return jacobian_directions(generator, k=k, blocks=blocks_of(generator))
    if kind == "joint":
        return joint_directions(generator)[:k]
    if layers:
        rows = [(layer.scale[:, None] * layer.weight).detach().double() for layer in layers]
        dtype = layers[0].weight.dtype
        return in_blocks([from_eigenvectors(*eigh(x @ x.mT), dtype, None, "sefa", TIE_TOL) for x in rows])[:k]
    found = latent_layers(generator)
    if len(found) > 1:
        raise ValueError(
            f"SeFa needs one layer that all latents go through; {type(generator).__name__} has {len(found)}, and they "
            "are no subspaces with a weight (directions, features) and a scale (directions,)."
        )
    return sefa(found[0], normalize=False, k=k)


def find_directions(generator: nn.Module, kind: Kind = "own", k: int | None = None) -> Directions:
    """Directions by the name of their kind, with measured effects.

    Args:
        generator: The generator.
        kind: ``own`` are EigenGAN's, or else the ``axes``; ``sefa`` those of the first projection; ``jacobian`` those
            in which images move most; ``joint`` those whose effects on the image are orthogonal at most latents. Those
            of EigenGAN are found for each layer by itself.
        k: How many: those with the largest effect of a basis that training chose, and of SeFa's of several layers,
            whose importances cannot be compared; else the most important ones. None takes all.

    Raises:
        ValueError: If there are not so many, or SeFa does not find one layer that all latents go through.
    """
    size = int(generator.z_dim)  # type: ignore[arg-type]
    if k is not None and not 0 < k <= size:
        raise ValueError(f"This generator has {size} latents, so there are 1 to {size} directions; got k={k}.")
    layered = bool(subspaces_of(generator))
    if kind not in ("own", "axes") and not (kind == "sefa" and layered):
        return directions_of(generator, kind, k).measure(generator)
    chosen = "eigengan" if kind == "own" and layered else "axes" if kind == "own" else kind
    found = directions_of(generator, chosen).measure(generator)
    assert found.effect is not None
    return found[found.effect.argsort(descending=True)[:k].tolist()]
