"""Images that stay encoded until they are asked for, and the one decoder of all files."""

import io
import math
import os
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import BinaryIO, Protocol, Self, TypeVar, overload

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from orthocond.lab.text import printable

# Only these readers of Pillow are tried, whatever a file is called: others start programs, as that of EPS does.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
_NARROW = 100
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
# What Pillow's readers raise on damaged files, besides OSError (of which UnidentifiedImageError is one).
_BROKEN = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    LookupError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)


class Encoded(Protocol):
    """One encoded image; its text form names it in errors."""

    def read(self) -> bytes:
        """The bytes of the file."""
        ...

    def open(self) -> BinaryIO:
        """The file as a stream, for readers that stop after the header."""
        ...


class BrokenImageError(ValueError):
    """An image that cannot be decoded; the message names the file."""


class EncodedImages:
    """A sequence of encoded images, decoded when indexed.

    Args:
        files: The encoded images.
        size: Side of the square that each becomes (shorter side scaled, middle cut out), None for their own size.
        own_size: Height and width that all have, where known.
    """

    def __init__(
        self, files: Sequence[Encoded], *, size: int | None = None, own_size: tuple[int, int] | None = None
    ) -> None:
        self.files = files
        self.crop = size
        self.size = (size, size) if size else own_size

    def __len__(self) -> int:
        return len(self.files)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: Tensor | slice) -> Self: ...
    def __getitem__(self, index: int | Tensor | slice) -> Tensor | Self:
        if isinstance(index, int):
            return decode(self.files[index], size=self.crop)
        if isinstance(index, Tensor):
            files: Sequence[Encoded] = [self.files[i] for i in index.tolist()]
        else:
            files = [self.files[i] for i in range(*index.indices(len(self)))]
        return type(self)(files, size=self.crop, own_size=self.size)

    def decode(self, index: int, resize: int | None = None) -> Tensor:
        """The image at ``index``, with the shorter side scaled to ``resize`` where images are not cropped."""
        return decode(self.files[index], size=self.crop, resize=resize)


def decode(file: Encoded, *, size: int | None = None, resize: int | None = None) -> Tensor:
    """One image as uint8 RGB ``(3, H, W)``.

    Gray images get three equal channels, 16-bit ones keep their upper 8 bits, transparent ones are laid on white.
    Animations give their first frame. The orientation in EXIF data is not applied.

    Args:
        file: The encoded image.
        size: Scale the shorter side to it and cut out the middle square.
        resize: Scale the shorter side to it and keep the rest; without effect where ``size`` is given.

    Raises:
        BrokenImageError: If it cannot be decoded.
    """
    try:
        image: Image.Image = Image.open(io.BytesIO(file.read()), formats=FORMATS)
        check_sides(*image.size)
        side = size or resize
        if side and image.format == "JPEG":
            # The JPEG decoder halves for free; it keeps twice what is needed, so that the scaling still averages.
            least = min(image.size)
            image.draft("RGB", (2 * side * image.width // least, 2 * side * image.height // least))
        image = _to_rgb(image)
        if side:
            image = _scale(image, side)
        pixels = torch.from_numpy(np.array(image)).movedim(2, 0)
    except _BROKEN as error:
        raise BrokenImageError(f"{file} cannot be decoded ({printable(error)}). Replace or remove the file.") from error
    if size:
        top, left = (pixels.shape[1] - size) // 2, (pixels.shape[2] - size) // 2
        pixels = pixels[:, top : top + size, left : left + size]
    return pixels.contiguous()


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    if image.mode == "F":
        raise ValueError("floating-point pixels have no known range")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


def _scale(image: Image.Image, side: int) -> Image.Image:
    least = min(image.size)
    if least == side:
        return image
    width, height = (max(side, math.floor(length * side / least + 0.5)) for length in image.size)
    return image.resize((width, height), Image.Resampling.BILINEAR)


def read_headers(files: Sequence[Encoded]) -> tuple[Counter[tuple[int, int]], Counter[str]]:
    """Open every file without decoding it.

    Returns:
        How often each (height, width) occurs, and how often each pixel format.

    Raises:
        BrokenImageError: If a file is no image.
    """
    headers = in_threads(_header, files)
    return Counter(size for size, _ in headers), Counter(mode for _, mode in headers)


def _header(file: Encoded) -> tuple[tuple[int, int], str]:
    try:
        with file.open() as stream, Image.open(stream, formats=FORMATS) as image:
            check_sides(*image.size)
            return (image.height, image.width), image.mode
    except _BROKEN as error:
        raise BrokenImageError(f"{file} is not an image ({printable(error)}). Replace or remove it.") from error


def check_sides(width: int, height: int) -> None:
    """Refuse a picture so narrow that it would be huge once its shorter side is scaled to that of the others.

    Raises:
        ValueError: If it is.
    """
    if max(width, height) > _NARROW * min(width, height):
        raise ValueError(f"it is {width}x{height}: one side is more than {_NARROW} times as long as the other")


def in_threads(
    function: Callable[[_Item], _Result], items: Iterable[_Item], workers: int | None = None
) -> list[_Result]:
    """``[function(item) for item in items]`` on several threads; decoding does not hold the interpreter's lock."""
    results: list[_Result] = []
    waiting = iter(items)
    with ThreadPoolExecutor(workers or min(8, os.cpu_count() or 1)) as pool:
        while block := list(islice(waiting, 4096)):  # a future for each of a million files would fill the memory
            results += pool.map(function, block)
    return results


def describe_modes(modes: Counter[str]) -> list[str]:
    """Notes on the conversions to RGB that `decode` will make."""
    kinds = Counter[str]()
    for mode, count in modes.items():
        if mode != "RGB":
            kind = "transparent" if "A" in mode else "gray" if mode[0] in "L1I" else "other"
            kinds[kind] += count
    texts = {"gray": "gray images became RGB", "transparent": "transparent images were laid on white"}
    return [f"{count} {texts.get(kind, 'images of other modes became RGB')}" for kind, count in kinds.items() if count]
