"""Images a second of one process and of two: `python benchmarks/processes.py --output FILE`.

A real training, `torchrun -m orthocond train`, with one and with two processes of one thread, which take turns. The
batch is that of the preset, divided among them. Two clocks: that on the wall, which counts what other programs of the
machine take, and the time of the processors, which does not count waiting.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import save

PRESETS = ("dbn-sprites-small", "dbn-cifar10-convnet", "gan-sprites")


def train(preset, processes, steps, root):
    """Median seconds of a step by both clocks; that of the processors is the sum over all processes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command += ["-m", "orthocond", "train", preset, "--scale", "laptop", "--schedule.steps", str(steps)]
        command += ["--runs", folder, "--log-every", "10", "--quiet", "--no-evaluate", "--no-report"]
        if root:
            command += ["--data-root", root]
        done = subprocess.run(
            command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(done.stderr)
        lines = [json.loads(line) for file in Path(folder).rglob("times.jsonl") for line in file.open()]
    timed = [line for line in lines if "step_seconds" in line][1:]  # the first steps allocate
    return {
        "wall": statistics.median(line["step_seconds"] for line in timed),
        "processor": processes * statistics.median(line["step_cpu_seconds"] for line in timed),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--presets", nargs="+", default=PRESETS[:1], help="which presets")
    parser.add_argument("--data-root", help="folder of the data sets")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    results = []
    for preset in options.presets:
        found = {1: [], 2: []}
        for _ in range(options.rounds):
            for processes, rounds in found.items():
                rounds.append(train(preset, processes, options.steps, options.data_root))
        medians = {
            str(processes): {clock: statistics.median(r[clock] for r in rounds) for clock in ("wall", "processor")}
            for processes, rounds in found.items()
        }
        gain = medians["1"]["wall"] / medians["2"]["wall"]
        # Were both cores free, and did no process wait for the other.
        bound = 2 * medians["1"]["processor"] / medians["2"]["processor"]
        load = os.getloadavg()[0]
        results.append({"preset": preset, "seconds": medians, "gain": gain, "bound": bound, "load": load})
        print(f"{preset}: {gain:.2f} times as fast by the wall, at most {bound:.2f} by processor time; load {load:.0f}")
    save(options.output, results)


if __name__ == "__main__":
    main()
