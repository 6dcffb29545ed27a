"""From data to batches: order, augmentation and normalization as a function of seed, epoch and index alone."""

import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from orthocond._checks import check_count
from orthocond.lab.data.encoded import EncodedImages, in_threads
from orthocond.lab.data.images import ImageData, center_crop, shorter_side

_ORDER, _AUGMENT = 0, 1  # streams of random numbers


class Batch(NamedTuple):
    """Images ``(B, 3, H, W)`` in float32 and labels ``(B,)`` in int64."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    r"""Batches of augmented, normalized images.

    Batch i of an epoch depends on the data, the settings and ``(seed, epoch, i)`` alone: any batch can be made without
    those before it, with any number of processes, threads or batches prepared ahead. With ``world_size`` processes,
    each makes every ``world_size``-th image of the same batches that one process would make.

    In training the order is shuffled, an incomplete last batch is left out, and images are cropped at a random place
    and flipped half of the time. Otherwise they come in order and are cropped in the middle. Pixels become
    :math:`(p / 255 - \mathrm{mean}) / \mathrm{std}`.

    Args:
        data: The images.
        batch_size: Number of images of a batch over all processes.
        train: Whether to shuffle and augment.
        size: Side of the crop; the images' own size if None.
        resize: Scale the shorter side to it before the crop. Images of several sizes and a ``size`` have 8/7 of
            ``size`` by default, that is 256 for 224.
        flip: Whether to mirror half of the training images.
        crop_padding: Width of a black border around the images of which the random crop is taken; by default 4, and 0
            where images are scaled or larger than the crop.
        padding: What the border holds: ``"zeros"``, or the ``"reflection"`` of the image.
        mean: The mean of each channel, or one number for all.
        std: The standard deviation of each channel, or one number for all. The defaults give images in [-1, 1].
        seed: The seed of the order and the augmentation.
        rank: Number of this process.
        world_size: Number of processes. If the last batch of an evaluation has fewer images than that, some processes
            have one batch less.
        prefetch: Number of batches that a thread in the background prepares ahead; 0 for none.
        workers: Number of threads that decode images; one for each processor, at most 8, if None.

    Raises:
        TypeError: If ``data`` is not an `ImageData`.
        ValueError: If a setting is not valid, no complete batch exists, or images of several sizes have no ``size``.

    Example:
        >>> from orthocond.lab.data import sprites
        >>> pipeline = Pipeline(data=sprites(100, size=16), batch_size=32, train=True)
        >>> len(pipeline)
        3
        >>> images, labels = next(pipeline.batches(epoch=0))
        >>> images.shape, images.dtype, labels.shape
        (torch.Size([32, 3, 16, 16]), torch.float32, torch.Size([32]))
        >>> again = list(pipeline.batches(epoch=5, start=2))  # resumes at any batch without making those before it
        >>> torch.equal(again[0].images, list(pipeline.batches(epoch=5))[2].images)
        True
    """

    data: ImageData
    batch_size: int
    train: bool
    size: int | None = None
    resize: int | None = None
    flip: bool = True
    crop_padding: int | None = None
    padding: Literal["zeros", "reflection"] = "zeros"
    mean: float | Sequence[float] = 0.5
    std: float | Sequence[float] = 0.5
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    prefetch: int = 2
    workers: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.data, ImageData):
            raise TypeError(f"Pipeline needs ImageData, as load(...) returns; got {type(self.data).__name__}.")
        for name, least in (("batch_size", 1), ("world_size", 1), ("rank", 0), ("prefetch", 0), ("seed", 0)):
            check_count(getattr(self, name), f"Pipeline({name}=...)", least)
        for name in ("size", "resize", "workers"):
            if getattr(self, name) is not None:
                check_count(getattr(self, name), f"Pipeline({name}=...)", 1)
        if self.crop_padding is not None:
            check_count(self.crop_padding, "Pipeline(crop_padding=...)", 0)
        if self.rank >= self.world_size:
            raise ValueError(f"Pipeline(rank=...) needs less than world_size={self.world_size}; got {self.rank}.")
        if self.batch_size % self.world_size:
            raise ValueError(
                f"Pipeline(batch_size=...) counts the images of all processes and needs a multiple of "
                f"world_size={self.world_size}; got {self.batch_size}. (The command line has --schedule.batch-size.)"
            )
        if not np.all(np.asarray(self.std) > 0):
            raise ValueError(f"Pipeline(std=...) needs numbers above 0; got {self.std!r}.")
        self._check_sizes()
        if len(self) == 0:
            raise ValueError(
                f"Pipeline needs at least one batch; {len(self.data)} images make no batch of {self.batch_size}. "
                "Use a smaller batch_size."
            )

    def _check_sizes(self) -> None:
        own = self.data.size
        if own is None and self.size is None:
            raise ValueError(
                f"{self.data.source} has images of several or unknown sizes: pass size=..., for example 224."
            )
        least = self._resize or min(own or (0,))
        padding = self._padding if self.train else 0
        if self.size is not None and self.size > least + 2 * padding:
            raise ValueError(
                f"Pipeline(size={self.size}) is larger than the images, whose shorter side is {least}"
                + (f" with a padding of {padding}" if padding else "")
                + f". Pass resize=..., at least {self.size}."
            )

    def __len__(self) -> int:
        """Number of batches in an epoch, over all processes."""
        return len(self.data) // self.batch_size if self.train else -(-len(self.data) // self.batch_size)

    @property
    def _resize(self) -> int | None:
        if self.resize is None and self.data.size is None and self.size is not None:
            return round(self.size * 8 / 7)
        return self.resize

    @property
    def _padding(self) -> int:
        if self.crop_padding is not None:
            return self.crop_padding
        own = self.data.size
        same = self._resize is None and own is not None and (self.size is None or own == (self.size, self.size))
        return 4 if same else 0

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """The batches of one epoch from number ``start`` on.

        Raises:
            ValueError: If ``start`` is not a batch of the epoch or, while iterating, an image is broken.
        """
        check_count(epoch, "batches(epoch=...)", 0)
        check_count(start, "batches(start=...)", 0)
        if start > len(self):
            raise ValueError(f"batches(start=...) needs at most {len(self)}, the number of batches; got {start}.")
        made = self._made(epoch, start)
        return _ahead(made, self.prefetch) if self.prefetch else made

    def _made(self, epoch: int, start: int) -> Iterator[Batch]:
        count = len(self.data)
        order = np.arange(count)
        if self.train:
            order = np.random.default_rng([_ORDER, self.seed, epoch]).permutation(count)
        for index in range(start, len(self)):
            chosen = order[index * self.batch_size : (index + 1) * self.batch_size]
            # Drawn for the whole batch and then divided: an image is augmented alike for any number of processes.
            uniform = np.random.default_rng([_AUGMENT, self.seed, epoch, index]).random(
                (len(chosen), 3), dtype=np.float32
            )
            mine = slice(self.rank, None, self.world_size)
            if len(chosen[mine]):
                yield self._batch(torch.from_numpy(chosen[mine]), torch.from_numpy(uniform[mine]))

    def _batch(self, indices: Tensor, uniform: Tensor) -> Batch:
        labels = self.data.labels[indices]
        if isinstance(self.data.images, Tensor):
            images = self._cropped(self._scaled(self.data.images[indices]), uniform)
        else:
            images = self._decoded(self.data.images, indices, uniform)
        if self.train and self.flip:
            mirrored = uniform[:, 2] < 0.5
            images[mirrored] = images[mirrored].flip(3)
        mean, std = (torch.tensor(value).reshape(-1, 1, 1) for value in (self.mean, self.std))
        return Batch(images.float().mul_(1 / (255 * std)).sub_(mean / std), labels)

    def _decoded(self, images: EncodedImages, indices: Tensor, uniform: Tensor) -> Tensor:
        def one(place: int) -> Tensor:
            image = images.decode(int(indices[place]), self._resize)
            return self._cropped(self._scaled(image[None]), uniform[place, None])

        return torch.cat(in_threads(one, range(len(indices)), self.workers))

    def _scaled(self, images: Tensor) -> Tensor:
        return shorter_side(images, self._resize) if self._resize else images

    def _cropped(self, images: Tensor, uniform: Tensor) -> Tensor:
        """Squares (or the images' own shape) cut out at places given by ``uniform`` in [0, 1)."""
        height, width = (self.size, self.size) if self.size else images.shape[-2:]
        if not self.train:
            return images if self.size is None else center_crop(images, self.size)
        if self._padding and self.padding == "reflection":
            return _reflected(images, uniform, self._padding, (height, width))
        if self._padding:
            images = F.pad(images, (self._padding,) * 4)
        rows, columns = images.shape[-2] - height + 1, images.shape[-1] - width + 1
        if rows == columns == 1:
            return images
        windows = images.unfold(2, height, 1).unfold(3, width, 1)  # a view: (B, C, rows, columns, height, width)
        return windows[torch.arange(len(images)), :, _place(uniform[:, 0], rows), _place(uniform[:, 1], columns)]


def _place(uniform: Tensor, count: int) -> Tensor:
    """Whole numbers below ``count`` from numbers in [0, 1)."""
    # float32 below 1 times a whole number can round up to that number.
    return (uniform * count).long().clamp_(max=count - 1)


def _reflected(images: Tensor, uniform: Tensor, padding: int, size: tuple[int, int]) -> Tensor:
    """Crops from images that are surrounded by their own reflection, which is never stored; channels come last."""
    places = []
    for axis, (side, crop) in enumerate(zip(images.shape[-2:], size, strict=True)):
        start = _place(uniform[:, axis], side + 2 * padding - crop + 1) - padding
        position = (start[:, None] + torch.arange(crop)).abs()
        places.append(torch.where(position < side, position, 2 * (side - 1) - position))
    image = torch.arange(len(images))[:, None, None]
    return images[image, :, places[0][:, :, None], places[1][:, None, :]].movedim(-1, 1)


def _ahead(made: Iterator[Batch], count: int) -> Iterator[Batch]:
    """The same items, made ahead by a thread; leaving the loop early ends the thread."""
    ready: queue.Queue[tuple[Batch | None, BaseException | None]] = queue.Queue(count)
    stop = threading.Event()

    def put(item: tuple[Batch | None, BaseException | None]) -> None:
        while not stop.is_set():
            try:
                return ready.put(item, timeout=0.1)
            except queue.Full:
                continue
        return None

    def work() -> None:
        try:
            for batch in made:
                put((batch, None))
                if stop.is_set():
                    return
        except BaseException as error:  # raised where the batch is asked for
            put((None, error))
        else:
            put((None, None))

    thread = threading.Thread(target=work, name="orthocond-batches", daemon=True)
    thread.start()
    try:
        while True:
            batch, error = ready.get()
            if error is not None:
                raise error
            if batch is None:
                return
            yield batch
    finally:
        stop.set()
        thread.join()
