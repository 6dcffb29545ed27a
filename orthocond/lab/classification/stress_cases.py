"""Covariances on which solvers are tried, with what exact arithmetic makes of them.

They are those of a stem, whose features are a product of 27 numbers of a patch, and those of pooled features, of which
an image has fewer positions than channels. Either is singular without a ridge, and its factor is known.
"""

import functools
import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from orthocond.lab.classification.claims import CONTRASTS
from orthocond.lab.classification.config import Classification, Method
from orthocond.lab.classification.data import load_data, pipeline
from orthocond.lab.classification.networks.resnet import resnet18
from orthocond.lab.classification.presets import PRESETS
from orthocond.lab.classification.task import ClassificationTask
from orthocond.lab.config import Scale, change
from orthocond.lab.data import Pair
from orthocond.lab.devices import make_accelerator
from orthocond.lab.loop import Loop
from orthocond.lab.methods import treat_weights
from orthocond.lab.runs import Run
from orthocond.layers import CovariancePool2d
from orthocond.weights import patch_covariance

LARGE = "large"
"""No treatment of a fresh weight, but twice its size: a control of treatments under which the weight grows."""

FRESH = {"svd": "none", LARGE: "none, twice as large", "sn": "SN", "ow": "OW", "mow": "MOW", "wi": "WI"}
"""Treatments of the fresh weight of a stem, with their names."""

TRAINED = ("SVD", "NOG", "OLR", "NOG + OW + OLR")
"""Arms of the claims of which a training makes the weight of the stem."""

POOLED = {"svd": "none", "sn": "SN", "ow": "OW"}
"""Treatments of the fresh convolution before covariance pooling, with their names."""

SEEDS = 2
"""Trainings of each arm."""

PAIRS = "pairs of equal eigenvalues"
"""Covariances that no network made."""

_PRESET = "dbn-cifar10-convnet"
_SCALE: Scale = "laptop"
_SPRITES = {"data.source": "sprites", "data.limit": 2000, "data.padding": "zeros"}
_CHANNELS, _BATCH, _SAMPLES = 64, 64, 4096
_POOLED_CHANNELS, _POOLED_BATCH = 256, 8
_NOTHING = 1e-24  # of the largest eigenvalue of a factor in float64: rounding


class StressCase(NamedTuple):
    """A covariance as a solver sees it, in float32 and in float64, and what it is: ``factor @ factor.mT``.

    Of pooled features, which a layer takes itself, they are the features ``(C, H, W)`` of the image.
    """

    seen: Tensor
    sharp: Tensor
    factor: Tensor
    features: Tensor | None = None


@dataclass(frozen=True)
class Source:
    """The images: CIFAR-10 if it is there, else sprites.

    Attributes:
        name: What they are.
        config: The configuration of the small network with these images.
        pair: Training and held-out images.
    """

    name: str
    config: Classification
    pair: Pair

    @classmethod
    def load(cls) -> "Source":
        """Load them."""
        config = PRESETS[_PRESET][_SCALE]
        try:
            return cls("CIFAR-10, 32x32", config, load_data(config.data))
        except FileNotFoundError:
            config = change(config, _SPRITES)
            return cls("sprites, 32x32, since CIFAR-10 is not there", config, load_data(config.data))

    @functools.cached_property
    def batches(self) -> list[Tensor]:
        """Eight batches of images, augmented as in training."""
        config = change(self.config, {"schedule.batch_size": _BATCH})
        epochs = map(pipeline(config, self.pair.train, train=True).batches, itertools.count())
        return [batch.images for batch in itertools.islice(itertools.chain.from_iterable(epochs), 8)]


def fresh_stems(treatment: str, dtype: torch.dtype, source: Source, count: int) -> Iterator[StressCase]:
    """Covariances of features of stems, each with a fresh weight and a batch of images."""
    for _, batch in _seeded(source, count):
        conv = _stem()
        if treatment == LARGE:
            conv.weight.data.mul_(2)
        else:
            treat_weights(Method(treatment), [conv], lambda _: iter(source.batches))
        yield _features_of_stem(conv, batch, dtype)


def trained_stems(weights: list[Tensor], dtype: torch.dtype, source: Source) -> Iterator[StressCase]:
    """Covariances of features of stems with given weights, each with a batch of images."""
    for seed, batch in _seeded(source, len(weights)):
        conv = _stem()
        conv.weight.data.copy_(weights[seed])
        yield _features_of_stem(conv, batch, dtype)


