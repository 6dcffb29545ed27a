"""Where a training runs: the accelerator if there is one, one process or many, its clock, and who gets the metrics."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from orthocond.lab.runs import Run, ranks

if TYPE_CHECKING:
    from accelerate import Accelerator


def make_accelerator(precision: str, run: Run, tracker: str | None = None) -> "Accelerator":
    """Accelerate's view of devices and processes.

    Args:
        precision: ``no``, ``bf16`` or ``fp16``.
        run: Folder for the files of a tracker.
        tracker: Name of a tracker of Accelerate.

    Raises:
        ValueError: If fp16 is asked of a CPU, or there is no such tracker, or its package is not installed: Accelerate
            would go on without them.
    """
    from accelerate import Accelerator

    if precision == "fp16" and not torch.accelerator.is_available():
        raise ValueError(
            "Precision fp16 needs a GPU, and there is none. Use bf16, which also works on a CPU, or no, for float32."
        )

    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(),
        mixed_precision=precision,
        log_with=tracker,
        project_dir=str(run.path),
    )
    if tracker and not accelerator.log_with:
        package = "orthocond[lab]" if tracker == "tensorboard" else tracker
        raise ValueError(f'The tracker {tracker!r} is not installed: pip install "{package}", or leave it out.')
    return accelerator


def join_processes() -> None:
    """Let the processes of torchrun find each other, before the first of them makes a folder; one needs nothing."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        from accelerate import PartialState

        PartialState(cpu=not torch.accelerator.is_available())


def part_processes() -> None:
    """End the group of processes: what follows is done by one of them."""
    if ranks.world_size() > 1:
        from accelerate import PartialState

        PartialState().destroy_process_group()


def device_kind(wanted: str | None = None) -> str:
    """The kind of device that trainings use here, ``cuda``, ``mps``, ``cpu``, ...

    Args:
        wanted: The kind that it must be; None takes what there is.

    Raises:
        ValueError: If it is another.
    """
    current = torch.accelerator.current_accelerator()
    found = "cpu" if current is None else current.type
    if wanted not in (None, found):
        remedy = "hide the accelerator, for example with CUDA_VISIBLE_DEVICES= in front of the command"
        if wanted != "cpu":
            remedy = "install a torch for that device and check its driver, or leave the option out"
        raise ValueError(f"The device {wanted!r} is not what torch {torch.__version__} uses here, {found!r}: {remedy}.")
    return found


def now() -> float:
    """Seconds of a clock, when the accelerator has done what it was asked for.

    Without an accelerator it is the CPU time of the thread, which other programs do not lengthen.
    """
    if not torch.accelerator.is_available():
        return time.thread_time()
    torch.accelerator.synchronize()
    return time.perf_counter()


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread: threads that wait for each other are slow beside other programs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
