"""Tables on a real Slurm, which is started for it: jobs that are left, requeued and killed give the same bytes."""

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from lab_helpers import TINY, tiny
from slurm import Slurm as Daemons
from slurm import why_not

from orthocond.lab import catalog
from orthocond.lab.classification.config import Method
from orthocond.lab.launch import Cluster, Slurm, launch
from orthocond.lab.launch.files import read_job
from orthocond.lab.runs.finding import find_runs
from orthocond.lab.tables.comparison import Comparison, Experiment, Fact, Measure

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(bool(why_not()), reason=why_not())]
DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture(scope="module")
def daemons(tmp_path_factory):
    with Daemons(tmp_path_factory.mktemp("s")) as daemons:
        yield daemons


@pytest.fixture(autouse=True)
def _small_table(monkeypatch):
    """Four trainings of some seconds, two at a time, a thread each."""
    config = replace(TINY, preset="tiny", schedule=replace(TINY.schedule, epochs=60, milestones=()), save_every=50)
    experiment = Experiment("tiny", "tiny", {"tiny": {"laptop": config}})
    table = Comparison(
        *("tiny", "Tiny", "A test.", (experiment,)),
        rows=(Method("svd"), Method("nog")),
        measures=(Measure("error", "Error", "error"),),
        facts=(Fact("rank", "Rank"),),
    )
    monkeypatch.setitem(catalog.TABLES, "tiny", table)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})


def _slurm(**settings):
    return Slurm(Cluster(time="60"), jobs=2, ask_every=0.5, **settings)


def _make(folder, **settings):
    places = {"runs": folder / "runs", "out": folder / "out"}
    return catalog.make("tiny", seeds=2, **places, **settings)


def _bytes(folder):
    found = {}
    for run, config in find_runs(folder / "runs"):
        for name in ("config.json", "metrics.jsonl", "evaluation.json"):
            found[config.method.name, config.seed, name] = (run.path / name).read_bytes()
    return found | {path.name: path.read_bytes() for path in (folder / "out" / "tiny").iterdir()}


def _processes(run):
    """The processes that train a run."""
    words = f"orthocond.lab.launch\0{run.resolve()}".encode()
    return [int(p.parent.name) for p in Path("/proc").glob("[0-9]*/cmdline") if words in _content(p)]


def _content(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.timeout(1500)
def test_jobs_that_are_left_requeued_and_killed_make_the_same_table(tmp_path, daemons):
    local, remote = tmp_path / "local", tmp_path / "remote"
    _make(local, jobs=2)

    def leave(place, state):
        raise KeyboardInterrupt

    said = []
    with pytest.raises(KeyboardInterrupt):
        _make(remote, executor=_slurm(), progress=leave, say=said.append)
    assert said[0] == "4 jobs submitted to Slurm, 0 were there."
    assert said[1] == "4 jobs go on. `--status` shows them, `--cancel` cancels them."
    shown = catalog.status("tiny", seeds=2, runs=remote / "runs", out=remote / "out")
    assert {standing.state for standing in shown} == {"running", "waiting"}
    assert len({standing.job for standing in shown}) == 4

    paths = [standing.run for standing in shown]
    acts = {  # once each, in the middle of a training
        0: lambda path: daemons.ask("scontrol", "requeue", read_job(path).id),
        1: lambda path: [os.kill(number, signal.SIGKILL) for number in _processes(path)],
        2: lambda path: daemons.ask("scancel", "--signal=USR2", read_job(path).id),  # as before the time limit
    }
    begun = []

    def disturb(place, state):
        begun.append((place, state.step))
        if not state.stage and 20 <= state.step < 250 and place in acts:
            acts.pop(place)(paths[place])

    said.clear()
    _make(remote, executor=_slurm(), progress=disturb, say=said.append)
    assert not acts, "no training was disturbed in its middle"
    assert said[0] == "0 jobs submitted to Slurm, 4 were there."
    assert len(said) == 2, said
    again = rf"{re.escape(paths[1].name)}: job \d+_1 has ended \(\w+\), saved at step \d+; submitted again as job \d+"
    assert re.match(again, said[1])
    for place, path in enumerate(paths):
        assert ("Resumed after step" in (path / "log.txt").read_text()) == (place < 3), path
    assert _bytes(remote) == _bytes(local)


@pytest.mark.timeout(600)
def test_ctrl_c_cancels_if_asked_and_a_failure_names_its_log(tmp_path, daemons, monkeypatch):
    def interrupt(place, state):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _make(tmp_path, executor=_slurm(on_interrupt="cancel"), progress=interrupt)
    daemons.wait(lambda: not daemons.ask("squeue", "--noheader").strip(), 90)
    states = {run.status.state for run, _ in find_runs(tmp_path / "runs")}
    assert states == {"stopped", "created"}, "the one that ran has saved"

    config = replace(tiny("svd"), data=replace(TINY.data, source="cifar10"))
    (ending,) = launch([config], tmp_path / "failing", executor=_slurm(), data_root=str(tmp_path))
    assert ending.code == 1
    assert "cifar10 needs cifar-10-batches-py" in ending.text
    assert ending.log.read_text().count("cifar10 needs") == 1


@pytest.mark.timeout(600)
def test_a_training_on_several_machines_by_the_script_of_the_docs(tmp_path, daemons):
    """Two tasks stand for two machines: each has a torchrun of its own."""
    script = re.search(r"```bash\n(#!/bin/bash\n.*?)```", (DOCS / "cluster.md").read_text(), re.DOTALL)[1]
    words = "train dbn-sprites-small --schedule.steps 6 --data.limit 96 --data.held-out 96 --schedule.batch-size 16"
    script, count = re.subn(r"train [\w-]+ --scale paper --method [\w+]+", words, script)
    assert count == 1
    script = re.sub(r" --gpus-per-node=\d+", "", script)
    script = script.replace("torchrun", f"{sys.executable} -m torch.distributed.run")
    (tmp_path / "job.sh").write_text(script)
    options = ["--nodes=1", "--ntasks=2", "--ntasks-per-node=2", "--cpus-per-task=1", f"--chdir={tmp_path}", "--wait"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = ["sbatch", *options, str(tmp_path / "job.sh")]
    answer = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    log = "\n".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert answer.returncode == 0, log + answer.stderr
    ((run, _),) = find_runs(tmp_path / "runs")
    assert run.status.state == "finished"
    assert len(run.load().state["rng"]["ranks"]) == 2, "two processes"
