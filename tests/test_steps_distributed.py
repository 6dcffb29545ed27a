"""Two processes against one: the same steps, with data parallelism and with sharded weights."""

import copy
import os

import pytest
import torch
import torch.distributed as dist
from processes import in_two_processes
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from orthocond.layers import DecorrelatedBatchNorm2d
from orthocond.steps import NearestOrthogonal, OptimalLR, Stiefel, treat
from orthocond.weights import orthogonal

WORLD = 2
STEPS = 4
FSDP_CASES = {
    "nog": {"gradient": NearestOrthogonal()},
    "olr": {"lr": OptimalLR()},
    "nog+olr": {"gradient": NearestOrthogonal(), "lr": OptimalLR()},
    "nog+paper": {"gradient": NearestOrthogonal(), "lr": OptimalLR("paper")},
    "stiefel": {"manifold": Stiefel()},
    # Adam's first update is a matrix of signs, singular up to its epsilon: without a tolerance that would be amplified.
    "update+olr": {"gradient": NearestOrthogonal(rank_tol=1e-3, of="update"), "lr": OptimalLR()},
}


def whitened(weight_treatment):
    """The paper's arrangement: a convolution, a whitening layer, a classifier."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=False),
        DecorrelatedBatchNorm2d(6, eps=1e-3, synchronize=True),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(54, 4),
    )
    return weight_treatment(model[0]) and model.double()


def dense():
    torch.manual_seed(0)
    # 5 rows do not divide by two processes, and the last weight is wide.
    return nn.Sequential(nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def data(step, *shape):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, *shape, dtype=torch.float64, generator=generator)


def train(model, optimizer, shape, outputs, rank=None):
    """Train on this process's half of each batch, or on the whole without a rank."""
    for step in range(STEPS):
        x, y = data(step, *shape), data(100 + step, outputs)
        if rank is not None:
            x, y = x.chunk(WORLD)[rank], y.chunk(WORLD)[rank]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


def check_ddp(rank, weight_treatment):
    shape = (3, 5, 5)
    model, alone = whitened(weight_treatment), whitened(weight_treatment)
    alone[1].synchronize = False
    parallel = DistributedDataParallel(model)
    handles = []
    for m in (model, alone):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
        handles.append(treat(m[0], optimizer, gradient=NearestOrthogonal(), lr=OptimalLR()))
        train(parallel if m is model else m, optimizer, shape, 4, rank if m is model else None)
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-9, msg=name)
    torch.testing.assert_close(*(torch.tensor(h.statistics[0].rates) for h in handles), rtol=1e-6, atol=0)
    weight = model[0].parametrizations.weight.original if hasattr(model[0], "parametrizations") else model[0].weight
    torch.testing.assert_close(
        torch.linalg.svdvals(weight.grad.flatten(1)), torch.ones(6, dtype=torch.float64), rtol=1e-9, atol=0
    )


def check_fsdp(rank, settings):
    alone = dense()
    model = copy.deepcopy(alone)
    for layer in (*model[::2], model):
        fully_shard(layer)
    assert isinstance(model[0].weight, DTensor)
    handles = []
    for m in (model, alone):
        optimizer = torch.optim.Adam(m.parameters(), lr=0.05)
        handles.append(treat([m[0], m[2], m[4]], optimizer, **settings))
        train(m, optimizer, (9,), 3, rank if m is model else None)
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q.detach(), rtol=1e-8, atol=1e-9, msg=name)
    for sharded, whole in zip(*(h.statistics for h in handles), strict=True):
        assert sharded.rates == pytest.approx(whole.rates, rel=1e-6)
        assert sharded.steps == whole.steps == STEPS


def work(rank, folder):
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    for weight_treatment in (orthogonal, nn.Module.train):
        check_ddp(rank, weight_treatment)
    for settings in FSDP_CASES.values():
        check_fsdp(rank, settings)
    dist.destroy_process_group()


def test_two_processes_equal_one(tmp_path):
    in_two_processes(work, str(tmp_path))
