"""``orthocond train --dry-run``: what a training would be, and how long it would take."""

import statistics
import tempfile

import torch
from rich.console import Console

from orthocond.cli.settings import settings
from orthocond.lab import experiments
from orthocond.lab.bench import Stepper
from orthocond.lab.config import Config, change
from orthocond.lab.devices import make_accelerator
from orthocond.lab.display import duration
from orthocond.lab.experiments import task_of
from orthocond.lab.runs import Run
from orthocond.lab.text import printable

_TIMED_BATCHES = (8, 16)  # images of the steps that are timed on a CPU, for larger batches the time grows as here
_WARM_UP = 3  # steps that are not counted: the first ones allocate, and choose kernels
_LEAST, _MOST = 3, 9  # measurements of which the median is taken
_PATIENCE = 2.0  # seconds, after which the least will do, and for which a large batch is waited for


def show(config: Config, root: str | None, tracker: str | None = None) -> int:
    """Print configuration, sizes of data and model, number of steps, and an estimate of the time.

    Where the data is missing, sprites take its place, and the number of steps may be unknown. A tracker that is not
    installed is refused as in the training.
    """
    console = Console(highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory() as folder:
        accelerator = make_accelerator(config.precision, Run.create(folder, "plan", config), tracker)
    _show_settings(config, console)
    task = task_of(config)
    missing = None
    try:
        data = task.load_data(config.data, root)
    except FileNotFoundError as error:
        missing, data = error, task.stand_in(config)
    made = task(config, data, accelerator)
    console.print("\n".join(["", *made.sizes(stand_in=missing is not None)]), markup=False)
    if missing is not None:
        console.print(f"The data is missing, and steps are timed with sprites: {printable(missing)}", markup=False)
    seconds = estimate(config)
    steps = made.steps if missing is None or made.steps == config.schedule.steps else None
    whole = "unknown without the data" if steps is None else f"about {duration(steps * seconds)} on this machine"
    console.print(f"Time: {whole}, {1e3 * seconds:.0f} ms a step, without evaluation", markup=False)
    return 0


def _show_settings(config: Config, console: Console) -> None:
    preset = experiments.preset(config.preset, config.scale)
    defaults = {setting.path: setting.value for setting in settings(preset)}
    console.print(f"preset = {config.preset}, scale = {config.scale}", markup=False)
    for setting in settings(config):
        changed = "" if setting.value == defaults[setting.path] else f"   (preset: {defaults[setting.path]})"
        console.print(f"{setting.path} = {printable(setting.value)}{changed}", markup=False)


def estimate(config: Config) -> float:
    """Seconds of a step; on a CPU a batch that takes long is not waited for, but estimated from two small ones."""
    batch = config.schedule.batch_size
    small, large = _TIMED_BATCHES
    if torch.accelerator.is_available() or batch <= 2 * large:
        return step_seconds(config)
    first, second = (step_seconds(change(config, {"schedule.batch_size": size})) for size in (small, large))
    guess = second + max(second - first, 0.0) / (large - small) * (batch - large)
    # The line multiplies the scatter of its two points: a small network is timed as it is.
    return step_seconds(config) if (_WARM_UP + _LEAST) * guess < _PATIENCE else guess


def step_seconds(config: Config) -> float:
    """The median time of some steps of the real loop, which is then given up."""
    with tempfile.TemporaryDirectory() as folder:
        stepper = Stepper(task_of(config), config, Run.create(folder, "timed", config))
        period = stepper.task.period
        stepper.time(max(_WARM_UP, period))
        times: list[float] = []
        while len(times) < _LEAST or (len(times) < _MOST and period * sum(times) < _PATIENCE):
            times.append(sum(stepper.time(period).values()))
    return statistics.median(times)
