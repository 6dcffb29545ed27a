"""Seconds until something happens: imports and commands: `python benchmarks/start.py --output FILE`.

Each is a process of its own, they take turns, and the time is that of the processor. No command here imports torch.
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile

from common import arguments, save

PROGRAMS = {
    "python": [],
    "import torch": ["-c", "import torch"],
    "import torch, orthocond": ["-c", "import torch, orthocond"],
    "import torch; from orthocond import *": ["-c", "import torch; from orthocond import *"],
    "orthocond --help": ["-m", "orthocond", "--help"],
    "orthocond train --help": ["-m", "orthocond", "train", "--help"],
    "orthocond list": ["-m", "orthocond", "list"],
    "orthocond --install-completion": ["-m", "orthocond", "--install-completion"],
}


def seconds(options, home):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"HOME": home, "SHELL": "/bin/bash", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *(options or ["-c", ""])], check=True, env=environment, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main():
    rounds = max(5, round(arguments(__doc__).seconds))
    times = {name: [] for name in PROGRAMS}
    with tempfile.TemporaryDirectory() as home:
        for _ in range(rounds):
            for name, options in PROGRAMS.items():
                times[name].append(seconds(options, home))
    above = [a - b for a, b in zip(times["import torch; from orthocond import *"], times["import torch"], strict=True)]
    print(f"all names of orthocond above torch: {statistics.median(above):.3f} s")
    results = {name: {"median": statistics.median(found), "least": min(found)} for name, found in times.items()}
    for name, found in results.items():
        print(f"  {name:40s} {found['median']:6.3f} s, at least {found['least']:.3f} s")
    save(arguments(__doc__).output, results)


if __name__ == "__main__":
    main()
