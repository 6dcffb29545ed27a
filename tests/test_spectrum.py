"""Rank and condition numbers, reported honestly; and which matrix a weight is."""

import math

import pytest
import torch

import orthocond as oc
from tests.helpers import spd, with_spectrum

# values


def test_regular_matrix():
    s = oc.spectrum(with_spectrum([1.0, 2.0, 8.0]), eps=1.0)
    assert s.rank == 3
    assert s.size == 3
    assert not s.singular
    torch.testing.assert_close(s.eigenvalues, torch.tensor([8.0, 2.0, 1.0]).double())
    assert s.largest.item() == pytest.approx(8)
    assert s.smallest.item() == pytest.approx(1)
    assert s.condition.item() == pytest.approx(9 / 2)
    assert s.condition_on_range.item() == pytest.approx(8)


def test_effective_rank_in_closed_form():
    torch.testing.assert_close(oc.spectrum(3 * torch.eye(5)).effective_rank, torch.tensor(5.0).double())
    torch.testing.assert_close(oc.spectrum(torch.ones(4, 4)).effective_rank, torch.tensor(1.0).double())
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    found = oc.spectrum(torch.diag(torch.tensor([3.0, 1.0]))).effective_rank
    assert found.item() == pytest.approx(math.exp(entropy))


@pytest.mark.parametrize("cond", [10.0, 1e4, 1e8, 1e12])
def test_condition_against_torch(cond):
    a = spd(6, cond)
    assert oc.spectrum(a).condition.item() == pytest.approx(torch.linalg.cond(a).item(), rel=1e-2)


# invariants


def test_structurally_singular_covariance_says_so():
    """A 3x3 convolution of 3 channels: rank at most 27 of 64, in either precision, not a condition number of 1e12."""
    for dtype in (torch.float32, torch.float64):
        weight = torch.randn(64, 27, dtype=dtype)
        x = weight @ torch.randn(27, 5000, dtype=dtype)
        covariance = x @ x.mT / 5000
        s = oc.spectrum(covariance)
        assert s.rank == 27
        assert s.singular
        assert s.condition == math.inf
        assert s.smallest == 0
        assert 1 < s.condition_on_range < 1e3
        ridged = oc.spectrum(covariance, eps=1e-2)
        assert not ridged.singular
        assert ridged.condition.item() == pytest.approx((ridged.largest.item() + 1e-2) / 1e-2)
        assert "rank 27 of 64" in str(s)
        assert "singular" in str(s)


def test_zero_matrix():
    s = oc.spectrum(torch.zeros(3, 3))
    assert s.rank == 0
    assert s.singular
    assert s.effective_rank == 0
    assert s.condition_on_range.isnan()
    assert oc.spectrum(torch.zeros(3, 3), eps=0.1).condition == 1


def test_rank_tolerance():
    a = torch.diag(torch.tensor([1.0, 1e-3, 1e-6]).double())
    assert oc.spectrum(a).rank == 3
    assert oc.spectrum(a, rank_tol=1e-4).rank == 2
    assert oc.spectrum(a, rank_tol=1e-4).condition_on_range.item() == pytest.approx(1e3)


def test_singular_spectrum_is_that_of_the_gram_matrix():
    w = torch.randn(5, 8, dtype=torch.float64)
    singular, eigen = oc.singular_spectrum(w), oc.spectrum(w @ w.mT)
    torch.testing.assert_close(singular.eigenvalues.square(), eigen.eigenvalues)
    torch.testing.assert_close(singular.condition.square(), eigen.condition)
    assert oc.singular_spectrum(torch.ones(4, 3)).rank == 1


# shapes and dtypes


