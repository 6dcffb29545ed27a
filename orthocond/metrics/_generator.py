"""What all measurements of a generator share: latents, directions, and images in evaluation mode."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from orthocond._checks import check_count, check_floating

Generator = Callable[[Tensor], Tensor]
"""Any callable ``G(z) -> images (n, C, H, W)`` with an integer attribute ``z_dim``; values in [-1, 1]."""


def latent_size(generator: Any) -> int:
    """The generator's ``z_dim``, checked.

    Raises:
        TypeError: If it is not callable or has no such attribute.
        ValueError: If it is not a positive integer.
    """
    if not callable(generator) or not hasattr(generator, "z_dim"):
        raise TypeError(
            f"A generator is a callable G(z) with an attribute z_dim; got {type(generator).__name__}. Set "
            "G.z_dim to the number of latents."
        )
    check_count(generator.z_dim, "The generator's z_dim", 1)
    return int(generator.z_dim)


def check_directions(directions: Tensor | None, size: int) -> Tensor:
    """Directions ``(k, z_dim)`` in float32 on the CPU; None gives the axes.

    Raises:
        ValueError: If they are not unit rows, or more than ``size``.
    """
    if directions is None:
        return torch.eye(size)
    directions = check_floating(directions, "directions").detach().cpu().float()
    if directions.ndim != 2 or directions.shape[1] != size or not len(directions):
        raise ValueError(f"directions needs shape (k, {size}), a row for each; got {tuple(directions.shape)}.")
    if len(directions) > size:
        raise ValueError(f"At most {size} directions fit into {size} latents; got {len(directions)}. Choose some.")
    norms = directions.norm(dim=1)
    if not ((norms - 1).abs() < 1e-3).all():  # also false for NaN
        raise ValueError(
            f"directions needs rows of norm 1, so that a step is in units of sigma; got norms {float(norms.min()):.3g} "
            f"to {float(norms.max()):.3g}. Divide by directions.norm(dim=1, keepdim=True)."
        )
    return directions


def parameter_of(generator: Any) -> Tensor:
    """The first parameter, for its device and dtype; a float32 scalar on the CPU without any."""
    first = next(generator.parameters(), None) if isinstance(generator, nn.Module) else None
    return torch.zeros(()) if first is None else first


@contextmanager
def evaluating(generator: Any) -> Iterator[None]:
    """Evaluation mode and no gradients; afterwards each module's mode is as before."""
    modules = list(generator.modules()) if isinstance(generator, nn.Module) else []
    modes = [m.training for m in modules]
    try:
        for m in modules:
            m.training = False
        with torch.no_grad():
            yield
    finally:
        for m, mode in zip(modules, modes, strict=True):
            m.training = mode


def images_of(generator: Any, latents: Tensor, batch_size: int, caller: str) -> Iterator[Tensor]:
    """Images of latents ``(n, z_dim)``, a batch at a time, in evaluation mode.

    Raises:
        TypeError: If the generator gives something else than floating-point images.
        ValueError: If they are not ``(n, C, H, W)``, or not finite.
    """
    check_count(batch_size, f"{caller}(batch_size=...)", 1)
    like = parameter_of(generator)
    for part in latents.split(batch_size):
        with evaluating(generator):
            images = check_floating(generator(part.to(like)), f"{caller}(generator)")
        if images.ndim != 4 or len(images) != len(part):
            raise ValueError(
                f"{caller} needs a generator of images (n, C, H, W); for {len(part)} latents it gave "
                f"{tuple(images.shape)}."
            )
        if not images.isfinite().all():
            raise ValueError(
                f"{caller} needs finite images; the generator gave NaN or infinity. Did its training diverge?"
            )
        yield images
