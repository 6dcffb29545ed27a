"""The presets of GANs: every row of the paper's tables, at the scales paper, workstation and laptop."""

from dataclasses import replace

from orthocond.lab.config import Scale
from orthocond.lab.generation.config import GanData, GanMethod, GanModel, GanObjective, GanSchedule, Generation

# The paper gives sizes, batch, steps or epochs and numbers of latents; the rest is that of the authors' code.
_RIVALS = GanMethod(rival="paper", hp_weight=1e-5, orojar_weight=1e-6, lvp_weight=1e-2)
_LONG = Generation(scale="paper", log_every=100, save_every=5000, sample_every=5000)
_EIGEN_OBJECTIVE = GanObjective(
    "hinge-saturating",
    penalty_weight=10.0,
    penalty_interval=16,
    penalty_scaled=False,
    augment=("brightness", "saturation", "contrast", "translation", "cutout"),
    augment_each="batch",
)
_EIGEN_SCHEDULE = GanSchedule(500_000, 128, 1e-4, (0.5, 0.99), ema=0.99117)  # half of it is gone after 10,000 images
_SIMPLE_OBJECTIVE = GanObjective(discriminator_factor=0.5, penalty="gp", penalty_weight=10.0, penalty_interval=1)
_SIMPLE_SCHEDULE = GanSchedule(1, 128, 2e-4, (0.5, 0.999), constant=0.5, ema=0.0)

_SMALL_SIMPLE = GanModel(
    channels=(192, 96, 48, 24), blocks="upsample", discriminator_width=48, discriminator_norm=False
)
_SMALL_EIGEN = GanModel(
    "eigengan",
    noise_dim=64,
    width=8,
    max_channels=64,
    form="working",
    discriminator_width=16,
    discriminator_max_channels=128,
)
_EIGEN_RATES = GanSchedule(11_000, 16, constant=0.5, ema=0.997, end=0.05, importance_lr=0.03)


def _eigengan(name: str, size: int, source: str, small: str) -> dict[Scale, Generation]:
    medium = Generation(
        name,
        "workstation",
        method=GanMethod("ol", rival_batch=4),
        data=GanData(small, 32, flip=True),
        model=_SMALL_EIGEN,
        objective=GanObjective(penalty_weight=0.05, penalty_interval=8),
        schedule=_EIGEN_RATES,
    )
    return {
        "paper": replace(
            _LONG,
            preset=name,
            method=replace(_RIVALS, name="ol"),
            data=GanData(source, size, flip=True),
            model=GanModel("eigengan", width=16, discriminator_width=16),
            objective=_EIGEN_OBJECTIVE,
            schedule=_EIGEN_SCHEDULE,
        ),
        "workstation": medium,
        "laptop": _short(medium),
    }


def _short(config: Generation) -> Generation:
    """The same in minutes."""
    return replace(config, scale="laptop", schedule=replace(config.schedule, steps=1500))


def _simple(name: str, steps: int, paper: GanData, small: GanData) -> dict[Scale, Generation]:
    medium = Generation(
        name,
        "workstation",
        method=GanMethod(rival_batch=4),
        data=small,
        model=_SMALL_SIMPLE,
        objective=GanObjective(penalty_weight=0.02),
        schedule=GanSchedule(9500, 16, constant=0.5, ema=0.998),
    )
    return {
        "paper": replace(
            _LONG,
            preset=name,
            method=_RIVALS,
            data=paper,
            objective=_SIMPLE_OBJECTIVE,
            schedule=replace(_SIMPLE_SCHEDULE, steps=steps),
        ),
        "workstation": medium,
        "laptop": _short(medium),
    }


def _of_64_pixels(presets: dict[Scale, Generation], steps: int, model: GanModel) -> dict[Scale, Generation]:
    """The same images of 64 pixels. Below the paper's scale that is twice the size, and R1 grows with the area."""
    small = presets["workstation"]
    medium = replace(
        _resized(small),
        model=model,
        objective=replace(small.objective, penalty_weight=4 * small.objective.penalty_weight),
        schedule=replace(small.schedule, steps=steps),
    )
    return {"paper": _resized(presets["paper"]), "workstation": medium, "laptop": _short(medium)}


def _resized(config: Generation) -> Generation:
    data = config.data
    resize = None if data.resize is None else data.resize * 64 // data.size
    return replace(config, preset=f"{config.preset}-64", data=replace(data, size=64, resize=resize))


_SPRITES = Generation(
    "gan-sprites",
    data=GanData(shape="disc"),
    model=GanModel(z_dim=6, channels=(48, 24, 12), blocks="upsample", discriminator_width=24, discriminator_norm=False),
)
_EIGEN_SPRITES = replace(
    _SPRITES,
    preset="eigengan-sprites",
    method=GanMethod("ol"),
    model=GanModel(
        "eigengan", directions=3, noise_dim=16, width=8, max_channels=64, form="working", discriminator_width=8
    ),
    schedule=GanSchedule(importance_lr=0.03),
)
# The small network again: 32 pixels take four times as long, and their factors are learned less well.
_MEDIUM_SPRITES = replace(_SPRITES, scale="workstation", schedule=GanSchedule(3000, constant=0.5, ema=0.998))
_MEDIUM_EIGEN_SPRITES = replace(
    _EIGEN_SPRITES,
    scale="workstation",
    data=GanData(size=32, shape="disc"),
    model=replace(_SMALL_EIGEN, directions=2, noise_dim=16),  # of three layers: as many as there are factors
    objective=GanObjective(penalty_weight=0.1),
    schedule=GanSchedule(4000, 16, constant=0.5, ema=0.998, importance_lr=0.03),
)
_ANIMEFACE = _eigengan("eigengan-animeface", 128, "animeface", "animeface-64")
# 200 epochs of 202,599 images; of CelebA the middle 170 of 178 pixels.
_CELEBA = _simple("gan-celeba", 316_400, GanData("celeba", 128, 134), GanData("celeba-10k", 32, 34, flip=True))

PRESETS: dict[str, dict[Scale, Generation]] = {
    "eigengan-animeface": _ANIMEFACE,
    "eigengan-animeface-64": _of_64_pixels(_ANIMEFACE, 6000, replace(_SMALL_EIGEN, discriminator_width=12)),
    "eigengan-ffhq": _eigengan("eigengan-ffhq", 256, "ffhq", "utkface-128"),
    "gan-celeba": _CELEBA,
    "gan-celeba-64": _of_64_pixels(
        _CELEBA,
        8000,
        replace(_SMALL_SIMPLE, channels=(*_SMALL_SIMPLE.channels, 16), discriminator_width=32),
    ),
    # 400 epochs of 126,227 images.
    "gan-church": _simple("gan-church", 394_400, GanData("church", 128), GanData("buildings-64", 32, flip=True)),
    # For images of your own: --data DIR.
    "gan-images": _simple("gan-images", 200_000, GanData("images", 128), GanData("images", 32, flip=True)),
    "gan-sprites": {
        "paper": replace(_SPRITES, scale="paper"),
        "workstation": _MEDIUM_SPRITES,
        "laptop": _SPRITES,
    },
    "eigengan-sprites": {
        "paper": replace(_EIGEN_SPRITES, scale="paper"),
        "workstation": _MEDIUM_EIGEN_SPRITES,
        "laptop": _EIGEN_SPRITES,
    },
}
