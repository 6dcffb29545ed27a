"""The life cycle of a monitor, and what it costs."""

import copy
import math
import pickle
import time

import pytest
import torch
import torch.distributed as dist
from processes import in_two_processes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.optim.optimizer import _global_optimizer_pre_hooks

from orthocond.layers import DecorrelatedBatchNorm1d, DecorrelatedBatchNorm2d
from orthocond.matrix.spectra import singular_spectrum, spectrum
from orthocond.monitor import ConditionMonitor
from orthocond.steps import NearestOrthogonal, OptimalLR, treat
from tests.test_monitor import Net, assert_facts, covariances, images, train

# Life cycle


def test_evaluation_in_between_is_not_recorded():
    model = Net()
    with ConditionMonitor(model, layers=["white", "fc"]) as monitor:
        for _ in range(2):
            seen = train(model, steps=1)
            model.eval()
            model(100 * images())
            with torch.no_grad():
                model(100 * images())
            model.train()
    expected = spectrum(covariances(seen[0][0][model.white]), eps=1e-4).largest
    assert [r["matrices"] for r in monitor.history] == [1, 1, 1, 1]
    assert monitor.history[2]["largest"] == pytest.approx(float(expected), rel=1e-6)


def hooks():
    return len(_global_forward_hooks), len(_global_forward_pre_hooks), len(_global_optimizer_pre_hooks)


def test_exceptions_leave_the_model_as_it_was():
    model = Net()
    model.pool.nonfinite = "raise"
    before = hooks()
    with pytest.raises(ValueError, match="finite features"), ConditionMonitor(model):
        model(images() * math.nan)
    assert model.white.observer is None
    assert model.pool.observer is None
    assert hooks() == before


def test_start_stop_and_again():
    model = Net()
    monitor = ConditionMonitor(model)
    monitor.start()
    with pytest.raises(RuntimeError, match="running already"):
        monitor.start()
    train(model, steps=1)
    monitor.stop()
    monitor.stop()
    train(model, steps=1)
    with monitor:
        train(model, steps=1)
    assert [r["step"] for r in monitor.history] == [0, 0, 1, 1]
    assert repr(monitor) == "ConditionMonitor of white, pool, every=1, 2 steps, stopped"


def test_a_loop_that_may_end_early_stops_without_a_warning():
    model = Net()
    monitor = ConditionMonitor(model).start()
    model(images())
    monitor.stop(warn=False)  # warnings are errors here
    assert model.white.observer is None
    monitor.start()
    model(images())
    with pytest.warns(RuntimeWarning, match=r"Call monitor.step"):
        monitor.stop()


def test_several_monitors_and_an_observer_of_ones_own():
    model = Net()
    own = []
    model.white.observer = own.append
    observer = model.white.observer
    first, second = ConditionMonitor(model), ConditionMonitor(model, every=2)
    first.start()
    second.start()
    train(model, steps=2)
    first.stop()  # not in the reverse order
    train(model, steps=1)
    second.stop()
    assert model.white.observer is observer
    assert len(own) == 3
    assert [r["step"] for r in first.history] == [0, 0, 1, 1]
    assert [r["step"] for r in second.history] == [0, 0, 2, 2]


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_a_watched_model_are_not_watched(copier):
    model = Net()
    with ConditionMonitor(model, layers=["white", "fc"]) as monitor:
        early = copier(model)
        train(model, steps=1)
        late = copier(model)
        for replica in (early, late):
            train(replica, steps=2)
            assert replica.white.observer is None
            assert not replica.fc._forward_hooks
        train(model, steps=1)
    assert [r["step"] for r in monitor.history] == [0, 0, 1, 1]
    assert [r["matrices"] for r in monitor.history] == [1, 1, 1, 1]


def test_only_the_optimizer_of_the_weight_counts_steps():
    model = Net()
    head = torch.optim.Adam(model.fc.parameters())
    rest = torch.optim.SGD([p for n, p in model.named_parameters() if not n.startswith("fc")], lr=0.1)
    other = nn.Linear(2, 2)
    unrelated = torch.optim.SGD(other.parameters(), lr=0.1)
    with ConditionMonitor(model, layers=["white"]) as monitor:
        for _ in range(3):
            model(images()).square().mean().backward()
            other(torch.ones(2)).sum().backward()
            for optimizer in (head, rest, unrelated):
                optimizer.step()
    assert [r["step"] for r in monitor.history] == [0, 1, 2]


def test_a_step_that_fails_is_not_counted():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    treat(model.conv, optimizer, gradient=NearestOrthogonal())
    with ConditionMonitor(model, layers=["white"]) as monitor:
        model(images()).square().mean().backward()
        model.conv.weight.grad.fill_(math.nan)
        with pytest.raises(ValueError, match="finite gradients"):
            optimizer.step()
        (_, weights), *_ = train(model, optimizer=optimizer, steps=1)
    (record,) = monitor.history
    assert_facts(record, singular_spectrum(weights["conv.weight"][1].flatten(1)), "gradient_", rel=1e-5)


