"""Many trainings, each in a process of its own, some at a time; those that exist are continued or left as they are."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from os import PathLike
from typing import Any

from orthocond.lab.experiments import EVALUATION, Config, assess, read_config, train
from orthocond.lab.progress import Progress
from orthocond.lab.runs import Run
from orthocond.lab.runs.finding import is_finished, open_or_create

_REPORT_EVERY = 5  # steps between lines that a process sends to the one that watches it


@dataclass(frozen=True)
class Outcome:
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
) -> list[Outcome]:
    """Train and evaluate every configuration that is not finished yet, in processes of their own.

    A training that ends with an error does not stop the others. Ctrl-C lets all of them save, and ends.

    Args:
        configs: What to train.
        root: Folder of the runs.
        jobs: How many at a time; the number of cores, if None. The cores are divided among them.
        data_root: Folder of data sets.
        progress: Called with the place of a configuration and where it stands; from several threads.

    Returns:
        The outcomes, in the order of the configurations.

    Raises:
        KeyboardInterrupt: After Ctrl-C, when all have saved.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs = max(1, min(jobs or cores, len(configs)))
    runs = [open_or_create(root, config) for config in configs]
    environment = os.environ | {
        "OMP_NUM_THREADS": str(max(1, cores // jobs)),
        # Freed activations stay with the process instead of being mapped and cleared anew in every step: 20 % faster.
        "MALLOC_MMAP_THRESHOLD_": str(2**33),
        "MALLOC_TRIM_THRESHOLD_": str(2**33),
    }
    processes: set[subprocess.Popen[str]] = set()
    stopping = threading.Event()

    def one(index: int) -> Outcome:
        run = runs[index]
        if is_finished(run) and (run.path / EVALUATION).exists():
            return Outcome(run, 0)
        if stopping.is_set():
            return Outcome(run, 128 + signal.SIGINT)
        command = [sys.executable, "-m", "orthocond.lab.launch", str(run.path), *([data_root] if data_root else [])]
        # In a session of its own it gets no Ctrl-C from the terminal, but one signal from here.
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        ) as process:
            processes.add(process)
            try:
                return Outcome(run, *_follow(process, index, progress))
            finally:
                processes.discard(process)

    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(one, index) for index in range(len(configs))]
        try:
            return [future.result() for future in futures]
        except KeyboardInterrupt:
            stopping.set()
            for process in list(processes):
                process.send_signal(signal.SIGINT)
            raise


def _follow(
    process: subprocess.Popen[str], index: int, progress: Callable[[int, Progress], None] | None
) -> tuple[int, str]:
    """Pass on where a process stands until it ends; its exit code, and the last lines that were not about that."""
    lines: list[str] = []
    for line in process.stdout or ():
        if line.startswith('{"step"'):
            if progress is not None:
                progress(index, Progress(**json.loads(line)))
        else:
            lines = [*lines[-30:], line]
    return process.wait(), "".join(lines)


def _main(arguments: Sequence[str]) -> int:
    """Train and evaluate the run in a folder and report on standard output: what `launch` starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background processes without it
    run = Run.open(arguments[0])
    config = read_config(run.config)

    def report(state: Progress) -> None:
        if state.step % _REPORT_EVERY == 0 or state.step == state.steps:
            values: dict[str, Any] = state._asdict()
            print(json.dumps(values), flush=True)

    root = arguments[1] if len(arguments) > 1 else None
    code = train(config, run, root=root, progress=report)
    if code == 0:
        assess(config, run, root=root)
    return code


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))


__all__ = ["Outcome", "launch"]
