"""Train what is missing and watch it: the same for every executor."""

import contextlib
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from pathlib import Path

from orthocond.lab.config import Config
from orthocond.lab.experiments import is_evaluated
from orthocond.lab.launch.executor import Ending, Executor
from orthocond.lab.launch.files import PROGRESS, Follower, read_job
from orthocond.lab.launch.local import Local
from orthocond.lab.progress import Progress
from orthocond.lab.runs import Run
from orthocond.lab.runs.finding import is_finished, open_or_create_all


def launch(
    configs: Sequence[Config],
    root: str | PathLike[str],
    *,
    executor: Executor | None = None,
    jobs: int | None = None,
    data_root: str | None = None,
    progress: Callable[[int, Progress], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> list[Ending]:
    """Train and evaluate every configuration that is not finished yet.

    Runs that exist are continued, or left as they are if they are finished. A training that ends with an error does
    not stop the others.

    Args:
        configs: What to train.
        root: Folder of the runs.
        executor: Where to train; on this machine, if None.
        jobs: How many at a time on this machine, if there is no executor; see `Local`.
        data_root: Folder of data sets.
        progress: Called with the place of a configuration and where it stands.
        say: Called with news, such as that of a job that was lost and submitted again.

    Returns:
        The endings, in the order of the configurations.

    Raises:
        KeyboardInterrupt: After Ctrl-C, when the executor has stopped: on this machine when all trainings have saved.
            A second Ctrl-C ends them at once.
        SystemExit: After SIGTERM, likewise.
    """
    executor = executor or Local(jobs)
    there = set(Path(root).glob("*"))
    runs = open_or_create_all(root, configs)
    endings = {run.path: Ending(run, 0) for run in runs if is_finished(run) and is_evaluated(run)}
    missing = {run.path: run for run in runs if run.path not in endings}
    places = {run.path: place for place, run in reversed(list(enumerate(runs)))}
    show = progress or (lambda place, state: None)

    def tell(executor: Executor) -> None:
        for text in executor.news():
            if say is not None:
                say(text)

    with _sigterm_raises():
        try:
            _submit(executor, list(missing.values()), data_root, there)
            followers = {path: Follower(path, from_end=(path / PROGRESS).exists()) for path in missing}
            while followers:
                ended = executor.ended()
                for path, follower in followers.items():
                    for state in follower.read():
                        show(places[path], state)
                tell(executor)
                for ending in ended:
                    endings[ending.run.path] = ending
                    del followers[ending.run.path]
                if followers:
                    time.sleep(executor.pause)
        except BaseException:
            executor.stop()
            tell(executor)
            raise
    return [endings[run.path] for run in runs]


def _submit(executor: Executor, runs: list[Run], data_root: str | None, there: set[Path]) -> None:
    """Submit runs; if that is refused, remove the folders that were made for it and would wait for ever."""
    try:
        executor.submit(runs, data_root)
    except Exception:
        for path in {run.path for run in runs} - there:
            if read_job(path) is None and not (path / PROGRESS).exists():
                shutil.rmtree(path)
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
