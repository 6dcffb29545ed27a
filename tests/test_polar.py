"""The nearest orthogonal matrix."""

from dataclasses import dataclass

import pytest
import scipy.linalg
import torch
from torch.autograd import gradcheck, gradgradcheck

import orthocond as oc
from orthocond.matrix.polar_factor import polar_express_coefficients, polar_method
from tests.helpers import gradient, relative_error

METHODS = ("gram", "svd", "newton-schulz", "polar-express")
DECOMPOSITIONS = METHODS[:2]
all_methods = pytest.mark.parametrize("method", METHODS)
decompositions = pytest.mark.parametrize("method", DECOMPOSITIONS)


def with_singular_values(m, n, values, seed=0):
    generator = torch.Generator().manual_seed(seed)
    k = min(m, n)
    u, _ = torch.linalg.qr(torch.randn(m, k, dtype=torch.float64, generator=generator))
    v, _ = torch.linalg.qr(torch.randn(n, k, dtype=torch.float64, generator=generator))
    return (u * torch.as_tensor(values, dtype=torch.float64)) @ v.mT, u @ v.mT


def conditioned(m, n, cond, seed=0):
    k = min(m, n)
    return with_singular_values(m, n, torch.logspace(0, -float(torch.tensor(cond).log10()), k).double(), seed)


# values


