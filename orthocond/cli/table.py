"""``orthocond table``: the paper's tables and figures, from runs."""

from pathlib import Path

from orthocond.cli.report import add_report
from orthocond.cli.settings import PositiveInt
from orthocond.lab.config import Scale
from orthocond.lab.errors import UsageError
from orthocond.lab.text import nearest


def table(
    name: str | None = None,
    /,
    *,
    scale: Scale = "laptop",
    seeds: PositiveInt = 5,
    runs: Path = Path("runs"),
    out: Path = Path("results"),
    jobs: PositiveInt | None = None,
    train: bool = True,
    data_root: Path | None = None,
    report: bool = True,
    quiet: bool = False,
) -> None:
    """Make a table or figure of the paper, and train what is missing for it.

    Ours stands beside the paper's: mean and spread over seeds, and whether a difference is significant. Trainings that
    are finished are not repeated, those that were stopped go on. Its report, a page with curves, stands beside it.

    Args:
        name: Which table or figure; without a name, they are listed.
        scale: The numbers of the paper, or minutes on a laptop.
        seeds: Trainings of each row.
        runs: Folder of the runs.
        out: Folder for the table.
        jobs: Trainings at a time; the number of cores if not given.
        train: Whether to train what is missing.
        data_root: Folder of data sets; the environment variable ORTHOCOND_DATA, else `data`, if not given.
        report: Whether to write the report.
        quiet: Show no progress.
    """
    from orthocond.lab import catalog as tables
    from orthocond.lab.display import Display
    from orthocond.lab.runs.finding import name_of

    names = tables.names()
    if name is None:
        for each in names:
            print(f"{each:28s} {tables.describe(each)}")
        return
    if name not in names:
        raise UsageError(f"There is no table {name!r}.{nearest(name, names)} There are: {', '.join(names)}.")
    root = None if data_root is None else str(data_root)
    missing = tables.plan(name, scale=scale, seeds=seeds, runs=runs, out=out) if train else []
    with Display([name_of(config) for config in missing], quiet=quiet) as display:
        folder = tables.make(
            name, scale=scale, seeds=seeds, runs=runs, out=out, jobs=jobs, data_root=root, train=train, progress=display
        )
    print((folder / "table.md").read_text(encoding="utf-8"))
    print(f"Written to {folder}")
    if report:
        add_report(folder)
