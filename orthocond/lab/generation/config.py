"""The configurations of GANs: every row of the paper's tables, at the paper's scale and at that of a laptop."""

from dataclasses import dataclass
from typing import Literal

from orthocond.lab.classification.config import Scale


@dataclass(frozen=True)
class GanData:
    """Which images, and what is done to them.

    Attributes:
        source: Name or path, as of `orthocond.lab.data.load`.
        size: Side of the images, a power of two; smaller ones are enlarged.
        resize: Scale the shorter side to this before the middle of ``size`` pixels is cut out; None takes ``size``.
        flip: Whether to mirror images at random.
        limit: Number of images; None takes all.
        shape: Of sprites, the only shape; None takes all of them.
    """

    source: str = "sprites"
    size: int = 16
    resize: int | None = None
    flip: bool = False
    limit: int | None = None
    shape: Literal["disc", "square", "triangle", "plus"] | None = None


@dataclass(frozen=True)
class GanModel:
    """Which generator and discriminator.

    Attributes:
        name: ``simple`` (the paper's vanilla GAN), ``eigengan``, or ``package.module:function`` of your own, which is
            called with the size of the images and returns a generator and a discriminator. Of your generator the layer
            ``first_projection`` is treated, or the layers ``subspaces``.
        z_dim: Number of latents of ``simple``.
        directions: Of ``eigengan``, latents of each layer.
        noise_dim: Of ``eigengan``, dimension of the noise.
        width: Channels of the generator at full resolution.
        channels: Of ``simple``, channels of the generator from 4 x 4 pixels on instead; empty follows the original.
        max_channels: Of ``eigengan``, their limit.
        blocks: Of ``simple``, how its generator doubles the resolution.
        form: How ``eigengan`` is built and initialized: ``faithful`` as in the authors' code, ``working`` so that it
            draws within minutes.
        discriminator_width: Channels of the discriminator's first convolution.
        discriminator_norm: Of ``simple``, whether its discriminator normalizes.
    """

    name: str = "simple"
    z_dim: int = 30
    directions: int = 6
    noise_dim: int = 512
    width: int = 64
    channels: tuple[int, ...] = ()
    max_channels: int = 512
    blocks: Literal["transposed", "upsample"] = "transposed"
    form: Literal["working", "faithful"] = "working"
    discriminator_width: int = 64
    discriminator_norm: bool = True


@dataclass(frozen=True)
class GanMethod:
    """Which treatment of the weights that meet the latents, or which rival.

    Attributes:
        name: ``none``, or parts joined by ``+``: ``ol`` or ``ow`` for the weight, ``nog`` for the gradient, ``olr`` for
            the step length, and one of the rivals ``hp``, ``orojar``, ``lvp``.
        olr: ``exact`` minimizes the distance to orthogonality over the step, ``newton`` makes one step towards that,
            ``paper`` is the paper's formula.
        olr_gain: The weight should be this multiple of an orthogonal matrix; None takes its present scale, so that
            only its condition counts. Not for the paper's formula.
        nog_of: Whether the ``gradient`` is made orthogonal, as in the paper, or the ``update`` of the optimizer.
        ol_weight: Factor of the orthogonality loss, summed over the layers; EigenGAN's is 0.5.
        ol: ``squared`` is reachable and smooth, ``paper`` the paper's norm.
        rival: ``paper``: HP and OroJaR by differences, the largest of all values, at the convolutions of the generator,
            and LVP as so many binary problems, as the paper compares with them. ``image``: at the image, HP as the
            mean over the pixels, OroJaR relative to the squared norm, so that neither depends on sizes, and LVP with
            its own cross-entropy.
        hp_weight: Factor of the Hessian Penalty.
        orojar_weight: Factor of the Orthogonal Jacobian regularization.
        lvp_weight: Factor of latent variational predictability.
        rival_batch: Latents of a step, over all processes, for which a rival's penalty is computed; None takes all.
    """

    name: str = "none"
    olr: Literal["exact", "newton", "paper"] = "exact"
    olr_gain: float | None = None
    nog_of: Literal["gradient", "update"] = "gradient"
    ol_weight: float = 0.5
    ol: Literal["squared", "paper"] = "squared"
    rival: Literal["paper", "image"] = "image"
    hp_weight: float = 0.03
    orojar_weight: float = 1.0
    lvp_weight: float = 0.03
    rival_batch: int | None = None


@dataclass(frozen=True)
class GanObjective:
    """What the two networks minimize.

    Attributes:
        name: The pair of losses; ``hinge-saturating`` is EigenGAN's.
        discriminator_factor: Of the discriminator's loss without penalty; 0.5 in the authors' vanilla GAN.
        penalty: Of the discriminator's gradient: ``r1`` at real images, ``gp`` and ``gp0`` between real and generated
            ones, with norm 1 and 0 as the aim.
        penalty_weight: Its factor. The literature's γ of R1 is twice this.
        penalty_interval: It is computed at every so many-th step.
        penalty_scaled: Whether it is multiplied by that, so that its weight means the same for all intervals.
        augment: Functions of `orthocond.gans.augmentation` for what the discriminator sees.
        augment_probability: With which each of them is applied.
        augment_each: Whether that is decided for each ``image`` or, as in the authors' EigenGAN, for the ``batch``.
    """

    name: Literal["non-saturating", "hinge", "hinge-saturating", "least-squares", "wasserstein"] = "non-saturating"
    discriminator_factor: float = 1.0
    penalty: Literal["none", "r1", "gp", "gp0"] = "r1"
    penalty_weight: float = 1.0
    penalty_interval: int = 4
    penalty_scaled: bool = True
    augment: tuple[str, ...] = ()
    augment_probability: float = 0.6
    augment_each: Literal["image", "batch"] = "image"


@dataclass(frozen=True)
class GanSchedule:
    """How long, and with which steps of Adam.

    Attributes:
        steps: Steps of each network.
        batch_size: Images of one step, over all processes.
        lr: Learning rate of both.
        betas: Of Adam.
        constant: Part of the steps with this rate; in the rest it falls linearly to 0.
        ema: Decay of the averaged generator, which is shown and measured, in each step; 0 for none.
    """

    steps: int = 1000
    batch_size: int = 32
    lr: float = 1e-3
    betas: tuple[float, float] = (0.0, 0.99)
    constant: float = 1.0
    ema: float = 0.99


@dataclass(frozen=True)
class Generation:
    """The whole configuration of one training of a GAN.

    Attributes:
        preset: Name of the preset it comes from.
        scale: ``paper`` or ``laptop``.
        method: The treatments, or the rival.
        data: The images.
        model: The networks.
        objective: Their losses.
        schedule: Batches, steps of Adam, average.
        seed: Of the initial weights, the latents, order and augmentation of the images.
        precision: ``no`` is float32; ``bf16`` and, on a GPU, ``fp16`` are mixed precision.
        log_every: Steps between lines of metrics.
        save_every: Steps between checkpoints; 0 saves at the end only.
        sample_every: Steps between pictures of the same latents; 0 for none.
        kind: Tells this configuration from those of other experiments in a run's JSON.
    """

    preset: str = "gan-sprites"
    scale: Scale = "laptop"
    method: GanMethod = GanMethod()
    data: GanData = GanData()
    model: GanModel = GanModel()
    objective: GanObjective = GanObjective()
    schedule: GanSchedule = GanSchedule()
    seed: int = 0
    precision: Literal["no", "bf16", "fp16"] = "no"
    log_every: int = 50
    save_every: int = 500
    sample_every: int = 500
    kind: Literal["generation"] = "generation"
