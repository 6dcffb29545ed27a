"""What the models share: checks of sizes, latents and images, initial weights, and random numbers."""

import torch
from torch import Tensor, nn

from orthocond._checks import check_count, check_floating

SLOPE = 0.2  # of the leaky ReLUs


def check_size(size: int, caller: str) -> int:
    """Return how often 4 x 4 doubles to reach a size that is a power of two of at least 8, else raise."""
    check_count(size, f"{caller}(size=...)", 8)
    if size & (size - 1):
        below = 1 << (size.bit_length() - 1)
        raise ValueError(
            f"{caller}(size=...) needs a power of two, because each block doubles or halves the image; got {size}. "
            f"Resize the images to {below} or {2 * below}."
        )
    return size.bit_length() - 3


def check_latent(z: Tensor, z_dim: int, caller: str) -> Tensor:
    """Return latents ``(N, z_dim)``, else raise what is needed."""
    check_floating(z, caller)
    if z.ndim != 2 or z.shape[1] != z_dim:
        raise ValueError(f"{caller} needs latents (N, {z_dim}); got shape {tuple(z.shape)}.")
    return z


def check_images(images: Tensor, channels: int, size: int, caller: str) -> Tensor:
    """Return images ``(N, channels, size, size)``, else raise what is needed."""
    check_floating(images, caller)
    if images.ndim != 4 or tuple(images.shape[1:]) != (channels, size, size):
        raise ValueError(
            f"{caller} needs images (N, {channels}, {size}, {size}); got shape {tuple(images.shape)}. Resize them, or "
            "make the model with size= and image_channels= of the images."
        )
    return images


def he_initialize(network: nn.Module, *, last: float = 1.0) -> None:
    """Give convolutions and linear layers He's weights for leaky ReLUs and zero biases; scale those of the last layer.

    Features, logits and their gradients then have about the same size whatever the depth. torch's own weights shrink
    them by about three a layer.
    """
    layers = [module for module in network.modules() if isinstance(module, (nn.Conv2d, nn.Linear))]
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight, a=SLOPE)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
    with torch.no_grad():
        layers[-1].weight.mul_(last)


def uniform(shape: tuple[int, ...], like: Tensor, rng: torch.Generator | None) -> Tensor:
    """Uniform numbers in [0, 1) of the dtype and device of ``like``, drawn on the device of ``rng``."""
    device = like.device if rng is None else rng.device
    return torch.rand(shape, dtype=like.dtype, device=device, generator=rng).to(like.device)


def normal(shape: tuple[int, ...], like: Tensor, rng: torch.Generator | None) -> Tensor:
    """Normal numbers of the dtype and device of ``like``, drawn on the device of ``rng``."""
    device = like.device if rng is None else rng.device
    return torch.randn(shape, dtype=like.dtype, device=device, generator=rng).to(like.device)
