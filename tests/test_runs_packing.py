import collections
import json
import math
import random

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from orthocond.lab.runs import (
    capture_rng,
    pack,
    restore_rng,
    unpack,
)
from orthocond.layers import DecorrelatedBatchNorm2d
from orthocond.steps import NearestOrthogonal, OptimalLR, treat
from orthocond.weights import orthogonal, spectral


def through_bytes(state):
    """The tree after both parts have been files."""
    skeleton, tensors = pack(state)
    return unpack(json.loads(json.dumps(skeleton, allow_nan=False)), load(save(tensors)))


def assert_same(a, b):
    """Equal in kind, order and every bit."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        flat = [t.contiguous().reshape(-1).view(torch.uint8) if t.numel() else t for t in (a, b)]
        assert torch.equal(*flat) or not a.numel()
    elif isinstance(a, (np.ndarray, np.generic)):
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()
    elif isinstance(a, dict):
        assert list(a) == list(b)
        assert [type(k) for k in a] == [type(k) for k in b]
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert repr(a) == repr(b)  # so that NaN equals NaN and 0.0 is not -0.0


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        2**200,
        0.1,
        -0.0,
        math.nan,
        -math.inf,
        5e-324,
        "Grüße \ud800 \x00",
        b"\x00\xff",
        [],
        (),
        (1, [2, (3,)]),
        {},
        {"$": "tensor"},
        {1: "a", "1": "b", None: "c", 1.5: "d", True and -1: "e"},
        collections.OrderedDict(b=1, a=2),
        collections.Counter([3, 3, 5]),
        np.arange(6, dtype=np.uint32).reshape(2, 3),
        np.array(1.5),
        np.float64(0.1),
        np.bool_(True),
        {"__metadata__": torch.ones(1), "a/b": torch.ones(2), "a": {"b": torch.ones(3)}},
    ],
    ids=repr,
)
def test_values(value):
    assert_same(through_bytes(value), value)
    assert_same(through_bytes({"x": [value]}), {"x": [value]})


DTYPES = "float64 float32 float16 bfloat16 float8_e5m2 int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool complex64"


@pytest.mark.parametrize("dtype", DTYPES.split())
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (3, 4)])
def test_tensors_keep_every_bit(dtype, shape):
    dtype = getattr(torch, dtype)
    size = math.prod(shape) * dtype.itemsize
    raw = torch.randint(2 if dtype is torch.bool else 256, (size,), dtype=torch.uint8)  # NaN with payload among them
    tensor = raw.view(dtype).reshape(shape)
    assert_same(through_bytes(tensor), tensor)


def test_strides_of_dense_tensors_stay():
    for tensor in (torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.randn(3, 4).T):
        assert_same(through_bytes(tensor), tensor)
    assert torch.equal(through_bytes(torch.ones(1).expand(3)), torch.ones(3))


def test_tied_tensors_are_stored_once_and_tied_again():
    weight = nn.Parameter(torch.randn(3, 2))
    skeleton, tensors = pack({"encoder": weight, "decoder": weight.data, "half": weight[:1], "turned": weight.T})
    assert list(tensors) == ["encoder", "half", "turned"]
    state = unpack(skeleton, load(save(tensors)))
    assert state["encoder"] is state["decoder"]
    assert torch.equal(state["half"], weight[:1])
    assert torch.equal(state["turned"], weight.T)
    assert not state["encoder"].requires_grad


def test_a_checkpoint_does_not_follow_the_model():
    weight = torch.ones(2)
    skeleton, tensors = pack({"w": weight})
    weight.zero_()
    assert torch.equal(unpack(skeleton, tensors)["w"], torch.ones(2))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": [1, {1, 2}]}, r"'a/1' is a set"),
        ({"a": nn.Linear(1, 1)}, r"'a' is a Linear. Store its state_dict"),
        ({"a": torch.ones(1, dtype=torch.complex128)}, "'a' is torch.complex128"),
        ({"a": torch.eye(2).to_sparse()}, "'a' is torch.float32 .torch.sparse_coo"),
        ({"a": torch.empty(1, device="meta")}, "meta"),
        ({("a", 1): 0}, r"has the key \('a', 1\)"),
        ({"a": np.array(["x"])}, "array of"),
        (lambda: 0, "the state is a function"),
    ],
)
def test_what_a_checkpoint_cannot_hold(value, text):
    with pytest.raises(TypeError, match=text):
        pack(value)


def test_kinds_of_another_program():
    with pytest.raises(ValueError, match="kind 'pickle'"):
        unpack({"$": "pickle"}, {})


def network():
    torch.manual_seed(0)
    model = nn.Sequential(
        orthogonal(nn.Conv2d(3, 4, 3)),
        DecorrelatedBatchNorm2d(4, eps=1e-3),
        spectral(nn.Conv2d(4, 4, 1)),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(36, 2),
    )
    model.append(nn.Linear(2, 2))
    return model


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-4),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "adamw": lambda p: torch.optim.AdamW([{"params": list(p), "lr": torch.tensor(0.01)}]),
}
SCHEDULES = {
    "multistep": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4]),
    "onecycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, 20),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.CosineAnnealingLR(o, 5)],
        [3],
    ),
}


def steps(model, optimizer, schedule, numbers):
    losses = []
    for number in numbers:
        x = torch.randn(8, 3, 5, 5, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("optimizer_name", "schedule_name"),
    [("sgd", "multistep"), ("adam", "sequential"), ("rmsprop", "multistep"), ("adamw", "onecycle")],
)
def test_training_goes_on_bit_for_bit(optimizer_name, schedule_name):
    def make():
        model = network()
        optimizer = OPTIMIZERS[optimizer_name](model.parameters())
        return model, optimizer, SCHEDULES[schedule_name](optimizer)

    parts = make()
    steps(*parts, range(3))
    saved = through_bytes([part.state_dict() for part in parts])
    assert_same(saved, [part.state_dict() for part in parts])
    assert_same(saved[0]._metadata, parts[0].state_dict()._metadata)
    expected = steps(*parts, range(3, 7))
    resumed = make()
    for part, state in zip(resumed, saved, strict=True):
        part.load_state_dict(state)
    assert steps(*resumed, range(3, 7)) == expected
    assert_same([part.state_dict() for part in resumed], [part.state_dict() for part in parts])


def test_random_numbers_go_on():
    def draw():
        return random.random(), random.gauss(0, 1), np.random.randn(3).tolist(), torch.randn(3).tolist()  # noqa: NPY002

    draw()  # leaves the second number of a pair in Python's and NumPy's normal generators
    saved = through_bytes(capture_rng())
    expected = draw()
    assert draw() != expected
    restore_rng(saved)
    assert draw() == expected


def test_random_numbers_of_another_number_of_processes():
    saved = capture_rng()
    saved["ranks"] *= 2
    with pytest.raises(RuntimeError, match="2 processes cannot continue on 1"):
        restore_rng(saved)


def treated():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(36, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    targets = [model[0], model[2]]
    handle = treat(targets, optimizer, gradient=NearestOrthogonal(), lr=OptimalLR(), history=20, spectrum_every=2)
    return model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer), handle


def plain(handle):
    return [[s.steps, s.skipped, s.without_gradient, s.shortened, s.rates, s.spectra] for s in handle.statistics]


def test_statistics_of_a_treatment_go_on():
    *parts, handle = treated()
    steps(*parts, range(5))
    parts[1].zero_grad()
    parts[1].step()  # one that has no gradient
    saved = through_bytes([*(part.state_dict() for part in parts), handle.state_dict()])
    *resumed, again = treated()
    steps(*resumed, range(8))  # to be forgotten
    for part, state in zip(resumed, saved, strict=False):
        part.load_state_dict(state)
    again.load_state_dict(saved[-1])
    assert_same(plain(again), plain(handle))
    steps(*parts, range(5, 9))
    steps(*resumed, range(5, 9))
    assert handle.statistics[0].shortened > 0
    assert_same(plain(again), plain(handle))
    with pytest.raises(ValueError, match="has 2 weights, the state 1"):
        again.load_state_dict({"weights": saved[-1]["weights"][:1]})
