"""Names of a package that are imported when they are first asked for, so that the package itself costs nothing."""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package whose names are imported on demand.

    For those who read, and for type checkers, the package has the same imports below ``if TYPE_CHECKING``.

    Args:
        package: Its name.
        homes: Its modules, which can be asked for too, with the names that come from each. No name may be that of a
            module: Python would put the module in its place.

    Example:
        >>> get = lazy("xml", {"dom": (), "sax": ("parse",)})
        >>> get("parse").__module__, get("dom").__name__
        ('xml.sax', 'xml.dom')
        >>> get("purse")
        Traceback (most recent call last):
        AttributeError: module 'xml' has no attribute 'purse'
    """
    places = {name: home for home, names in homes.items() for name in names}

    def find(name: str) -> Any:
        if name in homes:
            return import_module(f"{package}.{name}")
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{places[name]}"), name)
        setattr(sys.modules[package], name, value)  # from now on without this function
        return value

    return find
