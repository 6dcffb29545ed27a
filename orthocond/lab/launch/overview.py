"""Where trainings stand, for somebody who did not start them or has left: from their run folders and jobs."""

import time
from collections.abc import Callable, Container, Sequence
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from orthocond.lab.config import Config
from orthocond.lab.experiments import is_evaluated
from orthocond.lab.launch.files import LOG, PROGRESS, Follower, Job, read_job
from orthocond.lab.launch.slurm import ENDED, states
from orthocond.lab.progress import Progress
from orthocond.lab.runs import Run
from orthocond.lab.runs.finding import find_runs, name_of

LIVE = ("waiting", "running")
_SILENCE = 600.0  # seconds without a report after which a training may be gone
_PAUSE = 2.0


class Standing(NamedTuple):
    """Where a training stands.

    Attributes:
        name: What it is called.
        state: One of: missing, kept (its result is there, its run is not), waiting, running, stopped, lost, failed,
            diverged, finished.
        step: How many steps are done.
        steps: How many there are; None if that is not known.
        job: Its job on the cluster, or nothing.
        note: What else there is to say: why it waits, what it said last, where its log is.
        run: Its folder; None if it has none.
    """

    name: str
    state: str
    step: int = 0
    steps: int | None = None
    job: str = ""
    note: str = ""
    run: Path | None = None


def standings(configs: Sequence[Config], root: str | PathLike[str], kept: Container[Config] = ()) -> list[Standing]:
    """Where trainings stand, in their order.

    Args:
        configs: The trainings.
        root: Folder of the runs.
        kept: Those whose results are kept without their runs.
    """
    runs = {config: run for run, config in find_runs(root)}
    jobs = {config: job for config in configs if config in runs and (job := read_job(runs[config].path)) is not None}
    known = states(job.id for job in jobs.values())
    result = []
    for config in configs:
        if config not in runs:
            result.append(Standing(name_of(config), "kept" if config in kept else "missing"))
            continue
        try:
            result.append(_standing(name_of(config), runs[config], jobs.get(config), known))
        except ValueError as error:  # a damaged file, which the text names
            result.append(Standing(name_of(config), "failed", note=str(error), run=runs[config].path))
    return result


def _standing(name: str, run: Run, job: Job | None, known: dict[str, tuple[str, str]] | None) -> Standing:
    status, reports = run.status, Follower(run.path, from_end=True).read()
    step, steps = status.step, None
    if steady := [report for report in reports if not report.stage]:
        step, steps = max(step, steady[-1].step), steady[-1].steps
    log = run.path / LOG
    state: str = status.state
    note, number = status.message, ""
    if state == "finished":
        step, steps = status.step, status.step
        state = "finished" if is_evaluated(run) else "running"
        note = "" if is_evaluated(run) else f"evaluation: {reports[-1].stage}" if reports else "evaluation"
    queued = known.get(job.id) if known and job is not None else None
    if job is not None and state not in ("finished", "diverged"):
        number = job.id
        if known is None:
            note = "Slurm does not answer"
        elif queued is not None and queued[0] not in ENDED:
            state = "running" if queued[0] == "RUNNING" else "waiting"
            note = note if state == "running" else f"{queued[0].lower()}: {queued[1]}"
        elif state != "failed":
            state, note = "lost", f"{(queued or ('no longer in the queue',))[0].lower()}; the same command goes on"
    elif state == "running" and (age := _age(run.path)) > _SILENCE:
        note = f"silent for {age / 3600:.1f} h: killed, or a long step"
    elif state == "created":
        state = "waiting"
    if state in ("failed", "lost", "diverged") and log.is_file():
        note = f"{note}; log: {log}"
    return Standing(name, state, step, steps, number, note, run.path)


def _age(run: Path) -> float:
    """Seconds since a training reported."""
    try:
        return time.time() - (run / PROGRESS).stat().st_mtime
    except OSError:
        return 0.0


def follow(read: Callable[[], Sequence[Standing]], progress: Callable[[int, Progress], None]) -> list[Standing]:
    """Pass on what trainings report until none waits or runs any more.

    Args:
        read: Says where they stand.
        progress: Called with the place of a training and where it stands.

    Returns:
        Where they stand at the end.
    """
    followers: dict[Path, Follower] = {}
    while True:
        found = list(read())
        for place, standing in enumerate(found):
            if standing.run is not None and standing.state in LIVE:
                follower = followers.setdefault(standing.run, Follower(standing.run, from_end=True))
                for state in follower.read():
                    progress(place, state)
        if not any(standing.state in LIVE for standing in found):
            return found
        time.sleep(_PAUSE)
