"""In place of nn.BatchNorm: what it accepts is accepted, where it works so does this, and models are converted."""

import copy

import pytest
import torch
from features import F64, features, set_affine
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call, hessian, stack_module_state, vmap

from orthocond.layers import (
    CovariancePool2d,
    DecorrelatedBatchNorm1d,
    DecorrelatedBatchNorm2d,
    WhitenColor2d,
    convert_batchnorm,
)

# arguments and states


def test_without_bias():
    layer = DecorrelatedBatchNorm2d(6, bias=False)
    assert (layer.weight is not None, layer.bias) == (True, None)
    assert "bias=False" in repr(layer)
    old = nn.BatchNorm2d(6, bias=False)
    x = features(8, 6, 5, 5)
    old(x)
    old.weight.data.uniform_(1, 2)
    expected = old.eval()(x)
    new = convert_batchnorm(old)
    assert new.bias is None
    torch.testing.assert_close(new(x), expected, rtol=1e-4, atol=1e-4)
    layer.load_state_dict(old.state_dict())


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_batchnorm_whose_weight_or_bias_was_taken_off(name):
    """``affine`` says True, the parameter is None, and torch computes without it."""
    plain = set_affine(nn.BatchNorm2d(4))
    plain(features(8, 4, 5, 5))
    setattr(plain, name, None)
    layer = convert_batchnorm(copy.deepcopy(plain))
    assert getattr(layer, name) is None
    x = features(6, 4, 3, 3)
    torch.testing.assert_close(layer.eval()(x), plain.eval()(x), rtol=1e-4, atol=1e-5)
    assert layer.train()(x).isfinite().all()


@pytest.mark.parametrize("momentum", [-0.1, 1.1, float("nan")])
def test_momentum_is_a_fraction(momentum):
    with pytest.raises(ValueError, match=r"momentum=\.\.\.\) needs a number from 0 to 1, or None; got"):
        DecorrelatedBatchNorm2d(6, momentum=momentum)


def test_tracking_can_be_stopped_and_resumed():
    """As nn.BatchNorm: the statistics stay and evaluation uses them."""
    layer, old = DecorrelatedBatchNorm2d(6), nn.BatchNorm2d(6)
    for norm in (layer, old):
        norm(features(8, 6, 5, 5))
        norm.track_running_stats = False
        norm(features(8, 6, 5, 5) * 3)
    torch.testing.assert_close(layer.running_covariance[0].diagonal(), old.running_var)
    torch.testing.assert_close(layer.running_mean, old.running_mean)
    before = layer.eval()(features(2, 6, 3, 3))
    torch.testing.assert_close(before, layer(torch.cat([features(2, 6, 3, 3), torch.zeros(1, 6, 3, 3)]))[:2])
    layer.train().track_running_stats = True
    layer(features(8, 6, 5, 5))
    assert layer.num_batches_tracked == 2
    new = convert_batchnorm(old)
    assert new.track_running_stats is False
    torch.testing.assert_close(new.eval()(features(2, 6, 3, 3)), old.eval()(features(2, 6, 3, 3)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(0, 6, 4, 4), (4, 6, 0, 4)])
@pytest.mark.parametrize("training", [True, False])
def test_empty_batch(shape, training):
    layer, old = set_affine(DecorrelatedBatchNorm2d(6, groups=2)).train(training), nn.BatchNorm2d(6).train(training)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    for norm in (layer, old):
        x = torch.zeros(shape, requires_grad=True)
        y = norm(x)
        y.sum().backward()
        assert y.shape == x.grad.shape == shape
        assert torch.equal(norm.weight.grad, torch.zeros(6))
    assert all(torch.equal(before[name], tensor) for name, tensor in layer.state_dict().items())


def test_state_without_the_number_of_batches():
    """States from before torch counted batches, and plain dicts of tensors, have no version."""
    source = nn.BatchNorm2d(6)
    source(features(8, 6, 5, 5))
    state = {name: tensor for name, tensor in source.state_dict().items() if name != "num_batches_tracked"}
    layer = DecorrelatedBatchNorm2d(6)
    layer(features(8, 6, 5, 5))
    layer.load_state_dict(state)
    assert layer.num_batches_tracked == 1
    with torch.device("meta"):
        empty = DecorrelatedBatchNorm2d(6)
    empty.load_state_dict(state, assign=True)
    assert empty.num_batches_tracked == 0
    recent = source.state_dict()
    del recent["num_batches_tracked"]
    with pytest.raises(RuntimeError, match=r"Missing key.*num_batches_tracked"):
        layer.load_state_dict(recent)


