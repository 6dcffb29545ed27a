"""Trainings as jobs of Slurm, submitted through submitit.

What a run folder says is the truth: how far a training has come, and whether it is done. Slurm is asked only which
jobs wait and run (`squeue`, which every cluster has; accounting is not needed). So a watcher can leave and another can
go on, and a job that was lost in any way is submitted again and resumes.
"""

import io
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any, Literal

from orthocond.lab.experiments import is_evaluated
from orthocond.lab.launch.cluster import Cluster
from orthocond.lab.launch.executor import Ending
from orthocond.lab.launch.files import LOG, PROGRESS, Job, read_code, read_job, said, write_code
from orthocond.lab.launch.worker import start
from orthocond.lab.runs import Run
from orthocond.lab.runs.files import locked
from orthocond.lab.runs.finding import is_finished

ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
    *("OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
)
"""The states of a job that does not run any more."""
_FRUITLESS = 3  # jobs of a training that may end without a new checkpoint
_TIMEOUTS = 1000  # how often a job may reach its time limit and be queued again; the watcher does not count these
_PORTS = 29_500, 2000  # the first port for the processes of a training on several machines, and how many there are


def states(ids: Iterable[str]) -> dict[str, tuple[str, str]] | None:
    """The state and its reason of every job that Slurm still knows.

    Args:
        ids: The jobs.

    Returns:
        The states by job, such as ``{"12_3": ("PENDING", "Priority")}``; None if Slurm does not answer.
    """
    wanted = set(ids)
    if not wanted:
        return {}
    mains = ",".join(sorted({job.partition("_")[0] for job in wanted}))
    command = ["squeue", "--noheader", "--array", "--states=all", "--format=%i|%T|%r", f"--jobs={mains}"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if answer.returncode:
        return {} if "Invalid job id" in answer.stderr else None
    found = (line.split("|", 2) for line in answer.stdout.splitlines())
    return {job: (state, reason) for job, state, reason in found if job in wanted}


def cancel(ids: Iterable[str]) -> None:
    """End jobs; the trainings save before."""
    if wanted := sorted(set(ids)):
        subprocess.run(["scancel", *wanted], check=False)


def live_jobs(runs: Iterable[Path]) -> dict[Path, str]:
    """The runs that have a job which waits or runs, with its number.

    Raises:
        RuntimeError: If Slurm does not answer.
    """
    jobs = {run: job.id for run in runs if (job := read_job(run)) is not None}
    known = states(jobs.values())
    if known is None:
        raise RuntimeError("Slurm does not answer (squeue). Try again where it does.")
    return {run: job for run, job in jobs.items() if job in known and known[job][0] not in ENDED}


class Slurm:
    """Runs trainings as jobs of Slurm; see `Executor`.

    A training that has a job already is not submitted again, but watched. A job that was killed, preempted or lost is
    submitted again, and the training goes on from its last checkpoint.

    Args:
        cluster: What each training asks for.
        jobs: How many at a time; as many as there is room for, if None.
        on_interrupt: What Ctrl-C does to the jobs: ``leave`` or ``cancel`` them.
        ask_every: Seconds between two questions to Slurm.

    Raises:
        FileNotFoundError: If there is no Slurm on this machine.
        ModuleNotFoundError: If submitit is not installed.
    """

    def __init__(
        self,
        cluster: Cluster | None = None,
        *,
        jobs: int | None = None,
        on_interrupt: Literal["leave", "cancel"] = "leave",
        ask_every: float = 10.0,
    ) -> None:
        import submitit

        if shutil.which("sbatch") is None:
            raise FileNotFoundError("There is no Slurm here (sbatch). Run this where jobs are submitted.")
        self._executor: Any = submitit.SlurmExecutor
        self._cluster = cluster or Cluster()
        self._jobs = jobs
        self._on_interrupt = on_interrupt
        self._data_root: str | None = None
        self._runs: dict[Path, Run] = {}
        self._gone: set[Path] = set()  # whose jobs had ended when Slurm was asked last
        self._news: list[str] = []
        self.pause = min(2.0, ask_every)
        self._ask_every = ask_every
        self._asked = 0.0

    def submit(self, runs: Sequence[Run], data_root: str | None) -> None:
        self._data_root = str(Path(data_root).resolve()) if data_root else None
        self._runs = {run.path: run for run in runs}
        if not runs:
            return
        with locked(runs[0].path.parent):  # two commands at once submit each training once
            live = live_jobs(self._runs)
            self._submit([run for run in runs if run.path not in live], again=False)
        counts = len(runs) - len(live), len(live)
        self._news.append(f"{counts[0]} jobs submitted to Slurm, {counts[1]} were there.")

    def _submit(self, runs: Sequence[Run], *, again: bool) -> None:
        size = self._cluster.array_size
        arrays = [runs[first : first + size] for first in range(0, len(runs), size)]
        for array in arrays:
            executor = self._executor(runs[0].path.parent.resolve() / "jobs", max_num_timeout=_TIMEOUTS)
            at_a_time = max(1, self._jobs // len(arrays)) if self._jobs else size
            executor.update_parameters(**self._cluster.parameters(at_a_time))
            for run in array:
                (run.path / PROGRESS).unlink(missing_ok=True)
            trainings = [JobOfTraining(run.path.resolve(), self._data_root, self._cluster) for run in array]
            printed = io.StringIO()  # submitit prints what sbatch said to an error, which has the same text
            try:
                with redirect_stderr(printed), executor.batch():
                    jobs = [executor.submit(training) for training in trainings]
            except RuntimeError as error:  # submitit's FailedJobError
                raise RuntimeError(
                    f"Slurm rejected the jobs. sbatch says: {str(error).strip() or 'nothing'}\n"
                    "Check the options (partition, time, gpus, account as --option account=NAME), or try again where "
                    "jobs are submitted."
                ) from error
            sys.stderr.write(printed.getvalue())
            for run, job in zip(array, jobs, strict=True):
                before, saved = read_job(run.path) if again else None, run.status.saved or 0
                fruitless = before.fruitless + 1 if before is not None and saved <= before.saved else 0
                Job(job.job_id, str(job.paths.stderr), saved, fruitless).write(run.path)

    def ended(self) -> list[Ending]:
        if time.monotonic() < self._asked + self._ask_every:
            return []
        self._asked = time.monotonic()
        jobs = {path: read_job(path) for path in self._runs}
        known = states(job.id for job in jobs.values() if job is not None)
        if known is None:  # it is asked again
            return []
        endings, lost = [], {}
        for path, run in list(self._runs.items()):
            job = jobs[path]
            state = known.get(job.id, ("GONE", ""))[0] if job is not None else "GONE"
            if state not in (*ENDED, "GONE"):
                self._gone.discard(path)
            elif path not in self._gone:
                self._gone.add(path)  # files may be seen later than the queue: judged at the next look
            elif (ending := _ending(run, job, state)) is not None:
                endings.append(ending)
                del self._runs[path]
            else:
                lost[path] = state
        self._submit_again(lost, jobs)
        return endings

    def _submit_again(self, lost: dict[Path, str], jobs: dict[Path, Job | None]) -> None:
        if not lost:
            return
        self._submit([self._runs[path] for path in lost], again=True)
        self._gone -= set(lost)
        for path, state in lost.items():
            before, job = jobs[path], read_job(path)
            assert before is not None
            assert job is not None
            self._news.append(
                f"{path.name}: job {before.id} has ended ({state.lower().replace('_', ' ')}), saved at step "
                f"{job.saved}; submitted again as job {job.id}."
            )

    def news(self) -> list[str]:
        news, self._news = self._news, []
        return news

    def stop(self) -> None:
        ids = [job.id for path in self._runs if (job := read_job(path)) is not None]
        if self._on_interrupt == "cancel":
            cancel(ids)
            self._news.append(f"{len(ids)} jobs cancelled; each saves its state.")
        elif ids:
            self._news.append(f"{len(ids)} jobs go on. `--status` shows them, `--cancel` cancels them.")


def _ending(run: Run, job: Job | None, state: str) -> Ending | None:
    """How a training ended whose job is gone; None if it was lost, and can go on."""
    code, log = read_code(run.path), run.path / LOG
    if is_finished(run) and is_evaluated(run):
        return Ending(run, 0, log=log)
    if run.status.state == "diverged":
        return Ending(run, 3, said(log) or run.status.message, log)
    if code is not None and 0 < code < 128:
        return Ending(run, code, said(log), log)
    if job is None:
        return None
    if not log.is_file():
        log = Path(job.log)
    if state == "CANCELLED":
        return Ending(run, 130, f"Job {job.id} was cancelled.", log)
    if state == "OUT_OF_MEMORY":
        return Ending(run, 1, f"Job {job.id} had not enough memory; ask for more with --memory.", log)
    if job.fruitless + 1 >= _FRUITLESS and (run.status.saved or 0) <= job.saved:
        text = f"{_FRUITLESS} jobs have ended without a new checkpoint, the last one ({job.id}) as {state}."
        return Ending(run, 1, f"{said(log)}\n{text}".strip(), log)
    return None


class JobOfTraining:
    """What a job does: start the process that trains a run, and let it save before the job has to end.

    Slurm sends SIGTERM before it kills a job: when it is preempted, requeued or cancelled. Before the time limit it
    sends the signal of submitit, which then calls `checkpoint` and requeues the job.

    Args:
        run: The folder.
        data_root: Folder of data sets.
        cluster: What the job has.
    """

    def __init__(self, run: Path, data_root: str | None, cluster: Cluster) -> None:
        self._run = run
        self._data_root = data_root
        self._cluster = cluster
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def __call__(self) -> int:
        import submitit

        job = submitit.JobEnvironment()
        threads = max(1, self._cluster.cpus // self._cluster.processes)
        self._process = start(
            self._run, self._data_root, threads, head=self._head(job), node=job.node, name=f"job {job.job_id}"
        )
        signal.signal(signal.SIGTERM, lambda *_: self._stop())
        while (code := self._process.poll()) is None:  # not wait(), which a handler may not call again
            time.sleep(0.1)
        if job.node == 0:
            write_code(self._run, code)
        if code not in (0, 128 + signal.SIGTERM, -signal.SIGTERM):  # so that Slurm says FAILED, too
            raise RuntimeError(f"The training in {self._run} ended with code {code}; see {LOG} there.")
        return code

    def checkpoint(self) -> Any:
        """Let the training save and end; what to submit in its place."""
        import submitit

        self._stop()
        assert self._process is not None
        while os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            time.sleep(0.1)
        return submitit.helpers.DelayedSubmission(JobOfTraining(self._run, self._data_root, self._cluster))

    def _stop(self) -> None:
        """Send one SIGTERM: a second one would end the process before it has saved."""
        if self._process is not None and not self._stopped:
            self._stopped = True
            self._process.send_signal(signal.SIGTERM)

    def _head(self, job: Any) -> list[str]:
        """Torchrun, if the training has several processes; the first machine has the first one."""
        if job.num_nodes * self._cluster.processes == 1:
            return []
        first, count = _PORTS
        return [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", str(job.num_nodes), "--node-rank", str(job.node)),
            *("--nproc-per-node", str(self._cluster.processes)),
            *("--master-addr", job.hostnames[0], "--master-port", str(first + int(job.raw_job_id) % count)),
        ]
