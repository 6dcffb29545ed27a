"""Bars for those who watch trainings, lines where nobody does."""

import os
import threading
import time
from collections.abc import Sequence
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.text import Text

from orthocond.lab.progress import Progress

_QUIET_SECONDS = 30.0  # between lines of one training, but every tenth of it has one
_BRISK_SECONDS = 15.0  # between lines of a stage of an evaluation, for each tenth of it
_MANY = 8  # trainings of which all keep their bars; of more, those that run

_ALL = "all"


_PLAIN = ("CI", "NO_COLOR", "JPY_PARENT_PID")  # Jupyter sets the last one; what `!command` prints looks like a terminal


def is_plain(console: Console | None = None) -> bool:
    """Whether to print lines instead of bars: no terminal, continuous integration, NO_COLOR, or a notebook."""
    return not (console or Console()).is_terminal or any(os.environ.get(name) for name in _PLAIN)


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    return Console().is_jupyter


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.1f} steps/s" if task.speed and task.description != _ALL else "")


class Display:
    """Where one or several trainings stand, with rate and remaining time; a context manager.

    In a terminal each training has a bar. Without one, or with ``CI`` or ``NO_COLOR`` in the environment, each has a
    line at every tenth of its steps, and every half minute; so it has in a notebook. It may be called from several
    threads.

    Args:
        names: What to call the trainings, in their order.
        quiet: Print nothing.
        plain: Lines, whatever the terminal is; None finds out.
        console: Where to print; standard output if None.

    Example:
        >>> with Display(["nog"], plain=True) as display:
        ...     display(0, Progress(50, 100, {"loss": 1.25, "error": None}))
        nog: step 50 of 100, loss 1.25
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        quiet: bool = False,
        plain: bool | None = None,
        console: Console | None = None,
    ) -> None:
        self._names = names
        self._quiet = quiet
        self._console = console or Console(force_jupyter=False)  # lines of text, where rich makes blocks of HTML
        self._plain = is_plain(self._console) or is_notebook() if plain is None else plain
        self._lock = threading.Lock()
        self._first: dict[int, tuple[int, float]] = {}  # step and time of the first report
        self._last: dict[int, tuple[int, float]] = {}  # tenth and time of the last line
        self._tasks: dict[int, Any] = {}
        self._stages: dict[int, str] = {}  # that each training, or its evaluation, is in
        self._parts: dict[int, float] = {}  # of each training, how much is done
        self._bars: Bars | None = None

    def __enter__(self) -> Self:
        if not (self._quiet or self._plain):
            self._bars = Bars(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                _Rate(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[numbers]}"),
                console=self._console,
            )
            self._bars.start()
            if len(self._names) > 1:
                self._all = self._bars.add_task(_ALL, total=len(self._names), numbers="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def say(self, text: str) -> None:
        """Print a line, above the bars."""
        if not self._quiet:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def __call__(self, index: int, state: Progress) -> None:
        """Show where a training stands.

        Args:
            index: Which one.
            state: Where it stands.
        """
        if self._quiet:
            return
        with self._lock:
            if self._stages.get(index, "") != state.stage:  # its own steps, rate and remaining time
                self._first.pop(index, None)
                self._last.pop(index, None)
            if self._bars is not None:
                self._bar(self._bars, index, state)
            else:
                self._line(index, state)
            self._stages[index] = state.stage

    def _name(self, index: int, state: Progress) -> str:
        name = self._names[index] if index < len(self._names) else f"training {index + 1}"
        return f"{name}: {state.stage}" if state.stage else name

    def _bar(self, bars: Bars, index: int, state: Progress) -> None:
        if index not in self._tasks:  # a resumed training does not begin at 0, and was not that fast
            self._tasks[index] = bars.add_task(
                self._name(index, state), total=state.steps, completed=state.step, numbers=_numbers(state)
            )
        elif self._stages.get(index, "") != state.stage:
            bars.reset(self._tasks[index], description=self._name(index, state), total=state.steps, visible=True)
        bars.update(self._tasks[index], completed=state.step, numbers=_numbers(state))
        self._parts[index] = 1.0 if state.stage else state.step / max(state.steps, 1)
        if len(self._names) > 1:
            bars.update(self._all, completed=sum(self._parts.values()))
        if len(self._names) > _MANY and state.step == state.steps:
            bars.update(self._tasks[index], visible=False)

    def _line(self, index: int, state: Progress) -> None:
        now = time.monotonic()
        name = self._name(index, state)
        if state.stage and index not in self._first:
            self._console.print(name, highlight=False, markup=False, soft_wrap=True)
        first_step, start = self._first.setdefault(index, (state.step, now))
        tenth, before = self._last.get(index, (0, start))
        reached = 10 * state.step // max(state.steps, 1)
        if state.stage and state.steps == 1:
            return
        wait = _QUIET_SECONDS if reached <= tenth else _BRISK_SECONDS if state.stage else 0.0
        if now - before < wait:
            return
        self._last[index] = (reached, now)
        parts = [f"step {state.step} of {state.steps}"]
        if now > start and state.step > first_step:
            rate = (state.step - first_step) / (now - start)
            parts += [f"{rate:.1f} steps/s", f"{duration((state.steps - state.step) / rate)} left"]
        parts += [text for text in [_numbers(state)] if text]
        self._console.print(f"{name}: {', '.join(parts)}", highlight=False, markup=False, soft_wrap=True)


def _numbers(state: Progress) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in state.numbers.items() if value is not None)


def duration(seconds: float) -> str:
    """Seconds as people say them.

    Example:
        >>> duration(42), duration(200), duration(9000), duration(300_000)
        ('42 s', '3 min', '2.5 h', '3.5 days')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} days"
