"""Running statistics go along with the weight of the layer before: evaluation whitens by the weight as it is."""

import copy

import pytest
import torch
from torch import nn

import orthocond as oc
from orthocond.layers import DecorrelatedBatchNorm1d, DecorrelatedBatchNorm2d

F64 = torch.float64


def pair(*, bias=True, groups=1, parts=1, momentum=0.3, kernel=2, channels=24, lag="cover", dtype=F64):
    """A convolution that makes many channels out of few inputs, and the layer that follows it."""
    torch.manual_seed(0)
    conv = nn.Conv2d(2, channels, kernel, bias=bias, groups=parts)
    norm = DecorrelatedBatchNorm2d(channels, eps=1e-4, momentum=momentum, groups=groups, lag=lag)
    return nn.Sequential(conv, norm.follow(conv)).to(dtype)


def images(count=64, dtype=F64):
    x = torch.randn(count, 2, 8, 8, dtype=dtype)
    return x + x.roll(1, 3) + 0.5


def change(conv, size=0.3):
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=size)


def moments_of(conv, batch, groups):
    """The oracle: mean and unbiased covariance of the features themselves."""
    rows = conv(batch).detach().movedim(1, 0).flatten(1)
    return rows.mean(1), torch.stack([torch.cov(part) for part in rows.chunk(groups)])


class Centered(nn.Linear):
    """A layer that changes its weight before it uses it."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight - self.weight.mean(1, keepdim=True), self.bias)


class Backward(nn.Sequential):
    """A chain whose order is not that of its layers."""

    def forward(self, x):
        for layer in reversed(self):
            x = layer(x)
        return x


# values


@pytest.mark.parametrize("momentum", [0.3, 1.0, None])
@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"groups": 2}, {"groups": 2, "parts": 2}, {"groups": 4, "parts": 2, "kernel": 1}]
)
def test_statistics_are_those_of_the_last_weight(options, momentum):
    """Batches of several weights, averaged: the same as the average of all of them through the last weight."""
    groups = options.get("groups", 1)
    model = pair(momentum=momentum, **options)
    conv, norm = model
    batches = [images() for _ in range(4)]
    for batch in batches:
        model(batch)
        change(conv)
    # The zeros and the identity that everything begins with are turned like statistics of the first weight.
    first, last = pair(momentum=momentum, **options)[0], conv
    rows = [c.weight.detach().flatten(1).chunk(groups) for c in (first, last)]
    turns = [b @ torch.linalg.pinv(a) for a, b in zip(*rows, strict=True)]
    covariance = torch.stack([t @ t.mT for t in turns])
    mean = torch.zeros(24, dtype=F64)
    if first.bias is not None:
        parts = zip(turns, first.bias.detach().chunk(groups), strict=True)
        mean = last.bias.detach() - torch.cat([turn @ bias for turn, bias in parts])
    for number, batch in enumerate(batches, 1):
        share = 1 / number if momentum is None else momentum
        new_mean, new_covariance = moments_of(conv, batch, groups)
        mean, covariance = torch.lerp(mean, new_mean, share), torch.lerp(covariance, new_covariance, share)
    model.eval()
    statistics, _ = norm._present()
    torch.testing.assert_close(statistics.mean, mean)
    torch.testing.assert_close(statistics.covariance, covariance)


def test_evaluation_equals_training_after_a_large_step():
    """With momentum 1 and one batch, evaluation of that batch is what training gives with the new weight."""
    batch = images(200, torch.float32)
    errors = {}
    for follows in (True, False):
        model = pair(momentum=1.0, lag="ignore", dtype=torch.float32)
        if not follows:
            model[1].follow(None)
        model(batch)
        change(model[0], 0.5)
        expected = copy.deepcopy(model)(batch)
        errors[follows] = float((model.eval()(batch) - expected).detach().abs().max())
    assert errors[True] < 1e-3 < 0.5 < errors[False]


def test_float32_statistics_do_not_drift():
    """Five hundred steps in float32: as close to the features' own statistics as a batch is."""
    model = pair(dtype=torch.float32, momentum=0.1)
    conv, norm = model
    for _ in range(500):
        model(images(16, torch.float32))
        change(conv, 0.02)
    _, truth = moments_of(conv, images(4000, torch.float32), 1)
    statistics, _ = norm._present()
    assert torch.linalg.matrix_norm(statistics.covariance - truth, 2) < 0.1 * torch.linalg.matrix_norm(truth, 2)
    whitened = model.eval()(images(4000, torch.float32)).movedim(1, 0).flatten(1)
    values = torch.linalg.eigvalsh(torch.cov(whitened))
    assert values[-8] > 0.8  # eight inputs, so eight directions; a bias has no variance
    assert values[-1] < 1.25


