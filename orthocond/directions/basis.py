"""Directions of a latent space: unit vectors with their importance, and which of them are arbitrary."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from operator import index
from os import PathLike
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from orthocond._checks import at_least_float32, check_count, check_floating, check_not_negative
from orthocond._html import paragraph, table
from orthocond.directions._masks import Region, check_mask
from orthocond.generators import ImageGenerator, all_images, as_generator, draws_noise, latents_of

TIE_TOL = 0.01


@dataclass(frozen=True, eq=False)
class Directions:
    r"""Unit directions of a latent space. Methods that find them put the most important first.

    Eigenvectors of equal eigenvalues are arbitrary up to rotation. Where a weight is orthogonal, as the paper wants it,
    so are the directions of `sefa`. Equal importances therefore count as `ties`, and a group of ties is a subspace, not
    a list of meanings. Neighbors by importance tie where :math:`\lambda_i - \lambda_{i+1} \le
    t \lambda_i`, or where both are zero up to rounding; what ties in a chain is one group.

    Args:
        vectors: Unit rows ``(k, z_dim)``.
        importance: ``(k,)``, not negative; what it measures depends on the method.
        names: One for each direction; none at all takes ``"0"``, ``"1"``, …
        method: Where they come from, for titles.
        tie_tol: The tolerance t; None where the method fixes the basis, so that equal importances mean nothing.
        effect: Measured effect sizes ``(k,)``; see `effect_sizes`.
        tied: Groups of indices that tie, where that does not follow from importances, as for `joint_directions`; None
            finds them by ``tie_tol``.

    Raises:
        TypeError: If vectors or importance are not real floating-point tensors.
        ValueError: If there are more directions than dimensions, rows are not of unit length, shapes do not fit,
            importances are negative or not finite, or ties are not groups of different indices.

    Example:
        >>> from orthocond.directions import Directions
        >>> found = Directions(torch.eye(4)[:3], torch.tensor([5.0, 2.0, 1.999]), method="sefa")
        >>> found.ties
        ((1, 2),)
        >>> print(found)
        sefa: 3 directions of 4 dimensions
          name  importance  share
          0              5  55.6%
          1              2  22.2%  tied with 2
          2          1.999  22.2%  tied with 1
    """

    vectors: Tensor
    importance: Tensor
    names: tuple[str, ...] = ()
    method: str = "directions"
    tie_tol: float | None = TIE_TOL
    effect: Tensor | None = None
    tied: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        vectors = check_floating(self.vectors, "Directions(vectors=...)").detach()
        importance = check_floating(self.importance, "Directions(importance=...)").detach()
        if vectors.ndim != 2 or not vectors.numel():
            raise ValueError(f"Directions needs vectors of shape (k, z_dim); got {tuple(vectors.shape)}.")
        k, z_dim = vectors.shape
        if k > z_dim:
            raise ValueError(f"Directions needs at most as many directions as dimensions, {z_dim}; got {k}.")
        worst = float((vectors.double().norm(dim=1) - 1).abs().max())
        if not worst < 1e-3:
            raise ValueError(
                f"Directions needs rows of length 1; one is off by {worst:.3g}. "
                "Use torch.nn.functional.normalize(vectors, dim=1)."
            )
        _check_sizes("importance", importance, k)
        names = tuple(map(str, self.names or range(k)))
        if len(names) != k:
            raise ValueError(f"Directions needs one name for each of {k} directions; got {len(names)}.")
        if self.tie_tol is not None:
            check_not_negative(self.tie_tol, "Directions(tie_tol=...)")
        if self.effect is not None:
            _check_sizes("effect", check_floating(self.effect, "Directions(effect=...)"), k)
        if self.tied is not None:
            _check_groups(self.tied, k)
        object.__setattr__(self, "vectors", vectors)
        object.__setattr__(self, "importance", importance)
        object.__setattr__(self, "names", names)

    @property
    def z_dim(self) -> int:
        """Number of latent dimensions."""
        return self.vectors.shape[1]

    @property
    def ties(self) -> tuple[tuple[int, ...], ...]:
        """Groups of indices, by equal importances or as told: each is a subspace in which any rotation is as good."""
        if self.tied is not None:
            return self.tied
        if self.tie_tol is None:
            return ()
        values = self.importance.double().tolist()
        order = sorted(range(len(values)), key=lambda i: -values[i])
        rounding = self.z_dim * torch.finfo(self.importance.dtype).eps * values[order[0]]
        groups = [order[:1]]
        for above, i in pairwise(order):
            if values[above] - values[i] <= max(self.tie_tol * values[above], rounding):
                groups[-1].append(i)
            else:
                groups.append([i])
        return tuple(tuple(sorted(group)) for group in groups if len(group) > 1)

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, index: int | slice | Sequence[int]) -> Self:
        """Some of the directions, in the order that is asked for. Ties are those among them."""
        rows = self._places(index)
        groups = [tuple(i for i, place in enumerate(rows) if place in group) for group in self.tied or ()]
        return replace(
            self,
            vectors=self.vectors[rows],
            importance=self.importance[rows],
            names=tuple(self.names[i] for i in rows),
            effect=None if self.effect is None else self.effect[rows],
            tied=None if self.tied is None else tuple(group for group in groups if len(group) > 1),
        )

    def _places(self, index: int | slice | Sequence[int]) -> list[int]:
        """The places that an index selects, at least one."""
        rows = list(range(len(self)))
        rows = rows[index] if isinstance(index, slice) else [rows[i] for i in _listed(index)]
        if not rows:
            raise ValueError(f"Directions needs at least one of its {len(self)} directions; {index!r} selects none.")
        return rows

    def save(self, path: str | PathLike[str]) -> None:
        """Write the directions to a JSON file that `load` reads.

        The file has ``z_dim``, ``kind`` (the method), ``tie_tol``, ``ties``, and a list ``directions``, each with
        ``name``, ``vector``, ``importance`` and, if it was measured, ``effect``.
        """
        rows = []
        for i, name in enumerate(self.names):
            row = {"name": name, "vector": self.vectors[i].tolist(), "importance": float(self.importance[i])}
            rows.append(row if self.effect is None else row | {"effect": float(self.effect[i])})
        content = {"z_dim": self.z_dim, "kind": self.method, "tie_tol": self.tie_tol, "ties": self.ties}
        content |= self._extras() | {"directions": rows}
        Path(path).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")

    def _extras(self) -> dict[str, Any]:
        """What a kind of directions has beyond these entries of a file."""
        return {}

    @staticmethod
    def _read_extras(content: dict[str, Any]) -> dict[str, Any]:
        """The arguments that `_extras` of this kind wrote."""
        return {}

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Read a JSON file of `save`, or of the explorer. Entries ``tie_tol``, ``ties`` and ``effect`` may be missing.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If the file is not JSON, entries are missing or of another kind, or they are no directions.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            rows = content["directions"]
            vectors = torch.tensor([row["vector"] for row in rows], dtype=torch.float32)
            columns = {key: [row[key] for row in rows if key in row] for key in ("importance", "effect")}
            names = tuple(str(row["name"]) for row in rows)
            z_dim, kind, tie_tol = content["z_dim"], str(content["kind"]), content.get("tie_tol")
            tie_tol = None if tie_tol is None else float(tie_tol)
            effect = torch.tensor(columns["effect"], dtype=torch.float32) if columns["effect"] else None
            importance = torch.tensor(columns["importance"], dtype=torch.float32)
            ties = content.get("ties")
            tied = None if ties is None else tuple(tuple(map(index, group)) for group in ties)
            extras = cls._read_extras(content)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RuntimeError) as error:
            raise ValueError(
                f"{path} holds no directions ({type(error).__name__}: {error}). It needs JSON with z_dim, kind and "
                "directions, each with name, vector and importance."
            ) from error
        if vectors.ndim != 2 or vectors.shape[1] != z_dim:
            raise ValueError(
                f"{path} needs vectors of z_dim = {z_dim} numbers; they have shape {tuple(vectors.shape)}."
            )
        return cls(vectors, importance, names, kind, tie_tol, effect, tied, **extras)

    def measure(
        self, generator: ImageGenerator, z: Tensor | int = 64, *, step: float = 1.0, batch_size: int = 64, seed: int = 0
    ) -> Self:
        """The same directions with their `effect_sizes`."""
        effect = effect_sizes(generator, self, z, step=step, batch_size=batch_size, seed=seed)
        return replace(self, effect=effect)

    def _cells(self) -> list[list[str]]:
        """Header and rows of a table."""
        total = float(self.importance.sum()) or 1.0
        partners = {i: [j for j in group if j != i] for group in self.ties for i in group}
        rows = [["name", "importance", "share", *([] if self.effect is None else ["effect"]), ""]]
        for i, name in enumerate(self.names):
            value = float(self.importance[i])
            effect = [] if self.effect is None else [f"{float(self.effect[i]):.3g}"]
            tied = "tied with " + _few(partners[i]) if i in partners else ""
            rows.append([name, f"{value:.4g}", f"{value / total:.1%}", *effect, tied])
        return rows

    def _repr_html_(self) -> str:
        """The same as a table, for notebooks."""
        header, *rows = self._cells()
        title = paragraph(f"{self.method}: {len(self)} directions of {self.z_dim} dimensions")
        return title + table(header, rows, right=range(1, len(header) - 1))

    def __str__(self) -> str:
        rows = self._cells()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join([f"  {row[0]:<{widths[0]}}", *map(str.rjust, row[1:-1], widths[1:-1]), row[-1]]).rstrip()
            for row in rows
        ]
        return "\n".join([f"{self.method}: {len(self)} directions of {self.z_dim} dimensions", *lines])


def _listed(index: int | Sequence[int]) -> Sequence[int]:
    return [index] if isinstance(index, int) else index


def _few(indices: list[int]) -> str:
    shown = ", ".join(map(str, indices[:6]))
    return shown if len(indices) <= 6 else f"{shown}, … ({len(indices)} in all)"


def _check_groups(groups: Sequence[Sequence[int]], k: int) -> None:
    flat = [i for group in groups for i in group]
    if len(set(flat)) < len(flat) or not all(0 <= i < k for i in flat) or any(len(group) < 2 for group in groups):
        raise ValueError(
            f"Directions(tied=...) needs groups of two or more of the indices 0 to {k - 1}, each in one group only; "
            f"got {groups}."
        )


def _check_sizes(name: str, values: Tensor, k: int) -> None:
    if values.shape != (k,):
        raise ValueError(f"Directions({name}=...) needs one number for each of {k} directions; got {values.shape}.")
    if not bool((values.isfinite() & (values >= 0)).all()):
        raise ValueError(f"Directions({name}=...) needs finite numbers of at least 0; got {values.tolist()}.")


def from_eigenvectors(
    values: Tensor, columns: Tensor, dtype: torch.dtype, k: int | None, method: str, tie_tol: float
) -> Directions:
    """Directions from eigenvalues and eigenvectors in columns, in any order; at least float32, for rows of length 1.

    Rounding may leave a zero eigenvalue below 0. The sign of an eigenvector is arbitrary: its largest entry is made
    positive, so that the same weight gives the same directions on every machine.
    """
    order = values.argsort(descending=True, stable=True)[:k]
    rows = columns.mT[order]
    rows = with_positive_largest(rows / rows.norm(dim=1, keepdim=True))
    names = tuple(f"{method} {i}" for i in range(len(rows)))
    dtype = at_least_float32(dtype)
    return Directions(rows.to(dtype), values[order].clamp_min(0).to(dtype), names, method, tie_tol)


def blocks_on_diagonal(matrices: Tensor, sizes: list[int]) -> list[Tensor]:
    """The square blocks of these sizes on the diagonal of matrices ``(*, d, d)``."""
    return [rows.split(sizes, -1)[i] for i, rows in enumerate(matrices.split(sizes, -2))]


def in_blocks(parts: Sequence[Directions]) -> Directions:
    """Directions of consecutive groups of latents as directions of all of them, the most important ones first.

    They are named after their group, as in ``L1 sefa 0``, and tie within it only. One group stays as it is.
    """
    if len(parts) == 1:
        return parts[0]
    importance = torch.cat([part.importance for part in parts])
    order = importance.argsort(descending=True, stable=True).tolist()
    names = [f"L{i} {name}" for i, part in enumerate(parts) for name in part.names]
    firsts = accumulate((len(part) for part in parts), initial=0)
    ties = [[first + i for i in group] for first, part in zip(firsts, parts, strict=False) for group in part.ties]
    return Directions(
        torch.block_diag(*(part.vectors for part in parts))[order],
        importance[order],
        tuple(names[i] for i in order),
        parts[0].method,
        parts[0].tie_tol,
        tied=tuple(tuple(sorted(map(order.index, group))) for group in ties),
    )


def with_positive_largest(rows: Tensor) -> Tensor:
    """The rows with signs that make the largest entry of each positive."""
    return rows * rows.gather(1, rows.abs().argmax(1, keepdim=True)).sign()


def check_k(k: int | None, z_dim: int, name: str) -> None:
    """Raise if ``k`` is not a possible number of directions."""
    if k is None:
        return
    check_count(k, f"{name}(k=...)", 1)
    if k > z_dim:
        raise ValueError(f"{name} can give at most as many directions as latent dimensions, {z_dim}; got k={k}.")


def direction_rows(directions: Directions | Tensor | None, z_dim: int, name: str) -> Tensor:
    """The unit rows of directions, or of a plain tensor of them; None gives the axes.

    Raises:
        TypeError: If they are neither `Directions` nor a floating-point tensor.
        ValueError: If they are not unit rows of ``z_dim`` entries, or more than ``z_dim``.
    """
    if directions is None:
        return torch.eye(z_dim, dtype=torch.float64)
    if not isinstance(directions, Directions):
        rows = check_floating(directions, f"{name}(directions=...)")
        directions = Directions(rows, torch.ones(len(rows)), tie_tol=None)
    if directions.z_dim != z_dim:
        raise ValueError(f"{name} needs directions of the generator's {z_dim} latents; got {directions.z_dim}.")
    return directions.vectors


def effect_sizes(
    generator: ImageGenerator,
    directions: Directions | Tensor,
    z: Tensor | int = 64,
    *,
    step: float = 1.0,
    mask: Region | None = None,
    batch_size: int = 64,
    seed: int = 0,
) -> Tensor:
    r"""How much an image changes on average for each sigma along a direction.

    .. math:: e(n) = \Bigl(\operatorname{mean}_{z, \text{pixels}}
        \bigl(\tfrac{G(z + s n) - G(z - s n)}{2 s}\bigr)^2\Bigr)^{1/2}

    The unit is that of pixels, which go from -1 to 1. For a linear generator it is the root of the importance that
    `jacobian_directions` gives. Importances of different methods cannot be compared; effect sizes can.

    Args:
        generator: A `Generator`, or any callable with ``z_dim``.
        directions: Directions, or unit rows ``(k, z_dim)``.
        z: Latents ``(n, z_dim)``, or how many to sample from the prior.
        step: s in sigma of the prior: small for the local effect, 2 or 3 for the effect of a traversal.
        mask: Region, a mask ``(H, W)`` or ``(center_row, center_col, height, width)``: only its pixels count.
        batch_size: Images in one call of the generator.
        seed: Seed of the latents that are sampled.

    Returns:
        ``(k,)``.

    Raises:
        TypeError: If the generator is not a callable with ``z_dim``.
        ValueError: If shapes do not fit, a setting is not valid, or the generator has noise that does not
            come from torch's random state.

    Example:
        >>> from orthocond.directions import axes, effect_sizes
        >>> class Painter:
        ...     z_dim = 2
        ...     def __call__(self, z):
        ...         return torch.stack([z[:, :1].expand(-1, 4), z[:, 1:].expand(-1, 4) / 4], 1)[:, None]
        >>> effect_sizes(Painter(), axes(2))
        tensor([0.7071, 0.1768])
        >>> effect_sizes(Painter(), axes(2), mask=torch.tensor([[True], [False]]).expand(2, 4))
        tensor([1., 0.])
    """
    generator = as_generator(generator, "effect_sizes")
    z = latents_of(generator, z, "effect_sizes", seed)
    rows = direction_rows(directions, generator.z_dim, "effect_sizes").to(z)
    if not 0 < step < float("inf"):
        raise ValueError(f"effect_sizes(step=...) needs a finite number above 0; got {step!r}.")
    draws_noise(generator, z, "effect_sizes")
    length = step * generator.sigma
    sizes = []
    for n in rows:
        ends = [all_images(generator, z + a * n, batch_size, "effect_sizes") for a in (length, -length)]
        change = ends[0] - ends[1]
        if mask is not None:
            change = change[..., check_mask(mask, change, "effect_sizes")]
        sizes.append((change.double() / (2 * step)).square().mean().sqrt())
    return torch.stack(sizes).to(rows)


def axes(z_dim: int, importance: Tensor | None = None, *, method: str = "axes") -> Directions:
    """The coordinate directions of a latent space, sorted by importance if one is given.

    The basis is given, not found as eigenvectors, so equal importances are not ties. Where a weight is orthogonal, and
    `sefa` has nothing to choose by, these are the directions that training chose.

    Args:
        z_dim: Number of latent dimensions.
        importance: ``(z_dim,)``, such as effect sizes; None gives 1 to each.
        method: Name of the method in titles.

    Returns:
        Directions named ``z0``, ``z1``, … after their coordinate.

    Raises:
        ValueError: If ``z_dim`` is not a positive number or the importances do not fit.

    Example:
        >>> from orthocond.directions import axes
        >>> axes(3, torch.tensor([0.1, 0.7, 0.2])).names
        ('z1', 'z2', 'z0')
    """
    check_count(z_dim, "axes(z_dim=...)", 1)
    if importance is None:
        importance = torch.ones(z_dim)
    importance = check_floating(importance, "axes(importance=...)").detach()
    _check_sizes("importance", importance, z_dim)
    order = importance.argsort(descending=True, stable=True)
    eye = torch.eye(z_dim, dtype=importance.dtype, device=importance.device)
    names = tuple(f"z{i}" for i in order.tolist())
    return Directions(eye[order], importance[order], names, method, tie_tol=None)
