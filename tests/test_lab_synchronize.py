"""Batch normalization over two processes does what plain batch normalization does on the whole batch."""

import copy
import warnings

import processes
import pytest
import torch
import torch.distributed as dist
from torch import nn

from orthocond.lab.synchronize import SynchronizedBatchNorm2d, synchronize
from orthocond.layers import DecorrelatedBatchNorm2d

F64 = torch.float64


def run(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        for settings in ({}, {"affine": False}, {"momentum": None}, {"eps": 0.1, "momentum": 0.3}):
            for layout in (torch.contiguous_format, torch.channels_last):
                check_values_and_gradients(rank, layout, settings)
        check_a_large_mean(rank)
        check_half_precision(rank)
        check_training(rank)
    finally:
        dist.destroy_process_group()


def both(rank, x, weight, settings):
    """Outputs, gradients and layers: the plain one on the whole batch, and the synchronized one on this half."""
    half = slice(len(x) // 2 * rank, len(x) // 2 * (rank + 1))
    plain = nn.BatchNorm2d(x.shape[1], **settings).to(x.dtype)
    if plain.affine:
        nn.init.uniform_(plain.weight, generator=torch.Generator().manual_seed(1))
        nn.init.normal_(plain.bias, generator=torch.Generator().manual_seed(2))
    shared = synchronize(copy.deepcopy(plain))
    assert type(shared) is SynchronizedBatchNorm2d
    inputs = x.clone().requires_grad_(), x[half].clone(memory_format=torch.preserve_format).requires_grad_()
    for _ in range(2):  # a momentum of None weighs batches equally
        outputs = plain(inputs[0]), shared(inputs[1])
    (outputs[0] * weight).sum().backward()
    (outputs[1] * weight[half]).sum().backward()
    return half, outputs, [each.grad for each in inputs], (plain, shared)


def check_values_and_gradients(rank, layout, settings):
    torch.manual_seed(0)
    x = (torch.randn(8, 5, 4, 3, dtype=F64) @ torch.randn(3, 3, dtype=F64) + 3).contiguous(memory_format=layout)
    x[: len(x) // 2] *= 4  # the processes have other means and variances
    half, outputs, gradients, (plain, shared) = both(rank, x, torch.randn_like(x), settings)
    torch.testing.assert_close(outputs[1], outputs[0][half])
    torch.testing.assert_close(gradients[1], gradients[0][half])
    assert outputs[1].is_contiguous(memory_format=layout)
    assert shared.state_dict().keys() == plain.state_dict().keys()
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(shared.get_buffer(name), buffer)
    for name, parameter in plain.named_parameters():
        gradient = shared.get_parameter(name).grad.clone()
        dist.all_reduce(gradient)
        torch.testing.assert_close(gradient, parameter.grad)


def check_a_large_mean(rank):
    """In float32 the variance of features of mean 1e4 and deviation 1 keeps its digits."""
    torch.manual_seed(0)
    x = torch.randn(64, 2, 16, 16) + 1e4
    half, outputs, gradients, _ = both(rank, x, torch.randn_like(x), {})
    torch.testing.assert_close(outputs[1], outputs[0][half], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(gradients[1], gradients[0][half], rtol=1e-3, atol=1e-3)


def check_half_precision(rank):
    torch.manual_seed(0)
    x = torch.randn(8, 3, 4, 4)
    layer = synchronize(nn.BatchNorm2d(3))
    y = layer(x[4 * rank : 4 * rank + 4].bfloat16().requires_grad_())
    y.float().square().sum().backward()
    assert (y.dtype, layer.weight.grad.dtype, layer.running_var.dtype) == (torch.bfloat16, *2 * [torch.float32])
    torch.testing.assert_close(layer.running_mean, 0.1 * x.bfloat16().float().mean((0, 2, 3)), rtol=1e-3, atol=1e-5)


def check_training(rank):
    """Under DistributedDataParallel with weights in channels_last, as the lab trains; it warns of no layout."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 6, 3, bias=False), DecorrelatedBatchNorm2d(6), nn.ReLU(inplace=True)
    layers += nn.Conv2d(6, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(200, 4)
    single = nn.Sequential(*layers).to(F64, memory_format=torch.channels_last)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        processes.check_training(rank, single, synchronize(copy.deepcopy(single)))


def test_two_processes_equal_one(tmp_path):
    processes.in_two_processes(run, tmp_path / "store")


@pytest.mark.parametrize("layer", [nn.BatchNorm2d(3, track_running_stats=False), nn.BatchNorm1d(3)])
def test_other_layers_stay(layer):
    assert type(synchronize(nn.Sequential(layer))[0]) in (nn.BatchNorm2d, nn.BatchNorm1d)
