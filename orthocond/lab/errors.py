"""The message for the user when something goes wrong, and its exit code: one message, no traceback."""

import re

from orthocond.lab.factories import FactoryError, FactoryKindError, NotAllowedError
from orthocond.lab.text import printable

# What the lab needs beyond torch: a missing one has one remedy.
_EXTRAS = (
    *("accelerate", "altair", "cyclopts", "datasets", "jinja2", "matplotlib", "numpy", "PIL"),
    *("pooch", "pydantic", "rich", "safetensors", "scipy", "submitit", "tensorboard", "vl_convert"),
)
EXPECTED = (
    *(FloatingPointError, ModuleNotFoundError, MemoryError, KeyboardInterrupt),
    *(OSError, ValueError, TypeError, RuntimeError, ImportError, OverflowError, RecursionError),
)
"""The errors that have a message for people; any other is a bug and keeps its traceback."""


class UsageError(ValueError):
    """What was typed is not valid; the text says what is."""


def explain(error: BaseException) -> tuple[str, int]:
    """A message for people, and an exit code.

    Args:
        error: One of `EXPECTED`.

    Returns:
        The message, and 1 for data that is missing or broken, a full disk or a missing package, 2 for a value that is
        not valid, 3 for a training that diverged, 130 for Ctrl-C.

    Example:
        >>> explain(UsageError("There is no run 7.")), explain(KeyboardInterrupt())
        (('There is no run 7.', 2), ('Stopped.', 130))
    """
    if isinstance(error, KeyboardInterrupt):
        return "Stopped.", 130
    text = printable(re.sub(r"^\[Errno \d+\] ", "", str(error).strip()) or type(error).__name__)
    if isinstance(error, (UsageError, NotAllowedError, FactoryError, FactoryKindError)):
        return text, 2
    if isinstance(error, FloatingPointError):
        return text, 3
    if isinstance(error, MemoryError) or "not enough memory" in text or "DefaultCPUAllocator" in text:
        return f"There is not enough memory: {text}. Use a smaller batch, smaller images or a smaller network.", 1
    if isinstance(error, ModuleNotFoundError) and (name := (error.name or "").partition(".")[0]) in _EXTRAS:
        return f'{name} is not installed: pip install "orthocond[lab]"', 1
    return text, 1
