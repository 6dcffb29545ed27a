"""GANs that are stopped, killed, divided among processes, in half precision: the same files."""

import warnings
from dataclasses import replace

import pytest
import torch
from accelerate import PartialState
from gan_helpers import eigen, smooth, tiny
from lab_helpers import broken_off, is_left_as_it_is, killed_and_interrupted, other_precision, run_of, train
from processes import as_by_torchrun

from orthocond.lab.generation.config import GanObjective
from orthocond.lab.runs import Run


def files(run):
    return {p.name: p.read_bytes() for p in [run.path / "metrics.jsonl", *run.figures.iterdir()]}


def test_equal_seeds_give_equal_files(tmp_path):
    one, two, other = (run_of(tmp_path, tiny()) for _ in range(3))
    train(tiny(), one)
    torch.manual_seed(1)  # the training has a seed of its own
    train(tiny(), two)
    train(tiny(seed=1), other)
    assert files(one) == files(two)
    assert files(one).keys() == files(other).keys()
    assert all(files(one)[name] != value for name, value in files(other).items())


@pytest.mark.parametrize(
    ("make", "method", "stop"), [(tiny, "nog+olr", 5), (tiny, "ow+nog+olr", 2), (eigen, "lvp", 4), (eigen, "hp", 3)]
)
def test_resumed_runs_write_the_same_files(tmp_path, make, method, stop):
    config = make(method)
    whole, broken = run_of(tmp_path, config), run_of(tmp_path, config)
    train(config, whole)
    again = broken_off(config, broken, stop)
    torch.manual_seed(5)
    assert train(config, again) == 0
    assert files(again) == files(whole)
    first, second = (run.load().state for run in (whole, again))
    if "nog" in method:
        assert first["treatment"]["weights"][0]["steps"] == second["treatment"]["weights"][0]["steps"] == 7
    assert first["ema"]["updates"] == second["ema"]["updates"] == 7
    for state in (first, second):
        state["average"] = state["ema"]["model"]
    for network in ("generator", "discriminator", "average"):
        assert all(torch.equal(value, second[network][name]) for name, value in first[network].items())


def test_a_finished_run_is_left_as_it_is(tmp_path):
    assert is_left_as_it_is(tmp_path, tiny(), files)


def test_killed_and_interrupted_runs_go_on_to_the_same_files(tmp_path):
    config = tiny("nog+olr", save_every=8, sample_every=30)
    config = replace(config, schedule=replace(config.schedule, steps=80))
    whole = run_of(tmp_path, config, "whole")
    train(config, whole)
    run = killed_and_interrupted(config, tmp_path / "killed")
    assert files(run) == files(whole)


def _train_both(rank, folder):
    warnings.simplefilter("error", RuntimeWarning)
    PartialState(cpu=True)
    for config in (smooth(), tiny("ol")):
        train(config, Run.create(folder, "two", config))


def test_two_processes_equal_one(tmp_path):
    ones = [run_of(tmp_path, config, "one") for config in (smooth(), tiny("ol"))]
    train(smooth(), ones[0])
    train(tiny("ol"), ones[1])
    as_by_torchrun(_train_both, tmp_path)
    for one, path in zip(ones, sorted(tmp_path.glob("*-two")), strict=True):
        expected, found = one.metrics(), Run.open(path).metrics()
        assert len(found) == len(expected)
        for a, b in zip(expected, found, strict=True):
            assert a.keys() == b.keys()
            for key in a.keys() - {"finished"}:
                assert b[key] == pytest.approx(a[key], rel=1e-3, abs=1e-5), (a["step"], key)


def test_mixed_precision(tmp_path):
    full = run_of(tmp_path, eigen("nog+olr"))
    train(eigen("nog+olr"), full)
    config = eigen("nog+olr", precision="bf16")
    half = run_of(tmp_path, config)
    with other_precision():
        assert train(config, half) == 0
    a, b = full.metrics()[0], half.metrics()[0]
    assert b["discriminator_loss"] != a["discriminator_loss"]
    for key in ("discriminator_loss", "discriminator_penalty", "generator_loss"):
        assert b[key] == pytest.approx(a[key], rel=0.02, abs=0.02)


def test_a_tracker_gets_the_metrics_or_an_error_tells(tmp_path, monkeypatch):
    config = tiny()
    run = run_of(tmp_path, config)
    assert train(config, run, tracker="tensorboard") == 0
    assert list(run.path.rglob("events.out.tfevents*"))
    monkeypatch.setattr("accelerate.tracking._available_trackers", [])
    with pytest.warns(UserWarning, match="no supported trackers"), pytest.raises(ValueError, match="is not installed"):
        train(config, run_of(tmp_path, config), tracker="wandb")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="about machines without a GPU")
def test_fp16_on_a_cpu(tmp_path):
    config = tiny(precision="fp16")
    with pytest.raises(ValueError, match=r"fp16 needs a GPU.*Use bf16"):
        train(config, run_of(tmp_path, config))


def test_least_squares_and_wasserstein_train(tmp_path):
    for name in ("least-squares", "wasserstein", "hinge-saturating"):
        config = tiny(objective=GanObjective(name, penalty="gp", penalty_interval=1))
        run = run_of(tmp_path, config)
        assert train(config, run) == 0
        assert run.metrics()[-1]["finished"]
