"""Both halves in two minutes: three trainings side by side with a report, and a generator to walk through."""

import io
import json
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from orthocond.lab.bench import bench
from orthocond.lab.classification.config import Classification
from orthocond.lab.classification.data import load_data
from orthocond.lab.classification.presets import PRESETS
from orthocond.lab.classification.task import ClassificationTask
from orthocond.lab.config import change
from orthocond.lab.display import Display, duration
from orthocond.lab.experiments import is_evaluated
from orthocond.lab.explorer import write_explorer
from orthocond.lab.generation.pictures import picture
from orthocond.lab.launch import launch
from orthocond.lab.report.content import Code, Items, Picture, Section, color
from orthocond.lab.report.write import write_report
from orthocond.lab.runs import Run
from orthocond.lab.runs.finding import is_finished, runs_with
from orthocond.lab.task import EVALUATION
from orthocond.lab.text import printable

METHODS = {
    "svd": "decorrelated batch normalization, untreated",
    "nog": "the nearest orthogonal gradient for the convolution before it",
    "nog+ow+olr": "also an orthogonal weight, and the step length that keeps it so",
}
_COLORS = {name: color(place) for place, name in enumerate(METHODS)}  # as in the report
_SHORT = {"schedule.steps": 6, "schedule.batch_size": 16, "data.limit": 96, "data.held_out": 96, "log_every": 1}
# What each stage takes on two idle cores.
_SECONDS = {"train": 80, "time": 20, "explore": 20, "report": 5}
_SEEN = 24  # sprites in the report
_NEARLY = 1.0  # points of accuracy
_LAST = 0.2  # part of the training over which the numbers of the table are medians
# The kept results, which the package does not bring along: a test compares these numbers and words with them.
_KNOWN = (
    "What more is known, from trainings of a small network on full CIFAR-10, with ten seeds, the rate of the stem "
    "tuned for each method, and controls: Whitening the stem has 2.1 points less error than batch normalization at "
    "equal steps, and 0.8 at equal time. NOG, NOG + OW, NOG + OW + OLR and OLR are equivalent in error to no "
    "treatment, within 0.5 points. NOG lowers κ on the range to 0.63 times that without, OLR to 0.60 times; nothing "
    "shows that either lowers it more than shorter steps of the stem do. As to GANs, joint directions disentangle the "
    "latents of one of sprites: they have 30 points more DCI than its axes, without any training.",
    "The exact gradient, the default, has 8.9 points less error than the Padé gradient of the literature (7 fresh "
    "seeds, ε 1e-2, with a stand-in for what that gradient is between equal eigenvalues). After an epoch at a constant "
    "rate, statistics that follow the weight have 14 to 37 points less error than those that do not (SVD layers, at "
    "least 2 seeds of each setting).",
    "All of it is in results/README.md of the repository. In a clone of the repository, `orthocond table "
    "cifar10-claims --seeds 10 --no-train` makes the table of CIFAR-10 anew from the records of these trainings.",
)


class Result(NamedTuple):
    """What the table says about a method; None where it has no such number."""

    accuracy: float
    refreshed: float
    condition: float
    condition_on_range: float
    rank: int
    weight_condition: float
    olr_occurrence: float | None
    milliseconds: float


