import itertools
import json

import pytest
import torch
from lab_helpers import tiny, train
from torch import nn

from orthocond.lab.classification.data import load_data, pipeline
from orthocond.lab.classification.evaluate import evaluate, recalibrate
from orthocond.lab.classification.networks.prepare import prepare
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
