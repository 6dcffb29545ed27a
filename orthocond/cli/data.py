"""``orthocond data``: which data sets there are, and how to get them."""

from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.text import Text

from orthocond.cli.terminal import make_table
from orthocond.lab.errors import UsageError
from orthocond.lab.text import printable


def data(
    action: Literal["list", "get"] = "list", name: str = "", /, *, data_root: Path | None = None, quiet: bool = False
) -> None:
    """List the known data sets, or get one.

    `orthocond data` shows where each data set was found, or how to get it. `orthocond data get cifar10` downloads a
    public data set and checks it; an interrupted download resumes. If you have to accept terms first, the command says
    what to do. `orthocond data get hf:NAME` downloads a data set from Hugging Face.

    Args:
        action: `list`, or `get` a data set.
        name: Which one to get.
        data_root: Folder of data sets; by default the environment variable ORTHOCOND_DATA, else `data`.
        quiet: Show no progress.
    """
    if action == "get":
        return _get(name, data_root, quiet)
    if name:
        raise UsageError(f"`orthocond data list` takes no name; got {name!r}. To get it: orthocond data get {name}")
    return show(data_root)


def show(data_root: Path | None) -> None:
    """Print which data sets there are, where each lies, or how to get it."""
    from orthocond.lab import data as lab

    folder, console, rows = lab.data_root(data_root), Console(), []
    for name, where in lab.names(data_root).items():
        known = lab.KNOWN.get(name)
        text = known.text if known else "rendered shapes with known factors" if name == "sprites" else "yours"
        if known is not None and known.find(folder) is None:
            where = f"orthocond data get {name}" if known.files else f"by hand: orthocond data get {name} tells how"
        rows.append([Text(printable(cell)) for cell in (name, text, where)])
    header = "name", "what it is", "where it is, or how to get it"
    console.print(make_table(f"Data sets in {printable(folder)}", header, rows))
    console.print("Also a path to a folder, zip or tar of images, and hf:NAME of a Hugging Face data set.")


def _get(name: str, data_root: Path | None, quiet: bool) -> None:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from orthocond.lab import data as lab

    if not name:
        raise UsageError(f"`orthocond data get` needs a name: {', '.join(lab.KNOWN)}, or hf:NAME for Hugging Face.")
    columns = TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as bars:
        tasks = {}

        def show(file: str, done: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = bars.add_task(file, total=total)
            bars.update(tasks[file], completed=done, total=total)

        where = lab.get(name, data_root, show)
    print(f"{name}: {printable(where)}")
