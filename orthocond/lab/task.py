"""What a task is: what a step does, which facts it logs, its state and its evaluation. The loop does the rest."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from orthocond.lab.data import Batch, Pipeline
from orthocond.lab.progress import Progress, Stage, stages
from orthocond.lab.runs import Run
from orthocond.lab.runs.files import write_atomically
from orthocond.lab.runs.metrics import json_safe
from orthocond.monitor import ConditionMonitor
from orthocond.steps import Treatment

C = TypeVar("C")

EVALUATION = "evaluation.json"
"""The file in a run folder with what its evaluation found."""


def write_evaluation(run: Run, values: Mapping[str, Any]) -> None:
    """Write what an evaluation found into the folder of its run."""
    text = json.dumps(json_safe(dict(values), EVALUATION), indent=1) + "\n"
    write_atomically(run.path / EVALUATION, text.encode())


class Score(NamedTuple):
    """A number of an evaluation as people read it.

    Attributes:
        name: What was measured.
        value: The number, with its unit.
        meaning: What it says, in a few words.
    """

    name: str
    value: str
    meaning: str


class Task(ABC, Generic[C]):
    """One training: networks, data and optimizers of a configuration. A subclass is one kind of experiment.

    Args:
        config: The configuration.
        data: What `load_data` or `stand_in` gave.
        accelerator: Accelerate's view of devices and processes.

    Attributes:
        kind: Name of the kind of experiment in a configuration.
        baselines: The methods that others are compared with, the first one above all.
        sprites_only: Settings that other images do not have, with the value that leaves them out.
        measures: Names of what an evaluation may be limited to; none if it is always the whole.
        module: All networks, to be looked at when a training diverges.
        steps: How many steps the training has.
        epoch_steps: How many of them are a pass through the data.
        period: Steps after which the work of a step repeats; those of a period do not all cost the same.
        optimizers: All optimizers; the loop sets their learning rates.
        treatment: The handle of `treat`, if the method has one.
        monitor: Watches the conditioning, if there is something to watch.
        mark: Called with the name of each part of a step when the part is done, so that parts can be timed.
        enter: Called with the stages of what takes long beside the steps, for those who watch.
    """

    kind: ClassVar[str]
    baselines: ClassVar[tuple[str, ...]]
    sprites_only: ClassVar[Mapping[str, Any]]
    measures: ClassVar[tuple[str, ...]] = ()

    module: nn.Module
    steps: int
    epoch_steps: int
    period: int = 1
    optimizers: Sequence[Optimizer]
    treatment: Treatment | None = None
    monitor: ConditionMonitor | None = None

    def __init__(self, config: C, data: Any, accelerator: Any) -> None:
        self.config = config
        self.data = data
        self.accelerator = accelerator
        self.mark: Callable[[str], None] = lambda _: None
        self.enter: Stage = stages(None)
        self._batches: Iterator[Batch] | None = None

    # Before a training

    @staticmethod
    @abstractmethod
    def load_data(data: Any, root: str | None = None) -> Any:
        """The images that the part ``data`` of a configuration names.

        Raises:
            FileNotFoundError: If there is no such data set.
            ValueError: If it is broken, or does not fit.
        """

    @staticmethod
    @abstractmethod
    def stand_in(config: C) -> Any:
        """Sprites in the place of the images: a few batches of the same size, whose steps cost the same."""

    @abstractmethod
    def sizes(self, *, stand_in: bool = False) -> list[str]:
        """Sizes of data and networks, and steps, a line each.

        Args:
            stand_in: Sprites are in the place of the data: what depends on the data is not known.
        """

    @staticmethod
    def initial_weights(config: C) -> list[Tensor]:
        """The treated weights before the training, where the configuration alone says what they are; else none."""
        return []

    # A training

    @abstractmethod
    def learning_rate(self, step: int) -> float:
        """The learning rate of a step; steps count from 1."""

    @abstractmethod
    def step(self, step: int, check: Callable[[Tensor], None]) -> dict[str, Tensor]:
        """Make one step.

        Args:
            step: Its number, from 1.
            check: To be called with each loss between the backward pass and the optimizer's step; it ends the training
                if the loss is not finite.

        Returns:
            The losses by name.
        """

    def next_batch(self, pipeline: Pipeline, step: int) -> Batch:
        """The batch of a step: from one iterator for an epoch, made anew at its beginning and after resuming."""
        epoch, index = divmod(step - 1, self.epoch_steps)
        if index == 0 or self._batches is None:
            self._batches = pipeline.batches(epoch, index)
        return next(self._batches)

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What else a line of metrics says after a step."""

    @abstractmethod
    def shown(self, numbers: Mapping[str, float]) -> dict[str, float | None]:
        """What those who watch see of the losses."""

    def warnings(self) -> list[str]:
        """What is wrong after a step that got a line of metrics, in sentences whose words before a colon stay."""
        return []

    def logs(self, step: int) -> bool:
        """Whether a step gets a line of metrics."""
        every: int = self.config.log_every  # type: ignore[attr-defined]
        return (step - 1) % every == 0

    def saves(self, step: int) -> bool:
        """Whether there is a checkpoint after a step."""
        every: int = self.config.save_every  # type: ignore[attr-defined]
        return step == self.steps or (every > 0 and step % every == 0)

    def end_of_epoch(self, step: int, count: int, numbers: Mapping[str, float]) -> dict[str, Any] | None:
        """A line of metrics for an epoch that ends with a step.

        Args:
            step: The step.
            count: Steps of this epoch so far.
            numbers: The losses of the step.

        Returns:
            The line, or None if the epoch goes on or gets none.
        """
        return None

    def draw(self, step: int, run: Run) -> None:
        """Draw pictures that are due after a step; only the first process is asked."""
        return

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """All that the next steps depend on, but for random numbers, treatment and loss scaling."""

    @abstractmethod
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""

    # After a training

    @staticmethod
    @abstractmethod
    def evaluate(
        run: Run,
        *,
        root: str | PathLike[str] | None = None,
        allow_import: str | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> dict[str, Any]:
        """Measure the newest checkpoint of a run, write ``evaluation.json`` into its folder, and return its content."""

    @staticmethod
    @abstractmethod
    def scores(evaluation: Mapping[str, Any]) -> list[Score]:
        """What `evaluate` found, for people."""