def train_stem(arm: str, source: Source, seed: int, count: int) -> list[Tensor]:
    """Weights of the stem at so many steps, evenly from the second half, of a training of one epoch.

    Args:
        arm: One of `TRAINED`, with the rate of the stem that was tuned for it.
        source: The images.
        seed: The seed.
        count: How many weights; those of a step come more than once if there are fewer steps.
    """
    arms = {term.arm.label: term.arm for contrast in CONTRASTS for term in contrast.terms}
    method = arms[arm].config(_SCALE, seed).method
    config = change(replace(source.config, method=method, seed=seed), {"schedule.epochs": 1})
    with tempfile.TemporaryDirectory() as folder:
        run = Run.create(folder, "stress", config)
        task = ClassificationTask(config, source.pair, make_accelerator(config.precision, run))
        loop = Loop(task, run)
        found = []
        for step in range(1, task.steps + 1):
            loop.make_step(step)
            found.append(_weight(task.layers[0]))
    half = found[len(found) // 2 :]
    return [half[place * len(half) // count] for place in range(count)]


def pooled(treatment: str, dtype: torch.dtype, source: Source, count: int) -> Iterator[StressCase]:
    """Covariances of the pooled features of an image, each of a small ResNet-18 with fresh weights."""
    for seed, batch in _seeded(source, count):
        pool = CovariancePool2d(output="matrix")
        network = resnet18(10, (1, 1, 1), stem="cifar", width=16, reduction=_POOLED_CHANNELS, pool=pool)
        treat_weights(Method(treatment), [network.reduce.get_submodule("0")])
        features = _inputs(network, pool, batch[:_POOLED_BATCH])[seed % _POOLED_BATCH].to(dtype)
        seen, sharp = (_covariance(features.flatten(1).to(kind)) for kind in (torch.float32, torch.float64))
        yield StressCase(seen, sharp, _centered(features.flatten(1).double()), features)


def pairs(dtype: torch.dtype, count: int) -> Iterator[StressCase]:
    """Covariances of full rank with pairs of equal eigenvalues."""
    for seed in range(count):
        torch.manual_seed(seed)
        values = torch.logspace(0, 2, _CHANNELS // 2, dtype=torch.float64).repeat_interleave(2)
        q, _ = torch.linalg.qr(torch.randn(_CHANNELS, _CHANNELS, dtype=torch.float64))
        factor = q * values.sqrt()
        white = torch.linalg.qr(torch.randn(_SAMPLES, _CHANNELS, dtype=torch.float64))[0].mT * _SAMPLES**0.5
        features = (factor @ white).float().to(dtype)
        seen, sharp = (features.to(kind) @ features.to(kind).mT / _SAMPLES for kind in (torch.float32, torch.float64))
        yield StressCase(seen, sharp, factor)


def exact(factor: Tensor, outer: Tensor, eps: float, *, inverse: bool = True) -> tuple[Tensor, Tensor]:
    """Root of ``factor @ factor.mT + eps I``, or its inverse, and gradient of its product with ``outer``, in float64.

    Without ridge, directions beyond the columns of the factor are left out. The gradient is that of divided
    differences (Daleckii and Krein).
    """
    u, s, _ = torch.linalg.svd(factor)
    values = torch.zeros(len(u), dtype=torch.float64)
    values[: len(s)] = s.square()
    values[values <= _NOTHING * values[0]] = 0
    kept = values + eps > 0
    r = torch.where(kept, values + eps, 1).sqrt()
    f = torch.where(kept, 1 / r if inverse else r, 0)
    slopes = 1 / (r[:, None] + r)
    if inverse:
        slopes = -slopes / (r[:, None] * r)
    # Between a direction that is kept and one that is left out the function goes from f to 0 over the eigenvalue.
    across = (f / r.square())[:, None] + f / r.square()
    slopes = torch.where(kept[:, None] & kept, slopes, torch.where(kept[:, None] | kept, across, 0))
    inner = u.mT @ ((outer + outer.mT) / 2) @ u
    return (u * f) @ u.mT, u @ (slopes * inner) @ u.mT


@torch.no_grad()
def _inputs(network: nn.Module, layer: nn.Module, batch: Tensor) -> Tensor:
    """What a layer gets in a forward pass in training mode."""
    found: list[Tensor] = []
    with layer.register_forward_pre_hook(lambda _, args: found.append(args[0])):
        network.train()(batch)
    return found[0]


@torch.no_grad()
def _weight(layer: nn.Module) -> Tensor:
    """The weight that a layer has, with what parametrizes it."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight.detach().cpu().contiguous().clone()


def _seeded(source: Source, count: int) -> Iterator[tuple[int, Tensor]]:
    """Seeds of torch that are set, and a batch of images for each."""
    for seed in range(count):
        torch.manual_seed(seed)
        yield seed, source.batches[seed % len(source.batches)]


def _stem() -> nn.Conv2d:
    return nn.Conv2d(3, _CHANNELS, 3, 2, 1, bias=False)


@torch.no_grad()
def _features_of_stem(conv: nn.Conv2d, batch: Tensor, dtype: torch.dtype) -> StressCase:
    patches = patch_covariance(conv, batch)
    weight = conv.weight.detach().flatten(1).double()
    features = conv(batch).to(dtype).movedim(1, 0).flatten(1)
    values, u = torch.linalg.eigh(patches)
    factor = weight @ u * values.clamp(min=0).sqrt()
    return StressCase(_covariance(features.float()), _covariance(features.double()), factor)


def _covariance(features: Tensor) -> Tensor:
    centered = features - features.mean(1, keepdim=True)
    return centered @ centered.mT / features.shape[1]


def _centered(features: Tensor) -> Tensor:
    """What the covariance is the product of, with its transpose."""
    return (features - features.mean(1, keepdim=True)) / features.shape[1] ** 0.5
