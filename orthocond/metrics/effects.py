"""What each direction of a generator does to factors that can be read from its images."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from orthocond._checks import check_count, check_not_negative
from orthocond.directions.basis import Directions, direction_rows
from orthocond.generators import Generator, ImageGenerator, as_generator, draws_noise, images_of
from orthocond.metrics.factors import (
    DCI,
    constant_columns,
    dci,
    modularity,
    mutual_information,
    mutual_information_gap,
    sap,
)

ReadFactors = Callable[[Tensor], Tensor]
"""From images to factors ``(n, k)``; a row with NaN is an image that could not be read."""


@dataclass(frozen=True)
class EffectMatrix:
    """What `effect_matrix` measures.

    Attributes:
        values: ``(directions, factors)``, mean absolute change per sigma, in units of ``spread``; float64. NaN for a
            direction none of whose images could be read.
        factors: Names of the factors.
        spread: ``(factors,)``, what the changes are divided by.
        read: Part of the images whose factors could be read.
    """

    values: Tensor
    factors: tuple[str, ...]
    spread: Tensor
    read: float

    def __str__(self) -> str:
        width = max(9, *(len(name) + 2 for name in self.factors))
        lines = ["direction" + "".join(name.rjust(width) for name in self.factors)]
        for index, row in enumerate(self.values.tolist()):
            lines.append(f"{index:9d}" + "".join(f"{value:{width}.2f}" for value in row))
        return "\n".join(lines)


def effect_matrix(
    generator: ImageGenerator,
    directions: Directions | Tensor | None,
    read_factors: ReadFactors,
    *,
    names: Sequence[str] | None = None,
    samples: int = 500,
    step: float = 1.0,
    spread: Tensor | None = None,
    batch_size: int = 128,
    seed: int = 0,
) -> EffectMatrix:
    r"""How far each direction moves each factor.

    .. math:: M_{ik} = \frac{1}{s\, \sigma_k}\, E_z
        \left| f_k(G(z + \tfrac{s}{2} d_i)) - f_k(G(z - \tfrac{s}{2} d_i)) \right|

    A disentangled generator has one large entry in the row of each direction that does anything. Factors have to be
    continuous where images are: shift an angle, such as a hue, so that its jump lies where no image is.

    Args:
        generator: A `Generator`, or a callable ``G(z) -> images`` with ``z_dim``.
        directions: `Directions`, or unit rows ``(d, z_dim)``; None takes the axes.
        read_factors: From images to factors ``(n, k)``, NaN where an image cannot be read; pairs with one are left out.
        names: Names of the factors.
        samples: Number of latents, the same for all directions.
        step: The step s, in sigma of the prior.
        spread: ``(k,)``, what changes are divided by, such as the standard deviation of the factors of real images,
            to compare generators. None takes that of the generated images; a factor that is constant has the effect 0.
        batch_size: Images at a time.
        seed: Seed of the latents.

    Returns:
        An `EffectMatrix`.

    Raises:
        TypeError: If the generator, its images or the factors are of another kind.
        ValueError: If an argument is not valid, or fewer than two images could be read.

    Example:
        >>> def generator(z):
        ...     return z.reshape(-1, 2, 1, 1)
        >>> generator.z_dim = 2
        >>> print(effect_matrix(generator, None, lambda x: x.flatten(1), names=["left", "right"], spread=torch.ones(2)))
        direction     left    right
                0     1.00     0.00
                1     0.00     1.00
    """
    check_count(samples, "effect_matrix(samples=...)", 2)
    if check_not_negative(step, "effect_matrix(step=...)") == 0:
        raise ValueError("effect_matrix(step=...) needs a number above 0; got 0.")
    generator = as_generator(generator, "effect_matrix")
    basis = direction_rows(directions, generator.z_dim, "effect_matrix")
    z = generator.sample(samples, seed)
    basis, length = basis.to(z), step * generator.sigma
    draws_noise(generator, z, "effect_matrix")

    def read(latents: Tensor) -> Tensor:
        return _read(generator, latents, read_factors, batch_size, "effect_matrix").double()

    start = read(z)
    known = start[start.isfinite().all(1)]
    names = _names(names, start.shape[1], "effect_matrix")
    if len(known) < 2:
        raise ValueError(
            f"effect_matrix needs two images that read_factors can read; of {samples} it read {len(known)}."
        )
    scale = torch.where(constant_columns(known), 0, known.std(0)) if spread is None else _check_spread(spread, known)
    rows, seen = [], [len(known) / samples]
    for direction in basis:
        change = (read(z + length / 2 * direction) - read(z - length / 2 * direction)).abs() / step
        both = change.isfinite().all(1)
        seen.append(float(both.double().mean()))
        rows.append(torch.where(scale > 0, change[both].mean(0) / scale, 0))
    return EffectMatrix(torch.stack(rows), tuple(names), scale, sum(seen) / len(seen))


def _check_spread(spread: Tensor, known: Tensor) -> Tensor:
    spread = torch.as_tensor(spread).detach().cpu().double()
    if spread.shape != known.shape[1:] or not (spread > 0).all() or not spread.isfinite().all():
        raise ValueError(f"effect_matrix(spread=...) needs {known.shape[1]} numbers above 0; got {spread.tolist()}.")
    return spread


def _read(generator: Generator, latents: Tensor, read_factors: ReadFactors, batch_size: int, caller: str) -> Tensor:
    parts = []
    for images in images_of(generator, latents, batch_size, caller):
        found = read_factors(images)
        if not isinstance(found, Tensor):
            raise TypeError(
                f"{caller} needs read_factors to give a tensor (n, k); it gave {type(found).__name__}. Wrap it: "
                "lambda images: read(images).values."
            )
        if found.ndim != 2 or len(found) != len(images) or not found.shape[1]:
            raise ValueError(f"{caller} needs factors ({len(images)}, k) from read_factors; got {tuple(found.shape)}.")
        parts.append(found.detach().cpu())
    return torch.cat(parts)


def _names(names: Sequence[str] | None, count: int, caller: str) -> tuple[str, ...]:
    if names is None:
        return tuple(f"factor {index}" for index in range(count))
    if len(names) != count:
        raise ValueError(f"{caller}(names=...) needs {count} names, one for each factor; got {len(names)}.")
    return tuple(names)


@dataclass(frozen=True)
class FactorReport:
    """All scores of a generator against the factors read from its images; see `factor_report`.

    Attributes:
        mig: Mutual information gap.
        sap: Separated attribute predictability.
        modularity: Modularity.
        dci: Disentanglement, completeness, informativeness, and the importance matrix.
        information: ``(directions, factors)``, mutual information in nats.
        effects: The `EffectMatrix`.
        constant: Names of the factors that do not vary; they count as 0 in the scores of factors.
        samples: Number of images of the scores that could be read.
        read: Part of the images that could be read.
    """

    mig: float
    sap: float
    modularity: float
    dci: DCI
    information: Tensor
    effects: EffectMatrix
    constant: tuple[str, ...]
    samples: int
    read: float

    def scores(self) -> dict[str, float]:
        """The scores by name, as plain numbers."""
        return {
            "mig": self.mig,
            "sap": self.sap,
            "modularity": self.modularity,
            "disentanglement": self.dci.disentanglement,
            "completeness": self.dci.completeness,
            "informativeness": self.dci.informativeness,
            "factors_read": self.read,
        }

    def __str__(self) -> str:
        scores = ", ".join(f"{name} {value:.3f}" for name, value in self.scores().items())
        constant = f"\nconstant: {', '.join(self.constant)}" if self.constant else ""
        return f"{scores} ({self.samples} images){constant}\n{self.effects}"


def factor_report(
    generator: ImageGenerator,
    directions: Directions | Tensor | None,
    read_factors: ReadFactors,
    *,
    names: Sequence[str] | None = None,
    samples: int = 10_000,
    effect_samples: int = 500,
    bins: int = 20,
    binning: str = "quantile",
    spread: Tensor | None = None,
    trees: int = 100,
    batch_size: int = 128,
    seed: int = 0,
) -> FactorReport:
    r"""MIG, SAP, modularity, DCI and the effect matrix of a generator, without an encoder.

    Codes are the coordinates :math:`\langle z, d_i \rangle` of latents of the prior along the directions, and factors
    are read from the images G(z).

    Args:
        generator: A `Generator`, or a callable ``G(z) -> images`` with ``z_dim``.
        directions: `Directions`, or unit rows ``(d, z_dim)``, at least two; None takes the axes.
        read_factors: From images to factors ``(n, k)``, at least two, NaN where an image cannot be read; see
            `effect_matrix`.
        names: Names of the factors.
        samples: Number of images for the scores.
        effect_samples: Number of latents for the effect matrix.
        bins: Bins of the histograms; see `mutual_information`.
        binning: ``"quantile"``, or ``"width"`` as in the literature. With bins of equal width even a generator whose
            latents are the factors had a MIG of 0.64 (1,000 sprites), because many bins of a normal code are tails.
        spread: For the effect matrix.
        trees: Trees of DCI; see `dci`. They take most of the time.
        batch_size: Images at a time.
        seed: Seed of latents and of the split of DCI.

    Returns:
        A `FactorReport`.

    Raises:
        TypeError: If the generator, its images or the factors are of another kind.
        ValueError: If an argument is not valid, or fewer than 10 images could be read.

    Example:
        >>> def generator(z):
        ...     return z.reshape(-1, 2, 1, 1)
        >>> generator.z_dim = 2
        >>> report = factor_report(generator, None, lambda images: images.flatten(1), samples=3000)
        >>> {name: round(score, 1) for name, score in report.scores().items()}
        {'mig': 1.0, 'sap': 1.0, 'modularity': 1.0, 'disentanglement': 1.0, 'completeness': 1.0,
         'informativeness': 1.0, 'factors_read': 1.0}
    """
    check_count(samples, "factor_report(samples=...)", 10)
    generator = as_generator(generator, "factor_report")
    basis = direction_rows(directions, generator.z_dim, "factor_report")
    effects = effect_matrix(
        generator,
        basis,
        read_factors,
        names=names,
        samples=effect_samples,
        spread=spread,
        batch_size=batch_size,
        seed=seed,
    )
    z = generator.sample(samples, seed)
    factors = _read(generator, z, read_factors, batch_size, "factor_report")
    known = factors.isfinite().all(1)
    if int(known.sum()) < 10:
        raise ValueError(
            f"factor_report needs 10 images that read_factors can read; of {samples} it read {known.sum()}."
        )
    codes, factors = (z @ basis.to(z).mT).cpu()[known], factors[known]
    constant = constant_columns(factors).tolist()
    return FactorReport(
        mig=mutual_information_gap(codes, factors, bins=bins, binning=binning),
        sap=sap(codes, factors),
        modularity=modularity(codes, factors, bins=bins, binning=binning),
        dci=dci(codes, factors, trees=trees, seed=seed),
        information=mutual_information(codes, factors, bins=bins, binning=binning),
        effects=effects,
        constant=tuple(name for name, flat in zip(effects.factors, constant, strict=True) if flat),
        samples=len(factors),
        read=len(factors) / samples,
    )


def plot_effect_matrix(
    effects: EffectMatrix,
    target: Any = None,
    *,
    labels: Sequence[str] | None = None,
    title: str | None = None,
    largest: float | None = None,
) -> Any:
    """Draw an effect matrix: directions are rows, factors are columns, and larger effects are darker.

    Args:
        effects: What `effect_matrix` gives.
        target: Path of the file to write, or matplotlib axes to draw on; None makes a new figure.
        labels: Names of the directions; None numbers them.
        title: Title of the figure.
        largest: Value of the darkest color; None uses the largest effect. Pass the same value to figures to compare.

    Returns:
        The axes.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If the number of labels does not fit.
    """
    values = effects.values
    rows, columns = values.shape
    labels = [str(index) for index in range(rows)] if labels is None else list(labels)
    if len(labels) != rows:
        raise ValueError(
            f"plot_effect_matrix(labels=...) needs {rows} names, one for each direction; got {len(labels)}."
        )
    to_file = isinstance(target, (str, PathLike))
    size = (2.2 + 0.75 * columns, 1.4 + 0.36 * rows)
    axes = _new_axes(size, shown=not to_file) if target is None or to_file else target
    top = float(values.nan_to_num().max()) if largest is None else largest
    image = axes.imshow(values.tolist(), cmap="Blues", vmin=0, vmax=max(top, 1e-9), aspect="auto")
    for row in range(rows):
        for column in range(columns):
            value = float(values[row, column])
            shade = "white" if value > 0.6 * top else "0.15"
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8, color=shade)
    axes.set_xticks(range(columns), effects.factors, rotation=30, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(rows), labels)
    axes.set_ylabel("Direction")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    if title:
        axes.set_title(title)
    bar = axes.figure.colorbar(image, ax=axes, fraction=0.05, pad=0.03)
    bar.set_label("Change per σ, in spreads of the factor")
    bar.outline.set_visible(False)
    if to_file:
        axes.figure.savefig(target, dpi=150, bbox_inches="tight")
    return axes


def _new_axes(size: tuple[float, float], *, shown: bool) -> Any:
    """Axes of a new figure; only one that is to be shown needs pyplot, which takes the user's display."""
    try:
        from matplotlib.figure import Figure

        if shown:
            from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("plot_effect_matrix needs matplotlib; pip install matplotlib, or orthocond[lab].") from error
    return (pyplot.figure(figsize=size) if shown else Figure(figsize=size)).add_subplot()
