"""What a step costs: the step of the real loop, methods in turn, medians and ratios."""

import importlib.util
import time
from pathlib import Path

import pytest
import torch
from gan_helpers import tiny as tiny_gan
from lab_helpers import broken_off, tiny

from orthocond.lab import bench
from orthocond.lab.bench import Ratio, Stepper
from orthocond.lab.classification.task import ClassificationTask
from orthocond.lab.devices import device_kind
from orthocond.lab.experiments import task_of
from orthocond.lab.generation.task import GenerationTask
from orthocond.lab.runs import Run
from orthocond.steps import NearestOrthogonal

# Values


@pytest.fixture
def fake(monkeypatch):
    """Steppers whose measurement number n takes n + 1 seconds in all, of which the optimizer's part is known."""
    calls = []
    optimizer = {"nog": 0.5, "hp": 0.3, "none": 0.2}

    class Fake:
        def __init__(self, task, config, run):
            self.name = config.method.name
            self.task = type("Task", (), {"period": config.objective.penalty_interval})

        def time(self, steps):
            calls.append((self.name, steps))
            return {"data": 100.0, "generator": len(calls) - optimizer[self.name], "optimizer": optimizer[self.name]}

    monkeypatch.setattr(bench, "Stepper", Fake)
    return calls


def test_methods_take_turns_by_periods(fake):
    rounds = []
    costs = bench.bench(
        GenerationTask, tiny_gan(), ["nog", "hp"], repeats=3, progress=lambda *state: rounds.append(state)
    )
    assert list(costs) == ["nog", "hp", "none"]
    assert {steps for _, steps in fake} == {tiny_gan().objective.penalty_interval}
    names = [name for name, _ in fake]
    orders = [tuple(names[i : i + 3]) for i in range(0, len(names), 3)]
    assert {*map(frozenset, orders)} == {frozenset(costs)}  # all of them in each round
    assert len({*orders[:5]}) > 1
    assert len(names) == 3 * 5 * 3
    assert rounds == [(1, 3), (2, 3), (3, 3)]


def test_costs_are_medians_and_ratios_are_within_a_repetition(fake):
    costs = bench.bench(GenerationTask, tiny_gan(), ["nog", "hp"], repeats=3)
    names = [name for name, _ in fake]
    # The first two of five rounds do not count; of the last three the median is the fourth.
    seconds = {
        name: [[n + 1 for n in range(15 * i, 15 * i + 15) if names[n] == name][3] for i in range(3)] for name in costs
    }
    low, median, high = sorted(a / b for a, b in zip(seconds["nog"], seconds["none"], strict=True))
    nog, none = costs["nog"], costs["none"]
    assert nog.total == pytest.approx(1e3 * sorted(seconds["nog"])[1])
    assert nog.relative == Ratio(*map(pytest.approx, (median, low, high)))
    low, median, high = sorted(1 + 0.3 / b for b in seconds["none"])
    assert nog.parts["optimizer"] == pytest.approx(500)
    assert nog.by_optimizer == Ratio(*map(pytest.approx, (median, low, high)))
    assert none.relative == none.by_optimizer == Ratio(1, 1, 1)
    assert costs["hp"].by_optimizer is None  # it costs more elsewhere
    assert "data" not in nog.parts


@pytest.mark.parametrize("config", [tiny("nog"), tiny_gan("nog")], ids=["classifier", "gan"])
def test_a_timed_step_is_that_of_the_real_loop(tmp_path, monkeypatch, config):
    stepper = Stepper(task_of(config), config, run := Run.create(tmp_path, "timed", config))
    stepper.time(2)
    real = Run.create(tmp_path, "real", config)
    monkeypatch.setattr(type(stepper.task), "load_data", lambda data, root: stepper.task.stand_in(config))
    made = []
    init = type(stepper.task).__init__
    monkeypatch.setattr(type(stepper.task), "__init__", lambda self, *a: made.append(self) or init(self, *a))
    broken_off(config, real, 2)
    for (name, one), two in zip(stepper.task.module.named_parameters(), made[0].module.parameters(), strict=True):
        assert torch.equal(one, two), name
    assert run.metrics() == []
    assert not any(run.figures.iterdir())


def test_the_time_of_the_optimizer_is_that_of_the_treatment_too(tmp_path, monkeypatch):
    stepper = Stepper(GenerationTask, tiny_gan("nog"), Run.create(tmp_path, "timed", tiny_gan("nog")))
    stepper.time()
    prepare = NearestOrthogonal.prepare
    monkeypatch.setattr(NearestOrthogonal, "prepare", lambda *args: work(0.05) or prepare(*args))
    assert stepper.time()["optimizer"] > 0.05


def work(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.mark.skipif(torch.accelerator.is_available(), reason="an accelerator is timed by the clock")
def test_what_other_programs_do_is_not_counted(tmp_path, monkeypatch):
    stepper = Stepper(GenerationTask, tiny_gan("nog"), Run.create(tmp_path, "timed", tiny_gan("nog")))
    stepper.time()
    prepare = NearestOrthogonal.prepare
    monkeypatch.setattr(NearestOrthogonal, "prepare", lambda *args: time.sleep(1) or prepare(*args))
    assert stepper.time()["optimizer"] < 0.5


@pytest.mark.parametrize(
    ("config", "inside"),
    [(tiny_gan("stiefel"), True), (tiny_gan("stiefel+hp"), False), (tiny("nog+olr"), True), (tiny("nog+ow"), False)],
)
def test_what_acts_in_the_optimizer_alone(config, inside):
    assert bench._acts_in_optimizer(config) is inside


# Errors


def test_what_cannot_be_timed():
    with pytest.raises(ValueError, match="at least one repetition"):
        bench.bench(ClassificationTask, tiny(), ["svd"], repeats=0)
    with pytest.raises(ValueError, match="There is no method 'hp'"):
        bench.bench(ClassificationTask, tiny(), ["hp"], repeats=1)


def test_the_kind_of_device(monkeypatch):
    kinds = {"here": torch.device("cuda")}
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: kinds["here"])
    assert device_kind() == device_kind("cuda") == "cuda"
    with pytest.raises(ValueError, match=r"'cpu' is not what torch .* 'cuda': hide the accelerator"):
        device_kind("cpu")
    kinds["here"] = None
    assert device_kind() == device_kind("cpu") == "cpu"
    with pytest.raises(ValueError, match=r"'cuda' is not what torch .* 'cpu': install"):
        device_kind("cuda")


def test_peak_memory_counts_from_the_least_that_was_held():
    """A run may begin by freeing the gradient that the run before it has left."""
    path = Path(__file__).parent.parent / "benchmarks" / "common.py"
    spec = importlib.util.spec_from_file_location("benchmarks_common", path)
    common = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(common)
    assert common.most_held([-65, 65, 65, -65]) == 130
    assert common.most_held([65, -65, 30]) == 65
