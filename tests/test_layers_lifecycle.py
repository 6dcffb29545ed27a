"""State, copies, conversion, export and compilation of the layers."""

import copy
import io
import pickle

import pytest
import torch
from features import F64, features, root_of, set_affine
from torch import nn

from orthocond.layers import (
    CovariancePool2d,
    DecorrelatedBatchNorm1d,
    DecorrelatedBatchNorm2d,
    WhitenColor2d,
    convert_batchnorm,
    convert_sync,
    statistics,
)
from orthocond.matrix import NewtonSchulz


def trained(**options):
    layer = set_affine(DecorrelatedBatchNorm2d(6, **options))
    layer(features(8, 6, 5, 5))
    return layer


@pytest.mark.parametrize(
    "options", [{}, {"groups": 3}, {"average": "whitening"}, {"affine": False}, {"lag": "ignore"}], ids=str
)
def test_state_and_copies(options):
    layer = DecorrelatedBatchNorm2d(6, **options)
    layer(features(8, 6, 5, 5))
    layer.observer = lambda p: None
    names = {"running_mean", f"running_{options.get('average', 'covariance')}", "num_batches_tracked"}
    names |= {"weight", "bias"} if options.get("affine", True) else set()
    names |= {"excess"} if options.get("average") is None and options.get("lag") is None else set()
    assert set(layer.state_dict()) == names
    fresh = DecorrelatedBatchNorm2d(6, **options).eval()
    fresh.load_state_dict(layer.state_dict())
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    others = [fresh, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(buffer, weights_only=False)]
    x = features(2, 6, 3, 3)
    expected = layer.eval()(x)
    for other in others:
        assert other.observer is None
        torch.testing.assert_close(other.eval()(x), expected, rtol=0, atol=0)
    assert layer.observer is not None


def test_state_of_batchnorm_is_accepted():
    old = nn.BatchNorm2d(6)
    old(features(8, 6, 5, 5))
    x = features(2, 6, 3, 3)
    for options in ({}, {"groups": 2}, {"average": "whitening"}):
        new = nn.Sequential(DecorrelatedBatchNorm2d(6, **options))
        new.load_state_dict(nn.Sequential(old).state_dict())
        torch.testing.assert_close(new.eval()(x), old.eval()(x), rtol=1e-5, atol=1e-5)
    assert "running_var" in old.state_dict()


def test_conversion_keeps_parameters_statistics_and_outputs():
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Sequential(nn.BatchNorm2d(6, momentum=0.3)))
    model(features(8, 3, 5, 5))
    x = features(2, 3, 5, 5)
    expected = model.eval()(x)
    weight = model[2][0].weight
    model.train()
    assert convert_batchnorm(model, ["2.0"], groups=2) is model
    assert isinstance(model[1], nn.BatchNorm2d)
    layer = model[2][0]
    assert isinstance(layer, DecorrelatedBatchNorm2d)
    assert layer.weight is weight
    assert (layer.training, layer.momentum, layer.groups, int(layer.num_batches_tracked)) == (True, 0.3, 2, 1)
    torch.testing.assert_close(model.eval()(x), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(convert_batchnorm(model)(x), expected, rtol=1e-5, atol=1e-5)
    assert isinstance(convert_batchnorm(nn.BatchNorm1d(6, affine=False)), DecorrelatedBatchNorm1d)
    shared = nn.BatchNorm1d(6)
    model_with_shared = convert_batchnorm(nn.Sequential(shared, nn.ReLU(), shared), ["2"])
    assert model_with_shared[0] is model_with_shared[2]
    with pytest.raises(ValueError, match=r"got '0' \(no batch normalization\)"):
        convert_batchnorm(nn.Sequential(nn.ReLU(), nn.BatchNorm1d(6)), ["0"])
    with pytest.raises(ValueError, match=r"got none\. The model has no batch normalization"):
        convert_batchnorm(nn.Sequential(nn.ReLU()))
    assert layer.synchronize is False
    assert convert_sync(model)[2][0].synchronize is True
    with pytest.raises(ValueError, match="without any"):
        convert_sync(nn.Sequential(nn.ReLU()))


def test_stored_whitening_follows_the_statistics():
    """However the buffers change, evaluation sees it; and while they do not, nothing is decomposed."""
    x = features(2, 6, 3, 3)
    layer = trained(momentum=1.0).eval()
    layer.excess.zero_()

    def check():
        assert not layer.excess.any()
        p = layer.running_covariance[0].double() + 1e-5 * torch.eye(6, dtype=F64)
        expected = layer.weight.double()[:, None] * root_of(p.detach(), -0.5)
        torch.testing.assert_close(layer.inference_transform().matrix[0].double(), expected, rtol=1e-3, atol=1e-4)

    check()
    layer.running_covariance.mul_(4)
    check()
    layer.running_covariance = torch.eye(6)[None] * 3
    check()
    layer.eps = 0.0
    check()
    layer.reset_running_stats()
    check()
    with torch.inference_mode():
        layer(x)
        layer.running_covariance.mul_(4)
        check()
    check()
    layer.double()
    check()
    assert layer.whitening.dtype == F64
    stored = layer.whitening
    layer(x.double())
    layer.train().eval()(x.double())
    assert layer.whitening is stored


def test_without_running_statistics():
    layer = DecorrelatedBatchNorm2d(6, track_running_stats=False)
    x = features(8, 6, 5, 5)
    torch.testing.assert_close(layer.eval()(x), layer.train()(x))
    assert set(layer.state_dict()) == {"weight", "bias"}
    layer.reset_running_stats()
    with pytest.raises(RuntimeError, match="track_running_stats=False"):
        layer.inference_transform()


def test_inference_transform_is_the_layer():
    layer = trained(groups=2).eval()
    x = features(4, 6, 3, 3)
    matrix, offset = layer.inference_transform()
    y = torch.einsum("oi,nihw->nohw", torch.block_diag(*matrix), x) + offset.reshape(-1, 1, 1)
    torch.testing.assert_close(y, layer(x), rtol=1e-5, atol=1e-5)


def test_meta_device_and_assigned_state():
    source = trained()
    with torch.device("meta"):
        layer = DecorrelatedBatchNorm2d(6)
    layer.load_state_dict(source.state_dict(), assign=True)
    x = features(2, 6, 3, 3)
    torch.testing.assert_close(layer.eval()(x), source.eval()(x))


def test_repr():
    text = repr(
        DecorrelatedBatchNorm2d(8, groups=2, solver=NewtonSchulz(steps=5), average="whitening", synchronize=True)
    )
    assert text == (
        "DecorrelatedBatchNorm2d(8, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True, groups=2, "
        "solver=NewtonSchulz(steps=5, normalize='trace'), average='whitening', synchronize=True)"
    )
    assert repr(CovariancePool2d(eps=0.1)) == (
        "CovariancePool2d(solver=Eigh(precision='auto', rank_tol=None), output='triu', eps=0.1)"
    )
    assert "alpha=0.5, eps=1e-05, per='image'" in repr(WhitenColor2d(alpha=0.5))


@pytest.mark.parametrize("settings", [{}, {"average": "whitening"}, {"lag": "ignore"}], ids=str)
def test_a_layer_alone_exports(settings):
    layer = DecorrelatedBatchNorm2d(3, **settings).eval()
    x = torch.randn(4, 3, 8, 8)
    torch.testing.assert_close(torch.export.export(layer, (x,), strict=False).module()(x), layer(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_trace_takes_features_of_other_sizes(layout):
    layer = DecorrelatedBatchNorm2d(3).eval()
    traced = torch.jit.trace(layer, torch.randn(4, 3, 8, 8).contiguous(memory_format=layout))
    x = torch.randn(6, 3, 9, 7).contiguous(memory_format=layout)
    torch.testing.assert_close(traced(x), layer(x))


def test_evaluation_exports_without_a_decomposition():
    model = nn.Sequential(nn.Conv2d(3, 6, 3), DecorrelatedBatchNorm2d(6)).eval()
    model[1].load_state_dict(trained().state_dict())
    x = features(4, 3, 8, 8)
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},))
    targets = [str(node.target) for node in program.graph.nodes]
    assert not [target for target in targets if "linalg" in target or "higher_order" in target]
    other = features(7, 3, 8, 8)
    torch.testing.assert_close(program.module()(other), model(other))


