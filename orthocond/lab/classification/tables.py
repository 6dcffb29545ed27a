"""The paper's tables and figures of classifiers (section 6.1, sections 3 and 4, appendix on OLR)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orthocond.lab.classification import paper
from orthocond.lab.classification.config import GRAMMAR, Classification, Method
from orthocond.lab.classification.figures import conditioning, convergence, learning_rate
from orthocond.lab.classification.paper import PAPER_RATE
from orthocond.lab.classification.presets import PRESETS
from orthocond.lab.tables.comparison import Comparison, Experiment, Fact, FigurePlan, Measure, Outcome
from orthocond.lab.tables.figures import differences
from orthocond.lab.tables.table import Number, Table


@dataclass(frozen=True)
class ExpectedFailures(Fact):
    """How many decompositions of a training would fail at the paper's rate."""

    def of(self, record: Any) -> float | None:
        """See `Fact.of`; None for a method that decomposes nothing."""
        made = _decompositions(record)
        return PAPER_RATE * made if made else None


def _decompositions(record: Any) -> int:
    """One for each image of each step of a training."""
    if {"bn", "ns"} & record.config.method.parts.keys():
        return 0
    return int(record.metrics[-1]["step"] * record.config.schedule.batch_size)


_ERRORS = (
    Measure("error", "Validation error (%)", "error"),
    Measure("recalibrated", "Validation error, refreshed (%)", "recalibrated_error"),
)
_TOP1 = Measure("top1", "Top-1 accuracy (%)", "error", higher=True, from_hundred=True)
_TOP5 = Measure("top5", "Top-5 accuracy (%)", "top5_error", higher=True, from_hundred=True)
_FACTS = (
    Fact("condition", "κ(P + εI)", style="log", compared=True, paper_title="κ"),
    Fact("condition_on_range", "κ on the range", style="log", compared=True),
    Fact("rank", "rank"),
    Fact("weight_condition", "κ(W)", style="log"),
    Fact("olr_occurrence", "OLR occurrence", over="last", style="percent"),
    Fact("solver_failures", "solver failures", over="last"),
    Fact("step_seconds", "ms per step", over="all", style="milliseconds"),
)
_EXPECTED = ExpectedFailures("expected_failures", "failures expected at the paper's rate")
_POOLED_FACTS = (*_FACTS[:-1], _EXPECTED, _FACTS[-1])

_STATISTICS = (
    "Ours is the value after the last epoch, as mean ± standard deviation over seeds. Differences to the baseline are "
    "paired: runs of equal seed see the same images in the same order. Brackets are 95 % intervals of Student's t. "
    "Significant means that the p-value of the t-test, corrected by Holm for the number of rows, is below 0.05. The "
    "exact test over all signs of the differences is a check that supposes no distribution; it is not corrected, and "
    "with n seeds cannot be below 2^(1-n): 0.0625 with 5, 0.002 with 10.",
    "The paper's intervals follow from its printed means, standard deviations and 10 runs (two samples, 18 degrees of "
    "freedom); where it prints a single run there is none.",
)
_CONDITION = (
    "κ(P + εI), κ on the range, rank and κ(W) are medians over the last quarter of training, then means over seeds (of "
    "logarithms for κ); ratios to the baseline are paired over seeds, with 95 % intervals. Spectra are computed in "
    "float64; the range is that of the eigenvalues above the tolerance of `orthocond.spectrum`. Solver failures are "
    "counted over a whole training.",
    "SVD is the eigendecomposition with the exact gradient; the paper's runs used an approximate gradient of the SVD.",
    "Milliseconds per step are medians in training, where several processes share the machine: they are no benchmark; "
    "the table `time` is.",
)
_DBN_KAPPA = (
    "What the paper's κ measures: P is the covariance of 64 channels that a 3x3 convolution makes of 3 channels. Its "
    "rank is at most 27, so its exact condition number is infinite, and a value such as 1e12 is the ratio of the "
    "largest eigenvalue to rounding noise. With the ridge ε, κ is λ_max/ε + 1 and grows with the norm of the weight; "
    "on the range it compares the 27 directions that exist. Both of ours are measured so, and cannot be compared with "
    "the paper's.",
    "An orthogonal weight (OW) of 64 x 27 leaves the spectrum of its input as it is: κ is then that of the patches of "
    "the images, whatever training does to the weight.",
)
_REFRESHED = (
    "Refreshed: the running mean and covariance of all normalization layers were taken anew over 32 batches "
    "with the final weights. Running averages lag behind a weight that moves, and whitening by a stale covariance "
    "amplifies what the weight has put into directions that were empty. After 350 epochs and three drops of the rate "
    "nothing moves any more; after a short schedule the lag can outweigh everything else, so that only the refreshed "
    "error says what the weights are worth.",
)
_GCP_KAPPA = (
    "What the paper's κ measures: the covariance of one image's features over its H·W positions has a rank below H·W, "
    "which is less than the number of channels. Its exact condition number is infinite, and the paper's 1e16 is the "
    "largest eigenvalue divided by the rounding of float64. Covariances are pooled without a ridge, so of ours only κ "
    "on the range says something; it is the median over images of a batch.",
)


