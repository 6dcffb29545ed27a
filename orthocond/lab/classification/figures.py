"""The paper's figures of classifiers: conditioning, best accuracy, learning rates."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from orthocond.lab.tables.comparison import Outcome
from orthocond.lab.tables.drawing import Curve, color, ink, panels, title
from orthocond.lab.tables.figures import all_curves, draw_all, is_paper_form

_STEPS = 6  # rates of a schedule of steps; one with more rises and falls steadily
_CONDITIONS = {"condition": "κ(P + εI)", "condition_on_range": "κ on the range of P"}


def conditioning(outcomes: Sequence[Outcome], rows: Sequence[Any]) -> Any:
    """Condition numbers over training: of ``P + εI``, and of P on its range; lines are means, bands all seeds."""
    shown = [o for o in outcomes if all_curves(o, rows, "condition_on_range", log=True)]
    if not shown:
        return None
    figure, grid = panels(len(shown), len(_CONDITIONS), [outcomes[0].short(row) for row in rows])
    for outcome, line in zip(shown, grid, strict=True):
        for axes, (key, name) in zip(line, _CONDITIONS.items(), strict=True):
            title(axes, outcome.experiment.label)
            axes.set(xlabel="training step", ylabel=name)
            axes.set_yscale("log")
            if curves := all_curves(outcome, rows, key, log=True):
                draw_all(axes, outcome, curves)
            else:
                axes.set(xticks=[], yticks=[])
                axes.minorticks_off()
                words = "infinite: P is singular\nand there is no ridge"
                axes.text(0.5, 0.5, words, ha="center", va="center", color="0.4", transform=axes.transAxes)
    return figure


def convergence(outcomes: Sequence[Outcome], rows: Sequence[Any]) -> Any:
    """Best accuracy so far on test images, after each epoch; a second line has it over seconds of the processor.

    The seconds are those of the trainings, which may have shared their machine.
    """
    shown = [(o, curves) for o in outcomes if (curves := all_curves(o, rows, "best_error", log=False, x="epoch"))]
    if not shown:
        return None
    timed = [bool(_timed(o, curves)) for o, curves in shown]
    figure, grid = panels(1 + any(timed), len(shown), [outcomes[0].short(row) for row in rows])
    for column, (outcome, curves) in enumerate(shown):
        _accuracies(grid[0][column], outcome, curves, "epoch")
        if timed[column]:
            _accuracies(grid[1][column], outcome, _timed(outcome, curves), "CPU seconds of training steps, as trained")
        elif any(timed):
            grid[1][column].axis("off")
    return figure


def _accuracies(axes: Any, outcome: Outcome, curves: Sequence[tuple[Any, Curve]], x: str) -> None:
    title(axes, outcome.experiment.label)
    axes.set_xlabel(x)
    axes.set_ylabel("best accuracy so far on test images (%)")
    few = max(len(found.x) for _, found in curves) <= 12
    if x == "epoch":
        axes.xaxis.get_major_locator().set_params(integer=True)
    if few and x == "epoch":
        axes.set_xticks(curves[0][1].x)
    accuracies = [
        (row, Curve(c.x, *([100 - e for e in column] for column in (c.mean, c.high, c.low)))) for row, c in curves
    ]
    draw_all(axes, outcome, accuracies, marker="." if few else None)


def _timed(outcome: Outcome, curves: Sequence[tuple[Any, Curve]]) -> list[tuple[Any, Curve]]:
    """The same curves over seconds of the processor, the mean of all seeds; only those whose steps were timed so."""
    found = []
    for row, c in curves:
        records = outcome.records[row]
        if all(record.series("step_cpu_seconds")[0] for record in records):
            seconds = [fmean(_seconds_until(record, epoch) for record in records) for epoch in c.x]
            found.append((row, c._replace(x=seconds)))
    return found


def _seconds_until(record: Any, epoch: float) -> float:
    """Seconds of the processor that the first epochs of a training took, by the mean of its steps."""
    ends = [line["step"] for line in record.metrics if line.get("best_error") is not None and line["epoch"] <= epoch]
    return max(ends, default=0) * fmean(record.series("step_cpu_seconds")[1])


def learning_rate(outcomes: Sequence[Outcome], rows: Sequence[Any]) -> Any:
    """Step lengths of the Pre-SVD layer beside the schedule of all other layers, and how often OLR chose them.

    A column for each method, a line for each form of OLR, of the first experiment that has them.
    """
    treated = [row for row in rows if "olr" in row.name.split("+")]
    outcome = next((o for o in outcomes if any(o.records.get(row) for row in treated)), None)
    if outcome is None:
        return None
    shown = {row: records for row in rows if (records := outcome.records.get(row))}
    columns = list(dict.fromkeys(row.name for row in shown))
    forms = sorted({is_paper_form(row) for row in shown})
    figure, grid = panels(len(forms), len(columns), lines=2)
    low = min(v for records in shown.values() for r in records for k in ("lr", "eta") for v in r.series(k)[1] if v > 0)
    for form, line in zip(forms, grid, strict=True):
        for axes, column in zip(line, columns, strict=True):
            row = next((r for r in shown if r.name == column and is_paper_form(r) == form), None)
            if row is None:
                axes.axis("off")
                continue
            _rates(axes, shown[row], row)
            axes.set_ylim(bottom=low / 2)
            name = outcome.short(row)
            name += "" if "olr" in row.name.split("+") else ", no OLR"
            title(axes, f"{name}\n{outcome.experiment.label}", size=9, linespacing=1.35)
            axes.set_xlabel("training step")
    text = (
        "gray: the learning rate of the stem\ndots: step length η of the Pre-SVD layer,\nat logged steps of all seeds"
    )
    steady = len(set(next(iter(shown.values()))[0].series("lr")[1])) > _STEPS
    where = "in its rise,\nheight and fall" if steady else "at this rate"
    text += f"\n%: of the steps {where}, how many OLR changes"
    corner = grid[0][0]
    corner.text(0.03, 0.04, text, transform=corner.transAxes, size=8.5, color="0.35", linespacing=1.5, va="bottom")
    grid[0][0].set_ylabel("step length η")
    return figure


def _rates(axes: Any, records: Sequence[Any], row: Any) -> None:
    """The η of every seed at the steps that were logged, over the schedule; how often OLR acts in each stage of it."""
    steps, schedule = records[0].series("lr")
    schedule = [row.stem_lr * rate for rate in schedule]
    style = "default" if len(set(schedule)) > _STEPS else "steps-post"
    axes.plot(steps, schedule, drawstyle=style, color="0.75", linewidth=4, solid_capstyle="butt")
    axes.set_yscale("log")
    axes.set_ylim(top=max(schedule) * 2.5)
    x: list[int] = []
    y: list[float] = []
    for record in records:
        pairs = list(zip(*record.series("eta"), strict=True))
        for step, eta in pairs[:: max(1, len(pairs) // 300)]:
            x.append(step)
            y.append(eta)
    # As pixels: so many dots are a large SVG.
    dots = {"markersize": 5, "alpha": 0.6, "markeredgewidth": 0, "rasterized": True}
    axes.plot(x, y, linestyle="", marker=".", color=color(row.name), **dots)
    stages = _stages(schedule)
    for stage in dict.fromkeys(stages):
        shares = [share for record in records if (share := _share(record, stage)) is not None]
        if shares:
            places = [place for place, found in enumerate(stages) if found == stage]
            middle = places[len(places) // 2]
            side = 0 if style == "steps-post" else 1 if stage else -1  # away from a line that rises or falls
            axes.annotate(
                f"{100 * sum(shares) / len(shares):.0f} %",
                (steps[middle], schedule[middle]),
                xytext=(6 * side, 5),
                textcoords="offset points",
                ha=("center", "left", "right")[side],
                color=ink(color(row.name)),
                size=8.5,
            )


def _stages(schedule: Sequence[float]) -> list[int]:
    """The stage of each rate: of a schedule of steps all of one rate; else the rise, the upper half, and the fall."""
    rates = list(dict.fromkeys(schedule))
    if len(rates) <= _STEPS:
        return [rates.index(rate) for rate in schedule]
    top = schedule.index(max(schedule))
    return [0 if place < top else 1 if rate >= schedule[top] / 2 else 2 for place, rate in enumerate(schedule)]


def _share(record: Any, stage: int) -> float | None:
    """The fraction of steps at which OLR acted in a stage of the schedule, from fractions of all steps so far."""
    stages = dict(zip(record.series("lr")[0], _stages(record.series("lr")[1]), strict=True))
    lines = [(0, 0.0, -1)]
    lines += [
        (m["step"], m["step"] * m["olr_occurrence"], stages[m["step"]]) for m in record.metrics if "olr_occurrence" in m
    ]
    inside = [i for i, line in enumerate(lines) if line[2] == stage]
    if not inside:
        return None
    (start, before, _), (end, after, _) = lines[inside[0] - 1], lines[inside[-1]]
    return (after - before) / (end - start)
