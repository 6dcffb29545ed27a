"""What a few seeds say: means, paired differences with intervals, exact tests, a correction for many rows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from scipy.special import stdtr, stdtrit  # type: ignore[import-untyped]

LEVEL = 0.05
"""Below this a p-value counts as significant."""

_EXACT_UP_TO = 20  # differences, whose 2^20 signs take a second


@dataclass(frozen=True)
class Difference:
    """A mean difference and what is known about it; None where the values are too few.

    Attributes:
        mean: The mean difference.
        low: Lower end of the 95 % interval of Student's t.
        high: Its upper end.
        p: Two-sided p-value of the t-test that the mean is 0.
        p_exact: Two-sided p-value of the exact test by flips of signs, for paired values.
        count: How many differences.
    """

    mean: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    p_exact: float | None = None
    count: int = 1


@dataclass(frozen=True)
class Equivalence:
    """How sure it is that a mean difference lies within a margin.

    Attributes:
        low: Lower end of the 90 % interval of Student's t.
        high: Its upper end.
        p: The larger p-value of two one-sided t-tests; below 0.05 if, and only if, the interval is within the margin.
    """

    low: float
    high: float
    p: float


def std(values: Sequence[float]) -> float | None:
    """The standard deviation of a sample, with n - 1; None for a single value."""
    return stdev(values) if len(values) > 1 else None


def paired(values: Sequence[float], baseline: Sequence[float]) -> Difference:
    """The mean of ``values - baseline``, where values of the same place belong together.

    Args:
        values: One number for each seed.
        baseline: Those of the baseline, with the same seeds.

    Returns:
        The difference, with the t-interval and both p-values.

    Raises:
        ValueError: If there are none, or not equally many.

    Example:
        >>> d = paired([3.0, 4.0, 5.0], [2.0, 2.5, 3.0])
        >>> print(f"{d.mean:.2f} [{d.low:.2f}, {d.high:.2f}], p = {d.p:.3f}, exact {d.p_exact:.2f}")
        1.50 [0.26, 2.74], p = 0.035, exact 0.25
    """
    if not values or len(values) != len(baseline):
        raise ValueError(
            f"Paired values need equally many on both sides, at least one; got {len(values)} and {len(baseline)}."
        )
    differences = [a - b for a, b in zip(values, baseline, strict=True)]
    spread = std(differences)
    if spread is None:
        return Difference(differences[0])
    n = len(differences)
    return _student(fmean(differences), spread / math.sqrt(n), n - 1, n, sign_flips(differences))


def equivalence(differences: Sequence[float], margin: float) -> Equivalence | None:
    """Two one-sided t-tests that the mean difference is between ``-margin`` and ``margin``; None for a single value.

    Example:
        >>> found = equivalence([0.1, -0.1, 0.2, 0.0], 0.5)
        >>> print(f"[{found.low:.2f}, {found.high:.2f}], p = {found.p:.4f}")
        [-0.10, 0.20], p = 0.0030
    """
    spread = std(differences)
    if spread is None:
        return None
    center, degrees = fmean(differences), len(differences) - 1
    error = spread / math.sqrt(len(differences))
    half = float(stdtrit(degrees, 1 - LEVEL)) * error
    room = margin - abs(center)  # to the nearer end of the margin, whose test has the larger p-value
    p = float(stdtr(degrees, -room / error)) if error > 0 else float(room <= 0)
    return Equivalence(center - half, center + half, p)


def pooled(a: tuple[float, float], b: tuple[float, float], count: int) -> Difference:
    """The difference of two published means with their standard deviations, each over ``count`` unpaired runs.

    Example:
        >>> d = pooled((19.05, 0.31), (19.99, 0.16), 10)
        >>> print(f"{d.mean:.2f} [{d.low:.2f}, {d.high:.2f}]")
        -0.94 [-1.17, -0.71]
    """
    error = math.sqrt((a[1] ** 2 + b[1] ** 2) / count)
    return _student(a[0] - b[0], error, 2 * count - 2, count, None)


def _student(center: float, error: float, degrees: int, count: int, p_exact: float | None) -> Difference:
    half = float(stdtrit(degrees, 0.975)) * error
    if error > 0:
        p = 2 * float(stdtr(degrees, -abs(center) / error))
    else:
        p = 1.0 if center == 0 else 0.0
    return Difference(center, center - half, center + half, p, p_exact, count)


def sign_flips(differences: Sequence[float]) -> float | None:
    """Two-sided p-value of a mean of 0, from all ``2^n`` signs that the differences could have had.

    It supposes nothing but that signs are as likely as their opposites; it is never below ``2^(1-n)``.

    Args:
        differences: The differences.

    Returns:
        The fraction of signs whose sum is at least as far from 0; None if there are more than 20 differences.

    Example:
        >>> sign_flips([1.0, 2.0, 0.5])
        0.25
    """
    if len(differences) > _EXACT_UP_TO:
        return None
    sums = [0.0]
    for value in differences:
        sums = [s + value for s in sums] + [s - value for s in sums]
    # Sums of the same numbers in another order differ by rounding.
    slack = 1e-9 * math.fsum(map(abs, differences))
    observed = abs(math.fsum(differences)) - slack
    return sum(abs(s) >= observed for s in sums) / len(sums)


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values corrected for their number (Holm): the chance of any false finding stays below the level.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected
