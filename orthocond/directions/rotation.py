"""A generator whose axes are given directions."""

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from orthocond._layers import own_parametrizations
from orthocond.directions.basis import Directions, direction_rows
from orthocond.gans import EigenGenerator, SimpleGenerator
from orthocond.generators import Generator, ImageGenerator, Sampler, as_generator, draw_latents

_ORTHOGONAL = 1e-3  # how far products of directions may be from 0 and 1


class RotatedGenerator(nn.Module):
    """A generator after a rotation of its latents: G(z R).

    Args:
        module: The generator.
        rotation: Orthogonal R ``(z_dim, z_dim)``.
    """

    rotation: Tensor

    def __init__(self, module: Any, rotation: Tensor) -> None:
        super().__init__()
        self.module = module
        self.z_dim = len(rotation)
        self.register_buffer("rotation", rotation)
        self.training = getattr(module, "training", self.training)  # so that train(r.training) leaves its parts alone

    def forward(self, z: Tensor, *noise: Tensor) -> Tensor:
        """Images of latents along the directions."""
        images: Tensor = self.module(z @ self.rotation, *noise)
        return images


def rotate(generator: ImageGenerator, directions: Directions | Tensor) -> nn.Module:
    r"""A generator whose axes are the directions: its image of z is :math:`G(z R)`, with the directions as rows of R.

    Latent i of the result moves along direction i, so that anything that uses the axes (metrics, traversals, other
    tools) uses the directions. In a `SimpleGenerator` and an `EigenGenerator` R is multiplied into the first
    projection and the subspaces, so that the result is a generator of the same kind and cost. The rows of a rotated
    subspace are in general not orthogonal to each other, so put no `Stiefel` steps on them. Others, classes derived
    from these two, and those with hooks are wrapped, as a copy if they can be copied. The generator that is given
    stays as it is.

    Fewer directions than latents are the first axes; the others complete them to a basis. Normal latents stay normal.
    A `Generator` with another prior keeps the distribution of its images: latents are sampled as before and rotated,
    and are then not independent of each other.

    Args:
        generator: A `Generator`, or any callable with ``z_dim``.
        directions: `Directions` such as `joint_directions` finds, or unit rows ``(k, z_dim)``, orthogonal to each
            other. Those of an `EigenGenerator` stay within its layers; its axes are sorted by layer.

    Returns:
        A new generator: a `Generator` if one was given.

    Raises:
        TypeError: If the generator is not a callable with ``z_dim``.
        ValueError: If the directions are not orthogonal to each other or do not fit.

    Accuracy:
        Images are equal up to rounding.

    Example:
        >>> from orthocond.directions import joint_directions, rotate
        >>> from orthocond.gans import SimpleGenerator
        >>> g = SimpleGenerator(size=8, z_dim=4, width=4)
        >>> found = joint_directions(g, 8)
        >>> turned = rotate(g, found)
        >>> z = torch.randn(3, 4)
        >>> torch.allclose(turned(z), g(z @ found.vectors), atol=1e-5)
        True
    """
    plain = as_generator(generator, "rotate")
    like = plain.like
    rows = direction_rows(directions, plain.z_dim, "rotate").to(like.device).double()
    _check_orthogonal(rows)
    inner: Any = plain.module
    if _is_just(EigenGenerator, plain):
        rotation = _by_layer(rows, [len(one.weight) for one in inner.subspaces])
        turned: nn.Module = _turned_eigengan(inner, rotation)
    elif _is_just(SimpleGenerator, plain):
        rotation = _completed(rows)
        turned = copy.deepcopy(inner)
        weight = _plain_weight(turned.first_projection)  # type: ignore[arg-type]
        weight.data = (rotation @ weight.data.double().flatten(1)).reshape(weight.shape).to(weight)
    else:
        rotation = _completed(rows)
        turned = RotatedGenerator(_copied(generator), rotation.to(like))
    if not isinstance(generator, Generator):
        return turned
    prior = generator.prior if generator.prior == "normal" else _RotatedPrior(generator.prior, rotation)
    with warnings.catch_warnings():  # what is to be said of the range was said of the generator itself
        warnings.filterwarnings("ignore", "Generator: the range")
        if isinstance(turned, RotatedGenerator):  # the images of a Generator are scaled already
            declared = None if plain.range is None else (-1.0, 1.0)
            result = Generator(turned, prior=prior, range=declared, latent_shape=(plain.z_dim,))
        else:
            result = Generator(turned, prior=prior, range=plain.range, noise=plain.noise)
    result.sigma = generator.sigma  # a rotation keeps it; that of a sampler is measured
    return result