@pytest.mark.parametrize(("m", "n"), [(64, 27), (27, 64), (16, 16), (6, 1024), (1, 5), (5, 1), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@all_methods
def test_value(m, n, dtype, method):
    """At condition number 1e3, against the singular vectors of the same matrix in float64.

    Measured in float32: 3e-8 for the decompositions, which work in float64, and 1e-5 for the iterations, which lose
    about a tenth of machine epsilon times the condition number.
    """
    g = conditioned(m, n, 1e3)[0].to(dtype)
    u, _, v = torch.linalg.svd(g.double(), full_matrices=False)
    limit = 1e-9 if dtype == torch.float64 else 1e-7 if method in DECOMPOSITIONS else 3e-5
    assert relative_error(oc.polar(g, method=method), u @ v) < limit


def test_value_against_scipy():
    g = torch.randn(9, 4, dtype=torch.float64)
    torch.testing.assert_close(oc.polar(g), torch.from_numpy(scipy.linalg.polar(g.numpy())[0]))


def test_svd_at_condition_1e10():
    g, expected = conditioned(12, 8, 1e10)
    assert relative_error(oc.polar(g, method=oc.SVDPolar(rank_tol=0.0)), expected) < 1e-4


@pytest.mark.parametrize(
    ("scale", "dtype"),
    [(1e-30, torch.float32), (1e-8, torch.float32), (1e15, torch.float32)]
    + [(scale, torch.float64) for scale in (1e-300, 1e-160, 1e160, 1e300)],
)
@all_methods
def test_scale_does_not_matter(method, scale, dtype):
    g = torch.randn(8, 5, dtype=dtype)
    torch.testing.assert_close(oc.polar(scale * g, method=method), oc.polar(g, method=method), rtol=1e-4, atol=1e-4)


@decompositions
def test_gradient_at_any_scale(method):
    """That of polar(c G) with respect to G is that of polar(G), whatever c is."""
    g, upstream = torch.randn(2, 6, 4, dtype=torch.float64)
    expected = gradient(oc.polar, g, upstream, method=method)
    for scale in (1e-160, 1e160):
        torch.testing.assert_close(gradient(lambda x, c=scale: oc.polar(c * x, method=method), g, upstream), expected)


def test_muon_does_not_reach_the_polar_factor():
    """The five bfloat16 steps of torch.optim.Muon leave singular values between 0.7 and 1.2; ours are 1."""
    weight = torch.nn.Parameter(torch.zeros(32, 16))
    weight.grad = torch.randn(32, 16)
    torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    update = torch.linalg.svdvals(weight.detach())
    assert (update / update.mean() - 1).abs().max() > 0.05
    assert (torch.linalg.svdvals(oc.polar(weight.grad)) - 1).abs().max() < 1e-6


# invariants


@all_methods
def test_is_the_nearest_orthogonal_matrix(method):
    g = torch.randn(6, 3, dtype=torch.float64)
    ours = (g - oc.polar(g, method=method)).norm()
    others, _ = torch.linalg.qr(torch.randn(1000, 6, 3, dtype=torch.float64))
    near = torch.linalg.qr(oc.polar(g) + 1e-3 * torch.randn(1000, 6, 3, dtype=torch.float64))[0]
    near = near * (near * oc.polar(g)).sum(-2, keepdim=True).sign()
    assert ours < (g - others).norm(dim=(-2, -1)).min()
    assert ours < (g - near).norm(dim=(-2, -1)).min()


@all_methods
def test_tall_is_the_transpose_of_wide(method):
    g = torch.randn(2, 7, 4)
    torch.testing.assert_close(oc.polar(g.mT, method=method), oc.polar(g, method=method).mT)


@decompositions
def test_no_noise_is_promoted_to_a_direction(method):
    g, _ = with_singular_values(6, 4, [1.0, 0.5, 0.0, 0.0])
    g = (g + 1e-8 * torch.randn(6, 4).double()).float()
    singular = torch.linalg.svdvals(oc.polar(g, method=method))
    torch.testing.assert_close(singular, torch.tensor([1.0, 1.0, 0.0, 0.0]), rtol=0, atol=1e-5)


def test_gram_leaves_out_what_squaring_loses():
    """In float64 a Gram matrix knows singular values down to 1e-8 of the largest; below that the eigenvalues are noise.

    Whatever the tolerance, no direction may come out of them; "svd" sees the small one.
    """
    pairs = [with_singular_values(20, 8, [1.0] * 7 + [1e-10], seed) for seed in range(20)]
    g, expected = (torch.stack(part) for part in zip(*pairs, strict=True))
    for rank_tol in (None, 0.0):
        singular = torch.linalg.svdvals(oc.polar(g, method=oc.GramPolar(rank_tol=rank_tol)))
        torch.testing.assert_close(singular[:, :7], torch.ones(20, 7, dtype=torch.float64))
        assert singular[:, 7].max() < 1e-6
    assert relative_error(oc.polar(g, method=oc.SVDPolar(rank_tol=0.0)), expected) < 1e-4


@pytest.mark.parametrize("method", [oc.GramPolar, oc.SVDPolar])
def test_rank_tolerance(method):
    g = torch.diag(torch.tensor([1.0, 0.1, 0.01]))
    torch.testing.assert_close(oc.polar(g, method=method(rank_tol=0.05)), torch.diag(torch.tensor([1.0, 1.0, 0.0])))
    torch.testing.assert_close(oc.polar(g, method=method(rank_tol=0.0)), torch.eye(3))


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("gram", oc.GramPolar()),
        ("svd", oc.SVDPolar()),
        ("newton-schulz", oc.NewtonSchulzPolar(steps=30)),
        ("polar-express", oc.PolarExpress()),
    ],
)
def test_a_name_stands_for_the_default_setting(name, method):
    g = torch.randn(7, 4)
    assert torch.equal(oc.polar(g, method=name), oc.polar(g, method=method))


def test_default_is_gram():
    g = torch.randn(7, 4)
    assert torch.equal(oc.polar(g), oc.polar(g, method=oc.GramPolar()))


def test_a_method_of_ones_own():
    @dataclass(frozen=True, kw_only=True)
    class QR(oc.PolarMethod):
        def factor(self, g):
            return torch.linalg.qr(g)[0]

    g = torch.randn(4, 3)
    assert torch.equal(oc.polar(g, method=QR()), torch.linalg.qr(g)[0])


# singular values that are not there