@pytest.mark.parametrize("start", [0.0, 1e-6, 1e-4])
def test_a_bias_that_grows_from_nothing(start):
    """A small bias is no input whose mean and variance the features would have to tell."""
    model = pair(momentum=1.0, lag="ignore", dtype=torch.float32)
    conv, norm = model
    batch = images(dtype=torch.float32)
    with torch.no_grad():
        conv.bias.normal_(std=start)
        model(batch)
        conv.bias.normal_()
        conv.weight.add_(torch.randn_like(conv.weight), alpha=0.1)
    mean, covariance = moments_of(conv, batch, 1)
    statistics, _ = norm._present()
    torch.testing.assert_close(statistics.mean, mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(statistics.covariance, covariance, rtol=1e-4, atol=1e-5)


def test_as_many_outputs_as_inputs_and_a_bias():
    torch.manual_seed(0)
    linear = nn.Linear(6, 6)
    model = nn.Sequential(linear, DecorrelatedBatchNorm1d(6, momentum=1.0, lag="ignore").follow(linear)).double()
    batch = torch.randn(100, 6, dtype=F64)
    model(batch)
    change(linear)
    expected = copy.deepcopy(model)(batch)
    torch.testing.assert_close(model.eval()(batch), expected, rtol=1e-2, atol=1e-2)  # one sample more or less of 100


# invariants


def test_a_weight_that_stays_changes_nothing():
    follows = pair()
    plain = copy.deepcopy(follows)
    plain[1].follow(None)
    for _ in range(3):
        batch = images()
        follows(batch)
        plain(batch)
    x = images()
    torch.testing.assert_close(follows.eval()(x), plain.eval()(x), rtol=0, atol=0)


def test_evaluation_does_not_change_the_statistics():
    model = pair()
    model(images())
    before = {name: buffer.clone() for name, buffer in model.state_dict().items()}
    weight = model[0].weight.detach().clone()
    x = images()
    model.eval()
    expected = model(x)
    with torch.no_grad():
        model[0].weight.zero_()
    model(x)
    with torch.no_grad():
        model[0].weight.copy_(weight)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.state_dict().items())


@pytest.mark.parametrize("treat", [nn.Identity(), nn.utils.parametrizations.spectral_norm, oc.spectral, oc.orthogonal])
def test_training_is_the_same(treat):
    """Only running statistics differ: outputs and gradients of training do not, nor does a parametrization."""
    follows = pair(bias=False)
    treat(follows[0])
    plain = copy.deepcopy(follows)
    follows[1].follow(None).follow(follows[0])
    plain[1].follow(None)
    for _ in range(3):
        batch = images()
        outputs = [model(batch) for model in (follows, plain)]
        for model, output in zip((follows, plain), outputs, strict=True):
            model.zero_grad()
            output.pow(3).sum().backward()
        torch.testing.assert_close(*outputs, rtol=0, atol=0)
        grads = [[parameter.grad for parameter in model.parameters()] for model in (follows, plain)]
        torch.testing.assert_close(*grads, rtol=0, atol=0)
        torch.manual_seed(1)
        change(follows[0])
        torch.manual_seed(1)
        change(plain[0])
    torch.testing.assert_close(dict(follows[0].named_buffers()), dict(plain[0].named_buffers()), rtol=0, atol=0)


# other ways to evaluate


def test_a_parametrized_weight_is_followed():
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 24, 2, bias=False)
    oc.orthogonal(conv)
    model = nn.Sequential(conv, DecorrelatedBatchNorm2d(24, momentum=1.0, lag="ignore").follow(conv)).double()
    batch = images(100)
    model(batch)
    with torch.no_grad():
        conv.parametrizations.weight.original.add_(torch.randn(24, 2, 2, 2), alpha=0.2)
    expected = copy.deepcopy(model)(batch)
    torch.testing.assert_close(model.eval()(batch), expected, rtol=1e-3, atol=1e-3)


def test_an_averaged_model_follows_its_own_weight():
    model = pair(momentum=1.0, lag="ignore")
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=False)
    batch = images(200)
    for _ in range(3):
        model(batch)
        change(model[0])
        average.update_parameters(model)
    copied = average.module
    assert copied[1].follows is copied[0]
    copied[1].load_state_dict(model[1].state_dict())
    expected = copy.deepcopy(copied).train()(batch)
    torch.testing.assert_close(copied.eval()(batch), expected, rtol=1e-3, atol=1e-3)


