"""Where a training or an evaluation stands, for those who watch it."""

from collections.abc import Callable
from typing import NamedTuple, Protocol


class Progress(NamedTuple):
    """Where something that takes time stands.

    Attributes:
        step: How many steps are done.
        steps: How many there are.
        numbers: The latest numbers by name; None for one that is not known yet.
        stage: What is done, if it is not the training itself.
    """

    step: int
    steps: int
    numbers: dict[str, float | None]
    stage: str = ""


class Stage(Protocol):
    """To be called with the name of a stage, how much of it is done, and of how much."""

    def __call__(self, name: str, done: int = 0, total: int = 1) -> None: ...


def stages(progress: Callable[[Progress], None] | None) -> Stage:
    """A function that tells those who watch, if there are any, which stage of an evaluation has come."""

    def enter(name: str, done: int = 0, total: int = 1) -> None:
        if progress is not None:
            progress(Progress(done, total, {}, name))

    return enter
