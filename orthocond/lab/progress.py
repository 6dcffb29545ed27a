"""Where a training stands, for those who watch it."""

from typing import NamedTuple


class Progress(NamedTuple):
    """The step of a training, of how many, and its latest numbers by name; None for one that is not known yet."""

    step: int
    steps: int
    numbers: dict[str, float | None]