def test_folding_and_export_hold_the_moved_statistics():
    model = pair()
    model(images())
    change(model[0])
    x = images(2)
    expected = model.eval()(x)
    torch.testing.assert_close(oc.fold(model)(x), expected)
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), expected)
    torch.testing.assert_close(torch.func.functional_call(model, dict(model.named_parameters()), (x,)), expected)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch.compile
def test_compiled_training_and_evaluation():
    model = pair(bias=False)
    oc.spectral(model[0])
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x = images()
    for _ in range(2):
        torch.testing.assert_close(compiled(x), plain(x))
        for each in (model, plain):
            torch.manual_seed(1)
            change(each[0])
    assert all(part.training for part in model.modules())
    torch.testing.assert_close(model.state_dict(), plain.state_dict())
    model.eval()
    torch.testing.assert_close(compiled(x), plain.eval()(x))


# life cycle


def test_states_with_and_without_the_weight():
    source = pair()
    source(images())
    change(source[0])
    x = images()
    expected = source.eval()(x)
    again = pair().eval()
    again.load_state_dict(source.state_dict())
    torch.testing.assert_close(again(x), expected, rtol=0, atol=0)
    without = {name: value for name, value in source.state_dict().items() if name != "1.running_weight"}
    unknown = pair().eval()
    unknown.load_state_dict(without)  # nothing is known of its weight, so nothing is moved
    plain = pair().eval()
    plain[1].follow(None)
    plain.load_state_dict(source.state_dict())
    torch.testing.assert_close(unknown(x), plain(x))
    assert (expected - plain(x)).abs().max() > 0.1


def test_statistics_taken_anew_begin_with_the_weight_as_it_is():
    model = pair()
    model(images())
    change(model[0], 3.0)
    batches = [images() for _ in range(3)]
    oc.update_statistics(model, batches)
    plain = copy.deepcopy(model)
    plain[1].follow(None)
    x = images()
    torch.testing.assert_close(model.eval()(x), plain.eval()(x), rtol=1e-6, atol=1e-6)
    change(model[0])
    assert torch.isfinite(model(x)).all()


def test_following_is_no_part_of_the_layer():
    model = pair()
    assert sum(1 for _ in model[1].parameters()) == 2
    assert [name for name, _ in model[1].named_modules()] == [""]
    assert "follows=Conv2d" in repr(model[1])
    restored = copy.deepcopy(model)
    assert restored[1].follows is restored[0]
    model[1].follow(None)
    assert "running_weight" not in model[1].state_dict()
    assert "follows" not in repr(model[1])


def test_a_weight_that_is_not_finite_moves_nothing():
    model = pair()
    for _ in range(2):
        model(images())
    with torch.no_grad():
        model[0].weight[0, 0, 0, 0] = torch.nan
    before = model[1].running_covariance.clone()
    model(images())
    torch.testing.assert_close(model[1].running_covariance, before)


def test_a_weight_that_is_too_large_for_a_while_moves_nothing():
    """Its statistics would be infinite, and would stay so."""
    model = pair(momentum=1.0, dtype=torch.float32)
    conv, norm = model
    batch = images(dtype=torch.float32)
    model(batch)
    before = norm.running_covariance.clone()
    for factor in (1e25, 1e-25):
        with torch.no_grad():
            conv.weight.mul_(factor)
        norm._go_along()
        torch.testing.assert_close(norm.running_covariance, before, rtol=1e-4, atol=1e-5)
    model(batch)
    assert torch.isfinite(model.eval()(batch)).all()


@pytest.mark.parametrize("name", ["running_weight", "running_covariance"])
def test_a_damaged_state_does_not_stop_training(name):
    model = pair()
    model(images())
    model[1].get_buffer(name)[0, 0, 0] = torch.nan
    x = images()
    plain = copy.deepcopy(model)
    plain[1].follow(None)
    torch.testing.assert_close(model(x), plain(x), rtol=0, atol=0)
    if name == "running_weight":  # as if it were not known
        torch.testing.assert_close(model[1].running_covariance, plain[1].running_covariance, rtol=0, atol=0)
        assert torch.isfinite(model[1].running_weight).all()


def test_a_first_batch_with_a_weight_that_is_not_finite():
    model = pair()
    with torch.no_grad():
        model[0].weight[0, 0, 0, 0] = torch.nan
    model(images())
    assert not model[1].running_weight.any()


def test_a_state_without_the_weight_for_a_model_without_memory():
    source = pair()
    source(images())
    state = {name: value for name, value in source.state_dict().items() if name != "1.running_weight"}
    with torch.device("meta"):
        model = pair()
    model.load_state_dict(state, assign=True)
    x = images()
    torch.testing.assert_close(model.eval()(x), source.eval()(x))