def _is_just(kind: type[nn.Module], generator: Generator) -> bool:
    """Whether images are what a kind of generator makes of its weights: no class derived from it, and no hooks."""
    inner: Any = generator.module
    if type(generator) is not Generator or type(inner) is not kind:
        return False
    parts = [generator, *inner.modules()]
    return not any(m._forward_hooks or m._forward_pre_hooks for m in parts)


def _copied(generator: ImageGenerator) -> ImageGenerator:
    """A copy, so that training one does not change the other; itself if Python cannot copy it."""
    try:
        return copy.deepcopy(generator)
    except (RuntimeError, TypeError):  # such as modules with the former spectral_norm, or with a lock
        return generator


@dataclass(frozen=True, eq=False)
class _RotatedPrior:
    """A prior along the directions: its latents, rotated. A class, since Python can save no function in a function."""

    prior: str | Sampler
    rotation: Tensor

    def __call__(self, count: int, rng: torch.Generator) -> Tensor:
        z = draw_latents(self.prior, count, len(self.rotation), rng)
        return z @ self.rotation.mT.to(z)


def _check_orthogonal(rows: Tensor) -> None:
    off = float((rows @ rows.mT - torch.eye(len(rows), dtype=rows.dtype, device=rows.device)).abs().max())
    if off > _ORTHOGONAL:
        raise ValueError(
            f"rotate needs directions that are orthogonal to each other; products of these are off by {off:.2g}. "
            "Directions of a region are not; take those of joint_directions, jacobian_directions or sefa."
        )


def _completed(rows: Tensor) -> Tensor:
    """The rows, and after them others that complete an orthonormal basis."""
    if len(rows) == rows.shape[1]:
        return rows
    return torch.cat([rows, torch.linalg.svd(rows)[2][len(rows) :]])


def _by_layer(rows: Tensor, sizes: list[int]) -> Tensor:
    """A rotation of each layer's latents among themselves, with the rows of the layer first."""
    parts = []
    lengths = torch.stack([part.norm(dim=1) for part in rows.split(sizes, dim=1)])
    if bool((lengths.amax(0) < 1 - _ORTHOGONAL).any()):
        raise ValueError(
            "rotate needs directions that stay within one layer of an EigenGAN each, as joint_directions has them; "
            "some of these mix layers."
        )
    for part, mine in zip(rows.split(sizes, dim=1), lengths > 0.5, strict=True):
        parts.append(_completed(part[mine]))
    return torch.block_diag(*parts)


def _turned_eigengan(generator: EigenGenerator, rotation: Tensor) -> EigenGenerator:
    """The rows of R diag(l) U are the new subspace: their lengths the importances, their directions the weight."""
    turned = copy.deepcopy(generator)
    first = 0
    for layer in turned.subspaces:
        weight = _plain_weight(layer)
        place = slice(first, first + len(weight))
        turn = rotation[place, place]
        rows = turn @ (layer.scale.data[:, None] * weight.data).double()
        lengths = rows.norm(dim=1)
        rows = torch.where(lengths[:, None] > 0, rows, turn @ weight.data.double())  # a dead latent can learn again
        weight.data = nn.functional.normalize(rows, dim=1, eps=torch.finfo(rows.dtype).tiny).to(weight)
        layer.scale.data = lengths.to(layer.scale)
        first += len(weight)
    return turned


def _plain_weight(layer: nn.Module) -> nn.Parameter:
    """The weight of a layer of a copy, without parametrizations, which would undo the rotation."""
    if parametrize.is_parametrized(layer, "weight"):
        own_parametrizations(layer)
        parametrize.remove_parametrizations(layer, "weight")
    return layer.weight  # type: ignore[return-value]
