"""``orthocond table``: the paper's tables and figures, from runs."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from orthocond.cli.report import add_report
from orthocond.cli.settings import PositiveInt, read_file
from orthocond.lab.config import Scale, from_json
from orthocond.lab.errors import UsageError

if TYPE_CHECKING:
    from orthocond.lab.launch import Executor
    from orthocond.lab.launch.overview import Standing

_SLURM = Group.create_ordered("Slurm")


def _option(name: str | None = None, **settings: Any) -> Parameter:
    return Parameter(name=name, group=_SLURM, **settings)


def table(
    name: str | None = None,
    /,
    *,
    scale: Scale = "laptop",
    seeds: PositiveInt = 5,
    runs: Path = Path("runs"),
    out: Path = Path("results"),
    only: Annotated[tuple[str, ...], Parameter(negative_iterable=())] = (),
    jobs: PositiveInt | None = None,
    train: bool = True,
    data_root: Path | None = None,
    report: bool = True,
    quiet: bool = False,
    status: Annotated[bool, Parameter(negative=())] = False,
    cancel: Annotated[bool, Parameter(negative=())] = False,
    executor: Annotated[Literal["local", "slurm"], _option()] = "local",
    cluster: Annotated[Path | None, _option()] = None,
    partition: Annotated[str | None, _option()] = None,
    time: Annotated[str | None, _option()] = None,
    gpus: Annotated[int | None, _option()] = None,
    nodes: Annotated[PositiveInt | None, _option()] = None,
    cpus: Annotated[PositiveInt | None, _option()] = None,
    memory: Annotated[str | None, _option()] = None,
    array_size: Annotated[PositiveInt | None, _option()] = None,
    option: Annotated[tuple[str, ...], _option(negative_iterable=())] = (),
    on_interrupt: Annotated[Literal["leave", "cancel"], _option()] = "leave",
) -> int:
    """Make a table or figure of the paper, and train what is missing for it.

    The table shows our numbers next to the paper's: mean and spread over seeds, and whether a difference is
    significant. Finished trainings are not repeated; stopped ones resume. The report, a page with curves, is written to
    the same folder.

    With `--executor slurm` every training is a job. Ctrl-C leaves the jobs running. `--status` shows them, and the same
    command watches them again, submits what was lost, and makes the table at the end.

    Args:
        name: Which table or figure, by name or by its number in the paper: `3`, `"figure 2"`; without it, all are
            listed.
        scale: The size of the experiment: `laptop` takes minutes, `workstation` half an hour on one core, `paper` is
            the setting of the paper.
        seeds: Trainings of each row.
        runs: Folder of the runs.
        out: Folder for the table.
        only: Train only rows that contain these words, such as "NOG small", or one row by its whole name; may be
            repeated. The table shows all rows.
        jobs: Trainings at a time; by default the number of cores, and on Slurm as many as there is room for.
        train: Whether to train what is missing.
        data_root: Folder of data sets; by default the environment variable ORTHOCOND_DATA, else `data`.
        report: Whether to write the report.
        quiet: Show no progress.
        status: Train nothing; show how far every training is.
        cancel: Train nothing; cancel the jobs of this table on Slurm. Each saves its state.
        executor: Where to train: on this machine, or as Slurm jobs.
        cluster: TOML file with the options below, under the same names. Options override it.
        partition: Which machines.
        time: Time limit of a job, such as 24:00:00. A training that needs longer continues in another job.
        gpus: GPUs on each machine.
        nodes: Machines for one training.
        cpus: Cores on each machine.
        memory: Memory on each machine, such as 32G.
        array_size: Largest number of jobs in one array.
        option: Another sbatch option, such as account=lab; may be repeated.
        on_interrupt: What Ctrl-C does to the jobs.
    """
    from orthocond.lab import catalog as tables
    from orthocond.lab.display import Display
    from orthocond.lab.runs.finding import name_of

    if status and cancel:
        raise UsageError("--status only looks and --cancel ends jobs: give one of them.")
    if name is None:
        of_one = {"--status": status, "--cancel": cancel, "--only": only, "--no-train": not train}
        if given := [word for word, value in of_one.items() if value]:
            raise UsageError(f"{given[0]} needs the name of a table; `orthocond table` lists all.")
        for each in tables.names():
            print(f"{each:28s} {tables.in_paper(each):10s} {tables.describe(each)}")
        return 0
    try:
        name = tables.find(name).name
    except ValueError as error:
        raise UsageError(str(error)) from error
    what: dict[str, Any] = {"scale": scale, "seeds": seeds, "runs": runs, "out": out, "only": only}
    if status:
        return _show_status(lambda: tables.status(name, **what), quiet)
    if cancel:
        return _cancel(tables.status(name, **what))
    asked: dict[str, Any] = {"partition": partition, "time": time, "gpus": gpus, "nodes": nodes, "cpus": cpus}
    asked |= {"memory": memory, "array_size": array_size, "options": dict(_pair(text) for text in option) or None}
    where = _executor(executor, cluster, asked, jobs, on_interrupt)
    root = None if data_root is None else str(data_root)
    missing = tables.plan(name, **what) if train else []
    with Display([name_of(config) for config in missing], quiet=quiet) as display:
        folder = tables.make(
            name, **what, jobs=jobs, executor=where, data_root=root, train=train, progress=display, say=display.say
        )
    print((folder / "table.md").read_text(encoding="utf-8"))
    print(f"Written to {folder}")
    if report:
        add_report(folder)
    return 0


def _pair(text: str) -> tuple[str, str | bool]:
    """The name and value of an option of sbatch; one without value is a switch."""
    name, equals, value = text.removeprefix("--").partition("=")
    if not name:
        raise UsageError(f"--option needs a name with or without a value, such as account=lab; got {text!r}.")
    return name, value if equals else True


def _executor(
    kind: str, file: Path | None, asked: dict[str, Any], jobs: int | None, on_interrupt: Literal["leave", "cancel"]
) -> "Executor | None":
    """The executor that was asked for; None for this machine."""
    if kind == "local":
        changed = {"cluster": file, "on_interrupt": None if on_interrupt == "leave" else on_interrupt} | asked
        for name in (name for name, value in changed.items() if value is not None):
            option = name.replace("options", "option").replace("_", "-")
            raise UsageError(f"--{option} is for a cluster: add --executor slurm.")
        return None
    from orthocond.lab.launch import Cluster, Slurm

    values = read_file(file) if file is not None else {}
    given = {name: value for name, value in asked.items() if value is not None}
    options = given.pop("options", {})
    if isinstance(found := values.get("options", {}), dict):  # else it is refused below
        given["options"] = found | options
    try:
        return Slurm(from_json(Cluster, values | given), jobs=jobs, on_interrupt=on_interrupt)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{f'{file}: ' if file is not None else ''}{error}") from error


def _show_status(read: Any, quiet: bool) -> int:
    """Print where every training stands; in a terminal, go on until they have ended or Ctrl-C."""
    from orthocond.lab.display import Display, is_plain
    from orthocond.lab.launch.overview import LIVE, follow

    found = read()
    _print(found)
    if quiet or is_plain() or not any(standing.state in LIVE for standing in found):
        return 0
    print("Ctrl-C leaves this display; the trainings go on.")
    try:
        with Display([standing.name for standing in found]) as display:
            found = follow(read, display)
    except KeyboardInterrupt:
        return 0
    _print(found)
    return 0


def _print(found: "Sequence[Standing]") -> None:
    from rich.console import Console

    from orthocond.cli.terminal import make_table

    rows = [(s.name, s.state, f"{s.step} of {s.steps}" if s.steps else str(s.step), s.job, s.note) for s in found]
    console = Console(highlight=False, soft_wrap=True)
    console.print(make_table("", ("training", "state", "step", "job", "note"), rows))
    console.print(", ".join(f"{count} {state}" for state, count in Counter(s.state for s in found).items()))


def _cancel(found: "Sequence[Standing]") -> int:
    from orthocond.lab.launch.overview import LIVE
    from orthocond.lab.launch.slurm import cancel

    ids = [standing.job for standing in found if standing.job and standing.state in LIVE]
    cancel(ids)
    print(f"{len(ids)} jobs cancelled; each saves its state." if ids else "No training of this table has a job.")
    return 0
