"""What trainings have found, in three sentences that follow from their numbers, and what to do next."""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, median

from orthocond.lab.report.comparison import LEVEL, Compared, compare
from orthocond.lab.report.content import Code
from orthocond.lab.report.problems import problems, progress, why_nothing
from orthocond.lab.report.quantities import (
    Quantity,
    compared,
    counted,
    late,
    listed,
    number,
    of_both_kinds,
    outcome,
    quantities,
    result,
)
from orthocond.lab.report.sources import Group, Training, train_command

OWN_GENERATOR = Code(
    "Find the directions of your own generator:",
    """import orthocond as oc
from orthocond import directions

generator = oc.Generator(module, z_dim=100)
found = directions.joint_directions(generator)
print(found.measure(generator))""",
)
OWN_MODEL = Code(
    "Look at your own model before you treat it:",
    """import orthocond as oc

# which layer needs help, and what helps
batch = images, labels
print(oc.diagnose(model, batch, loss))""",
)
_TREATMENTS = {"nog": "gradient=oc.NearestOrthogonal()", "olr": "lr=oc.OptimalLR()"}


def verdict(groups: Sequence[Group]) -> list[str]:
    """What came out, how well conditioned it is, and what speaks against it."""
    trainings = [t for g in groups for t in g.trainings]
    if len(trainings) == 1:
        return [_came_out(trainings[0]), _conditioned(trainings[0]), _against(trainings)]
    if len(groups) == 1:
        return [_spread(groups[0]), _conditioned_groups(groups), _against(trainings)]
    return [_best(groups), _conditioned_groups(groups), _against(trainings)]


# One training


def _came_out(training: Training) -> str:
    quantity = outcome([training])
    begun = {
        "finished": f"This training finished after {training.step:,} steps",
        "created": "This training has not begun",
        "running": f"This training is unfinished: {progress(training)}",
        "stopped": f"This training was stopped at {progress(training).removeprefix('stopped, ')}",
        "diverged": f"This training diverged at step {training.step:,}",
        "failed": f"This training failed at step {training.step:,}",
    }.get(training.state, f"This training is at step {training.step:,}")
    if not training.metrics:
        return f"{begun}, and has logged nothing yet."
    if quantity is not None and (value := result(training, quantity)) is not None:
        why = why_nothing([training])
        nothing = f". Nothing can be told from that: {why}" if why else ""
        return f"{begun}, with {_with_unit(quantity, value)}{_within(training, quantity, value)}{nothing}."
    losses = [q for q in quantities([training]) if "loss" in q.key]
    if losses:
        first, last = (training.series(losses[0].key)[i][1] for i in (0, -1))
        return (
            f"{begun}. {losses[0].title}: {number(first)} at the start, {number(last)} now; quality was not measured."
        )
    return f"{begun}; quality was not measured."


def _within(training: Training, quantity: Quantity, error: float) -> str:
    """What a number has to be seen beside: the interval of an error, what real images or rotated axes have.

    The interval is that of Wilson from the number of held-out images; other seeds are not in it.
    """
    floor = training.number(f"{quantity.key.removesuffix('.value')}.floor.value")
    if floor is not None:
        return f" (two sets of real images have {quantity.write(floor)})"
    mean, deviation = (training.number(f"chance.{key}.mig") for key in ("mean", "std"))
    if quantity.key.endswith(".mig") and mean is not None and deviation is not None:
        above = "" if error > mean + 2 * deviation else ", so this may be chance"
        return f" (axes rotated at random have {100 * mean:.0f} ± {100 * deviation:.0f} %{above})"
    images = training.number("images")
    if quantity.style != "percent" or images is None or not (1 <= images < math.inf and 0 <= error <= 100):
        return ""
    part, z = error / 100, 1.96
    middle = (part + z * z / (2 * images)) / (1 + z * z / images)
    half = z / (1 + z * z / images) * math.sqrt(part * (1 - part) / images + z * z / (4 * images * images))
    ends = f"{100 * (middle - half):.1f} to {100 * (middle + half):.1f} %"
    return f" (95 % interval {ends}, from {images:,.0f} images of one training)"


def _conditioned(training: Training) -> str:
    found = [q for q in quantities([training]) if q.key in ("condition", "weight_condition")]
    if not found:
        return "It has logged no condition numbers."
    parts = []
    for quantity in found:
        first, end = training.series(quantity.key)[0][1], late(training, quantity.key)
        if end is None:
            continue
        change = _change(end, first)
        parts.append(f"{quantity.title} is {quantity.write(end)} in the last quarter, {change} at the start")
    rank, size = late(training, "rank"), training.number("size")
    if rank is not None:
        of = f" of {size:.0f}" if size else ""
        singular = ": it is singular whatever the weight is" if size and rank < size else ""
        parts.append(f"P has rank {rank:.0f}{of}{singular}")
    return f"{'; '.join(parts)}."


