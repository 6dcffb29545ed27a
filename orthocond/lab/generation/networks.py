"""Generators and discriminators by name or from a user's factory."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from orthocond.gans import EigenDiscriminator, EigenGenerator, SimpleDiscriminator, SimpleGenerator
from orthocond.lab.config import from_json
from orthocond.lab.factories import FactoryKindError, call_factory, check_import, is_factory
from orthocond.lab.generation.config import GanModel, Generation
from orthocond.lab.methods import treat_weights
from orthocond.lab.runs import Run


class Networks(NamedTuple):
    """The two networks of a GAN."""

    generator: nn.Module
    discriminator: nn.Module


def build(model: GanModel, size: int) -> Networks:
    """Make the networks of a configuration, without treatments yet.

    Args:
        model: Which networks.
        size: Side of the images.

    Raises:
        ValueError: If there are no such networks, or their settings or the size do not fit.
        TypeError: If a factory does not return two modules.
    """
    if is_factory(model.name):
        return _of_user(model.name, size)
    if model.name == "simple":
        return Networks(
            SimpleGenerator(size, model.z_dim, model.width, channels=model.channels or None, blocks=model.blocks),
            SimpleDiscriminator(size, model.discriminator_width, norm=model.discriminator_norm),
        )
    return Networks(
        EigenGenerator(size, model.directions, model.noise_dim, model.width, model.max_channels, form=model.form),
        EigenDiscriminator(
            size, model.discriminator_width, model.discriminator_max_channels or model.max_channels, form=model.form
        ),
    )


def _of_user(name: str, size: int) -> Networks:
    made: Any = call_factory(name, size, "the side of the images")
    if not (isinstance(made, tuple) and len(made) == 2 and all(isinstance(m, nn.Module) for m in made)):
        raise FactoryKindError(
            f"{name} has to return a generator and a discriminator, two modules; it returned {made!r}."
        )
    if not isinstance(getattr(made[0], "z_dim", None), int):
        raise FactoryKindError(f"The generator of {name} needs an attribute z_dim, its number of latents.")
    return Networks(*made)


def latent_layers(generator: nn.Module) -> list[nn.Module]:
    """The layers whose weights meet the latents: EigenGAN's subspaces, or the first projection.

    Raises:
        ValueError: If the generator has neither.
    """
    layers = getattr(generator, "subspaces", None)
    if layers is None and isinstance(first := getattr(generator, "first_projection", None), nn.Module):
        layers = [first]
    if not layers:
        raise ValueError(
            f"{type(generator).__name__} has neither a layer first_projection nor layers subspaces; give your "
            "generator the attribute first_projection, the layer that the latent goes through."
        )
    return list(layers)


def prepare(config: Generation) -> Networks:
    """The networks of a configuration with the generator's weights treated, before any training."""
    torch.manual_seed(config.seed)
    networks = build(config.model, config.data.size)
    treat_weights(config.method, latent_layers(networks.generator))
    return networks


def call(generator: nn.Module, z: Tensor, noise: Tensor | None) -> Tensor:
    """Images of latents, with the noise of a generator that has some."""
    images: Tensor = generator(z) if noise is None else generator(z, noise)
    return images


def sample(generator: nn.Module, count: int, random: torch.Generator) -> tuple[Tensor, Tensor | None]:
    """Latents ``(count, z_dim)``, and the noise of a generator that has some."""
    like = next(generator.parameters())
    z = torch.randn(count, generator.z_dim, generator=random).to(like.device)  # type: ignore[call-overload]
    draw: Any = getattr(generator, "sample_noise", None)
    return z, None if draw is None else draw(count, rng=random)


def load_generator(run: Run, *, allow_import: str | None = None, averaged: bool = True) -> nn.Module:
    """The generator of a run, from its last checkpoint, in evaluation mode on the CPU.

    Args:
        run: The run.
        allow_import: The function of a user's networks that may be imported and called, as the run names it.
        averaged: Whether to take the average over the training, or the weights of the last step.

    Raises:
        NotAllowedError: If the run names another function.
        RuntimeError: If it has no checkpoint yet.
        ValueError: If the run is not one of a GAN.
    """
    config = from_json(Generation, run.config)
    check_import(config.model.name, allow_import, run.path)
    found = run.load()
    if found is None:
        raise RuntimeError(f"{run.path} has no checkpoint yet; train it first.")
    generator = prepare(config).generator
    generator.load_state_dict(found.state["ema"]["model"] if averaged else found.state["generator"])
    return generator.eval().requires_grad_(False)