def demo(out: str | PathLike[str] = "runs/demo", *, short: bool = False, quiet: bool = False) -> int:
    """Train the preset ``dbn-sprites-small`` with three methods side by side, report, and write the explorer.

    Writes the runs, ``conditioning.png``, ``report.html``, and ``explore.html`` with the generator that comes with the
    package. Prints the stages with their times, the table, and where the files are. Trainings that are finished in
    ``out`` are not repeated.

    Args:
        out: The folder.
        short: A few steps only.
        quiet: Show no progress.

    Returns:
        0.

    Raises:
        RuntimeError: If a training failed; the text is what it said.
        KeyboardInterrupt: After Ctrl-C, or if a training was stopped.
    """
    out = Path(out)
    console = Console(highlight=False)
    configs = {name: _config(name, short) for name in METHODS}
    steps = configs["svd"].schedule.epochs * _epoch_steps(configs["svd"])
    steps = min(steps, configs["svd"].schedule.steps or steps)
    done = [any(is_finished(run) and is_evaluated(run) for run in runs_with(c, out)) for c in configs.values()]
    seconds = dict.fromkeys(_SECONDS, 0) if short else _SECONDS | ({"train": 0} if all(done) else {})
    console.print(
        "This trains a small ResNet three times on rendered sprites, times its steps, and measures a generator that "
        f"was trained before and comes with the package. Nothing is downloaded; everything goes to {printable(out)}. "
        f"{_about(sum(seconds.values()))}",
        markup=False,
    )
    training = f"training a small ResNet on sprites, {steps} steps with each of three methods"
    if all(done):
        training += "; all three were trained before and are not repeated"
    with _stage(console, f"1 of 4: {training}", seconds["train"]), Display(list(METHODS), quiet=quiet) as display:
        # All three at once, also on two cores: none of them then has the machine to itself.
        endings = launch(list(configs.values()), out, jobs=len(configs), progress=display)
    for ending in endings:
        if ending.code in (130, 143):
            raise KeyboardInterrupt
        if ending.code:
            raise RuntimeError(f"{ending.run.path} ended with code {ending.code}: {ending.text.strip()}")
    runs = {name: ending.run for name, ending in zip(METHODS, endings, strict=True)}
    with _stage(console, "2 of 4: timing a step of each method alone", seconds["time"]):
        times = _times(configs["svd"], repeats=1 if short else 5)
    with _stage(console, "3 of 4: measuring the directions of that generator for the explorer", seconds["explore"]):
        write_explorer(out=out / "explore.html")
    with _stage(console, "4 of 4: figure and report", seconds["report"]):
        rows = {name: _row(run, times[name]) for name, run in runs.items()}
        figure = _figure({name: run.metrics() for name, run in runs.items()}, configs["svd"].model.eps)
        (out / "conditioning.png").write_bytes(figure)
        write_report(
            out,
            title="What treatments do to an SVD layer",
            opening=_opening(rows, configs["svd"]),
            leave_out=["step_seconds"],  # the three shared the cores; the opening has the times of each alone
        )
    console.print(_table(rows, configs["svd"].model.eps))
    for text in _words(rows, configs["svd"]):
        console.print(f"\n{text}", markup=False)
    console.print(f"\nFigure: {(out / 'conditioning.png').resolve()}", soft_wrap=True)
    console.print(f"Report: {(out / 'report.html').resolve()}", soft_wrap=True)
    console.print(f"Explorer of a generator: {(out / 'explore.html').resolve()}", soft_wrap=True)
    console.print(
        "Next: orthocond train gan-sprites trains a generator of your own, and orthocond explore RUN walks through it.",
        soft_wrap=True,
    )
    return 0


@contextmanager
def _stage(console: Console, text: str, seconds: int) -> Iterator[None]:
    """Say what begins, how long it should take, and how long it took."""
    start = time.monotonic()
    console.print(f"{text}{f' ({seconds} s)' if seconds else ''} …", soft_wrap=True, markup=False)
    yield
    console.print(f"  took {time.monotonic() - start:.0f} s")


def _about(seconds: int) -> str:
    if not seconds:
        return "A few steps only: the numbers say nothing."
    return f"About {duration(seconds)} on two idle cores, longer where other programs run; Ctrl-C ends it."


def _config(method: str, short: bool) -> Classification:
    config = PRESETS["dbn-sprites-small"]["laptop"]
    return change(config, {"method.name": method, "model.follow": True} | (_SHORT if short else {}))


def _epoch_steps(config: Classification) -> int:
    return (config.data.limit or 0) // config.schedule.batch_size


def _times(config: Classification, repeats: int) -> dict[str, float]:
    """Milliseconds of a step of each method, measured in turn on one thread: during training they share the cores."""
    return {name: cost.total for name, cost in bench(ClassificationTask, config, METHODS, repeats=repeats).items()}


def _row(run: Run, milliseconds: float) -> Result:
    lines = run.metrics()
    facts = [line for line in lines if "condition" in line]
    last = facts[-max(1, round(_LAST * len(facts))) :]

    def typical(key: str) -> float:
        return statistics.median(line[key] for line in last)

    return Result(
        100 - lines[-1]["error"],
        100 - json.loads((run.path / EVALUATION).read_text())["recalibrated_error"],
        typical("condition"),
        typical("condition_on_range"),
        round(typical("rank")),
        typical("weight_condition"),
        last[-1].get("olr_occurrence"),
        milliseconds,
    )


