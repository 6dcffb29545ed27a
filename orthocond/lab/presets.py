"""What there is to train: configurations, presets and methods of all kinds of experiments, without their networks."""

import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple

from orthocond.lab.classification import config as classification
from orthocond.lab.classification.presets import PRESETS as CLASSIFIERS
from orthocond.lab.config import FIXED, Config, Scale, find_scale, flatten, from_json, option_names, to_json
from orthocond.lab.generation import config as generation
from orthocond.lab.generation.presets import PRESETS as GANS
from orthocond.lab.grammar import Grammar


class ExperimentKind(NamedTuple):
    """A kind of experiment.

    Attributes:
        title: What is trained.
        config: The class of its configurations.
        presets: Its configurations by name and scale.
        grammar: Its methods.
        labeled: Whether its images need classes.
        has_generator: Whether a run has a generator, whose latents can be explored and traversed.
        slow_evaluation: Whether an evaluation can take longer than a short training.
    """

    title: str
    config: type
    presets: Mapping[str, Mapping[Scale, Any]]
    grammar: Grammar
    labeled: bool = False
    has_generator: bool = False
    slow_evaluation: bool = False


KINDS = {
    "classification": ExperimentKind(
        "classifiers", classification.Classification, CLASSIFIERS, classification.GRAMMAR, labeled=True
    ),
    "generation": ExperimentKind(
        "GANs", generation.Generation, GANS, generation.GRAMMAR, has_generator=True, slow_evaluation=True
    ),
}
"""The kinds of experiments; to add one, list it here and its task in `orthocond.lab.experiments`."""


def read_config(values: Mapping[str, Any]) -> Config:
    """The configuration of a run from its JSON.

    Raises:
        TypeError: If a value does not have the type of its setting.
        ValueError: If it is no configuration of an experiment.
    """
    if not isinstance(values, Mapping):
        raise TypeError(f"A configuration needs names with values; got {values!r}.")
    kind = values.get("kind", "classification")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"There is no experiment of the kind {kind!r}. There are: {', '.join(sorted(KINDS))}.")
    config: Config = from_json(KINDS[kind].config, values)
    return config


def has_generator(values: Mapping[str, Any]) -> bool:
    """Whether a run has a generator, by the JSON of its configuration; a run of another program has none."""
    kind = KINDS.get(str(values.get("kind")))
    return kind is not None and kind.has_generator


def names() -> tuple[str, ...]:
    """Names of the presets of all kinds."""
    return tuple(name for kind in KINDS.values() for name in kind.presets)


def preset(name: str, scale: Scale = "laptop") -> Config:
    """The configuration of a preset.

    ``dbn-…`` replaces the batch normalization after the first convolution by a decorrelated one, ``gcp-…`` average
    pooling by covariance pooling; ``eigengan-…`` has a subspace in every layer, and its own orthogonality loss as the
    method; ``gan-…`` is the vanilla GAN. At the scale of the paper the numbers are the paper's and, where it is silent,
    those of its authors' code; at that of a laptop networks, images and steps are small enough for minutes on one core,
    and the code is the same.

    Raises:
        ValueError: If there is no such preset or scale; the text gives the nearest name.

    Example:
        >>> preset("dbn-cifar100-resnet50", "paper").schedule.epochs, preset("gan-celeba", "paper").schedule.steps
        (350, 316400)
        >>> preset("gan-celeb")
        Traceback (most recent call last):
        ValueError: There is no preset 'gan-celeb'. Did you mean 'gan-celeba'? `orthocond list presets` shows all.
    """
    presets = {name: scales for kind in KINDS.values() for name, scales in kind.presets.items()}
    config: Config = find_scale(presets, name, scale)
    return config


def command_of(settings: Mapping[str, Any]) -> str:
    """The command of a training: its preset, method and seed, and the settings that differ from those of the preset.

    Args:
        settings: All settings by their paths; see `flatten`.

    Raises:
        TypeError: If there is no preset of this name and scale.
        ValueError: Likewise.

    Example:
        >>> config = preset("dbn-cifar10-convnet", "laptop")
        >>> command_of(flatten(to_json(config)) | {"method.stem_lr": 0.3, "model.follow": True})
        'orthocond train dbn-cifar10-convnet --method svd --stem-lr 0.3 --model.follow --seed 0'
    """
    name, scale = str(settings.get("preset")), settings.get("scale", "laptop")
    base = flatten(to_json(preset(name, scale)))
    words = ["orthocond", "train", name]
    words += ["--scale", str(scale)] if scale != "laptop" else []
    for path, value in settings.items():
        if path not in FIXED and (path in ("method.name", "seed") or base.get(path) != value):
            words += _option(path, value)
    return " ".join(words)


def _option(path: str, value: Any) -> list[str]:
    option = option_names(path)[-1]
    if isinstance(value, bool):
        branch, _, leaf = path.rpartition(".")
        return [option if value else f"--{branch}.no-{leaf}".replace("_", "-")]
    texts = ["none" if v is None else str(v) for v in (value if isinstance(value, list) else [value])]
    return [option, *map(shlex.quote, texts or ["none"])]