def _method(name: str) -> Method:
    """A method by its name; ``!`` at the end asks for the paper's formula of OLR."""
    return Method(name.removesuffix("!"), olr="paper" if name.endswith("!") else "exact")


def _methods(text: str) -> tuple[Method, ...]:
    return tuple(map(_method, text.split()))


_WEIGHT = _methods("svd sn ol ow ns")
_GRADIENT = _methods("svd nog nog+sn nog+ol nog+ow ns")
_RATE = _methods("svd olr olr! nog+olr ow+olr nog+ow+olr nog+ow+olr! ns")
_SOLVERS = _methods("svd ns bn")
_MAIN = _methods("svd sn ol ow nog olr olr! nog+ow nog+ow+olr nog+ow+olr! ns")
_CONVERGE = _methods("svd nog olr nog+ow nog+ow+olr ns")
_SCHEMES = _methods("svd olr nog+ow+olr olr! nog+ow+olr!")
_BEYOND = _methods("svd ow wi mow bn")
_ALL = (*map(_method, GRAMMAR.names), *_methods("olr! nog+ow+olr!"))


_NETWORKS = {
    "resnet50": ("ResNet-50", "small ResNet"),
    "resnet18": ("ResNet-18", "small ResNet"),
    "densenet121": ("DenseNet-121", "small DenseNet"),
    "mobilenetv2": ("MobileNet-v2", "small MobileNet"),
    "convnet": ("plain ConvNet", "plain ConvNet"),
}
_DATA = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "imagenet": "ImageNet", "tiny-imagenet-20": "Tiny-ImageNet-20"}


def heading(config: Classification) -> str:
    """The network and the images of a configuration, for people; only the paper's networks have their names.

    Example:
        >>> [heading(PRESETS["dbn-cifar100-resnet50"][scale]) for scale in ("paper", "laptop")]
        ['ResNet-50, CIFAR-100, 32x32', 'small ResNet, CIFAR-100, 16x16']
    """
    model, images = config.model, config.data
    network = _NETWORKS[model.name][bool(model.depths or model.width)]
    pooled = ", covariance pooling" if model.application == "gcp" else ""
    return f"{network}{pooled}, {_DATA.get(images.source, images.source)}, {images.size}x{images.size}"


def _experiment(
    preset: str, numbers: dict[str, dict[str, Number]], facts: dict[str, dict[str, Any]] | None = None, runs: int = 1
) -> Experiment:
    labels = {scale: heading(config) for scale, config in PRESETS[preset].items()}
    return Experiment(labels["paper"], preset, PRESETS, numbers, facts or {}, runs, labels)


def _dbn(preset: str, numbers: dict[str, Number], facts: dict[str, dict[str, Any]] | None = None) -> Experiment:
    return _experiment(preset, {"error": numbers}, facts, paper.RUNS)


_CIFAR100 = _dbn("dbn-cifar100-resnet50", paper.RESNET50_CIFAR100, {"condition": paper.DBN_CONDITION})
_CIFAR10 = _dbn("dbn-cifar10-resnet50", paper.RESNET50_CIFAR10)
_DENSENET = _dbn("dbn-cifar100-densenet121", paper.DENSENET121_CIFAR100)
_MOBILENET = _dbn("dbn-cifar100-mobilenetv2", paper.MOBILENETV2_CIFAR100)
_GCP = _experiment(
    "gcp-imagenet-resnet18",
    {"top1": paper.GCP_TOP1, "top5": paper.GCP_TOP5},
    {"condition": paper.GCP_CONDITION, "solver_failures": paper.GCP_FAILURES},
)


def _failures(outcomes: Sequence[Outcome]) -> list[str]:
    """How many decompositions were made and failed, and how many failures the paper's rate lets expect."""
    notes = []
    for outcome in outcomes:
        records = [record for row in outcome.records.values() for record in row if _decompositions(record)]
        made = sum(map(_decompositions, records))
        failed = sum(int(values[-1]) for r in records if (values := r.series("solver_failures")[1]))
        notes.append(
            f"{outcome.experiment.label}: {made:,} decompositions in training, one for each image of each step, and "
            f"{failed} failures. At the paper's rate, 5 in about 77 million, {made * PAPER_RATE:.2g} were to be "
            "expected in all; the table has the numbers of one training."
        )
    return notes


def _decorrelated(
    name: str,
    title: str,
    text: str,
    rows: tuple[Method, ...],
    figures: tuple[FigurePlan, ...],
    experiments: tuple[Experiment, ...] = (_CIFAR100,),
) -> Comparison:
    notes = (*_DBN_KAPPA, *_REFRESHED, *_CONDITION, *_STATISTICS)
    return Comparison(name, title, text, experiments, rows, _ERRORS, _FACTS, figures, notes)


