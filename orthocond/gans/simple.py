"""The vanilla GAN of the paper: stacked convolutions, at any size (paper: section 6.2)."""

from collections.abc import Sequence

from torch import Tensor, nn

from orthocond._checks import check_choice, check_count
from orthocond.gans._common import SLOPE, check_images, check_latent, check_size
from orthocond.gans.upsample import UpsampleConv2d

_EPS = 1e-6  # of the instance normalizations, as in the original


class SimpleGenerator(nn.Module):
    r"""The generator of the vanilla GAN: one linear projection of the latent, then blocks that double the resolution.

    The first layer is a transposed convolution on a 1 x 1 image, hence linear, :math:`h = W^T z + b`, with neither
    normalization nor activation after it. Its weight ``(z_dim, C, 4, 4)`` is the matrix ``(z_dim, 16 C)`` of
    `matrix_view`, one row for each latent: what the treatments and SeFa act on. A block is a convolution without bias,
    an affine instance normalization and a leaky ReLU; the end is a 3x3 convolution and tanh.

    Args:
        size: Height and width of the images, a power of two of at least 8.
        z_dim: Number of latents.
        width: Channels at full resolution. The others follow the original: 16, 16, 8, 4, 2, 1 times it at 128
            pixels, 8, 4, 2, 1, 1 at 64, and 4, 2, 1, 1 at 32.
        channels: Channels at 4, 8, ..., ``size`` pixels instead.
        blocks: ``"transposed"``: 4x4 transposed convolutions of stride 2, as in the original. ``"upsample"``: nearest
            neighbors and a 3x3 convolution: fewer parameters, no checkerboard.
        image_channels: Channels of the images.

    Attributes:
        first_projection: The first layer.
        convolutions: The first layer and the convolution of each block, from coarse to fine.
        z_dim: Number of latents.

    Raises:
        ValueError: If the size is not a power of two, or the number of channels does not match it.

    Example:
        >>> from orthocond.gans import SimpleGenerator
        >>> g = SimpleGenerator(size=32, z_dim=30, channels=(192, 96, 48, 24), blocks="upsample")
        >>> g(torch.randn(2, g.z_dim)).shape
        torch.Size([2, 3, 32, 32])
        >>> g.first_projection.weight.shape
        torch.Size([30, 192, 4, 4])

    References:
        Song, Sebe, Wang (2022), section 6.2.
    """

    def __init__(
        self,
        size: int = 128,
        z_dim: int = 30,
        width: int = 64,
        *,
        channels: Sequence[int] | None = None,
        blocks: str = "transposed",
        image_channels: int = 3,
    ) -> None:
        super().__init__()
        count = check_size(size, "SimpleGenerator")
        check_count(z_dim, "SimpleGenerator(z_dim=...)", 1)
        check_count(width, "SimpleGenerator(width=...)", 1)
        check_count(image_channels, "SimpleGenerator(image_channels=...)", 1)
        check_choice(blocks, "SimpleGenerator(blocks=...)", ("transposed", "upsample"))
        if channels is None:
            channels = [width * _factor(size, count, i) for i in range(count + 1)]
        channels = _check_channels(channels, count + 1, size, "SimpleGenerator")
        self.size, self.z_dim = size, z_dim
        self.first_projection = nn.ConvTranspose2d(z_dim, channels[0], 4)
        self.blocks = nn.ModuleList(_block(channels[i], channels[i + 1], blocks) for i in range(count))
        self.to_rgb = nn.Sequential(nn.Conv2d(channels[-1], image_channels, 3, padding=1), nn.Tanh())

    @property
    def convolutions(self) -> list[nn.Module]:
        """The first projection and the convolution of each block: what HP and OroJaR were applied to."""
        kinds = (nn.ConvTranspose2d, nn.Conv2d)
        return [self.first_projection, *(m for b in self.blocks for m in b.children() if isinstance(m, kinds))]

    def forward(self, z: Tensor) -> Tensor:
        """Map latents ``(N, z_dim)`` to images ``(N, image_channels, size, size)`` in [-1, 1]."""
        h = self.first_projection(check_latent(z, self.z_dim, "SimpleGenerator")[:, :, None, None])
        for block in self.blocks:
            h = block(h)
        return self.to_rgb(h)


