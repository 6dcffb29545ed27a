"""Running statistics: evaluation follows them however they change, and they can be taken anew."""

import copy
import warnings

import pytest
import torch
from features import F64, features, root_of
from torch import nn
from torch.func import functional_call
from torch.optim.swa_utils import update_bn

import orthocond as oc
from orthocond.layers import DecorrelatedBatchNorm1d, DecorrelatedBatchNorm2d


def other_covariance(seed=0):
    a = torch.randn(1, 6, 6, generator=torch.Generator().manual_seed(seed))
    return a @ a.mT + torch.eye(6)


def by_definition(x, mean, p, eps=1e-5):
    whitening = root_of(p.double() + eps * torch.eye(len(p), dtype=F64), -0.5)
    return (x.double() - mean.double()) @ whitening.mT


# stored whitening matrix


def by_data(layer, p):
    layer.running_covariance.data.copy_(p)


def by_numpy(layer, p):
    layer.running_covariance.numpy()[:] = p.numpy()


def by_replacement(layer, p):
    layer.running_covariance.data = p.clone()


@pytest.mark.parametrize("change", [by_data, by_numpy, by_replacement])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_sees_changes_that_leave_no_trace(change, mode):
    layer = DecorrelatedBatchNorm1d(6).eval()
    x = features(5, 6)
    layer(x)
    with mode():
        for seed in range(3):
            p = other_covariance(seed)
            change(layer, p)
            expected = by_definition(x, torch.zeros(6), p[0])
            torch.testing.assert_close(layer(x).double(), expected, rtol=1e-4, atol=1e-5)


def test_evaluation_sees_fresh_buffers_of_functional_call():
    """Buffers of other calls may lie at the same address."""
    layer = DecorrelatedBatchNorm1d(6).eval()
    x = features(5, 6)
    for everything in (False, True):
        for seed in range(50):
            state = dict(layer.named_buffers()) if everything else layer.state_dict()
            p = other_covariance(seed)
            y = functional_call(layer, {**state, "running_covariance": p}, (x,))
            torch.testing.assert_close(y.double(), by_definition(x, torch.zeros(6), p[0]), rtol=1e-4, atol=1e-5)
            del state, p
    torch.testing.assert_close(layer(x).double(), by_definition(x, torch.zeros(6), torch.eye(6)), rtol=1e-5, atol=1e-5)


def test_nothing_is_decomposed_while_statistics_stay(monkeypatch):
    layer = DecorrelatedBatchNorm1d(6)
    layer(features(50, 6))
    layer.eval()
    monkeypatch.setattr("orthocond.layers.decorrelated.stored_whitening", None)
    layer(features(5, 6))
    torch.func.grad(lambda x: layer(x).sum())(features(5, 6))
    layer.train().eval()(features(5, 6))


def test_rounding_of_the_stored_covariance_is_not_amplified():
    """Channels of rank 2: the rest of a float32 average is rounding, which eps = 0 must not take for variance.

    The ridge of float32's epsilon of the largest variance bounds the gain by its inverse root.
    """
    torch.manual_seed(0)
    layer = DecorrelatedBatchNorm1d(8, eps=0.0, momentum=None, affine=False)
    mix = torch.randn(2, 8, dtype=F64)
    for _ in range(30):
        layer((torch.randn(500, 2, dtype=F64) @ mix).float())
    covariance = layer.running_covariance[0].double()
    largest = float(covariance.diagonal().max())
    gain = float(torch.linalg.matrix_norm(layer.eval().inference_transform().matrix[0].double(), 2))
    assert gain <= 1.01 * (1.19e-7 * largest) ** -0.5
    assert gain >= 0.3 * (1.19e-7 * largest) ** -0.5


