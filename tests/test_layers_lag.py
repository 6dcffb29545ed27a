"""Evaluation covers what the running covariance lags behind, and adds nothing where nothing moves."""

import copy

import pytest
import torch
from features import F64, channels, features, root_of
from torch import nn

import orthocond as oc
from orthocond.layers import DecorrelatedBatchNorm1d, DecorrelatedBatchNorm2d


def positive_part(a):
    """The oracle: (A + |A|) / 2 with |A| the root of A², by SciPy's general algorithm."""
    return (a + root_of(a @ a, 0.5)) / 2


def rows(count, scales, generator):
    return torch.randn(count, len(scales), generator=generator) * scales


@pytest.mark.parametrize("momentum", [0.3, None])
def test_evaluation_adds_the_positive_part_of_the_excess(momentum):
    layer = DecorrelatedBatchNorm2d(6, momentum=momentum, affine=False).double()
    running = torch.eye(6, dtype=F64)
    for index in range(3):
        x = features(5, 6, 4, 4, dtype=F64).roll(index, 1) * (index + 1)
        layer(x)
        last = torch.cov(channels(x))
        running = torch.lerp(running, last, 1 / (index + 1) if momentum is None else momentum)
    lacking = last - (1 + (6 / 80) ** 0.5) ** 2 * running
    assert torch.linalg.eigvalsh(lacking)[-1] > 1
    expected = root_of(running + positive_part(lacking) + 1e-5 * torch.eye(6, dtype=F64), -0.5)
    torch.testing.assert_close(layer.eval().inference_transform().matrix[0], expected)


@pytest.mark.parametrize("momentum", [0.1, 0.3])
@pytest.mark.parametrize(("channels", "samples", "groups"), [(64, 128, 1), (64, 500, 1), (64, 100, 4), (16, 4000, 1)])
def test_chance_adds_nothing(channels, samples, groups, momentum):
    """Features that do not move: evaluation is the same with and without, for few and many samples."""
    generator = torch.Generator().manual_seed(0)
    layers = [
        DecorrelatedBatchNorm1d(channels, groups=groups, momentum=momentum, lag=lag) for lag in ("cover", "ignore")
    ]
    scales = torch.logspace(0, -2, channels)
    for _ in range(60):
        x = rows(samples, scales, generator)
        for layer in layers:
            layer(x)
    cover, ignore = (layer.eval().inference_transform().matrix for layer in layers)
    relative = torch.linalg.solve(ignore, cover) - torch.eye(channels // groups)
    assert torch.linalg.matrix_norm(relative, 2).max() < 0.02


@pytest.mark.parametrize(("lag", "low", "high"), [("ignore", 4.0, 30.0), ("cover", 0.8, 2.0)])
def test_direction_that_just_grew_is_not_blown_up(lag, low, high):
    """A channel whose variance grew from 1e-6 to 1 in the last batch: ten times the variance without the excess."""
    generator = torch.Generator().manual_seed(0)
    layer = DecorrelatedBatchNorm1d(8, lag=lag, affine=False)
    scales = torch.ones(8)
    scales[3] = 1e-3
    for _ in range(80):
        layer(rows(2000, scales, generator))
    layer(rows(2000, torch.ones(8), generator))
    y = layer.eval()(rows(2000, torch.ones(8), generator))
    variance = float(y.var(0)[3])
    assert low < variance < high


def moved(**options):
    layer = DecorrelatedBatchNorm2d(6, affine=False, **options)
    layer(features(8, 6, 5, 5))
    layer(features(8, 6, 5, 5) * 3)
    return layer


def test_states_with_and_without_the_excess():
    source = moved()
    assert torch.linalg.eigvalsh(source.excess)[0, -1] > 1
    x = features(2, 6, 3, 3)
    state = source.state_dict()
    for target in (moved(), moved().eval(), DecorrelatedBatchNorm2d(6, affine=False)):
        target.load_state_dict(state)
        torch.testing.assert_close(target.eval()(x), source.eval()(x), rtol=0, atol=0)
    old = {name: tensor for name, tensor in state.items() if name != "excess"}
    without = moved(lag="ignore")
    without.load_state_dict(state)  # has no use for it
    target = moved()
    target.load_state_dict(old)
    assert not target.excess.any()
    torch.testing.assert_close(target.eval()(x), without.eval()(x), rtol=0, atol=0)
    plain = nn.BatchNorm2d(6, affine=False)
    plain(x)
    target.load_state_dict(plain.state_dict())
    torch.testing.assert_close(target(x), plain.eval()(x), rtol=1e-5, atol=1e-5)
    blocks = DecorrelatedBatchNorm2d(6, affine=False, groups=2)
    blocks.load_state_dict(state)
    assert torch.equal(blocks.excess[1], source.excess[0, 3:, 3:])
    with pytest.raises(RuntimeError, match="excess"):
        target.load_state_dict({**state, "excess": torch.zeros(1, 5, 5)})


def test_evaluation_follows_the_excess_and_folding_uses_it():
    model = nn.Sequential(nn.Conv2d(3, 6, 3), moved()).eval()
    x = features(2, 3, 6, 6)
    before = model(x)
    torch.testing.assert_close(oc.fold(copy.deepcopy(model))(x), before, rtol=1e-4, atol=1e-5)
    program = torch.export.export(model, (x,))
    torch.testing.assert_close(program.module()(x), before)
    assert not [node for node in program.graph.nodes if "linalg" in str(node.target)]
    model[1].excess.data.zero_()
    assert torch.dist(model(x), before) > 0.1
    model[1].half()
    assert model[1].excess.dtype == torch.float32


def test_what_clears_or_keeps_the_excess():
    model = nn.Sequential(moved())
    kept = model[0].excess.clone()
    model(features(8, 6, 5, 5) * float("nan"))
    assert torch.equal(model[0].excess, kept)
    model[0].momentum = 0.0  # statistics that are not to change
    model(features(8, 6, 5, 5) * 9)
    assert torch.equal(model[0].excess, kept)
    oc.update_statistics(model, [features(8, 6, 5, 5), features(8, 6, 5, 5) * 2])
    assert not model[0].excess.any()
    layer = moved()
    layer.reset_running_stats()
    assert not layer.excess.any()
    for options in ({"average": "whitening"}, {"lag": "ignore"}, {"track_running_stats": False}):
        assert moved(**options).excess is None
    with pytest.raises(ValueError, match="'cover', 'ignore'"):
        DecorrelatedBatchNorm2d(6, lag="wait")
    assert "lag='ignore'" in repr(moved(lag="ignore"))


def test_excess_that_is_not_finite_names_the_layer():
    layer = moved()
    layer.excess[0, 1, 2] = float("nan")
    with pytest.warns(UserWarning, match=r"DecorrelatedBatchNorm2d\(6\) holds NaN"):
        layer.eval()
    assert layer(features(2, 6, 3, 3)).isnan().all()