def _change(end: float, first: float) -> str:
    words = compared(end, first)
    return "about the same as" if words == "about the same" else f"{words} than" if "times" in words else f"{words}"


# Several


def _name(quantity: Quantity) -> str:
    first, rest = quantity.title[0], quantity.title[1:]
    return first.lower() + rest if rest[:1].islower() and not quantity.title.startswith("Fréchet") else quantity.title


def _with_unit(quantity: Quantity, value: float) -> str:
    if not math.isfinite(value):
        return f"no finite {_name(quantity)}"
    text = quantity.write(value)
    return f"{text} {_name(quantity)}" if text.endswith("%") else f"a {_name(quantity)} of {text}"


def _spread(group: Group) -> str:
    quantity = outcome(group.trainings)
    ended = f"{_ended(group.trainings)} of {group.label}, which differ by the seed alone"
    if quantity is None:
        return f"{ended}; quality was not measured."
    found = [result(t, quantity) for t in group.trainings if t.state == "finished"]
    values = [value for value in found if value is not None and math.isfinite(value)]
    if not values:
        return f"{ended}; none that finished was measured."
    low, high = map(quantity.write, (min(values), max(values)))
    why = why_nothing(group.trainings)
    nothing = f" Nothing can be told from that: {why}." if why else ""
    return f"{ended}: {_with_unit(quantity, fmean(values))}, between {low} and {high}.{nothing}"


def _ended(trainings: Sequence[Training]) -> str:
    finished = sum(t.state == "finished" for t in trainings)
    if finished == len(trainings):
        return "Both trainings finished" if len(trainings) == 2 else f"All {len(trainings)} trainings finished"
    return f"{finished} of {len(trainings)} trainings finished"


def _best(groups: Sequence[Group]) -> str:
    trainings = [t for g in groups for t in g.trainings]
    quantity = outcome(trainings)
    if of_both_kinds(trainings):
        return f"{_ended(trainings)}. Nothing can be told about which is better: {why_nothing(trainings)}."
    rows, base = compare(groups, quantity)
    measured = [row for row in rows if row.mean is not None]
    if quantity is None or not measured:
        return f"{_ended(trainings)}; none that finished was measured, so nothing can be said about which is better."
    if why := why_nothing([t for t in trainings if t.state == "finished"]):
        found = listed([f"{row.group.label} {quantity.write(row.mean)}" for row in measured])
        return f"Nothing can be told about which is better: {why}. {quantity.title}: {found}."
    sign = -1 if quantity.better == "higher" else 1
    best = min(measured, key=lambda row: sign * (row.mean or 0))
    word = "highest" if quantity.better == "higher" else "lowest"
    text = f"{best.group.label} has the {word} {_name(quantity)}, {quantity.write(best.mean)}"
    rest = [row for row in measured if row is not best]
    if not rest:
        return f"{text}; no other was measured."
    baseline = next((row for row in rest if row.group is base), None)
    other = baseline or min(rest, key=lambda row: sign * (row.mean or 0))
    text += f", against {quantity.write(other.mean)} of {other.group.label}"
    return f"{text}; {_surely(best, rows, base)}."


def _surely(best: Compared, rows: Sequence[Compared], base: Group) -> str:
    if best.group is base and all(row.p is None for row in rows):
        return "there is one seed, so the difference may be chance"
    if best.group is base:
        worse = [row.group.label for row in rows if row.p is not None and row.p < LEVEL]
        return (
            f"{listed(worse)} {'differ' if len(worse) > 1 else 'differs'} from it by more than chance"
            if worse
            else ("no difference from it is more than chance can explain")
        )
    if best.p is None:
        return "there is one seed, so the difference may be chance" if best.count else "they share no seed to compare"
    seeds = counted(best.count, "seed")
    if best.p < LEVEL:
        return f"over {seeds} that is more than chance can explain (p = {best.p:.2g} for all comparisons together)"
    return f"over {seeds} that may be chance (p = {best.p:.2g})"


def _conditioned_groups(groups: Sequence[Group]) -> str:
    trainings = [t for g in groups for t in g.trainings]
    if of_both_kinds(trainings):
        gans = [g for g in groups if g.first.is_gan]
        others = [g for g in groups if not g.first.is_gan]
        return f"Classifiers: {_conditioned_groups(others)} GANs: {_conditioned_groups(gans)}"
    parts = []
    for quantity in quantities(trainings):
        if quantity.key not in ("condition", "weight_condition"):
            continue
        ends = {}
        for each in groups:
            values = [v for t in each.trainings if (v := late(t, quantity.key)) is not None and not math.isnan(v)]
            if values:
                ends[each.label] = median(values)
        if len(ends) == 1:
            parts.append(f"{quantity.title} ends at {quantity.write(next(iter(ends.values())))}")
        elif ends:
            low, high = min(ends, key=ends.__getitem__), max(ends, key=ends.__getitem__)
            times = compared(ends[high], ends[low])
            if times == "about the same":
                parts.append(f"{quantity.title} ends about the same everywhere, at {quantity.write(ends[low])}")
            else:
                parts.append(
                    f"{quantity.title} ends lowest with {low} ({quantity.write(ends[low])}) and highest with {high} "
                    f"({quantity.write(ends[high])}, {times})"
                )
    return f"{'; '.join(parts)}." if parts else "No condition numbers were logged."


