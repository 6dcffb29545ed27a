"""The configurations of classifiers: every row of the paper's tables, at the scales paper, workstation and laptop."""

from dataclasses import dataclass
from typing import Literal

Scale = Literal["paper", "workstation", "laptop"]
SolverName = Literal[
    "eigh", "ns", "ns7", "ns20", "pade", "taylor", "svd-plain", "svd-truncated", "svd-top", "svd-taylor", "svd-pade"
]


@dataclass(frozen=True)
class Data:
    """Which images, and what is done to them.

    Attributes:
        source: Name or path, as of `orthocond.lab.data.load`.
        size: Side of the images that the network gets; None leaves them as they are.
        resize: Bring the shorter side to this before the crop.
        crop_padding: Zeros around an image before a random crop; None finds a sensible value.
        flip: Whether to mirror training images at random.
        limit: Number of training images; None takes all.
        noise: Of sprites, the standard deviation of noise on the pixels.
        in_memory: Side to which images are scaled once, when they are loaded.
        held_out: Number of held-out images; None takes all.
        validation: Number of training images that are kept out of training and take the place of the held-out ones.
            Settings are chosen on them, so that the held-out images are read once.
        padding: What surrounds an image before a random crop: ``zeros``, or its own ``reflection``.
    """

    source: str = "sprites"
    size: int | None = None
    resize: int | None = None
    crop_padding: int | None = None
    flip: bool = True
    limit: int | None = None
    noise: float = 0.0
    in_memory: int | None = None
    held_out: int | None = None
    validation: int = 0
    padding: Literal["zeros", "reflection"] = "zeros"


@dataclass(frozen=True)
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
        meta_layer: Of your own network, the name of its SVD layer, or of the batch normalization to replace by one;
            None finds the only SVD layer.
        pre_svd: Name of the layer before it; None finds it by the flow of data.
        momentum: Weight of a new batch in the running statistics of all normalization layers.
        whiten_all: Largest number of channels of a group if all batch normalizations decorrelate, in groups, and not
            only the one after the first convolution; None for that one alone.
    """

    name: str = "resnet50"
    application: Literal["dbn", "gcp"] = "dbn"
    stem: Literal["cifar", "imagenet"] = "cifar"
    depths: tuple[int, ...] = ()
    width: int | None = None
    reduction: int = 256
    last_stride: int = 2
    eps: float = 1e-2
    meta_layer: str | None = None
    pre_svd: str | None = None
    momentum: float = 0.1
    whiten_all: int | None = None


@dataclass(frozen=True)
class Method:
    """Which treatments.

    Attributes:
        name: ``bn``, ``svd``, ``ns``, or treatments of the SVD layer's neighbor joined by ``+``: one of ``sn``,
            ``ol``, ``ow``, ``wi``, ``mow`` for the weight, ``nog`` for the gradient, ``olr`` for the step length.
        olr: ``exact`` minimizes the distance to orthogonality over the step, ``newton`` makes one step towards that,
            ``paper`` is the paper's formula.
        ow: ``stiefel``: the matrix of the weight is orthogonal. ``skewconv``: the convolution is, as in the authors'
            release.
        solver: How roots are computed: ``eigh`` with the exact gradient, Newton-Schulz, or the literature's.
        ol_weight: Factor of the orthogonality loss.
        ol: ``squared`` is reachable and smooth, ``paper`` the paper's norm.
        nog_of: Whether the ``gradient`` is made orthogonal, as in the paper, or the ``update`` of the optimizer.
        stem_lr: Factor of the learning rate of the Pre-SVD layer.
    """

    name: str = "svd"
    olr: Literal["exact", "newton", "paper"] = "exact"
    ow: Literal["stiefel", "skewconv"] = "stiefel"
    solver: SolverName = "eigh"
    ol_weight: float = 1e-2
    ol: Literal["squared", "paper"] = "squared"
    nog_of: Literal["gradient", "update"] = "gradient"
    stem_lr: float = 1.0


@dataclass(frozen=True)
class Schedule:
    """How long, and with which steps of SGD.

    Attributes:
        epochs: Passes through the training images.
        batch_size: Images of one step, over all processes.
        lr: Learning rate at the start.
        momentum: Of SGD.
        weight_decay: Of all parameters, but the raw parameter of an orthogonal weight: there it would not shrink the
            weight, but turn it back to where it started.
        milestones: Epochs after which the rate is multiplied by ``gamma``.
        gamma: See ``milestones``.
        steps: Stop after so many steps, if that is sooner.
        fall: ``steps`` multiplies the rate at the milestones, ``linear`` and ``cosine`` let it fall to 0 at the end.
        warmup: Part of the training in which the rate rises from a fifth of ``lr`` to all of it.
        nesterov: Whether the momentum is Nesterov's.
        label_smoothing: Part of each label that is spread over all classes.
    """

    epochs: int = 350
    batch_size: int = 128
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    milestones: tuple[int, ...] = (100, 200, 300)
    gamma: float = 0.1
    steps: int | None = None
    fall: Literal["steps", "linear", "cosine"] = "steps"
    warmup: float = 0.0
    nesterov: bool = False
    label_smoothing: float = 0.0


@dataclass(frozen=True)
class Classification:
    """The whole configuration of one training of a classifier.

    Attributes:
        preset: Name of the preset it comes from.
        scale: ``paper``, ``workstation`` or ``laptop``.
        method: The treatments.
        data: The images.
        model: The network.
        schedule: Epochs, batches, steps of SGD.
        seed: Of the initial weights, of order and augmentation of the images.
        precision: ``no`` is float32; ``bf16`` and, on a GPU, ``fp16`` are mixed precision.
        log_every: Steps between lines of metrics.
        save_every: Steps between checkpoints; 0 saves after each epoch only.
        kind: Tells this configuration from those of other experiments in a run's JSON.
    """

    preset: str = "dbn-sprites-small"
    scale: Scale = "laptop"
    method: Method = Method()
    data: Data = Data()
    model: Model = Model()
    schedule: Schedule = Schedule()
    seed: int = 0
    precision: Literal["no", "bf16", "fp16"] = "no"
    log_every: int = 50
    save_every: int = 0
    kind: Literal["classification"] = "classification"
