"""The kinds of experiments: what a configuration in a run folder is, and how it is trained."""

from collections.abc import Callable, Mapping
from typing import Any

from orthocond.lab import classify
from orthocond.lab.config import from_json
from orthocond.lab.presets import Classification
from orthocond.lab.progress import Progress
from orthocond.lab.runs import Run

Config = Classification


def read_config(values: Mapping[str, Any]) -> Config:
    """The configuration of a run from its JSON.

    Raises:
        TypeError: If a value does not have the type of its setting.
        ValueError: If it is no configuration of an experiment.
    """
    return from_json(Classification, values)


def train(
    config: Config,
    run: Run,
    *,
    root: str | None = None,
    progress: Callable[[Progress], None] | None = None,
    tracker: str | None = None,
) -> int:
    """Train what a configuration asks for; see `classify.train`."""
    return classify.train(config, run, root=root, progress=progress, tracker=tracker)