def test_covariance_rounded_to_half_precision_is_repaired_with_a_warning():
    torch.manual_seed(0)
    source = DecorrelatedBatchNorm1d(16, momentum=1.0)
    source(torch.randn(400, 16) * torch.logspace(0, -4, 16) + torch.randn(400, 1))
    state = {name: tensor.bfloat16() for name, tensor in source.state_dict().items()}
    layer = DecorrelatedBatchNorm1d(16)
    layer.load_state_dict(state)
    lowest = float(torch.linalg.eigvalsh(layer.running_covariance.double()).min())
    assert lowest < -1e-4
    message = r"running covariance of DecorrelatedBatchNorm1d\(16\) has the eigenvalue -.*update_statistics"
    with pytest.warns(UserWarning, match=message):
        layer.eval()
    assert torch.linalg.matrix_norm(layer.whitening[0], 2) <= (1e-5) ** -0.5
    assert layer(torch.randn(4, 16)).isfinite().all()
    source.eval()(torch.randn(4, 16))  # rounding of float32 is no reason to warn


def test_statistics_that_are_not_finite_are_named_once_and_give_nan():
    layer = DecorrelatedBatchNorm1d(6)
    layer.running_covariance[0, 2, 3] = float("nan")
    with pytest.warns(UserWarning, match=r"DecorrelatedBatchNorm1d\(6\) holds NaN .* refresh the statistics"):
        layer.eval()
    assert layer(features(5, 6)).isnan().all()  # and says no more
    layer.reset_running_stats()
    assert layer(features(5, 6)).isfinite().all()


@pytest.mark.parametrize("solver", [oc.Eigh(), oc.Eigh(rank_tol=1e-3), oc.SVD(), oc.NewtonSchulz()], ids=str)
@pytest.mark.parametrize("eps", [0.0, 1e-5])
def test_no_state_stops_evaluation(solver, eps):
    """Not even one that is no covariance; the only words about it name the layer."""
    wild = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    values = torch.tensor([1e38, 1.0, 1e-38, 0.0, -1e-30, 1e10])
    kinds = [torch.zeros(6, 6), -torch.eye(6), wild, torch.full((6, 6), 3e38), torch.full((6, 6), -3e38), values.diag()]
    kinds += [float("nan") * wild, wild - float("inf")]
    for covariance in kinds:
        for excess in kinds:
            layer = DecorrelatedBatchNorm1d(6, eps=eps, solver=solver)
            layer.running_covariance.copy_(covariance)
            layer.excess.copy_(excess)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                layer.eval()(features(5, 6))
            assert all("of DecorrelatedBatchNorm1d(6)" in str(warning.message) for warning in caught)


def test_solver_that_fails_in_evaluation_is_reported_with_the_layer():
    class Failing(oc.Solver):
        def roots(self, a, eps, kinds):
            raise ValueError("No roots today.")

    layer = DecorrelatedBatchNorm1d(6, solver=Failing())
    layer.running_covariance.mul_(2)
    with pytest.raises(RuntimeError, match=r"DecorrelatedBatchNorm1d\(6\) cannot .* No roots today. Load a sound"):
        layer.eval()


# non-finite batches


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_that_is_not_finite_reaches_the_loss_but_not_the_statistics(value, momentum):
    layer = DecorrelatedBatchNorm2d(6, momentum=momentum)
    for batches in range(2):
        before = layer.state_dict()
        before = {name: tensor.clone() for name, tensor in before.items()}
        x = features(8, 6, 4, 4)
        x[1, 2, 3, 0] = value
        x.requires_grad_()
        layer.observer = pytest.fail  # a spectrum of it would be an error
        y = layer(x)
        layer.observer = None
        y.sum().backward()
        assert y.isnan().all()
        assert x.grad.isnan().all()
        assert layer.weight.grad.isnan().all()
        assert all(torch.equal(before[name], tensor) for name, tensor in layer.state_dict().items())
        assert layer.skipped_batches == batches + 1
        layer(features(8, 6, 4, 4))
    assert layer.num_batches_tracked == 2
    assert "skipped_batches" not in layer.state_dict()
    assert layer.eval()(features(8, 6, 4, 4)).isfinite().all()


