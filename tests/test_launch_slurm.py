"""Jobs of a cluster: what is submitted, watched, submitted again, left and told; here without a cluster."""

import json
import os
import re
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from lab_helpers import tiny

from orthocond.cli import main
from orthocond.cli import table as command
from orthocond.lab import catalog
from orthocond.lab.config import from_json
from orthocond.lab.launch import Cluster, Ending, Local, Slurm, launch
from orthocond.lab.launch import slurm as module
from orthocond.lab.launch.cluster import minutes
from orthocond.lab.launch.files import LOG, PROGRESS, header, read_job, write_code
from orthocond.lab.launch.overview import follow, standings
from orthocond.lab.progress import Progress
from orthocond.lab.runs import Run
from orthocond.lab.runs.finding import find_runs, open_or_create

CONFIGS = [tiny("svd"), tiny("nog"), tiny("svd", seed=1)]


class Cloud:
    """A Slurm that keeps what it is told; a job ends when the test says how."""

    def __init__(self):
        self.arrays, self.parameters, self.queue, self.cancelled = [], [], {}, []

    def executor(self, folder, max_num_timeout):
        cloud = self

        class Executor:
            def update_parameters(self, **parameters):
                cloud.parameters.append(parameters)

            def batch(self):
                cloud.arrays.append([])
                return open(os.devnull)  # a context manager that does nothing

            def submit(self, training):
                number = f"{len(cloud.arrays)}_{len(cloud.arrays[-1])}"
                cloud.arrays[-1].append(training)
                cloud.queue[number] = "PENDING"
                return SimpleNamespace(job_id=number, paths=SimpleNamespace(stderr=folder / f"{number}_0_log.err"))

        return Executor()

    def states(self, ids):
        return {job: (self.queue[job], "Resources") for job in ids if job in self.queue}


@pytest.fixture
def cloud(monkeypatch):
    cloud = Cloud()
    monkeypatch.setattr("submitit.SlurmExecutor", cloud.executor)
    monkeypatch.setattr(module.shutil, "which", lambda name: name)
    monkeypatch.setattr(module, "states", cloud.states)
    monkeypatch.setattr("orthocond.lab.launch.overview.states", cloud.states)
    monkeypatch.setattr(module, "cancel", lambda ids: cloud.cancelled.extend(ids))
    return cloud


def _finish(run, state="finished", step=10, message=""):
    again = Run.open(run.path)
    again.set_status(state, step, message)
    if state == "finished":
        (run.path / "evaluation.json").write_text(json.dumps({"step": step}))


def _runs(root):
    return [open_or_create(root, config) for config in CONFIGS]


def _slurm(**settings):
    return Slurm(settings.pop("cluster", None), ask_every=0, **settings)


def _until_judged(executor):
    """Slurm says twice that a job has ended before that is believed."""
    return [*executor.ended(), *executor.ended()]


# Submitting


def test_what_is_missing_is_submitted_in_arrays(tmp_path, cloud):
    executor = _slurm(cluster=Cluster("gpu", time="1-00", gpus=1, array_size=2, options={"account": "lab"}), jobs=4)
    runs = _runs(tmp_path)
    (runs[0].path / PROGRESS).write_text("stale\n")
    executor.submit(runs, None)
    assert [len(array) for array in cloud.arrays] == [2, 1]
    assert [read_job(run.path).id for run in runs] == ["1_0", "1_1", "2_0"]
    asked = cloud.parameters[0]
    assert asked["partition"] == "gpu"
    assert (asked["time"], asked["gpus_per_node"], asked["array_parallelism"]) == (1440, 1, 2)
    assert asked["additional_parameters"] == {"requeue": True, "account": "lab"}
    assert not (runs[0].path / PROGRESS).exists(), "nobody takes the reports of an earlier attempt for this one's"
    assert executor.news() == ["3 jobs submitted to Slurm, 0 were there."]


