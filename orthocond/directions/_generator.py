"""What all directions need of a generator: its latents, a deterministic mode, images in batches."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from orthocond._checks import check_count, check_floating

Region = Tensor | tuple[float, float, float, float]


class ImageGenerator(Protocol):
    """Any callable from latents ``(n, z_dim)`` to images ``(n, C, H, W)`` in [-1, 1]."""

    z_dim: Any

    def __call__(self, z: Tensor, /) -> Tensor: ...


def z_dim_of(generator: object, name: str) -> int:
    """The number of latent dimensions, or an error that says what a generator is."""
    if not callable(generator):
        raise TypeError(f"{name} needs a generator that can be called, images = G(z); got {type(generator).__name__}.")
    found = getattr(generator, "z_dim", None)
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise TypeError(
            f"{name} needs a generator with z_dim, the length of its latent vectors; the z_dim of this "
            f"{type(generator).__name__} is {found!r}. Set it: generator.z_dim = 30."
        )
    return found


def latents(generator: ImageGenerator, z: Tensor | int, name: str, seed: int = 0) -> Tensor:
    """Checked latents ``(n, z_dim)``; a number draws as many from N(0, I), with the generator's dtype and device."""
    size = z_dim_of(generator, name)
    if not isinstance(z, Tensor):
        check_count(z, f"{name}(z=...)", 1)
        drawn = torch.randn(z, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        state = [*generator.parameters(), *generator.buffers()] if isinstance(generator, nn.Module) else []
        like = next((t for t in state if t.is_floating_point()), torch.empty(0))
        return drawn.to(like)
    z = check_floating(z, f"{name}(z=...)").detach()
    if z.ndim != 2 or z.shape[1] != size or not len(z):
        raise ValueError(
            f"{name} needs latents of shape (samples, z_dim) = (n, {size}) with n of at least 1; got {tuple(z.shape)}."
        )
    if not z.isfinite().all():
        raise ValueError(f"{name} needs finite latents; some of the {len(z)} given are NaN or infinite.")
    return z


@contextmanager
def evaluating(generator: ImageGenerator) -> Iterator[None]:
    """Put a module in eval mode, in which an image depends on its own latent alone; restore each part's own mode."""
    modes = {m: m.training for m in generator.modules()} if isinstance(generator, nn.Module) else {}
    try:
        if isinstance(generator, nn.Module):
            generator.eval()
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def check_images(images: object, count: int) -> Tensor:
    """Return what a generator made of ``count`` latents if it is a batch of as many finite images."""
    if not isinstance(images, Tensor) or images.ndim != 4 or len(images) != count:
        came = f"shape {tuple(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
        raise ValueError(f"The generator needs to return images (n, C, H, W), here with n = {count}; got {came}.")
    if not images.isfinite().all():
        raise ValueError("The generator returned NaN or infinite pixels. Look for a training that diverged.")
    return images


@contextmanager
def seeded(z: Tensor, seed: int) -> Iterator[None]:
    """Random numbers of torch that depend on the seed alone; those of the caller go on as if nothing had happened."""
    with torch.random.fork_rng([z.device] if z.is_cuda else []):
        torch.manual_seed(seed)
        yield


def generate(generator: ImageGenerator, z: Tensor, batch_size: int) -> Tensor:
    """Images of all latents, in batches, without gradients; the generator is in eval mode meanwhile.

    Noise that a generator draws depends on the place in ``z`` alone: row i has the same noise in every call.
    """
    check_count(batch_size, "batch_size", 1)
    images = []
    with torch.no_grad(), evaluating(generator):
        for seed, part in enumerate(z.split(batch_size)):
            with seeded(z, seed):
                images.append(check_images(generator(part), len(part)))
    return torch.cat(images)


def draws_noise(generator: ImageGenerator, z: Tensor, name: str) -> bool:
    """Whether a generator draws noise of its own; an error if that does not come from torch's random state."""
    one = z[:1]
    with torch.no_grad(), evaluating(generator):
        images = []
        for seed in (0, 0, 1):
            with seeded(one, seed):
                images.append(check_images(generator(one), 1))
    if not torch.equal(images[0], images[1]):
        raise ValueError(
            f"{name} needs a generator that makes the same image of the same latent and the same random state of "
            "torch; two calls in eval mode differ. Fix its noise: wrap it so that it uses stored noise."
        )
    return not torch.equal(images[0], images[2])


def check_mask(mask: Region, images: Tensor, name: str) -> Tensor:
    """A region as bool ``(H, W)``: a mask of that size, or (center row, center column, height, width) in pixels."""
    height, width = images.shape[-2:]
    if isinstance(mask, (tuple, list)):
        if len(mask) != 4 or any(isinstance(v, bool) or not isinstance(v, (int, float)) for v in mask):
            raise ValueError(f"{name} needs a region (center_row, center_col, height, width); got {mask!r}.")
        row, column, tall, wide = mask
        top, left = round(row - tall / 2), round(column - wide / 2)
        if min(tall, wide) < 1 or top < 0 or left < 0 or top + tall > height or left + wide > width:
            raise ValueError(f"{name} needs a region inside the {height}x{width} image; got {tuple(mask)}.")
        region = torch.zeros(height, width, dtype=torch.bool, device=images.device)
        region[top : top + round(tall), left : left + round(wide)] = True
        return region
    if not isinstance(mask, Tensor):
        raise TypeError(
            f"{name} needs a mask tensor (H, W) or (center_row, center_col, height, width); got {type(mask).__name__}."
        )
    if mask.shape != (height, width):
        raise ValueError(f"{name} needs a mask of the size of the images, {height}x{width}; got {tuple(mask.shape)}.")
    region = mask.to(images.device).bool()
    if not bool((mask.to(images.device) == region).all()):
        raise ValueError(f"{name} needs a mask of zeros and ones; got other values. Use mask > 0.5.")
    if not region.any():
        raise ValueError(f"{name} needs a region with at least one pixel; the mask is empty.")
    return region
