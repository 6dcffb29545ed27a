"""Words for people: names that are near to what was typed, and text of unknown origin, fit to be printed."""

import difflib
import unicodedata
from collections.abc import Iterable

_HIDDEN = ("Cc", "Cf", "Cs", "Cn")  # control, format (directions, zero width), half of a pair, not assigned


def printable(text: object) -> str:
    r"""The text with terminal codes and invisible characters escaped; ends of lines and tabs stay.

    A file name can hold codes that clear the screen, change its title or turn the direction of writing. Everything that
    names files of others passes through here before it is printed.

    Args:
        text: A text, or anything with one, for example a path or an error.

    Returns:
        The text, with escapes as Python writes them.

    Example:
        >>> printable("cat\x1b[2J.png")
        'cat\\x1b[2J.png'
        >>> printable("Größe 3×3\n")
        'Größe 3×3\n'
    """
    return "".join(_escaped(c) if c not in "\n\t" and unicodedata.category(c) in _HIDDEN else c for c in str(text))


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def nearest(word: str, choices: Iterable[str]) -> str:
    """``" Did you mean 'cifar100'?"``, or nothing if no choice is near."""
    found = difflib.get_close_matches(word, list(choices), 1, 0.5)
    return f" Did you mean {found[0]!r}?" if found else ""