def _factor(size: int, count: int, i: int) -> int:
    """Channels after block i as a multiple of the width."""
    if size >= 128:
        return min(16, 2 ** (count - i))
    return max(1, 2 ** (count - 1 - i))


def _block(in_channels: int, out_channels: int, kind: str) -> nn.Sequential:
    if kind == "transposed":
        double: list[nn.Module] = [nn.ConvTranspose2d(in_channels, out_channels, 4, stride=2, padding=1, bias=False)]
    else:
        double = [nn.Identity(), UpsampleConv2d(in_channels, out_channels, bias=False)]  # names of weights as they were
    return nn.Sequential(*double, nn.InstanceNorm2d(out_channels, eps=_EPS, affine=True), nn.LeakyReLU(SLOPE))


class SimpleDiscriminator(nn.Module):
    """The discriminator of the vanilla GAN: 4x4 convolutions of stride 2 down to 4 x 4 features.

    The original has instance normalizations and ReLUs after all convolutions but the first, and two linear layers,
    between which there is a ReLU up to 64 pixels and, at 128, nothing. ``norm=False`` is what trains well in minutes:
    leaky ReLUs, biases, no normalization, one linear layer. Do not make it much weaker than its generator: at 32 pixels
    width 48 goes with a generator of 311,000 parameters, where 24 has a twelfth of the generator's operations.

    Its initial weights are torch's. The initial logits have a standard deviation of 0.01 at 32 pixels and 0.002 at 128;
    with so few layers the first steps of Adam correct that. He's weights, which `EigenDiscriminator` needs, give worse
    images here: a Fréchet distance on AlexNet features of 69 and 62 instead of 45 and 40 after 750 steps on CelebA (two
    seeds).

    Args:
        size: Height and width of the images, a power of two of at least 8.
        width: Channels of the first convolution; each of the others doubles them.
        channels: Channels at ``size / 2``, ``size / 4``, ..., 4 pixels instead.
        norm: Whether to normalize, as in the original.
        image_channels: Channels of the images.

    Raises:
        ValueError: If the size is not a power of two, the number of channels does not match it, or images have another
            shape.

    Example:
        >>> from orthocond.gans import SimpleDiscriminator
        >>> d = SimpleDiscriminator(size=32, width=48, norm=False)
        >>> d(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2])
    """

    def __init__(
        self,
        size: int = 128,
        width: int = 64,
        *,
        channels: Sequence[int] | None = None,
        norm: bool = True,
        image_channels: int = 3,
    ) -> None:
        super().__init__()
        count = check_size(size, "SimpleDiscriminator")
        check_count(width, "SimpleDiscriminator(width=...)", 1)
        check_count(image_channels, "SimpleDiscriminator(image_channels=...)", 1)
        if channels is None:
            channels = [width * 2**i for i in range(count)]
        channels = _check_channels(channels, count, size, "SimpleDiscriminator")
        self.size, self.image_channels = size, image_channels
        layers: list[nn.Module] = []
        previous = image_channels
        for i, following in enumerate(channels):
            layers.append(nn.Conv2d(previous, following, 4, stride=2, padding=1, bias=not norm))
            if norm and i > 0:
                layers.append(nn.InstanceNorm2d(following, eps=_EPS, affine=True))
            layers.append(nn.ReLU() if norm else nn.LeakyReLU(SLOPE))
            previous = following
        layers.append(nn.Flatten())
        if norm:
            layers.append(nn.Linear(16 * previous, previous))
            layers += [nn.ReLU()] if size < 128 else []
        layers.append(nn.Linear(previous if norm else 16 * previous, 1))
        self.net = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        """Map images ``(N, image_channels, size, size)`` to logits ``(N,)``."""
        return self.net(check_images(images, self.image_channels, self.size, "SimpleDiscriminator")).flatten()


def _check_channels(channels: Sequence[int], count: int, size: int, caller: str) -> list[int]:
    if len(channels) != count:
        raise ValueError(
            f"{caller}(channels=...) needs {count} numbers for {size} pixels, one for each resolution; got "
            f"{len(channels)}: {tuple(channels)}."
        )
    for c in channels:
        check_count(c, f"{caller}(channels=...)", 1)
    return list(channels)
