"""Directions that no latent mixes: the rotation in which all Jacobian Grams are nearly diagonal."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from orthocond._checks import at_least_float32, check_choice, check_count, check_not_negative
from orthocond._html import paragraph
from orthocond.directions.basis import TIE_TOL, Directions, blocks_on_diagonal, check_k, direction_rows
from orthocond.directions.diagonalize import jointly_diagonalize, off_diagonal
from orthocond.directions.factorize import blocks_of, check_blocks
from orthocond.directions.jacobian import (
    check_moves,
    check_weights,
    derivative_of,
    grams_of_latents,
    jacobian_directions,
)
from orthocond.generators import ImageGenerator, as_generator, evaluating, latents_of
from orthocond.matrix.decompose import eigh

_MOST_DIMENSIONS = 128  # that are rotated if not told
_NORMALIZATIONS = ("trace", "norm", "none")


@dataclass(frozen=True, eq=False)
class JointDirections(Directions):
    """The `Directions` of `joint_directions`, with what the rotation achieved.

    Attributes:
        energies: Part of the squared entries of JᵀJ that is off the diagonal, from 0 to 1: ``"axes"`` for the latents
            as they are (not for a subspace of them), ``"mean"`` for the eigenvectors of the mean, as
            `jacobian_directions` has them, and ``"joint"`` for these.
        agreement: Smallest cosine between a direction and its partner from another start; near 1 if the optimum is
            unique.
        converged: Whether the rotation came to rest before the limit of steps.

    Ties are groups that the generator does not tell apart. Importances may be equal without a tie.
    """

    energies: dict[str, float] = field(default_factory=dict)
    agreement: float = math.nan
    converged: bool = True

    def _extras(self) -> dict[str, Any]:
        agreement = None if math.isnan(self.agreement) else self.agreement
        return {"energies": self.energies, "agreement": agreement, "converged": self.converged}

    @staticmethod
    def _read_extras(content: dict[str, Any]) -> dict[str, Any]:
        agreement = content["agreement"]
        energies = {str(name): float(value) for name, value in content["energies"].items()}
        agreement = math.nan if agreement is None else float(agreement)
        return {"energies": energies, "agreement": agreement, "converged": bool(content.get("converged", True))}

    def _summary(self) -> str:
        energies = ", ".join(f"{name} {value:.3f}" for name, value in self.energies.items())
        rest = "" if self.converged else "; stopped at the limit of steps"
        return f"off the diagonal: {energies}; agreement of the starts {self.agreement:.3f}{rest}"

    def _repr_html_(self) -> str:
        """The same as a table, for notebooks."""
        return super()._repr_html_() + paragraph(self._summary())

    def __str__(self) -> str:
        return f"{super().__str__()}\n  {self._summary()}"


def joint_directions(
    generator: ImageGenerator,
    z: Tensor | int = 64,
    k: int | None = None,
    *,
    normalize: str = "trace",
    weights: Tensor | None = None,
    blocks: Sequence[int] | None = None,
    starts: int = 3,
    derivative: str = "auto",
    tie_tol: float = TIE_TOL,
    batch_size: int = 64,
    seed: int = 0,
) -> JointDirections:
    r"""The directions whose effects on the image are orthogonal to each other at as many latents as possible.

    Two latents are disentangled to first order if they change the image in orthogonal ways, so that
    :math:`J_z^T J_z` is diagonal at every z. Normal latents may be rotated freely. This finds the rotation R that comes
    nearest to it (see `jointly_diagonalize`):

    .. math:: \min_R \sum_z w_z \sum_{i \ne j} \bigl(R A_z R^T\bigr)_{ij}^2,
        \qquad A_z = J_z^T J_z / \operatorname{tr} J_z^T J_z

    It costs no training. `sefa` and `jacobian_directions` diagonalize one matrix, the weight's or the mean. Where its
    eigenvalues tie, as for an orthogonal weight, their directions are arbitrary. Many matrices tell directions apart
    that one does not.

    For a uniform prior a rotation is not a symmetry. The directions are still valid, but the coordinates along them are
    then not independent of each other.

    Args:
        generator: A `Generator`, or any callable with ``z_dim``. The latents of an EigenGAN rotate layer by layer.
        z: Latents ``(n, z_dim)``, or how many to sample from the prior. Use more than a few for each dimension that
            is rotated, and compare two seeds.
        k: How many directions. The rotation is sought in the span of the k leading directions of
            `jacobian_directions`. None takes all, up to 128. With blocks, the k most important ones are returned.
        normalize: What each :math:`J^T J` is divided by: its ``"trace"``, its Frobenius ``"norm"``, or ``"none"``, so
            that latents whose image moves much count more.
        weights: Weights ``(n,)`` of the latents; None counts all alike.
        blocks: Sizes of groups of consecutive latents that rotate among themselves only. None takes the layers of an
            EigenGAN, and else one block.
        starts: How many starts of the rotation: one from the eigenvectors of the mean, the others random.
        derivative: As in `jacobian_directions`.
        tie_tol: Relative tolerance of ties; see `jointly_diagonalize`.
        batch_size: Images in one call of the generator, counted with their derivatives.
        seed: Seed of the latents that are sampled and of the random starts.

    Returns:
        `JointDirections` with the importance of `jacobian_directions`: the mean squared change of a pixel for one
        sigma. Largest first; the largest entry of each is positive.

    Raises:
        TypeError: If the generator is not a callable with ``z_dim``.
        ValueError: If a shape or setting is not valid, images do not change, or the generator has noise that does not
            come from torch's random state.

    Example:
        >>> from orthocond.directions import joint_directions
        >>> turn = torch.tensor([[0.6, 0.8], [-0.8, 0.6]])
        >>> class Painter:  # two factors, which are the latents turned; both change the image alike on average
        ...     z_dim = 2
        ...     def __call__(self, z):
        ...         return (z @ turn.mT).sin().reshape(-1, 1, 1, 2)
        >>> found = joint_directions(Painter())
        >>> (found.vectors @ turn.mT).abs().round(decimals=2).sort(0).values
        tensor([[0., 0.], [1., 1.]])

    References:
        Cardoso, Souloumiac, *Jacobi Angles for Simultaneous Diagonalization* (1996). Wei et al., *Orthogonal Jacobian
        Regularization* (2021), which trains for the same aim.
    """
    name = "joint_directions"
    generator = as_generator(generator, name)
    z = latents_of(generator, z, name, seed)
    d = z.shape[1]
    check_k(k, d, name)
    if blocks is None:
        blocks = blocks_of(generator)
    sizes = check_blocks(blocks, d, name)
    w = check_weights(torch.ones(len(z)) if weights is None else weights, z, name)
    check_choice(normalize, f"{name}(normalize=...)", _NORMALIZATIONS)
    check_count(starts, f"{name}(starts=...)", 1)
    check_not_negative(tie_tol, f"{name}(tie_tol=...)")
    check_count(batch_size, f"{name}(batch_size=...)", 1)
    rows = torch.eye(d, dtype=z.dtype, device=z.device)
    size = min(k or _MOST_DIMENSIONS, d)
    with evaluating(generator):
        found = derivative_of(generator, z, derivative, batch_size, name)
        if len(sizes) == 1 and size < d:
            settings: Any = {"weights": weights, "derivative": found.kind, "batch_size": batch_size}
            rows = jacobian_directions(generator, z, size, **settings).vectors.to(z)
            sizes = [size]
        grams = grams_of_latents(found, z, rows, batch_size)
    check_moves(grams, name)
    matrices = _normalized(grams, normalize) * w.sqrt()[:, None, None]
    rotation, ties, agreement, converged = _rotate_blocks(matrices, sizes, starts, tie_tol, seed)
    average = (w[:, None, None] * grams).sum(0) / w.sum() * generator.sigma**2
    mean = torch.block_diag(*(eigh(part)[1].mT for part in blocks_on_diagonal(average, sizes)))
    energies = {"axes": off_diagonal(matrices)} if len(rows) == d else {}
    energies |= {"mean": off_diagonal(mean @ matrices @ mean.mT)}
    energies |= {"joint": off_diagonal(rotation @ matrices @ rotation.mT)}
    importance = (rotation @ average @ rotation.mT).diagonal().clamp_min(0)
    order = importance.argsort(descending=True, stable=True).tolist()
    labels = [f"L{i} joint {j}" for i, size in enumerate(sizes) for j in range(size)]
    dtype = at_least_float32(z.dtype)
    return JointDirections(
        (rotation @ rows.double())[order].to(dtype),
        importance[order].to(dtype),
        tuple(labels[i] if len(sizes) > 1 else f"joint {place}" for place, i in enumerate(order)),
        "joint",
        tie_tol,
        energies=energies,
        agreement=agreement,
        converged=converged,
        tied=tuple(tuple(sorted(map(order.index, group))) for group in ties),
    )[:k]


def off_diagonal_energy(
    generator: ImageGenerator,
    directions: Directions | Tensor | None = None,
    z: Tensor | int = 64,
    *,
    normalize: str = "trace",
    derivative: str = "auto",
    batch_size: int = 64,
    seed: int = 1,
) -> float:
    r"""How far directions are from changing the image in orthogonal ways: what `joint_directions` minimizes.

    It is the fraction of the squared entries of :math:`V J_z^T J_z V^T` that is off the diagonal, over all latents,
    with the directions as rows of V: 0 if each changes the image orthogonally to all others at every latent. Measure on
    latents that were not used to find them; the default seed is not that of `joint_directions`.

    Args:
        generator: A `Generator`, or any callable with ``z_dim``.
        directions: `Directions`, or unit rows ``(k, z_dim)``; None takes the axes.
        z: Latents ``(n, z_dim)``, or how many to sample from the prior.
        normalize: As in `joint_directions`.
        derivative: As in `jacobian_directions`.
        batch_size: Images in one call of the generator, counted with their derivatives.
        seed: Seed of the latents that are sampled.

    Returns:
        A number from 0 to 1.

    Raises:
        TypeError: If the generator is not a callable with ``z_dim``.
        ValueError: If a shape or setting is not valid, or images do not change.

    Example:
        >>> from orthocond.directions import off_diagonal_energy
        >>> class Painter:
        ...     z_dim = 2
        ...     def __call__(self, z):
        ...         return z.sin().reshape(-1, 1, 1, 2)
        >>> off_diagonal_energy(Painter())
        0.0
    """
    return off_diagonal_energies(
        generator, [directions], z, normalize=normalize, derivative=derivative, batch_size=batch_size, seed=seed
    )[0]


def off_diagonal_energies(
    generator: ImageGenerator,
    bases: Sequence[Directions | Tensor | None],
    z: Tensor | int = 64,
    *,
    normalize: str = "trace",
    derivative: str = "auto",
    batch_size: int = 64,
    seed: int = 1,
) -> list[float]:
    """The `off_diagonal_energy` of several sets of directions at the cost of one; arguments and errors are the same.

    Example:
        >>> from orthocond.directions import off_diagonal_energies
        >>> class Painter:
        ...     z_dim = 2
        ...     def __call__(self, z):
        ...         return z.sin().reshape(-1, 1, 1, 2)
        >>> turned = torch.tensor([[0.6, 0.8], [-0.8, 0.6]])
        >>> off_diagonal_energies(Painter(), [None, turned])[0]
        0.0
    """
    name = "off_diagonal_energy"
    generator = as_generator(generator, name)
    z = latents_of(generator, z, name, seed)
    check_choice(normalize, f"{name}(normalize=...)", _NORMALIZATIONS)
    rows = [direction_rows(directions, generator.z_dim, name).to(z) for directions in bases]
    shared = rows[0] if len(rows) == 1 else torch.eye(generator.z_dim).to(z)
    check_count(batch_size, f"{name}(batch_size=...)", 1)
    with evaluating(generator):
        grams = grams_of_latents(derivative_of(generator, z, derivative, batch_size, name), z, shared, batch_size)
    turned = [grams] if len(rows) == 1 else [one.double() @ grams @ one.double().mT for one in rows]
    for one in turned:
        check_moves(one, name, "along these directions")
    return [off_diagonal(_normalized(one, normalize)) for one in turned]


def _normalized(grams: Tensor, kind: str) -> Tensor:
    """The matrices divided by their sizes; one that is zero stays so."""
    if kind == "none":
        return grams
    traces = grams.diagonal(dim1=-2, dim2=-1).sum(-1)
    sizes = traces if kind == "trace" else grams.flatten(1).norm(dim=1)
    return grams / torch.where(sizes > 0, sizes, 1)[:, None, None]


def _rotate_blocks(
    matrices: Tensor, sizes: list[int], starts: int, tie_tol: float, seed: int
) -> tuple[Tensor, list[tuple[int, ...]], float, bool]:
    """The rotation of all blocks, their ties, the least agreement, and whether all came to rest."""
    rotations, ties, agreements, converged = [], [], [], True
    first = 0
    for part in blocks_on_diagonal(matrices, sizes):
        size = part.shape[-1]
        if part.any():
            one = jointly_diagonalize(part, starts=starts, tie_tol=tie_tol, seed=seed)
            rotations.append(one.rotation)
            ties += [tuple(first + i for i in group) for group in one.ties]
            agreements += [] if math.isnan(one.agreement) else [one.agreement]
            converged &= one.converged
        else:  # without effect: any basis is as good
            rotations.append(torch.eye(size).to(part))
            ties += [tuple(range(first, first + size))] if size > 1 else []
        first += size
    return torch.block_diag(*rotations), ties, min(agreements, default=math.nan), converged
