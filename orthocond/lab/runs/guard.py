"""Stop a run in order: at a loss that is not finite, at Ctrl-C, at SIGTERM."""

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor, nn

from orthocond.lab.runs import checkpoint, ranks
from orthocond.lab.runs.folder import Run
from orthocond.lab.runs.status import State
from orthocond.matrix import solver_failures
from orthocond.matrix.spectra import spectrum

_ECHO = 1.0  # seconds in which torchrun passes a Ctrl-C on to processes that have got it from the terminal already
_LISTED = 5  # names in a diagnosis, before "and so many more"


class Guard:
    """Watch a training loop: it stops when the loss is not finite, and ends a step and saves when it is asked to stop.

    How the ``with`` block ends becomes the status of the run: ``stopped`` after a signal, ``diverged`` after a
    FloatingPointError (that of `check`, or your own), ``failed`` after another error. After its last step the loop
    writes ``run.set_status("finished", step)`` itself.

    The first Ctrl-C (SIGINT) or SIGTERM sets a flag that `should_stop` reads at the end of the step; a second one
    aborts at once. (Under torchrun it has to come a second later: torchrun passes the first one on, so that it comes
    twice.) `exit_code` is then 128 plus the number of the signal, as shells have it: 130 after Ctrl-C, 143 after
    SIGTERM. Under torch.distributed all ranks stop at the same step, even if only one was asked; they all have to call
    `check` and `should_stop`.

    Args:
        run: The run whose last good checkpoint and log a diagnosis names.
        model: Its parameters, gradients and covariances are looked at for a diagnosis.
        monitor: A `ConditionMonitor`, whose last records become part of a diagnosis.
        signals: The signals to wait for; none where the loop does not run in the main thread.

    Raises:
        RuntimeError: On entering, if there are signals and this is not the main thread.

    Example:
        >>> import tempfile
        >>> root = tempfile.TemporaryDirectory()
        >>> run = Run.create(root.name, "sprites", {})
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with Guard(run, model) as guard:
        ...     for step in range(1, 4):
        ...         optimizer.zero_grad()
        ...         loss = model(torch.ones(1, 2)).square().mean()
        ...         loss.backward()
        ...         guard.check(step, loss)  # FloatingPointError with a diagnosis if it is not finite
        ...         optimizer.step()
        ...         if step == 3 or guard.should_stop():
        ...             run.save({"model": model.state_dict()}, step)
        ...             break
        >>> guard.exit_code
        0
        >>> root.cleanup()
    """

    def __init__(
        self,
        run: Run,
        model: nn.Module | None = None,
        *,
        monitor: Any = None,
        signals: Iterable[signal.Signals] = (signal.SIGINT, signal.SIGTERM),
    ) -> None:
        self._run = run
        self._model = model
        self._monitor = monitor
        self._signals = tuple(signals)
        self._previous: dict[signal.Signals, Any] = {}
        self._received = 0  # the signal that came to this process; only the handler changes it
        self._agreed = 0  # the signal for which all ranks stop
        self._since = 0.0
        self._step: int | None = None
        self._process = os.getpid()

    def __enter__(self) -> Self:
        if self._signals and threading.current_thread() is not threading.main_thread():
            raise RuntimeError("Only the main thread gets signals; start the loop there, or pass signals=().")
        self._process = os.getpid()
        self._previous = {s: signal.signal(s, self._receive) for s in self._signals}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._restore()
        if kind is None and self.exit_code:
            self._run.set_status("stopped", self._step, f"Stopped by {signal.Signals(self.exit_code - 128).name}")
        elif kind is not None:
            with contextlib.suppress(OSError):  # of a full disk, which must not hide the error that ended the loop
                self._run.set_status(*_ending(kind, error, self._step))

    @property
    def exit_code(self) -> int:
        """0, or 128 plus the number of the signal that has come, also if it came after the last `should_stop`."""
        number = self._agreed or self._received
        return 128 + number if number else 0

    def should_stop(self) -> bool:
        """Whether to save and end now: a signal has come, on this rank or another."""
        self._agreed = ranks.largest(self._received)  # a signal meanwhile is seen after the next step
        return self._agreed != 0

    def check(self, step: int, loss: Tensor | float) -> None:
        """Stop if the loss is not finite, on this rank or another. Reads the loss from the device.

        Call it after ``backward()`` and before ``optimizer.step()``: the weights are then still good, and the
        diagnosis can say which gradients are not. The diagnosis is written to the run's log too.

        Args:
            step: The step.
            loss: The loss, one number.

        Raises:
            FloatingPointError: If it is NaN or infinite; the text is the diagnosis.
        """
        self._step = step
        value = float(loss.detach()) if isinstance(loss, Tensor) else float(loss)
        if not ranks.largest(int(not math.isfinite(value))):
            return
        text = self.diagnosis(step, value)
        self._run.note(text)
        raise FloatingPointError(text)

    def diagnosis(self, step: int, loss: float | None = None) -> str:
        """What is known at this moment: loss, entries that are not finite, failures of solvers, condition numbers."""
        lines = []
        if loss is not None:
            where = f" here on rank {ranks.rank()}, and not finite on another rank" if math.isfinite(loss) else ""
            lines.append(f"The loss is {loss} at step {step}{where}.")
        if self._model is not None:
            lines += _not_finite(self._model)
            lines += _running_covariances(self._model)
        lines += _last_records(self._monitor)
        lines.append(
            f"Decompositions that did not converge: {solver_failures.count}, of which {solver_failures.recovered} were "
            "solved by another attempt."
        )
        if ranks.rank() == 0:  # the others may not see the folder
            steps = checkpoint.steps(self._run.checkpoints)
            last = f"The last one is that of step {steps[0]}" if steps else "There is none yet"
            lines.append(f"Checkpoints are in {self._run.checkpoints} and stay as they are. {last}.")
        lines.append("Try a smaller learning rate, a larger eps of the SVD layers, or full precision.")
        return "\n  ".join(lines)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._received:
            if "TORCHELASTIC_RUN_ID" in os.environ and time.monotonic() - self._since < _ECHO:
                return
            self._restore()
            # Not by raising the signal again: a shell starts background processes with Ctrl-C ignored.
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        self._received, self._since = number, time.monotonic()
        if os.getpid() == self._process:  # not in the worker processes of a data loader, which inherit this
            os.write(2, b"\nStopping after this step; the state will be saved. Once more aborts at once.\n")

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}