def _pooled(name: str, title: str, text: str, figures: tuple[FigurePlan, ...]) -> Comparison:
    notes = (*_GCP_KAPPA, *_CONDITION, *_STATISTICS)
    return Comparison(
        name, title, text, (_GCP,), _MAIN, (_TOP1, _TOP5), _POOLED_FACTS, figures, notes, findings=_failures
    )


_DIFFERENCES = FigurePlan("differences", differences)
_CONDITIONING = FigurePlan("conditioning", conditioning)

TABLES: tuple[Table, ...] = (
    _decorrelated(
        "weight-treatments",
        "Treatments of the weight",
        "Spectral normalization, orthogonality loss and orthogonal weight, against the untreated layer.",
        _WEIGHT,
        (_DIFFERENCES, _CONDITIONING),
    ),
    _decorrelated(
        "gradient-treatments",
        "Treatments of the gradient",
        "The nearest orthogonal gradient, alone and with treatments of the weight.",
        _GRADIENT,
        (_DIFFERENCES, _CONDITIONING),
    ),
    _decorrelated(
        "optimal-lr",
        "The optimal learning rate",
        "The step length that brings the weight closest to orthogonal, alone and with other treatments: by the exact "
        "minimum, and by the paper's formula.",
        _RATE,
        (_DIFFERENCES, _CONDITIONING, FigurePlan("learning-rate", learning_rate, _SCHEMES)),
    ),
    _decorrelated(
        "cifar-resnet50",
        "Decorrelated batch normalization on CIFAR-10 and CIFAR-100",
        "All main methods on both.",
        _MAIN,
        (
            _DIFFERENCES,
            FigurePlan("convergence", convergence, _CONVERGE),
            FigurePlan("conditioning", conditioning, _CONVERGE),
            FigurePlan("learning-rate", learning_rate, _SCHEMES),
        ),
        (_CIFAR10, _CIFAR100),
    ),
    _decorrelated(
        "cifar100-densenet-mobilenet",
        "Decorrelated batch normalization in other networks",
        "All main methods in a DenseNet and a MobileNet.",
        _MAIN,
        (_DIFFERENCES, FigurePlan("convergence", convergence, _CONVERGE)),
        (_DENSENET, _MOBILENET),
    ),
    _decorrelated(
        "cifar100-all",
        "Every method on CIFAR-100",
        "The rows of all tables together, both forms of the optimal learning rate, ordinary batch normalization, and "
        "the weights beyond the paper: started by whitening their input (WI), orthogonal in its metric (MOW).",
        _ALL,
        (
            _DIFFERENCES,
            FigurePlan("conditioning-solvers", conditioning, _SOLVERS),
            FigurePlan("conditioning-weight", conditioning, _WEIGHT),
            FigurePlan("conditioning-gradient", conditioning, _GRADIENT),
            FigurePlan("conditioning-lr", conditioning, _RATE),
            FigurePlan("conditioning-beyond", conditioning, _BEYOND),
            FigurePlan("convergence", convergence, _CONVERGE),
            FigurePlan("learning-rate", learning_rate, _SCHEMES),
        ),
    ),
    _pooled(
        "gcp",
        "Global covariance pooling",
        "Decompositions that failed, top-1 and top-5 accuracy.",
        (_DIFFERENCES, FigurePlan("conditioning-gcp", conditioning), FigurePlan("convergence", convergence, _CONVERGE)),
    ),
    _decorrelated(
        "conditioning-solvers",
        "Conditioning with and without an SVD layer",
        "Condition numbers during training: decomposition, Newton-Schulz iteration, ordinary batch normalization.",
        _SOLVERS,
        (FigurePlan("conditioning-solvers", conditioning),),
    ),
    _decorrelated(
        "conditioning-weight",
        "Conditioning under treatments of the weight",
        "Condition numbers during training.",
        _WEIGHT,
        (FigurePlan("conditioning-weight", conditioning),),
    ),
    _decorrelated(
        "conditioning-gradient",
        "Conditioning under treatments of the gradient",
        "Condition numbers during training.",
        _GRADIENT,
        (FigurePlan("conditioning-gradient", conditioning),),
    ),
    _decorrelated(
        "conditioning-lr",
        "Conditioning under the optimal learning rate",
        "Condition numbers during training; dashed lines are the paper's formula.",
        _RATE,
        (FigurePlan("conditioning-lr", conditioning),),
    ),
    _pooled(
        "conditioning-gcp",
        "Conditioning of covariance pooling",
        "Condition numbers during training.",
        (FigurePlan("conditioning-gcp", conditioning),),
    ),
    _decorrelated(
        "convergence",
        "Best validation accuracy during training",
        "How fast each method learns, on three networks.",
        _CONVERGE,
        (FigurePlan("convergence", convergence),),
        (_CIFAR100, _DENSENET, _MOBILENET),
    ),
    _decorrelated(
        "learning-rate",
        "Step lengths of the optimal learning rate",
        "The step length of the Pre-SVD layer beside the schedule, and how often the optimal learning rate acts: "
        "without it, with plain weight and gradient, with orthogonal ones.",
        _SCHEMES,
        (FigurePlan("learning-rate", learning_rate),),
    ),
)
