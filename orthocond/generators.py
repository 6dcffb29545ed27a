"""What a generator is: latents with a prior, images with a range, noise that is held fixed."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from orthocond._checks import check_choice, check_count, check_floating

Sampler = Callable[[int, torch.Generator], Tensor]
"""From a number of latents and a source of random numbers to latents ``(n, z_dim)``."""

_SLACK = 1e-3  # of the range of pixels: what half precision and resizing leave
_USUAL = ((0, 1), (-1, 1), (0, 255))  # ranges of pixels
_SIGMA = {"normal": 1.0, "uniform": 1 / math.sqrt(3)}
_SIGMA_SAMPLES = 4096  # latents from which sigma of a sampler is measured


class ImageGenerator(Protocol):
    """Any callable from latents ``(n, z_dim)`` to images ``(n, C, H, W)``; `Generator` makes one of anything else."""

    z_dim: Any

    def __call__(self, z: Tensor, /) -> Tensor: ...


class Generator(nn.Module):
    r"""A generator of images as this library needs it, made from any module in one line.

    It maps latents ``(n, z_dim)`` to images ``(n, C, H, W)`` in [-1, 1], and knows how latents are distributed. All of
    `orthocond.directions` and `orthocond.metrics` takes it. They also take a plain callable with ``z_dim``, which
    counts as one with normal latents and images in [-1, 1].

    The module keeps its mode, in which calls of your own make images: call ``module.eval()`` first. Everything in this
    library that takes a generator uses eval mode meanwhile.

    The constructor makes two images, so that a wrong shape, prior or range is an error here. Pixels that
    fit the range but stay in [0, 1], as after a sigmoid, give a warning: the range is most likely wrong. Pictures
    would be pale, and effects half as large as they are.

    Args:
        module: Module or function from latents to images.
        z_dim: Number of latents; None takes ``module.z_dim``.
        prior: ``"normal"`` for N(0, I), ``"uniform"`` for [-1, 1] in each latent, or a function of a number n and a
            ``torch.Generator`` that returns latents ``(n, z_dim)``.
        range: Smallest and largest pixel value of the module, such as (0, 1) after a sigmoid. Images are scaled to
            [-1, 1]. None uses pixels as they are and checks nothing.
        latent_shape: Shape of one latent as the module takes it, such as (100, 1, 1); None finds out whether it is
            ``(z_dim,)`` or ``(z_dim, 1, 1)``.
        noise: Noise ``(noise_dim,)`` that the module gets as second argument, the same for all images. Noise that the
            module draws from torch's random state needs nothing here: wherever images are compared, it is the same.

    Attributes:
        sigma: Standard deviation of one latent, the root mean square of those of all. Steps along directions are in
            units of it.

    Raises:
        TypeError: If the module cannot be called, or ``z_dim`` is missing.
        ValueError: If a setting is not valid, the module fails on latents of both shapes, or its images have another
            shape or values outside the range.

    Example:
        >>> import orthocond as oc
        >>> dcgan = torch.nn.Sequential(torch.nn.ConvTranspose2d(100, 3, 8), torch.nn.Sigmoid())
        >>> g = oc.Generator(dcgan, z_dim=100, prior="uniform", range=(0, 1))
        >>> z = g.sample(5)
        >>> z.shape, g(z).shape, bool(g(z).min() < 0)
        (torch.Size([5, 100]), torch.Size([5, 3, 8, 8]), True)
    """

    noise: Tensor | None

    def __init__(
        self,
        module: Callable[..., Tensor],
        z_dim: int | None = None,
        *,
        prior: str | Sampler = "normal",
        range: tuple[float, float] | None = (-1.0, 1.0),
        latent_shape: tuple[int, ...] | None = None,
        noise: Tensor | None = None,
    ) -> None:
        super().__init__()
        if not callable(module):
            raise TypeError(f"Generator needs a module that can be called, images = G(z); got {_kind(module)}.")
        self.module = module
        self.z_dim = _checked_z_dim(module, "Generator") if z_dim is None else z_dim
        check_count(self.z_dim, "Generator(z_dim=...)", 1)
        if not callable(prior):
            check_choice(prior, "Generator(prior=...)", tuple(_SIGMA))
        self.prior = prior
        self.range = None if range is None else _checked_range(range)
        self.register_buffer("noise", noise if noise is None else check_floating(noise, "Generator(noise=...)"))
        if latent_shape is not None and math.prod(latent_shape) != self.z_dim:
            raise ValueError(f"Generator(latent_shape=...) needs {self.z_dim} numbers in all; got {latent_shape}.")
        self.latent_shape = latent_shape or self._find_shape()
        self.sigma = _SIGMA[prior] if isinstance(prior, str) else _deviation(self.sample(_SIGMA_SAMPLES))
        if not self.sigma > 0:
            raise ValueError(f"Generator(prior=...) needs latents that differ; {_SIGMA_SAMPLES} of this one are equal.")
        if latent_shape is None or self.range is not None:
            self._warn_of_range(all_images(self, self.sample(2), 2, "Generator"))

    def _warn_of_range(self, images: Tensor) -> None:
        if self.range is None or not self.range[0] <= 0 < 1 <= self.range[1] or self.range == (0, 1):
            return
        low, high = _undone(images, self.range)
        if 0 <= low < high and 0.5 <= high <= 1:  # without bright pixels it may be a random weight
            warnings.warn(
                f"Generator: the range of this generator was declared as {self.range}, and the pixels of two images go "
                f"from {low:.3g} to {high:.3g}. If they lie between 0 and 1, as after a sigmoid, declare "
                "Generator(..., range=(0, 1)).",
                stacklevel=3,
            )

    def _find_shape(self) -> tuple[int, ...]:
        z = self.sample(2)
        errors = []
        for shape in ((self.z_dim,), (self.z_dim, 1, 1)):
            self.latent_shape = shape
            try:
                with evaluating(self), seeded(z, 0):
                    self(z)
                return shape
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                errors.append(f"{(2, *shape)}: {str(error).splitlines()[0]}")
        raise ValueError(
            f"Generator: the module takes latents of neither shape. {'; '.join(errors)}. Check z_dim={self.z_dim}, or "
            "pass latent_shape."
        )

    def forward(self, z: Tensor) -> Tensor:
        """Images ``(n, C, H, W)`` in [-1, 1] of latents ``(n, z_dim)``."""
        if z.ndim != 2 or z.shape[1] != self.z_dim:
            raise ValueError(f"Generator needs latents (n, {self.z_dim}); got shape {tuple(z.shape)}.")
        shaped = z.reshape(
            z.shape[0], *self.latent_shape
        )  # an exported graph keeps the number free, where len() fixes it
        noise = () if self.noise is None else (self.noise.expand(z.shape[0], -1),)
        images: Tensor = self.module(shaped, *noise)
        if self.range in (None, (-1.0, 1.0)):
            return images
        low, high = self.range
        return (images - low) * (2 / (high - low)) - 1

    def sample(self, count: int, rng: torch.Generator | int = 0) -> Tensor:
        """Latents ``(count, z_dim)`` of the prior, with the dtype and device of the module.

        Args:
            count: How many.
            rng: A source of random numbers on the CPU, or a seed.

        Raises:
            ValueError: If the count is not positive, or a sampler returns something else.
        """
        check_count(count, "Generator.sample(count=...)", 1)
        rng = torch.Generator().manual_seed(rng) if isinstance(rng, int) else rng
        z = draw_latents(self.prior, count, self.z_dim, rng)
        return check_latents(z, self.z_dim, "Generator(prior=...)").to(self.like)

    @property
    def like(self) -> Tensor:
        """A tensor of the dtype and device that the module works in."""
        state = [*self.parameters(), *self.buffers()]
        return next((t.detach() for t in state if t.is_floating_point()), torch.zeros(()))

    def extra_repr(self) -> str:
        prior = self.prior if isinstance(self.prior, str) else getattr(self.prior, "__name__", "sampler")
        return f"z_dim={self.z_dim}, prior={prior}, range={self.range}"


class NoiseAsLatent(nn.Module):
    """A generator whose noise is the last part of its latents, so that a prior covers both.

    Directions of the generator itself, with zeros for the noise, are directions of this one. A metric that samples
    latents samples the noise with them.

    Args:
        generator: A generator with ``z_dim``, ``noise_dim`` and a second argument for the noise, as `EigenGenerator`.

    Raises:
        TypeError: If the generator has no ``z_dim`` or ``noise_dim``.

    Example:
        >>> import orthocond as oc
        >>> g = oc.NoiseAsLatent(oc.gans.EigenGenerator(size=8, directions=2, noise_dim=4))
        >>> g.z_dim
        6
    """

    def __init__(self, generator: nn.Module) -> None:
        super().__init__()
        if not isinstance(getattr(generator, "noise_dim", None), int):
            raise TypeError(f"NoiseAsLatent needs a generator with noise_dim; {_kind(generator)} has none.")
        self.generator = generator
        self.split = _checked_z_dim(generator, "NoiseAsLatent")
        self.z_dim = self.split + int(generator.noise_dim)  # type: ignore[arg-type]

    def forward(self, z: Tensor) -> Tensor:
        """Images of latents and noise, side by side."""
        images: Tensor = self.generator(z[:, : self.split], z[:, self.split :])
        return images


def as_generator(generator: object, caller: str) -> Generator:
    """The generator itself, or a plain callable with ``z_dim`` as one with normal latents.

    Raises:
        TypeError: If it is neither.
    """
    if isinstance(generator, Generator):
        return generator
    if not callable(generator):
        raise TypeError(f"{caller} needs a generator that can be called, images = G(z); got {_kind(generator)}.")
    z_dim = _checked_z_dim(generator, caller)
    return Generator(generator, z_dim, range=None, latent_shape=(z_dim,))


def draw_latents(prior: str | Sampler, count: int, z_dim: int, rng: torch.Generator) -> Tensor:
    """Latents of a prior, float64 but for those of a sampler, which are not checked."""
    if callable(prior):
        return prior(count, rng)
    if prior == "normal":
        return torch.randn(count, z_dim, generator=rng, dtype=torch.float64)
    return 2 * torch.rand(count, z_dim, generator=rng, dtype=torch.float64) - 1


def _deviation(z: Tensor) -> float:
    """Root mean square of the standard deviations of the latents, whose means may differ."""
    return float(z.double().var(0).mean().sqrt())


def latents_of(generator: Generator, z: Tensor | int, caller: str, seed: int = 0) -> Tensor:
    """Checked latents ``(n, z_dim)``; a number samples as many from the prior."""
    if isinstance(z, Tensor):
        return check_latents(z, generator.z_dim, f"{caller}(z=...)")
    check_count(z, f"{caller}(z=...)", 1)
    return generator.sample(z, seed)


def check_latents(z: object, z_dim: int, name: str) -> Tensor:
    """Detached latents if they are finite and of shape ``(n, z_dim)``."""
    z = check_floating(z, name).detach()
    if z.ndim != 2 or z.shape[1] != z_dim or not len(z):
        raise ValueError(
            f"{name} needs latents of shape (samples, z_dim) = (n, {z_dim}) with n of at least 1; got {tuple(z.shape)}."
        )
    if not z.isfinite().all():
        raise ValueError(f"{name} needs finite latents; some of these {len(z)} are NaN or infinite.")
    return z


@contextmanager
def evaluating(generator: object) -> Iterator[None]:
    """Eval mode, in which an image depends on its own latent alone, and no gradients; each part's mode is restored."""
    modes = {m: m.training for m in generator.modules()} if isinstance(generator, nn.Module) else {}
    try:
        for module in modes:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def seeded(z: Tensor, seed: int) -> Iterator[None]:
    """Random numbers of torch that depend on the seed alone; those of the caller go on as if nothing had happened."""
    gpus = [z.device] if z.is_cuda else []
    if z.is_cpu and torch.cuda.is_initialized():  # a generator may move latents to the GPU by itself
        gpus = [torch.device("cuda", torch.cuda.current_device())]
    with torch.random.fork_rng(gpus):
        if z.is_cpu or z.is_cuda:
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed all GPUs too
        else:
            torch.manual_seed(seed)
        for gpu in gpus:
            with torch.cuda.device(gpu):
                torch.cuda.manual_seed(seed)
        yield


