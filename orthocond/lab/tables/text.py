"""A comparison as Markdown for people, CSV for spreadsheets, and JSON with every number of every seed."""

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orthocond.lab.runs.files import write_atomically
from orthocond.lab.runs.metrics import json_safe

_NONE = "–"
_FEW = 2  # measures, above which a table of all of them comes first


def write_text(content: dict[str, Any], folder: Path) -> None:
    """Write table.json, table.csv and table.md of a comparison.

    Args:
        content: What `Comparison.write` collects.
        folder: The folder.

    Raises:
        OSError: If the disk is full or read-only.
    """
    write_json(content, folder / "table.json")
    write_atomically(folder / "table.csv", _csv(content).encode())
    write_atomically(folder / "table.md", _markdown(content).encode())


def write_json(content: dict[str, Any], path: Path) -> None:
    """Write JSON that people can read; NaN and infinity are texts."""
    write_atomically(path, (json.dumps(json_safe(content, path.stem), indent=1, ensure_ascii=False) + "\n").encode())


def grid(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown: the first column is text, the others are numbers.

    Example:
        >>> print(grid(["method", "error"], [["SVD", "19.99"]]))
        | method | error |
        |---|---:|
        | SVD | 19.99 |
    """
    ruler = "|---|" + "---:|" * (len(head) - 1)
    first, *rest = ("| " + " | ".join(line) + " |" for line in (head, *rows))
    return "\n".join([first, ruler, *rest])


def number(value: float | None, digits: int = 2, *, sign: bool = False) -> str:
    """A number with a fixed number of digits and a real minus; a dash for none.

    Example:
        >>> number(-0.5), number(0.5, 1, sign=True), number(None)
        ('−0.50', '+0.5', '–')
    """
    if value is None:
        return _NONE
    text = f"{value:{'+' if sign else ''}.{digits}f}"
    return text.replace("-", "−")


def power(value: float | None) -> str:
    """A positive number with two digits, as powers of ten if it is large.

    Example:
        >>> power(7812.0), power(12.3), power(float("inf"))
        ('7.8e3', '12', '∞')
    """
    if value is None:
        return _NONE
    if math.isinf(value):
        return "∞"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{value:.2g}" if -2 <= int(exponent) < 2 else f"{mantissa}e{int(exponent)}"


def interval(found: dict[str, Any] | None, *, factor: bool = False, digits: int = 2) -> str:
    """A difference with its interval; a factor, if asked for.

    Example:
        >>> interval({"mean": -0.5, "low": -1.0, "high": 0.0})
        '−0.50 [−1.00, +0.00]'
    """
    if found is None:
        return _NONE
    low, center, high = (
        power(found[k]) if factor else number(found[k], digits, sign=True) for k in ("low", "mean", "high")
    )
    ends = "" if found["low"] is None else f" [{low}, {high}]"
    return ("×" if factor else "") + center + ends


def spread(cell: dict[str, Any] | None, digits: int = 2) -> str:
    """Mean and standard deviation."""
    if cell is None or cell["mean"] is None:
        return _NONE
    return number(cell["mean"], digits) + ("" if cell["std"] is None else f" ± {number(cell['std'], digits)}")


def lowered(title: str) -> str:
    """A title within a sentence; abbreviations and Fréchet's name stay.

    Example:
        >>> lowered("Test error"), lowered("DCI disentanglement"), lowered("Fréchet distance")
        ('test error', 'DCI disentanglement', 'Fréchet distance')
    """
    return title if title[:2].isupper() or title.startswith("Fréchet") else title[0].lower() + title[1:]


def p_value(value: float | None) -> str:
    """A p-value with three digits."""
    return _NONE if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"


def trained(experiment: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows with a training that has ended, if only because its loss was not finite."""
    return [row for row in experiment["rows"] if row["seeds"] or row["stopped"]]


def untrained(experiment: Mapping[str, Any]) -> str:
    """Which rows have no training yet; empty if all have one."""
    known = trained(experiment)
    names = [row["label"] for row in experiment["rows"] if row not in known]
    if not known:
        return "Not trained yet."
    return f"Not trained yet: {', '.join(names)}." if names else ""


def _fact(cell: dict[str, Any], style: str) -> str:
    if cell["mean"] is None:
        return _NONE
    if style == "log":
        return power(cell["mean"])
    if style == "percent":
        return f"{100 * cell['mean']:.0f} %"
    if style == "milliseconds":
        return f"{1000 * cell['mean']:.0f}"
    if 0 < cell["mean"] < 0.1:
        return f"{cell['mean']:.2g}"
    return f"{cell['mean']:.1f}".removesuffix(".0")


def _markdown(content: dict[str, Any]) -> str:
    base = next(
        (r["label"] for e in content["experiments"] for r in e["rows"] if r["method"]["name"] == content["baseline"]),
        content["baseline"],
    )
    known = [(experiment, trained(experiment)) for experiment in content["experiments"]]
    parts = [f"# {content['title']}", content["text"]]
    parts += [f"{experiment['label']}: {lowered(untrained(experiment))}" for experiment, rows in known if not rows]
    for experiment, rows in known:
        if rows:
            parts += [f"## {experiment['label']}", untrained(experiment), *_grids(content, rows, base)]
    parts += [f"![{name}]({name}.png)" for name in content["figures"]]
    parts.append("## Notes")
    parts.append("\n".join(f"- {note}" for note in content["notes"]))
    return "\n\n".join(filter(None, parts)) + "\n"


def _grids(content: dict[str, Any], known: list[dict[str, Any]], base: str) -> list[str]:
    """All measures beside one another if they are many, then each by itself, then the facts."""
    overview = [_overview(content, known)] if len(content["measures"]) > _FEW else []
    measures = [_measure_grid(content, known, measure, base) for measure in content["measures"]]
    return [*overview, *measures, _fact_grid(content, known, base)]


def _overview(content: dict[str, Any], known: list[dict[str, Any]]) -> str:
    """All measures of ours beside one another, with a mark where the difference to the baseline is significant."""
    measures = content["measures"]
    marks = {"better": " ▲", "worse": " ▼"}
    rows = []
    for row in known:
        cells = [row["measures"][measure["name"]] for measure in measures]
        verdicts = [(cell.get("difference") or {}).get("verdict", "") for cell in cells]
        rows.append([row["label"], *(spread(c) + marks.get(v, "") for c, v in zip(cells, verdicts, strict=True))])
    head = [f"{measure['title']} {'↑' if measure['higher'] else '↓'}" for measure in measures]
    return grid(["ours; ▲ significantly better, ▼ worse", *head], rows)


def _measure_grid(content: dict[str, Any], known: list[dict[str, Any]], measure: dict[str, Any], base: str) -> str:
    best = "max" if measure["higher"] else "min"
    head = [
        measure["title"],
        "paper",
        f"paper, {best}",
        "ours",
        f"ours, {best}",
        "seeds",
        f"paper − {base} [95 %]",
        f"ours − {base} [95 %]",
        "p (Holm)",
        "p (sign flips)",
        "significant?",
    ]
    rows = []
    for row in known:
        cell = row["measures"][measure["name"]]
        found = cell.get("difference") or {}
        rows.append(
            [
                row["label"],
                spread(cell["paper"]),
                number(cell["paper"]["best"]) if cell["paper"] else _NONE,
                spread(cell),
                number(cell["best"]),
                seeds_of(row, cell, content["seeds"]),
                interval(cell.get("paper_difference")),
                interval(found or None),
                p_value(found.get("p_holm")),
                p_value(found.get("p_exact")),
                "baseline" if row["method"]["name"] == content["baseline"] else found.get("verdict", _NONE),
            ]
        )
    return grid(head, rows)


def seeds_of(row: Mapping[str, Any], cell: Mapping[str, Any], asked: int) -> str:
    """How many trainings of a row have a measure, and how many were stopped."""
    count = sum(value is not None for value in cell["values"])
    parts = [str(count) if count == asked else f"{count} of {asked}"]
    if row["stopped"]:
        parts.append(f"{len(row['stopped'])} stopped")
    return ", ".join(parts)


def _fact_grid(content: dict[str, Any], known: list[dict[str, Any]], base: str) -> str:
    columns: list[tuple[str, list[str]]] = []
    for fact in content["facts"]:
        cells = [row["facts"][fact["key"]] for row in known]
        if any(cell["paper"] is not None for cell in cells):
            texts = [_NONE if cell["paper"] is None else str(cell["paper"]) for cell in cells]
            columns.append((f"paper: {fact['paper_title'] or fact['title']}", texts))
        if any(cell["mean"] is not None for cell in cells):
            columns.append((fact["title"], [_fact(cell, fact["style"]) for cell in cells]))
        if any(cell.get("ratio") for cell in cells):
            columns.append((f"… / {base} [95 %]", [interval(cell.get("ratio"), factor=True) for cell in cells]))
    labels = [row["label"] for row in known]
    lines = [[name, *(texts[i] for _, texts in columns)] for i, name in enumerate(labels)]
    return grid(["Conditioning and cost", *(title for title, _ in columns)], lines) if columns else ""


def _csv(content: dict[str, Any]) -> str:
    """A line for each row of each experiment, numbers in full."""
    lines: list[dict[str, Any]] = []
    for experiment in content["experiments"]:
        for row in experiment["rows"]:
            line: dict[str, Any] = {
                "experiment": experiment["label"],
                "preset": experiment["preset"],
                "scale": content["scale"],
                "method": row["method"]["name"],
                "label": row["label"],
                "seeds": len(row["seeds"]),
                "stopped": len(row["stopped"]),
                "missing": len(row["missing"]),
            }
            for name, cell in row["measures"].items():
                line |= {f"{name}_{key}": cell[key] for key in ("mean", "std", "best")}
                line |= {f"{name}_paper_{key}": (cell["paper"] or {}).get(key) for key in ("mean", "std", "best")}
                found, theirs = cell.get("difference") or {}, cell.get("paper_difference") or {}
                tests = ("p", "p_holm", "p_exact", "verdict")
                line |= {f"{name}_difference_{key}": found.get(key) for key in ("mean", "low", "high", *tests)}
                line |= {f"{name}_paper_difference_{key}": theirs.get(key) for key in ("mean", "low", "high")}
            for name, cell in row["facts"].items():
                line |= {name: cell["mean"], f"{name}_low": cell["low"], f"{name}_high": cell["high"]}
                line[f"{name}_paper"] = cell["paper"]
            lines.append(line)
    return to_csv(lines)


def to_csv(lines: Sequence[Mapping[str, Any]]) -> str:
    """Lines with the same keys as CSV, numbers in full."""
    file = io.StringIO()
    writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return file.getvalue()
