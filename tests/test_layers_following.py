"""How statistics move from one weight to another where the weight tells little, and which features are strangers."""

import pytest
import torch
from torch import nn

from orthocond.layers import DecorrelatedBatchNorm1d
from orthocond.layers.following import RunningStatistics, moved, weight_of

F64 = torch.float64


def linear(weight):
    """A linear layer without bias that has this weight."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    layer.weight = nn.Parameter(weight.clone())
    return layer


def with_condition(kappa, rows=6, columns=3, rank=3):
    """A weight whose singular values go from 1 down to 1 / kappa; those beyond the rank are rounding."""
    u, _, v = torch.linalg.svd(torch.randn(rows, columns, dtype=F64), full_matrices=False)
    values = torch.logspace(0, -torch.tensor(float(kappa)).log10(), columns, dtype=F64)
    return u @ torch.diag(torch.where(torch.arange(columns) < rank, values, 1e-17)) @ v


def of_inputs(weight, variances=(1.0, 1.0, 1.0)):
    """Statistics of the features of independent inputs."""
    covariance = weight @ torch.diag(torch.tensor(variances, dtype=F64)) @ weight.mT
    return RunningStatistics(torch.zeros(len(weight), dtype=F64), covariance[None], None)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("kappa", [1.0, 1e2, 1e4])
def test_small_singular_values_count(kappa):
    old, new = with_condition(kappa), torch.randn(6, 3, dtype=F64)
    found, weight = moved(of_inputs(old), old[None], linear(new))
    torch.testing.assert_close(found.covariance, of_inputs(new).covariance, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(weight[0], new, rtol=0, atol=0)


def test_singular_values_that_are_rounding_do_not():
    """Inputs that the old weight did not show have no variance with the new one: nothing is known of them.

    There are 16 groups, as rounding may make an eigenvalue positive or negative.
    """
    old, new = torch.stack([with_condition(10, rank=2) for _ in range(16)]), torch.randn(96, 3, dtype=F64)
    before = RunningStatistics(torch.zeros(96, dtype=F64), old @ old.mT, None)
    found, _ = moved(before, old, linear(new))
    turn = new.reshape(16, 6, 3) @ torch.linalg.pinv(old, rtol=1e-9)
    torch.testing.assert_close(found.covariance, turn @ old @ old.mT @ turn.mT, rtol=1e-6, atol=1e-6)


def test_a_variance_below_zero_is_rounding():
    old, new = with_condition(10), torch.randn(6, 3, dtype=F64)
    found, _ = moved(of_inputs(old, (1.0, 1.0, -1e-3)), old[None], linear(new))
    torch.testing.assert_close(found.covariance, of_inputs(new, (1.0, 1.0, 0.0)).covariance)


def test_a_group_whose_weight_was_zero_keeps_its_statistics():
    """The other group goes along."""
    layer = nn.Linear(2, 8, bias=False, dtype=F64)
    then = weight_of(layer, 2).clone()
    then[0] = 0
    before = RunningStatistics(torch.ones(8, dtype=F64), torch.eye(4, dtype=F64).repeat(2, 1, 1), None)
    with torch.no_grad():
        layer.weight.add_(torch.randn(8, 2))
    found, _ = moved(before, then, layer)
    assert found.mean[:4].equal(before.mean[:4])
    assert found.covariance[0].equal(before.covariance[0])
    assert not found.covariance[1].allclose(before.covariance[1])


def test_one_group_of_features_of_another_layer_is_enough():
    layer = nn.Linear(2, 16)
    norm = DecorrelatedBatchNorm1d(16, groups=2).follow(layer)
    features = layer(torch.randn(64, 2)).detach()
    features[:, 8:] = torch.randn(64, 8)
    with pytest.warns(UserWarning, match="cannot have made"):
        norm(features)


def test_a_batch_that_tells_nothing_is_no_proof_of_the_origin():
    """Features are checked at the first batch with a weight that is finite."""
    layer = nn.Linear(2, 8)
    norm = DecorrelatedBatchNorm1d(8).follow(layer)
    weight = layer.weight.detach().clone()
    with torch.no_grad():
        layer.weight.fill_(torch.nan)
        norm(torch.randn(64, 8))
        layer.weight.copy_(weight)
    with pytest.warns(UserWarning, match="cannot have made"):
        norm(torch.randn(64, 8))


def test_statistics_that_are_reset_belong_to_no_weight():
    layer = nn.Linear(2, 8)
    norm = DecorrelatedBatchNorm1d(8).follow(layer)
    norm(layer(torch.randn(64, 2)))
    norm.reset_running_stats()
    with torch.no_grad():
        layer.weight.add_(1.0)
    x = torch.randn(4, 8)
    torch.testing.assert_close(norm.eval()(x), x, rtol=1e-4, atol=1e-4)  # the ridge is 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_leaves_what_evaluation_has_stored(dtype):
    layer = nn.Linear(2, 8)
    norm = DecorrelatedBatchNorm1d(8).follow(layer)
    norm(layer(torch.randn(64, 2)))
    stored = norm.eval().center.clone(), norm.whitening.clone()
    norm.to(dtype)
    assert norm.center.equal(stored[0])
    assert norm.whitening.equal(stored[1])


def test_the_weight_of_the_statistics_is_kept_as_precisely_as_they_are():
    layer = nn.Linear(2, 8, dtype=torch.bfloat16)
    norm = DecorrelatedBatchNorm1d(8).follow(layer)
    layer.float()
    with torch.no_grad():
        layer.weight.add_(torch.randn(8, 2), alpha=1e-4)
    norm(layer(torch.randn(64, 2)))
    assert norm.running_weight[0, :, :2].equal(layer.weight)