def images_of(generator: Generator, z: Tensor, batch_size: int, caller: str) -> Iterator[Tensor]:
    """Checked images of latents, a batch at a time, in eval mode and without gradients.

    Noise that a generator draws depends on the place in ``z`` and the batch size alone: row i has the same noise in
    every call.

    Raises:
        TypeError: If the generator gives something else than floating-point images.
        ValueError: If they are not ``(n, C, H, W)``, not finite, or outside the range that was declared.
    """
    check_count(batch_size, f"{caller}(batch_size=...)", 1)
    for seed, part in enumerate(z.split(batch_size)):
        with evaluating(generator), seeded(z, seed):
            images = generator(part)
        yield check_images(images, len(part), generator.range, caller)


def all_images(generator: Generator, z: Tensor, batch_size: int, caller: str) -> Tensor:
    """The same in one tensor."""
    return torch.cat(list(images_of(generator, z, batch_size, caller)))


def check_images(images: object, count: int, declared: tuple[float, float] | None, caller: str) -> Tensor:
    """What a generator made of ``count`` latents, if it is a batch of as many finite images in [-1, 1]."""
    images = check_floating(images, f"{caller}: what the generator returns")
    if images.ndim != 4 or len(images) != count:
        raise ValueError(
            f"{caller} needs a generator of images (n, C, H, W); of {count} latents this one made shape "
            f"{tuple(images.shape)}."
        )
    if not images.isfinite().all():
        raise ValueError(f"{caller} needs finite images; the generator made NaN or infinite pixels. Did it diverge?")
    low, high = (float(v) for v in images.aminmax())
    if declared is not None and not -1 - _SLACK <= low <= high <= 1 + _SLACK:
        low, high = _undone(images, declared)
        likely = next((f"{r}" for r in _USUAL if r[0] <= low <= high <= r[1]), "(low, high)")
        raise ValueError(
            f"{caller}: the range of this generator was declared as {declared}; its pixels go from {low:.3g} to "
            f"{high:.3g}. Declare Generator(..., range={likely}), or range=None if there are no limits."
        )
    return images