@pytest.mark.parametrize("batch", [(), (1,), (2, 3), (0,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_batches(batch, dtype):
    s = oc.spectrum(spd(3, 4.0, *batch).to(dtype))
    for field in ("rank", "largest", "smallest", "condition", "condition_on_range", "effective_rank", "singular"):
        assert getattr(s, field).shape == batch
    assert s.eigenvalues.shape == (*batch, 3)
    assert s.condition.dtype == torch.float64
    assert str(s)


def test_no_gradient_is_kept():
    assert not oc.spectrum(torch.eye(2, requires_grad=True)).condition.requires_grad


# errors


@pytest.mark.parametrize(
    ("a", "settings", "error", "text"),
    [
        (torch.ones(2, 3), {}, ValueError, "square"),
        (torch.ones(2, 2, dtype=torch.int64), {}, TypeError, "floating-point"),
        (torch.ones(0, 0), {}, ValueError, "at least 1"),
        (torch.full((2, 2), torch.nan), {}, ValueError, "NaN"),
        (torch.tensor([[1.0, 0.2], [0.1, 1.0]]), {}, ValueError, "symmetric matrices, such as covariances"),
        (
            torch.nn.Conv2d(3, 8, 3).weight,
            {},
            ValueError,
            r"\(8, 3, 3, 3\) are not.*singular_spectrum\(matrix",
        ),
        (torch.eye(2), {"eps": -1.0}, ValueError, "eps"),
        (torch.eye(2), {"rank_tol": -1.0}, ValueError, "rank_tol"),
    ],
)
def test_bad_input(a, settings, error, text):
    with pytest.raises(error, match=text):
        oc.spectrum(a, **settings)


def test_bad_rectangular_input():
    with pytest.raises(ValueError, match="non-empty"):
        oc.singular_spectrum(torch.ones(3))
    with pytest.raises(ValueError, match="NaN"):
        oc.singular_spectrum(torch.full((2, 3), torch.nan))
    weight = torch.nn.Conv2d(3, 8, 3).weight
    with pytest.raises(ValueError, match=r"\(8, 3, 3, 3\) would be read as a batch of small kernels. Pass matrix_view"):
        oc.singular_spectrum(weight)
    assert oc.singular_spectrum(oc.matrix_view(weight)).size == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_covariance_may_be_as_little_symmetric_as_rounding_makes_it(dtype):
    x = torch.randn(64, 200)
    noise = torch.finfo(dtype).eps * torch.randn(64, 64)
    assert oc.spectrum((torch.cov(x) * (1 + noise)).to(dtype), rank_tol=1e-3).rank == 64


# the matrix of a weight


def test_matrix_view_shares_memory_and_goes_back():
    conv = torch.nn.Conv2d(3, 8, 3)
    view = oc.matrix_view(conv.weight)
    assert view.data_ptr() == conv.weight.data_ptr()
    assert torch.equal(view.reshape(conv.weight.shape), conv.weight)


def test_matrix_view_is_the_map_of_patches():
    """A convolution is this matrix times the unfolded input."""
    conv = torch.nn.Conv2d(3, 8, 3, bias=False)
    x = torch.randn(2, 3, 6, 6)
    product = oc.matrix_view(conv.weight) @ torch.nn.functional.unfold(x, 3)
    torch.testing.assert_close(conv(x).flatten(2), product)


def test_matrix_view_of_groups_is_the_map_of_each_group():
    conv = torch.nn.Conv2d(4, 6, 3, groups=2, bias=False)
    x = torch.randn(1, 4, 5, 5)
    patches = torch.nn.functional.unfold(x, 3).unflatten(1, (2, 18))[0]
    product = oc.matrix_view(conv.weight, groups=2) @ patches
    torch.testing.assert_close(conv(x).flatten(2)[0], product.flatten(0, 1))


def test_matrix_view_errors():
    with pytest.raises(ValueError, match="two dimensions"):
        oc.matrix_view(torch.ones(3))
    with pytest.raises(ValueError, match="divide the 6 rows"):
        oc.matrix_view(torch.ones(6, 2), groups=4)


def test_html():
    html = oc.spectrum(torch.diag(torch.tensor([4.0, 2.0, 0.0])), eps=1e-2)._repr_html_()
    assert html.startswith("<table>")
    assert "condition (+0.01)" in html
    assert ">401<" in html
    several = oc.spectrum(torch.stack([torch.eye(2), torch.diag(torch.tensor([4.0, 1.0]))]))._repr_html_()
    assert "2 of size 2" in several
    assert ">1 to 4<" in several
