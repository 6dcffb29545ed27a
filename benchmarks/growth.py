"""Growth of time and memory with channels, batch and rank, in one figure: `python benchmarks/growth.py --output FILE`.

One training step of a layer (forward and backward) and of `polar`, in processor time on one thread. The slopes are
those of straight lines through the last three points on logarithmic axes. `--figure` draws what the file holds.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from common import compare, peak_memory, save
from torch import nn

from orthocond.layers import DecorrelatedBatchNorm2d, covariance_pool
from orthocond.matrix import inv_sqrtm, polar

SIDE = 8
# axis: (values, what a value means for batch, channels and rank)
AXES = {
    "channels": ((16, 32, 64, 128, 256, 512), lambda value: (128, value, value)),
    "batch": ((16, 32, 64, 128, 256, 512), lambda value: (value, 64, 64)),
    "rank of 128 channels": ((4, 8, 16, 32, 64, 128), lambda value: (128, 128, value)),
}
DRAWN = {"time": ("median_ms", "ms", 1.0), "memory": ("peak_bytes", "MB", 1e-6)}


def step(function, x):
    x.grad = None
    function(x).sum().backward()


def contenders(batch, channels, rank):
    x = torch.randn(batch, rank, SIDE, SIDE)
    if rank < channels:
        x = torch.einsum("nrhw,rc->nchw", x, torch.randn(rank, channels))
    x = x.contiguous().requires_grad_()
    flat = x.detach().movedim(1, 0).flatten(1).requires_grad_()
    covariance = (flat.detach() @ flat.detach().mT / flat.shape[1]).requires_grad_()
    functions = {
        "BatchNorm2d": (nn.BatchNorm2d(channels), x),
        "DecorrelatedBatchNorm2d": (DecorrelatedBatchNorm2d(channels), x),
        "covariance_pool": (covariance_pool, x),
        "polar of all features": (polar, flat),
        "inv_sqrtm of the covariance": (lambda a: inv_sqrtm(a, eps=1e-5), covariance),
    }
    return {name: (lambda f=f, x=x: step(f, x)) for name, (f, x) in functions.items()}


def measure(seconds):
    results = {}
    for axis, (values, sizes) in AXES.items():
        for value in values:
            runs = contenders(*sizes(value))
            for name, row in compare(runs, seconds).items():
                row["peak_bytes"] = peak_memory(runs[name])
                results.setdefault(axis, {}).setdefault(name, {})[str(value)] = row
            print(axis, value, {name: round(rows[str(value)]["median_ms"], 2) for name, rows in results[axis].items()})
    return results


def slope(points):
    """The exponent of growth: that of the line through the last three points."""
    logs = [(math.log(a), math.log(b)) for a, b in points[-3:]]
    x, y = (sum(column) / len(logs) for column in zip(*logs, strict=True))
    return sum((a - x) * (b - y) for a, b in logs) / sum((a - x) ** 2 for a, _ in logs)


def draw(results, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(len(DRAWN), len(results), figsize=(13, 8), layout="constrained", sharey="row")
    for column, (axis, contenders) in enumerate(results.items()):
        for row, (kind, (key, unit, factor)) in enumerate(DRAWN.items()):
            place = axes[row][column]
            for index, (name, rows) in enumerate(contenders.items()):
                points = [(int(value), factor * found[key]) for value, found in rows.items()]
                label = f"{name}, slope {slope(points):.1f}"
                place.loglog(*zip(*points, strict=True), marker="os^vD"[index], markersize=4, label=label)
            place.set_xticks([int(value) for value in rows], rows, minor=False)
            place.minorticks_off()
            place.set_xlabel(axis)
            place.set_ylabel(f"{kind} of forward and backward, {unit}")
            place.tick_params(labelleft=True)
            place.grid(alpha=0.3)
            place.legend(fontsize=7)
    figure.savefig(path, dpi=110)
    print(f"drawn in {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSON file of the results")
    parser.add_argument("--figure", type=Path, help="draw the results of that file here, and measure nothing")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each contender and size")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if options.figure is None:
        save(options.output, measure(options.seconds))
    else:
        draw(json.loads(options.output.read_text())["results"], options.figure)