def test_an_optimizer_that_calls_its_base_class_makes_one_step():
    class Wrapped(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    model = Net()
    optimizer = Wrapped(model.parameters(), lr=0.1)
    treat(model.conv, optimizer, gradient=NearestOrthogonal())
    with ConditionMonitor(model, layers=["white"]) as monitor:
        seen = train(model, optimizer=optimizer, steps=2)
    assert [r["step"] for r in monitor.history] == [0, 1]
    for record, (_, weights) in zip(monitor.history, seen, strict=True):
        assert_facts(record, singular_spectrum(weights["conv.weight"][1].flatten(1)), "gradient_", rel=1e-5)


def test_a_step_with_a_closure_is_read_once_the_closure_was_called():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = []

    def closure():
        optimizer.zero_grad()
        loss = model(images()).square().mean()
        loss.backward()
        gradients.append(model.conv.weight.grad.clone())
        return loss

    with ConditionMonitor(model, layers=["white"]) as monitor:
        optimizer.step(closure)
        optimizer.step(closure=closure)
    assert [r["step"] for r in monitor.history] == [0, 1]
    assert [r["rank"] for r in monitor.history] == [18, 18]
    assert [r["weight_rank"] for r in monitor.history] == [18, 18]
    for record, gradient in zip(monitor.history, gradients, strict=True):
        assert_facts(record, singular_spectrum(gradient.flatten(1)), "gradient_", rel=1e-5)


def test_frozen_weight():
    model = Net()
    model.conv.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with ConditionMonitor(model, layers=["white"]) as monitor:
        model(images()).square().mean().backward()
        optimizer.step()
    assert monitor.history[0]["pre_svd"] == "conv.weight"
    assert monitor.history[0]["weight_rank"] == 18
    assert monitor.history[0]["gradient_rank"] is None


def stem():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), DecorrelatedBatchNorm2d(8, synchronize=True)).double()


def two_processes(rank, folder):
    """Replicated and sharded, the numbers are those of one process with the whole batch."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    generator = torch.Generator().manual_seed(1)
    x, target = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in ((8, 3, 8, 8), (8, 8, 6, 6)))
    histories = []
    for kind in ("one", "ddp", "fsdp"):
        model = stem()
        if kind == "one":
            model[1].synchronize = False
        called = nn.parallel.DistributedDataParallel(model) if kind == "ddp" else model
        if kind == "fsdp":
            fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        part = slice(None) if kind == "one" else slice(4 * rank, 4 * rank + 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        treat(model[0], optimizer, gradient=NearestOrthogonal(), lr=OptimalLR())
        with ConditionMonitor(called) as monitor:
            for _ in range(2):
                optimizer.zero_grad()
                (called(x[part]) * target[part]).mean().backward()
                optimizer.step()
        histories.append(monitor.history)
    for expected, *others in zip(*histories, strict=True):
        for record in others:
            for key, value in expected.items():
                same = record[key] == value if isinstance(value, str) else record[key] == pytest.approx(value, rel=1e-6)
                assert same, (key, record[key], value)
    dist.destroy_process_group()


def test_two_processes_equal_one(tmp_path):
    in_two_processes(two_processes, str(tmp_path))


@pytest.mark.filterwarnings("ignore")  # tracing itself warns of what torch does inside
def test_compiled_model():
    batches = [torch.randn(40, 5) for _ in range(2)]
    histories = []
    for wrap in (lambda m: m, lambda m: torch.compile(m, backend="eager")):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 6), DecorrelatedBatchNorm1d(6), nn.ReLU())
        compiled = wrap(model)
        with ConditionMonitor(compiled, pre_svd={"1": "0"}) as monitor:
            train(model, batches=batches, call=compiled)
        histories.append(monitor.history)
    for plain, found in zip(*histories, strict=True):
        assert plain.pop("layer") == found.pop("layer") == "1"
        assert plain.pop("pre_svd") == found.pop("pre_svd") == "0.weight"
        assert [k for k in plain if plain[k] is None] == [k for k in found if found[k] is None]
        for key, value in plain.items():
            assert value is None or value == pytest.approx(found[key], rel=1e-3), key
    with pytest.warns(RuntimeWarning, match="the model is compiled"):
        monitor = ConditionMonitor(compiled).start()
    monitor.stop()
    with pytest.raises(ValueError, match="only SVD layers in a compiled model"):
        ConditionMonitor(compiled, layers=["0"], pre_svd={})


# Cost


@pytest.mark.slow  # a time, which a busy machine can spoil
def test_costs_less_than_two_percent_of_a_step(monkeypatch):
    """Time in the monitor's own code, its decompositions included, against the time of the step around it."""
    spent = []

    def timed(function):
        def run(*args):
            start = time.perf_counter()
            result = function(*args)
            spent.append(time.perf_counter() - start)
            return result

        return run

    for name in ("_before_step", "_after_step"):
        monkeypatch.setattr(ConditionMonitor, name, timed(getattr(ConditionMonitor, name)))
    body = [m for _ in range(3) for m in (nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU())]
    model = nn.Sequential(
        *(nn.Conv2d(3, 64, 3, padding=1, bias=False), DecorrelatedBatchNorm2d(64), nn.ReLU(), *body),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(32, 3, 32, 32)
    shares = []
    with ConditionMonitor(model) as monitor:
        model[1].observer.listeners[0] = timed(model[1].observer.listeners[0])
        for _ in range(6):
            spent.clear()
            start = time.perf_counter()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            timed(lambda: monitor.history)()
            shares.append(sum(spent) / (time.perf_counter() - start))
    assert monitor.history[-1]["rank"] == 27
    assert sorted(shares)[2] < 0.02  # the machine may be busy in some of the steps
