"""The true factors of sprites: how they are read, how directions score against them, and what chance would score."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from orthocond.lab.data import FACTORS, read_factors
from orthocond.lab.data.images import center_crop
from orthocond.lab.generation.config import Generation
from orthocond.lab.generation.data import load_images
from orthocond.metrics import dci, frechet_distance, modularity, mutual_information_gap, sap

_FAINT = 0.1  # difference of the channels of pixels in [0, 1]; that of sprites is 0.8
_BINS = 20
ROTATIONS = 20


def read(images: Tensor) -> Tensor:
    """The factors of real and of generated images.

    Color that is hardly visible counts as gray: faint noise all over the background would move the centroid to the
    middle. The hue is shifted, so that it jumps where no sprite is.
    """
    pixels = images.float() / 127.5 - 1 if images.dtype == torch.uint8 else images
    faint = pixels.amax(1, keepdim=True) - pixels.amin(1, keepdim=True) < 2 * _FAINT
    values = read_factors(torch.where(faint, pixels.mean(1, keepdim=True), pixels)).values
    hue = list(FACTORS).index("hue")
    gap = (1 - FACTORS["hue"][1]) / 2
    values[:, hue] = (values[:, hue] + gap) % 1 - gap
    return values


def real_factors(config: Generation, root: str | None) -> Tensor:
    """The factors of the training images, float64."""
    images = load_images(config.data, root).images
    assert isinstance(images, Tensor)
    return read(center_crop(images, config.data.size)).double()


def compare(real: Tensor, fake: Tensor) -> dict[str, Any]:
    """Mean and deviation of each factor, real and generated, and the Fréchet distance in units of the real ones.

    Args:
        real: Factors of real images.
        fake: Factors of generated images; rows with NaN are images that could not be read.
    """
    known = fake[fake.isfinite().all(1)].double()
    result: dict[str, Any] = {"read": len(known) / len(fake)}
    for name, one, two in zip(FACTORS, real.mT, known.mT, strict=True):
        result[name] = {
            "real": [float(one.mean()), float(one.std())],
            "fake": [float(two.mean()), float(two.std())] if len(known) > 1 else [math.nan, math.nan],
        }
    if len(known) > len(FACTORS):
        a, b = real / real.std(0), known / real.std(0)
        result["distance"] = frechet_distance(a.mean(0), a.mT.cov(), b.mean(0), b.mT.cov())
    return result


def scores(codes: Tensor, factors: Tensor) -> dict[str, float]:
    """Scores of coordinates ``(n, d)`` of latents against the factors ``(n, k)`` of their images.

    They are those of `orthocond.metrics.factor_report`, with quantiles as bins.
    """
    found = dci(codes, factors)
    return {
        "mig": mutual_information_gap(codes, factors, bins=_BINS, binning="quantile"),
        "sap": sap(codes, factors),
        "modularity": modularity(codes, factors, bins=_BINS, binning="quantile"),
        "disentanglement": found.disentanglement,
        "completeness": found.completeness,
        "informativeness": found.informativeness,
    }


def chance(z: Tensor, factors: Tensor, blocks: list[int], rotations: int = ROTATIONS) -> dict[str, Any]:
    """Mean and deviation of the scores of randomly rotated axes.

    Normal latents are the same in every orthonormal basis, and the images are: a rotation changes the coordinates
    alone. A method that does not tell the axes from other bases scores as much on average.

    Args:
        z: Latents ``(n, d)``.
        factors: Factors of their images.
        blocks: Numbers of latents that rotate among themselves: those of each layer of EigenGAN, or all.
        rotations: How many, from a fixed seed.
    """
    random = torch.Generator().manual_seed(0)
    found = []
    for _ in range(rotations):
        parts = [nn.init.orthogonal_(torch.empty(size, size), generator=random) for size in blocks]
        found.append(scores(z @ torch.block_diag(*parts).mT, factors))
    values = {name: torch.tensor([one[name] for one in found], dtype=torch.float64) for name in found[0]}
    return {
        "rotations": rotations,
        "mean": {name: float(one.mean()) for name, one in values.items()},
        "std": {name: float(one.std()) for name, one in values.items()},
    }