def test_the_parameters_are_those_of_sbatch(tmp_path, monkeypatch):
    """What submitit makes of them, read by the names of Slurm's manual."""
    from submitit.slurm.slurm import _make_sbatch_string

    cluster = Cluster("gpu", "2-00:00:00", 2, 3, 8, "32G", setup=("module load cuda",), options={"qos": "low"})
    text = _make_sbatch_string("train", tmp_path, map_count=9, **cluster.parameters(4))
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    expected = {"partition=gpu", "time=2880", "gpus-per-node=2", "nodes=3", "ntasks-per-node=1", "cpus-per-task=8"}
    assert expected | {"mem=32G", "array=0-8%4", "qos=low", "requeue", "signal=USR2@120"} <= set(lines)
    assert text.index("module load cuda") < text.index("srun")
    assert "--cpus-per-task=8" in text[text.index("srun") :]


def test_a_training_that_has_a_job_is_watched_and_not_submitted(tmp_path, cloud):
    runs = _runs(tmp_path)
    _slurm().submit(runs[:2], None)
    cloud.queue["1_1"] = "FAILED"
    executor = _slurm()
    executor.submit(runs, None)
    assert [read_job(run.path).id for run in runs] == ["1_0", "2_0", "2_1"]
    assert executor.news() == ["2 jobs submitted to Slurm, 1 were there."]


def test_this_machine_leaves_trainings_to_the_cluster_that_has_them(tmp_path, cloud, monkeypatch):
    runs = _runs(tmp_path)
    _slurm().submit(runs[:1], None)
    with pytest.raises(RuntimeError, match=r"seed0 has the job 1_0 on Slurm.*cancel it with --cancel"):
        Local().submit(runs, None)
    monkeypatch.setattr(module, "states", lambda ids: None)  # a machine without Slurm
    Local().submit(runs, None)


# Endings


def test_endings_come_from_the_run_folder(tmp_path, cloud):
    runs, executor = _runs(tmp_path), _slurm()
    executor.submit(runs, None)
    assert _until_judged(executor) == []
    _finish(runs[0])
    _finish(runs[1], "diverged", 7, "The loss is nan at step 7")
    (runs[2].path / LOG).write_bytes(header("job 1_2") + b"cifar10 is missing\n")
    write_code(runs[2].path, 1)
    cloud.queue = dict.fromkeys(cloud.queue, "COMPLETED")
    assert executor.ended() == [], "files may be seen later than the queue"
    endings = {ending.run.path: ending for ending in executor.ended()}
    assert [endings[run.path].code for run in runs] == [0, 3, 1]
    assert endings[runs[1].path].text == "The loss is nan at step 7"
    assert endings[runs[2].path].text == "cifar10 is missing"
    assert endings[runs[2].path].log == runs[2].path / LOG


@pytest.mark.parametrize("state", ["NODE_FAIL", "PREEMPTED", "TIMEOUT", "COMPLETED", None])
def test_a_job_that_is_lost_is_submitted_again(state, tmp_path, cloud):
    (run, *_), executor = _runs(tmp_path), _slurm()
    executor.submit([run], None)
    executor.news()
    write_code(run.path, 143)  # it has saved at SIGTERM
    if state is None:
        cloud.queue.clear()  # Slurm forgets jobs after some minutes
    else:
        cloud.queue["1_0"] = state
    assert _until_judged(executor) == []
    assert read_job(run.path).id == "2_0"
    name = (state or "GONE").lower().replace("_", " ")
    assert executor.news() == [
        f"{run.path.name}: job 1_0 has ended ({name}), saved at step 0; submitted again as job 2_0."
    ]


@pytest.mark.parametrize(
    ("state", "code", "words"), [("CANCELLED", 130, "cancelled"), ("OUT_OF_MEMORY", 1, "--memory")]
)
def test_a_job_that_was_cancelled_or_too_large_is_not_submitted_again(state, code, words, tmp_path, cloud):
    (run, *_), executor = _runs(tmp_path), _slurm()
    executor.submit([run], None)
    cloud.queue["1_0"] = state
    ((ending),) = _until_judged(executor)
    assert ending.code == code
    assert words in ending.text
    assert ending.log.name == "1_0_0_log.err", "the training never began: Slurm's own log tells why"


