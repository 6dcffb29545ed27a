"""Many trainings, each in a process of its own, some at a time; those that exist are continued or left as they are."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from os import PathLike
from typing import Any

from orthocond.lab.config import Config, read_config
from orthocond.lab.errors import EXPECTED, explain
from orthocond.lab.experiments import is_evaluated, train
from orthocond.lab.progress import Progress
from orthocond.lab.runs import Run
from orthocond.lab.runs.finding import is_finished, open_or_create

_REPORT_EVERY = 5  # steps between lines that a process sends to the one that watches it
_LINES = 30  # of what a process said that are kept
_PROGRESS = '{"stage": '  # how such a line begins


@dataclass(frozen=True)
class Ending:
    """How a training ended: its run, its exit code, and the last lines of what it said."""

    run: Run
    code: int
    text: str = ""


def launch(
    configs: Sequence[Config],
    root: str | PathLike[str],
    *,
    jobs: int | None = None,
    data_root: str | None = None,
    progress: Callable[[int, Progress], None] | None = None,
) -> list[Ending]:
    """Train and evaluate every configuration that is not finished yet, in processes of their own.

    A training that ends with an error does not stop the others. Ctrl-C and SIGTERM let all of them save, and end; a
    second one ends them at once.

    Args:
        configs: What to train.
        root: Folder of the runs.
        jobs: How many at a time; the number of cores, if None. The cores are divided among them.
        data_root: Folder of data sets.
        progress: Called with the place of a configuration and where it stands; from several threads.

    Returns:
        The endings, in the order of the configurations.

    Raises:
        KeyboardInterrupt: After Ctrl-C, when all have saved.
        SystemExit: After SIGTERM, when all have saved.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs = max(1, min(jobs or cores, len(configs)))
    runs = [open_or_create(root, config) for config in configs]
    workers = _Workers(data_root, max(1, cores // jobs), progress)
    with _sigterm_raises(), ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(workers.train, index, run) for index, run in enumerate(runs)]
        try:
            return [future.result() for future in futures]
        except (KeyboardInterrupt, SystemExit):
            workers.stop(signal.SIGINT)
            try:
                for future in futures:
                    future.result()
            except (KeyboardInterrupt, SystemExit):
                workers.stop(signal.SIGKILL)
            raise


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Let SIGTERM raise SystemExit with its exit code, as Ctrl-C raises KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Workers:
    """The processes that train.

    Args:
        data_root: Folder of data sets.
        threads: Threads of each process.
        progress: See `launch`.
    """

    def __init__(self, data_root: str | None, threads: int, progress: Callable[[int, Progress], None] | None) -> None:
        self._arguments = [data_root] if data_root else []
        self._progress = progress
        self._environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            # Freed activations stay with the process instead of being mapped and cleared anew in every step: 20 %
            # faster.
            "MALLOC_MMAP_THRESHOLD_": str(2**33),
            "MALLOC_TRIM_THRESHOLD_": str(2**33),
        }
        self._processes: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()
        self._stopping = False

    def stop(self, number: signal.Signals) -> None:
        """Start no more processes, and send a signal to those that run."""
        with self._lock:
            self._stopping = True
            for process in self._processes:
                process.send_signal(number)

    def train(self, index: int, run: Run) -> Ending:
        """Train and evaluate one run, unless that is done."""
        if is_finished(run) and is_evaluated(run):
            return Ending(run, 0)
        command = [sys.executable, "-m", "orthocond.lab.launch", str(run.path), *self._arguments]
        with self._lock:
            if self._stopping:
                return Ending(run, 128 + signal.SIGINT)
            # In a session of its own it gets no Ctrl-C from the terminal, but one signal from here.
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                encoding="utf-8",
                errors="replace",
                env=self._environment | {"PYTHONIOENCODING": "utf-8"},
                start_new_session=True,
            )
            self._processes.add(process)
        try:
            with process:
                return Ending(run, *self._follow(process, index))
        finally:
            with self._lock:
                self._processes.discard(process)

    def _follow(self, process: subprocess.Popen[str], index: int) -> tuple[int, str]:
        """Pass on where a process stands until it ends; its exit code, and the last lines that were not about that."""
        lines: list[str] = []
        for line in process.stdout or ():
            if line.startswith(_PROGRESS):
                if self._progress is not None:
                    self._progress(index, Progress(**json.loads(line)))
            else:
                lines = [*lines[-_LINES:], line]
        return process.wait(), "".join(lines)


def _main(arguments: Sequence[str]) -> int:
    """Train and evaluate the run in a folder and report on standard output: what `launch` starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background processes without it
    try:
        run = Run.open(arguments[0])
        root = arguments[1] if len(arguments) > 1 else None
        return train(read_config(run.config), run, root=root, progress=_report)
    except EXPECTED as error:
        text, code = explain(error)
        print(text, flush=True)
        return code


def _report(state: Progress) -> None:
    if state.stage or state.step % _REPORT_EVERY == 0 or state.step == state.steps:
        values: dict[str, Any] = {"stage": state.stage} | state._asdict()
        print(json.dumps(values), flush=True)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
