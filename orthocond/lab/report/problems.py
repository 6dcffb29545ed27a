"""What went wrong in a training, or looks as if it did; found in its state, its log and its numbers."""

import math
import re

from orthocond.lab.report.quantities import counted, number
from orthocond.lab.report.quantities import quantities as known_quantities
from orthocond.lab.report.sources import Training

_ALARMING = re.compile(r"damaged|diverged|not finite|not used|warning|failed|error|The loss is", re.IGNORECASE)
_BORING = re.compile(r"Started from the beginning\.|Resumed after step")
# Loss of a discriminator that gives the same logit to all images.
_DEAD = {"non-saturating": 2 * math.log(2), "hinge": 2.0, "hinge-saturating": 2.0}
_STILL = 0.005  # relative distance from that loss, over the whole last quarter
_LEAST = 4  # lines of that quarter
_STALE = 2.0  # percentage points between the errors before and after statistics are taken anew


def problems(training: Training) -> list[str]:
    """What a reader has to know before believing a training, in one sentence each; the worst first."""
    found = [*_state(training), *training.trouble, *_failures(training), *_infinite(training)]
    found += [text for text in (dead_discriminator(training), _stale_statistics(training)) if text]
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
    values = training.series("solver_failures")
    count = int(values[-1][1]) if values else 0
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
    """What is to be said of a discriminator that has stopped telling images apart; None of any other."""
    objective = training.config.get("objective")
    chance = _DEAD.get(objective.get("name", "")) if isinstance(objective, dict) else None
    values = [value for _, value in training.series("discriminator_loss")]
    last = values[-(len(values) // 4) :] if len(values) >= 4 * _LEAST else []
    if chance is None or not last or any(abs(v - chance) > _STILL * chance for v in last):
        return None
    return (
        f"The discriminator looks dead: its loss stays at {number(chance)}, the value of one that cannot tell images "
        "apart, in the whole last quarter. Nothing that the generator shows then can be compared."
    )


def _stale_statistics(training: Training) -> str | None:
    as_trained, anew = training.number("error"), training.number("recalibrated_error")
    if as_trained is None or anew is None or as_trained - anew < _STALE:
        return None
    return (
        f"The running statistics lag behind the weights: the error is {as_trained:.1f} % as trained and {anew:.1f} % "
        "with statistics taken anew."
    )


def steps_of(training: Training) -> int | None:
    """How many steps a training has, if its configuration says so."""
    schedule = training.config.get("schedule")
    steps = schedule.get("steps") if isinstance(schedule, dict) else None
    return steps if isinstance(steps, int) else None


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
