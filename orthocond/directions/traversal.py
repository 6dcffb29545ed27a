"""Walk along directions: the images on the way."""

from collections.abc import Sequence

import torch
from torch import Tensor

from orthocond._checks import check_choice
from orthocond.directions.basis import Directions, direction_rows
from orthocond.generators import ImageGenerator, all_images, as_generator, draws_noise, latents_of

STEPS = (-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0)


def traverse(
    generator: ImageGenerator,
    z: Tensor | int,
    directions: Directions | Tensor,
    steps: Sequence[float] | Tensor = STEPS,
    *,
    mode: str = "add",
    batch_size: int = 64,
    seed: int = 0,
) -> Tensor:
    r"""Images along each direction from each latent.

    .. math:: G(z + a\, n) \quad\text{(add)}, \qquad G(z - n n^T z + a\, n) \quad\text{(set)}

    The generator is in eval mode meanwhile and no gradient is kept. Noise that it draws from torch's random state stays
    the same along a row, and for the same latents from call to call, so that methods can be compared.

    Args:
        generator: A `Generator`, or any callable with ``z_dim``.
        z: Latents ``(samples, z_dim)``, or how many to sample from the prior.
        directions: Directions, or unit rows ``(k, z_dim)``.
        steps: The a, in sigma of the prior.
        mode: ``"add"`` moves away from the latent, as SeFa does, so that step 0 is its own image. ``"set"`` sets the
            coordinate along the direction to a, as EigenGAN and the paper's figures do: all samples have the same one.
        batch_size: Images in one call of the generator.
        seed: Seed of the latents that are sampled.

    Returns:
        Images ``(directions, samples, steps, C, H, W)``; see `grid`, `strip`, `compare` and `gif`.

    Raises:
        TypeError: If the generator is not a callable with ``z_dim``.
        ValueError: If shapes do not fit, a setting is not valid, or the generator has noise that does not come from
            torch's random state.

    Example:
        >>> from orthocond.directions import axes, traverse
        >>> class Painter:
        ...     z_dim = 2
        ...     def __call__(self, z):
        ...         return z[:, :, None, None].expand(-1, -1, 4, 4)[:, :1]
        >>> z = torch.tensor([[0.5, 0.0]])
        >>> traverse(Painter(), z, axes(2), steps=(-1, 0, 1))[:, 0, :, 0, 0, 0]
        tensor([[-0.5000,  0.5000,  1.5000],
                [ 0.5000,  0.5000,  0.5000]])
        >>> traverse(Painter(), z, axes(2), steps=(-1, 0, 1), mode="set")[0, 0, :, 0, 0, 0]
        tensor([-1.,  0.,  1.])
    """
    generator = as_generator(generator, "traverse")
    z = latents_of(generator, z, "traverse", seed)
    rows = direction_rows(directions, generator.z_dim, "traverse").to(z)
    check_choice(mode, "traverse(mode=...)", ("add", "set"))
    values = check_steps(steps, "traverse")
    draws_noise(generator, z, "traverse")
    walks = []
    for n in rows:
        start = z if mode == "add" else z - (z @ n)[:, None] * n
        steps_there = [start + a * generator.sigma * n for a in values]
        walks.append(torch.stack([all_images(generator, to, batch_size, "traverse") for to in steps_there], dim=1))
    return torch.stack(walks)


def check_steps(steps: Sequence[float] | Tensor, name: str) -> list[float]:
    """The steps as finite numbers, at least one."""
    values = torch.as_tensor(steps, dtype=torch.float64)
    if values.ndim != 1 or not len(values) or not values.isfinite().all():
        raise ValueError(f"{name}(steps=...) needs a list of finite numbers, in sigma; got {steps!r}.")
    return values.tolist()
