"""What is printed, on any terminal: tables for people, and letters that the terminal's encoding does not have."""

import codecs
import sys
from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

_SPELLED = {
    "κ": "kappa",
    "ε": "eps",
    "η": "eta",
    "λ": "lambda",
    "σ": "sigma",
    "Σ": "Sigma",
    "é": "e",
    "É": "E",
    "−": "-",
    "–": "-",
    "—": "-",
    "×": "x",
    "±": "+-",
    "→": "->",
    "…": "...",
    "∞": "inf",
    "·": "*",
    "▲": "^",
    "▼": "v",
    "↑": "(up)",
    "↓": "(down)",
    "²": "2",
    "ᵀ": "T",
    "’": "'",
    "≤": "<=",
    "≥": ">=",
}


def speak_any_encoding() -> None:
    """Let standard output and error spell letters out that their encoding does not have, instead of failing."""
    codecs.register_error("orthocond", _spell)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="orthocond")


def _spell(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_SPELLED.get(letter, "?") for letter in error.object[error.start : error.end]), error.end


def make_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> Table:
    """A table without lines, whose first column does not wrap."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for place, column in enumerate(header):
        table.add_column(column, no_wrap=place == 0, style="cyan" if place == 0 else None)
    for row in rows:
        table.add_row(*row)
    return table
