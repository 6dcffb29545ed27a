"""The kernel distance (KID): against its definition by loops and torchmetrics, its mean over samples, errors."""

import itertools
import math

import pytest
import torch
from torchmetrics.image.kid import poly_mmd

from orthocond.metrics import kernel_distance


def kernel(a, b):
    return (float(a @ b) / len(a) + 1) ** 3


@pytest.mark.parametrize(("m", "n", "d"), [(2, 2, 1), (5, 7, 3), (9, 4, 12)])
def test_it_is_its_definition(m, n, d):
    x, y = torch.randn(m, d, dtype=torch.float64), torch.randn(n, d, dtype=torch.float64) + 0.5
    within = [
        math.fsum(kernel(a, b) for a, b in itertools.permutations(rows, 2)) / math.perm(len(rows), 2) for rows in (x, y)
    ]
    between = math.fsum(kernel(a, b) for a in x for b in y) / (m * n)
    assert kernel_distance(x, y) == pytest.approx(sum(within) - 2 * between, rel=1e-12)


def test_it_is_that_of_torchmetrics():
    x, y = torch.randn(40, 16, dtype=torch.float64), torch.rand(40, 16, dtype=torch.float64)
    assert kernel_distance(x, y) == pytest.approx(float(poly_mmd(x, y)), rel=1e-9)


def test_two_samples_of_one_distribution_are_at_zero_on_average():
    found = torch.tensor([kernel_distance(torch.randn(8, 3), torch.randn(20, 3)) for _ in range(400)])
    assert abs(float(found.mean())) < 4 * float(found.std()) / 20
    assert found.min() < 0


def test_it_is_computed_in_float64_and_without_gradient():
    x, y = 1e3 * torch.randn(30, 5), 1e3 * torch.randn(30, 5).requires_grad_()
    assert kernel_distance(x, y) == kernel_distance(x.double(), y.double())


@pytest.mark.parametrize(
    ("a", "b", "kind", "text"),
    [
        (torch.ones(3), torch.ones(3, 1), ValueError, r"got \(3,\) and \(3, 1\)"),
        (torch.ones(3, 2), torch.ones(3, 4), ValueError, r"got \(3, 2\) and \(3, 4\)"),
        (torch.ones(1, 2), torch.ones(3, 2), ValueError, "at least two images"),
        (torch.ones(2, 0), torch.ones(3, 0), ValueError, r"\(2, 0\)"),
        (torch.tensor([[1.0], [math.nan]]), torch.ones(3, 1), ValueError, "finite features"),
        (torch.ones(3, 1), torch.tensor([[1.0], [math.inf]]), ValueError, "finite features"),
        (torch.ones(3, 2, dtype=torch.long), torch.ones(3, 2), TypeError, r"kernel_distance\(a\)"),
    ],
)
def test_errors(a, b, kind, text):
    with pytest.raises(kind, match=text):
        kernel_distance(a, b)