@pytest.mark.filterwarnings("ignore")  # of the compiler itself
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_model_has_the_same_losses(backend):
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 6, 3), DecorrelatedBatchNorm2d(6), nn.ReLU(), CovariancePool2d(), nn.Linear(21, 3)
    model = nn.Sequential(*layers)
    x, target = features(8, 3, 8, 8), torch.arange(8) % 3
    losses = []
    for compile_it in (False, True):
        trial = copy.deepcopy(model)
        forward = torch.compile(trial, fullgraph=True, backend=backend) if compile_it else trial
        optimizer = torch.optim.SGD(trial.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(forward(x), target)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        losses.append(float(nn.functional.cross_entropy(forward.eval()(x), target).detach()))
    torch.testing.assert_close(losses[:5], losses[5:], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # of the compiler itself
def test_compiled_layer_takes_its_moments_as_the_eager_one(monkeypatch):
    """In float32, which a graph that cannot read values could not decide."""
    monkeypatch.setattr(statistics, "_float64_moments", None)
    x = torch.randn(64, 6, 12, 12, generator=torch.Generator().manual_seed(0))
    layers = DecorrelatedBatchNorm2d(6), DecorrelatedBatchNorm2d(6)
    results = []
    for layer in (layers[0], torch.compile(layers[1], fullgraph=True, backend="aot_eager")):
        z = x.clone().requires_grad_()
        y = layer(z)
        (y.pow(3)).sum().backward()
        results.append((y.detach(), z.grad))
    torch.testing.assert_close(*results)
    torch.testing.assert_close(layers[0].running_covariance, layers[1].running_covariance, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore")  # of the compiler itself
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_gradient_overwrites_nothing_of_others(form, backend):
    """It is added up in place, but neither in the gradient that came in nor in that of another use of the features."""
    x, g = (torch.randn(8, 6, 5, 5).contiguous(memory_format=form) for _ in range(2))
    layer = DecorrelatedBatchNorm2d(6, groups=2, affine=False)
    results = []
    for function in (layer, torch.compile(layer, fullgraph=True, backend=backend)):
        z, given = x.clone().requires_grad_(), g.clone()
        (function(z * 2) + z).backward(given)
        assert torch.equal(given, g)
        results.append(z.grad)
    torch.testing.assert_close(*results)


def test_statistics_of_fewer_groups_can_be_loaded():
    source = DecorrelatedBatchNorm1d(12, groups=2)
    source(torch.randn(30, 12))
    blocks = torch.block_diag(*source.running_covariance)
    target = DecorrelatedBatchNorm1d(12, groups=6)
    target.load_state_dict(source.state_dict())
    expected = torch.stack([blocks[i : i + 2, i : i + 2] for i in range(0, 12, 2)])
    assert torch.equal(target.running_covariance, expected)
    for groups in (3, 1):
        with pytest.raises(RuntimeError, match="size mismatch"):
            DecorrelatedBatchNorm1d(12, groups=groups).load_state_dict(source.state_dict())
