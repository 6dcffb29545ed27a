"""Batch normalization over two processes does what plain batch normalization does on the whole batch."""

import copy
import warnings

import processes
import pytest
import torch
import torch.distributed as dist
from torch import nn

from orthocond.lab.synchronize import SynchronizedBatchNorm2d, synchronize
from orthocond.layers import DecorrelatedBatchNorm1d, DecorrelatedBatchNorm2d, DecorrelatedBatchNorm3d

F64 = torch.float64


def run(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        for settings in ({}, {"affine": False}, {"bias": False}, {"momentum": None}, {"eps": 0.1, "momentum": 0.3}):
            for layout in (torch.contiguous_format, torch.channels_last):
                check_values_and_gradients(rank, features().contiguous(memory_format=layout), settings)
        check_values_and_gradients(rank, features(), {"track_running_stats": False})
        check_values_and_gradients(rank, features()[..., 0, 0].contiguous(), {}, nn.BatchNorm1d)
        check_values_and_gradients(rank, features()[..., 0].contiguous(), {}, nn.BatchNorm1d)
        check_values_and_gradients(rank, features()[..., None], {}, nn.BatchNorm3d)
        for first in (3, 0):  # images of the first process
            check_values_and_gradients(rank, features(), {}, first=first)
        check_a_large_mean(rank)
        check_half_precision(rank)
        check_training(rank)
    finally:
        dist.destroy_process_group()


def features():
    """The processes have other means and variances."""
    torch.manual_seed(0)
    x = torch.randn(8, 5, 4, 3, dtype=F64) @ torch.randn(3, 3, dtype=F64) + 3
    x[: len(x) // 2] *= 4
    return x


def both(rank, x, weight, settings, kind=nn.BatchNorm2d, first=None):
    """Outputs, gradients and layers: the plain one on the whole batch, and the synchronized one on this part."""
    first = len(x) // 2 if first is None else first
    half = slice(first) if rank == 0 else slice(first, None)
    plain = kind(x.shape[1], **settings).to(x.dtype)
    for seed, parameter in enumerate(plain.parameters()):
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(seed))
    shared = synchronize(copy.deepcopy(plain))
    assert isinstance(shared, kind)
    assert type(shared) is not kind
    inputs = x.clone().requires_grad_(), x[half].clone(memory_format=torch.preserve_format).requires_grad_()
    for _ in range(2):  # a momentum of None weighs batches equally
        outputs = plain(inputs[0]), shared(inputs[1])
    (outputs[0] * weight).sum().backward()
    (outputs[1] * weight[half]).sum().backward()
    return half, outputs, [each.grad for each in inputs], (plain, shared)


def check_values_and_gradients(rank, x, settings, kind=nn.BatchNorm2d, first=None):
    half, outputs, gradients, (plain, shared) = both(rank, x, torch.randn_like(x), settings, kind, first)
    torch.testing.assert_close(outputs[1], outputs[0][half])
    torch.testing.assert_close(gradients[1], gradients[0][half])
    assert outputs[1].stride() == x[half].stride() or not x[half].numel()
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
    for dtype, rtol in ((torch.float32, 1e-3), (torch.bfloat16, 1e-2)):
        layer = synchronize(nn.BatchNorm2d(3).to(dtype))
        y = layer(x[4 * rank : 4 * rank + 4].bfloat16().requires_grad_())
        y.float().square().sum().backward()
        assert (y.dtype, layer.weight.grad.dtype, layer.running_var.dtype) == (torch.bfloat16, *2 * [dtype])
        mean = 0.1 * x.bfloat16().float().mean((0, 2, 3))
        torch.testing.assert_close(layer.running_mean.float(), mean, rtol=rtol, atol=1e-5)


def check_training(rank):
    """Under DistributedDataParallel with weights in channels_last, as the lab trains; it warns of no layout."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 6, 3, bias=False), DecorrelatedBatchNorm2d(6), nn.ReLU(inplace=True)
    layers += nn.Conv2d(6, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(200, 4)
    single = nn.Sequential(*layers).to(F64, memory_format=torch.channels_last)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        processes.check_training(rank, single, synchronize(copy.deepcopy(single)))


def test_plain_layers_may_stay_as_they_are():
    model = nn.Sequential(DecorrelatedBatchNorm2d(4), nn.BatchNorm2d(4))
    synchronize(model, plain=False)
    assert model[0].synchronize
    assert type(model[1]) is nn.BatchNorm2d


def test_two_processes_equal_one(tmp_path):
    processes.in_two_processes(run, tmp_path / "store")


@pytest.mark.parametrize("kind", [DecorrelatedBatchNorm1d, DecorrelatedBatchNorm2d, DecorrelatedBatchNorm3d])
def test_decorrelated_layers_of_all_dimensions_are_synchronized(kind):
    assert synchronize(nn.Sequential(kind(4)))[0].synchronize


def test_a_derived_class_stays_and_is_named():
    class Own(nn.BatchNorm2d):
        pass

    with pytest.warns(RuntimeWarning, match="statistics of Own are those of each process"):
        assert type(synchronize(nn.Sequential(Own(3)))[0]) is Own


def test_synchronizing_twice_is_as_once():
    model = synchronize(synchronize(nn.Sequential(nn.BatchNorm2d(3))))
    assert type(model[0]) is SynchronizedBatchNorm2d


def test_features_of_another_dimension_are_refused():
    with pytest.raises(ValueError, match="expected 4D input"):
        synchronize(nn.BatchNorm2d(3))(torch.randn(8, 3))


def test_statistics_are_not_tracked_where_that_is_switched_off(monkeypatch):
    monkeypatch.setattr("orthocond.lab.synchronize.sum_across", lambda a: a)
    layer = synchronize(nn.BatchNorm2d(3))
    layer.track_running_stats = False
    layer(torch.randn(8, 3, 2, 2) + 1)
    assert layer.num_batches_tracked == 0
    assert (layer.running_mean == 0).all()
