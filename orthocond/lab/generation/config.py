"""The configuration of one training of a GAN."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, model_validator
from pydantic.dataclasses import dataclass

from orthocond.lab.config import (
    STRICT,
    BelowOne,
    Count,
    CountOrZero,
    Fraction,
    NotNegative,
    Positive,
    Precision,
    Scale,
    Seed,
    Text,
)
from orthocond.lab.factories import check_network
from orthocond.lab.grammar import Grammar

NETWORKS = ("simple", "eigengan")
_NetworkName = Annotated[str, AfterValidator(lambda name: check_network(name, NETWORKS, "GAN"))]
GRAMMAR = Grammar(
    parts=("none", "ol", "ow", "stiefel", "nog", "olr", "short", "hp", "orojar", "lvp"),
    names=("none", "ol", "ow", "nog", "olr", "nog+olr", "hp", "orojar", "lvp"),
)


@dataclass(frozen=True, config=STRICT)
class GanData:
    """Which images, and what is done to them.

    Attributes:
        source: Name or path of a data set: `orthocond list data` shows the names.
        size: Side of the images, a power of two; smaller ones are enlarged.
        resize: Scale the shorter side to this before the middle of ``size`` pixels is cut out; None takes ``size``.
        flip: Whether to mirror images at random.
        limit: Number of images; None takes all.
        shape: The only shape, for sprites only; None takes all of them.
    """

    source: Text = "sprites"
    size: Count = 16
    resize: Count | None = None
    flip: bool = False
    limit: Count | None = None
    shape: Literal["disc", "square", "triangle", "plus"] | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.shape is not None and self.source != "sprites":
            raise ValueError(f"data.shape is a setting of sprites; {self.source} has none. Leave it out.")
        if self.resize is not None and self.resize < self.size:
            raise ValueError(f"data.resize needs at least data.size, {self.size}; got {self.resize}.")
        return self


@dataclass(frozen=True, config=STRICT)
class GanModel:
    """Which generator and discriminator.

    Attributes:
        name: ``simple`` (the paper's vanilla GAN), ``eigengan``, or ``package.module:function`` of your own, which is
            called with the size of the images and returns a generator and a discriminator. The layer
            ``first_projection`` of your generator is treated, or the layers ``subspaces``.
        z_dim: Number of latents of ``simple``.
        directions: Latents of each layer of ``eigengan``.
        noise_dim: Dimension of the noise of ``eigengan``.
        width: Channels of the generator at full resolution.
        channels: Channels of the generator of ``simple`` from 4 x 4 pixels on instead; empty follows the original.
        max_channels: Limit of the channels of ``eigengan``.
        blocks: How the generator of ``simple`` doubles the resolution.
        form: How ``eigengan`` is built and initialized: ``faithful`` as in the authors' code and in runs that do not
            tell it, ``working``, as in all presets below the paper's scale, so that it draws within minutes.
        discriminator_width: Channels of the discriminator's first convolution.
        discriminator_norm: Whether the discriminator of ``simple`` normalizes.
        discriminator_max_channels: Limit of the channels of the discriminator of ``eigengan``; None takes
            ``max_channels``.
    """

    name: _NetworkName = "simple"
    z_dim: Count = 30
    directions: Count = 6
    noise_dim: Count = 512
    width: Count = 64
    channels: tuple[Count, ...] = ()
    max_channels: Count = 512
    blocks: Literal["transposed", "upsample"] = "transposed"
    form: Literal["working", "faithful"] = "faithful"
    discriminator_width: Count = 64
    discriminator_norm: bool = True
    discriminator_max_channels: Count | None = None


@dataclass(frozen=True, config=STRICT)
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
        nog_scale: The length of an orthogonal step: None that of `NearestOrthogonal`, or ``spectral`` and ``rms``, the
            fixed ones of Muon.
        short: Occurrence and factor of steps that ``short`` shortens.
        stiefel_scale: Length of a step of ``stiefel`` in learning rates; with Adam's rate alone it would be small.
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

    name: Annotated[str, AfterValidator(GRAMMAR.check)] = "none"
    olr: Literal["exact", "newton", "paper"] = "exact"
    olr_gain: Positive | None = None
    nog_of: Literal["gradient", "update"] = "gradient"
    nog_scale: Literal["spectral", "rms"] | None = None
    short: tuple[Fraction, Fraction] = (0.9, 0.1)
    stiefel_scale: Positive = 30.0
    ol_weight: NotNegative = 0.5
    ol: Literal["squared", "paper"] = "squared"
    rival: Literal["paper", "image"] = "image"
    hp_weight: NotNegative = 0.03
    orojar_weight: NotNegative = 1.0
    lvp_weight: NotNegative = 0.03
    rival_batch: Count | None = None

    @property
    def parts(self) -> dict[str, str | None]:
        """The parts of the name with their scopes."""
        return GRAMMAR.read(self.name)


@dataclass(frozen=True, config=STRICT)
class GanObjective:
    """What the two networks minimize.

    Attributes:
        name: The pair of losses; ``hinge-saturating`` is EigenGAN's.
        discriminator_factor: Factor of the discriminator's loss without penalty; 0.5 in the authors' vanilla GAN.
        penalty: Penalty of the discriminator's gradient: ``r1`` at real images, ``gp`` and ``gp0`` between real and
            generated ones, with norm 1 and 0 as the aim.
        penalty_weight: Its factor. The literature's γ of R1 is twice this.
        penalty_interval: It is computed at every so many-th step.
        penalty_scaled: Whether it is multiplied by that, so that its weight means the same for all intervals.
        augment: Functions of `orthocond.gans.augmentation` for what the discriminator sees.
        augment_probability: With which each of them is applied.
        augment_each: Whether that is decided for each ``image`` or, as in the authors' EigenGAN, for the ``batch``.
    """

    name: Literal["non-saturating", "hinge", "hinge-saturating", "least-squares", "wasserstein"] = "non-saturating"
    discriminator_factor: Positive = 1.0
    penalty: Literal["none", "r1", "gp", "gp0"] = "r1"
    penalty_weight: NotNegative = 1.0
    penalty_interval: Count = 4
    penalty_scaled: bool = True
    augment: tuple[Literal["brightness", "saturation", "contrast", "translation", "cutout"], ...] = ()
    augment_probability: Fraction = 0.6
    augment_each: Literal["image", "batch"] = "image"


@dataclass(frozen=True, config=STRICT)
class GanSchedule:
    """How long, and with which steps.

    Attributes:
        steps: Steps of each network.
        batch_size: Images of one step, over all processes.
        lr: Learning rate of both.
        betas: Adam's betas. The first one is the momentum of SGD.
        constant: Part of the steps with this rate; in the rest it falls linearly, and the other rates with it.
        ema: Decay of the averaged generator, which is shown and measured, in each step; 0 for none.
        end: To which part of itself the rate falls.
        discriminator_lr: Rate of the discriminator; None takes ``lr``.
        subspace_lr: Rate of the weights of EigenGAN's subspaces; None takes ``lr``.
        importance_lr: Rate of the scales of EigenGAN's latents; None takes ``lr``, with which they hardly move.
        optimizer: ``adam``, or ``sgd`` with momentum, which does not tell the axes of the latents from rotated ones;
            it needs larger rates.
    """

    steps: Count = 1000
    batch_size: Count = 32
    lr: Positive = 1e-3
    betas: tuple[BelowOne, BelowOne] = (0.0, 0.99)
    constant: Fraction = 1.0
    ema: BelowOne = 0.99
    end: Fraction = 0.0
    discriminator_lr: Positive | None = None
    subspace_lr: Positive | None = None
    importance_lr: Positive | None = None
    optimizer: Literal["adam", "sgd"] = "adam"


@dataclass(frozen=True, config=STRICT)
class Generation:
    """The whole configuration of one training of a GAN.

    Attributes:
        preset: Name of the preset it comes from.
        scale: ``paper``, ``workstation`` or ``laptop``.
        method: The treatments, or the rival.
        data: The images.
        model: The networks.
        objective: Their losses.
        schedule: Batches, steps, average.
        seed: Seed of the initial weights, the latents, order and augmentation of the images.
        precision: ``no`` is float32; ``bf16`` and, on a GPU, ``fp16`` are mixed precision.
        log_every: Steps between lines of metrics.
        save_every: Steps between checkpoints; 0 saves at the end only.
        sample_every: Steps between pictures of the same latents; 0 for none.
        kind: Tells this configuration from those of other experiments in a run's JSON.
    """

    preset: Text = "gan-sprites"
    scale: Scale = "laptop"
    method: GanMethod = GanMethod()
    data: GanData = GanData()
    model: GanModel = GanModel()
    objective: GanObjective = GanObjective()
    schedule: GanSchedule = GanSchedule()
    seed: Seed = 0
    precision: Precision = "no"
    log_every: Count = 50
    save_every: CountOrZero = 500
    sample_every: CountOrZero = 500
    kind: Literal["generation"] = "generation"

    def describe(self) -> str:
        """The configuration in one line.

        Example:
            >>> Generation().describe()
            'simple, sprites 16 px, 1000 steps of 32'
        """
        images = f"{self.data.source} {self.data.size} px"
        return f"{self.model.name}, {images}, {self.schedule.steps} steps of {self.schedule.batch_size}"

    @model_validator(mode="after")
    def _has_subspaces(self) -> Self:
        for name in ("subspace_lr", "importance_lr"):
            if self.model.name == "simple" and getattr(self.schedule, name) is not None:
                raise ValueError(f"schedule.{name} is a rate of EigenGAN's subspaces; simple has none. Leave it out.")
        return self
