"""Words for people: names that are near to what was typed, and text of unknown origin, fit to be printed."""

import difflib
import unicodedata
from collections.abc import Iterable
from itertools import takewhile

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
    """A question for the name that was meant, or nothing if no choice is near; one with the same beginning goes first.

    Example:
        >>> nearest("dbn-sprite", ["gan-sprites", "dbn-sprites-small"]), nearest("sprites", ["lfw"])
        (" Did you mean 'dbn-sprites-small'?", '')
    """
    likeness = {}
    for choice in choices:
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(word, choice, strict=False)))
        ratio = difflib.SequenceMatcher(None, choice, word).ratio()
        if ratio >= 0.5 or same == len(word) > 0:
            likeness[choice] = ratio + same / max(len(word), 1)
    return f" Did you mean {max(likeness, key=likeness.__getitem__)!r}?" if likeness else ""
