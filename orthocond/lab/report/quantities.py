"""What the logged numbers are called, how they are written, and numbers in words."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from orthocond.lab.report.sources import Training

_LATE = 4  # the last quarter of the lines is the end of a training, as in the tables


@dataclass(frozen=True)
class Quantity:
    """A logged number.

    Attributes:
        key: Its name in the metrics.
        title: Its name for people.
        meaning: What it says, in a few words.
        style: How it is drawn and written.
        better: The direction in which it improves; None where it has none.
    """

    key: str
    title: str
    meaning: str = ""
    style: Literal["plain", "log", "percent", "part", "seconds"] = "plain"
    better: Literal["lower", "higher"] | None = None

    @property
    def unit(self) -> str:
        """What is behind the title of a chart."""
        return {"percent": " (%)", "part": " (%)", "seconds": " (ms)"}.get(self.style, "")

    @property
    def factor(self) -> float:
        """By which a chart multiplies it."""
        return {"part": 100, "seconds": 1000}.get(self.style, 1)

    def write(self, value: float | None) -> str:
        """The number for people."""
        if value is None or math.isnan(value):
            return "–"
        if math.isinf(value):
            return "infinite"
        if self.style == "percent":
            return f"{value:.2f} %"
        if self.style == "part":
            return f"{100 * value:.0f} %"
        if self.style == "seconds":
            return f"{1000 * value:,.0f} ms"
        return number(value)


_SVD = (
    Quantity("error", "Error on held-out images", "images with a wrong class", "percent", "lower"),
    Quantity("loss", "Training loss", "cross-entropy of the last batch"),
    Quantity("val_loss", "Loss on held-out images", "", "plain", "lower"),
    Quantity("condition", "κ(P + εI)", "condition number of the matrix that the SVD layer takes a root of", "log"),
    Quantity("condition_on_range", "κ of P on its range", "how unequal the directions are that exist", "log"),
    Quantity("weight_condition", "κ(W)", "condition number of the weight before the SVD layer; 1 is orthogonal", "log"),
    Quantity("gradient_condition", "κ of the gradient of W", "", "log"),
    Quantity("rank", "Rank of P", "directions that the features really have"),
    Quantity("olr_occurrence", "Steps that OLR shortened", "share of all steps so far", "part"),
    Quantity("olr_at_floor", "Steps at which OLR took its floor", "share of all steps so far", "part"),
    Quantity("eta", "η of OLR", "the step length that brings the weight closest to orthogonal"),
    Quantity("solver_failures", "Solver failures", "matrices for which the decomposition failed"),
    Quantity("lr", "Learning rate"),
    Quantity("step_seconds", "Time of a step", "by the clock: other programs make it longer", "seconds"),
)
_GAN = (
    Quantity("condition", "κ(W)", "condition number of the weights that meet the latents; 1 is orthogonal", "log"),
    Quantity("discriminator_loss", "Loss of the discriminator"),
    Quantity("generator_loss", "Loss of the generator"),
    Quantity("real_logit", "Score of real images", "mean logit of the discriminator"),
    Quantity("fake_logit", "Score of generated images", "mean logit of the discriminator"),
    Quantity("cannot_tell", "Steps in which the discriminator cannot tell", "among the last 100; 100 %: dead", "part"),
    Quantity("sample_spread", "Spread of samples", "their distance from each other over that of real images"),
    Quantity("discriminator_penalty", "Penalty of the discriminator"),
    Quantity("method_penalty", "Penalty of the method"),
    *(q for q in _SVD if q.key in ("olr_occurrence", "olr_at_floor", "eta", "lr", "step_seconds")),
)
# What counts at the end, the first that is there: of the evaluation for a GAN.
_GAN_OUTCOMES = (
    Quantity("frechet.value", "FID", "Fréchet distance to the training images", "plain", "lower"),
    Quantity("frechet_alexnet.value", "Fréchet distance to the training images (AlexNet)", "", "plain", "lower"),
    Quantity("frechet_random.value", "Fréchet distance to the training images (random features)", "", "plain", "lower"),
    Quantity(
        "directions.axes.mig", "MIG of the axes", "how well each true factor belongs to one axis", "part", "higher"
    ),
    Quantity("directions.eigengan.mig", "MIG of EigenGAN's directions", "", "part", "higher"),
    Quantity("factors.distance", "Distance of the factors to those of the training images", "", "plain", "lower"),
)
_EXPECTED = {
    "step",
    "epoch",
    "finished",
    "conditions",
    "largest",
    "smallest",
    "last_penalty",
    "train_loss",
    "top5_error",
    "best_error",
    "step_cpu_seconds",
}


_BOTH = (
    Quantity("condition", "κ(P + εI) of classifiers, κ(W) of GANs", "two numbers that cannot be compared", "log"),
    *(q for q in _SVD if q.key != "condition"),
    *(q for q in _GAN if q.key not in {other.key for other in _SVD}),
)


def of_both_kinds(trainings: Sequence[Training]) -> bool:
    """Whether there are classifiers and GANs among the trainings; those of other programs are neither."""
    return len({t.is_gan for t in trainings if t.method}) == 2


def quantities(trainings: Sequence[Training]) -> list[Quantity]:
    """The quantities that some of the trainings have logged; those of other programs by the names of their keys."""
    known = _BOTH if of_both_kinds(trainings) else _GAN if any(t.is_gan for t in trainings) else _SVD
    logged = list(dict.fromkeys(key for t in trainings for line in t.metrics for key in line))
    found = [q for q in known if any(t.series(q.key) for t in trainings)]
    other = [key for key in logged if key not in _EXPECTED and key not in {q.key for q in known}]
    return found + [Quantity(key, key) for key in other if any(t.series(key) for t in trainings)]


def outcome(trainings: Sequence[Training]) -> Quantity | None:
    """What counts at the end of these trainings; None if no training has been measured."""
    choices = _GAN_OUTCOMES if any(t.is_gan for t in trainings) else (_SVD[0],)
    return next((q for q in choices if any(result(t, q) is not None for t in trainings)), None)


def result(training: Training, quantity: Quantity) -> float | None:
    """What a training has reached: the last logged value, or that of its evaluation; None if there is none."""
    values = training.series(quantity.key)
    return values[-1][1] if values else training.number(quantity.key)


def late(training: Training, key: str) -> float | None:
    """The median of the last quarter of a training; None if it has no such number."""
    values = [value for _, value in training.series(key)]
    return median(values[-math.ceil(len(values) / _LATE) :]) if values else None


def number(value: float | None, digits: int = 3) -> str:
    """A number in as many digits as people read.

    Example:
        >>> number(0.97374), number(7114.52), number(4449411.9), number(0.000012), number(27.0), number(None)
        ('0.974', '7,110', '4.4e6', '1.2e-5', '27', '–')
    """
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0 or (value == int(value) and abs(value) < 1e5):
        return f"{value:,.0f}".replace("-", "−")
    power = math.floor(math.log10(abs(value)))
    if -4 <= power < 5:
        rounded = round(value, digits - 1 - power)
        text = f"{rounded:,.{max(0, digits - 1 - power)}f}"
        return (text.rstrip("0").rstrip(".") if "." in text else text).replace("-", "−")
    return f"{value / 10**power:.1f}e{power}".removesuffix(".0").replace("-", "−", value < 0)


def signed(value: float | None) -> str:
    """A difference with its sign.

    Example:
        >>> signed(-0.4), signed(1.234), signed(None)
        ('−0.40', '+1.23', '–')
    """
    return "–" if value is None else f"{value:+.2f}".replace("-", "−")


def compared(value: float, baseline: float) -> str:
    """A number against another one, as people say it.

    Example:
        >>> compared(1.0, 20.0), compared(3.0, 2.0), compared(1.0, 1.01)
        ('20 times smaller', '1.5 times larger', 'about the same')
    """
    if not (value > 0 and baseline > 0 and math.isfinite(value) and math.isfinite(baseline)):
        return "about the same" if value == baseline else f"{number(value)} against {number(baseline)}"
    ratio = value / baseline
    if 0.9 < ratio < 1.1:
        return "about the same"
    return f"{number(ratio, 2)} times larger" if ratio > 1 else f"{number(1 / ratio, 2)} times smaller"


def counted(count: int, one: str, many: str = "") -> str:
    """A number with its noun.

    Example:
        >>> counted(1, "seed"), counted(3, "seed")
        ('1 seed', '3 seeds')
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def listed(words: Sequence[str], most: int = 6) -> str:
    """Words as a list in a sentence.

    Example:
        >>> listed(["a"]), listed(["a", "b", "c"]), listed(list("abcdefgh"), 3)
        ('a', 'a, b and c', 'a, b, c and 5 more')
    """
    if len(words) > most:
        return f"{', '.join(words[:most])} and {len(words) - most} more"
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else list(words))
