"""One training loop for GANs: on one device or many, resumed bit for bit (paper: section 6.2)."""

import io
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from orthocond.gans import (
    EMA,
    Hinge,
    LazyR1,
    LeastSquares,
    NonSaturating,
    Objective,
    Wasserstein,
    augment,
    gradient_penalty,
    r1,
)
from orthocond.lab.data import SHAPES, ImageData, Pipeline, Sprites, load, sprites
from orthocond.lab.data.images import center_crop
from orthocond.lab.devices import make_accelerator, now
from orthocond.lab.generation.config import GanData, Generation
from orthocond.lab.generation.methods import latent_layers, make_predictor, rival_penalty, treat_steps, weight_penalty
from orthocond.lab.generation.networks import Networks, call, prepare, sample
from orthocond.lab.progress import Progress
from orthocond.lab.runs import Guard, Run, capture_rng, restore_rng
from orthocond.lab.runs.files import write_atomically
from orthocond.matrix import matrix_view
from orthocond.matrix.spectra import singular_spectrum

_OBJECTIVES: dict[str, Objective] = {
    "non-saturating": NonSaturating(),
    "hinge": Hinge(),
    "hinge-saturating": Hinge(saturating=True),
    "least-squares": LeastSquares(),
    "wasserstein": Wasserstein(),
}
_STEP, _RIVAL, _PICTURE = 2, 3, 4  # streams of random numbers, beside those of the data
_ROWS, _COLUMNS = 8, 8  # of the pictures
_ENDLESS = 2**40  # steps


def load_images(data: GanData, root: str | None = None) -> ImageData:
    """The images of a configuration, of the side ``resize`` if that is given; cut out the middle of ``size``.

    Raises:
        FileNotFoundError: If there is no such data set.
        ValueError: If it is broken, or a setting does not fit it.
    """
    side = data.resize or data.size
    if side < data.size:
        raise ValueError(f"data.resize needs at least data.size, {data.size}; got {data.resize}.")
    if data.shape is None:
        return load(data.source, root=root, size=side, limit=data.limit)
    if data.source != "sprites":
        raise ValueError(f"A shape is a setting of sprites; {data.source} has none. Leave data.shape out.")
    images: Sprites = sprites(size=side)
    images = images.subset((images.shapes == SHAPES.index(data.shape)).nonzero().flatten())
    return images if data.limit is None else images.sample(data.limit)


