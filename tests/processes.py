"""Processes of tests, forked from one that has imported torch: importing it anew would take each of them seconds."""

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["torch.distributed.fsdp", "torch._dynamo", "orthocond.lab.launch.worker", "pytest"])


def in_two_processes(function: Callable[..., Any], *arguments: Any) -> None:
    """Call a function with the ranks 0 and 1, each in a process of its own; an error of one is raised."""
    torch.multiprocessing.start_processes(_one_thread, (function, *arguments), nprocs=2, start_method="forkserver")


def as_by_torchrun(function: Callable[..., Any], *arguments: Any) -> None:
    """The same, in the environment that torchrun gives its processes."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    in_two_processes(_with_environment, port, function, *arguments)


def check_training(rank: int, single: nn.Module, parallel: nn.Module) -> None:
    """Train one model on whole batches, and another on the halves of two processes: they stay the same."""
    models = single, DistributedDataParallel(parallel)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    layout = torch.channels_last if next(single.parameters()).stride(1) == 1 else torch.contiguous_format
    for _ in range(3):
        x = torch.randn(8, 3, 7, 7, dtype=torch.float64).contiguous(memory_format=layout)
        target = torch.randint(4, (8,))
        parts = slice(0, 8), slice(4 * rank, 4 * rank + 4)
        for model, part, optimizer in zip(models, parts, optimizers, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[part]), target[part]).backward()
            optimizer.step()
    for expected, value in zip(single.state_dict().values(), parallel.state_dict().values(), strict=True):
        torch.testing.assert_close(value, expected)


def start(function: Callable[..., Any], *arguments: Any, output: Path) -> Any:
    """A process that calls a function, with what it prints in a file; its result is the exit code."""
    process = _FORKS.Process(target=_printing, args=(output, function, *arguments))
    process.start()
    return process


def wait_for(file: Path, ready: Callable[[list[str]], bool]) -> None:
    """Wait until the whole lines of a file are what is waited for."""
    while not file.is_file() or not ready(file.read_text().rpartition("\n")[0].splitlines()):
        time.sleep(0.005)


def _one_thread(rank: int, function: Callable[..., Any], *arguments: Any) -> None:
    torch.set_num_threads(1)
    function(rank, *arguments)


def _with_environment(rank: int, port: int, function: Callable[..., Any], *arguments: Any) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()}
    function(rank, *arguments)


def _printing(output: Path, function: Callable[..., Any], *arguments: Any) -> None:
    torch.set_num_threads(1)
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
    sys.exit(function(*arguments))
