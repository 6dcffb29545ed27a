"""How a generator moves: activeness, path length, spectrum of its first projection (paper: section 6.2)."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orthocond._checks import check_choice, check_count, check_not_negative
from orthocond.directions.basis import Directions, direction_rows
from orthocond.generators import ImageGenerator, as_generator, draws_noise, images_of
from orthocond.matrix import matrix_view
from orthocond.matrix.spectra import Spectrum, singular_spectrum
from orthocond.metrics.frechet import short_count

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_FORWARD = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def activeness(
    generator: ImageGenerator,
    directions: Directions | Tensor | None = None,
    *,
    samples: int = 300,
    extent: float = 2.0,
    batch_size: int = 128,
    seed: int = 0,
) -> Tensor:
    r"""How much each direction changes the image: the variance of a pixel when its coordinate is -e, 0 and e.

    For latents z of the prior the coordinate along the unit direction d is set to each value,
    :math:`z + (v - \langle z, d \rangle) d`; the variance of the three images (unbiased) is averaged over pixels,
    channels and latents. Directions that do nothing have 0. Noise that the generator draws is the same in all three.

    Args:
        generator: A `Generator`, or a callable ``G(z) -> images`` with ``z_dim``.
        directions: `Directions`, or unit rows ``(k, z_dim)``; None takes the axes.
        samples: Number of latents; the same for all directions.
        extent: The value e, in sigma of the prior.
        batch_size: Images at a time.
        seed: Seed of the latents.

    Returns:
        ``(k,)``, float64, in the order of the directions.

    Raises:
        TypeError: If the generator or its images are of another kind.
        ValueError: If an argument is not valid.

    Example:
        >>> def generator(z):
        ...     return (z * torch.tensor([0.5, 0.1])).reshape(-1, 2, 1, 1)
        >>> generator.z_dim = 2
        >>> activeness(generator, samples=10)  # 4 * 0.5² and 4 * 0.1², mean of two pixels
        tensor([0.5000, 0.0200], dtype=torch.float64)

    References:
        Peebles et al. (2020), The Hessian penalty.
    """
    check_count(samples, "activeness(samples=...)", 1)
    check_not_negative(extent, "activeness(extent=...)")
    generator = as_generator(generator, "activeness")
    basis = direction_rows(directions, generator.z_dim, "activeness")
    z = generator.sample(samples, seed)
    basis, reach = basis.to(z), extent * generator.sigma
    draws_noise(generator, z, "activeness")
    found = torch.zeros(len(basis), dtype=torch.float64)
    for index, direction in enumerate(basis):
        flat = z - torch.outer(z @ direction, direction)
        tracks = [images_of(generator, flat + v * direction, batch_size, "activeness") for v in (-reach, 0.0, reach)]
        for low, middle, high in zip(*tracks, strict=True):
            three = torch.stack([low, middle, high]).double()
            found[index] += float(three.var(0).mean()) * len(low) / samples
    return found


def pixel_mse(a: Tensor, b: Tensor) -> Tensor:
    """Mean squared difference of the pixels of each pair of images, ``(n,)``, in float64."""
    return (a.double() - b.double()).square().flatten(1).mean(1)


@dataclass(frozen=True)
class PathLength:
    """What `path_length` measures.

    Attributes:
        protocol: Name of the measurement, such as ``pl1k-pixel_mse-slerp-full``.
        mean: Mean of the squared speeds that were kept.
        standard_error: Its standard error.
        speeds: ``(samples,)``, all of them, float64.
    """

    protocol: str
    mean: float
    standard_error: float
    speeds: Tensor

    def __str__(self) -> str:
        return f"{self.protocol}: {self.mean:.4g} ± {self.standard_error:.2g}"


def path_length(
    generator: ImageGenerator,
    *,
    distance: Callable[[Tensor, Tensor], Tensor] = pixel_mse,
    name: str | None = None,
    samples: int = 1000,
    eps: float = 1e-3,
    interpolation: str = "auto",
    where: str = "full",
    trim: float = 0.01,
    batch_size: int = 128,
    seed: int = 0,
) -> PathLength:
    r"""Mean squared speed of the image along paths between latents; the perceptual path length with LPIPS.

    .. math:: E\left[ \varepsilon^{-2}\, d\big(G(z(t)),\, G(z(t + \varepsilon))\big) \right], \qquad
        z(t) = \frac{\sin (1 - t) \omega}{\sin \omega} z_0 + \frac{\sin t \omega}{\sin \omega} z_1

    with :math:`z_0, z_1` of the prior at the angle :math:`\omega`. The latents are not normalized, so the path stays
    where normal latents are. Noise that the generator draws is the same at both ends of a step.

    Args:
        generator: A `Generator`, or a callable ``G(z) -> images`` with ``z_dim``.
        distance: Callable from two batches of images to squared distances ``(n,)``; LPIPS for the original.
        name: Its name in ``protocol``; None takes that of the function or class.
        samples: Number of paths.
        eps: The step. StyleGAN has 1e-4, where rounding in float32 is up to some percent of the difference.
        interpolation: ``"slerp"``; ``"lerp"`` for straight paths; ``"auto"`` takes slerp for normal latents and lerp
            for other priors, whose latents do not lie near a sphere.
        where: ``"full"`` draws t uniformly from [0, 1], ``"end"`` takes t = 0.
        trim: Part of the paths that is left out at each end before the mean, as StyleGAN does.
        batch_size: Images at a time.
        seed: Seed of the latents.

    Returns:
        A `PathLength`.

    Raises:
        TypeError: If the generator or its images are of another kind.
        ValueError: If an argument is not valid, or the distance is not ``(n,)``.

    Example:
        >>> def generator(z):
        ...     return z.reshape(-1, 1, 2, 2)
        >>> generator.z_dim = 4
        >>> path_length(generator, interpolation="lerp", samples=4000).protocol
        'pl4k-pixel_mse-lerp-full'

    References:
        Karras, Laine, Aila (2019), section 4.1.
    """
    check_count(samples, "path_length(samples=...)", 2)
    check_choice(interpolation, "path_length(interpolation=...)", ("auto", "slerp", "lerp"))
    check_choice(where, "path_length(where=...)", ("full", "end"))
    if not 0 < eps < 1:
        raise ValueError(f"path_length(eps=...) needs a number between 0 and 1; got {eps!r}.")
    if not 0 <= trim < 0.5:
        raise ValueError(f"path_length(trim=...) needs a fraction from 0 to below 0.5; got {trim!r}.")
    generator = as_generator(generator, "path_length")
    if interpolation == "auto":
        interpolation = "slerp" if generator.prior == "normal" else "lerp"
    rng = torch.Generator().manual_seed(seed)
    # In float64, so that the step survives the interpolation.
    start, end = (generator.sample(samples, rng).cpu().double() for _ in range(2))
    t = torch.rand(samples, 1, generator=rng, dtype=torch.float64) * (where == "full")
    draws_noise(generator, start.to(generator.like), "path_length")
    path = _slerp if interpolation == "slerp" else torch.lerp
    ends = [path(start, end, s).to(generator.like) for s in (t, t + eps)]
    here, there = (images_of(generator, z, batch_size, "path_length") for z in ends)
    speeds = torch.cat(list(_distances(distance, here, there))) / eps**2
    kept = speeds.sort().values[int(trim * samples) : samples - int(trim * samples)]
    called = name or getattr(distance, "__name__", type(distance).__name__)
    return PathLength(
        protocol=f"pl{short_count(samples)}-{called}-{interpolation}-{where}",
        mean=float(kept.mean()),
        standard_error=float(kept.std() / math.sqrt(len(kept))) if len(kept) > 1 else math.nan,
        speeds=speeds,
    )


def _distances(
    distance: Callable[[Tensor, Tensor], Tensor], here: Iterator[Tensor], there: Iterator[Tensor]
) -> Iterator[Tensor]:
    for a, b in zip(here, there, strict=True):
        with torch.no_grad():
            found = distance(a, b)
        if found.numel() != len(a):
            raise ValueError(f"path_length needs one distance for each of {len(a)} pairs; got {tuple(found.shape)}.")
        yield found.flatten().cpu().double()


def _slerp(start: Tensor, end: Tensor, t: Tensor) -> Tensor:
    cosine = (start * end).sum(1, keepdim=True) / (start.norm(dim=1, keepdim=True) * end.norm(dim=1, keepdim=True))
    angle = cosine.clamp(-1, 1).acos()
    near = angle.sin() < 1e-9  # parallel, as all are with one latent: the limit is a straight path
    path = ((1 - t) * angle).sin() / angle.sin() * start + (t * angle).sin() / angle.sin() * end
    return torch.where(near, torch.lerp(start, end, t), path)


def projection_spectrum(target: Any) -> Spectrum:
    """The spectrum of the weight that first meets the latent: the paper's condition number of a GAN.

    Args:
        target: A weight, a layer that has one, or a generator with ``z_dim``. In a generator, the first registered
            linear layer or convolution with z_dim inputs is taken. Pass the basis U of an EigenGAN's layer as a tensor.

    Returns:
        The `Spectrum` of the singular values of its `matrix_view`; the condition number is its ``condition``.

    Raises:
        TypeError: If it is of another kind.
        ValueError: If a generator has no such layer.

    Example:
        >>> generator = torch.nn.Sequential(torch.nn.ConvTranspose2d(30, 64, 4), torch.nn.Tanh())
        >>> generator.z_dim = 30
        >>> s = projection_spectrum(generator)
        >>> s.size, bool(1 < s.condition < 3)
        (30, True)

    References:
        Song, Sebe, Wang (2022), table "Condition number of the first convolution weight in vanilla GANs".
    """
    if isinstance(target, Tensor):
        return singular_spectrum(matrix_view(target.detach()))
    if not isinstance(target, nn.Module):
        raise TypeError(f"projection_spectrum needs a weight, a layer or a generator; got {type(target).__name__}.")
    if isinstance(target, (*_TRANSPOSED, *_FORWARD)):
        return projection_spectrum(target.weight)
    size = as_generator(target, "projection_spectrum").z_dim
    for module in target.modules():
        if isinstance(module, (*_TRANSPOSED, *_FORWARD)):
            inputs = module.in_features if isinstance(module, nn.Linear) else module.in_channels
            if inputs == size:
                return projection_spectrum(module.weight)
    raise ValueError(
        f"projection_spectrum found no linear layer or convolution with {size} inputs, the generator's z_dim. Pass the "
        "layer or the weight itself."
    )
