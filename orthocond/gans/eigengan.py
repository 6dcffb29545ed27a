"""EigenGAN: a generator with a linear subspace at every resolution (paper: section 6.2)."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orthocond._checks import check_choice, check_count, check_not_negative
from orthocond.gans._common import SLOPE, check_images, check_latent, check_size, he_initialize, normal
from orthocond.gans.upsample import UpsampleConv2d

FORMS = ("working", "faithful")


class SubspaceLayer(nn.Module):
    r"""A point of a linear subspace: :math:`\phi = (l \circ z)\, U + \mu`.

    The weight is U, one row for each direction, so that `treat`, `orthogonal`, `orthogonality_loss` and `matrix_view`
    act on it as on the weight of any layer.

    Args:
        directions: Dimension of the subspace.
        features: Dimension of the space that it lies in.

    Attributes:
        weight: U ``(directions, features)``; orthonormal rows at the start.
        scale: l ``(directions,)``; 3 · directions, ..., 6, 3 at the start, as in the original. An `EigenBlock` of
            the working form halves it, and starts from a smooth U.
        mean: μ ``(features,)``; zeros at the start.

    Raises:
        ValueError: If there are more directions than features.

    Example:
        >>> layer = SubspaceLayer(3, 8)
        >>> layer(torch.randn(5, 3)).shape
        torch.Size([5, 8])
        >>> layer.importance
        tensor([9.0000, 6.0000, 3.0000])
    """

    def __init__(self, directions: int, features: int) -> None:
        super().__init__()
        check_count(directions, "SubspaceLayer(directions=...)", 1)
        check_count(features, "SubspaceLayer(features=...)", 1)
        if directions > features:
            raise ValueError(
                f"A subspace of {directions} directions needs at least as many dimensions; the layer has {features}. "
                "Use fewer directions or wider layers."
            )
        self.weight = nn.Parameter(nn.init.orthogonal_(torch.empty(directions, features)))
        self.scale = nn.Parameter(3.0 * torch.arange(directions, 0, -1))
        self.mean = nn.Parameter(torch.zeros(features))

    @property
    def importance(self) -> Tensor:
        """How far one unit of each latent moves the features: ``|l_i| · ‖U_i‖``, detached."""
        return (self.scale.abs() * torch.linalg.vector_norm(self.weight, dim=1)).detach()

    def forward(self, z: Tensor) -> Tensor:
        """Map latents ``(N, directions)`` to features ``(N, features)``."""
        return (self.scale * z) @ self.weight + self.mean

    def extra_repr(self) -> str:
        directions, features = self.weight.shape
        return f"directions={directions}, features={features}"


class EigenBlock(nn.Module):
    """Double the resolution, with the point of a subspace added before each of two convolutions.

    Args:
        directions: Dimension of the subspace.
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        resolution: Height and width of the input.
        form: ``"working"`` or ``"faithful"``, as of `EigenGenerator`.
    """

    def __init__(
        self, directions: int, in_channels: int, out_channels: int, resolution: int, *, form: str = "working"
    ) -> None:
        super().__init__()
        check_choice(form, "EigenBlock(form=...)", FORMS)
        self.shape = (in_channels, resolution, resolution)
        self.subspace = SubspaceLayer(directions, in_channels * resolution**2)
        faithful = form == "faithful"
        same, double = (nn.ConvTranspose2d, _double) if faithful else (nn.Conv2d, _upsample)
        self.subspace_conv1 = same(in_channels, in_channels, 1)
        self.subspace_conv2 = double(in_channels, out_channels)
        self.feature_conv1 = nn.Sequential(nn.LeakyReLU(SLOPE), double(in_channels, out_channels))
        self.feature_conv2 = nn.Sequential(nn.LeakyReLU(SLOPE), same(out_channels, out_channels, 3, padding=1))
        if not faithful:
            he_initialize(self)
            with torch.no_grad():
                self.subspace.weight.copy_(_smooth_basis(directions, self.shape))
                self.subspace.scale.mul_(0.5)

    def forward(self, h: Tensor, z: Tensor) -> Tensor:
        """Map features ``(N, in, r, r)`` and latents ``(N, directions)`` to features ``(N, out, 2r, 2r)``."""
        phi = self.subspace(z).unflatten(1, self.shape)
        h = self.feature_conv1(h + self.subspace_conv1(phi))
        return self.feature_conv2(h + self.subspace_conv2(phi))


def _double(in_channels: int, out_channels: int) -> nn.Module:
    return nn.ConvTranspose2d(in_channels, out_channels, 3, stride=2, padding=1, output_padding=1)


def _upsample(in_channels: int, out_channels: int) -> nn.Module:
    return nn.Sequential(nn.Identity(), UpsampleConv2d(in_channels, out_channels))  # names of weights as they were


def _smooth_basis(directions: int, shape: tuple[int, int, int]) -> Tensor:
    """Orthonormal rows, each of them 4 x 4 noise enlarged to the shape ``(C, r, r)``."""
    channels, resolution, _ = shape
    noise = torch.randn(directions, channels, 4, 4)
    smooth = F.interpolate(noise, size=(resolution, resolution), mode="bilinear", align_corners=False)
    basis: Tensor = torch.linalg.qr(smooth.flatten(1).mT).Q.mT
    return basis


class EigenGenerator(nn.Module):
    r"""The generator of EigenGAN: noise grows into an image, and each block adds a point of its own subspace.

    The latents z are the coordinates in these subspaces, layer after layer, from coarse to fine; the noise ε explains
    what is left. At block i, which doubles the resolution r, with C channels :math:`\min(max, base \cdot 2^{n-i})`,

    .. math::

        \phi_i = (l_i \circ z_i)\, U_i + \mu_i, \quad
        h \leftarrow f_{i1}(h + s_{i1}(\phi_i)), \quad h \leftarrow f_{i2}(h + s_{i2}(\phi_i)),

    with convolutions f after a leaky ReLU and s without. There is no normalization.

    The model has two forms. The faithful one is that of the paper's code: transposed 3x3 convolutions of stride 2,
    torch's initial weights, random orthogonal :math:`U_i`, and :math:`l_i` = 3 · directions, ..., 6, 3. It needs
    hundreds of thousands of steps: the initial logits of its discriminator have a standard deviation of 5e-5, and its
    transposed convolutions leave checkerboards. The working form draws faces within minutes at 32 pixels:
    nearest-neighbor upsampling before 3x3 convolutions, He's initial weights with zero biases (the TensorFlow original
    has them too; the last convolution has a quarter of them, so that few pixels begin saturated), smooth :math:`U_i`
    (orthonormalized 4 x 4 noise, enlarged), and half of the faithful :math:`l_i`.

    Give the importances :math:`l_i` their own learning rate (see `parameter_groups`). Adam moves a number by about
    its rate per step, so at 1e-3 they end where they began.

    Each call draws new noise from torch's random state, unless it is given: pass ``noise`` or ``rng``,
    or call `same_noise` where several latents need the same one.

    Args:
        size: Height and width of the images, a power of two of at least 8; there are log2(size) - 2 blocks.
        directions: Dimension of each subspace.
        noise_dim: Dimension of ε. With few images or steps choose it small, 16 to 64; otherwise ε explains everything.
        base_channels: Channels at full resolution.
        max_channels: Limit of the channels.
        image_channels: Channels of the images.
        form: ``"working"`` or ``"faithful"``.

    Attributes:
        blocks: The `EigenBlock`\ s.
        subspaces: Their `SubspaceLayer`\ s, whose weights the treatments act on.
        layers: Number of blocks.
        directions: Dimension of each subspace.
        z_dim: Number of latents, ``layers * directions``.
        noise_dim: Dimension of the noise.

    Raises:
        ValueError: If the size is not a power of two, the form is unknown, or there are more directions than
            dimensions.

    Example:
        >>> from orthocond.gans import EigenGenerator
        >>> g = EigenGenerator(size=32, directions=4, noise_dim=16, base_channels=8)
        >>> g(torch.randn(2, g.z_dim)).shape
        torch.Size([2, 3, 32, 32])
        >>> [tuple(s.weight.shape) for s in g.subspaces]
        [(4, 1024), (4, 2048), (4, 4096)]
        >>> g.importance.shape
        torch.Size([3, 4])

    References:
        He, Kan, Shan: *EigenGAN* (2021). Song, Sebe, Wang (2022), section 6.2.
    """

    def __init__(
        self,
        size: int = 128,
        directions: int = 6,
        noise_dim: int = 512,
        base_channels: int = 16,
        max_channels: int = 512,
        *,
        image_channels: int = 3,
        form: str = "working",
    ) -> None:
        super().__init__()
        check_choice(form, "EigenGenerator(form=...)", FORMS)
        self.layers = check_size(size, "EigenGenerator")
        self.size, self.directions, self.noise_dim = size, directions, noise_dim
        self.z_dim = self.layers * directions
        counts = {"directions": directions, "noise_dim": noise_dim, "base_channels": base_channels}
        counts |= {"max_channels": max_channels, "image_channels": image_channels}
        for name, count in counts.items():
            check_count(count, f"EigenGenerator({name}=...)", 1)
        channels = [min(max_channels, base_channels * 2 ** (self.layers - i)) for i in range(self.layers + 1)]
        self.fc = nn.Linear(noise_dim, 16 * channels[0])
        self.blocks = nn.ModuleList(
            EigenBlock(directions, channels[i], channels[i + 1], 4 * 2**i, form=form) for i in range(self.layers)
        )
        self.to_rgb = nn.Sequential(
            nn.LeakyReLU(SLOPE), nn.Conv2d(channels[-1], image_channels, 7, padding=3), nn.Tanh()
        )
        if form == "working":
            he_initialize(self.fc)
            he_initialize(self.to_rgb, last=0.25)  # else a fifth of the pixels begin saturated

    @property
    def subspaces(self) -> list[SubspaceLayer]:
        """The subspace of each block, from coarse to fine."""
        return [block.subspace for block in self.blocks]  # type: ignore[misc]

    @property
    def importance(self) -> Tensor:
        """Importance ``(layers, directions)`` of each direction, ``|l| · ‖U‖``; flatten it to match the latents."""
        return torch.stack([subspace.importance for subspace in self.subspaces])

    def sample_noise(self, count: int, *, rng: torch.Generator | None = None) -> Tensor:
        """Draw noise ``(count, noise_dim)`` on the device of the model."""
        return normal((count, self.noise_dim), self.fc.weight, rng)

    def forward(self, z: Tensor, noise: Tensor | None = None, *, rng: torch.Generator | None = None) -> Tensor:
        """Draw images.

        Args:
            z: Latents ``(N, z_dim)``, layer after layer, or ``(N, layers, directions)``.
            noise: ``(N, noise_dim)``, or ``(noise_dim,)`` or ``(1, noise_dim)`` for all images; drawn if None.
            rng: Draws the noise instead of torch's random state.

        Returns:
            Images ``(N, image_channels, size, size)`` in [-1, 1].

        Raises:
            TypeError: If an argument is not a floating-point tensor.
            ValueError: If shapes do not match, or both ``noise`` and ``rng`` are given.
        """
        if isinstance(z, Tensor) and z.ndim == 3 and tuple(z.shape[1:]) == (self.layers, self.directions):
            z = z.flatten(1)
        z = check_latent(z, self.z_dim, "EigenGenerator")
        if noise is None:
            noise = self.sample_noise(len(z), rng=rng)
        elif rng is not None:
            raise ValueError("EigenGenerator needs noise, or rng= to draw it with; got both.")
        elif (
            noise.shape[-1:] != (self.noise_dim,)
            or noise.ndim > 2
            or (noise.ndim == 2 and len(noise) not in (1, len(z)))
        ):
            raise ValueError(
                f"EigenGenerator needs noise ({len(z)}, {self.noise_dim}), or ({self.noise_dim},) for all images; got "
                f"shape {tuple(noise.shape)}."
            )
        h = self.fc(noise.expand(len(z), self.noise_dim)).unflatten(1, (-1, 4, 4))
        for block, coordinates in zip(self.blocks, z.split(self.directions, dim=1), strict=True):
            h = block(h, coordinates)
        return self.to_rgb(h)


class EigenDiscriminator(nn.Module):
    """The discriminator of EigenGAN: convolutions and leaky ReLUs, no normalization.

    A 7x7 convolution; log2(size) - 2 times a 3x3 convolution and one of stride 2 that doubles the channels; one more;
    two linear layers on the 4 x 4 features.

    The faithful form has torch's initial weights, as the paper's code. Its initial logits have a standard deviation of
    5e-5 at 32 pixels and 1e-6 at 128, and `r1` is 1e-8 and 1e-11: a discriminator that may stay dead, with a loss of 2
    ln 2. The working form has He's, as the TensorFlow original, with the last weight halved: the standard deviation is
    about 0.1 and `r1` about 0.2, at every size.

    Args:
        size: Height and width of the images, a power of two of at least 8.
        base_channels: Channels at full resolution.
        max_channels: Limit of the channels.
        image_channels: Channels of the images.
        form: ``"working"`` or ``"faithful"``.

    Raises:
        ValueError: If the size is not a power of two, the form is unknown, or images have another shape.

    Example:
        >>> from orthocond.gans import EigenDiscriminator
        >>> EigenDiscriminator(size=32)(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2])
    """

    def __init__(
        self,
        size: int = 128,
        base_channels: int = 16,
        max_channels: int = 512,
        *,
        image_channels: int = 3,
        form: str = "working",
    ) -> None:
        super().__init__()
        check_choice(form, "EigenDiscriminator(form=...)", FORMS)
        blocks = check_size(size, "EigenDiscriminator")
        counts = {"base_channels": base_channels, "max_channels": max_channels, "image_channels": image_channels}
        for name, count in counts.items():
            check_count(count, f"EigenDiscriminator({name}=...)", 1)
        self.size, self.image_channels = size, image_channels
        channels = min(max_channels, base_channels)
        layers: list[nn.Module] = [nn.Conv2d(image_channels, channels, 7, padding=3), nn.LeakyReLU(SLOPE)]
        for _ in range(blocks):
            wider = min(max_channels, 2 * channels)
            layers += [nn.Conv2d(channels, channels, 3, padding=1), nn.LeakyReLU(SLOPE)]
            layers += [nn.Conv2d(channels, wider, 3, stride=2, padding=1), nn.LeakyReLU(SLOPE)]
            channels = wider
        layers += [nn.Conv2d(channels, channels, 3, padding=1), nn.LeakyReLU(SLOPE), nn.Flatten()]
        layers += [nn.Linear(16 * channels, channels), nn.LeakyReLU(SLOPE), nn.Linear(channels, 1)]
        self.net = nn.Sequential(*layers)
        if form == "working":
            he_initialize(self.net, last=0.5)

    def forward(self, images: Tensor) -> Tensor:
        """Map images ``(N, image_channels, size, size)`` to logits ``(N,)``."""
        return self.net(check_images(images, self.image_channels, self.size, "EigenDiscriminator")).flatten()


def parameter_groups(
    generator: nn.Module, lr: float, *, subspace_lr: float | None = None, importance_lr: float | None = None
) -> list[dict[str, Any]]:
    """Groups of a generator's parameters with separate learning rates, for any torch optimizer.

    Args:
        generator: An `EigenGenerator`, or any module with layers ``subspaces`` like `SubspaceLayer`. Their weights may
            be parametrized.
        lr: Rate of all other parameters, the means of the subspaces among them.
        subspace_lr: Rate of the weights U; None takes ``lr``.
        importance_lr: Rate of the scales l; None takes ``lr``. With Adam 30 times ``lr`` lets them move: 0.03.

    Returns:
        Three groups, ``"name"`` ``"rest"``, ``"subspaces"`` and ``"importances"``, each with its ``"lr"``, and with
        ``"initial_lr"`` for schedules. The discriminator has an optimizer, and so a rate, of its own.

    Raises:
        ValueError: If the generator has no subspaces, or a rate is negative.

    Example:
        >>> from orthocond.gans import EigenGenerator, parameter_groups
        >>> g = EigenGenerator(size=16, directions=2, noise_dim=4, base_channels=4)
        >>> optimizer = torch.optim.Adam(parameter_groups(g, 1e-3, importance_lr=0.03), betas=(0.0, 0.99))
        >>> [(group["name"], len(group["params"]), group["lr"]) for group in optimizer.param_groups]
        [('rest', 22, 0.001), ('subspaces', 2, 0.001), ('importances', 2, 0.03)]
    """
    layers = list(getattr(generator, "subspaces", []))
    if not layers:
        raise ValueError(
            f"parameter_groups needs a generator with subspaces; {type(generator).__name__} has none. Pass its "
            "parameters to the optimizer directly."
        )
    for name, rate in {"lr": lr, "subspace_lr": subspace_lr, "importance_lr": importance_lr}.items():
        if rate is not None:
            check_not_negative(rate, f"parameter_groups({name}=...)")
    importances = [layer.scale for layer in layers]
    means = [layer.mean for layer in layers]
    others = _ids(importances) | _ids(means)
    subspaces = [p for layer in layers for p in layer.parameters() if id(p) not in others]
    others = _ids(importances) | _ids(subspaces)
    rest = [p for p in generator.parameters() if id(p) not in others]
    found = (("rest", rest, lr), ("subspaces", subspaces, subspace_lr), ("importances", importances, importance_lr))
    groups: list[dict[str, Any]] = []
    for name, parameters, rate in found:
        rate = lr if rate is None else rate
        groups.append({"name": name, "params": parameters, "lr": rate, "initial_lr": rate})
    return groups


def _ids(parameters: list[Any]) -> set[int]:
    return {id(p) for p in parameters}
