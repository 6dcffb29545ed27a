"""The configuration of one training of a classifier."""

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
from orthocond.lab.factories import check_network, is_factory
from orthocond.lab.grammar import Grammar

SolverName = Literal[
    "eigh",
    "ns",
    "ns7",
    "ns20",
    "pade",
    "taylor",
    "svd-plain",
    "svd-truncated",
    "svd-top",
    "svd-taylor",
    "svd-pade",
    "released-plain",
    "released-truncated",
    "released-top",
    "released-taylor",
    "released-pade",
]
BACKBONES = ("resnet18", "resnet50", "densenet121", "mobilenetv2", "convnet")
_NetworkName = Annotated[str, AfterValidator(lambda name: check_network(name, BACKBONES, "network"))]
_LAYERS = {"dbn": "decorrelated BN", "gcp": "covariance pooling"}
GRAMMAR = Grammar(
    parts=("bn", "svd", "ns", "sn", "ol", "ow", "wi", "mow", "stiefel", "nog", "olr", "short"),
    names=(
        *("bn", "svd", "ns", "sn", "ol", "ow", "nog", "olr"),
        *("nog+sn", "nog+ol", "nog+ow", "nog+olr", "ow+olr", "nog+ow+olr"),
        *("wi", "mow"),
    ),
)


@dataclass(frozen=True, config=STRICT)
class Data:
    """Which images, and what is done to them.

    Attributes:
        source: Name or path of a data set: `orthocond list data` shows the names.
        size: Side of the images that the network gets; None leaves them as they are.
        resize: Bring the shorter side to this before the crop.
        crop_padding: Zeros around an image before a random crop; None finds a sensible value.
        flip: Whether to mirror training images at random.
        limit: Number of training images; None takes all.
        noise: Standard deviation of noise on the pixels, for sprites only.
        in_memory: Side to which images are scaled once, when they are loaded.
        held_out: Number of held-out images; None takes all.
        validation: Number of training images that are kept out of training and take the place of the held-out ones.
            Settings are chosen on them, so that the held-out images are read once.
        padding: What surrounds an image before a random crop: ``zeros``, or its own ``reflection``.
    """

    source: Text = "sprites"
    size: Count | None = None
    resize: Count | None = None
    crop_padding: CountOrZero | None = None
    flip: bool = True
    limit: Count | None = None
    noise: NotNegative = 0.0
    in_memory: Count | None = None
    held_out: Count | None = None
    validation: CountOrZero = 0
    padding: Literal["zeros", "reflection"] = "zeros"

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.noise and self.source != "sprites":
            raise ValueError(f"data.noise is a setting of sprites; {self.source} has none. Leave it at 0.")
        return self


@dataclass(frozen=True, config=STRICT)
class Model:
    """Which network, and where its SVD layer is.

    Attributes:
        name: ``resnet18``, ``resnet50``, ``densenet121``, ``mobilenetv2``, ``convnet`` (a small plain network that
            learns CIFAR-10 in minutes), or ``package.module:function`` of your own, which is called with the number of
            classes.
        application: ``dbn``: the norm after the first convolution decorrelates. ``gcp``: covariances are pooled.
        stem: ``cifar``: 3x3 of stride 1. ``imagenet``: 7x7 of stride 2 and max-pooling.
        depths: Blocks of each stage; empty for the network's own.
        width: Width of the first stage (ResNet, convnet), growth (DenseNet), features (MobileNet); None for the
            network's own.
        reduction: Channels whose covariance is pooled.
        last_stride: Stride of the last stage of a ResNet.
        eps: Ridge of decorrelated batch normalization; 1e-2 is that of the authors' release. Covariances are pooled
            without one.
        meta_layer: Name of the SVD layer in your own network, or of the batch normalization to replace by one; None
            finds the only SVD layer.
        pre_svd: Name of the layer before it in your own network; None finds it by the flow of data.
        momentum: Weight of a new batch in the running statistics of all normalization layers.
        whiten_all: Largest number of channels of a group if all batch normalizations decorrelate, in groups, and not
            only the one after the first convolution; None for that one alone.
        follow: Whether the running statistics of decorrelated batch normalization follow the weight before it
            (`DecorrelatedBatchNorm2d.follow`). It changes evaluation, not training.
        synchronize: Whether plain batch normalizations see the images of all processes, so that the number of processes
            changes nothing but the rounding. Without this they see those of their own process, and nobody waits for the
            others in each of them. Decorrelated ones, which need more images than channels, always see all.
    """

    name: _NetworkName = "resnet50"
    application: Literal["dbn", "gcp"] = "dbn"
    stem: Literal["cifar", "imagenet"] = "cifar"
    depths: tuple[Count, ...] = ()
    width: Count | None = None
    reduction: Count = 256
    last_stride: Literal[1, 2] = 2
    eps: NotNegative = 1e-2
    meta_layer: str | None = None
    pre_svd: str | None = None
    momentum: Fraction = 0.1
    whiten_all: Count | None = None
    follow: bool = False
    synchronize: bool = True

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.application == "gcp" and not self.name.startswith("resnet") and not is_factory(self.name):
            raise ValueError(f"Covariance pooling is built into the ResNets; {self.name} has none.")
        if self.follow and self.application == "gcp":
            raise ValueError("model.follow is a setting of dbn; covariance pooling keeps no running statistics.")
        for setting in ("meta_layer", "pre_svd"):
            if getattr(self, setting) is not None and not is_factory(self.name):
                raise ValueError(
                    f"model.{setting} names a layer of your own network, package.module:function; {self.name} has its "
                    "SVD layer and the layer before it in known places. Leave it out."
                )
        return self