def test_float64_features_of_a_float32_layer():
    layer = set_affine(DecorrelatedBatchNorm2d(6))
    x = features(8, 6, 5, 5, dtype=F64)
    assert layer(x).dtype == F64
    torch.testing.assert_close(layer(x), copy.deepcopy(layer).double()(x), rtol=1e-12, atol=1e-12)
    assert layer.running_covariance.dtype == torch.float32
    torch.testing.assert_close(layer.eval()(x).float(), layer(x.float()), rtol=1e-4, atol=1e-4)


# modes of torch


def test_fx_keeps_the_layers_whole():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.color, self.pool = DecorrelatedBatchNorm2d(4), WhitenColor2d(), CovariancePool2d()

        def forward(self, x):
            return self.pool(self.color(self.norm(x), x))

    model = Model()
    traced = fx.symbolic_trace(model)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["norm", "color", "pool"]
    x = features(3, 4, 5, 5)
    torch.testing.assert_close(traced(x), model(x))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mode", [FakeTensorMode, lambda: torch.device("meta")], ids=["fake", "meta"])
def test_shapes_without_values(training, mode):
    with mode():
        model = nn.Sequential(nn.Conv2d(3, 4, 3), DecorrelatedBatchNorm2d(4, groups=2), CovariancePool2d())
        y = model.train(training)(torch.zeros(8, 3, 7, 7))
        y.sum().backward()
        assert y.shape == (8, 10)
        assert model[1].weight.grad.shape == (4,)


@pytest.mark.parametrize("training", [True, False])
def test_forward_mode(training):
    layer = set_affine(DecorrelatedBatchNorm2d(4, momentum=0.0)).double()
    layer.running_covariance.copy_(torch.diag(torch.arange(1.0, 5)))
    layer.train(training).requires_grad_(False)
    x, v = features(8, 4, 3, 3, dtype=F64, spread=3.0), features(8, 4, 3, 3, dtype=F64, spread=2.0)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, v))).tangent
    difference = (layer(x + 1e-5 * v) - layer(x - 1e-5 * v)) / 2e-5
    torch.testing.assert_close(tangent, difference, rtol=1e-6, atol=1e-7)


def test_hessian_and_vmap_in_training():
    """As with nn.BatchNorm, statistics that are written in place are not for torch.func."""
    layer = set_affine(DecorrelatedBatchNorm1d(3, track_running_stats=False)).double().requires_grad_(False)
    x = features(7, 3, dtype=F64, spread=3.0)

    def loss(x):
        return layer(x).pow(3).sum()

    torch.testing.assert_close(hessian(loss)(x), torch.autograd.functional.hessian(loss, x))
    many = torch.stack([x, 2 * x + x.roll(1, 1), x.pow(2)])
    torch.testing.assert_close(vmap(layer)(many), torch.stack([layer(x) for x in many]))


@pytest.mark.parametrize("training", [True, False])
def test_ensemble_of_stacked_states(training):
    layers = []
    for scale in (1, 2, 3):
        layer = set_affine(DecorrelatedBatchNorm1d(3)).double()
        layer(features(50, 3, dtype=F64) * scale)
        layers.append(layer.train(training))
    parameters, buffers = stack_module_state(layers)
    skeleton = copy.deepcopy(layers[0]).to("meta")
    x = features(7, 3, dtype=F64)
    run = vmap(lambda p, b: functional_call(skeleton, (p, b), (x,)))
    torch.testing.assert_close(run(parameters, buffers), torch.stack([layer(x) for layer in layers]))


# conversion


class NormAndActivation(nn.BatchNorm2d):
    """The pattern of timm's BatchNormAct2d."""

    def forward(self, x):
        return super().forward(x).relu()


def model():
    return nn.Sequential(nn.BatchNorm2d(6), NormAndActivation(6), nn.BatchNorm2d(12), nn.ReLU())


