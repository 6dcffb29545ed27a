"""One training loop for classifiers: on one device or many, resumed bit for bit (paper: section 6.1)."""

import copy
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orthocond.lab.classification.config import Classification, Data
from orthocond.lab.classification.networks.build import Network, build
from orthocond.lab.data import ImageData, Pair, Pipeline, load_pair, sprites
from orthocond.lab.devices import make_accelerator
from orthocond.lab.methods import parameter_groups, penalty, treat_steps, treat_weight
from orthocond.lab.progress import Progress
from orthocond.lab.runs import Guard, Run, capture_rng, restore_rng
from orthocond.lab.synchronize import synchronize
from orthocond.matrix import solver_failures
from orthocond.monitor import ConditionMonitor
from orthocond.steps import Treatment

# What a line of metrics says about the conditioning, of the many facts that a monitor records.
_FACTS = (
    *("condition", "condition_on_range", "rank", "largest", "smallest"),
    *("weight_condition", "gradient_condition", "eta", "olr_occurrence"),
)
_INPUT_BATCHES = 8  # from which treatments that know the input of their layer learn its covariance


class Score(NamedTuple):
    """Mean loss, and errors in percent, on held-out images."""

    loss: float
    error: float
    top5_error: float


def load_data(data: Data, root: str | None = None) -> Pair:
    """The training and held-out images of a configuration.

    Raises:
        FileNotFoundError: If there is no such data set.
        ValueError: If it is broken, or has no classes.
    """
    pair = _load_pair(data, root)
    if data.validation:
        return Pair(*pair.train.split_off(data.validation / len(pair.train)))
    return pair


def _load_pair(data: Data, root: str | None) -> Pair:
    if data.source == "sprites":
        size = data.in_memory or data.size or 32
        train, held_out = (
            sprites(count, size=size, split=split, noise=data.noise)
            for split, count in (("train", data.limit), ("test", data.held_out))
        )
        return Pair(train, held_out)
    if data.noise:
        raise ValueError(f"Noise is a setting of sprites; {data.source} has none. Leave data.noise at 0.")
    pair = load_pair(data.source, root=root, size=data.in_memory, limit=data.limit)
    if not pair.train.classes:
        raise ValueError(f"{data.source} has no classes; a classifier needs a folder for each class.")
    if pair.train.classes != pair.held_out.classes:
        raise ValueError(f"{data.source}: training and held-out images have different classes.")
    if data.held_out is not None and data.held_out < len(pair.held_out):
        return Pair(pair.train, pair.held_out.sample(data.held_out))
    return pair


def pipeline(config: Classification, images: ImageData, *, train: bool, rank: int = 0, world_size: int = 1) -> Pipeline:
    """The batches of a configuration, with images normalized by their own mean and deviation."""
    mean, std = images.statistics()
    data = config.data
    return Pipeline(
        data=images,
        batch_size=config.schedule.batch_size,
        train=train,
        size=data.size,
        resize=data.resize,
        crop_padding=data.crop_padding,
        padding=data.padding,
        flip=data.flip,
        mean=mean,
        std=std,
        seed=config.seed,
        rank=rank,
        world_size=world_size,
    )


def prepare(config: Classification, pair: Pair) -> Network:
    """The network of a configuration with its weight treated, before any training."""
    torch.manual_seed(config.seed)
    batches = pipeline(config, pair.train, train=True)
    first = next(iter(batches.batches()))
    network = build(config.model, config.method, len(pair.train.classes), first.images[:4])
    if network.pre_svd is not None:
        treat_weight(config.method, network.module, network.pre_svd, _inputs_of(network, batches))
    return network


def _inputs_of(network: Network, batches: Pipeline) -> Callable[[nn.Module], Iterator[Tensor]]:
    """What the Pre-SVD layer gets, from a copy of the network in training mode."""

    @torch.no_grad()
    def inputs(layer: nn.Module) -> Iterator[Tensor]:
        model = copy.deepcopy(network.module).train()
        seen: list[Tensor] = []
        model.get_submodule(network.pre_svd or "").register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        for images, _ in itertools.islice(batches.batches(), _INPUT_BATCHES):
            model(images)
            yield seen.pop()

    return inputs


