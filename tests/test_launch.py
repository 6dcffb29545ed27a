"""Trainings in processes of their own: started, followed, stopped, killed; the files they leave."""

import json
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import processes
import pytest
from lab_helpers import TINY, tiny

from orthocond._process import keep_freed_memory
from orthocond.lab import experiments
from orthocond.lab.launch import Cluster, Local, launch, worker
from orthocond.lab.launch import slurm as module
from orthocond.lab.launch.files import LOG, PROGRESS, Follower, Job, header, read_code, read_job, said, write_code
from orthocond.lab.progress import Progress
from orthocond.lab.runs.finding import open_or_create

# Memory and threads


FAULTS = """
import resource, torch
from orthocond._process import keep_freed_memory
keep_freed_memory()
for step in range(9):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(2**22) for _ in range(4)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults_of_a_step(environment):
    """How many pages a process asks of the system for 64 MB that it had before."""
    done = subprocess.run([sys.executable, "-c", FAULTS], env=environment, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such setting")
def test_a_process_keeps_its_memory_unless_the_environment_says_otherwise():
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    assert faults_of_a_step(plain) < 100
    assert faults_of_a_step(plain | {"MALLOC_MMAP_THRESHOLD_": "1000000"}) > 10_000


def test_other_c_libraries_are_told_nothing(monkeypatch):
    monkeypatch.setattr("platform.libc_ver", lambda: ("", ""))
    monkeypatch.setattr("ctypes.CDLL", lambda _: pytest.fail("it has no mallopt"))
    keep_freed_memory()


@pytest.mark.parametrize(("asked", "threads"), [("1", 1), ("", 3), ("4,2", 3)])
def test_the_cores_are_divided_unless_the_environment_says_how_many_threads(tmp_path, monkeypatch, asked, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    executor = Local(2)
    executor.submit([open_or_create(tmp_path, tiny(method)) for method in ("svd", "nog")], None)
    assert executor._threads == threads


# Files


def test_a_follower_reads_whole_lines_once_and_notices_a_new_attempt(tmp_path):
    def line(step):
        return json.dumps(Progress(step, 9, {})._asdict()).encode() + b"\n"

    file, follower = tmp_path / PROGRESS, Follower(tmp_path)
    assert follower.read() == []
    file.write_bytes(line(1) + b"a library prints\n" + line(2)[:9])
    assert [state.step for state in follower.read()] == [1]
    file.write_bytes(line(1) + b"a library prints\n" + line(2))
    assert [state.step for state in follower.read()] == [2]
    assert follower.read() == []
    other = tmp_path / "new"
    other.write_bytes(line(1) + line(2) + line(3) + line(4))  # longer than what was read before
    other.replace(file)
    assert [state.step for state in follower.read()] == [1, 2, 3, 4]
    assert [state.step for state in Follower(tmp_path, from_end=True).read()] == [4]


def test_a_log_has_a_part_for_each_attempt(tmp_path):
    log = tmp_path / LOG
    assert said(log) == ""
    log.write_bytes(header("job 1") + b"first\n" + header("job 2") + b"second\nthird\n")
    assert said(log) == "second\nthird"
    assert log.read_text().startswith("=== job 1 started 2")


def test_the_exit_code_is_the_last_report(tmp_path):
    assert read_code(tmp_path) is None
    (tmp_path / PROGRESS).write_text(json.dumps(Progress(5, 9, {})._asdict()) + "\n")
    assert read_code(tmp_path) is None
    write_code(tmp_path, 143)
    assert read_code(tmp_path) == 143
    assert [state.step for state in Follower(tmp_path).read()] == [5]


# Processes


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for a process in /proc")
def test_a_job_saves_when_it_is_told_and_goes_on_bit_for_bit(tmp_path):
    """The protocol of submitit, with its executor for one machine: a signal, `checkpoint`, the same job again."""
    import submitit

    config = tiny("nog", schedule=replace(TINY.schedule, epochs=20, milestones=()))
    whole, run = open_or_create(tmp_path / "whole", config), open_or_create(tmp_path / "runs", config)
    assert experiments.train(config, whole) == 0
    executor = submitit.LocalExecutor(tmp_path / "jobs")
    executor.update_parameters(timeout_min=10)
    job = executor.submit(module.JobOfTraining(run.path, None, Cluster()))
    follower, told = Follower(run.path), False
    while not told:
        told = any(state.step >= 5 for state in follower.read())
        assert job.state == "RUNNING"
        time.sleep(0.02)
    children = Path(f"/proc/{job.job_id}/task/{job.job_id}/children")  # of the process that submitit starts
    os.kill(int(children.read_text()), signal.SIGUSR2)
    assert job.result() == 0, job.stderr()
    assert "Resumed after step" in (run.path / "log.txt").read_text()
    assert (run.path / LOG).read_text().count("=== job") == 2
    for name in ("metrics.jsonl", "evaluation.json"):
        assert (run.path / name).read_bytes() == (whole.path / name).read_bytes()


def test_a_job_with_several_processes_is_torchrun_on_each_machine():
    job = SimpleNamespace(num_nodes=2, node=1, hostnames=["a", "b"], raw_job_id="4007")
    head = module.JobOfTraining("run", None, Cluster(gpus=4, nodes=2))._head(job)
    assert head[1:3] == ["-m", "torch.distributed.run"]
    assert " ".join(head[3:]) == "--nnodes 2 --node-rank 1 --nproc-per-node 4 --master-addr a --master-port 29507"
    single = SimpleNamespace(num_nodes=1, node=0, hostnames=["a"], raw_job_id="7")
    assert module.JobOfTraining("run", None, Cluster(gpus=1))._head(single) == []


@pytest.mark.slow
def test_processes_of_torchrun_train_together_and_the_first_evaluates(tmp_path):
    run = open_or_create(tmp_path, tiny("svd", schedule=replace(TINY.schedule, epochs=1)))
    head = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    assert worker.start(run.path, None, 1, head=head).wait() == 0, said(run.path / LOG)
    assert len(run.load().state["rng"]["ranks"]) == 2
    assert json.loads((run.path / "evaluation.json").read_text())["step"] == run.status.step
    assert [state.step for state in Follower(run.path).read() if not state.stage][-1] == run.status.step


@pytest.mark.parametrize(("processes", "cleared"), [("1", True), ("2", False)])
def test_one_of_several_processes_leaves_without_clearing_up(processes, cleared):
    """What aborts at exit comes too late there; output and exit code are kept."""
    script = "import atexit; atexit.register(print, 'cleared'); print('done')"
    script += "; from orthocond._process import leave; leave(3)"
    environment = os.environ | {"WORLD_SIZE": processes}
    found = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 3
    assert found.stdout.split() == ["done", "cleared"][: 1 + cleared]


def test_a_process_that_is_killed_is_told(tmp_path):
    config = tiny("svd", schedule=replace(TINY.schedule, epochs=1000))
    executor = Local(1)
    killed = []

    def kill(place, state):
        if not killed:
            killed.append(executor._running[0][1].pid)
            os.kill(killed[0], signal.SIGKILL)

    (ending,) = launch([config], tmp_path, executor=executor, progress=kill)
    assert ending.code == -signal.SIGKILL
    assert ending.text.endswith("Killed by SIGKILL")
    assert ending.log == ending.run.path / LOG


def test_an_error_of_the_one_who_watches_leaves_no_process_behind(tmp_path):
    executor = Local(1)

    def fail(place, state):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        launch([tiny("svd", schedule=replace(TINY.schedule, epochs=1000))], tmp_path, executor=executor, progress=fail)
    assert [process.poll() for _, process in executor._running] == [130]


def _printing_training(errors):
    with errors.open("wb") as file:
        os.dup2(file.fileno(), 2)
    worker.train = lambda *_, **options: os.system("echo hello")
    worker.read_config = lambda values: values
    worker.Run.open = lambda path: worker.Run(path, {})
    return worker.main(["run"])


def test_what_libraries_print_is_not_taken_for_a_report(tmp_path):
    process = processes.start(_printing_training, tmp_path / "errors", output=tmp_path / "reports")
    process.join()
    assert process.exitcode == 0
    assert ((tmp_path / "reports").read_text(), (tmp_path / "errors").read_text()) == ("", "hello\n")


def test_jobs_are_kept_whole(tmp_path):
    Job("12_3", "a.err", 5, 1).write(tmp_path)
    assert read_job(tmp_path) == Job("12_3", "a.err", 5, 1)
    (tmp_path / "job.json").write_text('{"id": ')
    assert read_job(tmp_path) is None