def test_scaler_skips_the_step_of_an_overflow():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), DecorrelatedBatchNorm2d(6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    weight = model[0].weight.detach().clone()
    for scale, moved in ((float("inf"), False), (1.0, True)):
        loss = model(torch.randn(8, 3, 6, 6) * scale).pow(3).mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(weight, model[0].weight) != moved
    assert scaler.get_scale() == 4.0


def test_large_features_are_whitened_and_stay_out_of_float32_statistics():
    layer = DecorrelatedBatchNorm2d(6)
    x = features(8, 6, 4, 4)
    torch.testing.assert_close(layer(x * 1e20), oc.whiten(x, eps=0.0), rtol=1e-3, atol=1e-3)
    assert layer.skipped_batches == 1  # their squares are above the largest float32
    assert layer.eval()(x).isfinite().all()


def test_batch_that_is_not_finite_can_raise():
    layer = DecorrelatedBatchNorm2d(6, nonfinite="raise")
    x = features(2, 6, 4, 4)
    x[1, 2, 3, 0] = float("nan")
    with pytest.raises(ValueError, match="DecorrelatedBatchNorm2d needs finite features; 1 of 192"):
        layer(x)
    with pytest.raises(ValueError, match="squares are finite in float64"):
        layer(features(2, 6, 4, 4, dtype=F64) * 1e200)
    with pytest.raises(ValueError, match="'propagate', 'raise'"):
        DecorrelatedBatchNorm2d(6, nonfinite="ignore")


def test_too_few_samples_warn_once():
    layer = DecorrelatedBatchNorm2d(6)
    with pytest.warns(UserWarning, match="got 6 samples .* for groups of 6 channels"):
        layer(torch.randn(6, 6, 1, 1))
    layer(torch.randn(6, 6, 1, 1))
    DecorrelatedBatchNorm2d(6)(torch.randn(7, 6, 1, 1))
    DecorrelatedBatchNorm2d(6, groups=2)(torch.randn(6, 6, 1, 1))
    DecorrelatedBatchNorm2d(6).eval()(torch.randn(2, 6, 1, 1))


# statistics taken anew


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 3), DecorrelatedBatchNorm2d(6), nn.ReLU(), nn.BatchNorm2d(6, momentum=0.3))


def batches_of(count=4):
    torch.manual_seed(1)
    return [torch.randn(10, 3, 6, 6) * (1 + index) for index in range(count)]


def kinds(batches):
    return {
        "tensors": batches,
        "tuples": [(x, torch.zeros(10)) for x in batches],
        "lists": ([x, None] for x in batches),
        "dicts": [{"input": x} for x in batches],
    }


@pytest.mark.parametrize("kind", ["tensors", "tuples", "lists", "dicts"])
def test_statistics_are_plain_averages_over_all_batches(kind):
    model = network().eval()
    model[3].train()
    batches = batches_of()
    assert oc.update_statistics(model, kinds(batches)[kind]) == 4
    found = [model[0](x).detach().transpose(0, 1).flatten(1) for x in batches]
    torch.testing.assert_close(model[1].running_mean, torch.stack([x.mean(1) for x in found]).mean(0))
    torch.testing.assert_close(model[1].running_covariance[0], torch.stack([x.cov() for x in found]).mean(0))
    assert model[3].num_batches_tracked == 4
    assert [m.training for m in model] == [False, False, False, True]
    assert (model[1].momentum, model[3].momentum) == (0.1, 0.3)
    x = torch.randn(2, 3, 6, 6)
    fresh = network().eval()
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(model.eval()(x), fresh(x))


def test_torch_leaves_our_layers_alone():
    """Why `update_statistics` exists; should torch learn it, the documentation changes."""
    model = network()[:2]
    update_bn(batches_of(), model)
    assert model[1].num_batches_tracked == 0


def test_update_uses_as_many_batches_as_asked():
    model = network()
    assert oc.update_statistics(model, iter(batches_of()), batches=2) == 2
    assert model[1].num_batches_tracked == 2
    assert oc.update_statistics(model, batches_of(), batches=9) == 4
    calls = []
    oc.update_statistics(
        model, [{"pixels": x} for x in batches_of(2)], forward=lambda m, b: calls.append(m(b["pixels"]))
    )
    assert len(calls) == 2
    with pytest.raises(ValueError, match=r"batches=.* at least 1; got 0"):
        oc.update_statistics(model, batches_of(), batches=0)


