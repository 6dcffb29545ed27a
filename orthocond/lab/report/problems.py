"""What went wrong in a training, or looks as if it did; found in its state, its log and its numbers."""

import math
import re
from collections.abc import Sequence

from orthocond.gans import health_warnings
from orthocond.lab.report.quantities import counted, late, number, of_both_kinds
from orthocond.lab.report.quantities import quantities as known_quantities
from orthocond.lab.report.sources import Training

_ALARMING = re.compile(r"damaged|diverged|not finite|not used|warning|failed|error|The loss is", re.IGNORECASE)
_BORING = re.compile(r"Started from the beginning\.|Resumed after step")
# Loss of a discriminator that gives the same logit to all images.
_DEAD = {"non-saturating": 2 * math.log(2), "hinge": 2.0, "hinge-saturating": 2.0}
_STILL = 0.002  # distance from that loss, over the whole last quarter
_LEAST = 4  # lines of that quarter
_FLOOR = 0.5  # of the steps, above which OLR is little more than its floor
_ONE_SIDED = 1.645  # deviations, above which a normal variable is in 5 % of the cases
_FEW = 100  # steps, below which nothing can be told
_STALE = 2.0  # percentage points between the errors as trained and refreshed


def problems(training: Training) -> list[str]:
    """What a reader has to know before believing a training, in one sentence each; the worst first."""
    found = [*_state(training), *training.trouble, *_failures(training), *_infinite(training)]
    found += filter(None, (dead_discriminator(training), _collapse(training), _stale_statistics(training)))
    found += filter(None, (_olr_at_floor(training),))
    # What the log says beyond that; its first line ends before the details of a diagnosis.
    found += [line for line in training.log if _ALARMING.search(line) and not _BORING.search(line)][:10]
    return found


def _state(training: Training) -> list[str]:
    reason = f": {training.message.splitlines()[0].rstrip('.')}" if training.message else ""
    texts = {
        "diverged": f"It diverged at step {training.step:,}{reason}.",
        "failed": f"It failed at step {training.step:,}{reason}.",
        "stopped": f"It was stopped at step {training.step:,}{reason}; it can go on from its last checkpoint.",
        "running": f"It is at step {training.step:,} and has not finished; its numbers are not final.",
        "created": "It has not begun.",
    }
    return [texts[training.state]] if training.state in texts else []


def _failures(training: Training) -> list[str]:
    values = [value for _, value in training.series("solver_failures") if math.isfinite(value)]
    count = int(values[-1]) if values else 0
    return [f"The decomposition failed for {counted(count, 'matrix', 'matrices')}."] if count else []


def _infinite(training: Training) -> list[str]:
    texts = []
    for quantity in known_quantities([training]):
        values = [value for _, value in training.series(quantity.key)]
        bad = sum(not math.isfinite(value) for value in values)
        if bad:
            why = "; the matrix is singular there" if quantity.key == "condition" else ""
            texts.append(f"{quantity.title} is not finite in {bad:,} of {counted(len(values), 'line')}{why}.")
    return texts


