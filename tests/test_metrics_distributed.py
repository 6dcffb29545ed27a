"""Two processes: the Fréchet distance of all their images, on both."""

import os

import pytest
import torch
import torch.distributed as dist
from processes import in_two_processes
from torch import nn

from orthocond.metrics import FrechetDistance, frechet_distance


def metric():
    return FrechetDistance(nn.Flatten().eval(), name="pixels")


def data():
    generator = torch.Generator().manual_seed(0)
    real = torch.randn(50, 1, 2, 2, generator=generator) + 100
    return real, real[:40] * 1.1


def expected():
    both = [x.flatten(1).double() for x in data()]
    return frechet_distance(*(m for x in both for m in (x.mean(0), x.mT.cov())))


def check_shards(rank):
    """Unequal shards, one of them empty."""
    real, fake = data()
    for sizes in ((30, 20), (49, 1), (50, 0)):
        shared = metric()
        for batch, side in ((real, True), (fake, False)):
            mine = batch[: sizes[0]] if rank == 0 else batch[sizes[0] :]
            if len(mine):
                shared.update(mine, real=side)
        assert shared.compute() == pytest.approx(expected(), rel=1e-10)
        assert shared.protocol == "fd40-pixels"
        assert shared.compute() == pytest.approx(expected(), rel=1e-10)  # what each has seen is not changed


def check_reference(rank):
    """Saved once from the images of both; loaded in both it counts once."""
    real, fake = data()
    first = metric()
    first.update(real[rank::2], real=True)
    first.save_reference("reference.safetensors")
    dist.barrier()
    assert os.path.exists("reference.safetensors") == (rank == 0)
    path = "../0/reference.safetensors"
    second = metric()
    second.load_reference(path, count=50)
    second.update(fake[rank::2], real=False)
    assert second.compute() == pytest.approx(expected(), rel=1e-10)
    mixed = metric()
    if rank == 0:
        mixed.load_reference(path)
    with pytest.raises(RuntimeError, match="in all processes or in none"):
        mixed.compute()


def check_errors(rank):
    with pytest.raises(RuntimeError, match="at least two real images"):
        metric().compute()
    uneven = metric()
    uneven.update(torch.zeros(3, 1, 1 + rank, 1), real=True)
    with pytest.raises(ValueError, match="they have 1 to 2"):
        uneven.compute()


def worker(rank, folder):
    own = folder / str(rank)
    own.mkdir()
    os.chdir(own)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        for check in (check_shards, check_reference, check_errors):
            check(rank)
    finally:
        dist.destroy_process_group()


def test_two_processes(tmp_path):
    in_two_processes(worker, tmp_path)