def test_update_that_fails_changes_nothing():
    model = network()
    model(batches_of()[0])
    model[1].eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = torch.randn(2, 3, 6, 6)
    expected = model[:2](x)
    for loader, error in (
        ([*batches_of(), torch.randn(2, 5, 6, 6)], RuntimeError),
        ([], ValueError),
        (["a"], TypeError),
        ([*batches_of(), torch.full((2, 3, 6, 6), torch.nan)], ValueError),
    ):
        with pytest.raises(error):
            oc.update_statistics(model, loader)
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        assert [m.training for m in model] == [True, False, True, True]
        assert (model[1].momentum, model[3].momentum) == (0.1, 0.3)
        torch.testing.assert_close(model[:2](x), expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_batch_that_is_not_finite_never_ends_in_the_statistics(value):
    """Plain batch normalization averages it with the others; ours leaves it out."""
    batches = [*batches_of(3), torch.full((2, 3, 6, 6), value)]
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    with pytest.raises(ValueError, match=r"NaN or infinity reached 1\. The statistics are as before"):
        oc.update_statistics(plain, batches)
    assert torch.equal(plain[1].running_mean, torch.zeros(4))
    ours = oc.convert_batchnorm(plain)
    assert oc.update_statistics(ours, batches) == 4
    assert ours[1].num_batches_tracked == 3
    assert ours[1].running_covariance.isfinite().all()


def test_update_needs_something_to_update():
    for model in (nn.Linear(2, 2), DecorrelatedBatchNorm1d(4, track_running_stats=False)):
        with pytest.raises(ValueError, match="has none"):
            oc.update_statistics(model, [torch.randn(8, 4)])


def test_layers_that_no_batch_reaches_keep_their_statistics():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = DecorrelatedBatchNorm1d(4), DecorrelatedBatchNorm1d(4)

        def forward(self, x):
            return self.used(x)

    model = Branches()
    model.unused(features(30, 4))
    kept = model.unused.running_covariance.clone()
    with pytest.warns(UserWarning, match="No finite batch reached unused"):
        oc.update_statistics(model, [features(30, 4)])
    assert torch.equal(model.unused.running_covariance, kept)
    assert model.used.num_batches_tracked == 1


def test_averages_of_buffers_do_not_reach_the_whitening_of_evaluation():
    model = nn.Sequential(DecorrelatedBatchNorm1d(3, affine=False, momentum=0.5)).eval()
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True).eval()
    x = torch.randn(6, 3)
    average(x)
    for epoch in range(4):
        model.train()
        for _ in range(5):
            model(torch.randn(50, 3) @ torch.randn(3, 3) * (epoch + 1))
        model.eval()(x)
        average.update_parameters(model)
    expected = copy.deepcopy(average.module[0])
    expected._refresh()
    torch.testing.assert_close(average.eval()(x), expected(x))


def test_buffers_of_a_functional_call_do_not_come_back_later():
    layer, x = DecorrelatedBatchNorm1d(4, affine=False).eval(), torch.randn(9, 4)
    layer(x)
    layer.eps = 0.5
    expected = torch.func.functional_call(layer, dict(layer.named_buffers()), (x,))
    torch.testing.assert_close(layer(x), expected)


def test_buffers_copied_from_a_layer_with_another_ridge():
    one, two = (DecorrelatedBatchNorm1d(4, eps=eps, affine=False).eval() for eps in (1e-5, 0.5))
    x = torch.randn(9, 4)
    expected = two(x)
    one(x)
    for mine, other in zip(two.buffers(), one.buffers(), strict=True):
        mine.copy_(other)
    torch.testing.assert_close(two(x), expected)


def test_an_observer_is_shown_the_rank_whatever_the_ridge():
    """Products in float32 are enough for whitening with a ridge; they would fill the empty directions with rounding."""
    layer, seen = DecorrelatedBatchNorm2d(8, eps=1e-2), []
    layer.observer = seen.append
    layer(torch.einsum("oi,nihw->nohw", torch.randn(8, 3), torch.randn(64, 3, 16, 16)))
    assert int(oc.spectrum(seen[0]).rank) == 3
