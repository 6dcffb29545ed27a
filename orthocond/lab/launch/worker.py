"""The process that trains and evaluates one run, and how it is started; one of several under torchrun.

What it reports goes to ``progress.jsonl`` in the run folder, what it says to ``job.log``. Both are files: anyone can
follow a training, from any machine that sees the folder, and stop following it.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from orthocond.lab.devices import join_processes
from orthocond.lab.errors import EXPECTED, explain
from orthocond.lab.experiments import train
from orthocond.lab.launch.files import LOG, PROGRESS, header
from orthocond.lab.presets import read_config
from orthocond.lab.progress import Progress
from orthocond.lab.runs import Run

_EVERY = 5  # steps between reports, at least
_REPORTS = 2000  # of a training, about


def start(
    run: Path, data_root: str | None, threads: int, *, head: Sequence[str] = (), node: int = 0, name: str = ""
) -> "subprocess.Popen[bytes]":
    """Start the process that trains a run.

    It is in a session of its own: it gets no Ctrl-C of a terminal and no signal of a cluster, but those of its parent.

    Args:
        run: The folder.
        data_root: Folder of data sets.
        threads: Threads of the process.
        head: Words before ``-m orthocond.lab.launch`` in place of the interpreter, such as torchrun's.
        node: The number of this machine if there are several; the first one reports.
        name: What the log calls this attempt.
    """
    command = [*(head or [sys.executable]), "-m", "orthocond.lab.launch", str(run), *([data_root] if data_root else [])]
    own = {"OMP_NUM_THREADS": str(threads), "PYTHONIOENCODING": "utf-8"}
    environment = os.environ | own
    log = run / (LOG if node == 0 else f"{node}-{LOG}")
    with _fresh(run / PROGRESS, node) as reports, log.open("ab") as said:
        said.write(header(name))
        said.flush()
        return subprocess.Popen(command, stdout=reports, stderr=said, env=environment, start_new_session=True)


def _fresh(path: Path, node: int) -> IO[bytes]:
    """A new file in place of the one that an earlier process wrote, which those who follow it notice."""
    if node > 0:
        return Path(os.devnull).open("wb")
    path.unlink(missing_ok=True)
    return path.open("wb")


def main(arguments: Sequence[str]) -> int:
    """Train and evaluate the run in a folder, and report on standard output.

    Whatever else is printed goes to standard error.

    Args:
        arguments: The folder of the run, and that of data sets if it is not the usual one.

    Returns:
        The exit code; see `orthocond.lab.errors.explain`.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background processes without it
    reports = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        join_processes()
        run = Run.open(arguments[0])
        root = arguments[1] if len(arguments) > 1 else None
        return train(read_config(run.config), run, root=root, progress=_reporter(reports))
    except EXPECTED as error:
        text, code = explain(error)
        print(text, file=sys.stderr, flush=True)
        return code


def _reporter(file: IO[str]) -> Callable[[Progress], None]:
    """Write a line now and then: few enough for a file that stays small, and for the beginning of every stage."""

    def report(state: Progress) -> None:
        every = max(_EVERY, state.steps // _REPORTS)
        if state.step % every == 0 or state.step == state.steps:
            values: dict[str, Any] = {"stage": state.stage} | state._asdict() | {"time": round(time.time(), 1)}
            file.write(json.dumps(values) + "\n")
            file.flush()

    return report
