"""Orthogonal weights beside those of torch and GeoTorch: `python benchmarks/weights.py --output FILE`.

Forward and backward of the parametrization of a tall weight: what a training step pays for it. Each contender is first
tried in a process of its own with a limit of memory and time, as some make a matrix of rows x rows. GeoTorch is left
out where it is not installed.
"""

import math
import resource
import signal
import subprocess
import sys
import time

import torch
from common import SLOW, arguments, report, save
from torch import nn
from torch.nn.utils import parametrizations

from orthocond.weights import orthogonal

SHAPES = [(30000, 50), (4608, 512)]
BASE = 'orthogonal(map="polar")'
BYTES, SECONDS = 9 * 2**30, 20  # seconds of the processor
MAPS, MAPS_OF_TORCH = ("polar", "cayley", "exponential"), ("householder", "cayley", "matrix_exp")


def makers():
    found = {f'orthogonal(map="{name}")': lambda m, name=name: orthogonal(m, map=name) for name in MAPS}
    for name in MAPS_OF_TORCH:
        found[f'torch, "{name}"'] = lambda m, name=name: parametrizations.orthogonal(m, orthogonal_map=name)
    try:
        import geotorch
    except ImportError:
        print("GeoTorch is not installed: left out")
    else:
        found["GeoTorch"] = lambda m: geotorch.orthogonal(m, "weight")
    return found


def stepper(name, rows, columns):
    module = nn.Linear(columns, rows, bias=False)
    makers()[name](module)
    gradient = torch.randn(rows, columns)

    def step():
        module.zero_grad()
        module.weight.backward(gradient)

    return step


def trial(name, rows, columns):
    """Seconds of one step in a process of its own, or what kept it from its end."""
    command = [sys.executable, __file__, "--try", name, str(rows), str(columns)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == -signal.SIGXCPU:
        return f"more than {SECONDS} s"
    if done.returncode:
        return f"more than {BYTES / 2**30:.0f} GB" if "memory" in done.stderr else done.stderr.splitlines()[-1]
    return float(done.stdout)


def one_step(name, rows, columns):
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    start = time.process_time()
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(start) + SECONDS, -1))
    step = stepper(name, rows, columns)
    start = time.process_time()
    step()
    print(time.process_time() - start)


def case(rows, columns, seconds):
    trials = {name: trial(name, rows, columns) for name in makers()}
    quick = [name for name, found in trials.items() if isinstance(found, float) and found < SLOW]
    contenders = {name: stepper(name, rows, columns) for name in quick}
    result = report(f"orthogonal weight {rows} x {columns}, forward and backward", contenders, seconds, BASE)
    base = result["contenders"][BASE]["median_ms"]
    for name, found in trials.items():
        if name not in quick:
            once = isinstance(found, float)
            row = {"once_ms": 1e3 * found, "relative_time": 1e3 * found / base} if once else {"failed": found}
            result["contenders"][name] = row
            print(f"  {name:36s} {row}")
    return result


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--try"]:
        one_step(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        options = arguments(__doc__)
        save(options.output, [case(*shape, options.seconds) for shape in SHAPES])
