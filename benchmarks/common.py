"""Timing that can be believed: contenders take turns, one thread, medians and quartiles, ratios within one run."""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import orthocond


def compare(contenders: dict[str, Callable[[], object]], seconds: float = 3.0) -> dict[str, dict[str, float]]:
    """Run the contenders in turn until each has taken its share of the time; milliseconds of one call.

    Returns median and quartiles for each. Taking turns spreads a disturbance of the machine over all of them.
    """
    for run in contenders.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    end = time.perf_counter() + seconds * len(contenders)
    while len(times[next(iter(times))]) < 5 or time.perf_counter() < end:
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: _summary(values) for name, values in times.items()}


def report(title: str, contenders: dict[str, Callable[[], object]], seconds: float, base: str) -> dict[str, object]:
    """Time the contenders, print and return them relative to ``base``, with the peak memory of each."""
    rows = compare(contenders, seconds)
    print(f"\n{title}")
    for name, row in rows.items():
        row["relative_time"] = row["median_ms"] / rows[base]["median_ms"]
        row["peak_bytes"] = peak_memory(contenders[name])
        print(
            f"  {name:36s} {row['median_ms']:10.3f} ms [{row['low_ms']:.3f}, {row['high_ms']:.3f}]"
            f" {row['relative_time']:7.3f}x {row['peak_bytes'] / 1e6:9.2f} MB"
        )
    return {"title": title, "base": base, "contenders": rows}


def _summary(values: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(values, n=4)
    return {"median_ms": median, "low_ms": low, "high_ms": high, "runs": len(values)}


def peak_memory(run: Callable[[], object]) -> int:
    """Largest number of bytes that tensors made by ``run`` held at one time (LAPACK's own workspace excluded)."""
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    held = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def environment() -> dict[str, str]:
    """What the numbers depend on."""
    return {
        "orthocond": orthocond.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": _processor(),
        "threads": str(torch.get_num_threads()),
    }


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
