"""What is claimed of GANs: the contrasts of the protocol in results/README.md, along every kind of directions."""

from typing import Any

from orthocond.lab.config import Config, Scale, change, find_scale
from orthocond.lab.generation.config import GanMethod
from orthocond.lab.generation.presets import PRESETS
from orthocond.lab.generation.tables import SPRITES_STIEFEL, eigen_label, form_of, label
from orthocond.lab.tables.comparison import LateLogarithm, Measure
from orthocond.lab.tables.contrasts import Arm, Claims, Contrast, Term
from orthocond.lab.tables.table import Table

_VIEWS = {
    "axes": "directions.axes",
    "SeFa": "directions.sefa",
    "Jacobian": "directions.jacobian",
    "joint": "directions.joint",
    "own": "directions.eigengan",
    "rotated": "chance.mean",
}
_TEN: dict[Scale, int] = {"workstation": 10}
_THREE: dict[Scale, int] = {"workstation": 3}
_SGD: dict[str, Any] = {"schedule.optimizer": "sgd", "schedule.lr": 0.05, "schedule.discriminator_lr": 0.05}


def _arm(view: str, method: GanMethod, preset: str = "gan-sprites", **settings: Any) -> Arm:
    def config(scale: Scale, seed: int) -> Config:
        return change(find_scale(PRESETS, preset, scale), form_of(method) | settings | {"seed": seed})

    name = (eigen_label if preset.startswith("eigengan") else label)(method)
    name += " with SGD" if settings else ""
    return Arm(f"{view} of {name}" if view else name, config, _VIEWS.get(view, ""))


def _against(
    claim: str, one: Arm, other: Arm, *, words: str = "", seeds: dict[Scale, int] = _TEN, **settings: Any
) -> Contrast:
    """One arm that is claimed to be better than another; words come before their names."""
    terms = Term(1, one), Term(-1, other)
    return Contrast(claim, f"{words}{one.label} − {other.label}", terms, seeds, **settings)


_NONE, _OW, _STIEFEL = GanMethod(), GanMethod("ow"), SPRITES_STIEFEL
_EXACT, _PAPER = GanMethod("nog+olr"), GanMethod("nog+olr", olr="paper")
_SHORT = GanMethod("short", short=(0.925, 0.13))  # as often, and as much on average, as OLR of NOG + OLR on CelebA
_RIVALS = tuple(map(GanMethod, ("orojar", "hp", "lvp")))
_JOINT, _AXES = _arm("joint", _NONE), _arm("axes", _NONE)

_DIRECTIONS = (
    _against("joint directions are more disentangled than the axes", _JOINT, _AXES),
    _against("joint directions are more disentangled than SeFa's", _JOINT, _arm("SeFa", _NONE)),
    *(
        _against("joint directions are more disentangled than a rival's axes", _JOINT, _arm("axes", rival))
        for rival in _RIVALS
    ),
    *(
        _against("an orthogonal weight makes joint directions better", _arm("joint", method), _JOINT)
        for method in (_OW, _STIEFEL)
    ),
    *(
        _against("the paper's treatment disentangles the axes", _arm("axes", method), _AXES)
        for method in (_EXACT, _PAPER)
    ),
    _against("the paper's treatment disentangles the axes", _arm("axes", _EXACT), _arm("rotated", _EXACT)),
    *(_against("rivals disentangle the axes", _arm("axes", rival), _AXES) for rival in _RIVALS),
)

_CONTROLS = (
    _against("joint directions are more disentangled than the Jacobian's", _JOINT, _arm("Jacobian", _NONE)),
    _against("Adam prefers the axes to rotated ones", _AXES, _arm("rotated", _NONE)),
    _against(
        "SGD does not prefer the axes to rotated ones",
        _arm("axes", _NONE, **_SGD),
        _arm("rotated", _NONE, **_SGD),
        margin=5.0,
        same=True,
    ),
)


def _harmless(method: GanMethod) -> Contrast:
    one, other = _arm("", method), _arm("", _NONE)
    claim = "the treatment does not harm the images"
    return _against(claim, one, other, words="sprites: ", measure="distance")


