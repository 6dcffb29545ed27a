"""The Hessian Penalty, HP (a rival in the paper: section 6.2)."""

import torch
from torch import Tensor

from orthocond.gans.penalties._derivatives import Layers, Network, along, reduce


def hessian_penalty(
    network: Network,
    z: Tensor,
    *,
    layers: Layers = None,
    vectors: int = 2,
    derivative: str = "difference",
    eps: float = 0.1,
    reduction: str = "mean",
    rng: torch.Generator | None = None,
) -> Tensor:
    r"""Penalize latents that act on the output together: off-diagonal entries of the Hessians.

    For each entry of the output, with H its Hessian with respect to the latents of its sample and signs v drawn at
    random, the unbiased variance of :math:`v^T H v` over the vectors estimates

    .. math:: \operatorname{Var}_v(v^T H v) = 2 \sum_{i \ne j} H_{ij}^2,

    which is then averaged over all entries and samples, and summed over the layers.

    The authors' form is ``derivative="difference", reduction="max"``, with these ``vectors`` and ``eps``: the largest
    entry of all, which depends on the sizes of batch and image.

    ``"exact"`` is the second derivative where there is one. In a network of (leaky) ReLUs much of the curvature sits in
    their kinks, where there is none: differences see it, the derivative does not. With the generator of 311,000
    parameters at 32 pixels the differences are 2.6 times as large at the default ``eps`` and grow as its inverse square
    root. So differences are the default here, and ``"exact"`` is for smooth networks.

    Do not take layers that are affine in z, such as the first projection: their penalty is 0 up to the rounding, which
    ``eps`` enlarges. Noise that the network draws is the same in all evaluations (see `same_noise`).

    Args:
        network: Maps latents to images or features, each of its own latents only.
        z: Latents ``(N, z_dim)``.
        layers: Modules of the network whose outputs are taken; None for the output of the network. What comes after
            the last of them is not run.
        vectors: Number of vectors v, at least 2.
        derivative: ``"difference"``: central differences, 1 + 2 · vectors evaluations. ``"exact"``: nested forward
            mode; with two vectors and a backward pass, 4 times the cost of differences.
        eps: Step of the differences, for each latent.
        reduction: ``"mean"`` or ``"max"``, over entries and samples.
        rng: Draws the vectors instead of torch's random state.

    Returns:
        A scalar, differentiable with respect to the parameters of the network.

    Raises:
        TypeError: If z is not floating point.
        ValueError: If z is not ``(N, z_dim)``, a setting is not valid, or a layer is not run.

    Example:
        >>> from orthocond.gans import hessian_penalty
        >>> z = torch.randn(5000, 2)
        >>> hessian_penalty(lambda z: (z**2).sum(1), z, derivative="exact")
        tensor(0.)
        >>> print(f"{hessian_penalty(lambda z: z.prod(1), z):.0f}")
        4

    References:
        Peebles et al.: *The Hessian Penalty* (2020).
    """
    found = along(
        network,
        z,
        2,
        layers=layers,
        vectors=vectors,
        derivative=derivative,
        eps=eps,
        rng=rng,
        caller="hessian_penalty",
    )
    return torch.stack([reduce(d.var(0), reduction, "hessian_penalty") for d in found]).sum()
