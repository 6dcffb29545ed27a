"""Latent variational predictability, LVP (a rival in the paper: section 6.2)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orthocond._checks import check_choice, check_count, check_floating
from orthocond.gans._common import check_images, check_size, normal
from orthocond.gans.noise import same_noise


class LatentPredictor(nn.Module):
    """A small network that tells from two images which latent has changed between them.

    4x4 convolutions of stride 2 with affine instance normalization and leaky ReLU down to 4 x 4 features, then two
    linear layers: 2,806 parameters at 128 pixels with 30 latents, as in the paper's comparison.

    Args:
        size: Height and width of the images, a power of two of at least 8.
        z_dim: Number of latents.
        width: Channels of each convolution.
        inputs: ``"difference"``: it sees the second image minus the first, as in the paper's comparison.
            ``"both"``: the two on top of each other, as in the method's original.
        image_channels: Channels of the images.

    Raises:
        ValueError: If a setting is not valid, or images have another shape.

    Example:
        >>> from orthocond.gans import LatentPredictor
        >>> predictor = LatentPredictor(size=32, z_dim=6)
        >>> predictor(torch.randn(2, 3, 32, 32), torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 6])
    """

    def __init__(
        self, size: int, z_dim: int, width: int = 4, *, inputs: str = "difference", image_channels: int = 3
    ) -> None:
        super().__init__()
        count = check_size(size, "LatentPredictor")
        for name, value in {"z_dim": z_dim, "width": width, "image_channels": image_channels}.items():
            check_count(value, f"LatentPredictor({name}=...)", 1)
        check_choice(inputs, "LatentPredictor(inputs=...)", ("difference", "both"))
        self.size, self.z_dim, self.inputs, self.image_channels = size, z_dim, inputs, image_channels
        layers: list[nn.Module] = []
        channels = image_channels * (2 if inputs == "both" else 1)
        for _ in range(count):
            layers.append(nn.Conv2d(channels, width, 4, stride=2, padding=1, bias=False))
            layers += [nn.InstanceNorm2d(width, affine=True), nn.LeakyReLU(0.2)]
            channels = width
        layers += [nn.Flatten(), nn.Linear(16 * width, 4 * width), nn.LeakyReLU(0.2), nn.Linear(4 * width, z_dim)]
        self.net = nn.Sequential(*layers)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Map two batches of images ``(N, C, size, size)`` to logits ``(N, z_dim)``."""
        for images in (first, second):
            check_images(images, self.image_channels, self.size, "LatentPredictor")
        return self.net(second - first if self.inputs == "difference" else torch.cat([first, second], dim=1))


def latent_predictability(
    network: Callable[[Tensor], Tensor],
    z: Tensor,
    predictor: Callable[[Tensor, Tensor], Tensor],
    *,
    step: float = 1.0,
    loss: str = "cross-entropy",
    rng: torch.Generator | None = None,
) -> Tensor:
    r"""The loss of predicting which latent has changed, from the image before and after.

    For each sample one latent i, drawn at random, changes by a normal number: :math:`z' = z + s\,\epsilon\,e_i`. The
    loss of ``predictor(G(z), G(z'))`` against i is minimized by generator and predictor together: the generator makes
    its latents easy to tell apart. The predictor's parameters need an optimizer too.

    Args:
        network: The generator. Noise that it draws is the same for both images (see `same_noise`).
        z: Latents ``(N, z_dim)``.
        predictor: Maps two batches of images to logits ``(N, z_dim)``, such as `LatentPredictor`.
        step: The s. In the method's original latents are uniform in [-2, 2] and s = 0.8.
        loss: ``"cross-entropy"``: softmax, as in the original. ``"binary"``: each latent on its own against 0 or 1,
            averaged over all, as in the paper's comparison, with s = 1.
        rng: Draws the latents and changes instead of torch's random state.

    Returns:
        A scalar. A predictor that knows nothing has log(z_dim), or for ``"binary"`` about (1 + log(z_dim)) / z_dim.

    Raises:
        TypeError: If z is not floating point.
        ValueError: If a shape or setting is not valid.

    Example:
        >>> from orthocond.gans import LatentPredictor, SimpleGenerator, latent_predictability
        >>> g, predictor = SimpleGenerator(16, z_dim=4, width=8), LatentPredictor(16, z_dim=4)
        >>> latent_predictability(g, torch.randn(8, 4), predictor).backward()
        >>> bool(g.first_projection.weight.grad.any())
        True

    References:
        Zhu, Xu, Tao: *Learning disentangled representations with latent variation predictability* (2020).
    """
    check_floating(z, "latent_predictability")
    if z.ndim != 2 or z.numel() == 0:
        raise ValueError(f"latent_predictability needs latents (N, z_dim); got shape {tuple(z.shape)}.")
    check_choice(loss, "latent_predictability(loss=...)", ("cross-entropy", "binary"))
    if not 0 < step < float("inf"):
        raise ValueError(f"latent_predictability(step=...) needs a finite number above 0; got {step!r}.")
    count, z_dim = z.shape
    device = z.device if rng is None else rng.device
    changed = torch.randint(z_dim, (count,), device=device, generator=rng).to(z.device)
    amount = step * normal((count, 1), z, rng)
    target = F.one_hot(changed, z_dim).to(z.dtype)
    before, after = same_noise(network, [z, z + amount * target])
    logits = predictor(before, after)
    if logits.shape != z.shape:
        raise ValueError(
            f"latent_predictability needs a predictor with logits {tuple(z.shape)}, one for each latent; got shape "
            f"{tuple(logits.shape)}."
        )
    if loss == "binary":
        return F.binary_cross_entropy_with_logits(logits, target)
    return F.cross_entropy(logits, changed)
