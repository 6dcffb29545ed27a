import contextlib
import math
import os
import signal
import warnings
from dataclasses import replace

import processes
import pytest
import torch
from data_files import write_tree
from lab_helpers import (
    TINY,
    NanGradient,
    broken_off,
    gcp,
    is_left_as_it_is,
    killed_and_interrupted,
    other_precision,
    run_of,
    tiny,
    train,
)
from torch import nn

from orthocond import SkewOrthogonalConv2d, SVDLayer, matrix_view, pre_svd_layer, spectrum
from orthocond._checks import NotFiniteError
from orthocond.lab.classification import task as classification
from orthocond.lab.classification.config import GRAMMAR, Method, Model, Schedule
from orthocond.lab.classification.data import load_data, pipeline
from orthocond.lab.classification.evaluate import Errors, score
from orthocond.lab.classification.networks.build import build
from orthocond.lab.classification.networks.prepare import prepare
from orthocond.lab.classification.presets import PRESETS
from orthocond.lab.data import Pipeline
from orthocond.lab.experiments import preset, read_config
from orthocond.lab.launch import launch
from orthocond.lab.loop import is_divergence
from orthocond.lab.runs import Run
from orthocond.lab.runs.finding import find_runs
from orthocond.layers import DecorrelatedBatchNorm2d


def files(run):
    return (run.path / "metrics.jsonl").read_bytes()


# Values


def test_it_learns(tmp_path):
    config = replace(
        tiny("svd"),
        data=replace(TINY.data, limit=800, held_out=500),
        model=Model("resnet18", depths=(1, 1), width=8),
        schedule=Schedule(epochs=4, batch_size=40, milestones=(3,)),
    )
    run = run_of(tmp_path, config)
    assert train(config, run) == 0
    last = run.metrics()[-1]
    assert last["finished"]
    assert last["step"] == 80
    assert last["error"] < 80  # measured 72; chance is 92
    assert last["best_error"] == min(m["error"] for m in run.metrics() if "error" in m)


@pytest.mark.parametrize("method", GRAMMAR.names)
@pytest.mark.parametrize("make", [tiny, gcp])
def test_every_method_trains(tmp_path, make, method):
    config = replace(make(method), schedule=replace(TINY.schedule, steps=2), log_every=1)
    run = run_of(tmp_path, config)
    assert train(config, run) == 0
    lines = run.metrics()
    assert [m["step"] for m in lines] == [1, 2, 2]
    assert all(math.isfinite(m["loss"]) for m in lines[:2])
    assert ("eta" in lines[1]) == ("olr" in method)
    if make is tiny or method != "bn":
        assert lines[0]["rank"] <= (27 if make is tiny else 8)


@pytest.mark.parametrize(("method", "expected"), [("ow", 1.0), ("nog+ow+olr", 1.0), ("mow", None), ("wi", None)])
def test_weight_treatments_reach_the_weight(tmp_path, method, expected):
    config = replace(tiny(method), schedule=replace(TINY.schedule, steps=3), log_every=1)
    run = run_of(tmp_path, config)
    train(config, run)
    first, last = run.metrics()[0], run.metrics()[2]
    if expected:
        assert last["weight_condition"] == pytest.approx(1, abs=1e-4)
    else:  # the covariance of the output, not the weight, is well conditioned
        plain = prepare(replace(config, method=Method("svd")), load_data(config.data))
        untreated = spectrum(_covariance(plain, config)).condition_on_range.item()
        assert first["condition_on_range"] < untreated / 10


def _covariance(network, config):
    images = next(iter(pipeline(config, load_data(config.data).train, train=True).batches())).images
    features = network.module.get_submodule(network.pre_svd)(images).detach()
    return torch.cov(features.transpose(0, 1).flatten(1).double())


def test_the_gradient_is_orthogonal_when_the_step_is_made(tmp_path, monkeypatch):
    seen = []
    real = torch.optim.SGD.step

    def step(self, *args):
        result = real(self, *args)
        seen.append(matrix_view(self.param_groups[0]["params"][0].grad).clone())
        return result

    monkeypatch.setattr(torch.optim.SGD, "step", step)
    config = replace(tiny("nog"), schedule=replace(TINY.schedule, steps=1))
    train(config, run_of(tmp_path, config))
    values = torch.linalg.svdvals(seen[0])
    assert values == pytest.approx(torch.ones(27), abs=1e-4)


