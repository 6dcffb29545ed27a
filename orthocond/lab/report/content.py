"""The parts of a page: what the template sets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a6fd1", "#8c8c00")
DASHES = ((), (6, 3), (2, 2))


@dataclass(frozen=True)
class Grid:
    """A table of texts.

    Attributes:
        head: The names of the columns.
        rows: The rows; the first cell of each names it.
        title: What it shows; empty for none.
        note: What a reader has to know.
        folded: Whether it is closed until somebody opens it.
        strong: Places of rows that stand out.
        words: Whether its cells are words, which stand on the left.
        texts: Places of columns of words, which stand on the left and may have several lines.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    note: str = ""
    folded: bool = False
    strong: frozenset[int] = frozenset()
    words: bool = False
    texts: frozenset[int] = frozenset()
    kind = "grid"


@dataclass(frozen=True)
class Chart:
    """A chart of Vega-Lite.

    Attributes:
        title: What it shows.
        text: The same in a sentence, for those who do not see it.
        spec: The specification.
        values: Its values as a table.
        wide: Whether it takes the whole width.
    """

    title: str
    text: str
    spec: Mapping[str, Any]
    values: Grid | None = None
    wide: bool = False
    kind = "chart"


@dataclass(frozen=True)
class Picture:
    """A picture.

    Attributes:
        data: The bytes of a PNG file.
        caption: What is under it.
        alt: What is told to those who do not see it.
        wide: Whether it takes the whole width.
    """

    data: bytes
    caption: str
    alt: str
    wide: bool = False
    kind = "picture"


@dataclass(frozen=True)
class Code:
    """A command or lines of code to copy.

    Attributes:
        text: What to do with it.
        code: The code; empty for a sentence alone.
        link: Address of a file beside the report, instead of code.
    """

    text: str
    code: str = ""
    link: str = ""
    kind = "code"


@dataclass(frozen=True)
class Items:
    """A list of sentences.

    Attributes:
        items: The sentences.
        title: What they are about.
        folded: Whether the list is closed until somebody opens it.
        plain: Whether they are lines of a file, which are set as they are.
    """

    items: Sequence[str]
    title: str = ""
    folded: bool = False
    plain: bool = False
    kind = "items"


@dataclass(frozen=True)
class Legend:
    """The lines of the charts of a section, to be switched on and off.

    Attributes:
        names: Their names, in the order of the colors.
        points: The number of values of the longest line, on which it depends whether smoothing is offered.
    """

    names: Sequence[str]
    points: int = 0
    kind = "legend"

    @property
    def lines(self) -> list[tuple[str, str, str]]:
        """Name, color and dashes of each."""
        return [(name, *(color(i), " ".join(map(str, dashes(i))))) for i, name in enumerate(self.names)]


Block = Grid | Chart | Picture | Code | Items | Legend


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading."""

    title: str
    blocks: Sequence[Block]
    text: str = ""


@dataclass(frozen=True)
class Page:
    """A report.

    Attributes:
        title: The heading.
        text: What it is about, in a sentence.
        verdict: Three sentences that say what came out.
        steps: What to do next.
        sections: The rest; those without blocks are left out.
    """

    title: str
    text: str
    verdict: Sequence[str]
    steps: Sequence[Code]
    sections: Sequence[Section] = field(default_factory=list)


def color(place: int) -> str:
    """The color of a line; colors that the color-blind tell apart, on white and on black."""
    return PALETTE[place % len(PALETTE)]


def dashes(place: int) -> tuple[int, ...]:
    """The dashes of a line; they differ where colors repeat."""
    return DASHES[place // len(PALETTE) % len(DASHES)]