_HEADER = ("method", "accuracy", "refreshed", "κ(P+εI)", "κ range", "rank P", "κ(W)", "OLR", "step")


def _cells(name: str, row: Result) -> tuple[str, ...]:
    return (
        name,
        f"{row.accuracy:.1f} %",
        f"{row.refreshed:.1f} %",
        f"{row.condition:,.0f}",
        f"{row.condition_on_range:,.0f}",
        f"{row.rank}/64",
        f"{row.weight_condition:.2f}",
        "-" if row.olr_occurrence is None else f"{100 * row.olr_occurrence:.0f} %",
        f"{row.milliseconds:.0f} ms",
    )


def _table(rows: Mapping[str, Result], eps: float) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title_justify="left", title_style="")
    table.title = f"\nMedians of the last {100 * _LAST:.0f} % of the training, ε = {eps:g}"
    for place, name in enumerate(_HEADER):
        table.add_column(name, justify="right" if place else "left", no_wrap=True)
    for name, row in rows.items():
        table.add_row(*_cells(name, row))
    return table


def _words(rows: Mapping[str, Result], config: Classification) -> Sequence[str]:
    """What is seen, in plain words; comparisons come from the numbers."""
    svd, nog, full = rows["svd"], rows["nog"], rows["nog+ow+olr"]
    eps, images = config.model.eps, config.data.held_out or 1
    few = ["These trainings had a few steps only: their numbers say nothing."] if config.schedule.steps else []
    return [
        *few,
        "P is the covariance of the 64 channels after the first convolution. That convolution sees 3 x 3 pixels of 3 "
        f"colors, 27 numbers, so P has rank {svd.rank} of 64 whatever the weight is: it is singular, and its own "
        "condition number is infinite. Two finite ones are shown.",
        f"κ(P + εI) is that of the matrix that the layer takes a root of. As the smallest eigenvalue of it is ε = "
        f"{eps:g}, it measures how large P is: {_compared(full.condition, svd.condition)} with all treatments, "
        f"{_compared(nog.condition, svd.condition)} with nog alone, against svd.",
        "κ on the range, largest over smallest eigenvalue that is not zero, measures how unequal the directions are: "
        f"{_compared(full.condition_on_range, svd.condition_on_range)} with all treatments, "
        f"{_compared(nog.condition_on_range, svd.condition_on_range)} with nog alone. An orthogonal weight passes on "
        "the κ of the images' own patches, no less: neighboring pixels are alike.",
        f"Accuracies are {', '.join(f'{row.accuracy:.1f} % ({name})' for name, row in rows.items())}, with refreshed "
        f"statistics {', '.join(f'{row.refreshed:.1f} %' for row in rows.values())}; guessing gives 8.3 %. "
        + _agreement(rows, eps),
        _verdict(rows, images),
        *_KNOWN,
    ]


def _agreement(rows: Mapping[str, Result], eps: float) -> str:
    """Why both kinds of statistics should give nearly the same accuracy here, and how nearly they do."""
    name, row = max(rows.items(), key=lambda item: abs(item[1].refreshed - item[1].accuracy))
    gap = abs(row.refreshed - row.accuracy)
    text = (
        "In evaluation P is a running average over earlier weights. A layer that takes it as it is amplifies by up to "
        f"ε^-1/2 = {eps**-0.5:.0f} what the weight has since put into directions that were empty. Here it does not: "
        "after each step the statistics are converted to the new weight (`model.follow`). So the accuracy should "
        "nearly be that with refreshed statistics, which are taken anew with the final weights, whatever κ is. "
    )
    if round(gap, 1) <= _NEARLY:
        return f"{text}They differ by at most {gap:.1f} points."
    return (
        f"{text}They differ by up to {gap:.1f} points ({name}), which the statistics of this layer do not explain: "
        "those of the other normalizations do not follow, and averages of few steps are not settled."
    )


