"""Small differences that can be believed: contenders take turns, and each is compared within its own round."""

import random
import statistics
import time
from collections.abc import Callable


def take_turns(contenders: dict[str, Callable[[], object]], rounds: int, seconds: float) -> dict[str, dict[str, list]]:
    """Milliseconds of each call, by the clock on the wall and by the processor's time for this process.

    The order changes from round to round. On a machine with other work the processor's time is the one to look at.

    Args:
        contenders: What to call.
        rounds: Least number of rounds.
        seconds: Rounds go on until each contender has had this time.
    """
    for run in contenders.values():
        run()
    times: dict[str, dict[str, list]] = {name: {"wall": [], "processor": []} for name in contenders}
    order, shuffle = list(contenders), random.Random(0).shuffle
    end = time.perf_counter() + seconds * len(contenders)
    done = 0
    while done < rounds or time.perf_counter() < end:
        shuffle(order)
        for name in order:
            wall, processor = time.perf_counter(), time.process_time()
            contenders[name]()
            times[name]["processor"].append(1e3 * (time.process_time() - processor))
            times[name]["wall"].append(1e3 * (time.perf_counter() - wall))
        done += 1
    return times


def quartiles(values: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(values, n=4)
    return {"median": median, "low": low, "high": high, "runs": len(values)}


def ratios(times: dict[str, dict[str, list]], name: str, base: str) -> dict[str, dict[str, float]]:
    """Quartiles of the time of ``name`` over that of ``base`` in the same round, by both clocks."""
    return {
        clock: quartiles([a / b for a, b in zip(times[name][clock], times[base][clock], strict=True)])
        for clock in ("wall", "processor")
    }


def percent(ratio: dict[str, float]) -> str:
    """A ratio as what it adds, with quartiles."""
    low, median, high = (100 * (ratio[key] - 1) for key in ("low", "median", "high"))
    return f"{median:+5.1f} % [{low:+.1f}, {high:+.1f}]"
