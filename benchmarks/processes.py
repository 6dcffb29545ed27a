"""Images a second of one process and of two: `python benchmarks/processes.py --output FILE`.

A real training, `torchrun -m orthocond train`, with one and with two processes of one thread. The batch is that of the
preset, divided among them. Pinned processes keep to a core of their own, by taskset; so do those whose plain batch
normalizations see their own images only. Two trainings apart, of half the batch each, at the same time, show what the
machine itself allows: they send no messages and never wait. All take turns. Two clocks: that on the wall, which counts
what other programs of the machine take, and the time of the processors, which does not count waiting.
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

from orthocond.lab.presets import preset

WAYS = {"1": (1, 1), "2": (1, 2), "pinned": (1, 2), "own": (1, 2), "apart": (2, 1)}
"""How many trainings at the same time, and how many processes each has."""
PINNED = ["--no-python", "sh", "-c", 'exec taskset -c $LOCAL_RANK "$@"', "sh", sys.executable]


def start(options, name, scale, way, batch, folder):
    processes, pinned = WAYS[way][1], way in ("pinned", "own")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += PINNED if pinned else []
    command += ["-m", "orthocond", "train", name, "--scale", scale, "--schedule.steps", str(options.steps)]
    command += ["--schedule.batch-size", str(batch), "--runs", folder, "--log-every", str(options.log_every)]
    command += ["--data.held-out", "256", "--quiet", "--no-evaluate", "--no-report"]
    command += ["--data-root", options.data_root] if options.data_root else []
    command += ["--model.no-synchronize"] if way == "own" else []
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def train(options, name, scale, way):
    """Median seconds of a step by both clocks; that of the processors is the sum over all processes."""
    trainings, processes = WAYS[way]
    batch = preset(name, scale).schedule.batch_size // trainings
    with tempfile.TemporaryDirectory() as root:
        folders = [Path(root, str(number)) for number in range(trainings)]
        for started in [start(options, name, scale, way, batch, str(folder)) for folder in folders]:
            said = started.communicate()[1]
            if started.returncode:
                raise SystemExit(said)
        lines = [[json.loads(x) for file in folder.rglob("times.jsonl") for x in file.open()] for folder in folders]
    timed = [[line for line in found if "step_seconds" in line][1:] for found in lines]  # the first steps allocate
    walls, cpus = (
        [statistics.median(line[clock] for line in found) for found in timed]
        for clock in ("step_seconds", "step_cpu_seconds")
    )
    return {"wall": statistics.fmean(walls), "processor": processes * sum(cpus)}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--presets", nargs="+", default=["dbn-sprites-small:laptop"], help="which, each as NAME:SCALE")
    parser.add_argument("--data-root", help="folder of the data sets")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--log-every", type=int, default=10, help="steps of which the mean time is taken")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    results = []
    for name, scale in (words.split(":") for words in options.presets):
        rounds = [{way: train(options, name, scale, way) for way in WAYS} for _ in range(options.rounds)]
        medians = {
            way: {clock: statistics.median(found[way][clock] for found in rounds) for clock in ("wall", "processor")}
            for way in WAYS
        }
        gains = {way: medians["1"]["wall"] / medians[way]["wall"] for way in WAYS}
        load = os.getloadavg()[0]
        results.append({"preset": f"{name}, {scale}", "seconds": medians, "gains": gains, "load": load})
        print(
            f"{name}, {scale}: " + ", ".join(f"{way} {gain:.2f}" for way, gain in gains.items()) + f"; load {load:.0f}"
        )
    save(options.output, results)


if __name__ == "__main__":
    main()
