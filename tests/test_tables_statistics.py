"""Statistics of few seeds, against SciPy and brute force; the paper's numbers, against what its text makes of them."""

import itertools
import math
import random

import pytest
from scipy import stats

from orthocond.lab.classification import paper
from orthocond.lab.tables import statistics

# Values


def test_two_seeds_have_the_distribution_of_cauchy():
    """With one degree of freedom everything has a closed form."""
    found = statistics.paired([3.0, 5.0], [2.0, 1.0])
    ratio = found.mean / (statistics.std([1.0, 4.0]) / math.sqrt(2))
    assert found.p == pytest.approx(1 - 2 / math.pi * math.atan(ratio), rel=1e-12)
    half = math.tan(math.pi * 0.475) * found.mean / ratio
    assert (found.low, found.high) == pytest.approx((found.mean - half, found.mean + half), rel=1e-9)


@pytest.mark.parametrize("count", [2, 3, 5, 10])
def test_paired_is_that_of_scipy(count):
    draw = random.Random(count)
    a = [draw.gauss(20, 1) for _ in range(count)]
    b = [draw.gauss(19.5, 1) for _ in range(count)]
    found = statistics.paired(a, b)
    expected = stats.ttest_rel(a, b)
    low, high = expected.confidence_interval(0.95)
    assert (found.low, found.high, found.p) == pytest.approx((low, high, expected.pvalue), rel=1e-9)
    assert found.mean == pytest.approx(sum(a) / count - sum(b) / count)
    assert found.count == count


def test_pooled_is_that_of_scipy():
    found = statistics.pooled((19.05, 0.31), (19.99, 0.16), 10)
    expected = stats.ttest_ind_from_stats(19.05, 0.31, 10, 19.99, 0.16, 10)
    assert found.p == pytest.approx(expected.pvalue, abs=1e-12)
    half = stats.t.ppf(0.975, 18) * abs(found.mean / expected.statistic)
    assert (found.low, found.high) == pytest.approx((found.mean - half, found.mean + half))


@pytest.mark.parametrize("margin", [0.05, 0.5, 2.0])
def test_equivalence_is_two_one_sided_tests_of_scipy(margin):
    differences = [0.1, -0.3, 0.4, 0.2, 0.05]
    found = statistics.equivalence(differences, margin)
    below = stats.ttest_1samp(differences, margin, alternative="less")
    above = stats.ttest_1samp(differences, -margin, alternative="greater")
    assert found.p == pytest.approx(max(below.pvalue, above.pvalue))
    interval = stats.ttest_1samp(differences, 0).confidence_interval(0.9)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_sign_flips_are_all_signs(count):
    draw = random.Random(count)
    values = [draw.gauss(0.5, 1) for _ in range(count)]
    signs = itertools.product((1, -1), repeat=count)
    far = [abs(sum(s * v for s, v in zip(sign, values, strict=True))) >= abs(sum(values)) - 1e-12 for sign in signs]
    assert statistics.sign_flips(values) == sum(far) / len(far)


def test_sums_that_differ_by_rounding_alone_are_equal():
    """0.1 + 0.7 + 1.1 is less than the sum without rounding: without slack no sum would reach it, and p would be 0."""
    assert math.fsum([0.1, 0.7, 1.1]) > (0.1 + 0.7) + 1.1
    assert statistics.sign_flips([0.1, 0.7, 1.1]) == 0.25


def test_sign_flips_are_scipys_permutation_test():
    values = [0.3, -0.1, 0.8, 0.5, 0.2, 0.05]
    expected = stats.permutation_test(
        (values,), lambda x: sum(x) / len(x), permutation_type="samples", n_resamples=math.inf
    )
    assert statistics.sign_flips(values) == pytest.approx(expected.pvalue)


def test_sign_flips_count_ties_whatever_the_rounding():
    # 0.1 + 0.2 is not 0.3 in floating point; all but the sums of 0 are as far as what was seen.
    assert statistics.sign_flips([0.1, 0.2, -0.3]) == 1.0
    assert statistics.sign_flips([0.3, 0.1, 0.2]) == 0.25
    # Ten times 0.1 is 1 if it is summed exactly, and less if it is summed one by one.
    assert statistics.sign_flips([0.1] * 10) == 2.0**-9


