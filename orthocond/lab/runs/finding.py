"""The runs in a folder: find them, name them, and make each configuration's run once."""

import re
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from warnings import warn

from orthocond.lab.experiments import Config, read_config
from orthocond.lab.runs.files import locked
from orthocond.lab.runs.folder import Run
from orthocond.lab.text import printable


def find_runs(root: str | PathLike[str]) -> Iterator[tuple[Run, Config]]:
    """The trainings in a folder, in the order of their numbers.

    Folders without ``config.json`` are passed over, and so are those of other programs, whose names do not begin with
    a number. A run whose ``config.json`` is damaged or no configuration any more is left out with a warning that names
    the file; the others are found all the same.
    """
    folder = Path(root)
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not (path / "config.json").is_file():
            continue
        try:
            run = Run.open(path)
            config = read_config(run.config)
        except (TypeError, ValueError) as error:
            if re.match(r"\d+-", path.name):
                text = f"A run was left out, as {path / 'config.json'} cannot be used: {error}"
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
    return f"{config.preset}-{method.name}{form}-seed{config.seed}"


def open_or_create(root: str | PathLike[str], config: Config) -> Run:
    """The run of a configuration: the last one in the folder that has it, or a new one.

    Processes that ask for the same configuration at the same time get the same run.

    Raises:
        OSError: If the folder is read-only or the disk full.
        RuntimeError: If another process holds the folder's lock for a minute.
    """
    with locked(Path(root)):
        same = [run for run, other in find_runs(root) if other == config]
        return same[-1] if same else Run.create(root, name_of(config), config)
