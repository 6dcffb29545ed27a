"""Directions in closed form: SeFa's eigenvectors of the first projection, and EigenGAN's own basis (section 5.1)."""

from collections.abc import Sequence
from dataclasses import replace
from operator import index
from typing import Any

import torch
from torch import Tensor, nn

from orthocond._checks import check_count, check_floating
from orthocond.directions.basis import TIE_TOL, Directions, axes, check_k, from_eigenvectors
from orthocond.generators import Generator, as_generator
from orthocond.matrix.decompose import check_finite, eigh

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

Projection = nn.Module | Tensor


def sefa(
    layer: Projection | Sequence[Projection],
    normalize: bool = True,
    k: int | None = None,
    *,
    tie_tol: float = TIE_TOL,
) -> Directions:
    r"""SeFa: the directions in which the first projection of a generator moves most.

    With :math:`G_1(z) = A z + b` they are the eigenvectors of :math:`A^T A`, and the importance is the eigenvalue
    :math:`\|A n\|^2`. The official method first scales each output unit, each row of A, to length 1, so that no unit
    counts more than another; ``normalize=False`` is the plain SVD that the paper's authors use, with the squared
    singular values as importance. The bias has no part in it.

    Where A has orthogonal columns of equal length all eigenvalues are equal, and the directions are arbitrary: see
    ``ties`` of the result, and use `joint_directions` instead.

    Args:
        layer: Linear; transposed convolution or convolution from the latent vector as a 1x1 image; or A itself,
            ``(outputs, z_dim)``. Several of them that read the same latent are stacked.
        normalize: Whether each output unit is scaled to length 1. Units without weights stay zero.
        k: How many directions; None for all.
        tie_tol: Relative tolerance of ties; see `Directions`.

    Returns:
        Directions in the dtype of the weight, at least float32; computed in float64.

    Raises:
        TypeError: If a layer is none of these.
        ValueError: If the weight is not finite or zero, the layer has groups, sizes differ, or k is not possible.

    Example:
        >>> from orthocond.directions import sefa
        >>> weight = torch.diag(torch.tensor([1.0, 3.0, 2.0]))
        >>> sefa(weight, normalize=False, k=2).vectors
        tensor([[0., 1., 0.],
                [0., 0., 1.]])
        >>> sefa(weight).ties  # orthogonal once its units are scaled
        ((0, 1, 2),)

    References:
        Shen, Zhou, *Closed-Form Factorization of Latent Semantics in GANs* (2021). Song, Sebe, Wang (2022), section
        5.1.
    """
    layers = [layer] if isinstance(layer, (nn.Module, Tensor)) else list(layer)
    if not layers:
        raise ValueError("sefa needs at least one layer; got an empty list.")
    parts = [_projection(one) for one in layers]
    if len({part.shape[1] for part in parts}) > 1:
        sizes = [part.shape[1] for part in parts]
        raise ValueError(f"sefa needs layers that read the same latent; these read {sizes} dimensions.")
    a = torch.cat([part.double() for part in parts])
    check_finite(a)
    check_k(k, a.shape[1], "sefa")
    if not a.any():
        raise ValueError(f"sefa needs a weight that is not zero; all {a.numel()} entries of this one are.")
    if normalize:
        a = nn.functional.normalize(a, dim=1, eps=torch.finfo(a.dtype).tiny)
    values, vectors = eigh(a.mT @ a)
    return from_eigenvectors(values, vectors, parts[0].dtype, k, "sefa", tie_tol)


def _projection(layer: Projection) -> Tensor:
    """The matrix ``(outputs, z_dim)`` by which a layer multiplies the latent."""
    if isinstance(layer, Tensor):
        a = check_floating(layer, "sefa").detach()
        if a.ndim != 2:
            raise ValueError(
                f"sefa needs a matrix (outputs, z_dim); got shape {tuple(a.shape)}. "
                "Pass the layer, not its weight, or flatten the weight so that each column belongs to one latent."
            )
        return a
    if isinstance(layer, (*_TRANSPOSED, *_CONVOLUTIONS)) and layer.groups != 1:
        raise ValueError(f"sefa needs a layer without groups, in which all latents mix; this one has {layer.groups}.")
    if isinstance(layer, nn.Linear):
        return layer.weight.detach()
    if isinstance(layer, _TRANSPOSED):
        return layer.weight.detach().flatten(1).mT
    if isinstance(layer, _CONVOLUTIONS):
        return layer.weight.detach().transpose(0, 1).flatten(1).mT
    raise TypeError(
        f"sefa needs a Linear, a convolution or a matrix (outputs, z_dim); got {type(layer).__name__}. "
        "If you have a generator, pass the first layer that the latent goes through."
    )


