"""Whether a GAN is still a game: a discriminator that cannot tell, samples that collapse."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from orthocond._checks import check_floating

_CHANCE = 2 * math.log(2)
_TOLERANCE = 0.002  # of the loss
_DEAD = 0.5  # of the steps
_COLLAPSED = 0.1  # of the spread of real images


def discriminator_health(real_logits: Tensor, fake_logits: Tensor) -> dict[str, Tensor]:
    r"""What one step says about the discriminator.

    A discriminator that cannot tell gives all images the same logit. Its cross-entropy
    :math:`E\,\mathrm{softplus}(-d_{real}) + E\,\mathrm{softplus}(d_{fake})`, after subtracting the mean of all
    logits, is then 2 ln 2. The mean is subtracted because hinge and Wasserstein losses leave it free. One step with
    this value may be chance. If most steps have it, the discriminator is dead, and the generator learns nothing.

    Args:
        real_logits: Logits of real images.
        fake_logits: Logits of generated images.

    Returns:
        Scalars without gradient, whose averages over steps and processes mean something: ``"real_logit"`` and
        ``"fake_logit"``, the mean logits, and ``"cannot_tell"``, 1 if the cross-entropy is within 0.002 of 2 ln 2, else
        0. Its average is the fraction of such steps.

    Raises:
        TypeError: If the logits are not floating point.
        ValueError: If there are none.

    Example:
        >>> from orthocond.gans import discriminator_health
        >>> discriminator_health(torch.tensor([2.0, 4.0]), torch.tensor([-1.0]))
        {'real_logit': tensor(3.), 'fake_logit': tensor(-1.), 'cannot_tell': tensor(0.)}
        >>> discriminator_health(torch.full((4,), 0.7), torch.full((4,), 0.7))["cannot_tell"]
        tensor(1.)
    """
    for logits in (real_logits, fake_logits):
        check_floating(logits, "discriminator_health")
        if logits.numel() == 0:
            raise ValueError("discriminator_health needs logits of real and of generated images; got none.")
    real, fake = real_logits.detach().float(), fake_logits.detach().float()
    middle = (real.mean() + fake.mean()) / 2
    loss = F.softplus(middle - real).mean() + F.softplus(fake - middle).mean()
    cannot_tell = ((loss - _CHANCE).abs() < _TOLERANCE).float()
    return {"real_logit": real.mean(), "fake_logit": fake.mean(), "cannot_tell": cannot_tell}


def sample_spread(samples: Tensor, images: Tensor) -> Tensor:
    """How varied samples are: their mean distance from each other over that of real images.

    It is about 1 for a generator whose samples vary like the data, and 0 for one that always draws the same image. It
    measures that samples differ, not that they are good: noise has a spread too.

    Args:
        samples: Generated images ``(N, ...)``, at least 2; 64 suffice.
        images: Real images of the same shape but for their number, at least 2.

    Returns:
        A scalar.

    Raises:
        TypeError: If an argument is not floating point.
        ValueError: If there are fewer than two images, or their shapes do not match.

    Example:
        >>> from orthocond.gans import sample_spread
        >>> images = torch.randn(64, 3, 8, 8)
        >>> sample_spread(images[:1].expand(64, -1, -1, -1), images)
        tensor(0.)
    """
    for x in (samples, images):
        check_floating(x, "sample_spread")
    if samples.shape[1:] != images.shape[1:] or min(len(samples), len(images)) < 2:
        raise ValueError(
            "sample_spread needs two batches of at least two images of one shape; got "
            f"{tuple(samples.shape)} and {tuple(images.shape)}."
        )
    with torch.no_grad():
        return F.pdist(samples.flatten(1).float()).mean() / F.pdist(images.flatten(1).float()).mean()


def health_warnings(cannot_tell: float, spread: float | None = None) -> list[str]:
    """Sentences about what is wrong, to be shown while a GAN is trained; none if nothing is.

    Args:
        cannot_tell: The fraction of the last steps, at least a few dozen, in which the discriminator could not tell.
        spread: What `sample_spread` gave for the generator, if that is known.

    Returns:
        A sentence for a dead discriminator, above one half of the steps, and one for collapsed samples, below a tenth
        of the spread of real images.

    Example:
        >>> from orthocond.gans import health_warnings
        >>> health_warnings(0.02, spread=0.9)
        []
        >>> print(health_warnings(1.0)[0])
        The discriminator is dead: in 100 % of the steps it could not tell real from generated images (its loss was \
2 ln 2). Lower the weight of its gradient penalty, widen it, or give it He's initial weights.
    """
    found = []
    if cannot_tell > _DEAD:
        found.append(
            f"The discriminator is dead: in {100 * cannot_tell:.0f} % of the steps it could not tell real from "
            "generated images (its loss was 2 ln 2). Lower the weight of its gradient penalty, widen it, or give it "
            "He's initial weights."
        )
    if spread is not None and not spread >= _COLLAPSED:
        found.append(
            f"The samples have collapsed: their distance from each other is {spread:.2g} times that of real images. "
            "Lower the learning rates, or raise the weight of the discriminator's gradient penalty."
        )
    return found
