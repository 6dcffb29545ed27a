"""Two processes that compute what one would: whitening over the whole batch, and a treated step, under DDP.

Starts two processes with gloo on this machine, or joins those of `torchrun --nproc-per-node 2 two_processes.py`. Each
has half of the batch. Prints how far their weights and statistics are from those of one process.
"""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import orthocond as oc

STEPS = 5


def network():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 12, 3), oc.DecorrelatedBatchNorm2d(12), nn.ReLU(), nn.Flatten(), nn.Linear(432, 1)
    return oc.convert_sync(nn.Sequential(*layers))


def batch(step):
    return torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(step)).cumsum(-1)


def train(model, part):
    """``part`` takes the images of this process."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    oc.treat(inner[0], optimizer, gradient=oc.NearestOrthogonal())
    for step in range(STEPS):
        optimizer.zero_grad()
        model(part(batch(step))).square().mean().backward()
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in inner.state_dict().items()}


def worker(rank, folder=None):
    torch.set_num_threads(1)
    if folder is None:  # under torchrun, which says where the others are
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    rank, size = dist.get_rank(), dist.get_world_size()
    together = train(DistributedDataParallel(network()), lambda images: images.chunk(size)[rank])
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        report(together, train(network(), lambda images: images), size)


def report(together, alone, size):
    print(f"{size} processes with {16 // size} images each, against one with 16, after {STEPS} steps:\n")
    for name in ("0.weight", "1.running_mean", "1.running_covariance", "4.weight"):
        distance = (together[name] - alone[name]).abs().max() / alone[name].abs().max()
        print(f"  {name:22s} relative difference {distance:.0e}")
        assert distance < 1e-4


def main():
    if "RANK" in os.environ:
        worker(int(os.environ["RANK"]))
        return
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(Path(folder),), nprocs=2)


if __name__ == "__main__":
    main()
