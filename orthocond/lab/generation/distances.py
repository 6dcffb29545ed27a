"""How far generated images are from real ones: Fréchet and kernel distance, beside those of real images to others."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from orthocond.lab.config import config_hash
from orthocond.lab.data import Pipeline
from orthocond.lab.data.images import center_crop
from orthocond.lab.generation.config import Generation
from orthocond.lab.generation.data import load_images
from orthocond.lab.runs.files import write_atomically
from orthocond.metrics import FeatureMoments, FrechetDistance, InceptionExtractor, frechet_distance, kernel_distance
from orthocond.metrics.frechet import short_count

Extractor = Callable[[Tensor], Tensor]
_BATCH = 100


class Asked(NamedTuple):
    """A distance that is asked for.

    Attributes:
        extractor: From images to features.
        images: How many generated ones, and at most how many real ones.
    """

    extractor: Extractor
    images: int

    @property
    def name(self) -> str:
        """The name of the features."""
        return FrechetDistance(self.extractor).name

    @property
    def protocol(self) -> str:
        """The name of the measurement, such as ``fd2k-alexnet``."""
        kind = "fid" if isinstance(self.extractor, InceptionExtractor) else "fd"
        return f"{kind}{short_count(self.images)}-{self.name}"


class Reference(NamedTuple):
    """What real images give.

    Attributes:
        features: Features of as many of them as there are generated ones, or of all.
        floor: Fréchet and kernel distance between two disjoint sets of them.
        images: How many each of those two sets has.
    """

    features: Tensor
    floor: tuple[float, float]
    images: int


def references(
    asked: Mapping[str, Asked], config: Generation, root: str | None, folder: Path, enter: Callable[[str], None]
) -> dict[str, Reference]:
    """The features of real images, from files in a folder; those that are missing are made.

    Args:
        asked: The distances by name.
        config: The configuration, whose data they are of. Settings of the data are in the name of a file.
        root: Folder of data sets.
        folder: Folder of the files.
        enter: Called with the name of the stage if there is something to make.

    Raises:
        FileNotFoundError: If the images are needed and not there.
        ValueError: If a file is damaged, or there are fewer than four real images.
    """
    of_data = config_hash(config.data, without=("flip",))
    files = {key: folder / f"features-{of_data}-{one.name}-{one.images}.safetensors" for key, one in asked.items()}
    missing = {key: one for key, one in asked.items() if not files[key].is_file()}
    found = {key: _load(files[key]) for key in asked.keys() - missing.keys()}
    if missing:
        enter("features of the training images")
        for key, features in _real_features(missing, config, root).items():
            found[key] = _reference(features, missing[key].images)
            _save(found[key], files[key])
    return found


def _real_features(asked: Mapping[str, Asked], config: Generation, root: str | None) -> dict[str, Tensor]:
    """Features of twice as many real images as are asked for, the same for all seeds."""
    data = load_images(config.data, root)
    most = min(2 * max(one.images for one in asked.values()), len(data))
    parts: dict[str, list[Tensor]] = {key: [] for key in asked}
    seen = 0
    for batch in Pipeline(data=data.sample(most), batch_size=_BATCH, train=False).batches():
        images = center_crop(batch.images, config.data.size)
        for key, one in asked.items():
            if seen < 2 * one.images:
                parts[key].append(one.extractor(images[: 2 * one.images - seen]).cpu())
        seen += len(images)
    if seen < 4:
        raise ValueError(f"The distance to real images needs at least four of them; {config.data.source} has {seen}.")
    return {key: torch.cat(found) for key, found in parts.items()}


def _reference(features: Tensor, images: int) -> Reference:
    first, second = features[::2], features[1::2]
    first = first[: len(second)]
    return Reference(torch.cat([features[::2], second])[:images], _distances(first, second), len(second))


def _distances(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Fréchet and kernel distance of features."""
    one, two = FeatureMoments.of(a), FeatureMoments.of(b)
    return frechet_distance(one.mean, one.covariance, two.mean, two.covariance), kernel_distance(a, b)


def _save(reference: Reference, path: Path) -> None:
    from safetensors.torch import save

    floor = torch.tensor([*reference.floor, float(reference.images)], dtype=torch.float64)
    write_atomically(path, save({"features": reference.features.contiguous(), "floor": floor}))


def _load(path: Path) -> Reference:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(path.read_bytes())
        frechet, kernel, images = tensors["floor"].tolist()
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}); delete it, and it will be made again.") from error
    return Reference(tensors["features"], (frechet, kernel), int(images))


def distance(one: Asked, features: Tensor, reference: Reference) -> dict[str, Any]:
    """What is written about generated images with these features."""
    frechet, kernel = _distances(reference.features, features)
    return {
        "protocol": one.protocol,
        "value": frechet,
        "kernel": kernel,
        "real": len(reference.features),
        "floor": {"value": reference.floor[0], "kernel": reference.floor[1], "images": reference.images},
    }