def _verdict(rows: Mapping[str, Result], images: int) -> str:
    """What each method does to κ and to the accuracy, and whether that is more than the images leave to chance."""
    svd = rows["svd"]
    effects = [f"{name} {_effect(row, svd, images)}" for name, row in rows.items() if name != "svd"]
    return f"Verdict, each method against svd: {' '.join(effects)}"


def _effect(row: Result, svd: Result, images: int) -> str:
    """A method against svd, in a sentence."""
    gains = {"as trained": row.accuracy - svd.accuracy, "with refreshed statistics": row.refreshed - svd.refreshed}
    share = statistics.fmean((row.accuracy, row.refreshed, svd.accuracy, svd.refreshed)) / 100
    noise = 196 * math.sqrt(2 * share * (1 - share) / images)  # 95 % of the differences of two shares that are equal
    found = {when: "better" if gain > 0 else "worse" for when, gain in gains.items() if abs(gain) > noise}
    if not found:
        word = f"no difference that {images} images can tell from chance (±{noise:.1f})"
    else:
        alike = len(found) == len(gains) and len(set(found.values())) == 1
        what = next(iter(found.values())) if alike else " and ".join(f"{word} {when}" for when, word in found.items())
        word = f"{what} by more than {images} images leave to chance (±{noise:.1f}), but of one seed"
    trained, refreshed = gains.values()
    return (
        f"has a κ on the range that is {_compared(row.condition_on_range, svd.condition_on_range)}, and its accuracy "
        f"changes by {trained:+.1f} points as trained and {refreshed:+.1f} with refreshed statistics: {word}."
    )


def _compared(value: float, baseline: float) -> str:
    """A number against another one, as people say it.

    Example:
        >>> _compared(1.0, 20.0), _compared(3.0, 2.0), _compared(1.0, 1.01)
        ('20 times smaller', '1.5 times larger', 'about the same')
    """
    ratio = value / baseline
    if 0.9 < ratio < 1.1:
        return "about the same"
    return f"{ratio:.2g} times larger" if ratio > 1 else f"{1 / ratio:.2g} times smaller"


def _figure(metrics: Mapping[str, Sequence[Mapping[str, Any]]], eps: float) -> bytes:
    """A PNG: both condition numbers of the covariance, that of the weight, and the loss, over the steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 6.2), layout="constrained")
    panels = {
        "condition": f"Condition number of P + εI, ε = {eps:g}",
        "condition_on_range": "Condition number of P on its range",
        "weight_condition": "Condition number of the weight",
        "loss": "Training loss",
    }
    for place, (key, title) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(2, 2, place)
        for name, lines in metrics.items():
            points = [(line["step"], line[key]) for line in lines if key in line]
            axes.plot(*zip(*points, strict=True), label=name, color=_COLORS[name], linewidth=1.6)
        axes.set_title(title, fontsize=10, loc="left")
        axes.grid(True, color="0.9", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        if key.startswith("condition"):
            axes.set_yscale("log")
        if place > 2:
            axes.set_xlabel("Training step")
        if place == 1:
            handles = axes.get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=len(metrics), frameon=False)
    file = io.BytesIO()
    figure.savefig(file, dpi=130)
    return file.getvalue()


def _opening(rows: Mapping[str, Result], config: Classification) -> Section:
    """What a newcomer has to know before the numbers."""
    images = load_data(config.data).train
    seen = picture(torch.as_tensor(images.images[:_SEEN]).float() / 127.5 - 1, _SEEN // 2)
    text = (
        f"A small ResNet learned to tell {len(images.classes)} classes of sprites apart. Its first normalization is a "
        "decorrelated one: it whitens its 64 channels with the inverse square root of their covariance P. On one "
        f"thread a step takes {', '.join(f'{row.milliseconds:.0f} ms ({name})' for name, row in rows.items())}."
    )
    methods = [f"`{name}`: {what}." for name, what in METHODS.items()]
    sprites = Picture(seen, "What it sees", "Sprites: colored shapes on gray, with noise.", wide=True)
    half = "The other half of the package is about generators. Walk through the latents of a small one:"
    explorer = Code(half, link="explore.html")
    return Section("What you see", [sprites, Items([*methods, *_words(rows, config)]), explorer], text)
