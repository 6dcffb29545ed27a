"""The images of a GAN."""

from orthocond.lab.data import SHAPES, ImageData, Sprites, load, sprites
from orthocond.lab.generation.config import GanData, Generation


def load_images(data: GanData, root: str | None = None) -> ImageData:
    """The images of a configuration, of the side ``resize`` if that is given; cut out the middle of ``size``.

    Raises:
        FileNotFoundError: If there is no such data set.
        ValueError: If it is broken.
    """
    side = data.resize or data.size
    if data.shape is None:
        return load(data.source, root=root, size=side, limit=data.limit)
    images: Sprites = sprites(size=side)
    images = images.subset((images.shapes == SHAPES.index(data.shape)).nonzero().flatten())
    return images if data.limit is None else images.sample(data.limit)


def stand_in(config: Generation) -> ImageData:
    """Sprites in the place of the images: a few batches of the same size."""
    return sprites(4 * config.schedule.batch_size, size=config.data.resize or config.data.size)
