"""The rows of the paper's GAN tables: treatments of the weights that meet the latents, and the rivals' penalties."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from orthocond.gans import LatentPredictor, hessian_penalty, latent_predictability, orthogonal_jacobian
from orthocond.lab.data.options import nearest
from orthocond.lab.generation.config import GanMethod
from orthocond.steps import NearestOrthogonal, OptimalLR, Treatment, treat
from orthocond.weights import orthogonal, orthogonality_loss

WEIGHTS = {
    "ol": "a loss that pulls the weight towards orthogonality",
    "ow": "an orthogonal weight",
}
STEPS = {
    "nog": "the nearest orthogonal gradient",
    "olr": "the step length that brings the weight closest to orthogonal",
}
RIVALS = {
    "hp": "the Hessian Penalty: latents that act on the image apart from each other",
    "orojar": "Orthogonal Jacobian regularization: latents that move the image in orthogonal directions",
    "lvp": "latent variational predictability: latents whose change a network can tell from the images",
}
NAMES = ("none", "ol", "ow", "nog", "olr", "nog+olr", "hp", "orojar", "lvp")


def parts(name: str) -> frozenset[str]:
    """The parts of a method's name, checked; none for ``"none"``.

    Raises:
        ValueError: If a part is unknown or they do not go together.

    Example:
        >>> sorted(parts("nog+olr")), sorted(parts("none"))
        (['nog', 'olr'], [])
        >>> parts("ol+ow")
        Traceback (most recent call last):
        ValueError: One treatment of the weight at a time; 'ol+ow' has ol and ow.
    """
    if name == "none":
        return frozenset()
    found = name.split("+")
    known = (*WEIGHTS, *STEPS, *RIVALS)
    if "none" in found:
        raise ValueError(f"none stands alone; got {name!r}.")
    for part in found:
        if part not in known:
            raise ValueError(f"There is no method {part!r}.{nearest(part, known)} There are: none, {', '.join(known)}.")
    if len(set(found)) < len(found):
        raise ValueError(f"Each treatment counts once; got {name!r}.")
    for kind, what in ((WEIGHTS, "treatment of the weight"), (RIVALS, "rival")):
        if len(same := [part for part in found if part in kind]) > 1:
            raise ValueError(f"One {what} at a time; {name!r} has {' and '.join(same)}.")
    return frozenset(found)


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


def treat_weights(method: GanMethod, layers: Sequence[nn.Module]) -> None:
    """Make the weights orthogonal if the method says so, before optimizer and average are made."""
    if "ow" in parts(method.name):
        for layer in layers:
            orthogonal(layer)


def treat_steps(method: GanMethod, layers: Sequence[nn.Module], optimizer: Optimizer) -> Treatment | None:
    """Treat gradients and step lengths of the weights, after the optimizer was made."""
    chosen = parts(method.name)
    gradient = NearestOrthogonal(of=method.nog_of) if "nog" in chosen else None
    lr = None
    if "olr" in chosen:
        lr = OptimalLR("paper") if method.olr == "paper" else OptimalLR(method.olr, gain=method.olr_gain)
    return treat(layers, optimizer, gradient=gradient, lr=lr) if gradient or lr else None


def weight_penalty(method: GanMethod, layers: Sequence[nn.Module]) -> Tensor | None:
    """The orthogonality loss of all layers times its factor, or None."""
    if "ol" not in parts(method.name):
        return None
    return method.ol_weight * torch.stack([orthogonality_loss(layer, form=method.ol) for layer in layers]).sum()


def make_predictor(method: GanMethod, size: int, z_dim: int) -> nn.Module | None:
    """The network that LVP trains beside the generator, or None."""
    return LatentPredictor(size, z_dim) if "lvp" in parts(method.name) else None


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
    chosen = parts(method.name)
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
