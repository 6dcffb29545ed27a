"""One loop that trains any task: checkpoints, resuming bit for bit, metrics, progress, signals, ranks, divergence."""

import contextlib
import time
from collections.abc import Callable, Iterator
from statistics import fmean
from typing import Any

import torch
from torch.linalg import LinAlgError  # type: ignore[attr-defined]  # public, but missing from the stubs

from orthocond._checks import NotFiniteError
from orthocond.lab.progress import Progress, stages
from orthocond.lab.runs import Guard, Run, capture_rng, restore_rng
from orthocond.lab.task import Task

_TIMES = ("step_seconds", "step_cpu_seconds")


class Loop:
    """The training of a task in a run folder.

    Under torchrun every process makes one. Batches are divided among the processes, so that their number changes
    nothing but the rounding.

    Args:
        task: What is trained.
        run: The folder.
        progress: Called after each step, on the first process.
        tracker: Name of a tracker of Accelerate that gets the metrics too, for example ``"tensorboard"``.
    """

    def __init__(
        self,
        task: Task[Any],
        run: Run,
        *,
        progress: Callable[[Progress], None] | None = None,
        tracker: str | None = None,
    ) -> None:
        self.task = task
        self.run = run
        self.accelerator = task.accelerator
        self._progress = progress
        task.enter = stages(progress if self.accelerator.is_main_process else None)
        self._tracker = tracker
        self._guard = Guard(run, task.module, monitor=task.monitor)
        self._warned: set[str] = set()  # what was wrong at the last line of metrics
        self._times: list[tuple[float, float]] = []  # of the steps since the last line of metrics

    def train(self) -> int:
        """Train from the last checkpoint to the end, or until asked to stop.

        Returns:
            0, or 130 and 143 where Ctrl-C or SIGTERM ended it after the state was saved.

        Raises:
            FloatingPointError: If the training diverges; the text is a diagnosis, and checkpoints stay.
            OSError: If the disk is full or read-only; checkpoints stay.
        """
        first = self._resume() + 1
        if self._tracker:
            self.accelerator.init_trackers("orthocond")
        with self._guard, _watching(self.task):
            for step in range(first, self.task.steps + 1):
                self._advance(step)
                stop = self._guard.should_stop()
                if stop or self.task.saves(step):
                    self.run.save(self._state(), step)
                if stop:
                    break
        if not self._guard.exit_code:
            self.run.set_status("finished", self.task.steps)
        if self._tracker:
            self.accelerator.end_training()
        return self._guard.exit_code

    def make_step(self, step: int) -> dict[str, float]:
        """Make one step of the task, without metrics and pictures; its losses, averaged over the processes."""
        lr = self.task.learning_rate(step)
        for optimizer in self.task.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group.get("factor", 1.0)
        losses = self.task.step(step, lambda loss: self._guard.check(step, loss))
        means = self.accelerator.reduce(torch.stack([loss.detach().double() for loss in losses.values()]), "mean")
        return dict(zip(losses, means.tolist(), strict=True))

    def _advance(self, step: int) -> None:
        """Make a step, and log, draw and show what is due after it."""
        task = self.task
        epoch, index = divmod(step - 1, task.epoch_steps)
        lines: list[tuple[int, dict[str, Any], dict[str, float]]] = []
        with self._diverging(step):
            start = time.perf_counter(), time.process_time()
            numbers = self.make_step(step)
            self._times.append((time.perf_counter() - start[0], time.process_time() - start[1]))
            if task.logs(step):
                lines.append((epoch, numbers | {"lr": task.learning_rate(step)} | task.facts(), self._timing()))
                self._warn(step)
        if (found := task.end_of_epoch(step, index + 1, numbers)) is not None:
            lines.append((epoch + 1, found, {}))
        if step == task.steps:
            lines[-1][1]["finished"] = True
        for place, metrics, timing in lines:
            self._log(step, place, metrics, timing)
        if self.accelerator.is_main_process:
            task.draw(step, self.run)
            if self._progress is not None:
                self._progress(Progress(step, task.steps, task.shown(numbers)))

    @contextlib.contextmanager
    def _diverging(self, step: int) -> Iterator[None]:
        """An error of a layer, treatment or spectrum that was given numbers which are not finite is a divergence."""
        try:
            yield
        except (ValueError, LinAlgError) as error:
            if not is_divergence(error, self.task.module):
                raise
            text = f"The training diverged at step {step}: {error}\n  {self._guard.diagnosis(step)}"
            self.run.note(text)
            raise FloatingPointError(text) from error

    def _warn(self, step: int) -> None:
        """Note in the run's log what begins to be wrong."""
        found = {text.partition(":")[0]: text for text in self.task.warnings()}
        for sign in found.keys() - self._warned:
            self.run.note(f"Step {step}: {found[sign]}")
        self._warned = set(found)

    def _timing(self) -> dict[str, float]:
        """Means since the last line: not all steps cost the same."""
        means = [fmean(column) for column in zip(*self._times, strict=True)]
        self._times.clear()
        return dict(zip(_TIMES, means, strict=True))

    def _log(self, step: int, epoch: int, metrics: dict[str, Any], timing: dict[str, float]) -> None:
        self.run.log(step, epoch, timing=timing, **metrics)
        if self._tracker:
            self.accelerator.log({k: v for k, v in metrics.items() if isinstance(v, (int, float))}, step)

    def _state(self) -> dict[str, Any]:
        scaler, treatment = self.accelerator.scaler, self.task.treatment
        return self.task.state() | {
            "scaler": scaler.state_dict() if scaler else None,
            "treatment": None if treatment is None else treatment.state_dict(),
            "rng": capture_rng(),
        }

    def _resume(self) -> int:
        found = self.run.resume()
        if found is None:
            return 0
        state = found.state
        self.task.load_state(state)
        if self.accelerator.scaler and state["scaler"]:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        if self.task.treatment is not None:
            self.task.treatment.load_state_dict(state["treatment"])
        restore_rng(state["rng"])
        return found.step


def is_divergence(error: Exception, module: torch.nn.Module) -> bool:
    """Whether an error in a step means that the training has diverged.

    It does if it says so (`NotFiniteError`), if a decomposition failed, or if a parameter or buffer is not finite. Any
    other error is one of data, network or settings.

    Args:
        error: The error.
        module: The networks.
    """
    if isinstance(error, (NotFiniteError, LinAlgError)):
        return True
    return not all(bool(t.isfinite().all()) for t in (*module.parameters(), *module.buffers()))


@contextlib.contextmanager
def _watching(task: Task[Any]) -> Iterator[None]:
    """Let the monitor of a task watch, if it has one."""
    if task.monitor is None:
        yield
        return
    task.monitor.start()
    try:
        yield
    finally:
        task.monitor.stop(warn=False)