def test_subclasses_and_hooked_layers_are_not_replaced():
    net = model()
    with pytest.warns(UserWarning, match=r"leaves as they are: '1' \(NormAndActivation, which may compute more"):
        convert_batchnorm(net)
    kinds = [DecorrelatedBatchNorm2d, NormAndActivation, DecorrelatedBatchNorm2d, nn.ReLU]
    assert [type(layer) for layer in net] == kinds
    net = model()
    with pytest.raises(ValueError, match=r"got '1' \(NormAndActivation"):
        convert_batchnorm(net, ["0", "1"])
    assert type(net[0]) is nn.BatchNorm2d
    with pytest.raises(ValueError, match=r"got '' \(NormAndActivation"):
        convert_batchnorm(net[1])
    net[2].register_forward_hook(lambda *args: None)
    with pytest.raises(ValueError, match=r"'2' \(it has hooks"):
        convert_batchnorm(net, "2")
    with pytest.warns(UserWarning, match=r"'2' \(it has hooks"):
        convert_batchnorm(net)
    assert type(net[2]) is nn.BatchNorm2d


@pytest.mark.parametrize(
    "register",
    [
        lambda layer: layer.register_state_dict_pre_hook(lambda *args: None),
        lambda layer: layer.register_state_dict_post_hook(lambda *args: None),
        lambda layer: layer.register_load_state_dict_pre_hook(lambda *args: None),
        lambda layer: layer.register_load_state_dict_post_hook(lambda *args: None),
    ],
)
def test_hooks_of_the_state_dict_are_not_dropped(register):
    net = nn.Sequential(nn.BatchNorm2d(4))
    register(net[0])
    with pytest.raises(ValueError, match=r"'0' \(it has hooks"):
        convert_batchnorm(net)


def test_layers_are_chosen_by_name_names_or_predicate():
    deep = nn.ModuleDict({"stem": nn.BatchNorm2d(6), "b1": nn.BatchNorm2d(6)})
    assert [type(m) is DecorrelatedBatchNorm2d for m in convert_batchnorm(deep, "stem").values()] == [True, False]
    wide = convert_batchnorm(model(), lambda name, layer: layer.num_features > 6)
    assert [type(m) is DecorrelatedBatchNorm2d for m in wide] == [False, False, True, False]
    with pytest.raises(ValueError, match=r"got 'stem2' \(no batch normalization\). The model has \['b1'\]"):
        convert_batchnorm(deep, "stem2")
    with pytest.raises(ValueError, match="got none"):
        convert_batchnorm(deep, lambda name, layer: False)


def test_groups_by_layer_and_by_size():
    chosen = ["0", "2"]
    assert [convert_batchnorm(model(), chosen, groups={"2": 3})[i].groups for i in (0, 2)] == [1, 3]
    assert [convert_batchnorm(model(), chosen, group_size=4)[i].groups for i in (0, 2)] == [2, 3]
    assert [convert_batchnorm(model(), chosen, group_size=64)[i].groups for i in (0, 2)] == [1, 1]
    with pytest.raises(ValueError, match=r"not replaced: \['1'\]"):
        convert_batchnorm(model(), chosen, groups={"1": 2})
    with pytest.raises(ValueError, match="groups or group_size, not both; got 2 and 3"):
        convert_batchnorm(model(), chosen, groups=2, group_size=3)


def test_synchronized_batchnorm_becomes_a_synchronized_layer():
    old = nn.SyncBatchNorm(6, momentum=0.2)
    old.running_var.copy_(torch.arange(1.0, 7))
    new = convert_batchnorm(nn.Sequential(old))[0]
    assert isinstance(new, DecorrelatedBatchNorm2d)
    assert (new.synchronize, new.process_group, new.momentum) == (True, old.process_group, 0.2)
    x = features(4, 6, 3, 3)
    torch.testing.assert_close(new.eval()(x), old.eval()(x), rtol=1e-5, atol=1e-5)


def test_a_forward_that_was_put_on_the_layer_is_not_dropped():
    model = nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm2d(4))
    model[0].forward = lambda x: 5 * x
    with pytest.warns(UserWarning, match="a forward of its own"):
        convert_batchnorm(model)
    assert [type(layer) for layer in model] == [nn.BatchNorm2d, DecorrelatedBatchNorm2d]
