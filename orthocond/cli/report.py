"""``orthocond report`` and ``orthocond compare``: one page for a run, several runs or a table."""

import sys
import webbrowser
from os.path import exists
from pathlib import Path
from typing import TYPE_CHECKING

from orthocond.cli.runs import find_run
from orthocond.lab.errors import EXPECTED, UsageError, explain
from orthocond.lab.presets import has_generator
from orthocond.lab.text import printable

if TYPE_CHECKING:
    from orthocond.lab.runs import Run


def report(*sources: str, out: Path | None = None, open: bool = True, runs: Path = Path("runs")) -> None:
    """Write one HTML file about the results of a run, several runs or a table, and open it.

    It begins with a verdict in three sentences and what to do next. Then come the numbers, interactive curves, the
    settings that differ, samples, traversals, spectra, warnings, and the command that reproduces it. The file needs no
    network and can be sent to anyone. For a single GAN the explorer is written too, unless it is up to date.

    Args:
        sources: Runs, by folder or number; folders of runs; or the folder of one table, such as results/optimal-lr.
            Several runs are compared.
        out: File to write; by default report.html in the folder of a single source, else in the current folder.
        open: Whether to open it in a browser.
        runs: Folder of the runs.
    """
    from orthocond.lab.report import write_report
    from orthocond.lab.report.sources import NothingToReportError
    from orthocond.lab.runs import Run
    from orthocond.lab.runs.folder import CONFIG

    if not sources:
        raise UsageError(
            "A report needs a run, a folder of runs or the folder of a table; got none. Try `orthocond report 0`."
        )
    if out is not None and out.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--out needs a file that ends with .html; got {out}.")
    if out is not None and not out.parent.is_dir():
        raise UsageError(f"--out needs a folder that exists; there is no {out.parent}. Create it first.")
    # A name too long for a file does not exist here, where Path.exists is an error.
    paths = [Path(source) if exists(source) else find_run(source, runs).path for source in sources]
    if len(paths) == 1 and (paths[0] / CONFIG).is_file():
        add_explorer(Run.open(paths[0]))
    try:
        file = write_report(*paths, out=out)
    except NothingToReportError as error:
        raise UsageError(str(error)) from error
    print(f"Written to {printable(file)} ({file.stat().st_size / 1e6:.1f} MB). It needs no network.")
    if open:
        webbrowser.open(file.resolve().as_uri())


def compare(
    first: str, second: str, /, *more: str, out: Path | None = None, open: bool = True, runs: Path = Path("runs")
) -> None:
    """Compare two or more runs in one report, and open it.

    Args:
        first: A run, by folder or number.
        second: Another run.
        more: Further runs.
        out: File to write; by default report.html in the current folder.
        open: Whether to open it in a browser.
        runs: Folder of the runs.
    """
    report(first, second, *more, out=out, open=open, runs=runs)


def add_report(path: Path, allow_import: str | None = None) -> None:
    """Write the report of a run or table that a command has just made, and say where it is.

    What was made stays as it is whatever happens here: a report that fails is told in one line.

    Args:
        path: The folder.
        allow_import: Function of the networks that the run may import and call.
    """
    from orthocond.lab.report import write_report
    from orthocond.lab.runs import Run
    from orthocond.lab.runs.folder import CONFIG

    try:
        if (path / CONFIG).is_file():
            add_explorer(Run.open(path), allow_import)
        print(f"Report: {printable(write_report(path))}", flush=True)
    except Exception as error:
        _could_not("report", error, f"orthocond report {path}")


def add_explorer(run: "Run", allow_import: str | None = None) -> None:
    """Write the explorer of a GAN that has a checkpoint, for its report to lead to, unless it is there and newer."""
    if not has_generator(run.config) or not (checkpoints := list(run.checkpoints.glob("*.json"))):
        return
    from orthocond.lab.explorer import write_explorer
    from orthocond.lab.task import EVALUATION

    file = run.path / "explore.html"
    parts = [*checkpoints, *run.path.glob(EVALUATION)]
    if file.is_file() and file.stat().st_mtime > max(part.stat().st_mtime for part in parts):
        return
    try:
        write_explorer(run.path, allow_import=allow_import)
        print(f"Explorer: {printable(file)} (again with: orthocond explore {printable(run.path)})", flush=True)
    except Exception as error:
        _could_not("explorer", error, f"orthocond explore {run.path}")


def _could_not(what: str, error: Exception, again: str) -> None:
    reason = explain(error)[0] if isinstance(error, EXPECTED) else repr(error)
    text = f"The {what} could not be written: {reason.splitlines()[0].rstrip('.')}. Nothing else is lost; to try again:"
    print(f"{text} {printable(again)}", file=sys.stderr)