def test_holm_is_the_step_down_definition():
    p = [0.011, 0.02, 0.001, 0.3, 0.02]
    found = statistics.holm(p)
    for level in (0.004, 0.03, 0.05, 0.0801, 0.5):
        # Holm rejects in the order of the p-values until the first that is above level / (those left).
        rejected = set()
        for rank, index in enumerate(sorted(range(len(p)), key=p.__getitem__)):
            if p[index] > level / (len(p) - rank):
                break
            rejected.add(index)
        assert {i for i, value in enumerate(found) if value <= level} == rejected
    assert statistics.holm([]) == []
    assert statistics.holm([0.9, 0.8]) == [1.0, 1.0]


def test_std_is_that_of_a_sample():
    assert statistics.std([1.0, 2.0, 4.0]) == pytest.approx(math.sqrt(7 / 3))
    assert statistics.std([1.0]) is None


# Few and equal values


def test_one_pair_has_a_difference_and_no_interval():
    found = statistics.paired([3.0], [1.0])
    assert (found.mean, found.low, found.high, found.p, found.p_exact) == (2.0, None, None, None, None)


def test_equal_differences_are_certain_or_nothing():
    same = statistics.paired([1.0, 2.0], [1.0, 2.0])
    assert (same.low, same.high, same.p, same.p_exact) == (0.0, 0.0, 1.0, 1.0)
    shifted = statistics.paired([2.0, 3.0, 4.0], [1.0, 2.0, 3.0])
    assert (shifted.low, shifted.high, shifted.p, shifted.p_exact) == (1.0, 1.0, 0.0, 0.25)


def test_more_than_twenty_differences_have_no_exact_test():
    assert statistics.sign_flips([1.0] * 21) is None
    assert statistics.sign_flips([1.0] * 12) == 2.0**-11


def test_pairs_need_partners():
    with pytest.raises(ValueError, match="equally many on both sides, at least one; got 2 and 1"):
        statistics.paired([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="got 0 and 0"):
        statistics.paired([], [])


# The paper


def test_numbers_of_the_paper():
    assert paper.RESNET50_CIFAR100["nog+ow+olr"] == (19.05, 0.31, 18.77)
    assert paper.RESNET50_CIFAR100["nog+ol"] == (20.14, 0.39, 19.54)
    assert paper.RESNET50_CIFAR10["olr"] == (4.23, 0.17, 3.98)
    assert paper.DENSENET121_CIFAR100["nog"] == (25.14, 0.39, 24.65)
    assert paper.MOBILENETV2_CIFAR100["ns"] == (33.67, 0.51, 33.24)


def test_the_paper_rounds_differences_of_pooling_so():
    arrows = {"sn": (2, 1), "ol": (-14, -8), "ow": (-1, -1), "nog": (4, 3), "olr": (3, 2), "nog+ow": (6, 4)}
    arrows |= {"nog+ow+olr": (7, 6), "ns": (2, -1)}
    for name, tenths in arrows.items():
        for numbers, tenth in zip((paper.GCP_TOP1, paper.GCP_TOP5), tenths, strict=True):
            assert abs(10 * (numbers[name].mean - numbers["svd"].mean) - tenth) <= 0.5 + 1e-9, name


def test_the_paper_prints_additional_milliseconds():
    more = {"nog": (0, 2), "olr": (0, 1), "ow": (4, 7), "nog+ow+olr": (5, 11)}
    for name, expected in more.items():
        pairs = zip(paper.MILLISECONDS[name], paper.MILLISECONDS["svd"], strict=True)
        assert tuple(a - b for a, b in pairs) == expected


@pytest.mark.parametrize(
    "numbers",
    [
        paper.RESNET50_CIFAR10,
        paper.RESNET50_CIFAR100,
        paper.DENSENET121_CIFAR100,
        paper.MOBILENETV2_CIFAR100,
    ],
)
def test_the_best_of_ten_is_below_the_mean_and_near_it(numbers):
    assert all(0 < (n.mean - n.best) / n.std < 3 for n in numbers.values())
