"""The presets of classifiers: every row of the paper's tables, at the scales paper, workstation and laptop."""

from dataclasses import replace

from orthocond.lab.classification.config import Classification, Data, Model, Schedule
from orthocond.lab.config import Scale

_CIFAR = Data(size=32, crop_padding=4)
# Pixels are averaged 2x2, which makes everything four times as fast; the stem keeps its 64 channels and 27 inputs.
_CIFAR_SMALL = Data(size=16, in_memory=16, crop_padding=2)
_CIFAR_SCHEDULE = Schedule()
_CIFAR_SHORT = Schedule(epochs=3, batch_size=64, milestones=(2,))
# With 16 epochs this network has 88.4 % on CIFAR-10 after 24 minutes on one core (SVD, seed 0).
_CONVNET = Model("convnet", width=64, momentum=0.3)
_CIFAR_MEDIUM = Schedule(
    epochs=16,
    batch_size=250,
    lr=0.25,
    milestones=(),
    fall="linear",
    warmup=0.25,
    nesterov=True,
    label_smoothing=0.1,
)
_CIFAR_LONGER = replace(_CIFAR_MEDIUM, epochs=20)


def _dbn(
    name: str,
    source: str,
    paper: Model,
    laptop: Model,
    workstation: Model = _CONVNET,
    schedule: Schedule = _CIFAR_LONGER,
) -> dict[Scale, Classification]:
    return {
        "paper": Classification(
            name, "paper", data=replace(_CIFAR, source=source), model=paper, schedule=_CIFAR_SCHEDULE
        ),
        "workstation": Classification(
            name,
            "workstation",
            data=replace(_CIFAR, source=source, padding="reflection"),
            model=workstation,
            schedule=schedule,
            log_every=25,
        ),
        "laptop": Classification(
            name, "laptop", data=replace(_CIFAR_SMALL, source=source), model=laptop, schedule=_CIFAR_SHORT, log_every=20
        ),
    }


_RESNET = Model("resnet50"), Model("resnet50", depths=(1, 1, 1), width=16)
_DENSENET = (
    Model("densenet121"),
    Model("densenet121", depths=(2, 2, 2), width=16),
    Model("densenet121", depths=(1, 3, 4), width=16, momentum=0.3),
)
_MOBILENET = (
    Model("mobilenetv2"),
    Model("mobilenetv2", depths=(1, 1, 1, 1), width=256),
    Model("mobilenetv2", depths=(1, 2, 2, 2, 1), width=320, momentum=0.3),
)
# For these two: images that cost three times as much as those of the plain network, and more steps of fewer of them.
_OTHERS = replace(_CIFAR_MEDIUM, epochs=12, batch_size=125, lr=0.1)
# The network of the scale workstation, and a smaller one that takes a third of the time: enough for many seeds.
_SMALL_CONVNET = replace(_CONVNET, width=32, depths=(1, 1, 1))
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
# For images of your own: --data DIR.
_IMAGES = Classification(
    "dbn-images",
    "paper",
    data=Data("images", size=224, resize=256, crop_padding=0),
    model=Model("resnet50", stem="imagenet"),
    schedule=Schedule(100, 256, weight_decay=1e-4, milestones=(), fall="cosine", warmup=0.05),
)
_SMALL_IMAGES = replace(
    _IMAGES,
    scale="laptop",
    data=Data("images", size=64, resize=72, in_memory=72, crop_padding=0),
    model=Model("resnet18", stem="imagenet", depths=(1, 1, 1), width=32),
    schedule=replace(_IMAGES.schedule, epochs=10, batch_size=32),
    log_every=10,
)


def _convnets(name: str, source: str, schedule: Schedule, epochs: int) -> dict[Scale, Classification]:
    """The network of the scale workstation, and the smaller one with so many epochs at the scale laptop."""
    large = _dbn(name, source, *_RESNET, schedule=schedule)["workstation"]
    schedule = replace(schedule, epochs=epochs)
    return {
        "paper": replace(large, scale="paper"),
        "workstation": large,
        "laptop": replace(large, scale="laptop", model=_SMALL_CONVNET, schedule=schedule),
    }


PRESETS: dict[str, dict[Scale, Classification]] = {
    "dbn-cifar10-resnet50": _dbn("dbn-cifar10-resnet50", "cifar10", *_RESNET, schedule=_CIFAR_MEDIUM),
    "dbn-cifar10-convnet": _convnets("dbn-cifar10-convnet", "cifar10", _CIFAR_MEDIUM, 4),
    "dbn-cifar100-convnet": _convnets("dbn-cifar100-convnet", "cifar100", _CIFAR_LONGER, 8),
    "dbn-cifar100-resnet50": _dbn("dbn-cifar100-resnet50", "cifar100", *_RESNET),
    "dbn-cifar100-densenet121": _dbn("dbn-cifar100-densenet121", "cifar100", *_DENSENET, _OTHERS),
    "dbn-cifar100-mobilenetv2": _dbn("dbn-cifar100-mobilenetv2", "cifar100", *_MOBILENET, _OTHERS),
    "gcp-imagenet-resnet18": {
        "paper": _GCP,
        "workstation": replace(
            _GCP,
            scale="workstation",
            data=Data("tiny-imagenet-20", size=64, crop_padding=6, padding="reflection"),
            model=Model("resnet18", "gcp", "imagenet", depths=(1, 1, 1), width=32, reduction=64, last_stride=1),
            schedule=replace(_CIFAR_MEDIUM, epochs=30, batch_size=100, lr=0.1),
            log_every=25,
        ),
        "laptop": replace(
            _GCP,
            scale="laptop",
            data=Data("tiny-imagenet-20", size=56, crop_padding=0),
            model=Model("resnet18", "gcp", "imagenet", depths=(1, 1, 1), width=16, reduction=64, last_stride=1),
            schedule=Schedule(3, 50, weight_decay=1e-4, milestones=(2,)),
            log_every=20,
        ),
    },
    "dbn-images": {"paper": _IMAGES, "laptop": _SMALL_IMAGES},
    "dbn-sprites-small": {
        "paper": replace(_SPRITES, scale="paper"),
        "workstation": replace(_SPRITES, scale="workstation"),
        "laptop": _SPRITES,
    },
}
