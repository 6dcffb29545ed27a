"""The paper's tables and figures: from runs, trained where they are missing, with the paper's numbers beside ours."""

import re
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path

from orthocond.lab.classification import claims, full_size, stale, stress, timing
from orthocond.lab.classification import tables as classification
from orthocond.lab.config import Config, Scale
from orthocond.lab.errors import UsageError
from orthocond.lab.experiments import task_of
from orthocond.lab.generation import claims as generation_claims
from orthocond.lab.generation import tables as generation
from orthocond.lab.launch import Ending, Executor, launch
from orthocond.lab.launch.overview import Standing, standings
from orthocond.lab.progress import Progress
from orthocond.lab.runs.finding import name_of
from orthocond.lab.tables.records import Record, gather, keep
from orthocond.lab.tables.table import Material, Table
from orthocond.lab.text import nearest

TABLES: dict[str, Table] = {
    table.name: table
    for module in (classification, claims, stale, generation, generation_claims, full_size, timing, stress)
    for table in module.TABLES  # in the order of the paper
}
"""All tables by name; a new one is listed here by its module."""

_IN_PAPER = {
    "Figure 1": "conditioning-solvers",
    "Table 1": "weight-treatments",
    "Figure 2": "conditioning-weight",
    "Table 2": "gradient-treatments",
    "Figure 3": "conditioning-gradient",
    "Table 3": "optimal-lr",
    "Figure 4": "conditioning-lr",
    "Table 4": "cifar-resnet50",
    "Table 5": "cifar100-densenet-mobilenet",
    "Figure 7": "convergence",
    "Table 6": "gcp",
    "Figure 10": "conditioning-gcp",
    "Table 7": "time",
    "Table 8": "eigengan",
    "Table 9": "vanilla-gan",
    "Table 10": "gan-condition",
    "Figure 17": "learning-rate",
}
_NUMBERED = re.compile(r"(?:(table|fig)(?:ure)?\.?)?[ -]*([0-9]+)", re.IGNORECASE)
KEPT = "kept.txt"
"""A file in the folder of a table that shall not be made again; it says why."""

_LISTED = 6  # trainings that a remark names, before "and so many more"


def names() -> tuple[str, ...]:
    """Names of the tables and figures.

    Example:
        >>> "weight-treatments" in names()
        True
    """
    return tuple(TABLES)


def find(name: str) -> Table:
    """A table by its name, or by the number that it has in the paper.

    Args:
        name: A name, ``"3"`` or ``"table 3"`` for a table of the paper, ``"figure 2"`` for a figure.

    Raises:
        ValueError: If there is no such table; the text gives the nearest name.

    Example:
        >>> [find(name).name for name in ("optimal-lr", "3", "Table 3", "fig. 2")]
        ['optimal-lr', 'optimal-lr', 'optimal-lr', 'conditioning-weight']
    """
    if name in TABLES:
        return TABLES[name]
    number = _NUMBERED.fullmatch(name)
    if number is None:
        raise ValueError(f"There is no table {name!r}.{nearest(name, TABLES)} There are: {', '.join(TABLES)}.")
    place = f"{'Figure' if (number[1] or '').lower() == 'fig' else 'Table'} {int(number[2])}"
    if place not in _IN_PAPER:
        raise ValueError(f"{place} of the paper cannot be made here. There are: {', '.join(_IN_PAPER)}.")
    return TABLES[_IN_PAPER[place]]


def in_paper(name: str) -> str:
    """Where a table stands in the paper, counting captions in the order of its source; empty if it goes beyond it.

    Raises:
        ValueError: If there is no such table.

    Example:
        >>> in_paper("optimal-lr"), in_paper("solver-stress")
        ('Table 3', '')
    """
    table = find(name)
    return next((place for place, other in _IN_PAPER.items() if other == table.name), "")


def describe(name: str) -> str:
    """What a table shows.

    Raises:
        ValueError: If there is no such table; the text gives the nearest name.

    Example:
        >>> describe("time")
        'Time of a training step: Milliseconds of forward pass, backward pass and step of the optimizer.'
    """
    table = find(name)
    return f"{table.title}: {table.text}"


