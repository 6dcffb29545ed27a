"""Several calls of a generator with the same random numbers."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def same_noise(function: Callable[[Tensor], T], latents: Iterable[Tensor]) -> list[T]:
    """Call a function on several latents, each time with the same random numbers.

    A generator that draws noise of its own (`EigenGenerator`, or one with dropout) then differs between two calls only
    by what the latents do: what a finite difference, a pair of images or a traversal needs. torch's random state ends
    where one call leaves it. Random numbers from a ``torch.Generator`` that the function holds are not repeated.

    Args:
        function: A generator, or any function of latents.
        latents: Tensors on one device, of equal shape if the noise is to match.

    Returns:
        The results, in the order of the latents.

    Example:
        >>> from orthocond.gans import EigenGenerator, same_noise
        >>> g = EigenGenerator(size=8, directions=2, noise_dim=4)
        >>> z = torch.randn(3, g.z_dim)
        >>> a, b = same_noise(g, [z, z])
        >>> torch.equal(a, b), torch.equal(g(z), g(z))
        (True, False)
    """
    latents = list(latents)
    cuda = latents[0].device if latents and latents[0].is_cuda else None
    state = torch.get_rng_state()
    cuda_state = None if cuda is None else torch.cuda.get_rng_state(cuda)
    results = []
    for z in latents:
        torch.set_rng_state(state)
        if cuda is not None and cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state, cuda)
        results.append(function(z))
    return results