@pytest.mark.parametrize("method", ["newton-schulz", "polar-express"])
@pytest.mark.parametrize("values", [[1.0], [1.0, 1e-4], [1.0, 1.0], [1.0, 0.3, 1e-2]], ids=str)
@pytest.mark.parametrize("shape", [(128, 64), (64, 128), (5, 3)], ids=str)
def test_iterations_of_low_rank(method, values, shape):
    """The largest singular value is the norm itself, up to rounding: no step may leave its interval.

    On the range the result is 1, and elsewhere it may only be small. A ratio of 1e-4 is what float32 still sees.
    """
    k = min(shape)
    padded = values + [0.0] * (k - len(values))
    g = torch.stack([with_singular_values(*shape, padded, seed)[0] for seed in range(40)])
    if len(values) == 1:
        generator = torch.Generator().manual_seed(5)
        g[0] = torch.randn(shape[0], 1, generator=generator) @ torch.randn(1, shape[1], generator=generator)
    g = g.float()
    found = oc.polar(g, method=method)
    assert found.isfinite().all()
    u, _, v = torch.linalg.svd(g.double(), full_matrices=False)
    r = len(values)
    on_range = u[..., :r].mT @ found.double() @ v[..., :r, :].mT
    torch.testing.assert_close(on_range, torch.eye(r).double().expand_as(on_range), rtol=0, atol=1e-2)
    assert torch.linalg.matrix_norm(found, 2).max() < 1.01


@all_methods
def test_zero_matrix_gives_zero(method):
    g = torch.zeros(2, 4, 3, requires_grad=True)
    found = oc.polar(g, method=method)
    assert (found == 0).all()


@all_methods
def test_a_batch_is_its_matrices(method):
    g = torch.stack([torch.randn(5, 3), torch.zeros(5, 3), 100 * torch.randn(5, 3)])
    found = oc.polar(g, method=method)
    for one, result in zip(g, found, strict=True):
        torch.testing.assert_close(oc.polar(one, method=method), result)


def test_polar_express_coefficients_are_minimax():
    """Each step's error |c - p| is extreme, with alternating sign, at four points: no other quintic is better.

    The interval is longer by 1 % than what the step before leaves, and cut off at a tenth of its end: safety factor and
    cushion of the published method. What is below the cut-off grows, and all values stay around 1.
    """
    low, high = 1e-4, 1.0
    steps = polar_express_coefficients()
    for a, b, c in steps[:-2]:
        end = 1.01 * high
        x = torch.linspace(max(low, 0.1 * end), end, 200_001, dtype=torch.float64)
        p = a * x + b * x**3 + c * x**5
        error = p - (p.max() + p.min()) / 2
        inner = error[
            (error[1:-1].abs() >= error[:-2].abs()).logical_and(error[1:-1].abs() >= error[2:].abs()).nonzero() + 1
        ]
        signs = torch.cat([error[:1], inner.flatten(), error[-1:]])
        torch.testing.assert_close(signs.abs(), error.abs().max().expand(4), rtol=1e-6, atol=1e-12)
        assert (signs.sign() == torch.tensor([-1, 1, -1, 1])).all()
        low, high = a * low + b * low**3 + c * low**5, float(p.max())
        assert low + high == pytest.approx(2, abs=1e-9)
    assert high - low < 2e-2
    x = torch.logspace(-4, 0, 10_001, dtype=torch.float64)
    for a, b, c in steps:
        x = a * x + b * x**3 + c * x**5
    torch.testing.assert_close(x, torch.ones(10_001).double(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(200, 2), (64, 27), (40, 40)], ids=str)
