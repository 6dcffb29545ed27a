"""What a step of each method costs: the step of the real loop, with the methods taking turns."""

import math
import random
import statistics
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from orthocond.lab.config import Config, change
from orthocond.lab.devices import make_accelerator, now, one_thread
from orthocond.lab.grammar import PARTS
from orthocond.lab.loop import Loop
from orthocond.lab.runs import Run
from orthocond.lab.task import Task

ROUNDS = 3
"""Measurements of networks before they are made anew."""
_WARM_UP = 2  # steps that are not counted: the first ones allocate
_IN_OPTIMIZER = ("gradient", "step")  # slots of the parts that act in the optimizer alone
_OPTIMIZER = ("step", "optimizer")  # names that the tasks give to the step of the optimizer that is treated


@dataclass(frozen=True)
class Ratio:
    """Median over repetitions of the ratios within one, and its 95 % interval."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Cost:
    """What one step costs.

    Attributes:
        parts: Milliseconds of the parts of a step, by their names; those of reading the data are not counted.
        total: Milliseconds of all of them.
        relative: Ratio of the whole step to that of the baseline.
        by_optimizer: The same ratio if nothing but the treated optimizer differs, which is true of NOG, OLR and Stiefel
            steps; None for other methods. The optimizer takes some percent of a step, so its scatter hides little.
    """

    parts: dict[str, float]
    total: float
    relative: Ratio
    by_optimizer: Ratio | None


class Stepper:
    """The steps of a training, one after the other, on sprites of the size that the configuration asks for.

    Args:
        task: What is trained.
        config: Its configuration.
        run: A folder for the diagnosis of a loss that is not finite; nothing else is written.
    """

    def __init__(self, task: type[Task[Any]], config: Config, run: Run) -> None:
        self.task = task(config, task.stand_in(config), make_accelerator(config.precision, run))
        self.task.mark = self._mark
        self._loop = Loop(self.task, run)
        self._count = 0
        self._parts: dict[str, float] = {}
        self._last = 0.0

    def _mark(self, name: str) -> None:
        time = now()
        self._parts[name] = self._parts.get(name, 0.0) + time - self._last
        self._last = time

    def time(self, steps: int = 1) -> dict[str, float]:
        """Make so many steps; the mean seconds of their parts."""
        self._parts = {}
        for _ in range(steps):
            self._last = now()
            # Past the end of the schedule it begins anew: there is no learning rate beyond.
            self._loop.make_step(1 + self._count % self.task.steps)
            self._count += 1
        return {name: seconds / steps for name, seconds in self._parts.items()}


def bench(
    task: type[Task[Any]],
    config: Config,
    methods: Iterable[str],
    *,
    repeats: int = 20,
    batch_size: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Cost]:
    """Time the training step of several methods, and of the baselines, with one thread.

    The images are sprites of the size that the configuration asks for: their content does not change the cost. As not
    all steps of a GAN have a gradient penalty, a measurement is of as many steps as make a period of it. The methods
    take turns, in another order in each round, so that whatever else the machine does meets all of them alike. Where in
    memory a network happens to lie changes its speed by some percent, more than NOG and OLR cost: so the networks are
    made anew for each repetition, which gives one ratio, of medians of three rounds.

    Args:
        task: What is trained.
        config: Its configuration, whose method is replaced.
        methods: Names of methods; the baselines of the task are added.
        repeats: How often the networks are made and timed.
        batch_size: Images of a step; that of the configuration if None.
        progress: Called with the number of repetitions so far, and of all.

    Returns:
        The costs by method, in the order of ``methods``.

    Raises:
        ValueError: If there is no such method, or a number is not positive.

    Example:
        >>> from orthocond.lab.experiments import TASKS, preset
        >>> costs = bench(TASKS["generation"], preset("gan-sprites"), ["none", "nog"], repeats=1, batch_size=4)
        >>> list(costs), costs["none"].relative
        (['none', 'nog'], Ratio(median=1.0, low=1.0, high=1.0))
        >>> costs = bench(TASKS["classification"], preset("dbn-sprites-small"), ["svd"], repeats=1, batch_size=4)
        >>> list(costs["svd"].parts)
        ['forward', 'backward', 'step']
    """
    if repeats < 1:
        raise ValueError(f"bench needs at least one repetition; got {repeats}.")
    if batch_size is not None:
        config = change(config, {"schedule.batch_size": batch_size})
    baselines = task.baselines
    names = list(dict.fromkeys((*methods, *baselines)))
    configs = {name: change(config, {"method.name": name}) for name in names}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder, one_thread():
        for count in range(repeats):
            steppers = {
                name: Stepper(task, configs[name], Run.create(folder, "bench", configs[name]))
                for name in _shuffled(names, count)
            }
            for name, seconds in _take_turns(steppers).items():
                found[name].append(seconds)
            if progress is not None:
                progress(count + 1, repeats)
    base = found[baselines[0]]
    return {name: _cost(values, base, _acts_in_optimizer(configs[name])) for name, values in found.items()}


def _take_turns(steppers: dict[str, Stepper]) -> dict[str, dict[str, float]]:
    """Time all of them in every round, in another order each time; medians, and the first rounds do not count."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in steppers}
    for count in range(_WARM_UP + ROUNDS):
        for name in _shuffled(list(steppers), count):
            found[name].append(steppers[name].time(steppers[name].task.period))
    return {name: _medians(values[_WARM_UP:]) for name, values in found.items()}


def _medians(values: list[dict[str, float]]) -> dict[str, float]:
    return {part: statistics.median(value[part] for value in values) for part in values[0] if part != "data"}


def _shuffled(names: list[str], count: int) -> list[str]:
    """In an order of its own for each count: caches remember who went before."""
    return random.Random(count).sample(names, len(names))


def _acts_in_optimizer(config: Config) -> bool:
    """Whether a method changes nothing but the step of the treated optimizer."""
    treatments = [part for part in config.method.parts if PARTS[part].slot != "network"]
    inside = all(part == "stiefel" or PARTS[part].slot in _IN_OPTIMIZER for part in treatments)
    return inside and not {"bn", "ns"} & set(config.method.parts)


def _cost(found: list[dict[str, float]], base: list[dict[str, float]], in_optimizer: bool) -> Cost:
    parts = {part: 1e3 * seconds for part, seconds in _medians(found).items()}
    pairs = list(zip(found, base, strict=True))
    relative = _ratio([sum(a.values()) / sum(b.values()) for a, b in pairs])
    by_optimizer = _ratio([1 + (_optimizer(a) - _optimizer(b)) / sum(b.values()) for a, b in pairs])
    return Cost(parts, sum(parts.values()), relative, by_optimizer if in_optimizer else None)


def _optimizer(parts: dict[str, float]) -> float:
    return sum(seconds for part, seconds in parts.items() if part in _OPTIMIZER)


def _ratio(values: list[float]) -> Ratio:
    values = sorted(values)
    n = len(values)
    # The median lies between these order statistics with a probability of 95 %, whatever the distribution.
    place = max(0, math.floor(n / 2 - 0.98 * math.sqrt(n)))
    return Ratio(statistics.median(values), values[place], values[n - 1 - place])
