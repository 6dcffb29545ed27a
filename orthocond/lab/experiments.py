"""The kinds of experiments: what a configuration in a run folder is, how it is trained, and which presets there are."""

from collections.abc import Callable, Mapping
from typing import Any

from orthocond.lab import methods
from orthocond.lab.classification import presets
from orthocond.lab.classification import task as classify
from orthocond.lab.classification.config import Classification, Scale
from orthocond.lab.config import from_json
from orthocond.lab.data.options import nearest
from orthocond.lab.generation import methods as gan_methods
from orthocond.lab.generation import presets as gan_presets
from orthocond.lab.generation import task as generate
from orthocond.lab.generation.config import Generation
from orthocond.lab.progress import Progress
from orthocond.lab.runs import Run

Config = Classification | Generation
EVALUATION = "evaluation.json"  # in a run folder: what `assess` found

_KINDS: dict[str, type[Classification] | type[Generation]] = {
    "classification": Classification,
    "generation": Generation,
}


def read_config(values: Mapping[str, Any]) -> Config:
    """The configuration of a run from its JSON.

    Raises:
        TypeError: If a value does not have the type of its setting.
        ValueError: If it is no configuration of an experiment.
    """
    kind = values.get("kind", "classification")
    if kind not in _KINDS:
        raise ValueError(f"There is no experiment of the kind {kind!r}. There are: {', '.join(_KINDS)}.")
    return from_json(_KINDS[kind], values)


def names() -> tuple[str, ...]:
    """Names of the presets of all kinds."""
    return presets.names() + gan_presets.names()


def preset(name: str, scale: Scale = "laptop") -> Config:
    """The configuration of a preset of any kind; see `presets.preset` and `gan_presets.preset`.

    Raises:
        ValueError: If there is no such preset or scale; the text gives the nearest name.

    Example:
        >>> preset("gan-sprites").kind, preset("dbn-sprites-small").kind
        ('generation', 'classification')
    """
    if name not in names():
        raise ValueError(f"There is no preset {name!r}.{nearest(name, names())} There are: {', '.join(names())}.")
    return gan_presets.preset(name, scale) if name in gan_presets.names() else presets.preset(name, scale)


def method_names(config: Config) -> tuple[str, ...]:
    """The rows of the paper's tables for this kind of experiment."""
    return gan_methods.NAMES if isinstance(config, Generation) else methods.NAMES


def train(
    config: Config,
    run: Run,
    *,
    root: str | None = None,
    progress: Callable[[Progress], None] | None = None,
    tracker: str | None = None,
) -> int:
    """Train what a configuration asks for; see `classify.train` and `generate.train`."""
    if isinstance(config, Generation):
        return generate.train(config, run, root=root, progress=progress, tracker=tracker)
    return classify.train(config, run, root=root, progress=progress, tracker=tracker)


def assess(config: Config, run: Run, *, root: str | None = None) -> dict[str, Any]:
    """Measure what a training has reached; see `assess.assess` and `gan_evaluate.evaluate`."""
    if isinstance(config, Generation):
        from orthocond.lab.generation import evaluate as gan_evaluate

        return gan_evaluate.evaluate(run, root=root)
    from orthocond.lab.classification import evaluate as of_classifier  # it needs this module

    return of_classifier.assess(run, root=root)
