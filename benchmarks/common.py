"""Timing that can be believed: contenders take turns, one thread, processor time, medians and quartiles, ratios."""

import argparse
import json
import math
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path

import torch

import orthocond

SLOW = 5.0
"""Seconds from which a contender runs once and no oftener: it would take hours."""
TURN = 5e-3
"""Seconds of a turn: a quick contender is called so often in it that it finds the caches as its last call left them."""


def compare(contenders: dict[str, Callable[[], object]], seconds: float = 3.0) -> dict[str, dict[str, float]]:
    """Run the contenders in turn until each has taken its share of the time; milliseconds of the processor for a call.

    Returns median and quartiles for each. Taking turns spreads a disturbance of the machine over all of them, and time
    of the processor does not count that of other programs.
    """
    first = {name: _time(run, 1) for name, run in contenders.items()}
    times: dict[str, list[float]] = {name: [value] if value > 1e3 * SLOW else [] for name, value in first.items()}
    order = [name for name, found in times.items() if not found]
    calls = {name: max(1, round(1e3 * TURN / _time(contenders[name], 1))) for name in order}
    rounds, shuffle = 0, random.Random(0).shuffle
    end = time.perf_counter() + seconds * len(order)
    while rounds < 5 or time.perf_counter() < end:
        shuffle(order)  # what ran before leaves its traces in the caches
        for name in order:
            times[name].append(_time(contenders[name], calls[name]))
        rounds += 1
    return {name: _summary(values) for name, values in times.items()}


def _time(run: Callable[[], object], calls: int) -> float:
    start = time.process_time()
    for _ in range(calls):
        run()
    return 1e3 * (time.process_time() - start) / calls


def report(title: str, contenders: dict[str, Callable[[], object]], seconds: float, base: str) -> dict[str, object]:
    """Time the contenders, print and return them relative to ``base``, with the peak memory of each."""
    rows = compare(contenders, seconds)
    print(f"\n{title}")
    for name, row in rows.items():
        row["relative_time"] = row["median_ms"] / rows[base]["median_ms"]
        row["peak_bytes"] = peak_memory(contenders[name]) if row["median_ms"] < 1e3 * SLOW else None
        print(
            f"  {name:36s} {row['median_ms']:10.3f} ms [{row['low_ms']:.3f}, {row['high_ms']:.3f}]"
            f" {row['relative_time']:7.3f}x {(row['peak_bytes'] or math.nan) / 1e6:9.2f} MB"
        )
    return {"title": title, "base": base, "contenders": rows}


def _summary(values: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(values * 2 if len(values) == 1 else values, n=4)
    return {"median_ms": median, "low_ms": low, "high_ms": high, "runs": len(values)}


def peak_memory(run: Callable[[], object]) -> int:
    """Largest number of bytes that tensors made by ``run`` held at one time (LAPACK's own workspace excluded)."""
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    return most_held(event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]")


def most_held(changes: Iterable[int]) -> int:
    """The largest sum of changes in bytes since the least one: a run may first free what the run before has left.

    >>> most_held([-65, 65, 65, -65])
    130
    """
    held = least = most = 0
    for change in changes:
        held += change
        least = min(least, held)
        most = max(most, held - least)
    return most


def environment() -> dict[str, str]:
    """What the numbers depend on."""
    return {
        "orthocond": orthocond.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": _processor(),
        "threads": str(torch.get_num_threads()),
        "load": f"{os.getloadavg()[1]:.1f} on {os.cpu_count()} cores",
    } | {name: metadata.version(name) for name in ("geotorch", "pytorch-optimizer") if _is_installed(name)}


def _is_installed(name: str) -> bool:
    return any(True for _ in metadata.Distribution.discover(name=name))


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def arguments(description: str) -> argparse.Namespace:
    """The command line that all benchmarks share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--output", type=Path, help="write the results to this JSON file")
    parser.add_argument("--seconds", type=float, default=3.0, help="time for each contender")
    return parser.parse_args()


def save(path: Path | None, results: object) -> None:
    """Write results and environment as JSON."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"environment": environment(), "results": results}, indent=1) + "\n")
        print(f"\nwritten to {path}")