def _undone(images: Tensor, declared: tuple[float, float]) -> tuple[float, float]:
    """Least and largest pixel as the module made them, before they were scaled to [-1, 1]."""
    start, end = declared
    low, high = (start + (float(v) + 1) / 2 * (end - start) for v in images.aminmax())
    return low, high


def draws_noise(generator: Generator, z: Tensor, caller: str) -> bool:
    """Whether a generator draws noise of its own; an error if that does not come from torch's random state.

    Raises:
        ValueError: If the generator fails, makes no finite images, or makes another image of a latent among others.
    """
    one = z[:1]
    images = []
    for seed in (0, 0, 1):
        with evaluating(generator), seeded(one, seed):
            images.append(check_images(_call(generator, one, caller), 1, generator.range, caller))
    if not torch.equal(images[0], images[1]):
        raise ValueError(
            f"{caller} needs a generator that makes the same image of the same latent and the same random state of "
            "torch; two calls in eval mode differ. Fix its noise: wrap it so that it uses stored noise."
        )
    if not torch.equal(images[0], images[2]):
        return True
    pair = torch.cat([one, z[-1:]])
    with evaluating(generator), seeded(one, 0):
        among = check_images(_call(generator, pair, caller), 2, generator.range, caller)[:1]
    if float((among - images[0]).abs().max()) > torch.finfo(among.dtype).eps ** 0.5 * float(among.abs().max()):
        raise ValueError(
            f"{caller} needs a generator whose image of a latent does not depend on the other latents of a batch; that "
            "of this one does. Batch normalization in training mode does it: call .eval() on networks within a plain "
            "function, and use track_running_stats=True."
        )
    return False


