"""From a path to a file: one page with style, script, Vega, pictures and numbers inside."""

import base64
import json
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert
from jinja2 import Environment
from markupsafe import Markup, escape

import orthocond
from orthocond.lab.report.content import Chart, Page, Section
from orthocond.lab.report.sources import TABLE, WrittenTable, read
from orthocond.lab.report.tabled import table_page
from orthocond.lab.report.trainings import trainings_page
from orthocond.lab.runs.files import write_atomically
from orthocond.lab.runs.folder import CONFIG

NAME = "report.html"
_STATIC = files("orthocond.lab.report") / "static"


def write_report(
    *paths: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    title: str = "",
    opening: Section | None = None,
    leave_out: Collection[str] = (),
) -> Path:
    """Write one HTML file that tells what a run, several runs or a table have found.

    The file needs neither network nor server, and nothing else is written. The same folders give the same bytes.

    Args:
        paths: Run folders and folders of runs, or the folder of one table.
        out: The file; ``report.html`` in the folder if there is one path, else in the current folder.
        title: The heading, if it is to be another one.
        opening: A section before the others, for what only the caller knows.
        leave_out: Logged quantities of trainings that are not shown, by their names in the metrics.

    Returns:
        The file.

    Raises:
        ValueError: If there is no run and no table at a path, or a file is damaged; the text says what is needed.
        OSError: If the file cannot be written; one that was there stays as it was.
    """
    if not paths:
        raise ValueError("A report needs at least one run, folder of runs or table.")
    sources = [Path(path) for path in paths]
    if out is None:
        first = sources[0].parent if sources[0].name in (TABLE, CONFIG) else sources[0]
        out = first / NAME if len(sources) == 1 else Path(NAME)
    found = read(sources)
    file = Path(out)
    if isinstance(found, WrittenTable):
        page = _table_page(found)
    else:
        page = trainings_page([training.without(leave_out) for training in found], file)
    sections = page.sections if opening is None else [opening, *page.sections]
    write_atomically(file, render(replace(page, title=title or page.title, sections=sections)).encode())
    return file


def _table_page(table: WrittenTable) -> Page:
    try:
        return table_page(table)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{table.folder / TABLE} is damaged ({error!r}); make the table again.") from error


def render(page: Page) -> str:
    """The page as HTML."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"prose": _prose, "words": _words, "base64": _base64}
    template = environment.from_string(_static("report.html"))
    sections = [section for section in page.sections if section.blocks]
    charts = [block for section in sections for block in section.blocks if isinstance(block, Chart)]
    return template.render(
        page=page,
        sections=sections,
        place_of=lambda chart: next(place for place, other in enumerate(charts) if other is chart),
        specs=_script_safe([chart.spec for chart in charts]),
        style=Markup(_static("report.css")),
        script=Markup(_static("report.js")),
        vega=Markup(_vega()) if charts else "",
        version=orthocond.__version__,
    )


def _static(name: str) -> str:
    return (_STATIC / name).read_text(encoding="utf-8")


@cache
def _vega() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script."""
    version = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=version).replace(
        "</script", "<\\/script"
    )


def _script_safe(values: Sequence[Any]) -> Markup:
    """JSON that does not end the element it stands in."""
    text = json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))


def _words(code: str) -> Markup:
    """Code whose lines break between words alone: a browser would part ``--method`` after its hyphens.

    Example:
        >>> _words("train --seed <n>")
        Markup('<span>train</span> <span>--seed</span> <span>&lt;n&gt;</span>')
    """
    return Markup(re.sub(r"\S+", r"<span>\g<0></span>", str(escape(code))))


def _prose(text: object) -> Markup:
    """Text with words in back-ticks set as code, and those in pairs of stars as strong.

    Example:
        >>> _prose("Type `a < b`, **now**")
        Markup('Type <code>a &lt; b</code>, <strong>now</strong>')
    """
    coded = re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text)))
    return Markup(re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", coded))


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
