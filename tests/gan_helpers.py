"""A GAN that trains in a second."""

from dataclasses import replace

from lab_helpers import run_of, train

from orthocond.lab.generation.config import GanData, GanMethod, GanModel, GanObjective, GanSchedule, Generation

TINY = Generation(
    data=GanData("sprites", 16, limit=48, flip=True),
    model=GanModel(z_dim=4, channels=(8, 8, 4), blocks="upsample", discriminator_width=4, discriminator_norm=False),
    schedule=GanSchedule(steps=7, batch_size=8),
    log_every=1,
    save_every=3,
    sample_every=7,
)
EIGEN = GanModel("eigengan", directions=2, noise_dim=3, width=4, max_channels=8, form="working", discriminator_width=4)


def tiny(method: str = "none", **settings) -> Generation:
    return replace(TINY, method=GanMethod(method), **settings)


def eigen(method: str = "ol", **settings) -> Generation:
    """With everything on that has random numbers of its own."""
    objective = GanObjective("hinge", augment=("brightness", "translation"), penalty="gp", penalty_interval=2)
    return tiny(method, model=EIGEN, objective=objective, **settings)


def smooth() -> Generation:
    """The same with a loss that does not amplify rounding.

    The hinge has the slopes 1 and -1 at real and generated images. Where a unit of the discriminator is active for all
    of them, the gradient of its bias is 0 but for rounding, of which Adam makes a step.
    """
    config = eigen("nog+olr")
    return replace(config, objective=replace(config.objective, name="non-saturating"))


def trained(tmp_path, config):
    run = run_of(tmp_path, config)
    assert train(config, run) == 0
    return run


def short(config, steps=2):
    return replace(config, schedule=replace(config.schedule, steps=steps), sample_every=0)