@dataclass(frozen=True, config=STRICT)
class Method:
    """Which treatments.

    Attributes:
        name: ``bn``, ``svd``, ``ns``, or treatments of the SVD layer's neighbor joined by ``+``: one of ``sn``,
            ``ol``, ``ow``, ``wi``, ``mow`` for the weight, ``nog`` for the gradient, ``olr`` for the step length.
            ``nog@all`` and ``olr@all`` act on all convolutions and linear layers, ``@inner`` on all convolutions but
            the first. ``stiefel`` takes orthogonal steps with an orthogonal weight, ``short`` shortens steps at random.
        olr: ``exact`` minimizes the distance to orthogonality over the step, ``newton`` makes one step towards that,
            ``paper`` is the paper's formula.
        ow: ``stiefel``: the matrix of the weight is orthogonal. ``skewconv``: the convolution is, as in the authors'
            release.
        solver: How roots are computed: ``eigh`` with the exact gradient, Newton-Schulz with 5, 7 or 20 steps, or the
            literature's gradients, ``svd-…`` with none between equal eigenvalues, ``released-…`` with what the releases
            have there.
        ol_weight: Factor of the orthogonality loss.
        ol: ``squared`` is reachable and smooth, ``paper`` the paper's norm.
        nog_of: Whether the ``gradient`` is made orthogonal, as in the paper, or the ``update`` of the optimizer.
        nog_scale: The length of an orthogonal step: None that of `NearestOrthogonal`, or ``spectral`` and ``rms``, the
            fixed ones of Muon.
        short: Occurrence and factor of steps that ``short`` shortens.
        stiefel_scale: Length of a step of ``stiefel`` in learning rates.
        stem_lr: Factor of the learning rate of the Pre-SVD layer.
        scope_lr: Factor of the learning rate of the layers that ``@all`` or ``@inner`` names.
    """

    name: Annotated[str, AfterValidator(GRAMMAR.check)] = "svd"
    olr: Literal["exact", "newton", "paper"] = "exact"
    ow: Literal["stiefel", "skewconv"] = "stiefel"
    solver: SolverName = "eigh"
    ol_weight: NotNegative = 1e-2
    ol: Literal["squared", "paper"] = "squared"
    nog_of: Literal["gradient", "update"] = "gradient"
    nog_scale: Literal["spectral", "rms"] | None = None
    short: tuple[Fraction, Fraction] = (0.9, 0.1)
    stiefel_scale: Positive = 1.0
    stem_lr: NotNegative = 1.0
    scope_lr: NotNegative = 1.0

    @property
    def parts(self) -> dict[str, str | None]:
        """The parts of the name with their scopes."""
        return GRAMMAR.read(self.name)


@dataclass(frozen=True, config=STRICT)
class Schedule:
    """How long, and with which steps of SGD.

    Attributes:
        epochs: Passes through the training images.
        batch_size: Images of one step, over all processes.
        lr: Learning rate at the start.
        momentum: Momentum of SGD.
        weight_decay: Weight decay of all parameters but the raw parameter of an orthogonal weight: there it would not
            shrink the weight, but turn it back to where it started.
        milestones: Epochs after which the rate is multiplied by ``gamma``.
        gamma: See ``milestones``.
        steps: Stop after so many steps, if that is sooner.
        fall: ``steps`` multiplies the rate at the milestones, ``linear`` and ``cosine`` let it fall to 0 at the end.
        warmup: Part of the training in which the rate rises from a fifth of ``lr`` to all of it.
        nesterov: Whether the momentum is Nesterov's.
        label_smoothing: Part of each label that is spread over all classes.
    """

    epochs: Count = 350
    batch_size: Count = 128
    lr: Positive = 0.1
    momentum: BelowOne = 0.9
    weight_decay: NotNegative = 5e-4
    milestones: tuple[Count, ...] = (100, 200, 300)
    gamma: Positive = 0.1
    steps: Count | None = None
    fall: Literal["steps", "linear", "cosine"] = "steps"
    warmup: BelowOne = 0.0
    nesterov: bool = False
    label_smoothing: Fraction = 0.0

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.nesterov and not self.momentum:
            raise ValueError("schedule.nesterov needs a momentum above 0; got schedule.momentum 0.")
        return self


@dataclass(frozen=True, config=STRICT)
class Classification:
    """The whole configuration of one training of a classifier.

    Attributes:
        preset: Name of the preset it comes from.
        scale: ``paper``, ``workstation`` or ``laptop``.
        method: The treatments.
        data: The images.
        model: The network.
        schedule: Epochs, batches, steps of SGD.
        seed: Seed of the initial weights, of order and augmentation of the images.
        precision: ``no`` is float32; ``bf16`` and, on a GPU, ``fp16`` are mixed precision.
        log_every: Steps between lines of metrics.
        save_every: Steps between checkpoints; 0 saves after each epoch only.
        kind: Tells this configuration from those of other experiments in a run's JSON.
    """

    preset: Text = "dbn-sprites-small"
    scale: Scale = "laptop"
    method: Method = Method()
    data: Data = Data()
    model: Model = Model()
    schedule: Schedule = Schedule()
    seed: Seed = 0
    precision: Precision = "no"
    log_every: Count = 50
    save_every: CountOrZero = 0
    kind: Literal["classification"] = "classification"

    def describe(self) -> str:
        """The configuration in one line.

        Example:
            >>> Classification(data=Data("cifar100", size=32)).describe()
            'resnet50, decorrelated BN, cifar100 32 px, 350 epochs of 128'
        """
        model, schedule = self.model, self.schedule
        network = f"{'small ' if model.depths else ''}{model.name}"
        images = f"{self.data.source} {self.data.size} px"
        return f"{network}, {_LAYERS[model.application]}, {images}, {schedule.epochs} epochs of {schedule.batch_size}"
