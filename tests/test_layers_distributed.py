"""Two processes with synchronized statistics do what one process does on the whole batch."""

import copy
import re
from pathlib import Path

import processes
import pytest
import torch
import torch.distributed as dist
from torch import nn

import orthocond
from orthocond.layers import CovariancePool2d, DecorrelatedBatchNorm1d, DecorrelatedBatchNorm2d, convert_sync

F64 = torch.float64


def run(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        for sizes in ((5, 5), (7, 2), (9, 1), (6, 0)):
            check_values_and_gradients(rank, sizes)
        check_one_value_per_channel()
        check_evaluation_is_local(rank)
        check_broadcast_statistics(rank)
        check_skipped_batch_is_skipped_everywhere(rank)
        check_training(rank)
    finally:
        dist.destroy_process_group()


def check_values_and_gradients(rank, sizes):
    """Unequal shards, one of them empty: outputs, gradients and statistics are those of the whole batch."""
    torch.manual_seed(0)
    x = torch.randn(sum(sizes), 6, 4, 5, dtype=F64) @ torch.randn(5, 5, dtype=F64) + 3
    weight = torch.randn_like(x)
    start = sum(sizes[:rank])
    mine = slice(start, start + sizes[rank])
    for groups in (1, 2):
        whole, shared = (DecorrelatedBatchNorm2d(6, groups=groups).to(F64) for _ in range(2))
        convert_sync(shared)
        seen = []
        shared.observer = seen.append
        everything = x.clone().requires_grad_()
        expected = whole(everything)
        (expected * weight).sum().backward()
        local = x[mine].clone().requires_grad_()
        y = shared(local)
        (y * weight[mine]).sum().backward()
        torch.testing.assert_close(y, expected[mine])
        torch.testing.assert_close(local.grad, everything.grad[mine])
        torch.testing.assert_close(shared.running_mean, whole.running_mean)
        torch.testing.assert_close(shared.running_covariance, whole.running_covariance)
        torch.testing.assert_close(shared.excess, whole.excess)
        assert seen[0].shape == (groups, 6 // groups, 6 // groups)
        # The affine parameters receive their own shard's gradient, which data parallelism adds up.
        gradient = shared.weight.grad.clone()
        dist.all_reduce(gradient)
        torch.testing.assert_close(gradient, whole.weight.grad)


def check_one_value_per_channel():
    """One value on each of two processes is a batch of two; one value on one process alone is not enough."""
    layer = DecorrelatedBatchNorm1d(3, synchronize=True)
    assert torch.isfinite(layer(torch.randn(1, 3))).all()
    with pytest.raises(ValueError, match="more than one value per channel"):
        layer(torch.randn(1 - dist.get_rank(), 3))


def check_evaluation_is_local(rank):
    layer = DecorrelatedBatchNorm1d(3, synchronize=True)
    layer(torch.randn(5, 3))
    if rank == 0:  # a collective call would wait for the other process for ever
        layer.eval()(torch.randn(5, 3))


def check_broadcast_statistics(rank):
    """A broadcast writes into the buffer without a trace of it."""
    layer = DecorrelatedBatchNorm1d(3).eval()
    x = torch.randn(5, 3)
    layer(x)
    source = 4 * torch.eye(3)[None]
    if rank == 0:
        layer.running_covariance.copy_(source)
        layer(x)
    dist.broadcast(layer.running_covariance, 0)
    torch.testing.assert_close(layer(x), x / 2, rtol=1e-4, atol=1e-5)


def check_skipped_batch_is_skipped_everywhere(rank):
    layer = DecorrelatedBatchNorm1d(3, synchronize=True)
    assert layer(torch.full((5, 3), float("nan") if rank else 1.0)).isnan().all()
    assert (int(layer.skipped_batches), int(layer.num_batches_tracked)) == (1, 0)


def check_training(rank):
    """Training under DistributedDataParallel equals training on the whole batch."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 6, 3), DecorrelatedBatchNorm2d(6), nn.ReLU(), CovariancePool2d(), nn.Linear(21, 4)
    single = nn.Sequential(*layers).to(F64)
    processes.check_training(rank, single, convert_sync(copy.deepcopy(single)))


def test_two_processes_equal_one(tmp_path):
    processes.in_two_processes(run, tmp_path / "store")


def test_messages_are_sent_from_one_place():
    """As orthocond/_distributed.py says: elsewhere in the library only DTensors are sharded again."""
    package = Path(orthocond.__file__).parent
    users = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(
            r"^\s*(import|from) torch\.distributed|^\s*from torch import .*distributed", path.read_text(), re.M
        )
    }
    assert {user for user in users if not user.startswith(("lab", "cli"))} == {
        "_distributed.py",
        "steps/_weight.py",
    }