def _ending(kind: type[BaseException], error: BaseException | None, step: int | None) -> tuple[State, int | None, str]:
    """State, step and message of a run that an error has ended."""
    if not issubclass(kind, Exception):
        return "stopped", step, f"Aborted by {kind.__name__}"
    first = str(error).strip().partition("\n")[0].rstrip(".")
    if issubclass(kind, FloatingPointError):
        return "diverged", step, first
    return "failed", step, f"{kind.__name__}: {first}"


def _not_finite(model: nn.Module) -> list[str]:
    lines = []
    for kind, tensors in (
        ("Parameters", model.named_parameters()),
        ("Gradients", ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)),
        ("Buffers", model.named_buffers()),
    ):
        bad = list(_bad(tensors))
        more = f", and {len(bad) - _LISTED} more" if len(bad) > _LISTED else ""
        lines.append(f"{kind} that are not finite: {', '.join(bad[:_LISTED]) or 'none'}{more}.")
    return lines


def _bad(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
    for name, tensor in tensors:
        count = int((~torch.isfinite(tensor.detach())).sum())
        if count:
            yield f"{name} ({count} of {tensor.numel()})"


def _running_covariances(model: nn.Module) -> list[str]:
    """The condition of the covariances that whitening layers keep."""
    lines = []
    for name, module in model.named_modules():
        covariance = getattr(module, "running_covariance", None)
        if isinstance(covariance, Tensor) and torch.isfinite(covariance).all():
            with contextlib.suppress(RuntimeError):  # a decomposition that fails is counted, and must not hide the rest
                lines.append(f"{name}: {spectrum(covariance, eps=getattr(module, 'eps', 0.0))}")
    return lines


def _last_records(monitor: Any) -> list[str]:
    """The last record of each layer that a monitor watched."""
    if monitor is None:
        return []
    last = {record["layer"]: record for record in monitor.history}
    return [f"{layer}: " + ", ".join(f"{k} {v}" for k, v in r.items() if k != "layer") for layer, r in last.items()]
