"""Random damage to every kind of file that the lab reads: an error of ours that names the file, or the right content.

pytest starts this file as a program, so that a crash, a hang or a flood of memory is seen, and ends only that. It takes
a minute, behind the marker ``slow``: ``python -m pytest -m slow tests/test_fuzz_files.py -s``. Another seed tries other
damage: ``python tests/test_fuzz_files.py FOLDER SECONDS SEED``.
"""

import faulthandler
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # as a program

from data_files import pack, write_cifar10, write_cifar100, write_idx, write_tree

from orthocond.lab.data import load
from orthocond.lab.experiments import preset
from orthocond.lab.runs import Run
from orthocond.lab.runs.finding import find_runs
from orthocond.lab.tables import records

SECONDS = 60
LONGEST = 20  # seconds of one case
MEMORY = 12 * 2**30


def damage(data, rng):
    """Another content, made from this one by one or a few changes."""
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        place, other = sorted(rng.randrange(len(data) + 1) for _ in range(2))
        match rng.randrange(8):
            case 0:
                data[place : place + 1] = bytes([rng.randrange(256)])
            case 1 if place < len(data):
                data[place] ^= 1 << rng.randrange(8)
            case 2:
                del data[place:]
            case 3:
                del data[place : place + rng.randrange(1, 20)]
            case 4:
                data[place:place] = rng.randbytes(rng.randrange(1, 20))
            case 5:
                data[place : place + 4] = rng.choice((b"\xff\xff\xff\x7f", b"\xff" * 4, b"\0" * 4, b"\0\0\0\x80"))
            case 6:
                data[place:place] = data[place:other][:1000]
            case 7:
                length = min(other - place, 600)
                data[place : place + length] = bytes(length)
        if not data:
            break
    return bytes(data)


def images_of(path):
    data = load(path)
    return len(data), data.labels.tolist(), [int(image.sum()) for image, _ in data]


def shape_of(path):
    """What can be checked of files without checksums: that all of it is there."""
    data = load(path)
    return len(data), tuple(data.images.shape[1:])


def run_of(path):
    """The state, which must be the right one, and how many lines of metrics there are."""
    run = Run.open(path)
    found = run.load()
    return found.step, {k: v.tolist() for k, v in found.state.items()}


def lines_of(path):
    return len(Run.open(path).metrics()), len(Run.open(path).times())


def status_of(path):
    return Run.open(path).status.step


def record_of(path):
    (found,) = [(run.path.name, len(records.read_run(run, config).metrics)) for run, config in find_runs(path.parent)]
    return found


def kept_of(path):
    return [(record.config.seed, record.metrics) for record in records.read_kept(path)]


def make(root):
    """The kinds: the file to damage, the path to read, and the reader."""
    write_cifar10(root / "cifar-10-batches-py", per_file=2)
    write_cifar100(root / "cifar-100-python")
    tree = write_tree(root / "tree", [f"{c}/{i}.png" for c in "ab" for i in range(3)], height=5, width=5)
    for name in ("images.zip", "images.tar", "images.tar.gz"):
        pack(tree, root / name)
    write_idx(root / "idx", compress=False, count=3)
    write_idx(root / "packed", compress=True, count=3)
    config = replace(preset("dbn-sprites-small"), seed=7)
    run = Run.create(root / "runs", "one", config)
    run.resume()
    for step in (1, 2):
        run.log(step, loss=0.5, rates=[1.0, float("inf")], finished=step == 2)
        run.save({"weight": torch.full((20,), float(step))}, step)
    run.set_status("finished", 2)
    lines = [{"step": 1, "finished": True}]
    records.keep([records.Record("one", replace(config, seed=seed), lines) for seed in (0, 1)], root)
    (kept,) = (root / "runs").glob("*.gz")
    (root / "kept" / "runs").mkdir(parents=True)
    shutil.move(kept, root / "kept" / "runs")
    (text,), (tensors,) = run.checkpoints.glob("*2.json"), run.checkpoints.glob("*2-*.safetensors")
    return {
        "pickle of CIFAR-10": (root / "cifar-10-batches-py" / "data_batch_2", root / "cifar-10-batches-py", shape_of),
        "pickle of CIFAR-100": (root / "cifar-100-python" / "train", root / "cifar-100-python", shape_of),
        "names of classes": (root / "cifar-100-python" / "meta", root / "cifar-100-python", shape_of),
        "zip": (root / "images.zip", root / "images.zip", images_of),
        "tar": (root / "images.tar", root / "images.tar", images_of),
        "tar.gz": (root / "images.tar.gz", root / "images.tar.gz", images_of),
        "picture": (tree / "a" / "1.png", tree, shape_of),
        "IDX": (root / "idx" / "train-images-idx3-ubyte", root / "idx", shape_of),
        "gzipped IDX": (root / "packed" / "train-images-idx3-ubyte.gz", root / "packed", shape_of),
        "JSON of a checkpoint": (text, run.path, run_of),
        "tensors of a checkpoint": (tensors, run.path, run_of),
        "lines of metrics": (run.path / "metrics.jsonl", run.path, lines_of),
        "status": (run.path / "status.json", run.path, status_of),
        "configuration": (run.path / "config.json", run.path, record_of),
        "kept copies": (root / "kept" / "runs" / kept.name, root / "kept", kept_of),
    }


