"""MIG, DCI, SAP, modularity: brute force, perfect, turned and random codes, errors."""

import math

import numpy as np
import pytest
import scipy.stats
import torch
from sklearn.ensemble import GradientBoostingRegressor

from orthocond.metrics import dci, modularity, mutual_information, mutual_information_gap, sap
from orthocond.metrics._boosting import Boosting

N = 1000


def uniform(columns, seed=0, n=N):
    return torch.rand(n, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def brute_information(a, b):
    """Over all pairs of values, from counts, in plain Python."""
    pairs = list(zip(a.tolist(), b.tolist(), strict=True))
    n, total = len(pairs), 0.0
    for x in set(a.tolist()):
        for y in set(b.tolist()):
            p = pairs.count((x, y)) / n
            if p:
                total += p * math.log(p / (a.tolist().count(x) / n * b.tolist().count(y) / n))
    return total


# mutual information


def test_mutual_information_is_that_of_the_table():
    random = torch.Generator().manual_seed(0)
    a = torch.randint(4, (60, 3), generator=random)
    b = torch.stack([a[:, 0] % 2, (a[:, 1] + torch.randint(2, (60,), generator=random)) % 3 - 7], 1)
    expected = torch.tensor([[brute_information(a[:, i], b[:, k]) for k in range(2)] for i in range(3)])
    found = mutual_information(a.double(), b, bins=4)
    torch.testing.assert_close(found, expected.double(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("binning", ["width", "quantile"])
def test_bins_equal_numpy(binning):
    x, y = uniform(1).square(), uniform(1, 1) + uniform(1).square()
    edges = [
        np.histogram_bin_edges(v, 10) if binning == "width" else np.quantile(v, np.linspace(0, 1, 11), method="lower")
        for v in (x.numpy(), y.numpy())
    ]
    joint = np.histogram2d(x[:, 0], y[:, 0], edges)[0] / N
    outer = joint.sum(1, keepdims=True) * joint.sum(0)
    expected = (joint[joint > 0] * np.log(joint[joint > 0] / outer[joint > 0])).sum()
    found = mutual_information(x, y, bins=10, binning=binning)
    assert float(found) == pytest.approx(expected, rel=1e-2 if binning == "quantile" else 1e-6)


def test_an_outlier_upsets_bins_of_equal_width_only():
    x = uniform(2)
    x[0, 0] = 1e6
    assert float(mutual_information(x, x)[0, 0]) < 0.1
    assert float(mutual_information(x, x, binning="quantile")[0, 0]) > 2.9


# scores


def test_perfect_codes_score_one():
    z = uniform(3)
    turned = z[:, [2, 0, 1]] * torch.tensor([-1.0, 5.0, 0.1]) + 2  # order, sign and scale do not count
    assert mutual_information_gap(turned, z) > 0.93
    assert modularity(turned, z) > 0.99
    assert sap(turned, z) > 0.99
    result = dci(turned, z)
    assert min(result.disentanglement, result.completeness, result.informativeness) > 0.97
    assert result.importance.argmax(0).tolist() == [1, 2, 0]


def test_turned_codes_score_low():
    factors = torch.randn(N, 3, generator=torch.Generator().manual_seed(0))
    codes = factors @ torch.tensor([[2.0, -1.0, 2.0], [2.0, 2.0, -1.0], [-1.0, 2.0, 2.0]]) / 3  # a rotation
    assert mutual_information_gap(codes, factors) < 0.05  # two codes know each factor equally well
    assert sap(codes, factors) < 0.05
    assert modularity(codes, factors) < 0.6
    result = dci(codes, factors)
    # Shares of about 4/9, 1/9 and 4/9 of the variance leave 1 - 0.88 of the entropy.
    assert result.disentanglement < 0.4
    assert result.completeness < 0.4
    assert result.informativeness > 0.9  # nothing is lost


def test_random_codes_score_nothing():
    codes, factors = uniform(4, 1), uniform(3)
    assert mutual_information_gap(codes, factors) < 0.03
    assert sap(codes, factors) < 0.01
    assert modularity(codes, factors) < 0.4  # ratios of noise
    result = dci(codes, factors)
    assert result.informativeness < 0.05
    assert result.disentanglement < 0.2


def test_one_code_for_two_factors_is_complete_but_not_disentangled():
    factors = uniform(2)
    codes = torch.stack([(factors * 8).floor() @ torch.tensor([8.0, 1.0], dtype=torch.float64), uniform(1, 3)[:, 0]], 1)
    result = dci(codes, factors, trees=60, depth=5)
    assert result.completeness > 0.9
    assert result.disentanglement < 0.3


def test_closed_forms():
    # Code 0 is the factor v in {0..3}, code 1 its parity: I = 2 and 1 bits of H = 2.
    v = torch.arange(400) % 4
    codes = torch.stack([v, v % 2], 1).double()
    assert mutual_information_gap(codes, v[:, None], bins=4) == pytest.approx(0.5)
    # One code of two bits about factor one and one bit about factor two: 1 - (1/2)².
    factors = torch.stack([v, v % 2], 1)
    assert modularity(codes[:, :1], factors, bins=4) == pytest.approx(0.75)
    # R² of v with itself is 1; with its parity 1 / 5, the correlation of (0, 1, 2, 3) and (0, 1, 0, 1) being 1 / √5.
    assert sap(codes, v[:, None].double()) == pytest.approx(0.8)
    # Between the two parities lies all variance of the parity and 1 / 5 of that of v.
    assert sap(codes, (v % 2)[:, None]) == pytest.approx(0.8)


def test_classes_are_classes():
    z = uniform(3)
    classes = torch.stack([(z[:, 0] * 4).long() * 10, (z[:, 1] > 0.5).long()], 1)
    result = dci(z, classes, trees=40)
    assert result.informativeness > 0.97
    assert result.disentanglement > 0.95
    assert mutual_information_gap(z, classes) > 0.9
    jumbled = torch.stack([torch.tensor([3, 0, 2, 1])[classes[:, 0] // 10], classes[:, 1]], 1)
    assert mutual_information_gap(z, jumbled) == pytest.approx(mutual_information_gap(z, classes))
    assert sap(z, jumbled) == pytest.approx(sap(z, classes))


def test_a_constant_factor_counts_as_zero():
    z = uniform(3)
    factors = torch.cat([z[:, :1], torch.full((N, 1), 0.1)], 1).double()
    assert mutual_information_gap(z, factors) == pytest.approx(mutual_information_gap(z, z[:, :1]) / 2)
    assert sap(z, factors) == pytest.approx(sap(z, z[:, :1]) / 2)
    result = dci(z, factors)
    assert 0.45 < result.completeness < 0.5
    assert result.importance[:, 1].tolist() == [0, 0, 0]
    assert 0.45 < result.informativeness <= 0.5
    everything = dci(z, torch.ones(N, 2))
    assert (everything.disentanglement, everything.completeness, everything.informativeness) == (0, 0, 0)
    assert modularity(torch.ones(N, 2), z) == 0
    assert dci(z, torch.ones(N, 2, dtype=torch.long)).informativeness == 0


# boosted trees


def test_one_tree_is_the_best_split():
    """Depth one, one tree, rate one: the split of least squared error, found by brute force."""
    x, y = uniform(2, n=40), uniform(1, 1, n=40)
    y[x[:, 1] > 0.6] += 2
    _, (found,) = Boosting(trees=1, depth=1, rate=1.0).fit(x, y[None], x)
    best = math.inf
    for column in x.mT:
        for cut in column.tolist():
            left = column <= cut
            if left.all():
                continue
            fit = torch.where(left, y[left].mean(), y[~left].mean())
            best = min(best, float((y[:, 0] - fit).square().sum()))
    assert float((y - found).square().sum()) == pytest.approx(best)


def test_trees_learn_what_is_not_linear():
    x = uniform(4, n=1500) * 2 - 1
    y = (x[:, :1] * x[:, 1:2]).sign() + x[:, 2:3].square()
    (importance,), (found,) = Boosting().fit(x[:1000], y[None, :1000], x[1000:])
    error = (y[1000:] - found).square().mean() / y[1000:].var()
    assert error < 0.1
    assert importance.sum() == pytest.approx(1)
    assert float(importance[3]) < 0.03 < float(importance[:3].min())


def test_targets_at_once_are_as_targets_alone():
    x = uniform(3, n=300)
    y = torch.stack([x[:, :2], x[:, 1:].square()])
    importance, found = Boosting(trees=5).fit(x[:200], y[:, :200], x[200:])
    for i in range(2):
        (alone,), (other,) = Boosting(trees=5).fit(x[:200], y[i : i + 1, :200], x[200:])
        torch.testing.assert_close(importance[i], alone)
        torch.testing.assert_close(found[i], other)


def dci_by_scikit_learn(codes, factors, seed=0):
    """Disentanglement, completeness and informativeness with scikit-learn's trees and SciPy's entropies."""
    order = torch.randperm(len(codes), generator=torch.Generator().manual_seed(seed))
    test, train = order.tensor_split([round(len(codes) / 3)])
    columns, scores = [], []
    for factor in factors.mT:
        model = GradientBoostingRegressor(random_state=0).fit(codes[train].numpy(), factor[train].numpy())
        columns.append(model.feature_importances_)
        scores.append(model.score(codes[test].numpy(), factor[test].numpy()))
    r = np.stack(columns, 1)
    share = r.sum(1) / r.sum()
    disentanglement = share @ (1 - scipy.stats.entropy(r, base=r.shape[1], axis=1))
    completeness = (1 - scipy.stats.entropy(r, base=len(r), axis=0)).mean()
    return disentanglement, completeness, np.mean(scores)


@pytest.mark.parametrize("angle", [0.0, 0.3, 1.0])
def test_dci_is_that_of_scikit_learns_trees(angle):
    factors = uniform(3, n=900) * 2 - 1
    skew = torch.tensor([[0, -1, 2], [1, 0, -1], [-2, 1, 0]], dtype=torch.float64) / 2
    codes = torch.cat([factors @ torch.linalg.matrix_exp(angle * skew), uniform(1, 2, n=900)], 1)
    codes[:, 0] = codes[:, 0] ** 3
    result = dci(codes, factors)
    found = (result.disentanglement, result.completeness, result.informativeness)
    assert found == pytest.approx(dci_by_scikit_learn(codes, factors), abs=5e-3)


# errors


@pytest.mark.parametrize("score", [mutual_information, mutual_information_gap, modularity, sap, dci])
def test_errors(score):
    z = uniform(2, n=20)
    with pytest.raises(ValueError, match=r"same n of at least 2; got \(20, 2\) and \(19, 2\)"):
        score(z, z[1:])
    with pytest.raises(ValueError, match=r"got \(20,\) and"):
        score(z[:, 0], z)
    with pytest.raises(TypeError, match="floating-point"):
        score(z.long(), z)
    broken = z.clone()
    broken[3, 1] = torch.nan
    with pytest.raises(ValueError, match="0 rows of the codes and 1 of the factors"):
        score(z, broken)


def test_numbers_of_codes_and_factors():
    z = uniform(2, n=20)
    for score in (mutual_information_gap, sap, dci):
        with pytest.raises(ValueError, match="at least 2 codes"):
            score(z[:, :1], z)
    for score in (modularity, dci):
        with pytest.raises(ValueError, match="2 factors; got 2 and 1"):
            score(z, z[:, :1])
    with pytest.raises(ValueError, match="two samples on each side"):
        dci(z, z, test_ratio=0.01)
    with pytest.raises(ValueError, match=r"dci\(trees=...\).* got 0"):
        dci(z, z, trees=0)
    with pytest.raises(ValueError, match="bins"):
        mutual_information(z, z, bins=1)
    with pytest.raises(ValueError, match="'width', 'quantile'; got 'log'"):
        mutual_information_gap(z, z, binning="log")
