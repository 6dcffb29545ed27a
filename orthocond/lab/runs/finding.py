"""The runs in a folder: find them, name them, and make each configuration's run once."""

import os
import re
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from warnings import warn

from orthocond.lab.config import Config
from orthocond.lab.presets import read_config
from orthocond.lab.runs.files import locked
from orthocond.lab.runs.folder import CONFIG, Run
from orthocond.lab.text import nearest, printable


def find_runs(root: str | PathLike[str]) -> Iterator[tuple[Run, Config]]:
    """The trainings in a folder, in the order of their numbers.

    Folders without ``config.json`` are passed over, and so are those of other programs, whose names do not begin with
    a number. A run whose ``config.json`` is damaged or no configuration any more is left out with a warning that names
    the file; the others are found all the same.
    """
    folder = Path(root)
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not (path / CONFIG).is_file():
            continue
        try:
            run = Run.open(path)
            config = read_config(run.config)
        except (TypeError, ValueError) as error:
            if re.match(r"\d+-", path.name):
                text = f"A run was left out, as {path / CONFIG} cannot be used: {error}"
                warn(printable(text), RuntimeWarning, stacklevel=2)
            continue
        yield run, config


def is_finished(run: Run) -> bool:
    """Whether a training has reached its end."""
    return run.status.state == "finished"


def name_of(config: Config) -> str:
    """The name of a run's folder, without its number.

    Example:
        >>> from orthocond.lab.classification.config import Classification, Method
        >>> name_of(Classification(method=Method("nog+olr", olr="paper"), seed=3))
        'dbn-sprites-small-nog+olr-paper-seed3'
    """
    method = config.method
    form = f"-{method.olr}" if "olr" in method.name and method.olr != "exact" else ""
    form += f"-{method.nog_of}" if "nog" in method.name and method.nog_of != "gradient" else ""
    name = method.name.replace("@", "-")
    return f"{config.preset}-{name}{form}-seed{config.seed}"


def open_or_create(root: str | PathLike[str], config: Config) -> Run:
    """The run of a configuration: the last one in the folder that has it, or a new one.

    Processes that ask for the same configuration at the same time get the same run.

    Raises:
        OSError: If the folder is read-only or the disk full.
        RuntimeError: If another process holds the folder's lock for a minute.
    """
    return open_or_create_all(root, [config])[0]


def open_or_create_all(root: str | PathLike[str], configs: Sequence[Config]) -> list[Run]:
    """The runs of several configurations, as `open_or_create`; the folder is read once."""
    with locked(Path(root)):
        found = {config: run for run, config in find_runs(root)}
        for config in configs:
            if config not in found:
                found[config] = Run.create(root, name_of(config), config)
    return [found[config] for config in configs]


def runs_with(config: Config, root: str | PathLike[str]) -> list[Run]:
    """The runs in a folder that have a configuration, in the order of their numbers."""
    return [run for run, other in find_runs(root) if other == config]


def find_run(name: str | PathLike[str], root: str | PathLike[str] = "runs") -> Path:
    """The folder of a run by its path, by its name in ``root``, or by its number there.

    Raises:
        FileNotFoundError: If there is none; the text gives the nearest name.
    """
    text, runs = os.fspath(name), Path(root)
    for path in (Path(text), runs / text):
        if (path / CONFIG).is_file():
            return path
    found = sorted(runs.iterdir()) if runs.is_dir() else []
    folders = [p for p in found if re.match(r"\d+-", p.name) and (p / CONFIG).is_file()]
    for path in folders:
        if text.isdecimal() and int(path.name.partition("-")[0]) == int(text):
            return path
    there = nearest(text, [path.name for path in folders]) if folders else " There are none yet."
    raise FileNotFoundError(f"There is no run {text!r}, neither as a folder nor in {runs}.{there}")