def _faces(preset: str, words: str, own: str, base: GanMethod, margin: float) -> list[Contrast]:
    """What is claimed of faces: predictability, the condition of the weight, and images."""

    def against(claim: str, view: str, one: GanMethod, **settings: Any) -> Contrast:
        arms = _arm(view, one, preset), _arm(view and own, base, preset)
        return _against(claim, *arms, words=f"{words}: ", seeds=_THREE, **settings)

    unharmed = "the treatment does not harm the images"
    return [
        against("the paper's treatment makes directions more predictable", own, _EXACT, measure="vp"),
        against("joint directions are more predictable", "joint", base, measure="vp"),
        against("the paper's treatment improves the condition of the weight", "", _EXACT, measure="condition"),
        *(against(unharmed, "", method, measure="fd", margin=margin) for method in (_EXACT, GanMethod("stiefel"))),
    ]


def _percent(name: str, title: str, key: str) -> Measure:
    return Measure(name, f"{title} (%)", f"*.{key}", higher=True, factor=100.0)


_MEASURES = (
    _percent("disentanglement", "DCI disentanglement", "disentanglement"),
    _percent("mig", "MIG", "mig"),
    _percent("vp", "VP", "vp.final"),
    Measure("energy", "Off-diagonal energy", "*.energy"),
)
_DISTANCE = Measure("distance", "Factor distance", "factors.distance")
_FACE_MEASURES = (
    Measure("fd", "Fréchet distance, AlexNet", "frechet_alexnet.value"),
    *_MEASURES[2:],
    LateLogarithm("condition", "log10 κ(W)", "condition"),
    Measure("fid", "FID", "frechet.value"),
)
_SETTING: dict[Scale, str] = {
    "workstation": "workstation (a quarter to half an hour for faces, minutes for sprites)",
    "laptop": "laptop (minutes)",
    "paper": "the scale of the paper",
}
_PAIRED = (
    "Axes, SeFa's, the Jacobian's and joint directions of one training are read from the same images; differences "
    "between them are paired within a training. Rotated axes are the mean of 20 random rotations: what a method scores "
    "that does not tell the axes from other bases."
)

TABLES: tuple[Table, ...] = (
    Claims(
        "gan-claims",
        "The claims on GANs",
        "Each claim with the contrasts that settle it: directions and images of the vanilla GAN on sprites, whose "
        "factors are known.",
        (*_DIRECTIONS, *map(_harmless, (_OW, _EXACT, _PAPER, _STIEFEL, *_RIVALS))),
        (*_MEASURES, _DISTANCE),
        _SETTING,
        (),
        (
            _PAIRED,
            "There is no margin for images. That they are not harmed holds where they become better, and fails where "
            "they become worse; that nothing changes cannot be shown.",
        ),
    ),
    Claims(
        "gan-faces",
        "The claims on GANs of faces",
        "Each claim with the contrasts that settle it: the vanilla GAN on CelebA and EigenGAN on AnimeFace, whose "
        "factors are not known.",
        (
            *_faces("gan-celeba", "CelebA", "axes", _NONE, margin=3.0),
            *_faces("eigengan-animeface", "EigenGAN, AnimeFace", "own", GanMethod("ol"), margin=5.0),
            _against(
                "the paper's treatment improves the condition more than steps that are as short",
                _arm("", _EXACT, "gan-celeba"),
                _arm("", _SHORT, "gan-celeba"),
                words="CelebA: ",
                seeds=_THREE,
                measure="condition",
            ),
        ),
        _FACE_MEASURES,
        _SETTING,
        (),
        (
            "The margins of the Fréchet distance, 3 for CelebA and 5 for AnimeFace, are the distances between two sets "
            "of real images of 32x32.",
            "VP is the accuracy with which a network tells from two images along which direction the latent was moved, "
            "along the axes of the vanilla GAN and EigenGAN's own directions, or the joint ones of either. log10 κ(W) "
            "is that of the weight that meets the latents, the median of the last quarter of a training; of EigenGAN's "
            "subspaces the worst counts.",
        ),
    ),
    Claims(
        "gan-controls",
        "Controls of the claims on GANs",
        "Whether many latents tell more than their mean, and whether the optimizer prefers the axes, on sprites.",
        _CONTROLS,
        _MEASURES,
        _SETTING,
        (),
        (
            _PAIRED,
            f"SGD has no momentum and the rate {_SGD['schedule.lr']}. With it training commutes with rotations of the "
            "latents, so that the axes are those of a random rotation; Adam scales each entry of a weight by itself.",
        ),
    ),
)