def test_a_training_that_comes_no_further_ends_with_its_log(tmp_path, cloud):
    (run, *_), executor = _runs(tmp_path), _slurm()
    executor.submit([run], None)
    (run.path / LOG).write_bytes(header("job 1_0") + b"Bus error\n")
    for number in ("1_0", "2_0"):
        cloud.queue[number] = "NODE_FAIL"
        assert _until_judged(executor) == []
    Run.open(run.path).save({}, 5)  # progress: it counts anew
    cloud.queue["3_0"] = "NODE_FAIL"
    assert _until_judged(executor) == []
    for number in ("4_0", "5_0"):
        cloud.queue[number] = "NODE_FAIL"
        assert _until_judged(executor) == []
    cloud.queue["6_0"] = "NODE_FAIL"
    (ending,) = _until_judged(executor)
    assert ending.code == 1
    assert ending.text == "Bus error\n3 jobs have ended without a new checkpoint, the last one (6_0) as NODE_FAIL."
    assert ending.log == run.path / LOG


def test_a_cluster_that_does_not_answer_is_asked_again(tmp_path, cloud, monkeypatch):
    (run, *_), executor = _runs(tmp_path), _slurm()
    executor.submit([run], None)
    monkeypatch.setattr(module, "states", lambda ids: None)
    assert _until_judged(executor) == []
    assert len(cloud.arrays) == 1
    with pytest.raises(RuntimeError, match="Slurm does not answer"):
        _slurm().submit([run], None)


@pytest.mark.parametrize("choice", ["leave", "cancel"])
def test_ctrl_c_leaves_or_cancels(choice, tmp_path, cloud, monkeypatch):
    said = []
    monkeypatch.setattr(module.Slurm, "ended", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        launch(CONFIGS, tmp_path, executor=_slurm(on_interrupt=choice), say=said.append)
    assert cloud.cancelled == (["1_0", "1_1", "1_2"] if choice == "cancel" else [])
    assert said[-1].startswith("3 jobs cancelled" if choice == "cancel" else "3 jobs go on. `--status` shows them")


def test_launch_passes_on_reports_and_news(tmp_path, cloud, monkeypatch):
    seen, said = [], []
    runs = _runs(tmp_path)
    _finish(runs[1])
    looks = iter(range(100))

    def ended(self):
        if next(looks) == 0:
            (runs[2].path / PROGRESS).write_text(json.dumps(Progress(5, 10, {"loss": 1.0})._asdict()) + "\n")
            return []
        return [Ending(run, 0) for run in list(self._runs.values())]

    monkeypatch.setattr(module.Slurm, "ended", ended)
    endings = launch(CONFIGS, tmp_path, executor=_slurm(), progress=lambda *state: seen.append(state), say=said.append)
    assert [ending.code for ending in endings] == [0, 0, 0]
    assert seen == [(2, Progress(5, 10, {"loss": 1.0}))]
    assert said == ["2 jobs submitted to Slurm, 0 were there."]


def test_squeue_is_read(tmp_path, monkeypatch):
    def answers(text, code=0, errors=""):
        (tmp_path / "squeue").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\ncat <<END\n{text}END\n')
        with (tmp_path / "squeue").open("a") as file:
            file.write(f"echo '{errors}' >&2; exit {code}\n")
        (tmp_path / "squeue").chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    answers("12_3|PENDING|Priority\n12_4|RUNNING|None\n14|COMPLETED|None\n")
    assert module.states(["12_3", "14", "15"]) == {"12_3": ("PENDING", "Priority"), "14": ("COMPLETED", "None")}
    assert (tmp_path / "asked").read_text().split()[-1] == "--jobs=12,14,15"
    answers("", 1, "slurm_load_jobs error: Invalid job id specified")
    assert module.states(["99"]) == {}
    answers("", 1, "slurm_load_jobs error: Unable to contact slurm controller")
    assert module.states(["99"]) is None
    assert module.states([]) == {}
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert module.states(["99"]) is None


# Settings


@pytest.mark.parametrize(
    ("time", "expected"),
    [("5", 5), ("5:30", 6), ("1:00:00", 60), ("1-0", 1440), ("1-1:30", 1530), ("1-00:00:01", 1441), ("10:00", 10)],
)
def test_time_limits(time, expected):
    assert minutes(time) == expected


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"time": "a day"}, "time needs a limit as Slurm writes it.*'a day'"),
        ({"time": "0"}, "at least a second"),
        ({"gpu": 1}, "has no setting 'gpu'. Did you mean 'gpus'"),
        ({"nodes": 0}, "nodes needs at least 1; got 0"),
        ({"cpus": "eight"}, "cpus"),
        ({"memory": "lots"}, "memory needs .*got 'lots'"),
        ({"time": "1", "grace": 120}, "grace needs fewer seconds than the time limit has, 60; got 120"),
        ({"options": {"cpus_per_task": 3}}, "'cpus-per-task': that is the setting cpus"),
        ({"options": {"requeue": False}}, "'requeue', which is set"),
    ],
)
def test_settings_are_checked(values, words):
    with pytest.raises((TypeError, ValueError), match=words):
        from_json(Cluster, values)