def train(
    config: Classification,
    run: Run,
    *,
    root: str | None = None,
    progress: Callable[[Progress], None] | None = None,
    tracker: str | None = None,
) -> int:
    """Train a classifier in a run folder, from its last checkpoint if there is one.

    Under torchrun every process calls this. Batches are divided among the processes and statistics of batch
    normalization taken over all of them, so that their number changes nothing but the rounding.

    Args:
        config: The configuration.
        run: Its folder; what was logged after its last checkpoint is written again.
        root: Folder of data sets.
        progress: Called after each step, on the first process.
        tracker: Name of a tracker of Accelerate that gets the metrics too, for example ``"tensorboard"``.

    Returns:
        0, or 130 and 143 where Ctrl-C or SIGTERM ended it after the state was saved.

    Raises:
        FloatingPointError: If loss or gradient is not finite; the text is a diagnosis, and checkpoints stay.
        OSError: If the disk is full or read-only; checkpoints stay.
        ValueError: If the tracker is not installed.
    """
    accelerator = make_accelerator(config.precision, run, tracker)
    pair = load_data(config.data, root)
    network = prepare(config, pair)
    return _Training(config, run, accelerator, pair, network, progress, tracker).loop()


@dataclass
class _Training:
    """What one training consists of."""

    config: Classification
    run: Run
    accelerator: Any
    pair: Pair
    network: Network
    progress: Callable[[Progress], None] | None
    tracker: str | None

    def __post_init__(self) -> None:
        schedule, accelerator = self.config.schedule, self.accelerator
        share = {"rank": accelerator.process_index, "world_size": accelerator.num_processes}
        self.train_batches = pipeline(self.config, self.pair.train, train=True, **share)
        self.held_out_batches = Pipeline(
            data=self.pair.held_out,
            batch_size=schedule.batch_size,
            train=False,
            size=self.config.data.size,
            resize=self.config.data.resize,
            mean=self.train_batches.mean,
            std=self.train_batches.std,
            **share,
        )
        self.epoch_steps = len(self.train_batches)
        self.steps = min(schedule.epochs * self.epoch_steps, schedule.steps or 2**62)
        module, pre_svd = self.network.module, self.network.pre_svd
        if accelerator.num_processes > 1:
            synchronize(module)
            self.layout = torch.contiguous_format
        else:
            self.layout = torch.channels_last  # a third faster on CPUs; DDP wants gradients laid out as its buckets
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.layer = module.get_submodule(pre_svd) if pre_svd is not None else None
        groups = parameter_groups(self.config.method, module, pre_svd or "", schedule.weight_decay)
        self.optimizer = torch.optim.SGD(groups, schedule.lr, schedule.momentum, nesterov=schedule.nesterov)
        self.treatment: Treatment | None = None
        if self.layer is not None:
            self.treatment = treat_steps(self.config.method, self.layer, self.optimizer)
        self.monitor = self._make_monitor()
        self.model, self.stepper = accelerator.prepare(module, self.optimizer)
        self.failures_before = solver_failures.count
        self.best = 100.0
        self.error: float | None = None
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=accelerator.device)

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

    @property
    def failures(self) -> int:
        """Decompositions that did not converge so far."""
        return solver_failures.count - self.failures_before

    def loop(self) -> int:
        """Train from the last checkpoint to the end, or until asked to stop."""
        first = self._resume() + 1
        if self.tracker:
            self.accelerator.init_trackers("orthocond")
        with Guard(self.run, self.network.module, monitor=self.monitor) as guard:
            if self.monitor is not None:
                self.monitor.start()
            try:
                for step in range(first, self.steps + 1):
                    self._step(step, guard)
                    stop = guard.should_stop()
                    if stop or self._due(step):
                        self.run.save(self._state(), step)
                    if stop:
                        break
            finally:
                if self.monitor is not None:
                    self.monitor.stop(warn=False)
        if not guard.exit_code:
            self.run.set_status("finished", self.steps)
        if self.tracker:
            self.accelerator.end_training()
        return guard.exit_code

    def _due(self, step: int) -> bool:
        every = self.config.save_every
        return step % self.epoch_steps == 0 or step == self.steps or (every > 0 and step % every == 0)

    def _step(self, step: int, guard: Guard) -> None:
        start, cpu = time.perf_counter(), time.process_time()
        epoch, index = divmod(step - 1, self.epoch_steps)
        images, labels = self._batch(epoch, index)
        lr = self._learning_rate(step, epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["factor"]
        self.model.train()
        self.stepper.zero_grad()
        loss = F.cross_entropy(self.model(images), labels, label_smoothing=self.config.schedule.label_smoothing)
        extra = None if self.layer is None else penalty(self.config.method, self.layer)
        self.accelerator.backward(loss if extra is None else loss + extra)
        guard.check(step, loss)
        try:
            self.stepper.step()
        except ValueError as error:  # of a treatment that was given a gradient which is not finite
            text = f"{error}\n{guard.diagnosis(step, float(loss.detach()))}"
            self.run.note(text)
            raise FloatingPointError(text) from error
        mean = self.accelerator.reduce(loss.detach().double(), "mean")
        self.loss_sum += mean
        seconds = {"step_seconds": time.perf_counter() - start, "step_cpu_seconds": time.process_time() - cpu}
        if (step - 1) % self.config.log_every == 0:
            self._log(step, epoch, {"loss": float(mean), "lr": lr} | self._facts(), seconds)
        if (index + 1 == self.epoch_steps) or step == self.steps:
            self._end_epoch(step, epoch, index + 1)
        if self.progress is not None and self.accelerator.is_main_process:
            self.progress(Progress(step, self.steps, {"loss": float(mean), "error": self.error}))

    def _batch(self, epoch: int, index: int) -> tuple[Tensor, Tensor]:
        """The batches come from one iterator for an epoch, made anew at its beginning and after resuming."""
        if index == 0 or not hasattr(self, "batches"):
            self.batches = self.train_batches.batches(epoch, index)
        images, labels = next(self.batches)
        device = self.accelerator.device
        return images.to(device, memory_format=self.layout, non_blocking=True), labels.to(device, non_blocking=True)

    def _learning_rate(self, step: int, epoch: int) -> float:
        """The rate of a step, counted from 1: a warm-up from a fifth, then what `Schedule.fall` says."""
        schedule = self.config.schedule
        done = (step - 1) / self.steps
        if done < schedule.warmup:
            return schedule.lr * (0.2 + 0.8 * done / schedule.warmup)
        if schedule.fall == "steps":
            return schedule.lr * schedule.gamma ** sum(epoch >= milestone for milestone in schedule.milestones)
        left = (1 - done) / (1 - schedule.warmup)
        return schedule.lr * (left if schedule.fall == "linear" else 0.5 - 0.5 * math.cos(math.pi * left))

    def _facts(self) -> dict[str, Any]:
        if self.monitor is None:
            return {"solver_failures": self.failures}
        record = self.monitor.history[-1]
        return {key: record[key] for key in _FACTS if record[key] is not None} | {"solver_failures": self.failures}

    def _end_epoch(self, step: int, epoch: int, count: int) -> None:
        score = evaluate(self.model, self.held_out_batches, self.accelerator, self.layout)
        self.error = score.error
        self.best = min(self.best, score.error)
        metrics: dict[str, Any] = {"train_loss": float(self.loss_sum) / count} | score._asdict()
        metrics["val_loss"] = metrics.pop("loss")
        metrics |= {"best_error": self.best, "solver_failures": self.failures}
        if step == self.steps:
            metrics["finished"] = True
        self._log(step, epoch + 1, metrics, {})
        self.loss_sum.zero_()

    def _log(self, step: int, epoch: int, metrics: dict[str, Any], timing: dict[str, float]) -> None:
        self.run.log(step, epoch, timing=timing, **metrics)
        if self.tracker:
            self.accelerator.log({k: v for k, v in metrics.items() if isinstance(v, (int, float))}, step)

    def _state(self) -> dict[str, Any]:
        return {
            "model": self.network.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.accelerator.scaler.state_dict() if self.accelerator.scaler else None,
            "treatment": None if self.treatment is None else self.treatment.state_dict(),
            "monitor": None if self.monitor is None else self.monitor.state_dict(),
            "rng": capture_rng(),
            "best": self.best,
            "error": self.error,
            "loss_sum": float(self.loss_sum),
            "failures": self.failures,
        }

    def _resume(self) -> int:
        found = self.run.resume()
        if found is None:
            return 0
        state = found.state
        self.network.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.accelerator.scaler and state["scaler"]:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        if self.treatment is not None:
            self.treatment.load_state_dict(state["treatment"])
        if self.monitor is not None:
            self.monitor.load_state_dict(state["monitor"])
        restore_rng(state["rng"])
        self.best, self.error = state["best"], state["error"]
        self.loss_sum.fill_(state["loss_sum"])
        self.failures_before = solver_failures.count - state["failures"]
        return found.step


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Pipeline,
    accelerator: Any = None,
    layout: torch.memory_format = torch.contiguous_format,
) -> Score:
    """Loss and errors of a classifier on held-out images, over all processes.

    Args:
        model: The classifier; it is in evaluation mode afterwards.
        batches: The images.
        accelerator: Of Accelerate, where several processes share the images.
        layout: Memory format of the images.
    """
    model.eval()
    device = next(model.parameters()).device
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    for images, labels in batches.batches():
        output = model(images.to(device, memory_format=layout)).float()
        labels = labels.to(device)
        top = output.topk(min(5, output.shape[1])).indices == labels[:, None]
        sums += torch.stack(
            [
                F.cross_entropy(output, labels, reduction="sum"),
                top[:, 0].sum(),
                top.sum(),
                labels.new_tensor(len(labels)),
            ]
        )
    total, top1, top5, count = (sums if accelerator is None else accelerator.reduce(sums)).tolist()
    return Score(total / count, 100 * (1 - top1 / count), 100 * (1 - top5 / count))
