"""``orthocond report``: one page for a run, several runs or a table."""

import webbrowser
from pathlib import Path

from orthocond.cli.runs import find_run
from orthocond.lab.errors import UsageError


def report(*sources: str, out: Path | None = None, open: bool = True, runs: Path = Path("runs")) -> None:
    """Write one HTML file that says what a run, several runs or a table have found, and open it.

    It begins with a verdict in three sentences and what to do next. Then come the numbers, curves with hover, the
    settings that differ, samples, traversals, spectra, warnings, and the command that makes it again. The file needs no
    network and can be sent to anybody.

    Args:
        sources: Runs, by folder or number; folders of runs; or the folder of one table, such as results/optimal-lr.
            Several runs are compared.
        out: File to write; report.html in the folder if there is one source, else here.
        open: Whether to open it in a browser.
        runs: Folder of the runs.
    """
    from orthocond.lab.report import write_report
    from orthocond.lab.report.sources import NothingToReportError

    if not sources:
        raise UsageError("A report needs a run, a folder of runs or the folder of a table; got none.")
    if out is not None and out.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--out needs a file that ends with .html; got {out}.")
    if out is not None and not out.parent.is_dir():
        raise UsageError(f"--out needs a folder that exists; there is no {out.parent}.")
    paths = [Path(source) if Path(source).exists() else find_run(source, runs).path for source in sources]
    try:
        file = write_report(*paths, out=out)
    except NothingToReportError as error:
        raise UsageError(str(error)) from error
    print(f"Written to {file} ({file.stat().st_size / 1e6:.1f} MB). It needs no network.")
    if open:
        webbrowser.open(file.resolve().as_uri())