def test_following_again_and_following_another_one():
    model = pair()
    conv, norm = model
    model(images())
    before = norm.running_weight.clone()
    assert before.any()
    assert norm.follow(conv).running_weight.equal(before)
    conv.weight = nn.Parameter(torch.randn(24, 2, 3, 3, dtype=F64))
    assert norm.follow(conv).running_weight.shape == (1, 24, 19)
    model(images())
    other = copy.deepcopy(conv)
    assert not norm.follow(other).running_weight.any()
    assert norm.follows is other


def test_the_end_of_following_in_evaluation_is_seen_at_once():
    model = pair()
    model(images())
    change(model[0])
    model.eval()
    moved = model[1].whitening.clone()
    model[1].follow(None)
    stored = model[1].whitening.clone()
    torch.testing.assert_close(model.train().eval()[1].whitening, stored, rtol=0, atol=0)
    assert (stored - moved).abs().max() > 0.1


# features of another layer


def wrong_layer():
    model = pair(dtype=torch.float32)
    return model[1], nn.Conv2d(2, 24, 2)(images(dtype=torch.float32))


def with_activation():
    model = pair(dtype=torch.float32, kernel=1)
    return model[1], model[0](images(dtype=torch.float32)).relu()


def linear_over_positions():
    linear = nn.Linear(4, 8)
    return DecorrelatedBatchNorm1d(8).follow(linear), linear(torch.randn(64, 8, 4))


@pytest.mark.parametrize("case", [wrong_layer, with_activation, linear_over_positions])
def test_features_that_the_layer_cannot_have_made(case):
    torch.manual_seed(0)
    norm, features = case()
    with pytest.warns(UserWarning, match=r"follows a \w+ whose weight cannot have made \d+% of the variance"):
        norm(features)
    norm(features)  # once; a warning is an error here


def test_a_linear_layer_whose_outputs_are_channels():
    linear = nn.Linear(4, 8)
    DecorrelatedBatchNorm1d(8).follow(linear)(linear(torch.randn(64, 8, 4)).mT)


def test_features_of_low_precision_are_no_strangers():
    model = pair(dtype=torch.float32)
    with torch.no_grad():
        model[0].bias.fill_(10.0)
    with torch.autocast("cpu", torch.bfloat16):
        model(images(dtype=torch.float32))


def test_conversion_lets_layers_follow_where_the_order_is_certain():
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.Conv2d(32, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    oc.convert_batchnorm(model)
    assert model[1].follows is model[0]
    assert model[3].follows is None  # 288 inputs, 8 outputs
    shared = nn.BatchNorm1d(8)
    twice = nn.Sequential(nn.Linear(4, 8), shared, nn.Linear(8, 8), shared)
    oc.convert_batchnorm(twice)
    assert twice[1] is twice[3]
    assert twice[1].follows is None
    assert oc.convert_batchnorm(Backward(nn.Linear(8, 8), nn.BatchNorm1d(8)))[1].follows is None
    assert oc.convert_batchnorm(nn.Sequential(Centered(4, 8), nn.BatchNorm1d(8)))[1].follows is None
    orthogonal = oc.orthogonal(nn.Linear(4, 8))
    assert oc.convert_batchnorm(nn.Sequential(orthogonal, nn.BatchNorm1d(8)))[1].follows is orthogonal
    assert (
        oc.convert_batchnorm(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), average="whitening")[1].follows is None
    )


# errors


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (nn.Conv2d(3, 8, 3), "8 channels of a group out of 27 inputs"),
        (nn.Conv2d(1, 16, 1), "16 outputs, and the layer 8 channels"),
        (nn.ConvTranspose2d(1, 8, 1), "neither nn.Linear nor a convolution"),
        (nn.Conv2d(2, 8, 1, groups=2), "2 groups are not made of whole ones of the 1"),
        (nn.LazyConv2d(8, 1), "not initialized"),
    ],
)
def test_layers_that_cannot_be_followed(layer, text):
    with pytest.raises(ValueError, match=f"{text}.*update_statistics"):
        DecorrelatedBatchNorm2d(8).follow(layer)


def test_what_is_no_layer_and_layers_without_a_covariance():
    with pytest.raises(TypeError, match=r"layer before this one.*Parameter"):
        DecorrelatedBatchNorm1d(8).follow(nn.Linear(2, 8).weight)
    for norm in (
        DecorrelatedBatchNorm1d(8, average="whitening"),
        DecorrelatedBatchNorm1d(8, track_running_stats=False),
    ):
        with pytest.raises(ValueError, match="keeps a running covariance"):
            norm.follow(nn.Linear(2, 8))
