"""How large the house is: `python docs/code_size.py` counts the code of this tree and writes the page.

`python docs/code_size.py COMMIT` counts a commit instead, and only prints.
"""

import ast
import io
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = Path(__file__).parent / "architecture.md"
BEGIN, END = "<!-- code size: begin -->", "<!-- code size: end -->"
BEFORE = "0fc4584"  # the last commit before the lab became one experiment with two tasks
_PAGES = ("lab/report", "lab/explorer")


def lines_of_code(path: Path) -> int:
    """Lines with code: neither empty, nor a comment, nor a docstring."""
    text = path.read_text()
    lines = {n for n, line in enumerate(text.split("\n"), 1) if line.strip() and not line.lstrip().startswith("#")}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def sizes(root: Path) -> dict[str, int]:
    """Lines of code by floor, and all lines of the source."""
    found = dict.fromkeys(("library", "lab without pages", "report and explorer", "command line", "tests", "source"), 0)
    for path in (root / "orthocond").rglob("*.py"):
        place = path.relative_to(root / "orthocond").as_posix()
        floor = "library"
        if place.startswith("lab/"):
            floor = "report and explorer" if place.startswith(_PAGES) else "lab without pages"
        elif place.startswith("cli/"):
            floor = "command line"
        found[floor] += lines_of_code(path)
        found["source"] += path.read_text().count("\n")
    found["tests"] = sum(map(lines_of_code, (root / "tests").rglob("*.py")))
    return found


def sizes_of_commit(commit: str) -> dict[str, int]:
    """The sizes of a commit, in a clone that has it."""
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
        return sizes(Path(folder))


def text(before: dict[str, int], after: dict[str, int]) -> str:
    """Both as a table."""
    lines = ["| | before | after |", "|---|---|---|"]
    for name in before:
        label = "source with docstrings, comments and empty lines" if name == "source" else name
        lines.append(f"| {label} | {before[name]:,} | {after[name]:,} |")
        if name == "tests":
            ratios = [size["tests"] / _code(size) for size in (before, after)]
            lines.append(f"| tests / source | {ratios[0]:.2f} | {ratios[1]:.2f} |")
    return "\n".join(lines)


def _code(size: dict[str, int]) -> int:
    return sum(lines for name, lines in size.items() if name not in ("tests", "source"))


if __name__ == "__main__":
    if sys.argv[1:]:
        print(sizes_of_commit(sys.argv[1]))
    else:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        table = text(sizes_of_commit(BEFORE), sizes(ROOT))
        PAGE.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.partition(END)[2]}")
