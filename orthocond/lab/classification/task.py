"""What a step of a classifier with an SVD layer is, what it logs and what it remembers (paper: section 6.1)."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orthocond.lab.classification import data
from orthocond.lab.classification import evaluate as evaluation
from orthocond.lab.classification.config import Classification, Method
from orthocond.lab.classification.networks.prepare import prepare
from orthocond.lab.data import Pair
from orthocond.lab.methods import is_spared_decay, scoped_layers, step_facts, treat_steps, weight_penalty
from orthocond.lab.synchronize import synchronize
from orthocond.lab.task import Task
from orthocond.matrix import solver_failures
from orthocond.monitor import ConditionMonitor

# What a line of metrics says about the conditioning, of the many facts that a monitor records.
_FACTS = (
    *("condition", "condition_on_range", "rank", "largest", "smallest"),
    *("weight_condition", "gradient_condition", "eta", "olr_occurrence"),
)
_WARMUP_START = 0.2  # of the learning rate
_LAYOUT = torch.channels_last  # of images: small convolutions are a third faster on CPUs


class ClassificationTask(Task[Classification]):
    """A classifier whose Pre-SVD layer is treated; see `Task`.

    Statistics of batch normalization are taken over all processes, those of plain ones unless ``model.synchronize``
    says otherwise.
    """

    kind = "classification"
    baselines = ("svd", "bn")
    sprites_only = {"data.noise": 0.0}  # noqa: RUF012  # declared as a class variable of `Task`

    def __init__(self, config: Classification, pair: Pair, accelerator: Any) -> None:
        super().__init__(config, pair, accelerator)
        schedule = config.schedule
        share = {"rank": accelerator.process_index, "world_size": accelerator.num_processes}
        self.train_batches = data.pipeline(config, pair.train, train=True, **share)
        # Normalized by the statistics of the training images.
        self.held_out_batches = replace(self.train_batches, data=pair.held_out, train=False)
        self.epoch_steps = len(self.train_batches)
        self.steps = min(schedule.epochs * self.epoch_steps, schedule.steps or 2**62)
        self.network = prepare(config, pair)
        self.module = self.network.module
        if accelerator.num_processes > 1:
            synchronize(self.module, plain=config.model.synchronize)
        self.module.to(memory_format=_LAYOUT)  # type: ignore[call-overload]
        pre_svd = self.network.pre_svd
        self.layers = [] if pre_svd is None else [self.module.get_submodule(pre_svd)]
        groups = parameter_groups(config.method, self.module, self.layers, schedule.weight_decay)
        optimizer = torch.optim.SGD(groups, schedule.lr, schedule.momentum, nesterov=schedule.nesterov)
        self.optimizers = [optimizer]
        if self.layers:
            self.treatment = treat_steps(config.method, self.layers, optimizer, model=self.module, seed=config.seed)
        self.monitor = self._make_monitor()
        self.model, self.stepper = accelerator.prepare(self.module, optimizer)
        self.failures_before = solver_failures.count
        self.best = 100.0
        self.error: float | None = None
        self.loss_sum = 0.0

    def _make_monitor(self) -> ConditionMonitor | None:
        module, svd_layer, pre_svd = self.network
        every = self.config.log_every
        if svd_layer is not None:
            return ConditionMonitor(module, every=every, layers=[svd_layer], pre_svd={svd_layer: pre_svd or ""})
        if pre_svd is not None:  # what an SVD layer in its place would see
            return ConditionMonitor(
                module, every=every, layers=[pre_svd], pre_svd={pre_svd: pre_svd}, eps=self.config.model.eps
            )
        return None

    load_data = staticmethod(data.load_data)
    stand_in = staticmethod(data.stand_in)
    evaluate = staticmethod(evaluation.evaluate)
    scores = staticmethod(evaluation.scores)

    def sizes(self, *, stand_in: bool = False) -> list[str]:
        """Images, classes, parameters, and the names of the two layers."""
        train, held_out = self.data
        count = sum(p.numel() for p in self.module.parameters())
        _, svd_layer, pre_svd = self.network
        layers = f"SVD layer {svd_layer}, layer before it {pre_svd}"
        if stand_in:
            epochs, steps = self.config.schedule.epochs, self.config.schedule.steps
            most = f"at most {steps}, " if steps else ""
            return [
                "Data: classes and number of images unknown without the data",
                f"Model: parameters unknown without the data, as the classes are; {layers}",
                f"Steps: {most}{epochs} epochs, whose length is unknown without the data",
            ]
        return [
            f"Data: {len(train)} training and {len(held_out)} held-out images of {len(train.classes)} classes",
            f"Model: {count:,} parameters; {layers}",
            f"Steps: {self.steps}, {self.epoch_steps} an epoch",
            *self.warnings(),
        ]

    def warnings(self) -> list[str]:
        """That the epochs end before the steps that were asked for."""
        schedule = self.config.schedule
        if (schedule.steps or 0) <= self.steps:
            return []
        asked = f"{schedule.epochs} epochs have {self.steps}, not the {schedule.steps} of schedule.steps"
        return [f"Fewer steps than asked for: {asked}. Raise schedule.epochs."]

    def learning_rate(self, step: int) -> float:
        """The rate of a step: a warm-up from a fifth, then what `Schedule.fall` says."""
        schedule = self.config.schedule
        done = (step - 1) / self.steps
        if done < schedule.warmup:
            return schedule.lr * (_WARMUP_START + (1 - _WARMUP_START) * done / schedule.warmup)
        if schedule.fall == "steps":
            epoch = (step - 1) // self.epoch_steps
            return schedule.lr * schedule.gamma ** sum(epoch >= milestone for milestone in schedule.milestones)
        left = (1 - done) / (1 - schedule.warmup)
        return schedule.lr * (left if schedule.fall == "linear" else 0.5 - 0.5 * math.cos(math.pi * left))

    def step(self, step: int, check: Callable[[Tensor], None]) -> dict[str, Tensor]:
        """One step of SGD."""
        images, labels = self.next_batch(self.train_batches, step)
        device = self.accelerator.device
        images = images.to(device, memory_format=_LAYOUT, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        self.mark("data")
        self.model.train()
        self.stepper.zero_grad()
        loss = F.cross_entropy(self.model(images), labels, label_smoothing=self.config.schedule.label_smoothing)
        penalty = weight_penalty(self.config.method, self.layers)
        total = loss if penalty is None else loss + penalty
        self.mark("forward")
        self.accelerator.backward(total)
        check(loss)
        self.mark("backward")
        self.stepper.step()
        self.mark("step")
        return {"loss": loss}

    @property
    def failures(self) -> int:
        """Decompositions that did not converge so far."""
        return solver_failures.count - self.failures_before

    def facts(self) -> dict[str, Any]:
        """Condition, rank and spectrum of the covariance, condition of weight and gradient, what OLR did."""
        found = {"solver_failures": self.failures} | step_facts(self.treatment)
        if self.monitor is None:
            return found
        record = self.monitor.history[-1]
        return found | {key: record[key] for key in _FACTS if record[key] is not None}

    def shown(self, numbers: Mapping[str, float]) -> dict[str, float | None]:
        """The loss, and the last error on held-out images."""
        return {"loss": numbers["loss"], "error": self.error}

    def saves(self, step: int) -> bool:
        """After each epoch, too."""
        return step % self.epoch_steps == 0 or super().saves(step)

    def end_of_epoch(self, step: int, count: int, numbers: Mapping[str, float]) -> dict[str, Any] | None:
        """Mean loss of the epoch; loss and errors on held-out images."""
        self.loss_sum += numbers["loss"]
        if count < self.epoch_steps and step < self.steps:
            return None
        told = None
        if step == self.steps:  # not after each epoch: a stage begins rate and remaining time again
            told = partial(self.enter, "errors on held-out images")
            told()
        score = evaluation.score(self.model, self.held_out_batches, self.accelerator, _LAYOUT, told)
        self.error = score.error
        self.best = min(self.best, score.error)
        train_loss, self.loss_sum = self.loss_sum / count, 0.0
        return {
            "train_loss": train_loss,
            "error": score.error,
            "top5_error": score.top5_error,
            "val_loss": score.loss,
            "best_error": self.best,
            "solver_failures": self.failures,
        }

    def state(self) -> dict[str, Any]:
        """Network, optimizer, monitor, and what the last epochs have reached."""
        return {
            "model": self.module.state_dict(),
            "optimizer": self.optimizers[0].state_dict(),
            "monitor": None if self.monitor is None else self.monitor.state_dict(),
            "best": self.best,
            "error": self.error,
            "loss_sum": self.loss_sum,
            "failures": self.failures,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.module.load_state_dict(state["model"])
        self.optimizers[0].load_state_dict(state["optimizer"])
        if self.monitor is not None:
            self.monitor.load_state_dict(state["monitor"])
        self.best, self.error, self.loss_sum = state["best"], state["error"], state["loss_sum"]
        self.failures_before = solver_failures.count - state["failures"]


def parameter_groups(
    method: Method, model: nn.Module, layers: list[nn.Module], weight_decay: float
) -> list[dict[str, Any]]:
    """All parameters with the weight decay and the factor of the rate that each should have (see `Schedule`)."""
    decay = 0.0 if is_spared_decay(method) else weight_decay
    groups: list[dict[str, Any]] = []
    if decay != weight_decay or method.stem_lr != 1:
        groups.append({"params": _matrices(layers), "weight_decay": decay, "factor": method.stem_lr})
    if method.scope_lr != 1:
        scope = [layer for layer in scoped_layers(method, [], model) if not any(layer is stem for stem in layers)]
        groups.append({"params": _matrices(scope), "weight_decay": weight_decay, "factor": method.scope_lr})
    taken = {id(p) for group in groups for p in group["params"]}
    rest = [p for p in model.parameters() if id(p) not in taken]
    return [{"params": rest, "weight_decay": weight_decay, "factor": 1.0}, *(g for g in groups if g["params"])]


def _matrices(layers: Sequence[nn.Module]) -> list[nn.Parameter]:
    return [p for layer in layers for p in layer.parameters() if p.ndim > 1]
