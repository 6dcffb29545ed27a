"""Networks that users name by ``package.module:function``: imported and called only if they were asked for."""

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from orthocond.lab.text import nearest


class NotAllowedError(ValueError):
    """A run folder names code that nobody has asked for."""


class FactoryError(ValueError):
    """A user's function is not there, or its network lacks a layer; the text says what is needed."""


class FactoryKindError(TypeError):
    """A user's function cannot be called as it is, or returns something else; the text says what is needed."""


def is_factory(name: str) -> bool:
    """Whether the name of a network is that of a user's function."""
    return ":" in name


def check_network(name: str, known: Sequence[str], what: str) -> str:
    """The name of a network, if it is known or that of a user's function.

    Args:
        name: The name.
        known: The names that are known.
        what: What they are names of.

    Raises:
        ValueError: If there is none; the text gives the nearest name.
    """
    if not is_factory(name) and name not in known:
        raise ValueError(
            f"There is no {what} {name!r}.{nearest(name, known)} There are: {', '.join(known)}, and "
            "package.module:function of your own."
        )
    return name


def check_import(name: str, allowed: str | None, where: Path) -> None:
    """Refuse to import a function that a run folder names and the user does not.

    A run folder may come from somebody else, and importing a module runs it.

    Args:
        name: The name of the network in the run's configuration.
        allowed: The function that the user has named.
        where: The run folder.

    Raises:
        NotAllowedError: If the name is that of a function which was not allowed.
    """
    if is_factory(name) and name != allowed:
        raise NotAllowedError(
            f"{where} has a network of its own: {name} would be imported and called. If you trust it, allow that: "
            f"--allow-import {name}"
        )


def load_factory(name: str) -> Callable[..., Any]:
    """The function that ``package.module:function`` names; the current directory is searched too.

    Raises:
        FactoryError: If there is none.
    """
    module, _, function = name.partition(":")
    if str(Path.cwd()) not in sys.path:  # a script of an environment does not have it, ``python -m`` does
        sys.path.insert(0, str(Path.cwd()))
    try:
        content = importlib.import_module(module)
    except (ImportError, ValueError) as error:
        raise FactoryError(
            f"{name}: there is no module {module} ({error}). Pass package.module:function of a module "
            "that Python finds, for example one in the current directory."
        ) from error
    if not hasattr(content, function):
        functions = [key for key, value in vars(content).items() if callable(value)]
        raise FactoryError(f"{name}: {module} has no {function}.{nearest(function, functions)}")
    found: Callable[..., Any] = getattr(content, function)
    if not callable(found):
        raise FactoryError(f"{name}: {function} of {module} is not a function.")
    return found


def call_factory(name: str, argument: int, what: str) -> Any:
    """What the function that ``package.module:function`` names returns for a number.

    Args:
        name: The function.
        argument: The number.
        what: What the number is.

    Raises:
        FactoryError: If there is no such function, or it fails.
        FactoryKindError: If it cannot be called with one argument.
    """
    function = load_factory(name)
    try:
        with contextlib.suppress(ValueError):  # some functions of C have no signature
            inspect.signature(function).bind(argument)
    except TypeError as error:
        raise FactoryKindError(f"{name} has to be a function of one argument, {what}: {error}.") from error
    try:
        return function(argument)
    except Exception as error:
        raise FactoryError(
            f"{name} failed for {argument}, {what}: {type(error).__name__}: {error}. --debug shows where."
        ) from error
