"""What every reader is asked for, and the errors that all of them share."""

from collections.abc import Iterable
from dataclasses import dataclass

from orthocond.lab.text import nearest

SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
"""Every spelling of the names of parts."""


class MissingSplitError(ValueError):
    """A split that the data does not have; the message lists those that it has."""


@dataclass(frozen=True)
class Options:
    """The arguments of `load`."""

    split: str | None = None
    size: int | None = None
    limit: int | None = None
    in_memory: bool | None = None


def choose_split(asked: str | None, available: Iterable[str], source: object) -> str:
    """The part to read: the one asked for, else ``train``, else the only one.

    Raises:
        MissingSplitError: If it does not exist; the message lists those that do.
    """
    names = list(available)
    if asked is None:
        if "train" in names or len(names) == 1:
            return "train" if "train" in names else names[0]
        raise MissingSplitError(f"{source} has the splits {', '.join(names)}; choose one with split=...")
    for name in names:
        if SPLITS.get(asked, asked) == SPLITS.get(name, name):
            return name
    if names == ["all"]:
        raise MissingSplitError(
            f"{source} is not divided into splits; got split={asked!r}. "
            "Leave out split=..., and divide what is loaded with .split_off(0.1)."
        )
    raise MissingSplitError(
        f"{source} has no split {asked!r}; it has {', '.join(names)}.{nearest(asked, names)} "
        "Without a validation split, divide the training images with .split_off(0.1)."
    )