def _against(trainings: Sequence[Training]) -> str:
    found = [(t, problems(t)) for t in trainings]
    bad = [(t, texts) for t, texts in found if texts]
    if not bad:
        subject = "This training" if len(trainings) == 1 else "Every training"
        return f"Nothing went wrong: {subject.lower()} finished, all logged numbers are finite, and no solver failed."
    if len(trainings) == 1:
        count = len(bad[0][1]) - 1
        more = f" {counted(count, 'more warning')} below." if count else ""
        return f"{bad[0][1][0]}{more}"
    states = [f"{sum(t.state == s for t in trainings)} {w}" for s, w in _STATES if any(t.state == s for t in trainings)]
    if states:
        return f"Not all is done: of {len(trainings)} trainings {listed(states)}; see the warnings below."
    return f"There are warnings for {len(bad)} of {len(trainings)} trainings, such as: {bad[0][1][0]}"


_STATES = (
    ("diverged", "diverged"),
    ("failed", "failed"),
    ("stopped", "stopped early"),
    ("running", "unfinished"),
    ("created", "not begun"),
)


# What to do next


def next_steps(groups: Sequence[Group], explorer: Code | None) -> list[Code]:
    """What to do next: with these trainings, and with a model of one's own."""
    trainings = [t for g in groups for t in g.trainings]
    steps = []
    open_ = next((t for t in trainings if t.state in ("stopped", "running", "created") and t.folder), None)
    if open_ is not None:
        steps.append(Code("Go on with what is unfinished:", f"orthocond train --resume {open_.folder}"))
    bad = next((t for t in trainings if t.state == "diverged" and t.folder), None)
    if bad is not None:
        steps.append(
            Code("See which layer was ill-conditioned before it diverged:", f"orthocond diagnose {bad.folder}")
        )
    unmeasured = next((t for t in trainings if t.evaluation is None and t.state == "finished" and t.folder), None)
    if unmeasured is not None:
        steps.append(Code("Measure what it has reached:", f"orthocond evaluate {unmeasured.folder}"))
    if explorer is not None:
        steps.append(explorer)
    return [*steps, *_another_seed(groups), *_own_model(groups)]


def _another_seed(groups: Sequence[Group]) -> list[Code]:
    """The commands of a second seed, where trainings of one seed were compared."""
    trainings = [t for g in groups for t in g.trainings]
    seeds = [t.config.get("seed") for t in trainings]
    whole = [seed for seed in seeds if isinstance(seed, int)]  # a run of another program may have anything there
    if len(groups) < 2 or len(groups) < len(trainings) or len(whole) < len(seeds) or why_nothing(trainings):
        return []
    others = [replace(t, config={**t.config, "seed": max(whole) + 1}) for t in trainings if t.state == "finished"]
    commands = [command for t in others if (command := train_command(t)) is not None]
    if len(commands) < len(trainings):
        return []
    return [Code("One seed cannot tell a difference from chance. Train another one, or more:", "\n".join(commands))]


def _own_model(groups: Sequence[Group]) -> list[Code]:
    trainings = [t for g in groups for t in g.trainings]
    if any(t.is_gan for t in trainings):
        return [OWN_GENERATOR]
    rows, _ = compare(groups, outcome(trainings))
    sure = [r for r in rows if r.p is not None and r.p < LEVEL and (r.difference or 0) < 0]
    sure = [] if why_nothing(trainings) else sure
    best = min(sure, key=lambda r: r.mean or 0, default=None)
    parts = best.group.first.method.split("+") if best else []
    arguments = [_TREATMENTS[part] for part in parts if part in _TREATMENTS]
    if best is None or not (arguments or "ow" in parts):
        before = "No treatment was surely better here. " if len(groups) > 1 else ""
        return [replace(OWN_MODEL, text=before + OWN_MODEL.text)]
    lines = [OWN_MODEL.code, "layer = model.conv1  # the layer before the SVD"]
    lines += ["oc.orthogonal(layer)"] if "ow" in parts else []
    lines += [f"oc.treat(layer, optimizer, {', '.join(arguments)})"] if arguments else []
    return [Code(f"What helped here, {best.group.label}, in your own model; look before you treat:", "\n".join(lines))]