def train(
    config: Generation,
    run: Run,
    *,
    root: str | None = None,
    progress: Callable[[Progress], None] | None = None,
    tracker: str | None = None,
) -> int:
    """Train a GAN in a run folder, from its last checkpoint if there is one.

    A step is one of the discriminator and one of the generator, each with latents of its own. Every ``sample_every``
    steps a picture of the averaged generator, always with the same latents, goes to the run's figures.

    Under torchrun every process calls this. Images, latents, noise and augmentation are drawn for the whole batch and
    divided among the processes, so that their number changes nothing but the rounding. The random vectors of HP, OroJaR
    and LVP are drawn by each process, and the largest values of the paper's forms are those of its own images.

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
    images = load_images(config.data, root)
    return _Training(config, run, accelerator, images, prepare(config), progress, tracker).loop()


def stepper(config: Generation, images: ImageData, run: Run) -> Callable[[], float]:
    """A function that makes the next step of a training at each call, without metrics and pictures, to be timed.

    It returns the seconds of the generator's optimizer, where NOG and OLR act.

    Args:
        config: The configuration.
        images: Its images, of the side that it asks for.
        run: A folder for the diagnosis of a loss that is not finite; nothing else is written.
    """
    endless = replace(config.schedule, steps=_ENDLESS)
    config = replace(config, schedule=endless, log_every=_ENDLESS, sample_every=0)
    accelerator = make_accelerator(config.precision, run)
    training = _Training(config, run, accelerator, images, prepare(config), None, None)
    guard = Guard(run, training.generator, signals=())
    steps = itertools.count(2)  # the first step of a training is logged
    optimize, seconds = training.steppers[1].step, 0.0

    def timed() -> None:
        nonlocal seconds
        start = now()
        optimize()
        seconds = now() - start

    def step() -> float:
        training.make_step(next(steps), guard)
        return seconds

    training.steppers[1].step = timed
    return step


def _random(stream: int, *numbers: int) -> torch.Generator:
    """Random numbers that depend on these numbers alone, so that nothing has to be remembered for resuming."""
    state = np.random.SeedSequence([stream, *numbers]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]))


def _share(rival_batch: int, world_size: int) -> int:
    """Latents of a rival's penalty in each process.

    Raises:
        ValueError: If the processes cannot have equally many.
    """
    if rival_batch < 1 or rival_batch % world_size:
        raise ValueError(
            f"method.rival_batch needs a positive multiple of the number of processes, {world_size}; got {rival_batch}."
        )
    return rival_batch // world_size


@dataclass
class _Training:
    """What one training consists of."""

    config: Generation
    run: Run
    accelerator: Any
    images: ImageData
    networks: Networks
    progress: Callable[[Progress], None] | None
    tracker: str | None

    def __post_init__(self) -> None:
        config, schedule, accelerator = self.config, self.config.schedule, self.accelerator
        self.rank, self.world_size = accelerator.process_index, accelerator.num_processes
        self.pipeline = Pipeline(
            data=self.images,
            batch_size=schedule.batch_size,
            train=True,
            crop_padding=0,
            flip=config.data.flip,
            seed=config.seed,
            rank=self.rank,
            world_size=self.world_size,
        )
        self.epoch_steps = len(self.pipeline)
        self.steps = schedule.steps
        self.generator, self.discriminator = (network.to(accelerator.device) for network in self.networks)
        self.layers = latent_layers(self.generator)
        predictor = make_predictor(config.method, config.data.size, int(self.generator.z_dim))  # type: ignore[arg-type]
        self.predictor = None if predictor is None else predictor.to(accelerator.device)
        self.rival_batch = _share(
            schedule.batch_size if config.method.rival_batch is None else config.method.rival_batch, self.world_size
        )
        self.judged = [p for p in self.discriminator.parameters() if p.requires_grad]
        self.drawn = [p for p in self.generator.parameters() if p.requires_grad]
        self.drawn += [] if self.predictor is None else list(self.predictor.parameters())
        self.optimizers = [torch.optim.Adam(p, schedule.lr, schedule.betas) for p in (self.judged, self.drawn)]
        self.treatment = treat_steps(config.method, self.layers, self.optimizers[1])
        self.ema = EMA(self.generator, decay=schedule.ema)
        self.steppers = accelerator.prepare(*self.optimizers)
        self.objective = _OBJECTIVES[config.objective.name]
        lazy = config.objective
        self.lazy = LazyR1(lazy.penalty_weight, lazy.penalty_interval, lazy.penalty_scaled)
        self.seconds: list[float] = []

    def loop(self) -> int:
        """Train from the last checkpoint to the end, or until asked to stop."""
        first = self._resume() + 1
        if self.tracker:
            self.accelerator.init_trackers("orthocond")
        both = nn.ModuleDict({"generator": self.generator, "discriminator": self.discriminator})
        with Guard(self.run, both) as guard:
            for step in range(first, self.steps + 1):
                self.make_step(step, guard)
                stop = guard.should_stop()
                if stop or self._due(step, self.config.save_every):
                    self.run.save(self._state(), step)
                if stop:
                    break
        if not guard.exit_code:
            self.run.set_status("finished", self.steps)
        if self.tracker:
            self.accelerator.end_training()
        return guard.exit_code

    def _due(self, step: int, every: int) -> bool:
        return step == self.steps or (every > 0 and step % every == 0)

    def make_step(self, step: int, guard: Guard) -> None:
        """Make a step of both networks, and log it if it is due."""
        start = time.perf_counter()
        epoch, index = divmod(step - 1, self.epoch_steps)
        real = self._batch(epoch, index)
        lr = self._learning_rate(step)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
        self.generator.train()
        self.discriminator.train()
        random = _random(_STEP, self.config.seed, step)
        losses = self._step_discriminator(step, real, random, guard) | self._step_generator(step, random, guard)
        self.ema.update(self.generator)
        means = self.accelerator.reduce(torch.stack([x.detach().double() for x in losses.values()]), "mean")
        numbers = dict(zip(losses, means.tolist(), strict=True))
        self.seconds.append(time.perf_counter() - start)
        if (step - 1) % self.config.log_every == 0 or step == self.steps:
            with self._explained(step, losses["generator_loss"], guard):
                metrics: dict[str, Any] = numbers | {"lr": lr} | self._facts()
            if step == self.steps:
                metrics["finished"] = True
            # The mean since the last line: not all steps have a gradient penalty.
            timing = {"step_seconds": sum(self.seconds) / len(self.seconds)}
            self.seconds.clear()
            self.run.log(step, epoch, timing=timing, **metrics)
            if self.tracker:
                self.accelerator.log({k: v for k, v in metrics.items() if isinstance(v, (int, float))}, step)
        if self.config.sample_every and self._due(step, self.config.sample_every) and self.accelerator.is_main_process:
            self._draw(step)
        if self.progress is not None and self.accelerator.is_main_process:
            shown: dict[str, float | None] = {key: numbers[key] for key in ("discriminator_loss", "generator_loss")}
            self.progress(Progress(step, self.steps, shown))

    def _batch(self, epoch: int, index: int) -> Tensor:
        """The batches come from one iterator for an epoch, made anew at its beginning and after resuming."""
        if index == 0 or not hasattr(self, "batches"):
            self.batches = self.pipeline.batches(epoch, index)
        images = next(self.batches).images.to(self.accelerator.device, non_blocking=True)
        return center_crop(images, self.config.data.size)

    def _learning_rate(self, step: int) -> float:
        schedule = self.config.schedule
        constant = round(schedule.constant * self.steps)
        return schedule.lr * min(1.0, (self.steps + 1 - step) / (self.steps + 1 - constant))

    def _own(self, x: Tensor) -> Tensor:
        """What this process has of a whole batch, as the pipeline divides the images."""
        return x[self.rank :: self.world_size]

    def _sample(self, random: torch.Generator) -> tuple[Tensor, Tensor | None]:
        z, noise = sample(self.generator, self.config.schedule.batch_size, random)
        return self._own(z), None if noise is None else self._own(noise)

    def _augmented(self, images: Tensor, random: torch.Generator) -> Tensor:
        objective = self.config.objective
        if not objective.augment:
            return images
        whole = images
        if self.world_size > 1:  # room for the images of the others, so that the same numbers are drawn
            whole = images.new_zeros(len(images) * self.world_size, *images.shape[1:])
            whole[self.rank :: self.world_size] = images
        settings: dict[str, Any] = {"probability": objective.augment_probability, "each": objective.augment_each}
        return self._own(augment(whole, objective.augment, rng=random, **settings))

    def _step_discriminator(self, step: int, real: Tensor, random: torch.Generator, guard: Guard) -> dict[str, Tensor]:
        z, noise = self._sample(random)
        with self.accelerator.autocast():
            with torch.no_grad():
                fake = call(self.generator, z, noise).float()
            real, fake = self._augmented(real, random), self._augmented(fake, random)
            logits = self.discriminator(real).float(), self.discriminator(fake).float()
        loss = self.config.objective.discriminator_factor * self.objective.discriminator(*logits)
        losses = {"discriminator_loss": loss}
        factor = 0.0 if self.config.objective.penalty == "none" else self.lazy.factor(step - 1)
        if factor:
            losses["discriminator_penalty"] = self._gradient_penalty(real, fake, random)
            loss = loss + factor * losses["discriminator_penalty"]
        self._optimize(0, self.judged, loss, step, guard)
        return losses

    def _gradient_penalty(self, real: Tensor, fake: Tensor, random: torch.Generator) -> Tensor:
        """In full precision: the gradients of a gradient are small."""
        kind = self.config.objective.penalty
        if kind == "r1":
            return r1(self.discriminator, real)
        whole = len(real) * self.world_size
        t = self._own(torch.rand(whole, 1, 1, 1, generator=random)).to(real.device)
        return gradient_penalty(self.discriminator, real, fake, center=float(kind == "gp"), t=t)

    def _step_generator(self, step: int, random: torch.Generator, guard: Guard) -> dict[str, Tensor]:
        z, noise = self._sample(random)
        for parameter in self.judged:  # no gradients of what is not moved
            parameter.requires_grad_(False)
        with self.accelerator.autocast():
            fake = call(self.generator, z, noise).float()
            logits = self.discriminator(self._augmented(fake, random)).float()
        loss = self.objective.generator(logits)
        losses = {"generator_loss": loss}
        method = self.config.method
        extra = [weight_penalty(method, self.layers)]
        own = _random(_RIVAL, self.config.seed, step, self.rank)
        z, noise = z[: self.rival_batch], None if noise is None else noise[: self.rival_batch]
        extra.append(
            rival_penalty(method, self.generator, lambda z: call(self.generator, z, noise), z, self.predictor, own)
        )
        if found := [x for x in extra if x is not None]:
            losses["method_penalty"] = torch.stack(found).sum()
            loss = loss + losses["method_penalty"]
        self._optimize(1, self.drawn, loss, step, guard)
        for parameter in self.judged:
            parameter.requires_grad_(True)
        return losses

    def _optimize(self, which: int, parameters: list[nn.Parameter], loss: Tensor, step: int, guard: Guard) -> None:
        self.steppers[which].zero_grad()
        self.accelerator.backward(loss)
        if self.world_size > 1:
            self._average_gradients(parameters)
        guard.check(step, loss)
        with self._explained(step, loss, guard):
            self.steppers[which].step()

    @contextmanager
    def _explained(self, step: int, loss: Tensor, guard: Guard) -> Iterator[None]:
        """Say more where a treatment, or a spectrum, was given a matrix that is not finite."""
        try:
            yield
        except ValueError as error:
            text = f"{error}\n{guard.diagnosis(step, float(loss.detach()))}"
            self.run.note(text)
            raise FloatingPointError(text) from error

    def _average_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Not by DDP, whose hooks know neither gradients of gradients nor several calls of a network in a step."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = self.accelerator.reduce(torch.cat([g.flatten() for g in gradients]), "mean")
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.reshape(gradient.shape))

    def _facts(self) -> dict[str, Any]:
        """Condition and ends of the spectrum of each weight that meets the latents; the worst condition first."""
        weights: list[Any] = [layer.weight for layer in self.layers]
        spectra = [singular_spectrum(matrix_view(w.detach())) for w in weights]
        facts: dict[str, Any] = {
            "condition": max(float(s.condition) for s in spectra),
            "conditions": [float(s.condition) for s in spectra],
            "largest": [float(s.largest) for s in spectra],
            "smallest": [float(s.smallest) for s in spectra],
        }
        if self.treatment is not None and self.treatment.lr is not None:
            found = [s.occurrence for s in self.treatment.statistics]
            facts["olr_occurrence"] = sum(found) / len(found)
        return facts

    @torch.no_grad()
    def _draw(self, step: int) -> None:
        """A picture of the averaged generator with latents that depend on the seed alone."""
        z, noise = sample(self.ema.model, _ROWS * _COLUMNS, _random(_PICTURE, self.config.seed))
        write_atomically(self.run.figures / f"samples-{step:07d}.png", picture(call(self.ema.model, z, noise)))

    def _state(self) -> dict[str, Any]:
        return {
            "generator": self.generator.state_dict(),
            "discriminator": self.discriminator.state_dict(),
            "ema": self.ema.state_dict(),
            "predictor": None if self.predictor is None else self.predictor.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "scaler": self.accelerator.scaler.state_dict() if self.accelerator.scaler else None,
            "treatment": None if self.treatment is None else self.treatment.state_dict(),
            "rng": capture_rng(),  # for networks of a user, which may draw from it
        }

    def _resume(self) -> int:
        found = self.run.resume()
        if found is None:
            return 0
        state = found.state
        self.generator.load_state_dict(state["generator"])
        self.discriminator.load_state_dict(state["discriminator"])
        self.ema.load_state_dict(state["ema"])
        if self.predictor is not None:
            self.predictor.load_state_dict(state["predictor"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        if self.accelerator.scaler and state["scaler"]:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        if self.treatment is not None:
            self.treatment.load_state_dict(state["treatment"])
        restore_rng(state["rng"])
        return found.step


def picture(images: Tensor, columns: int = _COLUMNS) -> bytes:
    """A PNG of images ``(N, 3, H, W)`` in [-1, 1], in rows; small ones are enlarged."""
    from PIL import Image

    count, channels, height, width = images.shape
    rows = -(-count // columns)
    sheet = images.new_ones(rows * columns, channels, height + 2, width + 2)  # a white line around each
    sheet[:count, :, 1:-1, 1:-1] = images.clamp(-1, 1)
    tiles = sheet.unflatten(0, (rows, columns)).permute(0, 3, 1, 4, 2).reshape(rows * (height + 2), -1, channels)
    pixels = tiles.add(1).mul(127.5).round().to(torch.uint8).cpu().numpy()
    enlarged = Image.fromarray(np.repeat(np.repeat(pixels, f := max(1, 96 // height), 0), f, 1))
    file = io.BytesIO()
    enlarged.save(file, "PNG")
    return file.getvalue()
