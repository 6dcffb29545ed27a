"""Trainings on this machine, some at a time.

submitit's own local executor starts all jobs at once, hides the GPUs of those that ask for none, and kills a job one
second after it asked it to end, saved or not. So this is a small scheduler of its own.
"""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from orthocond.lab.launch.executor import Ending
from orthocond.lab.launch.files import LOG, PROGRESS, said
from orthocond.lab.launch.slurm import live_jobs
from orthocond.lab.launch.worker import start
from orthocond.lab.runs import Run

_PAUSE = 0.05  # seconds between looks at processes that were told to end


class Local:
    """Runs trainings on this machine, each in a process of its own; see `Executor`.

    Args:
        jobs: How many at a time; the number of cores, if None. The cores are divided among them, unless the environment
            variable OMP_NUM_THREADS says how many threads each has.
    """

    pause = 0.1

    def __init__(self, jobs: int | None = None) -> None:
        self._jobs = jobs
        self._threads = 1
        self._data_root: str | None = None
        self._waiting: list[Run] = []
        self._running: list[tuple[Run, subprocess.Popen[bytes]]] = []

    def submit(self, runs: Sequence[Run], data_root: str | None) -> None:
        _check_free(runs)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._jobs = max(1, min(self._jobs or cores, len(runs)))
        asked = os.environ.get("OMP_NUM_THREADS", "")
        self._threads = int(asked) if asked.isdecimal() else max(1, cores // self._jobs)
        self._data_root = data_root
        self._waiting += runs
        for run in runs:
            (run.path / PROGRESS).unlink(missing_ok=True)

    def ended(self) -> list[Ending]:
        endings = []
        for item in list(self._running):
            run, process = item
            code = process.poll()
            if code is not None:
                self._running.remove(item)
                endings.append(Ending(run, code, _text(run.path, code), run.path / LOG))
        while self._waiting and len(self._running) < (self._jobs or 1):
            run = self._waiting.pop(0)
            self._running.append((run, start(run.path, self._data_root, self._threads)))
        return endings

    def news(self) -> list[str]:
        return []

    def stop(self) -> None:
        """Let all of them save, and end; Ctrl-C or SIGTERM meanwhile ends them at once."""
        self._waiting.clear()
        self._send(signal.SIGINT)
        try:
            while any(process.poll() is None for _, process in self._running):
                time.sleep(_PAUSE)
        except (KeyboardInterrupt, SystemExit):
            self._send(signal.SIGKILL)
        for _, process in self._running:
            process.wait()

    def _send(self, number: signal.Signals) -> None:
        for _, process in self._running:
            process.send_signal(number)


def _check_free(runs: Sequence[Run]) -> None:
    """Refuse a training that a cluster has. Where no cluster answers, its jobs do not matter any more."""
    try:
        live = live_jobs(run.path for run in runs)
    except RuntimeError:
        return
    for run, job in live.items():
        raise RuntimeError(
            f"{run} has the job {job} on Slurm. Watch it with --executor slurm, or cancel it with --cancel to train "
            f"here; {len(live)} trainings have jobs."
        )


def _text(run: Path, code: int) -> str:
    """What a process said; for one that a signal killed, that too."""
    killed = f"\nKilled by {signal.Signals(-code).name}" if code < 0 else ""
    return (said(run / LOG) + killed).strip()