def test_decay_spares_orthogonal_weights_only():
    for method, count in (("ow", 1), ("mow", 1), ("svd", 0), ("sn", 0)):
        network = prepare(tiny(method), load_data(TINY.data))
        groups = classification.parameter_groups(Method(method), network.module, [network.module.conv1], 5e-4)
        assert sum(len(g["params"]) for g in groups if g["weight_decay"] == 0) == count
        assert sum(len(g["params"]) for g in groups) == len(list(network.module.parameters()))


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("method", ["bn", "svd"])
def test_networks_of_presets_know_their_layers(name, method):
    config = preset(name, "laptop")
    images = torch.randn(4, 3, 32, 32)
    network = build(config.model, Method(method), 10, images)
    assert network.module(images).shape == (4, 10)
    layers = [layer for layer in network.module.modules() if isinstance(layer, SVDLayer)]
    if method == "bn":
        assert network.svd_layer is None
        assert not layers
    else:
        assert layers == [network.module.get_submodule(network.svd_layer)]
        assert pre_svd_layer(network.module, network.svd_layer, images).name == network.pre_svd


def test_presets_have_the_numbers_of_the_paper():
    for name in ("dbn-cifar10-resnet50", "dbn-cifar100-densenet121", "dbn-cifar100-mobilenetv2"):
        config = preset(name, "paper")
        assert config.schedule == Schedule(350, 128, 0.1, 0.9, 5e-4, (100, 200, 300), 0.1)
        assert (config.data.size, config.data.crop_padding, config.data.flip) == (32, 4, True)
    config = preset("gcp-imagenet-resnet18", "paper")
    assert config.schedule == Schedule(60, 256, 0.1, 0.9, 1e-4, (30, 45), 0.1)
    assert (config.data.resize, config.data.size, config.model.reduction) == (256, 224, 256)


def test_the_learning_rate_falls_at_milestones(tmp_path):
    config = replace(tiny("svd"), schedule=Schedule(epochs=3, batch_size=32, milestones=(1, 2)), log_every=1)
    run = run_of(tmp_path, config)
    train(config, run)
    rates = [m["lr"] for m in run.metrics() if "lr" in m]
    assert rates == pytest.approx([0.1] * 5 + [0.01] * 5 + [0.001] * 5)


def test_evaluation_counts_every_image_once():
    data = load_data(TINY.data).held_out
    assert len(data) % 32 != 0
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 12))
    found = score(model, Pipeline(data=data, batch_size=32, train=False))
    output = model(data.images / 127.5 - 1).detach()
    ranks = (output > output.gather(1, data.labels[:, None])).sum(1)
    assert found.loss == pytest.approx(nn.functional.cross_entropy(output, data.labels).item(), rel=1e-5)
    assert found.error == pytest.approx(100 * (ranks > 0).double().mean().item())
    assert found.top5_error == pytest.approx(100 * (ranks > 4).double().mean().item())
    assert 0 < found.top5_error < found.error


def test_data_without_classes_is_an_error(tmp_path):
    write_tree(tmp_path, [f"{i}.png" for i in range(20)])
    with pytest.raises(ValueError, match="has no classes; a classifier needs a folder for each class"):
        load_data(replace(TINY.data, source=str(tmp_path)))
    with pytest.raises(ValueError, match=r"data\.noise is a setting of sprites"):
        replace(TINY.data, source=str(tmp_path), noise=0.1)
    with pytest.raises(ValueError, match=r"data\.validation needs fewer than the 160 images; got 160"):
        load_data(replace(TINY.data, validation=160))


def test_held_out_images_can_be_limited(tmp_path):
    write_tree(tmp_path, [f"{split}/{c}/{i}.png" for split in ("train", "val") for c in "ab" for i in range(8)])
    for source in (str(tmp_path), "sprites"):
        pair = load_data(replace(TINY.data, source=source, limit=6, held_out=4))
        assert [len(part) for part in pair] == [6, 4]


# Resume


def test_equal_seeds_give_equal_files(tmp_path):
    one, two, other = (run_of(tmp_path, tiny()) for _ in range(3))
    train(tiny(), one)
    train(tiny(), two)
    train(tiny(seed=1), other)
    assert files(one) == files(two)
    assert files(one) != files(other)