def _call(generator: Generator, z: Tensor, caller: str) -> Tensor:
    try:
        return generator(z)
    except (RuntimeError, IndexError) as error:
        raise ValueError(
            f"{caller}: the generator fails on latents {tuple(z.shape)} of {z.dtype}: {str(error).splitlines()[0]} "
            "Check their dtype and device. If it takes another shape, wrap it: orthocond.Generator(module, z_dim=...)."
        ) from error


def _checked_z_dim(generator: object, caller: str) -> int:
    found = getattr(generator, "z_dim", None)
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise TypeError(
            f"{caller} needs a generator with z_dim, the number of its latents; the z_dim of this {_kind(generator)} "
            f"is {found!r}. Wrap it: orthocond.Generator(module, z_dim=100)."
        )
    return found


def _checked_range(values: tuple[float, float]) -> tuple[float, float]:
    try:
        low, high = () if isinstance(values, str) else (float(v) for v in values)
    except (TypeError, ValueError, OverflowError):
        low = high = math.nan
    if not -math.inf < low < high < math.inf:
        raise ValueError(
            "Generator(range=...) needs the smallest and the largest pixel value, such as (0, 1), or None for no "
            f"limits; got {values!r}."
        )
    return low, high


def _kind(thing: object) -> str:
    return type(thing).__name__
