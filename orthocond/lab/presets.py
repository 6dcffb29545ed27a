"""The configurations of classifiers: every row of the paper's tables, at the paper's scale and at that of a laptop."""

from dataclasses import dataclass, replace
from typing import Literal

from orthocond.lab.data.options import nearest

Scale = Literal["paper", "laptop"]
SolverName = Literal["eigh", "ns", "pade", "taylor", "svd-plain", "svd-truncated", "svd-top", "svd-taylor", "svd-pade"]


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


@dataclass(frozen=True)
class Model:
    """Which network, and where its SVD layer is.

    Attributes:
        name: ``resnet18``, ``resnet50``, ``densenet121``, ``mobilenetv2``, or ``package.module:function`` of your own,
            which is called with the number of classes.
        application: ``dbn``: the norm after the first convolution decorrelates. ``gcp``: covariances are pooled.
        stem: ``cifar``: 3x3 of stride 1. ``imagenet``: 7x7 of stride 2 and max-pooling.
        depths: Blocks of each stage; empty for the network's own.
        width: Width of the first stage (ResNet), growth (DenseNet), features (MobileNet); None for the network's own.
        reduction: Channels whose covariance is pooled.
        last_stride: Stride of the last stage of a ResNet.
        eps: Ridge of decorrelated batch normalization; 1e-2 is that of the authors' release. Covariances are pooled
            without one.
        meta_layer: Of your own network, the name of its SVD layer, or of the batch normalization to replace by one;
            None finds the only SVD layer.
        pre_svd: Name of the layer before it; None finds it by the flow of data.
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
    """

    name: str = "svd"
    olr: Literal["exact", "newton", "paper"] = "exact"
    ow: Literal["stiefel", "skewconv"] = "stiefel"
    solver: SolverName = "eigh"
    ol_weight: float = 1e-2
    ol: Literal["squared", "paper"] = "squared"
    nog_of: Literal["gradient", "update"] = "gradient"


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
    """

    epochs: int = 350
    batch_size: int = 128
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    milestones: tuple[int, ...] = (100, 200, 300)
    gamma: float = 0.1
    steps: int | None = None


@dataclass(frozen=True)
class Classification:
    """The whole configuration of one training of a classifier.

    Attributes:
        preset: Name of the preset it comes from.
        scale: ``paper`` or ``laptop``.
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


_CIFAR = Data(size=32, crop_padding=4)
# Pixels are averaged 2x2, which makes everything four times as fast; the stem keeps its 64 channels and 27 inputs.
_CIFAR_SMALL = Data(size=16, in_memory=16, crop_padding=2)
_CIFAR_SCHEDULE = Schedule()
_CIFAR_SHORT = Schedule(epochs=3, batch_size=64, milestones=(2,))


def _dbn(name: str, source: str, paper: Model, laptop: Model) -> dict[Scale, Classification]:
    return {
        "paper": Classification(
            name, "paper", data=replace(_CIFAR, source=source), model=paper, schedule=_CIFAR_SCHEDULE
        ),
        "laptop": Classification(
            name, "laptop", data=replace(_CIFAR_SMALL, source=source), model=laptop, schedule=_CIFAR_SHORT, log_every=20
        ),
    }


_RESNET = Model("resnet50"), Model("resnet50", depths=(1, 1, 1), width=16)
_DENSENET = Model("densenet121"), Model("densenet121", depths=(2, 2, 2), width=16)
_MOBILENET = Model("mobilenetv2"), Model("mobilenetv2", depths=(1, 1, 1, 1), width=256)
_SPRITES = Classification(
    "dbn-sprites-small",
    data=Data("sprites", size=24, crop_padding=0, flip=False, limit=3600, noise=0.05, held_out=1000),
    model=Model("resnet18", depths=(1, 1), width=16),
    schedule=Schedule(epochs=4, batch_size=32, milestones=(2, 3)),
    log_every=5,
)
_GCP = Classification(
    "gcp-imagenet-resnet18",
    "paper",
    data=Data("imagenet", size=224, resize=256, crop_padding=0),
    model=Model("resnet18", "gcp", "imagenet"),
    schedule=Schedule(60, 256, weight_decay=1e-4, milestones=(30, 45)),
)

_PRESETS: dict[str, dict[Scale, Classification]] = {
    "dbn-cifar10-resnet50": _dbn("dbn-cifar10-resnet50", "cifar10", *_RESNET),
    "dbn-cifar100-resnet50": _dbn("dbn-cifar100-resnet50", "cifar100", *_RESNET),
    "dbn-cifar100-densenet121": _dbn("dbn-cifar100-densenet121", "cifar100", *_DENSENET),
    "dbn-cifar100-mobilenetv2": _dbn("dbn-cifar100-mobilenetv2", "cifar100", *_MOBILENET),
    "gcp-imagenet-resnet18": {
        "paper": _GCP,
        "laptop": replace(
            _GCP,
            scale="laptop",
            data=Data("tiny-imagenet-20", size=56, crop_padding=0),
            model=Model("resnet18", "gcp", "imagenet", depths=(1, 1, 1), width=16, reduction=64, last_stride=1),
            schedule=Schedule(3, 50, weight_decay=1e-4, milestones=(2,)),
            log_every=20,
        ),
    },
    "dbn-sprites-small": {"paper": replace(_SPRITES, scale="paper"), "laptop": _SPRITES},
}


def names() -> tuple[str, ...]:
    """Names of the presets."""
    return tuple(_PRESETS)


def preset(name: str, scale: Scale = "laptop") -> Classification:
    """The configuration of a preset.

    ``dbn-…`` replaces the batch normalization after the first convolution by a decorrelated one, ``gcp-…`` average
    pooling by covariance pooling. At the scale of the paper the numbers are the paper's; at that of a laptop network,
    images and epochs are small enough for minutes on one core, and the code is the same. ``dbn-sprites-small`` has one
    scale.

    Raises:
        ValueError: If there is no such preset or scale; the text gives the nearest name.

    Example:
        >>> preset("dbn-cifar100-resnet50", "paper").schedule
        Schedule(epochs=350, batch_size=128, lr=0.1, momentum=0.9, weight_decay=0.0005, milestones=(100, 200, 300), \
gamma=0.1, steps=None)
        >>> preset("dbn-cifar100-resnet5")
        Traceback (most recent call last):
        ValueError: There is no preset 'dbn-cifar100-resnet5'. Did you mean 'dbn-cifar100-resnet50'? There are: \
dbn-cifar10-resnet50, dbn-cifar100-resnet50, dbn-cifar100-densenet121, dbn-cifar100-mobilenetv2, \
gcp-imagenet-resnet18, dbn-sprites-small.
    """
    if name not in _PRESETS:
        raise ValueError(f"There is no preset {name!r}.{nearest(name, names())} There are: {', '.join(names())}.")
    if scale not in _PRESETS[name]:
        raise ValueError(f"The scale is 'paper' or 'laptop'; got {scale!r}.")
    return _PRESETS[name][scale]