def dead_discriminator(training: Training) -> str | None:
    """What is to be said of a discriminator that has stopped telling images apart; None of any other.

    Trainings log in how many steps it could not tell. For those that did not yet, the loss decides.
    """
    part = late(training, "cannot_tell")
    if part is not None:
        return next(iter(health_warnings(part)), None) if training.step >= _FEW else None
    objective = training.config.get("objective")
    chance = _DEAD.get(objective.get("name", "")) if isinstance(objective, dict) else None
    values = [value for _, value in training.series("discriminator_loss")]
    last = values[-(len(values) // 4) :] if len(values) >= 4 * _LEAST else []
    if chance is None or not last or any(abs(v - chance) > _STILL for v in last):
        return None
    return (
        f"The discriminator looks dead: its loss stays at {number(chance)}, the value of one that cannot tell images "
        "apart, in the whole last quarter. Nothing that the generator shows then can be compared."
    )


def _collapse(training: Training) -> str | None:
    spread = late(training, "sample_spread")
    return None if spread is None else next(iter(health_warnings(0.0, spread)), None)


def _olr_at_floor(training: Training) -> str | None:
    values = training.series("olr_at_floor")
    if not values or values[-1][1] <= _FLOOR:
        return None
    return (
        f"OLR took its floor in {100 * values[-1][1]:.0f} % of the steps: there it is no more than a learning rate "
        "that is smaller by a fixed factor."
    )


def why_nothing(trainings: Sequence[Training]) -> str:
    """Why nothing can be told from some trainings; empty if something can.

    They are of both kinds, too short, of unequal length, no better than guessing, or games without a discriminator.
    """
    if of_both_kinds(trainings):
        return "classifiers and GANs have no measure in common"
    steps = max((t.step for t in trainings), default=0)
    if steps < _FEW:
        return f"{counted(steps, 'step')} {'is' if steps == 1 else 'are'} too few"
    if unequal := unequal_length(trainings):
        return unequal
    dead = sum(dead_discriminator(t) is not None or _collapse(t) is not None for t in trainings)
    if dead:
        of = "" if len(trainings) == 1 else f" of {dead} of {len(trainings)} trainings"
        return f"the game{of} between generator and discriminator has broken down"
    bands = [band for t in trainings if t.state == "finished" and (band := guessing(t)) is not None]
    if bands and all(error > chance - half for error, chance, half in bands):
        return f"no error is better than that of guessing, {bands[0][1]:.1f} %"
    return ""


def unequal_length(trainings: Sequence[Training]) -> str:
    """That trainings are not comparable, if those that finished differ in steps and in images seen; else empty."""
    finished = [t for t in trainings if t.state == "finished"]
    steps = sorted({t.step for t in finished})
    seen = {t.step * (_schedule(t, "batch_size") or 1) for t in finished}
    if len(steps) < 2 or len(seen) < 2:
        return ""
    return f"the trainings are of unequal length, {steps[0]:,} and {steps[-1]:,} steps"


def guessing(training: Training) -> tuple[float, float, float] | None:
    """Error of a classifier, that of one that guesses, and how far chance brings the latter down (95 %), in percent.

    None where the number of classes is not known.
    """
    error, classes, images = (training.number(key) for key in ("error", "classes", "images"))
    if error is None or classes is None or images is None or not (classes >= 1 and images >= 1):
        return None
    chance = 1 - 1 / classes
    return error, 100 * chance, 100 * _ONE_SIDED * math.sqrt(chance * (1 - chance) / images)


def _stale_statistics(training: Training) -> str | None:
    as_trained, refreshed = training.number("error"), training.number("recalibrated_error")
    if as_trained is None or refreshed is None or as_trained - refreshed < _STALE:
        return None
    return (
        f"The running statistics lag behind the weights: the error is {as_trained:.1f} % as trained and "
        f"{refreshed:.1f} % with refreshed statistics."
    )


def steps_of(training: Training) -> int | None:
    """How many steps a training has, if its configuration says so."""
    return _schedule(training, "steps")


def _schedule(training: Training, key: str) -> int | None:
    schedule = training.config.get("schedule")
    value = schedule.get(key) if isinstance(schedule, dict) else None
    return value if isinstance(value, int) else None


def progress(training: Training) -> str:
    """State and step in a few words.

    Example:
        >>> progress(Training("a", {"schedule": {"steps": 40}}, [], "running", 12))
        'step 12 of 40'
    """
    steps = steps_of(training)
    if training.state == "finished":
        return f"finished, {training.step:,} steps"
    if training.state == "created":
        return "not begun"
    of = f" of {steps:,}" if steps else ""
    return (
        f"step {training.step:,}{of}"
        if training.state == "running"
        else f"{training.state}, step {training.step:,}{of}"
    )
