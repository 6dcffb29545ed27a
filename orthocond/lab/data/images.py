"""The one record of all sources: images, labels, class names, and where they come from."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from orthocond.lab.data.encoded import EncodedImages, check_sides


class Statistics(NamedTuple):
    """Mean and standard deviation of each channel, of pixels in [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True, repr=False, eq=False)
class ImageData(Dataset[tuple[Tensor, int]]):
    """Images with labels, as a map-style data set of pairs ``(uint8 image (3, H, W), label)``.

    Args:
        images: One uint8 tensor ``(N, 3, H, W)`` where all fit into memory, else files that are decoded when asked for.
        labels: int64 ``(N,)``, from 0 to the number of classes; -1 in data without classes, which no loss takes for a
            class.
        classes: Names of the classes; empty in data without classes.
        split: Name of the part, ``"all"`` in data that has no parts.
        source: Where it comes from.
        notes: What was done to the images on the way (converted, resized).

    Raises:
        ValueError: If images and labels do not belong together or a label is out of range.

    Example:
        >>> data = ImageData(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.tensor([0, 1, 0, 1]), ("cat", "dog"))
        >>> data
        ImageData 'memory', split 'all': 4 images 3x8x8 in memory (768 bytes), 2 classes
        >>> image, label = data[1]
        >>> image.shape, data.classes[label]
        (torch.Size([3, 8, 8]), 'dog')
    """

    images: Tensor | EncodedImages
    labels: Tensor
    classes: tuple[str, ...] = ()
    split: str = "all"
    source: str = "memory"
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.images, Tensor) and (self.images.dtype != torch.uint8 or self.images.ndim != 4):
            raise ValueError(
                f"ImageData needs uint8 images (N, C, H, W); got {self.images.dtype} {tuple(self.images.shape)}."
            )
        if self.labels.dtype != torch.int64 or self.labels.shape != (len(self.images),):
            raise ValueError(
                f"{self.source}: {len(self.images)} images need as many int64 labels; "
                f"got {self.labels.dtype} {tuple(self.labels.shape)}. Images and labels must come from the same split."
            )
        low, high = (0, len(self.classes) - 1) if self.classes else (-1, -1)
        wrong = ((self.labels < low) | (self.labels > high)).nonzero()
        if len(wrong):
            index = int(wrong[0])
            raise ValueError(
                f"{self.source}: label {int(self.labels[index])} of image {index} is out of range; "
                + (
                    f"{len(self.classes)} classes need labels from 0 to {high}."
                    if self.classes
                    else "it has no classes."
                )
            )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} images")
        return self.images[index], int(self.labels[index])

    @property
    def size(self) -> tuple[int, int] | None:
        """Height and width, None where images are of several sizes or not known before they are decoded."""
        return (self.images.shape[2], self.images.shape[3]) if isinstance(self.images, Tensor) else self.images.size

    def subset(self, indices: Tensor) -> Self:
        """The images at these positions, in this order."""
        return replace(self, images=self.images[indices], labels=self.labels[indices])

    def sample(self, count: int, seed: int = 0) -> Self:
        """A random part of ``count`` images, in which each class keeps its share.

        Raises:
            ValueError: If there are fewer images.
        """
        return self.subset(balanced(self.labels, count, seed).sort().values)

    def split_off(self, fraction: float = 0.1, seed: int = 0) -> tuple[Self, Self]:
        """Two parts for data that has none: training images, and a held-out fraction of each class.

        Raises:
            ValueError: If one of the parts would be empty.

        Example:
            >>> data = ImageData(torch.zeros(20, 3, 4, 4, dtype=torch.uint8), torch.arange(20) % 2, ("a", "b"))
            >>> train, held_out = data.split_off(0.2)
            >>> len(train), held_out.labels.bincount()
            (16, tensor([2, 2]))
        """
        count = round(fraction * len(self))
        if not 0 < count < len(self):
            raise ValueError(
                f"split_off needs a fraction that leaves images on both sides; got {fraction} of {len(self)} images."
            )
        order = balanced(self.labels, len(self), seed)
        held_out, rest = order[:count].sort().values, order[count:].sort().values
        return replace(self.subset(rest), split="train"), replace(self.subset(held_out), split="val")

    def statistics(self, limit: int = 10_000) -> Statistics:
        """Mean and standard deviation of each channel over all pixels, for normalization.

        Args:
            limit: Largest number of images to look at, taken at random with a fixed seed.

        Example:
            >>> images = torch.tensor([0, 255], dtype=torch.uint8).reshape(2, 1, 1, 1).expand(2, 3, 4, 4)
            >>> ImageData(images, torch.tensor([-1, -1])).statistics().std
            (0.5, 0.5, 0.5)
        """
        part = self.sample(limit) if limit < len(self) else self
        total = square = torch.zeros((), dtype=torch.float64)
        pixels = 0
        for start in range(0, len(part), 256):
            chunk = part.images[start : start + 256]
            for image in [chunk.movedim(1, 0)] if isinstance(chunk, Tensor) else map(chunk.decode, range(len(chunk))):
                x = image.flatten(1).double() / 255
                total, square, pixels = total + x.sum(1), square + x.square().sum(1), pixels + x.shape[1]
        mean = total / pixels
        std = (square / pixels - mean.square()).clamp(min=0).sqrt()
        return Statistics(tuple(mean.tolist()), tuple(std.tolist()))

    def resized(self, size: int) -> Self:
        """Images in memory with the shorter side brought to ``size`` and the middle cut out."""
        if not isinstance(self.images, Tensor) or self.size == (size, size):
            return self
        parts = [center_crop(shorter_side(part, size), size) for part in self.images.split(1024)]
        note = f"resized from {self.size[0]}x{self.size[1]}" if self.size else "resized"
        return replace(self, images=torch.cat(parts), notes=(*self.notes, note))

    def __repr__(self) -> str:
        shape = "x".join(map(str, (3, *self.size))) if self.size else "of several sizes"
        if isinstance(self.images, Tensor):
            count = self.images.untyped_storage().nbytes()
            where = f"in memory ({count / 1e6:.0f} MB)" if count >= 1e6 else f"in memory ({count} bytes)"
        else:
            where = "decoded when asked for"
        classes = f"{len(self.classes)} classes" if self.classes else "no classes"
        return (
            f"{type(self).__name__} {Path(self.source).name!r}, split {self.split!r}: "
            f"{len(self)} images {shape} {where}, {classes}" + "".join(f"\n  {note}" for note in self.notes)
        )


