"""The covariances of the table of solvers under stress, and its oracle against finite differences."""

import numpy as np
import pytest
import torch
from scipy import linalg

from orthocond.lab.classification import stress_cases
from orthocond.lab.config import change
from orthocond.layers import covariance_pool


def _factor(rows, columns):
    draw = torch.Generator().manual_seed(0)
    return torch.randn(rows, columns, dtype=torch.float64, generator=draw)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Sprites, of which an epoch has four steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORTHOCOND_DATA", str(tmp_path_factory.mktemp("empty")))
        patch.setitem(stress_cases._SPRITES, "data.limit", 200)
        found = stress_cases.Source.load()
    assert found.name.startswith("sprites")
    return stress_cases.Source(found.name, change(found.config, {"schedule.batch_size": 50}), found.pair)


# The oracle


@pytest.mark.parametrize("inverse", [True, False])
@pytest.mark.parametrize(("columns", "eps"), [(6, 0.0), (6, 0.1), (4, 0.1)])
def test_exact_gradient_is_that_of_finite_differences(columns, eps, inverse):
    """A central difference of SciPy's roots, in a random symmetric direction."""
    factor, outer, way = _factor(6, columns), _factor(6, 6), _factor(6, 6)
    way = way + way.mT

    def root(a):
        found = linalg.sqrtm(a.numpy()).real
        return linalg.inv(found) if inverse else found

    value, gradient = stress_cases.exact(factor, outer, eps, inverse=inverse)
    covariance = factor @ factor.mT + eps * torch.eye(6)
    np.testing.assert_allclose(value.numpy(), root(covariance), atol=1e-9)
    step = 1e-5
    ends = [root(covariance + sign * step * way) for sign in (1, -1)]
    slope = float((outer.numpy() * (ends[0] - ends[1])).sum()) / (2 * step)
    assert float((gradient * way).sum()) == pytest.approx(slope, rel=1e-5)


@pytest.mark.parametrize("inverse", [True, False])
@pytest.mark.parametrize("columns", [4, 5])
def test_exact_gradient_without_ridge_is_that_of_the_directions_that_exist(columns, inverse):
    """In directions that change the features, so that the rank stays: central differences of the four that exist.

    Of five columns the last one is made of the others, as in features whose mean was taken off.
    """
    mix = _factor(4, columns)
    factor, outer, way = _factor(6, 4) @ mix, _factor(6, 6), (_factor(6, 4) * 0.3 + 1) @ mix
    value, gradient = stress_cases.exact(factor, outer, 0.0, inverse=inverse)

    def root(f):
        values, u = np.linalg.eigh((f @ f.mT).numpy())
        return (u[:, 2:] * values[2:] ** (-0.5 if inverse else 0.5)) @ u[:, 2:].T

    np.testing.assert_allclose(value.numpy(), root(factor), atol=1e-10)
    step = 1e-6
    slope = float((outer.numpy() * (root(factor + step * way) - root(factor - step * way))).sum()) / (2 * step)
    change_ = way @ factor.mT + factor @ way.mT
    assert float((gradient * change_).sum()) == pytest.approx(slope, rel=1e-5)


# Stems


@pytest.mark.parametrize("treatment", stress_cases.FRESH)
def test_a_stem_has_27_directions_and_its_factor_makes_its_covariance(source, treatment):
    (case,) = stress_cases.fresh_stems(treatment, torch.float32, source, 1)
    product = case.factor @ case.factor.mT
    assert case.factor.shape == (64, 27)
    assert float(torch.linalg.matrix_norm(case.sharp - product) / torch.linalg.matrix_norm(product)) < 1e-6
    assert case.seen.dtype == torch.float32


def test_the_control_of_size_is_the_untreated_weight_times_two(source):
    plain, large = (next(stress_cases.fresh_stems(t, torch.float32, source, 1)) for t in ("svd", stress_cases.LARGE))
    assert torch.equal(large.factor, 2 * plain.factor)
    assert torch.allclose(large.sharp, 4 * plain.sharp)


def test_features_in_bfloat16_are_rounded(source):
    sharp, rounded = (next(stress_cases.fresh_stems("svd", t, source, 1)) for t in (torch.float32, torch.bfloat16))
    assert torch.equal(sharp.factor, rounded.factor)
    assert 1e-5 < float((sharp.sharp - rounded.sharp).norm() / sharp.sharp.norm()) < 1e-2


def test_trained_stems_have_the_weights_that_are_given(source):
    weights = [torch.zeros(64, 3, 3, 3), torch.zeros(64, 3, 3, 3)]
    weights[0][5, 1, 1, 1] = weights[1][6, 1, 1, 1] = 1.0
    cases = list(stress_cases.trained_stems(weights, torch.float32, source))
    assert [case.seen.diagonal().nonzero().tolist() for case in cases] == [[[5]], [[6]]]


def test_weights_of_a_training_are_those_of_its_second_half(source):
    """Four steps: so the two of the second half, or each of them twice."""
    two, four = (stress_cases.train_stem("SVD", source, 0, count) for count in (2, 4))
    assert not torch.equal(two[0], two[1])
    assert all(torch.equal(a, b) for a, b in zip(four, (two[0], two[0], two[1], two[1]), strict=True))
    assert not torch.equal(two[0], stress_cases.train_stem("SVD", source, 1, 2)[0])


def test_trainings_are_those_of_their_arms(source):
    """From one weight NOG goes elsewhere, and a weight that is kept orthogonal is."""
    plain, nog, full = (
        stress_cases.train_stem(arm, source, 0, 1)[0].flatten(1).double() for arm in ("SVD", "NOG", "NOG + OW + OLR")
    )
    assert 1e-4 < float((plain - nog).norm() / plain.norm()) < 0.5
    assert torch.allclose(full.mT @ full, torch.eye(27, dtype=torch.float64), atol=1e-5)
    assert not torch.allclose(nog.mT @ nog, torch.eye(27, dtype=torch.float64), atol=1e-1)


# Pooled features


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pooled_features_have_fewer_positions_than_channels(source, dtype):
    (case,) = stress_cases.pooled("svd", dtype, source, 1)
    assert case.features.shape == (256, 8, 8)
    assert case.features.dtype == dtype
    assert 32 < torch.linalg.matrix_rank(case.sharp) <= 63
    np.testing.assert_allclose((case.factor @ case.factor.mT).numpy(), case.sharp.numpy(), atol=1e-12)
    root = covariance_pool(case.features.double()[None], output="matrix")[0]
    np.testing.assert_allclose((root @ root).numpy(), case.sharp.numpy(), atol=1e-10)


def test_networks_images_and_treatments_of_pooled_features_differ(source):
    plain = list(stress_cases.pooled("svd", torch.float32, source, 2))
    (treated,) = stress_cases.pooled("ow", torch.float32, source, 1)
    found = [plain[0].features, plain[1].features, treated.features]
    assert all((a - b).norm() > 0.1 * a.norm() for a, b in zip(found, found[1:] + found[:1], strict=True))


# Pairs


def test_pairs_have_equal_eigenvalues_up_to_rounding():
    (case,) = stress_cases.pairs(torch.float32, 1)
    values = torch.linalg.eigvalsh(case.sharp)
    np.testing.assert_allclose(values[::2], values[1::2], rtol=1e-5)
    np.testing.assert_allclose(values[[0, -1]], [1, 100], rtol=1e-5)