@pytest.mark.parametrize(("method", "stop"), [("nog+ow+olr", s) for s in (1, 4, 5, 7)] + [("sn", 4), ("mow", 4)])
def test_resumed_runs_write_the_same_file(tmp_path, method, stop):
    config = tiny(method, save_every=3)
    whole, parts_ = run_of(tmp_path, config), run_of(tmp_path, config)
    train(config, whole)
    again = broken_off(config, parts_, stop)
    assert train(config, again) == 0
    assert files(again) == files(whole)
    first, second = (run.load().state["model"] for run in (whole, again))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_finished_run_is_left_as_it_is(tmp_path):
    assert is_left_as_it_is(tmp_path, tiny(), files)


def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path):
    config = tiny(save_every=3)
    whole, run = run_of(tmp_path, config), run_of(tmp_path, config)
    train(config, whole)
    train(config, run)
    newest = max(run.checkpoints.glob("*.safetensors"), key=lambda path: path.name)
    newest.write_bytes(newest.read_bytes()[:-100])
    with pytest.warns(RuntimeWarning, match="Checkpoint 10 is damaged and was not used"):
        assert train(config, Run.open(run.path)) == 0
    assert files(run) == files(whole)


def test_an_infinite_loss_stops_with_a_diagnosis(tmp_path, monkeypatch):
    config = tiny("svd", save_every=1)
    run = run_of(tmp_path, config)
    real = classification.F.cross_entropy
    calls = []

    def broken(*args, **settings):
        calls.append(None)
        return real(*args, **settings) * (float("inf") if len(calls) == 3 else 1)

    monkeypatch.setattr(classification.F, "cross_entropy", broken)
    with pytest.raises(FloatingPointError, match=r"The loss is inf at step 3[\s\S]*bn1[\s\S]*step 2"):
        train(config, run)
    assert run.load().step == 2
    assert "The loss is inf at step 3" in (run.path / "log.txt").read_text()


@pytest.mark.parametrize(
    ("error", "diverges"),
    [
        (NotFiniteError("Matrices need finite entries"), True),
        (torch.linalg.LinAlgError("the input matrix contained non-finite values"), True),
        (ValueError("labels of another kind"), False),
    ],
)
def test_an_error_in_the_forward_pass_is_a_divergence_if_it_is_about_numbers(tmp_path, monkeypatch, error, diverges):
    config = tiny("svd", save_every=1)
    run = run_of(tmp_path, config)
    real = DecorrelatedBatchNorm2d.forward
    calls = []

    def broken(self, x):
        calls.append(None)
        if len(calls) == 3:
            raise error
        return real(self, x)

    monkeypatch.setattr(DecorrelatedBatchNorm2d, "forward", broken)
    with pytest.raises(FloatingPointError if diverges else ValueError, match=str(error)) as caught:
        train(config, run)
    status = Run.open(run.path).status
    assert status.state == ("diverged" if diverges else "failed")
    if diverges:
        assert status.message.startswith("The training diverged at step 3")
        assert "step 2" in str(caught.value)  # the last checkpoint, in the diagnosis


def test_any_error_is_a_divergence_if_a_weight_is_not_finite():
    model = nn.Linear(2, 2)
    assert not is_divergence(ValueError("wrong"), model)
    model.weight.data[0, 0] = math.nan
    assert is_divergence(ValueError("wrong"), model)


def test_the_best_error_is_not_the_last_one(tmp_path, monkeypatch):
    """The error falls and rises again, before and after the training was resumed."""
    errors = [50.0, 40.0, 60.0, 45.0]
    config = tiny("svd", schedule=Schedule(epochs=4, batch_size=32, milestones=()))
    run = run_of(tmp_path, config)
    seen = iter(errors)
    monkeypatch.setattr(classification.evaluation, "score", lambda *_: Errors(1.0, next(seen), 0.0))
    assert train(config, broken_off(config, run, 3 * 5 + 1)) == 0
    assert [m["error"] for m in run.metrics() if "error" in m] == errors
    assert [m["best_error"] for m in run.metrics() if "error" in m] == [50.0, 40.0, 40.0, 40.0]


