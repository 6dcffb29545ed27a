import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lab_helpers import tiny, train
from torch import nn

from orthocond.lab import experiments
from orthocond.lab.classification.data import load_data, pipeline
from orthocond.lab.classification.evaluate import evaluate, recalibrate, score, scores, settle
from orthocond.lab.classification.networks.prepare import load_model, prepare
from orthocond.lab.config import change
from orthocond.lab.runs import Run
from orthocond.layers import DecorrelatedBatchNorm2d


def test_recalibrated_statistics_are_averages_over_batches():
    config = tiny("svd")
    pair = load_data(config.data)
    model = prepare(config, pair).module
    batches = pipeline(config, pair.train, train=True)
    weights = {name: p.clone() for name, p in model.named_parameters()}
    model.train()(torch.randn(8, 3, 16, 16))  # statistics that have to be forgotten
    recalibrate(model, batches, 3)
    features = [model.conv1(images).detach() for images, _ in itertools.islice(batches.batches(), 3)]
    mean = torch.stack([x.mean((0, 2, 3)) for x in features]).mean(0)
    covariance = torch.stack([x.transpose(0, 1).flatten(1).cov(correction=0) for x in features]).mean(0)
    assert model.bn1.running_mean == pytest.approx(mean, abs=1e-5)
    assert (model.bn1.running_covariance[0] - covariance).abs().max() < 1e-2 * covariance.abs().max()
    assert not model.training
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    norms = [m for m in model.modules() if isinstance(m, (nn.BatchNorm2d, DecorrelatedBatchNorm2d))]
    assert {m.momentum for m in norms} == {0.1}
    assert {int(m.num_batches_tracked) for m in norms} == {3}


@pytest.mark.parametrize("method", ["nog+olr", "bn"])
def test_evaluation_agrees_with_the_training(tmp_path, method):
    config = tiny(method)
    run = Run.create(tmp_path, "tiny", config)
    with pytest.raises(RuntimeError, match="has no checkpoint yet; train it"):
        evaluate(run)
    train(config, run)
    values = evaluate(run)
    last = run.metrics()[-1]
    assert values["error"] == last["error"]
    assert values["loss"] == pytest.approx(last["val_loss"], rel=1e-4)
    assert values["recalibrated_loss"] != values["loss"]
    assert ("rank" in values) == (method != "bn")
    assert json.loads((run.path / "evaluation.json").read_text()) == values
    page = (Path(__file__).parents[1] / "docs" / "runs.md").read_text()
    assert [key for key in values if f"`{key}`" not in page] == []


def test_those_who_watch_see_every_stage_after_the_last_step(tmp_path):
    config = tiny("svd")
    seen = []
    experiments.train(config, Run.create(tmp_path, "tiny", config), progress=seen.append)
    steps = [state for state in seen if not state.stage]
    first = next(place for place, state in enumerate(seen) if state.stage)
    assert seen[first - 1].step == steps[-1].steps - 1
    assert [(s.stage, s.step > 0) for s in seen[first : first + 2]] == [
        ("errors on held-out images", d) for d in (0, 1)
    ]
    assert steps[-1].numbers["error"] is not None
    assert list(dict.fromkeys(s.stage for s in seen[seen.index(steps[-1]) + 1 :])) == [
        "loading network and images",
        "errors as trained",
        "condition of the SVD layer",
        "errors with the lag ignored",
        "settling statistics",
        "errors with settled statistics",
        "refreshing statistics",
        "errors with refreshed statistics",
    ]
    assert seen[-1].step == seen[-1].steps


def test_evaluation_tells_where_the_loss_of_stale_statistics_comes_from(tmp_path):
    """Without the cover: a layer built so, with the same statistics. Settled: the last batches decide, at no rate."""
    config = change(tiny("svd"), {"schedule.lr": 0.5, "model.eps": 1e-5, "model.momentum": 0.02})
    run = Run.create(tmp_path, "tiny", config)
    train(config, run)
    values = evaluate(run)
    restored = load_model(run)
    model, layer = restored.model, restored.model.bn1
    plain = DecorrelatedBatchNorm2d(layer.num_features, eps=layer.eps, lag="ignore")
    state = {name: value for name, value in layer.state_dict().items() if name != "excess"}
    assert layer.excess.abs().max() > 0
    plain.load_state_dict(state)
    model.bn1 = plain
    batches = pipeline(config, restored.pair.train, train=True)
    held_out = replace(batches, data=restored.pair.held_out, train=False)
    assert score(model, held_out).loss == pytest.approx(values["uncovered_loss"], rel=1e-6)
    assert values["uncovered_loss"] != pytest.approx(values["loss"], rel=1e-3)
    assert values["settled_loss"] not in (values["loss"], values["recalibrated_loss"])


def test_statistics_that_follow_the_weight_change_evaluation_and_nothing_else(tmp_path):
    """The same weights with and without; with, evaluation has nearly the loss of statistics taken anew."""
    settings = {"schedule.lr": 0.5, "model.momentum": 1.0}
    found = {}
    for follow in (False, True):
        config = change(tiny("ow"), settings | {"model.follow": follow})
        run = Run.create(tmp_path, f"tiny-{follow}", config)
        train(config, run)
        found[follow] = load_model(run).model, evaluate(run)
    for name, parameter in found[False][0].named_parameters():
        assert torch.equal(parameter, found[True][0].get_parameter(name))
    assert found[True][0].bn1.running_weight.any()
    assert found[False][0].bn1.running_weight is None
    lost = {follow: values["loss"] - values["settled_loss"] for follow, (_, values) in found.items()}
    assert abs(lost[True]) < 0.5 * abs(lost[False])


def test_settled_statistics_forget_what_was_before():
    config = tiny("svd")
    pair = load_data(config.data)
    batches = pipeline(config, pair.train, train=True)
    found = []
    for scale in (1.0, 1e3):
        model = prepare(config, pair).module
        model.bn1.momentum = 0.5
        model.bn1.running_covariance.mul_(scale)
        settle(model, batches, 40)
        found.append(model.bn1.running_covariance)
        assert not model.training
        assert int(model.bn1.num_batches_tracked) == 40
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(("classes", "known"), [(5, False), (6, True)])
def test_a_top_5_error_is_told_where_it_can_be_more_than_0(classes, known):
    errors = {"loss": 1.0, "error": 50.0, "top5_error": 10.0 if known else 0.0}
    found = {"classes": classes} | errors | {f"recalibrated_{name}": value for name, value in errors.items()}
    names = [score.name for score in scores(found)]
    assert ("top-5 error, as trained" in names) == known
    assert names[0] == "error, as trained"
    assert "error, refreshed" in names