def plan(
    name: str,
    *,
    scale: Scale = "laptop",
    seeds: int = 5,
    runs: str | PathLike[str] = "runs",
    out: str | PathLike[str] = "results",
    only: str | Sequence[str] = (),
) -> list[Config]:
    """The trainings that `make` with the same arguments would start or continue, in the order of their progress.

    Raises:
        ValueError: If there is no such table, scale, number of seeds, or row.
    """
    configs = _configs(find(name), scale, seeds, only)
    return _missing(configs, *gather(configs, runs, out))


def status(
    name: str,
    *,
    scale: Scale = "laptop",
    seeds: int = 5,
    runs: str | PathLike[str] = "runs",
    out: str | PathLike[str] = "results",
    only: str | Sequence[str] = (),
) -> list[Standing]:
    """Where every training of a table stands, on this machine or a cluster; nothing is started or changed.

    Raises:
        ValueError: If there is no such table, scale, number of seeds, or row.
    """
    configs = _configs(find(name), scale, seeds, only)
    return standings(configs, runs, kept=gather(configs, runs, out)[1])


def make(
    name: str,
    *,
    scale: Scale = "laptop",
    seeds: int = 5,
    runs: str | PathLike[str] = "runs",
    out: str | PathLike[str] = "results",
    only: str | Sequence[str] = (),
    jobs: int | None = None,
    executor: Executor | None = None,
    data_root: str | None = None,
    train: bool = True,
    progress: Callable[[int, Progress], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> Path:
    """Make a table: train what is missing, and write it with its figures.

    A training counts as there if it is finished in ``runs``, or kept in ``out`` from an earlier table, or if its loss
    was not finite, which another attempt would only repeat. Compact copies of all trainings used are kept in
    ``out/runs``, from which tables can be made again where the run folders are not.

    Args:
        name: Name of the table, or its number in the paper; see `find`.
        scale: ``paper``, ``workstation`` or ``laptop``.
        seeds: How many seeds, from 0.
        runs: Folder of runs.
        out: Folder of results.
        only: A text, or several; only rows are then trained that contain all words of one of them, as ``"NOG small"``,
            or the one row that is the text. The table shows all rows.
        jobs: Trainings at a time on this machine.
        executor: Where to train instead, such as `orthocond.lab.launch.Slurm`.
        data_root: Folder of data sets.
        train: Whether to train what is missing; otherwise the table says what is missing.
        progress: Called with the place of a training in `plan`, and where it stands.
        say: Called with news of jobs.

    Returns:
        The folder of the table: ``out/<name>``, with ``-paper`` or ``-workstation`` at the end for these scales.

    Raises:
        ValueError: If there is no such table, scale, number of seeds, or row, kept results or data are damaged, or the
            folder has a file ``kept.txt``, which says why its table shall stay as it is.
        FileNotFoundError: If a data set is missing, or there is nothing to make a table of.
        RuntimeError: If all trainings failed; the text is what the first one said.
        KeyboardInterrupt: After Ctrl-C, when all trainings have saved.
    """
    table = find(name)
    name = table.name
    folder = Path(out) / (name if scale == "laptop" else f"{name}-{scale}")
    if (kept_as_is := folder / KEPT).is_file():
        raise ValueError(
            f"{folder} is kept as it is and not made again: {kept_as_is.read_text(encoding='utf-8').strip()} To make "
            f"this table anew, write it elsewhere (--out), or delete {kept_as_is}."
        )
    configs = _configs(table, scale, seeds)
    found, kept = gather(configs, runs, out)
    missing = _missing(_configs(table, scale, seeds, only), found, kept)
    failures: dict[str, Ending] = {}
    if train and missing:
        for config in {config.data: config for config in missing}.values():
            task_of(config).load_data(config.data, data_root)  # so that what is wrong with it is said once
        outcomes = launch(missing, runs, executor=executor, jobs=jobs, data_root=data_root, progress=progress, say=say)
        failures = {o.run.path.name: o for o in outcomes if o.code}
        found, kept = gather(configs, runs, out)
    records = found | kept
    ended = {record.name for record in found.values()}  # with a result, or a loss that was not finite
    failures = {run: ending for run, ending in failures.items() if run not in ended}
    if configs and not records:
        if failures:
            first = next(iter(failures.values()))
            log = f"\nIts log is {first.log}" if first.log else ""
            raise RuntimeError(f"All trainings of {name} failed. The first one said:\n{first.text.strip()}{log}")
        raise FileNotFoundError(
            f"There are no trainings for {name} at scale {scale}, neither in {runs} nor kept in {out}. "
            "Records of trainings are kept in a clone of the repository: run the command in its folder. Or run it "
            "without --no-train to train (in Python: train=True)."
        )
    keep([record for record in found.values() if record.complete], out)
    folder.mkdir(parents=True, exist_ok=True)
    remarks = _remarks(configs, found, kept, failures)
    table.write(folder, Material(scale, seeds, records, train, remarks, progress))
    return folder


def _configs(table: Table, scale: Scale, seeds: int, only: str | Sequence[str] = ()) -> list[Config]:
    """The trainings of a table, or of the rows that some texts name, whole or by some of their words."""
    if seeds < 1:
        raise ValueError(f"A table needs at least one seed; got {seeds}.")
    if not only:
        return table.configs(scale, seeds)
    named = list(table.named(scale, seeds))
    if not named:
        raise UsageError(f"{table.name} trains nothing, so there are no rows to choose from.")
    rows = list(dict.fromkeys(row for row, _ in named))
    only = [only] if isinstance(only, str) else only
    chosen = {row for text in only for row in _chosen(text, rows)}
    if not chosen:
        listed = "\n".join(rows)
        raise UsageError(f"No row of {table.name} contains {' or '.join(map(repr, only))}. Its rows are:\n{listed}")
    return list(dict.fromkeys(config for row, config in named if row in chosen))


def _chosen(text: str, rows: Sequence[str]) -> list[str]:
    """The row that a text is, else those that contain all its words."""
    words = _words(text)
    same = [row for row in rows if row.lower() == text.strip().lower()]
    return same or [row for row in rows if words and words <= _words(row)]


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


def _missing(configs: list[Config], found: Mapping[Config, Record], kept: Mapping[Config, Record]) -> list[Config]:
    """The trainings that are not there, or have finished in a run folder and were not evaluated."""

    def ended(config: Config) -> bool:
        record = found.get(config)
        return config in kept if record is None else record.complete

    return [config for config in configs if not ended(config)]


def _remarks(
    configs: list[Config], found: Mapping[Config, Record], kept: Mapping[Config, Record], failures: Mapping[str, Ending]
) -> tuple[str, ...]:
    """Which trainings are missing or not evaluated, and which failed."""
    remarks = []
    several = len({config.scale for config in configs}) > 1
    absent = [config for config in configs if config not in found and config not in kept]
    if missing := [name_of(config) + (f" ({config.scale})" if several else "") for config in absent]:
        remarks.append(f"Missing: {len(missing)} of {len(configs)} trainings: {_some(missing)}.")
    if bare := [record.name for record in found.values() if not record.complete]:
        remarks.append(f"Not evaluated: {_some(bare)}. The table's command evaluates them, unless it has --no-train.")
    if failures:
        remarks.append(f"Failed: {_some([_failed(run, ending) for run, ending in failures.items()])}.")
    return tuple(remarks)


def _failed(run: str, ending: Ending) -> str:
    said = ending.text.strip().splitlines()[-1:] or ["no message"]
    return f"{run} ({'; log: '.join([*said, *([str(ending.log)] if ending.log else [])])})"


def _some(items: list[str]) -> str:
    rest = len(items) - _LISTED
    return ", ".join(items[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")


__all__ = ["TABLES", "Table", "Material", "names", "find", "in_paper", "describe", "plan", "status", "make"]