def subspaces_of(generator: Any) -> list[Any]:
    """The subspaces of an EigenGAN, from coarse to fine; none for other generators.

    A subspace is a layer with the weight U ``(directions, features)`` and the scale l ``(directions,)``, and the
    directions of all of them are the latents.
    """
    inner = generator.module if isinstance(generator, Generator) else generator
    layers: Any = getattr(inner, "subspaces", None)
    layers = list(layers) if isinstance(layers, (list, tuple, nn.ModuleList)) else []
    shapes = [[tuple(getattr(getattr(one, name, None), "shape", ())) for name in ("weight", "scale")] for one in layers]
    if any(len(weight) != 2 or scale != weight[:1] for weight, scale in shapes):
        return []
    return layers if sum(weight[0] for weight, _ in shapes) == getattr(generator, "z_dim", None) else []


def blocks_of(generator: Any) -> list[int]:
    """Sizes of the groups of latents that have directions of their own: the layers of an EigenGAN, else one group."""
    return [len(one.weight) for one in subspaces_of(generator)] or [int(generator.z_dim)]


def check_blocks(blocks: Sequence[int], z_dim: int, name: str) -> list[int]:
    """Sizes of groups of latents that have directions of their own.

    Raises:
        TypeError: If they are no sequence of integers.
        ValueError: If a size is not a positive number, or they are not of all latents.
    """
    try:
        sizes = [index(size) for size in blocks]
    except TypeError as error:
        raise TypeError(f"{name}(blocks=...) needs a list of sizes such as [6, 6]; got {blocks!r}.") from error
    for size in sizes:
        check_count(size, f"{name}(blocks=...)", 1)
    if sum(sizes) != z_dim:
        raise ValueError(f"{name}(blocks=...) needs sizes of sum {z_dim}, as many as latents; got {sizes}.")
    return sizes


def eigengan_directions(generator: nn.Module, layer: int | None = None) -> Directions:
    r"""EigenGAN's own directions: the coordinates of its subspaces, with importance :math:`|l_i| \, \|U_i\|`.

    Training chose this basis, so equal importances are not ties. Importances of different layers are lengths in
    different feature spaces; to compare them, use the effect sizes, ``eigengan_directions(g).measure(g)``.

    Args:
        generator: With ``subspaces``, a list of layers with ``weight`` U ``(directions, features)`` and ``scale`` l,
            and with latents that are their coordinates, layer after layer, such as `EigenGenerator`.
        layer: One of the layers, from coarse to fine; None for all of them.

    Returns:
        Directions named ``L0 D3``: layer 0, coordinate 3.

    Raises:
        TypeError: If the generator has no such layers.
        ValueError: If there is no such layer.

    Example:
        >>> from orthocond.directions import eigengan_directions
        >>> from orthocond.gans import EigenGenerator
        >>> g = EigenGenerator(size=16, directions=3, noise_dim=4, base_channels=4)
        >>> eigengan_directions(g, layer=1).names
        ('L1 D0', 'L1 D1', 'L1 D2')

    References:
        He, Kan, Shan, *EigenGAN* (2021). Song, Sebe, Wang (2022), section 6.2.
    """
    z_dim = as_generator(generator, "eigengan_directions").z_dim
    layers = subspaces_of(generator)
    if not layers:
        raise TypeError(
            "eigengan_directions needs a generator with subspaces, layers with a weight (directions, features) and a "
            f"scale (directions,), which together have its {z_dim} latents as directions, such as EigenGenerator; got "
            f"{type(generator).__name__}. Any generator has axes(z_dim)."
        )
    importance = torch.cat([(one.scale.abs() * one.weight.norm(dim=1)).detach() for one in layers])
    if layer is not None and layer not in range(len(layers)):
        raise ValueError(f"eigengan_directions(layer=...) needs a layer from 0 to {len(layers) - 1}; got {layer!r}.")
    origin = [(i, j) for i, one in enumerate(layers) for j in range(len(one.weight))]
    found = axes(z_dim, importance, method="eigengan")
    places = [origin[int(row.argmax())] for row in found.vectors]
    named = replace(found, names=tuple(f"L{i} D{j}" for i, j in places))
    return named if layer is None else named[[n for n, (i, _) in enumerate(places) if i == layer]]
