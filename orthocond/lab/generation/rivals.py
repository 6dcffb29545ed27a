"""The rivals of the paper's GAN tables: penalties that disentangle latents."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from orthocond.gans import LatentPredictor, hessian_penalty, latent_predictability, orthogonal_jacobian
from orthocond.lab.generation.config import GanMethod


def make_predictor(method: GanMethod, size: int, z_dim: int) -> nn.Module | None:
    """The network that LVP trains beside the generator, or None."""
    return LatentPredictor(size, z_dim) if "lvp" in method.parts else None


def rival_penalty(
    method: GanMethod,
    generator: nn.Module,
    network: Callable[[Tensor], Tensor],
    z: Tensor,
    predictor: nn.Module | None,
    random: torch.Generator,
) -> Tensor | None:
    """The penalty of a rival times its factor, or None.

    Args:
        method: The method.
        generator: The generator, of which the paper's forms take the layers.
        network: The generator as a function of latents alone, with its noise fixed.
        z: Latents ``(N, z_dim)``.
        predictor: What `make_predictor` gave.
        random: Draws the vectors or changes.
    """
    chosen = method.parts
    paper = method.rival == "paper"
    if "lvp" in chosen:
        assert predictor is not None
        loss = "binary" if paper else "cross-entropy"
        return method.lvp_weight * latent_predictability(network, z, predictor, loss=loss, rng=random)
    if "hp" in chosen:
        if paper:  # the first projection is affine in z, so its Hessian is 0
            first = getattr(generator, "first_projection", None)
            layers = [layer for layer in _feature_layers(generator) if layer is not first]
            value = hessian_penalty(network, z, layers=layers, reduction="max", rng=random)
        else:
            value = hessian_penalty(network, z, rng=random)
        return method.hp_weight * value
    if "orojar" in chosen:
        if paper:
            layers = _feature_layers(generator)
            value = orthogonal_jacobian(network, z, layers=layers, derivative="difference", reduction="max", rng=random)
        else:
            value = orthogonal_jacobian(network, z, relative=True, rng=random)
        return method.orojar_weight * value
    return None


def _feature_layers(generator: nn.Module) -> list[nn.Module]:
    """The layers at which the paper's comparison penalizes: convolutions, or EigenGAN's blocks."""
    for name in ("convolutions", "blocks"):
        if layers := getattr(generator, name, None):
            return list(layers)
    raise ValueError(
        f"{type(generator).__name__} has neither convolutions nor blocks, the layers of the paper's penalties; use "
        "--method.rival image, or give your generator the attribute convolutions."
    )
