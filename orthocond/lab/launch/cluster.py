"""What a training asks of a cluster."""

import re
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic.dataclasses import dataclass

from orthocond.lab.config import STRICT, Count, CountOrZero, Text


def minutes(time: str) -> int:
    """The minutes of a time limit as Slurm writes it, rounded up.

    Raises:
        ValueError: If it is none.

    Example:
        >>> minutes("24:00:00"), minutes("2-12"), minutes("90"), minutes("0:30")
        (1440, 3600, 90, 1)
    """
    found = re.fullmatch(r"(?:(\d+)-(\d+)(?::(\d+))?(?::(\d+))?|(\d+)(?::(\d+))?(?::(\d+))?)", time)
    if found is None:
        raise ValueError(
            f"time needs a limit as Slurm writes it: minutes, hours:minutes:seconds or days-hours; got {time!r}."
        )
    days, hours, after, seconds, *plain = (int(part or 0) for part in found.groups())
    if found[5] is not None:  # minutes, minutes:seconds, or hours:minutes:seconds
        hours, after, seconds = plain if found[7] is not None else (0, *plain[:2])
    total = -(-(86_400 * days + 3600 * hours + 60 * after + seconds) // 60)
    if total < 1:
        raise ValueError(f"time needs at least a second; got {time!r}.")
    return total


def _checked(time: str) -> str:
    minutes(time)
    return time


def _size(memory: str) -> str:
    if re.fullmatch(r"\d+[KMGT]?B?", memory.upper()) is None:
        raise ValueError(f"memory needs a number with or without K, M, G or T, such as 32G; got {memory!r}.")
    return memory


_OWN = {
    "partition": "partition",
    "time": "time",
    "nodes": "nodes",
    "gpus": "gpus",
    "gpus-per-node": "gpus",
    "cpus-per-task": "cpus",
    "mem": "memory",
    "array": "array_size",
    "signal": "grace",
}
"""The setting for an option of sbatch that has one."""
_NEEDED = ("ntasks-per-node", "requeue", "no-requeue")


@dataclass(frozen=True, config=STRICT)
class Cluster:
    """What each training asks of Slurm; options of the command line, or a TOML file with these names.

    Attributes:
        partition: Which machines; the cluster's default if None.
        time: Time limit of a job, as Slurm writes it. A training that needs longer saves before the limit and goes on
            in the next job.
        gpus: GPUs on each machine, with a process for each.
        nodes: Machines of one training.
        cpus: Cores of each machine.
        memory: Memory of each machine, such as ``32G``; the cluster's default if None.
        array_size: Jobs of one array, at most; clusters have a limit (``scontrol show config``, MaxArraySize).
        grace: Seconds before the time limit at which a training is told to save.
        setup: Lines of shell before the training, such as ``module load cuda``.
        options: Other options of sbatch, by their long names: ``{"account": "lab"}``.

    Example:
        >>> cluster = Cluster("gpu", time="2-00:00:00", gpus=1, options={"account": "lab"})
        >>> cluster.parameters(jobs=4)["additional_parameters"]
        {'requeue': True, 'account': 'lab'}
    """

    partition: Text | None = None
    time: Annotated[str, AfterValidator(_checked)] = "24:00:00"
    gpus: CountOrZero = 0
    nodes: Count = 1
    cpus: Count = 1
    memory: Annotated[str, AfterValidator(_size)] | None = None
    array_size: Count = 500
    grace: Count = 120
    setup: tuple[Text, ...] = ()
    options: dict[Text, str | int | bool] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.grace >= 60 * minutes(self.time):
            raise ValueError(
                f"grace needs fewer seconds than the time limit has, {60 * minutes(self.time)}; got {self.grace}."
            )
        for name in (name.replace("_", "-") for name in self.options):
            if name in _OWN:
                raise ValueError(f"options needs other names than {name!r}: that is the setting {_OWN[name]}.")
            if name in _NEEDED:
                raise ValueError(f"options needs other names than {name!r}, which is set: trainings rely on it.")
        return self

    @property
    def processes(self) -> int:
        """Processes of a training on each machine."""
        return max(1, self.gpus)

    def parameters(self, jobs: int) -> dict[str, Any]:
        """The parameters of submitit's executor for Slurm.

        Args:
            jobs: How many jobs of an array run at a time.
        """
        options = {name.replace("_", "-"): value for name, value in self.options.items() if value is not False}
        asked = {
            "job_name": "orthocond",
            "partition": self.partition,
            "time": minutes(self.time),
            "nodes": self.nodes,
            "ntasks_per_node": 1,
            "cpus_per_task": self.cpus,
            "gpus_per_node": self.gpus or None,
            "mem": self.memory,
            "setup": list(self.setup) or None,
            "signal_delay_s": self.grace,
            "array_parallelism": jobs,
            "srun_args": [f"--cpus-per-task={self.cpus}"],  # which srun does not take from sbatch since Slurm 22.05
            # Without this, a site may be set to end a job that was preempted or has lost its machine.
            "additional_parameters": {"requeue": True} | options,
        }
        return {name: value for name, value in asked.items() if value is not None}
