"""What a step of each method costs, measured in turn: its parts for classifiers, the whole step for GANs."""

import math
import random
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from orthocond.lab.classification.config import Classification
from orthocond.lab.classification.task import pipeline, prepare
from orthocond.lab.data import Pair, sprites
from orthocond.lab.devices import now
from orthocond.lab.generation.config import Generation
from orthocond.lab.generation.methods import STEPS, parts
from orthocond.lab.methods import parameter_groups, penalty, treat_steps
from orthocond.lab.runs import Run

T = TypeVar("T")

_ROUNDS = 3  # of a GAN's networks before they are made anew
_WARM_UP = 2  # steps that are not counted: the first ones allocate


class Times(NamedTuple):
    """Milliseconds of the parts of one training step."""

    forward: float
    backward: float
    step: float

    @property
    def total(self) -> float:
        """Milliseconds of the whole step."""
        return self.forward + self.backward + self.step


def bench(
    config: Classification,
    methods: Iterable[str],
    *,
    repeats: int = 20,
    batch_size: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Times]:
    """Time the training step of several methods on one network.

    The methods take turns, and the median counts, so that whatever else the machine does meets all of them alike. The
    images are sprites of the size that the configuration asks for: their content does not change the cost.

    Args:
        config: The configuration, whose method is replaced.
        methods: Names of methods.
        repeats: Steps of each method.
        batch_size: Images of a step; that of the configuration if None.
        progress: Called with the number of rounds so far, and of all.

    Returns:
        The times by method, in the order of ``methods``.

    Raises:
        ValueError: If there is no such method, or a number is not positive.

    Example:
        >>> from orthocond.lab.classification.presets import preset
        >>> times = bench(preset("dbn-sprites-small"), ["bn", "svd"], repeats=1, batch_size=4)
        >>> list(times), min(times["svd"]) > 0
        (['bn', 'svd'], True)
    """
    if repeats < 1:
        raise ValueError(f"bench needs at least one repetition; got {repeats}.")
    size = config.schedule.batch_size if batch_size is None else batch_size
    config = replace(config, schedule=replace(config.schedule, batch_size=size))
    images = sprites(size, size=config.data.size or 32)
    steps = {name: stepper(_with(config, name), Pair(images, images)) for name in methods}
    return {name: _median(found) for name, found in _take_turns(steps, repeats, progress).items()}