def test_polar_express_keeps_its_digits(shape):
    """No step may shrink a large singular value so far that float32 forgets it, whatever the spectrum is."""
    k = shape[1]
    u, _ = torch.linalg.qr(torch.randn(200, *shape, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(200, k, k, dtype=torch.float64))
    g = ((u * (0.1 + 0.9 * torch.rand(200, 1, k)).double()) @ v.mT).float()
    assert relative_error(oc.polar(g, method="polar-express"), oc.polar(g.double())) < 3e-6
    worst = (oc.polar(g, method="polar-express") - oc.polar(g)).norm(dim=(-2, -1)).max() / k**0.5
    assert worst < 5e-6


# gradients


@pytest.mark.parametrize("shape", [(4, 3), (3, 4), (3, 3), (2, 3, 2)], ids=str)
@all_methods
def test_gradient(method, shape):
    g = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    setting = {"newton-schulz": oc.NewtonSchulzPolar(steps=12), "polar-express": oc.PolarExpress(steps=12)}
    assert gradcheck(lambda x: oc.polar(x, method=setting.get(method, method)), g, check_forward_ad=True)
    assert gradgradcheck(lambda x: oc.polar(x, method=setting.get(method, method)), g)


@decompositions
def test_gradient_at_equal_singular_values(method):
    g = (2 * torch.linalg.qr(torch.randn(4, 3, dtype=torch.float64))[0]).requires_grad_()
    assert gradcheck(lambda x: oc.polar(x, method=method), g, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(lambda x: oc.polar(x, method=method), g)


def test_gradient_of_all_methods_agrees():
    g = with_singular_values(5, 3, [1.0, 0.7, 0.5])[0]
    h = torch.randn(5, 3, dtype=torch.float64)
    expected = gradient(oc.polar, g, h)
    for method in METHODS[1:]:
        assert relative_error(gradient(oc.polar, g, h, method=method), expected) < 1e-8


# shapes and dtypes


@all_methods
@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 0, 4, 3), (3, 0), (0, 0), (2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_shapes_and_dtypes(method, shape, dtype):
    g = torch.randn(shape).to(dtype)
    found = oc.polar(g, method=method)
    assert found.shape == shape
    assert found.dtype == dtype


def test_autocast_is_left():
    g = torch.randn(8, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for method in METHODS:
            torch.testing.assert_close(oc.polar(g, method=method), oc.polar(g), rtol=1e-4, atol=1e-4)


def test_vmap():
    g = torch.randn(4, 5, 3)
    torch.testing.assert_close(torch.func.vmap(oc.polar)(g), oc.polar(g))


# errors


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@all_methods
def test_non_finite(method, value):
    g = torch.randn(3, 4, 2)
    g[1, 0, 0] = value
    with pytest.raises(ValueError, match=r"matrix 1 of 3 \(.* NaN or infinite"):
        oc.polar(g, method=method)


@pytest.mark.parametrize(
    ("g", "settings", "error", "text"),
    [
        (torch.ones(3), {}, ValueError, r"matrices .* got shape \(3,\).*flatten"),
        (torch.ones(3, 2, dtype=torch.int32), {}, TypeError, "floating-point"),
        (torch.ones(3, 2, dtype=torch.complex64), {}, TypeError, "real"),
        (torch.ones(3, 2), {"method": "qr"}, ValueError, "'gram', 'svd', 'newton-schulz', 'polar-express'; got 'qr'"),
        (torch.ones(3, 2), {"method": oc.Eigh()}, TypeError, r"GramPolar\(\) or 'gram'; got Eigh"),
        (torch.ones(3, 2), {"method": oc.GramPolar}, TypeError, r"Add parentheses: GramPolar\(\)"),
    ],
)
def test_bad_input(g, settings, error, text):
    with pytest.raises(error, match=text):
        oc.polar(g, **settings)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: oc.GramPolar(rank_tol=-1.0), "GramPolar.rank_tol"),
        (lambda: oc.GramPolar(precision="half"), "GramPolar.precision"),
        (lambda: oc.SVDPolar(rank_tol=float("nan")), "SVDPolar.rank_tol"),
        (lambda: oc.NewtonSchulzPolar(steps=0), "NewtonSchulzPolar.steps"),
        (lambda: oc.PolarExpress(steps=0), "PolarExpress.steps"),
    ],
)
def test_bad_settings(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_settings_are_keywords():
    with pytest.raises(TypeError, match="positional"):
        oc.GramPolar(1e-3)


# float32 work


@pytest.mark.parametrize("shape", [(64, 27), (64, 576), (1000, 128), (2, 64, 300), (6, 131072)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float32_work_is_near_float64(shape, dtype):
    """Independent normal entries have condition numbers below 6. Value and gradient, within 1e-5 and the dtype."""
    g, h = torch.randn(shape).to(dtype), torch.randn(shape)
    exact = oc.GramPolar(precision="float64")
    assert not torch.equal(oc.polar(g.float()), oc.polar(g.float(), method=exact))  # it is another computation
    limit = 1e-5 if dtype == torch.float32 else 5e-3
    assert relative_error(oc.polar(g), oc.polar(g.double(), method=exact)) < limit
    expected = gradient(oc.polar, g.double(), h.double(), method=exact)
    assert relative_error(gradient(oc.polar, g, h.to(dtype)), expected) < limit


SPECTRA = {
    "even": lambda k, cond: torch.logspace(0, -float(torch.tensor(cond).log10()), k),
    "one small": lambda k, cond: torch.tensor([1.0] * (k - 1) + [1 / cond]),
    "one large": lambda k, cond: torch.tensor([1.0] + [1 / cond] * (k - 1)),
    "pairs": lambda k, cond: torch.logspace(0, -float(torch.tensor(cond).log10()), k // 2).repeat(2),
}


@pytest.mark.parametrize("shape", [(64, 28), (64, 576), (6, 70_000), (40_000, 2)], ids=str)
@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e15])
def test_error_in_float32_at_all_condition_numbers(shape, spectrum, scale):
    """Below 1e-5, with equal singular values too: where float32 does not do, it is left.

    Squaring in float64 loses 1e-16 times the squared condition number, which shows at 1e6, most after long sums.
    """
    for cond in (1.0, 2.0, 4.0, 7.9, 8.1, 1e2, 1e4, 1e6):
        g = (with_singular_values(*shape, SPECTRA[spectrum](min(shape), cond))[0] * scale).float()
        u, _, v = torch.linalg.svd(g.double(), full_matrices=False)
        found = oc.polar(g, method=oc.GramPolar(rank_tol=0.0))
        assert relative_error(found, u @ v) < max(1e-5, 1e-14 * cond**2)


def test_long_sums_keep_their_digits():
    """A float32 sum of a million products is off by 1e-5 and more."""
    for g in (torch.randn(2, 1_000_000), torch.randn(1_000_003, 3), torch.randn(2, 2, 300_000)):
        g = g * torch.linspace(0.2, 1, g.shape[-2]).unsqueeze(-1) if g.shape[-2] < 9 else g
        assert relative_error(oc.polar(g), oc.polar(g.double())) < 2e-6


@pytest.mark.parametrize("shape", [(64, 28), (64, 576)], ids=str)
def test_gradient_of_float32_work_at_its_largest_condition_number(shape):
    g = with_singular_values(*shape, SPECTRA["even"](min(shape), 7.5))[0].float()
    h = torch.randn(shape)
    expected = gradient(oc.polar, g.double(), h.double())
    assert relative_error(gradient(oc.polar, g, h), expected) < 1e-5


@pytest.mark.parametrize(
    "values", [[1.0] * 63 + [0.1], [1.0] * 63 + [0.0], [1.0, 0.9] + [0.0] * 62], ids=["1/10", "0", "2"]
)
@pytest.mark.parametrize("long", [64, 576])
def test_float32_work_is_left_where_it_would_not_do(values, long):
    """At a condition number above 8 the result is that of float64, and no direction comes out of nothing."""
    g = with_singular_values(64, long, values)[0].float()
    found = oc.polar(g)
    assert torch.equal(found, oc.polar(g, method=oc.GramPolar(precision="float64")))
    rank = sum(v > 0 for v in values)
    torch.testing.assert_close(found.square().sum(), torch.tensor(float(rank)), rtol=1e-5, atol=0)


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e-22, 1e-12, 1e12, 1e18, 1e30, 1e37])
@pytest.mark.parametrize("shape", [(64, 576), (2, 64, 27)], ids=str)
def test_float32_work_at_all_scales(scale, shape):
    g = torch.randn(shape) * scale
    expected = oc.polar(g.double())
    assert relative_error(oc.polar(g), expected) < 1e-5


# what is left until nothing can fail any more


@pytest.mark.parametrize("shape", [(2, 200, 900), (2, 900, 200), (3, 40, 1300), (1, 1300, 40)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@all_methods
def test_prepared_factor(shape, dtype, method):
    """What is left until nothing can fail any more, over the matrices themselves where that is worth it."""
    g = torch.randn(shape).to(dtype)
    expected = 3 * oc.polar(g, method=method)
    before = g.clone()
    finish = polar_method(method).prepare(g, 3.0)
    assert torch.equal(g, before)
    tolerance = {"rtol": 0, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(finish(), expected, **tolerance)