def test_options_go_before_the_file(tmp_path, cloud, monkeypatch, capsys):
    made = {}
    monkeypatch.setattr(catalog, "make", lambda name, **settings: made.update(settings) or tmp_path)
    monkeypatch.setattr(catalog, "plan", lambda *_, **__: [])
    (tmp_path / "table.md").write_text("")
    file = tmp_path / "cluster.toml"
    file.write_text(
        'partition = "gpu"\ncpus = 4\nsetup = ["module load cuda"]\n[options]\naccount = "lab"\nqos = "low"\n'
    )
    words = ["--executor", "slurm", "--cluster", str(file), "--cpus", "8", "--option", "qos=high", "--option"]
    assert main(["table", "gcp", *words, "exclusive", "--jobs", "3", "--on-interrupt", "cancel"]) == 0
    executor = made["executor"]
    options = {"account": "lab", "qos": "high", "exclusive": True}
    assert executor._cluster == Cluster("gpu", cpus=8, setup=("module load cuda",), options=options)
    assert executor._jobs == 3
    assert executor._on_interrupt == "cancel"
    file.write_text("partitoin = 1\n")
    assert main(["table", "gcp", "--executor", "slurm", "--cluster", str(file)]) == 2
    assert "Did you mean 'partition'" in capsys.readouterr().err


def test_options_of_a_file_are_a_table(tmp_path, cloud, capsys):
    file = tmp_path / "cluster.toml"
    file.write_text('options = "account=lab"\n')
    for more in ([], ["--option", "qos=high"]):
        assert main(["table", "gcp", "--executor", "slurm", "--cluster", str(file), *more]) == 2
        assert re.search(rf"{file}: .*options", capsys.readouterr().err)


@pytest.mark.parametrize("words", [["--gpus", "1"], ["--on-interrupt", "cancel"], ["--option", "account=lab"]])
def test_options_of_a_cluster_need_one(capsys, words):
    assert main(["table", "gcp", *words]) == 2
    assert f"{words[0]} is for a cluster: add --executor slurm" in capsys.readouterr().err


def test_without_slurm_it_says_so(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["table", "gcp", "--executor", "slurm"]) == 1
    assert "There is no Slurm here (sbatch)" in capsys.readouterr().err


def test_what_sbatch_refuses_is_said_once_with_what_to_check(tmp_path, cloud, monkeypatch, capsys):
    from submitit.core.utils import FailedJobError

    class Executor:
        def update_parameters(self, **_):
            pass

        @contextmanager
        def batch(self):  # as submitit does at the end
            yield
            print("sbatch: error: invalid partition specified: gpus", file=sys.stderr)
            raise FailedJobError("sbatch: error: invalid partition specified: gpus\n")

        def submit(self, _):
            return SimpleNamespace()

    there = open_or_create(tmp_path, CONFIGS[0])
    monkeypatch.setattr("submitit.SlurmExecutor", lambda *_, **__: Executor())
    words = "Slurm rejected the jobs. sbatch says: .*invalid partition specified: gpus\nCheck the options"
    with pytest.raises(RuntimeError, match=words):
        launch(CONFIGS, tmp_path, executor=_slurm())
    assert capsys.readouterr().err == ""  # the error says it
    assert [run.path for run, _ in find_runs(tmp_path)] == [there.path]  # those of this command do not stay and wait


