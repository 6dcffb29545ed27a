"""Small HTML for notebooks: self-contained, escaped, readable on light and dark backgrounds."""

from collections.abc import Collection, Sequence
from html import escape


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> str:
    """An HTML table of text; the columns in ``right`` are numbers."""
    style = [f"text-align: {'right' if i in right else 'left'}; padding: 2px 10px" for i in range(len(header))]
    head = _row("th", header, style)
    body = "".join(_row("td", cells, style) for cells in rows)
    return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"


def paragraph(text: str) -> str:
    """A paragraph in which indented lines are code."""
    lines = text.split("\n")
    code = '<pre style="font-family: monospace">'  # notebooks show a plain <pre> like the text around it
    parts = [f"{code}{escape(line.strip())}</pre>" if line.startswith("    ") else escape(line) for line in lines]
    return f"<div>{'<br>'.join(parts).replace(f'<br>{code}', code).replace('</pre><br>', '</pre>')}</div>"


def _row(tag: str, cells: Sequence[str], style: Sequence[str]) -> str:
    pairs = zip(cells, style, strict=True)
    return "<tr>" + "".join(f'<{tag} style="{s}">{escape(cell)}</{tag}>' for cell, s in pairs) + "</tr>"
