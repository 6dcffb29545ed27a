"""What discriminator and generator minimize, and gradient penalties of the discriminator."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from orthocond._checks import check_count, check_floating, check_not_negative
from orthocond.gans._common import uniform

Discriminator = Callable[[Tensor], Tensor]


class Objective(Protocol):
    """A pair of losses; any object with these two methods is one."""

    def discriminator(self, real_logits: Tensor, fake_logits: Tensor) -> Tensor:
        """The loss of the discriminator."""
        ...

    def generator(self, fake_logits: Tensor) -> Tensor:
        """The loss of the generator."""
        ...


@dataclass(frozen=True)
class NonSaturating:
    r"""The loss of the first GAN: cross-entropy, and for the generator that of the wrong label.

    With logits d: :math:`E\,\mathrm{softplus}(-d_{real}) + E\,\mathrm{softplus}(d_{fake})` and
    :math:`E\,\mathrm{softplus}(-d_{fake})`. The authors' vanilla GAN halves the first.

    Example:
        >>> from orthocond.gans import NonSaturating
        >>> NonSaturating().discriminator(torch.zeros(4), torch.zeros(4))
        tensor(1.3863)
    """

    def discriminator(self, real_logits: Tensor, fake_logits: Tensor) -> Tensor:
        """The loss of the discriminator."""
        return F.softplus(-real_logits).mean() + F.softplus(fake_logits).mean()

    def generator(self, fake_logits: Tensor) -> Tensor:
        """The loss of the generator."""
        return F.softplus(-fake_logits).mean()


@dataclass(frozen=True)
class Hinge:
    r"""Hinge loss.

    :math:`E\,(1 - d_{real})_+ + E\,(1 + d_{fake})_+` and, for the generator, :math:`-E\,d_{fake}`.

    Args:
        saturating: The generator's loss is :math:`E\,(1 - d_{fake})_+` instead, which stops at the margin: EigenGAN's.

    Example:
        >>> from orthocond.gans import Hinge
        >>> fake = torch.tensor([3.0, -1.0])
        >>> Hinge().generator(fake), Hinge(saturating=True).generator(fake)
        (tensor(-1.), tensor(1.))
    """

    saturating: bool = False

    def discriminator(self, real_logits: Tensor, fake_logits: Tensor) -> Tensor:
        """The loss of the discriminator."""
        return F.relu(1 - real_logits).mean() + F.relu(1 + fake_logits).mean()

    def generator(self, fake_logits: Tensor) -> Tensor:
        """The loss of the generator."""
        return F.relu(1 - fake_logits).mean() if self.saturating else -fake_logits.mean()


@dataclass(frozen=True)
class LeastSquares:
    r"""Least squares to 1 for real and 0 for fake.

    :math:`\tfrac12 E\,(d_{real} - 1)^2 + \tfrac12 E\,d_{fake}^2` and :math:`\tfrac12 E\,(d_{fake} - 1)^2`.

    Example:
        >>> from orthocond.gans import LeastSquares
        >>> LeastSquares().generator(torch.tensor([1.0, 3.0]))
        tensor(1.)
    """

    def discriminator(self, real_logits: Tensor, fake_logits: Tensor) -> Tensor:
        """The loss of the discriminator."""
        return 0.5 * ((real_logits - 1).square().mean() + fake_logits.square().mean())

    def generator(self, fake_logits: Tensor) -> Tensor:
        """The loss of the generator."""
        return 0.5 * (fake_logits - 1).square().mean()


@dataclass(frozen=True)
class Wasserstein:
    r"""The Wasserstein distance: :math:`E\,d_{fake} - E\,d_{real}` and :math:`-E\,d_{fake}`.

    It bounds nothing by itself: add `gradient_penalty`, with weight 10 in WGAN-GP.

    Example:
        >>> from orthocond.gans import Wasserstein
        >>> Wasserstein().discriminator(torch.tensor([2.0]), torch.tensor([-1.0]))
        tensor(-3.)
    """

    def discriminator(self, real_logits: Tensor, fake_logits: Tensor) -> Tensor:
        """The loss of the discriminator."""
        return fake_logits.mean() - real_logits.mean()

    def generator(self, fake_logits: Tensor) -> Tensor:
        """The loss of the generator."""
        return -fake_logits.mean()


def r1(discriminator: Discriminator, images: Tensor) -> Tensor:
    r"""The squared norm of the discriminator's gradient at real images, :math:`E\,\|\nabla_x d(x)\|^2`.

    The literature's weight γ stands for γ/2 of this. Logits must not depend on other images of the batch. It can be
    differentiated again; without gradients enabled it is a number.

    Args:
        discriminator: Maps images ``(N, ...)`` to logits with N entries.
        images: Real images.

    Returns:
        A scalar.

    Example:
        >>> from orthocond.gans import r1
        >>> r1(lambda x: 3 * x.sum((1, 2, 3)), torch.randn(2, 1, 4, 4))
        tensor(144.)

    References:
        Mescheder, Geiger, Nowozin (2018).
    """
    return _gradient(discriminator, images, "r1").square().sum(1).mean()


def r2(discriminator: Discriminator, images: Tensor) -> Tensor:
    """The same as `r1` at generated images.

    Args:
        discriminator: Maps images ``(N, ...)`` to logits with N entries.
        images: Generated images. No gradient flows to their generator.

    Returns:
        A scalar.

    Example:
        >>> from orthocond.gans import r2
        >>> r2(lambda x: x.square().sum((1, 2, 3)), torch.ones(2, 1, 1, 2)).item()
        8.0
    """
    return _gradient(discriminator, images, "r2").square().sum(1).mean()


def gradient_penalty(
    discriminator: Discriminator,
    real: Tensor,
    fake: Tensor,
    *,
    center: float = 1.0,
    t: Tensor | None = None,
    rng: torch.Generator | None = None,
) -> Tensor:
    r"""Penalty of the discriminator's gradient between real and generated images.

    :math:`E\,(\|\nabla_x d(\hat x)\| - c)^2` at :math:`\hat x = t\,x_{real} + (1 - t)\,x_{fake}`, t uniform for each
    pair. With c = 1 the penalty of WGAN-GP; with c = 0 the zero-centered one.

    Args:
        discriminator: Maps images ``(N, ...)`` to logits with N entries.
        real: Real images.
        fake: As many generated ones. No gradient flows to their generator.
        center: The norm c to aim at.
        t: One number for each pair, from 0 (the generated image) to 1 (the real one); drawn if None.
        rng: Draws t instead of torch's random state.

    Returns:
        A scalar.

    Raises:
        ValueError: If the shapes differ, t has another number of entries, or both ``t`` and ``rng`` are given.

    Example:
        >>> from orthocond.gans import gradient_penalty
        >>> x = torch.randn(2, 1, 4, 4)
        >>> gradient_penalty(lambda x: 0.5 * x.sum((1, 2, 3)), x, -x)
        tensor(1.)

    References:
        Gulrajani et al. (2017). Thanh-Tung, Tran, Venkatesh (2019).
    """
    check_not_negative(center, "gradient_penalty(center=...)")
    check_floating(real, "gradient_penalty")
    if real.shape != fake.shape:
        raise ValueError(
            f"gradient_penalty needs as many fake images as real ones; got {tuple(real.shape)} and {tuple(fake.shape)}."
        )
    if t is None:
        t = uniform((len(real),), real, rng)
    elif rng is not None:
        raise ValueError("gradient_penalty needs t, or rng= to draw it with; got both.")
    elif t.numel() != len(real):
        raise ValueError(f"gradient_penalty needs one t per pair, {len(real)}; got shape {tuple(t.shape)}.")
    t = t.to(real).reshape(-1, *(1,) * (real.ndim - 1))
    gradient = _gradient(discriminator, torch.lerp(fake.detach(), real.detach(), t), "gradient_penalty")
    if center == 0:
        return gradient.square().sum(1).mean()
    return (torch.linalg.vector_norm(gradient, dim=1) - center).square().mean()


def _gradient(discriminator: Discriminator, images: Tensor, caller: str) -> Tensor:
    """Gradients ``(N, features)`` of the logits, each with respect to its own image."""
    x = check_floating(images, caller).detach().requires_grad_()
    differentiable = torch.is_grad_enabled()
    with torch.enable_grad():
        logits = discriminator(x)
        if logits.numel() != len(x):
            raise ValueError(
                f"{caller} needs one logit per image; {len(x)} images gave logits of shape {tuple(logits.shape)}."
            )
        (gradient,) = torch.autograd.grad(logits.sum(), x, create_graph=differentiable)
    return gradient.flatten(1)


def r1_weight(size: int, batch_size: int) -> float:
    r"""A weight of `r1` for a resolution and a batch size: :math:`0.0002\, \text{size}^2 / \text{batch}`.

    The gradient of a logit with respect to an image grows with the number of pixels, and its noise falls with the
    batch. The number is a starting point, to be varied by factors of 2. StyleGAN2-ADA uses it as its γ, which is half
    of it as a weight here. The settings that drew faces in minutes (see the documentation of GANs) use 1.5 to 4 times
    as much. A weight of 0.5, usual for large images, is far too strong at 32 pixels and batch 16.

    Args:
        size: Height and width of the images.
        batch_size: Images of a step, over all processes.

    Returns:
        The weight, for `LazyR1` at any interval.

    Raises:
        ValueError: If a number is not a positive integer.

    Example:
        >>> from orthocond.gans import LazyR1, r1_weight
        >>> LazyR1(r1_weight(32, 16), interval=4)
        LazyR1(weight=0.0128, interval=4, scaled=True)

    References:
        Karras et al.: *Training generative adversarial networks with limited data* (2020), appendix C.
    """
    check_count(size, "r1_weight(size=...)", 1)
    check_count(batch_size, "r1_weight(batch_size=...)", 1)
    return 0.0002 * size**2 / batch_size


@dataclass(frozen=True)
class LazyR1:
    """R1 at every k-th step only, k times as strong.

    Args:
        weight: Weight of `r1`; half of the literature's γ.
        interval: The k.
        scaled: Whether to multiply by k, so that the weight means the same for every k. EigenGAN's port and the
            paper's code do not: their weight 10 at every 16th step acts as 0.625.

    Raises:
        ValueError: If a setting is not valid.

    Example:
        >>> from orthocond.gans import LazyR1
        >>> penalty = LazyR1(weight=0.5, interval=4)
        >>> [penalty.factor(step) for step in range(6)]
        [2.0, 0.0, 0.0, 0.0, 2.0, 0.0]

    References:
        Karras et al. (2020), appendix B.
    """

    weight: float = 10.0
    interval: int = 16
    scaled: bool = True

    def __post_init__(self) -> None:
        check_not_negative(self.weight, "LazyR1(weight=...)")
        check_count(self.interval, "LazyR1(interval=...)", 1)

    def factor(self, step: int) -> float:
        """What `r1` is multiplied by at this step; 0 where it need not be computed."""
        if step % self.interval:
            return 0.0
        return float(self.weight * (self.interval if self.scaled else 1))

    def __call__(self, discriminator: Discriminator, images: Tensor, step: int) -> Tensor:
        """The penalty at this step, a scalar; zero, and no work, between."""
        factor = self.factor(step)
        if factor == 0:
            return torch.zeros((), dtype=images.dtype, device=images.device)
        return factor * r1(discriminator, images)
