"""The registry of experiments: from a configuration to its task, from a name to a preset; training and evaluation."""

import json
from collections.abc import Callable, Collection
from functools import partial
from os import PathLike
from typing import Any

from orthocond.lab.classification.task import ClassificationTask
from orthocond.lab.config import Config
from orthocond.lab.devices import make_accelerator, part_processes
from orthocond.lab.display import Display, is_notebook
from orthocond.lab.errors import UsageError
from orthocond.lab.generation.task import GenerationTask
from orthocond.lab.loop import Loop
from orthocond.lab.presets import names, preset, read_config
from orthocond.lab.progress import Progress
from orthocond.lab.runs import Run, ranks
from orthocond.lab.runs.finding import name_of
from orthocond.lab.task import EVALUATION, Task

TASKS: dict[str, type[Task[Any]]] = {task.kind: task for task in (ClassificationTask, GenerationTask)}
"""The tasks by kind of experiment; to add one, list it here and its presets in `orthocond.lab.presets`."""


def task_of(config: Config) -> type[Task[Any]]:
    """The task that trains a configuration."""
    return TASKS[config.kind]


def train(
    config: Config,
    run: Run,
    *,
    root: str | PathLike[str] | None = None,
    progress: Callable[[Progress], None] | None = None,
    tracker: str | None = None,
    evaluate: bool = True,
) -> int:
    """Train what a configuration asks for in a run folder, from its last checkpoint if there is one, and evaluate it.

    Under torchrun every process calls this. An evaluation is made by the first one, when the group of processes is
    gone; with ``evaluate=False`` the group stays.

    Args:
        config: The configuration.
        run: Its folder; what was logged after its last checkpoint is written again.
        root: Folder of data sets.
        progress: Called after each step and with each stage of the evaluation, on the first process. None prints a
            line now and then in a notebook, and nothing elsewhere.
        tracker: Name of a tracker of Accelerate that gets the metrics too, for example ``"tensorboard"``.
        evaluate: Whether to measure the end of the training and write ``evaluation.json``, if it is not there.

    Returns:
        0, or 130 and 143 where Ctrl-C or SIGTERM ended it after the state was saved.

    Raises:
        FloatingPointError: If the training diverges; the text is a diagnosis, and checkpoints stay.
        OSError: If the disk is full or read-only; checkpoints stay.
        ValueError: If the tracker is not installed.
    """
    folder = None if root is None else str(root)
    if progress is None and is_notebook():
        progress = partial(Display([name_of(config)]), 0)
    task = task_of(config)
    accelerator = make_accelerator(config.precision, run, tracker)
    made = task(config, task.load_data(config.data, folder), accelerator)
    code = Loop(made, run, progress=progress, tracker=tracker).train()
    if not evaluate:
        return code
    first = ranks.rank() == 0
    part_processes()
    if first and code == 0 and not is_evaluated(run):
        evaluate_run(run, root=folder, allow_import=config.model.name, progress=progress)
    return code


def evaluate_run(
    run: Run,
    *,
    root: str | PathLike[str] | None = None,
    only: Collection[str] = (),
    skip: Collection[str] = (),
    allow_import: str | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> dict[str, Any]:
    """Measure the newest good checkpoint of a run; see `Task.evaluate`.

    Args:
        run: The run.
        root: Folder of data sets.
        only: What to measure, by names of `Task.measures`; nothing for everything.
        skip: What not to measure.
        allow_import: The function of a user's networks that may be imported and called, as the run names it.
        progress: Called with each stage.

    Raises:
        UsageError: If there is no such measure, or the evaluation of this kind of run is always the whole.
        RuntimeError: If the run has finished and has the evaluation of its last step, and the checkpoint of that step
            is damaged: an older one would take the place of the final evaluation.
    """
    if run.status.state == "finished" and is_evaluated(run):
        found, last = run.load(), run.status.step
        if found is not None and found.step != last:
            raise RuntimeError(
                f"The checkpoint of the last step, {last}, is damaged, and {run.path / EVALUATION} has the evaluation "
                f"of that step. It was left as it is. To evaluate step {found.step} instead, move that file away."
            )
    task = task_of(read_config(run.config))
    some: dict[str, Any] = {"only": only, "skip": skip} if task.measures else {}
    if (only or skip) and not some:
        raise UsageError(f"Runs of {task.kind} are evaluated as a whole; run without --only and --skip.")
    return task.evaluate(run, root=root, allow_import=allow_import, progress=progress, **some)


def is_evaluated(run: Run) -> bool:
    """Whether a run has an evaluation of its last step."""
    file = run.path / EVALUATION
    if not file.is_file():
        return False
    try:
        values = json.loads(file.read_bytes())
    except ValueError:
        return False
    return isinstance(values, dict) and values.get("step", run.status.step) == run.status.step


__all__ = ["TASKS", "task_of", "names", "preset", "train", "evaluate_run", "is_evaluated", "read_config"]