def balanced(labels: Tensor, count: int, seed: int) -> Tensor:
    """The first ``count`` of a random order in which every beginning holds each class in its share."""
    if not 0 < count <= len(labels):
        raise ValueError(f"a part needs between 1 and {len(labels)} images, which are all; got {count}.")
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(labels))
    by_class = order[np.argsort(labels.numpy()[order], kind="stable")]
    counts = np.unique(labels.numpy(), return_counts=True)[1]
    # The k-th of n images of a class comes at (k + u) / n, with one u for each class: no class is always first.
    place = np.concatenate([(np.arange(n) + u) / n for n, u in zip(counts, rng.random(len(counts)), strict=True)])
    return torch.from_numpy(by_class[np.argsort(place, kind="stable")][:count].copy())


def shorter_side(images: Tensor, side: int) -> Tensor:
    """Uint8 images ``(N, C, H, W)`` with the shorter side scaled to ``side``, bilinear and antialiased."""
    height, width = images.shape[-2:]
    if min(height, width) == side:
        return images
    check_sides(width, height)
    scale = side / min(height, width)
    target = (max(side, math.floor(height * scale + 0.5)), max(side, math.floor(width * scale + 0.5)))
    return F.interpolate(images, target, mode="bilinear", antialias=True)


def center_crop(images: Tensor, side: int) -> Tensor:
    """The middle square of images ``(..., H, W)``."""
    top, left = (images.shape[-2] - side) // 2, (images.shape[-1] - side) // 2
    return images[..., top : top + side, left : left + side]