def test_a_gradient_that_is_not_finite_stops_with_a_diagnosis(tmp_path, monkeypatch):
    config = tiny("nog", save_every=1)
    run = run_of(tmp_path, config)
    real = nn.ReLU.forward
    monkeypatch.setattr(nn.ReLU, "forward", lambda self, x: NanGradient.apply(real(self, x)))
    with pytest.raises(FloatingPointError, match=r"NearestOrthogonal needs finite gradients[\s\S]*conv1"):
        train(config, run)
    assert run.load() is None


def test_mixed_precision(tmp_path):
    config = tiny("nog+ow+olr", precision="bf16")
    half, full = run_of(tmp_path, config), run_of(tmp_path, tiny("nog+ow+olr"))
    train(tiny("nog+ow+olr"), full)
    with other_precision():
        assert train(config, half) == 0
    a, b = full.metrics()[0]["loss"], half.metrics()[0]["loss"]
    assert a != b == pytest.approx(a, rel=0.02)


# Processes


def _train_by_command(rank, words, folder):
    from orthocond.cli import main

    warnings.simplefilter("error", RuntimeWarning)
    with (folder / f"said-{rank}").open("w") as file, contextlib.redirect_stdout(file):
        assert main(words) == 0


@pytest.mark.slow
@pytest.mark.parametrize("synchronize", [True, False])
def test_two_processes_equal_one(tmp_path, synchronize):
    """Unless plain batch normalizations see the images of their own process only."""
    small = "--data.size 16 --data.limit 160 --data.held-out 100 --model.depths 1 --model.width 4 --log-every 2"
    short = "--schedule.epochs 2 --schedule.batch-size 32 --schedule.milestones 1 --method nog+olr"
    short += "" if synchronize else " --model.no-synchronize"
    words = [*f"train dbn-sprites-small {small} {short} --quiet --runs".split(), str(tmp_path / "two")]
    processes.as_by_torchrun(_train_by_command, words, tmp_path)
    run = Run.open(next((tmp_path / "two").iterdir()))
    assert [(tmp_path / f"said-{rank}").read_text().count("Run: ") for rank in (0, 1)] == [1, 0]
    config = read_config(run.config)
    one = run_of(tmp_path, config, "one")
    train(config, one)
    expected, found = one.metrics(), run.metrics()
    assert len(found) == len(expected)
    if not synchronize:
        assert found[0]["loss"] != pytest.approx(expected[0]["loss"], rel=2e-3)
        return
    for a, b in zip(expected, found, strict=True):
        assert a.keys() == b.keys()
        for key in ("loss", "train_loss", "val_loss", "largest", "condition_on_range"):
            if key in a:
                assert b[key] == pytest.approx(a[key], rel=2e-2 if "condition" in key else 2e-3), (a["step"], key)


def test_launch_trains_what_is_missing_and_reports(tmp_path):
    configs = [replace(tiny(m), schedule=replace(TINY.schedule, steps=3)) for m in ("svd", "nog")]
    seen = []
    outcomes = launch(configs, tmp_path, jobs=2, progress=lambda index, state: seen.append((index, state.step)))
    assert [o.code for o in outcomes] == [0, 0], outcomes
    assert {(0, 3), (1, 3)} <= set(seen)
    stamps = [files(o.run) for o in outcomes]
    again = launch(configs, tmp_path, jobs=2)
    assert [o.run.path for o in again] == [o.run.path for o in outcomes]
    assert [files(o.run) for o in again] == stamps
    assert len(list(tmp_path.glob("0*"))) == 2


def test_launch_reports_a_training_that_fails(tmp_path):
    config = replace(tiny("svd"), data=replace(TINY.data, source="cifar10"))
    (outcome,) = launch([config], tmp_path, data_root=str(tmp_path))
    assert outcome.code == 1
    assert "cifar10 needs cifar-10-batches-py" in outcome.text
    assert "Traceback" not in outcome.text


def _watch(folder, methods):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background processes without Ctrl-C
    long = replace(TINY.schedule, epochs=1000)
    configs = [tiny(method, schedule=long) for method in methods]
    launch(configs, folder, jobs=2, progress=lambda index, state: print(index, state.step, flush=True))


