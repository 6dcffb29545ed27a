"""What a step of a GAN is, what it logs and what it remembers (paper: section 6.2)."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from orthocond import gans
from orthocond.lab.data import ImageData, Pipeline
from orthocond.lab.data.images import center_crop
from orthocond.lab.factories import is_factory
from orthocond.lab.generation import data
from orthocond.lab.generation import evaluate as evaluation
from orthocond.lab.generation.config import GanSchedule, Generation
from orthocond.lab.generation.health import Health
from orthocond.lab.generation.networks import call, latent_layers, prepare, sample
from orthocond.lab.generation.pictures import COLUMNS, picture
from orthocond.lab.generation.rivals import make_predictor, rival_penalty
from orthocond.lab.methods import step_facts, treat_steps, weight_penalty
from orthocond.lab.runs import Run
from orthocond.lab.runs.files import write_atomically
from orthocond.lab.task import Task
from orthocond.matrix import matrix_view
from orthocond.matrix.spectra import singular_spectrum

_OBJECTIVES: dict[str, gans.Objective] = {
    "non-saturating": gans.NonSaturating(),
    "hinge": gans.Hinge(),
    "hinge-saturating": gans.Hinge(saturating=True),
    "least-squares": gans.LeastSquares(),
    "wasserstein": gans.Wasserstein(),
}
_STEP, _RIVAL, _PICTURE = 2, 3, 4  # streams of random numbers, beside those of the data
_ROWS = 8  # of the pictures


class GenerationTask(Task[Generation]):
    """A generator whose weights that meet the latents are treated, and a discriminator; see `Task`.

    A step is one of the discriminator and one of the generator, each with latents of its own. Every ``sample_every``
    steps a picture of the averaged generator, always with the same latents, goes to the run's figures.

    Images, latents, noise and augmentation are drawn for the whole batch and divided among the processes. The random
    vectors of HP, OroJaR and LVP are drawn by each process, and the largest values of the paper's forms are those of
    its own images.
    """

    kind = "generation"
    baselines = ("none",)
    sprites_only = {"data.shape": None}  # noqa: RUF012  # declared as a class variable of `Task`

    def __init__(self, config: Generation, images: ImageData, accelerator: Any) -> None:
        super().__init__(config, images, accelerator)
        schedule, objective = config.schedule, config.objective
        self.rank, self.world_size = accelerator.process_index, accelerator.num_processes
        self.pipeline = Pipeline(
            data=images,
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
        self.generator, self.discriminator = (network.to(accelerator.device) for network in prepare(config))
        self.module = nn.ModuleDict({"generator": self.generator, "discriminator": self.discriminator})
        self.layers = latent_layers(self.generator)
        predictor = make_predictor(config.method, config.data.size, int(self.generator.z_dim))  # type: ignore[arg-type]
        self.predictor = None if predictor is None else predictor.to(accelerator.device)
        self.rival_batch = share(
            schedule.batch_size if config.method.rival_batch is None else config.method.rival_batch, self.world_size
        )
        self.discriminator_parameters = [p for p in self.discriminator.parameters() if p.requires_grad]
        self.generator_parameters = [p for p in self.generator.parameters() if p.requires_grad]
        self.generator_parameters += [] if self.predictor is None else list(self.predictor.parameters())
        self.optimizers = [_optimizer(groups, schedule) for groups in self._groups()]
        self.treatment = treat_steps(
            config.method,
            self.layers,
            self.optimizers[1],
            model=self.generator,
            gain=config.method.olr_gain,
            seed=config.seed,
        )
        self.ema = gans.EMA(self.generator, decay=schedule.ema)
        self.health = Health()
        self.steppers = accelerator.prepare(*self.optimizers)
        self.objective = _OBJECTIVES[objective.name]
        self.lazy = gans.LazyR1(objective.penalty_weight, objective.penalty_interval, objective.penalty_scaled)
        self.period = 1 if objective.penalty == "none" else objective.penalty_interval

    def _groups(self) -> list[list[dict[str, Any]]]:
        """The parameters of both optimizers, with the factors of their learning rates."""
        schedule = self.config.schedule
        rates = {"subspace_lr": schedule.subspace_lr, "importance_lr": schedule.importance_lr}
        factor = 1.0 if schedule.discriminator_lr is None else schedule.discriminator_lr / schedule.lr
        discriminator = [{"params": self.discriminator_parameters, "factor": factor}]
        if set(rates.values()) == {None}:
            return [discriminator, [{"params": self.generator_parameters}]]
        groups = gans.parameter_groups(self.generator, schedule.lr, **rates)
        for group in groups:
            group["params"] = [p for p in group["params"] if p.requires_grad]
            group["factor"] = group["initial_lr"] / schedule.lr
        if self.predictor is not None:
            groups.append({"params": list(self.predictor.parameters())})
        return [discriminator, groups]

    load_data = staticmethod(data.load_images)
    stand_in = staticmethod(data.stand_in)
    measures = evaluation.MEASURES
    evaluate = staticmethod(evaluation.evaluate)
    scores = staticmethod(evaluation.scores)

    @staticmethod
    def initial_weights(config: Generation) -> list[Tensor]:
        """The weights that meet the latents, of networks of ours."""
        if is_factory(config.model.name):  # code that nobody allowed to run
            return []
        layers: Any = latent_layers(prepare(config).generator)
        return [layer.weight.detach() for layer in layers]

    def sizes(self, *, stand_in: bool = False) -> list[str]:
        """Images, parameters and steps."""
        counts = [f"{sum(p.numel() for p in m.parameters()):,}" for m in (self.generator, self.discriminator)]
        return [
            "Data: number of images unknown without the data" if stand_in else f"Data: {len(self.data)} images",
            f"Model: {counts[0]} parameters in the generator, {counts[1]} in the discriminator",
            f"Steps: {self.steps}",
        ]

    def learning_rate(self, step: int) -> float:
        """The rate of a step: constant at first, then falling linearly."""
        schedule = self.config.schedule
        constant = round(schedule.constant * self.steps)
        left = min(1.0, (self.steps + 1 - step) / (self.steps + 1 - constant))
        return schedule.lr * (schedule.end + (1 - schedule.end) * left)

    def step(self, step: int, check: Callable[[Tensor], None]) -> dict[str, Tensor]:
        """One step of Adam for each network."""
        real = self.next_batch(self.pipeline, step).images.to(self.accelerator.device, non_blocking=True)
        real = center_crop(real, self.config.data.size)
        self.mark("data")
        self.generator.train()
        self.discriminator.train()
        rng = random(_STEP, self.config.seed, step)
        losses = self._step_discriminator(step, real, rng, check)
        self.mark("discriminator")
        losses |= self._step_generator(step, rng, check)
        self.ema.update(self.generator)
        self.mark("average")
        return losses

    def _own(self, x: Tensor) -> Tensor:
        """What this process has of a whole batch, as the pipeline divides the images."""
        return x[self.rank :: self.world_size]

    def _sample(self, rng: torch.Generator) -> tuple[Tensor, Tensor | None]:
        z, noise = sample(self.generator, self.config.schedule.batch_size, rng)
        return self._own(z), None if noise is None else self._own(noise)

    def _augmented(self, images: Tensor, rng: torch.Generator) -> Tensor:
        objective = self.config.objective
        if not objective.augment:
            return images
        whole = images
        if self.world_size > 1:  # room for the images of the others, so that the same numbers are drawn
            whole = images.new_zeros(len(images) * self.world_size, *images.shape[1:])
            whole[self.rank :: self.world_size] = images
        settings: dict[str, Any] = {"probability": objective.augment_probability, "each": objective.augment_each}
        return self._own(gans.augment(whole, objective.augment, rng=rng, **settings))

    def _step_discriminator(
        self, step: int, real: Tensor, rng: torch.Generator, check: Callable[[Tensor], None]
    ) -> dict[str, Tensor]:
        z, noise = self._sample(rng)
        with self.accelerator.autocast():
            with torch.no_grad():
                fake = call(self.generator, z, noise).float()
            images = real, fake
            real, fake = self._augmented(real, rng), self._augmented(fake, rng)
            logits = self.discriminator(real).float(), self.discriminator(fake).float()
        loss = self.config.objective.discriminator_factor * self.objective.discriminator(*logits)
        losses = {"discriminator_loss": loss}
        factor = 0.0 if self.config.objective.penalty == "none" else self.lazy.factor(step - 1)
        if factor:
            losses["discriminator_penalty"] = self._gradient_penalty(real, fake, rng)
            loss = loss + factor * losses["discriminator_penalty"]
        self._backward(0, self.discriminator_parameters, loss, check)
        self.steppers[0].step()
        return losses | self._signs(step, logits, losses.get("discriminator_penalty"), images)

    def _signs(
        self, step: int, logits: tuple[Tensor, Tensor], penalty: Tensor | None, images: tuple[Tensor, Tensor]
    ) -> dict[str, Tensor]:
        """Signs of health, of the whole batch; those of the images where there is a line of metrics."""
        real, fake = self.accelerator.gather(torch.stack(logits, 1).detach()).unbind(1)
        found = self.health.see(real, fake, penalty)
        if self.logs(step):
            real, fake = (self.accelerator.gather(x.contiguous()) for x in images)
            found |= self.health.see_images(fake, real)
        return found

    def _gradient_penalty(self, real: Tensor, fake: Tensor, rng: torch.Generator) -> Tensor:
        """In full precision: the gradients of a gradient are small."""
        kind = self.config.objective.penalty
        if kind == "r1":
            return gans.r1(self.discriminator, real)
        whole = len(real) * self.world_size
        t = self._own(torch.rand(whole, 1, 1, 1, generator=rng)).to(real.device)
        return gans.gradient_penalty(self.discriminator, real, fake, center=float(kind == "gp"), t=t)

    def _step_generator(self, step: int, rng: torch.Generator, check: Callable[[Tensor], None]) -> dict[str, Tensor]:
        z, noise = self._sample(rng)
        for parameter in self.discriminator_parameters:  # no gradients of what is not moved
            parameter.requires_grad_(False)
        with self.accelerator.autocast():
            fake = call(self.generator, z, noise).float()
            logits = self.discriminator(self._augmented(fake, rng)).float()
        loss = self.objective.generator(logits)
        losses = {"generator_loss": loss}
        if penalties := [x for x in self._penalties(step, z, noise) if x is not None]:
            losses["method_penalty"] = torch.stack(penalties).sum()
            loss = loss + losses["method_penalty"]
        self._backward(1, self.generator_parameters, loss, check)
        self.mark("generator")
        self.steppers[1].step()
        self.mark("optimizer")
        for parameter in self.discriminator_parameters:
            parameter.requires_grad_(True)
        return losses

    def _penalties(self, step: int, z: Tensor, noise: Tensor | None) -> list[Tensor | None]:
        """What the method adds to the generator's loss."""
        method = self.config.method
        own = random(_RIVAL, self.config.seed, step, self.rank)
        z, noise = z[: self.rival_batch], None if noise is None else noise[: self.rival_batch]
        rival = rival_penalty(method, self.generator, lambda z: call(self.generator, z, noise), z, self.predictor, own)
        return [weight_penalty(method, self.layers), rival]

    def _backward(
        self, which: int, parameters: list[nn.Parameter], loss: Tensor, check: Callable[[Tensor], None]
    ) -> None:
        self.steppers[which].zero_grad()
        self.accelerator.backward(loss)
        if self.world_size > 1:
            self._average_gradients(parameters)
        check(loss)

    def _average_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Not by DDP, whose hooks know neither gradients of gradients nor several calls of a network in a step."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = self.accelerator.reduce(torch.cat([g.flatten() for g in gradients]), "mean")
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.reshape(gradient.shape))

    def facts(self) -> dict[str, Any]:
        """Condition and ends of the spectrum of each weight that meets the latents; what OLR did."""
        weights: list[Any] = [layer.weight for layer in self.layers]
        spectra = [singular_spectrum(matrix_view(w.detach())) for w in weights]
        return {
            "condition": max(float(s.condition) for s in spectra),
            "conditions": [float(s.condition) for s in spectra],
            "largest": [float(s.largest) for s in spectra],
            "smallest": [float(s.smallest) for s in spectra],
        } | step_facts(self.treatment)

    def shown(self, numbers: Mapping[str, float]) -> dict[str, float | None]:
        """The losses of both networks, and what is wrong with them."""
        return {key: numbers[key] for key in ("discriminator_loss", "generator_loss")} | self.health.shown()

    def warnings(self) -> list[str]:
        """A discriminator that is dead, samples that have collapsed."""
        return self.health.warnings()

    def logs(self, step: int) -> bool:
        """The last step, too."""
        return step == self.steps or super().logs(step)

    @torch.no_grad()
    def draw(self, step: int, run: Run) -> None:
        """A picture of the averaged generator with latents that depend on the seed alone."""
        every = self.config.sample_every
        if every and (step == self.steps or step % every == 0):
            z, noise = sample(self.ema.model, _ROWS * COLUMNS, random(_PICTURE, self.config.seed))
            write_atomically(run.figures / f"samples-{step:07d}.png", picture(call(self.ema.model, z, noise)))

    def state(self) -> dict[str, Any]:
        """Both networks, the average, the predictor of LVP, both optimizers, and the signs of health."""
        return {
            "generator": self.generator.state_dict(),
            "discriminator": self.discriminator.state_dict(),
            "ema": self.ema.state_dict(),
            "predictor": None if self.predictor is None else self.predictor.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "health": self.health.state_dict(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.generator.load_state_dict(state["generator"])
        self.discriminator.load_state_dict(state["discriminator"])
        self.ema.load_state_dict(state["ema"])
        if self.predictor is not None:
            self.predictor.load_state_dict(state["predictor"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.health.load_state_dict(state["health"])


def _optimizer(groups: list[dict[str, Any]], schedule: GanSchedule) -> Optimizer:
    if schedule.optimizer == "sgd":
        return torch.optim.SGD(groups, schedule.lr, momentum=schedule.betas[0])
    return torch.optim.Adam(groups, schedule.lr, schedule.betas)


def random(stream: int, *numbers: int) -> torch.Generator:
    """Random numbers that depend on these numbers alone, so that nothing has to be remembered for resuming."""
    state = np.random.SeedSequence([stream, *numbers]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]))


def share(rival_batch: int, world_size: int) -> int:
    """Latents of a rival's penalty in each process.

    Raises:
        ValueError: If the processes cannot have equally many.
    """
    if rival_batch % world_size:
        raise ValueError(
            f"--method.rival-batch needs a multiple of the number of processes, {world_size}; got {rival_batch}."
        )
    return rival_batch // world_size
