"""Differentiable augmentation of the images that a discriminator sees."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from orthocond._checks import at_least_float32, check_choice, check_floating
from orthocond.gans._common import uniform

_SHIFT = 0.125  # of height and width, at most, to each side
_CUT = 0.5  # of height and width


def _brightness(x: Tensor, u: Tensor) -> Tensor:
    """Add up to 0.5 to each side."""
    return x + (u[:, 0] - 0.5)


def _saturation(x: Tensor, u: Tensor) -> Tensor:
    """Move away from the mean of the channels by a factor of 0 to 2."""
    mean = x.mean(1, keepdim=True)
    return mean + (x - mean) * (2 * u[:, 0])


def _contrast(x: Tensor, u: Tensor) -> Tensor:
    """Move away from the mean of the image by a factor of 0.5 to 1.5."""
    mean = x.mean((1, 2, 3), keepdim=True)
    return mean + (x - mean) * (u[:, 0] + 0.5)


def _translation(x: Tensor, u: Tensor) -> Tensor:
    """Shift by whole pixels; what comes in is 0, the middle of [-1, 1]."""
    height, width = x.shape[-2:]
    rows = _positions(height, u[:, 0], _shift(height))
    columns = _positions(width, u[:, 1], _shift(width))
    images = torch.arange(len(x), device=x.device)[:, None, None]
    inside = _within(rows, height)[:, :, None] & _within(columns, width)[:, None, :]
    shifted = x[images, :, rows.clamp(0, height - 1)[:, :, None], columns.clamp(0, width - 1)[:, None, :]]
    return shifted.movedim(-1, 1) * inside[:, None]


def _cutout(x: Tensor, u: Tensor) -> Tensor:
    """Set a square of half the height and width to 0; its center is anywhere in the image."""
    height, width = x.shape[-2:]
    rows, columns = _cut(height, u[:, 0]), _cut(width, u[:, 1])
    return x * ~(rows[:, :, None] & columns[:, None, :])[:, None]


def _shift(length: int) -> int:
    return int(_SHIFT * length + 0.5)


def _positions(length: int, u: Tensor, most: int) -> Tensor:
    """Where each of ``length`` pixels comes from ``(N, length)``, for a shift of -most to most."""
    shift = (u.reshape(-1, 1) * (2 * most + 1)).floor().long() - most
    return torch.arange(length, device=u.device) + shift


def _within(positions: Tensor, length: int) -> Tensor:
    return (positions >= 0) & (positions < length)


def _cut(length: int, u: Tensor) -> Tensor:
    """Which of ``length`` pixels ``(N, length)`` lie in an interval around a random center."""
    size = int(_CUT * length + 0.5)
    starts = length + 1 - size % 2  # so many that the distribution is symmetric
    start = (u.reshape(-1, 1) * starts).floor().long() - size // 2
    positions = torch.arange(length, device=u.device)
    return (positions >= start) & (positions < start + size)


_FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "brightness": _brightness,
    "saturation": _saturation,
    "contrast": _contrast,
    "translation": _translation,
    "cutout": _cutout,
}
POLICY = tuple(_FUNCTIONS)


def augment(
    images: Tensor,
    policy: Sequence[str] = POLICY,
    *,
    probability: float = 0.6,
    each: str = "image",
    rng: torch.Generator | None = None,
) -> Tensor:
    """Change images at random, so that few of them suffice to train a discriminator.

    Apply it to real and to generated images, in the steps of both networks: then the generator learns the images, not
    their augmentations, because gradients flow through it. All functions take one parameter or two for each image:

    - ``"brightness"`` adds -0.5 to 0.5;
    - ``"saturation"`` scales the difference to the mean of the channels by 0 to 2;
    - ``"contrast"`` scales the difference to the mean of the image by 0.5 to 1.5;
    - ``"translation"`` shifts by up to an eighth of height and width, filling with 0;
    - ``"cutout"`` sets a rectangle of half the height and width to 0.

    Args:
        images: ``(N, C, H, W)`` in [-1, 1]; the result can leave that range.
        policy: Names of the functions, applied in this order.
        probability: Probability with which each function is applied; 1 in DiffAugment itself.
        each: ``"image"``: it is decided for each image separately. ``"batch"``: for all of them at once, as in the
            paper's EigenGAN, where a batch without any augmentation is one in a hundred.
        rng: Draws instead of torch's random state. The number of draws depends on shape and policy only.

    Returns:
        Images of the same shape and dtype.

    Raises:
        TypeError: If the images are not floating point.
        ValueError: If they are not ``(N, C, H, W)``, or a setting is not valid.

    Example:
        >>> from orthocond.gans import augment
        >>> x = torch.rand(4, 3, 32, 32) * 2 - 1
        >>> augment(x, ("translation", "cutout"), rng=torch.Generator().manual_seed(0)).shape
        torch.Size([4, 3, 32, 32])

    References:
        Zhao et al. (2020), DiffAugment.
    """
    x = check_floating(images, "augment")
    if x.ndim != 4:
        raise ValueError(f"augment needs images (N, C, H, W); got shape {tuple(x.shape)}.")
    if isinstance(policy, str):
        policy = (policy,)
    for name in policy:
        check_choice(name, "augment(policy=...)", POLICY)
    if not 0 <= probability <= 1:
        raise ValueError(f"augment(probability=...) needs a number from 0 to 1; got {probability!r}.")
    check_choice(each, "augment(each=...)", ("image", "batch"))
    x = x.to(at_least_float32(x.dtype))  # half precision has too few random numbers
    for name in policy:
        chosen = uniform((len(x) if each == "image" else 1, 1, 1, 1), x, rng) < probability
        parameters = uniform((len(x), 2, 1, 1, 1), x, rng)
        x = torch.where(chosen, _FUNCTIONS[name](x, parameters), x)
    return x.to(images.dtype)