@pytest.mark.parametrize(
    ("number", "methods"),
    [(signal.SIGTERM, ("svd", "nog")), pytest.param(signal.SIGINT, ("svd",), marks=pytest.mark.slow)],
)
def test_a_signal_to_the_one_that_watches_lets_all_of_them_save(tmp_path, number, methods):
    said = tmp_path / "said"
    process = processes.start(_watch, tmp_path / "runs", methods, output=said)
    processes.wait_for(said, lambda lines: len({line.split()[0] for line in lines}) == len(methods))
    os.kill(process.pid, number)
    process.join()
    assert process.exitcode in ((143,) if number == signal.SIGTERM else (1, 130, -signal.SIGINT))
    runs = [run for run, _ in find_runs(tmp_path / "runs")]
    assert [run.status.state for run in runs] == ["stopped"] * len(methods)
    assert all(run.load().step == run.status.step > 0 for run in runs)


@pytest.mark.slow
def test_killed_and_interrupted_runs_go_on_to_the_same_file(tmp_path):
    config = tiny("nog+ow+olr", save_every=2, schedule=replace(TINY.schedule, epochs=12, milestones=()))
    whole = run_of(tmp_path, config, "whole")
    train(config, whole)
    run = killed_and_interrupted(config, tmp_path / "killed")
    assert files(run) == files(whole)


@pytest.mark.parametrize(("asked", "said"), [(100, "Fewer steps than asked for: 2 epochs have 10, not"), (3, "")])
def test_epochs_that_end_before_the_steps_are_told(tmp_path, asked, said):
    config = tiny("svd", schedule=replace(TINY.schedule, steps=asked))
    run = run_of(tmp_path, config)
    train(config, run)
    assert run.metrics()[-1]["step"] == min(asked, 10)
    assert ("Fewer steps" in (log := (run.path / "log.txt").read_text())) == bool(said)
    assert said in log


# Errors, and networks of users


def plain_network(classes):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes)
    )


def whitened_network(classes):
    network = plain_network(classes)
    network[1] = DecorrelatedBatchNorm2d(8)
    return network


def no_network(classes):
    return classes


@pytest.mark.parametrize(("factory", "layer"), [("plain_network", "1"), ("whitened_network", None)])
def test_networks_of_users(tmp_path, factory, layer):
    config = replace(
        tiny("nog+ow+olr"),
        model=Model(f"test_classification:{factory}", meta_layer=layer),
        schedule=replace(TINY.schedule, steps=2),
        log_every=1,
    )
    run = run_of(tmp_path, config)
    assert train(config, run) == 0
    assert run.metrics()[1]["weight_condition"] == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(
    ("model", "method", "error"),
    [
        (
            Model("test_classification:plain_network"),
            "svd",
            r"has 0 SVD layers\. Name .*meta-layer\. Its batch normalizations: '1'",
        ),
        (Model("test_classification:whitened_network", meta_layer="1"), "bn", "bn needs a network with a batch norm"),
        (Model("test_classification:plain_network", meta_layer="bn1"), "svd", "has no layer 'bn1'"),
        (Model("test_classification:plain_network", meta_layer="1", pre_svd="9"), "svd", "has no layer '9'"),
        (Model("test_classification:nothing"), "svd", "test_classification has no nothing"),
        (Model("no.such.module:f"), "svd", "there is no module no.such.module"),
    ],
)
def test_errors_of_networks(model, method, error):
    with pytest.raises(ValueError, match=r"no network 'resnet51'\. Did you mean 'resnet50'\?"):
        Model("resnet51")
    with pytest.raises(ValueError, match="built into the ResNets; densenet121 has none"):
        Model("densenet121", "gcp")
    with pytest.raises(ValueError, match=error):
        build(model, Method(method), 10, torch.zeros(4, 3, 16, 16))
    with pytest.raises(TypeError, match=r"has to return a torch\.nn\.Module; it returned int"):
        build(Model("test_classification:no_network"), Method("svd"), 10, torch.zeros(4, 3, 16, 16))


def test_skew_convolutions(tmp_path):
    config = replace(
        tiny("ow"), method=Method("nog+ow+olr", ow="skewconv"), schedule=replace(TINY.schedule, steps=2), log_every=1
    )
    network = prepare(config, load_data(config.data))
    assert isinstance(network.module.conv1, SkewOrthogonalConv2d)
    assert train(config, run_of(tmp_path, config)) == 0
