"""The images of a classifier: loaded, divided, and in batches."""

from orthocond.lab.classification.config import Classification, Data
from orthocond.lab.data import ImageData, Pair, Pipeline, load_pair, sprites


def load_data(data: Data, root: str | None = None) -> Pair:
    """The training and held-out images of a configuration.

    Raises:
        FileNotFoundError: If there is no such data set.
        ValueError: If it is broken, or has no classes.
    """
    pair = _load_pair(data, root)
    if not data.validation:
        return pair
    if data.validation >= len(pair.train):
        raise ValueError(f"data.validation needs fewer than the {len(pair.train)} images; got {data.validation}.")
    return Pair(*pair.train.split_off(data.validation / len(pair.train)))


def _load_pair(data: Data, root: str | None) -> Pair:
    if data.source == "sprites":
        size = data.in_memory or data.size or 32
        train, held_out = (
            sprites(count, size=size, split=split, noise=data.noise)
            for split, count in (("train", data.limit), ("test", data.held_out))
        )
        return Pair(train, held_out)
    pair = load_pair(data.source, root=root, size=data.in_memory, limit=data.limit)
    if not pair.train.classes:
        raise ValueError(f"{data.source} has no classes; a classifier needs a folder for each class.")
    if pair.train.classes != pair.held_out.classes:
        raise ValueError(f"{data.source}: training and held-out images have different classes.")
    if data.held_out is not None and data.held_out < len(pair.held_out):
        return Pair(pair.train, pair.held_out.sample(data.held_out))
    return pair


def stand_in(config: Classification) -> Pair:
    """Sprites in the place of the images: a few batches of the same size."""
    data = config.data
    side = data.in_memory or data.resize or data.size or 32
    images = sprites(4 * config.schedule.batch_size, size=side)
    return Pair(images, images)


def pipeline(config: Classification, images: ImageData, *, train: bool, rank: int = 0, world_size: int = 1) -> Pipeline:
    """The batches of a configuration, with images normalized by their own mean and deviation."""
    mean, std = images.statistics()
    data = config.data
    return Pipeline(
        data=images,
        batch_size=config.schedule.batch_size,
        train=train,
        size=data.size,
        resize=data.resize,
        crop_padding=data.crop_padding,
        padding=data.padding,
        flip=data.flip,
        mean=mean,
        std=std,
        seed=config.seed,
        rank=rank,
        world_size=world_size,
    )