# Where content has no checksum, a change of it can pass: then all of it must be there. These may lose their end too,
# which is what a kill leaves.
MAY_DIFFER = {"lines of metrics", "status"}


def attempt(kind, file, path, reader, expected, data):
    """What became of damaged content: ``refused``, ``as before``, ``the checkpoint before``; else an AssertionError."""
    file.write_bytes(data)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found, refused = reader(path), ""
        except (ValueError, OSError, RuntimeError) as error:
            found, refused = None, f"{type(error).__name__}: {error}"
    text = " ".join(str(w.message) for w in caught)
    if refused:
        assert any(name in refused + text for name in (file.name, path.name)), f"the file is not named: {refused}"
        return "refused"
    if "checkpoint" in kind and found != expected:
        assert found == (1, {"weight": [1.0] * 20}), f"another state: {found}"
        assert "Checkpoint 2 is damaged" in text, f"no warning: {text}"
        return "the checkpoint before"
    assert found == expected or kind in MAY_DIFFER, f"accepted: {found} instead of {expected}"
    return "as before" if found == expected else "changed content"


def main(root, seconds, seed):
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    rng, tried = random.Random(seed), Counter()
    kinds = make(root)
    expected = {kind: reader(path) for kind, (_, path, reader) in kinds.items()}
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for kind, (file, path, reader) in kinds.items():
            whole = file.read_bytes()
            data = damage(whole, rng)
            (root / "case").write_bytes(data)  # what to look at after a crash
            (root / "kind").write_text(kind)
            signal.alarm(LONGEST)
            try:
                tried[kind, attempt(kind, file, path, reader, expected[kind], data)] += 1
            except BaseException as error:
                print(f"{kind}: {type(error).__name__}: {error}; the content is in {root / 'case'}", flush=True)
                raise
            finally:
                signal.alarm(0)
                file.write_bytes(whole)
    for kind in kinds:
        print(f"{kind}:", ", ".join(f"{n} {what}" for (k, what), n in sorted(tried.items()) if k == kind))
    print(json.dumps(sum(tried.values())))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))


@pytest.mark.slow
@pytest.mark.timeout(5 * SECONDS)
def test_damaged_files(tmp_path):
    seed = int(os.environ.get("FUZZ_SEED", "0"))
    command = [sys.executable, __file__, str(tmp_path), str(SECONDS), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    print(f"{done.stdout}seed {seed}")
    kind = (tmp_path / "kind").read_text()
    assert done.returncode == 0, f"{kind} (exit code {done.returncode}): {done.stdout[-3000:]}{done.stderr[-3000:]}"
    assert int(done.stdout.splitlines()[-1]) > 300
