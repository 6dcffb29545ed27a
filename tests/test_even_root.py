"""Large matrices whose singular values lie close together: half of each product, and no decomposition."""

import pytest
import torch

import orthocond as oc
from orthocond.matrix.even_root import even_inverse_root, symmetric_product
from tests.helpers import relative_error
from tests.test_polar import with_singular_values

EVEN = {  # singular values whose squares lie close together
    "independent entries, 256 x 2304": lambda: torch.randn(256, 2304),
    "independent entries, 1152 x 256": lambda: torch.randn(1152, 256),
    "independent entries, 200 x 4000": lambda: torch.randn(200, 4000),
    "nearly orthogonal": lambda: with_singular_values(300, 400, 0.9 + 0.2 * torch.rand(300).double())[0].float(),
    "orthogonal": lambda: with_singular_values(260, 300, torch.ones(260))[0].float(),
    "two values": lambda: with_singular_values(300, 400, [1.0, 1.5] * 150)[0].float(),
}


@pytest.mark.parametrize("case", EVEN)
@pytest.mark.parametrize("scale", [1e-5, 1.0, 1e5])
def test_large_matrices_of_even_singular_values(case, scale, monkeypatch):
    """By the polynomial, to 3e-6 and what float32 adds: a decomposition is not called for."""
    g = EVEN[case]() * scale
    u, _, v = torch.linalg.svd(g.double(), full_matrices=False)
    monkeypatch.setattr("orthocond.matrix.decompose.eigh", None)
    assert relative_error(oc.polar(g), u @ v) < 4e-6


UNEVEN = {  # the mean and the variance of the eigenvalues say that it may do, and the check that it does not
    "one small": [1.0] * 199 + [0.3],
    "one large": [1.0] * 199 + [2.0],
    "one of zero": [1.0] * 199 + [0.0],
    "two values": [1.0] * 180 + [0.5] * 20,
}


@pytest.mark.parametrize("case", UNEVEN)
def test_polynomial_is_left_where_it_would_not_do(case):
    g, _ = with_singular_values(200, 300, UNEVEN[case])
    assert even_inverse_root((g @ g.mT).float()) is None
    exact = oc.polar(g.float().double(), method=oc.GramPolar(precision="float64"))
    assert relative_error(oc.polar(g.float()), exact) < 1e-5


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
def test_polynomial_of_no_matrix(value):
    assert even_inverse_root(torch.full((200, 200), value)) is None
    assert even_inverse_root(-torch.eye(200)) is None


def test_polynomial_takes_no_random_numbers():
    state = torch.get_rng_state()
    assert even_inverse_root(torch.eye(200)) is not None
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("rows", [1, 128, 200, 300])
def test_symmetric_product(rows):
    a = torch.randn(rows, 40, dtype=torch.float64)
    torch.testing.assert_close(symmetric_product(a, a.mT), a @ a.mT)
    start = torch.ones(rows, rows, dtype=torch.float64)
    assert symmetric_product(a, a.mT, start) is start
    torch.testing.assert_close(start, 1 + a @ a.mT)
    b = a @ a.mT
    torch.testing.assert_close(symmetric_product(b, b), b @ b)