# Status


def test_where_trainings_stand(tmp_path, cloud):
    runs = _runs(tmp_path)
    _slurm().submit(runs[:2], None)
    cloud.queue["1_1"] = "RUNNING"
    Run.open(runs[1].path).set_status("running", 0)
    (runs[1].path / PROGRESS).write_text(json.dumps(Progress(7, 10, {})._asdict()) + "\n")
    _finish(runs[2])
    other = tiny("olr")
    first, second, third, fourth, fifth = standings([*CONFIGS, other, tiny("ow")], tmp_path, kept={other})
    assert (first.state, first.job, first.note) == ("waiting", "1_0", "pending: Resources")
    assert (second.state, second.step, second.steps) == ("running", 7, 10)
    assert (third.state, third.step, third.steps) == ("finished", 10, 10)
    assert (fourth.state, fifth.state) == ("kept", "missing")
    cloud.queue = {"1_0": "NODE_FAIL"}
    _finish(runs[1], "failed", 7, "OSError: disk full")
    (runs[1].path / LOG).write_text("disk full")
    (runs[2].path / "status.json").write_text("{")
    first, second, third = standings(CONFIGS, tmp_path)
    assert (third.state, third.run) == ("failed", runs[2].path)
    assert f"{runs[2].path / 'status.json'} is damaged" in third.note
    assert (first.state, first.note) == ("lost", "node_fail; the same command goes on")
    assert (second.state, second.note) == ("failed", f"OSError: disk full; log: {runs[1].path / LOG}")


def test_status_and_cancel_of_a_table(tmp_path, cloud, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    _slurm().submit(_runs(tmp_path), None)
    monkeypatch.setattr(catalog, "status", lambda name, runs, **_: standings(CONFIGS, runs))
    monkeypatch.setattr(catalog, "make", lambda *_, **__: pytest.fail("nothing is trained"))
    words = ["table", "gcp", "--runs", str(tmp_path)]
    assert main([*words, "--status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:4] == ["dbn-sprites-small-nog-seed0", "waiting", "0", "1_1"] for line in lines)
    assert lines[-1] == "3 waiting"
    assert main([*words, "--cancel"]) == 0
    assert cloud.cancelled == ["1_0", "1_1", "1_2"]
    assert capsys.readouterr().out == "3 jobs cancelled; each saves its state.\n"
    cloud.queue.clear()
    assert main([*words, "--cancel"]) == 0
    assert capsys.readouterr().out == "No training of this table has a job.\n"


def test_a_display_is_taken_up_again_and_left(tmp_path, cloud, monkeypatch, capsys):
    (run, *_) = _runs(tmp_path)
    _slurm().submit([run], None)
    (run.path / PROGRESS).write_text(json.dumps(Progress(7, 10, {})._asdict()) + "\n")
    seen = []

    def watch(place, state):
        seen.append((place, state.step))
        cloud.queue.clear()
        _finish(run)

    monkeypatch.setattr("orthocond.lab.launch.overview._PAUSE", 0)
    ended = follow(lambda: standings(CONFIGS[:1], tmp_path), watch)
    assert seen == [(0, 7)]
    assert [standing.state for standing in ended] == ["finished"]

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("orthocond.lab.display.is_plain", lambda *_: False)
    monkeypatch.setattr("orthocond.lab.launch.overview.follow", interrupt)
    cloud.queue["1_0"] = "PENDING"
    (run.path / "evaluation.json").unlink()
    assert command._show_status(lambda: standings(CONFIGS[:1], tmp_path), quiet=False) == 0
    assert "Ctrl-C leaves this display" in capsys.readouterr().out