@dataclass(frozen=True)
class Ratio:
    """Median over repetitions of the ratios within one, and its 95 % interval."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class GanTimes:
    """What one step of discriminator and generator takes.

    Attributes:
        milliseconds: Of the whole step.
        optimizer: Milliseconds of the generator's optimizer, a part of it.
        relative: Ratio of the whole step to that of ``none``.
        by_optimizer: The same ratio if nothing but the generator's optimizer differs, which is true of NOG and OLR
            alone; None for other methods. It takes some percent of a step, so its scatter hides little.
    """

    milliseconds: float
    optimizer: float
    relative: Ratio
    by_optimizer: Ratio | None


def bench_gan(
    config: Generation,
    methods: Iterable[str],
    *,
    repeats: int = 20,
    batch_size: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, GanTimes]:
    """Time the training step of several methods on one GAN, and of ``none``, with one thread.

    As not all steps have a gradient penalty, a measurement is of as many steps as make a period of it. The methods take
    turns, in another order in each round, so that whatever else the machine does meets all of them alike. Where in
    memory a network happens to lie changes its speed by some percent, more than NOG and OLR cost: so the networks are
    made anew for each repetition, which gives one ratio, of medians of three rounds. The images are sprites of the size
    that the configuration asks for.

    Args:
        config: The configuration, whose method is replaced.
        methods: Names of methods; ``none`` is added.
        repeats: Ratios of each method.
        batch_size: Images of a step; that of the configuration if None.
        progress: Called with the number of repetitions so far, and of all.

    Returns:
        The times by method, in the order of ``methods``.

    Raises:
        ValueError: If there is no such method, or a number is not positive.

    Example:
        >>> from orthocond.lab.generation.presets import preset
        >>> times = bench_gan(preset("gan-sprites"), ["none", "nog"], repeats=1, batch_size=4)
        >>> list(times), times["none"].relative
        (['none', 'nog'], Ratio(median=1.0, low=1.0, high=1.0))
    """
    from orthocond.lab.generation.task import stepper

    if repeats < 1:
        raise ValueError(f"bench needs at least one repetition; got {repeats}.")
    size = config.schedule.batch_size if batch_size is None else batch_size
    config = replace(config, schedule=replace(config.schedule, batch_size=size))
    images = sprites(4 * size, size=config.data.resize or config.data.size)
    names = list(dict.fromkeys((*methods, "none")))
    period = 1 if config.objective.penalty == "none" else config.objective.penalty_interval
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder, _one_thread():
        for count in range(repeats):
            steps: dict[str, Callable[[], tuple[float, float]]] = {}
            for name in _shuffled(names, count):
                one = replace(config, method=replace(config.method, name=name))
                steps[name] = partial(_time, stepper(one, images, Run.create(folder, "bench", one)), period)
            for name, found in _take_turns(steps, _ROUNDS).items():
                whole, part = (statistics.median(column) for column in zip(*found, strict=True))
                seconds[name].append((whole, part))
            if progress is not None:
                progress(count + 1, repeats)
    return {name: _gan_times(found, seconds["none"], parts(name) <= STEPS.keys()) for name, found in seconds.items()}


def _take_turns(
    measure: dict[str, Callable[[], T]], repeats: int, progress: Callable[[int, int], None] | None = None
) -> dict[str, list[T]]:
    """Call all of them in every round, in another order each time; the first rounds do not count."""
    found: dict[str, list[T]] = {name: [] for name in measure}
    for count in range(_WARM_UP + repeats):
        for name in _shuffled(list(measure), count):
            found[name].append(measure[name]())
        if progress is not None:
            progress(count + 1, _WARM_UP + repeats)
    return {name: values[_WARM_UP:] for name, values in found.items()}


def _shuffled(names: list[str], count: int) -> list[str]:
    """In an order of its own for each count: caches remember who went before."""
    return random.Random(count).sample(names, len(names))


def _time(step: Callable[[], float], count: int) -> tuple[float, float]:
    """Seconds of one of so many steps, and of the optimizer in it."""
    start = now()
    in_optimizer = [step() for _ in range(count)]
    return (now() - start) / count, sum(in_optimizer) / count


def _gan_times(found: list[tuple[float, float]], base: list[tuple[float, float]], in_optimizer: bool) -> GanTimes:
    whole, part = (1e3 * statistics.median(column) for column in zip(*found, strict=True))
    pairs = list(zip(found, base, strict=True))
    relative = _ratio([a / b for (a, _), (b, _) in pairs])
    by_optimizer = _ratio([1 + (a - b) / total for (_, a), (total, b) in pairs]) if in_optimizer else None
    return GanTimes(whole, part, relative, by_optimizer)


def _ratio(values: list[float]) -> Ratio:
    values = sorted(values)
    n = len(values)
    # The median lies between these order statistics with a probability of 95 %, whatever the distribution.
    place = max(0, math.floor(n / 2 - 0.98 * math.sqrt(n)))
    return Ratio(statistics.median(values), values[place], values[n - 1 - place])


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def stepper(config: Classification, pair: Pair) -> Callable[[], Times]:
    """A function that makes one training step of a configuration, always on the same batch, and times it."""
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    network = prepare(config, pair)
    model = network.module.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    layer = None if network.pre_svd is None else model.get_submodule(network.pre_svd)
    schedule = config.schedule
    groups = parameter_groups(config.method, model, network.pre_svd or "", schedule.weight_decay)
    optimizer = torch.optim.SGD(groups, schedule.lr, schedule.momentum)
    if layer is not None:
        treat_steps(config.method, layer, optimizer)
    images, labels = next(iter(pipeline(config, pair.train, train=True).batches()))
    images, labels = images.to(device, memory_format=torch.channels_last), labels.to(device)

    def loss() -> Tensor:
        value = F.cross_entropy(model(images), labels)
        extra = None if layer is None else penalty(config.method, layer)
        return value if extra is None else value + extra

    def step() -> Times:
        model.train()
        optimizer.zero_grad()
        start = now()
        value = loss()
        forward = now()
        value.backward()
        backward = now()
        optimizer.step()
        end = now()
        return Times(*(1e3 * t for t in (forward - start, backward - forward, end - backward)))

    return step


def _with(config: Classification, method: str) -> Classification:
    return replace(config, method=replace(config.method, name=method))


def _median(times: list[Times]) -> Times:
    return Times(*(statistics.median(column) for column in zip(*times, strict=True)))
