"""Square roots and inverse square roots: values, invariants, gradients, shapes and dtypes, errors, life cycle."""

import dataclasses
import pickle

import pytest
import scipy.linalg
import torch

import orthocond as oc
from tests.helpers import (
    CASES,
    gradient,
    reference_gradient,
    reference_roots,
    relative_error,
    spd,
    tolerance,
    with_spectrum,
)
from tests.matrix_helpers import EXACT, FUNCTIONS, both_functions, condition, exact_solvers

APPROXIMATE = {
    "truncated": oc.SVD(gradient="truncated"),
    "top": oc.SVD(gradient="top", keep=4),
    "taylor9": oc.SVD(gradient="taylor", degree=9),
    "taylor100": oc.SVD(gradient="taylor", degree=100),
    "newton-schulz-5": oc.NewtonSchulz(),
    "pade": oc.Pade(),
    "taylor-series": oc.Taylor(),
}
SOLVERS = EXACT | APPROXIMATE
all_solvers = pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
all_cases = pytest.mark.parametrize("case", CASES)


# values


@all_cases
@both_functions
@exact_solvers
def test_value_in_float64(name, case, solver):
    a, eps = CASES[case]
    root, inverse = reference_roots(a, eps)
    expected = root if name == "sqrtm" else inverse
    found = FUNCTIONS[name](a, eps=eps, solver=solver)
    assert found.shape == a.shape
    assert relative_error(found, expected) <= tolerance(torch.float64, 5, condition(case))


@all_cases
@both_functions
def test_value_in_float32(name, case):
    """The oracle is the root of the float32 matrix as it is. At 1e8 that is not a covariance any more (see below)."""
    a, eps = CASES[case]
    a = a.float()
    if case == "cond1e8":
        q = oc.sqrtm(a)
        assert relative_error(q @ q, a) < tolerance(torch.float32, 5)
        assert FUNCTIONS[name](a).isfinite().all()
        return
    root, inverse = reference_roots(a, eps)
    found = FUNCTIONS[name](a, eps=eps)
    assert found.dtype == torch.float32
    # The condition number does not enter: "auto" turns to float64 where it would.
    assert relative_error(found, root if name == "sqrtm" else inverse) < 20 * tolerance(torch.float32, 5)


def test_value_against_scipy():
    a = spd(30, 1e3, seed=3)
    expected = torch.from_numpy(scipy.linalg.sqrtm(a.numpy()))
    assert relative_error(oc.sqrtm(a), expected) < 1e-12


def test_float32_condition_1e6_needs_float64():
    """Why "auto" exists: the float32 gradient is wrong by several percent at 1e6, that of "auto" is not."""
    a = spd(8, 1e6).float()
    g = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    expected = reference_gradient(a, g, inverse=True)
    errors = {
        precision: relative_error(gradient(oc.inv_sqrtm, a, g, solver=oc.Eigh(precision=precision)), expected)
        for precision in ("auto", "float64", "input")
    }
    assert max(errors["auto"], errors["float64"]) < 1e-6
    assert errors["input"] > 1e-3


def test_both_roots_from_one_decomposition(monkeypatch):
    calls = []
    original = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda a: calls.append(a) or original(a))
    a = spd(4, 10.0, 3)
    roots = oc.square_roots(a, eps=0.1)
    assert len(calls) == 1
    torch.testing.assert_close(roots.sqrt, oc.sqrtm(a, eps=0.1))
    torch.testing.assert_close(roots.inv_sqrt, oc.inv_sqrtm(a, eps=0.1))


@all_solvers
def test_both_roots_with_every_solver(solver):
    a = spd(4, 10.0, 3)
    roots = oc.square_roots(a, eps=0.1, solver=solver)
    torch.testing.assert_close(roots.sqrt, oc.sqrtm(a, eps=0.1, solver=solver))
    torch.testing.assert_close(roots.inv_sqrt, oc.inv_sqrtm(a, eps=0.1, solver=solver))


# invariants


@all_cases
@exact_solvers
def test_whitens(case, solver):
    a, eps = CASES[case]
    n = a.shape[-1]
    s = oc.inv_sqrtm(a, eps=eps, solver=solver)
    identity = torch.eye(n, dtype=torch.float64)
    assert relative_error(s @ (a + eps * identity) @ s, identity.expand_as(a)) <= tolerance(
        torch.float64, n, condition(case)
    )


@all_solvers
@both_functions
def test_result_is_symmetric_and_rotates_with_its_input(name, solver):
    a = spd(6, 100.0)
    q, _ = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))
    found = FUNCTIONS[name](a, solver=solver)
    torch.testing.assert_close(found, found.mT)
    torch.testing.assert_close(FUNCTIONS[name](q @ a @ q.mT, solver=solver), q @ found @ q.mT)


@both_functions
@all_solvers
def test_input_that_is_not_symmetric_means_its_symmetric_part(name, solver):
    a = spd(4, 10.0)
    skew = torch.randn(4, 4, dtype=torch.float64)
    tilted = a + (skew - skew.mT)
    g = torch.randn(4, 4, dtype=torch.float64)
    torch.testing.assert_close(FUNCTIONS[name](tilted, solver=solver), FUNCTIONS[name](a, solver=solver))
    found = gradient(FUNCTIONS[name], tilted, g, solver=solver)
    torch.testing.assert_close(found, found.mT)
    torch.testing.assert_close(found, gradient(FUNCTIONS[name], a, g, solver=solver))


def test_pseudo_inverse_where_singular():
    a = with_spectrum([0.0, 0.0, 1.0, 4.0])
    torch.testing.assert_close(oc.inv_sqrtm(a) @ oc.inv_sqrtm(a), torch.linalg.pinv(a, hermitian=True))


def test_rank_tolerance_is_without_the_ridge():
    """A direction below the tolerance is left out, however large the ridge; the others get it."""
    found = oc.inv_sqrtm(torch.diag(torch.tensor([6.0, 0.1])), eps=10.0, solver=oc.Eigh(rank_tol=0.5))
    torch.testing.assert_close(found, torch.diag(torch.tensor([0.25, 0.0])))


@pytest.mark.parametrize(("small", "gap"), [(0.5, 0.7), (0.61, 0.6), (1.0, 0.6), (1.15, 0.6)])
@both_functions
def test_gradient_between_kept_and_left_out(name, small, gap):
    """It is f / gap, with a gap of at least half the kept eigenvalue: the jump of f at the tolerance is no slope."""
    a = torch.diag(torch.tensor([10.0, 1.2, small], dtype=torch.float64))
    g = torch.zeros(3, 3, dtype=torch.float64)
    g[1, 2] = g[2, 1] = 1.0
    found = gradient(FUNCTIONS[name], a, g, solver=oc.Eigh(rank_tol=0.118))
    f = 1.2 ** (-0.5 if name == "inv_sqrtm" else 0.5)
    assert found[1, 2].item() == pytest.approx(f / gap, rel=1e-12)


@pytest.mark.parametrize("eps", [1e-12, 1e-10, 1e-8, 1e-7, 1e-6])
@both_functions
def test_eps_below_the_rounding_of_a_singular_matrix(name, eps):
    """The null space of a float32 covariance has eigenvalues of ±1e-7 of the largest: they must not add to eps.

    The oracle knows the matrix before it was rounded. Value and gradient of a random rotation of rank 27 in 64.
    """
    x = torch.randn(64, 27, dtype=torch.float64)
    values, u = torch.linalg.eigh(x @ x.mT / 27)
    values[:37] = 0
    a = (u * values) @ u.mT
    root = (values + eps).sqrt()
    f = 1 / root if name == "inv_sqrtm" else root
    found = FUNCTIONS[name](a.float(), eps=eps)
    assert relative_error(found, (u * f) @ u.mT) < 1e-6
    g = torch.randn(64, 64, dtype=torch.float64)
    slope = 1 / (root.unsqueeze(-1) + root)
    if name == "inv_sqrtm":
        slope = -slope / (root.unsqueeze(-1) * root)
    expected = u @ (slope * (u.mT @ (g + g.mT) / 2 @ u)) @ u.mT
    assert relative_error(gradient(FUNCTIONS[name], a.float(), g.float(), eps=eps), expected) < 1e-4


def test_eps_above_the_rounding_takes_the_matrix_at_its_word():
    a = torch.diag(torch.tensor([1.0, 1e-7]))
    torch.testing.assert_close(oc.inv_sqrtm(a, eps=1e-6)[1, 1], torch.tensor((1.1e-6) ** -0.5))
    torch.testing.assert_close(oc.inv_sqrtm(a, eps=1e-8)[1, 1], torch.tensor((1e-8) ** -0.5))


def test_each_matrix_of_a_batch_has_its_own_rounding():
    a = torch.stack([torch.diag(torch.tensor([1.0, 1e-7])), torch.diag(torch.tensor([1e-3, 1e-7]))])
    found = oc.inv_sqrtm(a, eps=1e-8)[:, 1, 1]
    torch.testing.assert_close(found, torch.tensor([1e-8, 1.1e-7]) ** -0.5)


def test_zero_matrix_gives_zero():
    a = torch.zeros(2, 3, 3, requires_grad=True)
    for found in oc.square_roots(a):
        assert (found == 0).all()
        (grad,) = torch.autograd.grad(found.sum(), a)
        assert (grad == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("d", "samples"), [(64, 27), (256, 49)])
def test_rank_deficient_covariance_has_no_noise_directions(d, samples, dtype):
    """The root of a covariance of fewer samples than features vanishes off the features' span."""
    x = torch.randn(d, samples, dtype=dtype)
    x = x - x.mean(-1, keepdim=True)
    root = oc.sqrtm(x @ x.mT / samples)
    basis = torch.linalg.svd(x.double())[0][:, samples - 1 :]
    assert float((root.double() @ basis).norm() / root.norm()) < tolerance(dtype, 64)


# shapes and dtypes


@all_solvers
@pytest.mark.parametrize("batch", [(), (0,), (2,), (2, 0, 3), (2, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_batches_and_dtypes(solver, batch, dtype):
    a = spd(3, 10.0, *batch).to(dtype).requires_grad_()
    for function in FUNCTIONS.values():
        found = function(a, eps=0.01, solver=solver)
        assert found.shape == a.shape
        assert found.dtype == dtype
        (grad,) = torch.autograd.grad(found.sum(), a)
        assert grad.shape == a.shape
        assert grad.isfinite().all()


@all_solvers
def test_a_batch_is_its_matrices(solver):
    a = torch.stack([spd(4, 10.0, seed=1), 1e3 * spd(4, 50.0, seed=2), torch.eye(4, dtype=torch.float64)])
    g = torch.randn(3, 4, 4, dtype=torch.float64)
    for function in FUNCTIONS.values():
        whole = function(a, solver=solver)
        grads = gradient(function, a, g, solver=solver)
        for i in range(3):
            torch.testing.assert_close(whole[i], function(a[i], solver=solver))
            torch.testing.assert_close(grads[i], gradient(function, a[i], g[i], solver=solver))


@all_solvers
def test_non_contiguous_input_is_not_changed(solver):
    storage = torch.zeros(6, 8, dtype=torch.float64)
    a = storage[::2, ::2][:3, :3]
    a.copy_(spd(3, 10.0))
    before = storage.clone()
    torch.testing.assert_close(oc.sqrtm(a, solver=solver), oc.sqrtm(a.contiguous(), solver=solver))
    assert (storage == before).all()


@pytest.mark.parametrize("size", [0, 1])
def test_smallest_sizes(size):
    a = torch.full((2, size, size), 4.0)
    assert (oc.sqrtm(a) == 2).all()
    assert oc.sqrtm(a).shape == a.shape


def test_autocast_is_left():
    a = spd(8, 10.0).float().requires_grad_()
    expected = oc.inv_sqrtm(a)
    (expected_grad,) = torch.autograd.grad(expected.sum(), a)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = oc.inv_sqrtm(a)
        (grad,) = torch.autograd.grad(found.sum(), a)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(grad, expected_grad)


@pytest.mark.parametrize("name", ["eigh", "newton-schulz"])
def test_vmap(name):
    a = spd(3, 10.0, 4).float()
    function = lambda x: oc.inv_sqrtm(x, solver=SOLVERS[name])  # noqa: E731
    torch.testing.assert_close(torch.func.vmap(function)(a), function(a), rtol=1e-5, atol=1e-5)
    per_matrix = torch.func.vmap(torch.func.grad(lambda x: function(x).sum()))(a)
    torch.testing.assert_close(per_matrix, gradient(function, a, torch.ones_like(a)), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # raised inside torch's compiler
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compile_without_graph_breaks(backend):
    def function(x):
        return oc.inv_sqrtm(x, eps=1e-5) + oc.sqrtm(x)

    a = spd(4, 10.0, 2).float().requires_grad_()
    g = torch.randn(2, 4, 4)
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    found, expected = compiled(a), function(a)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    (grad,) = torch.autograd.grad(found, a, g)
    torch.testing.assert_close(grad, torch.autograd.grad(expected, a, g)[0], rtol=1e-4, atol=1e-4)


# errors


@pytest.mark.parametrize(
    ("a", "error", "text"),
    [
        (torch.ones(3, 4), ValueError, r"square matrices .* got shape \(3, 4\)"),
        (torch.ones(3), ValueError, r"square matrices .* got shape \(3,\)"),
        (torch.ones(3, 3, dtype=torch.int64), TypeError, r"floating-point .* torch.int64.*\.float\(\)"),
        (torch.ones(3, 3, dtype=torch.complex64), TypeError, "real matrices; got torch.complex64"),
        ([[1.0]], TypeError, "torch.Tensor; got list"),
        (torch.full((2, 3, 3), torch.nan), ValueError, "matrix 0 of 2 .* 9 that are NaN"),
        (-torch.eye(3), ValueError, "positive semi-definite; matrix 0 of 1|eigenvalues down to -1"),
        (torch.diag(torch.tensor([1.0, -1.0])), ValueError, "positive semi-definite"),
    ],
    ids=["rectangular", "vector", "integer", "complex", "list", "nan", "negative", "indefinite"],
)
@pytest.mark.parametrize("name", [*FUNCTIONS, "square_roots"])
def test_bad_matrix(name, a, error, text):
    with pytest.raises(error, match=text):
        getattr(oc, name)(a)


@pytest.mark.parametrize("eps", [0.0, 1e-5])
@pytest.mark.parametrize("batch", [(), (2,)], ids=["one", "batch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [3, 27])
def test_nan_between_sound_eigenvalues(n, dtype, batch, eps):
    """Where a row has NaN on the diagonal and zeros beside it, the first and the last eigenvalue are sound."""
    entries = torch.ones(n, dtype=dtype)
    entries[n // 2] = torch.nan
    a = torch.diag(entries).expand(*batch, n, n)
    for function in (oc.sqrtm, oc.inv_sqrtm):
        with pytest.raises(ValueError, match="1 that are NaN"):
            function(a, eps=eps)


def test_indefinite_matrix_with_svd():
    with pytest.raises(ValueError, match="positive semi-definite"):
        oc.sqrtm(torch.diag(torch.tensor([1.0, -1.0])), solver=oc.SVD())


@pytest.mark.parametrize("eps", [-1e-3, float("nan"), float("inf")])
def test_bad_eps(eps):
    with pytest.raises(ValueError, match=r"eps=.*finite number of at least 0"):
        oc.sqrtm(torch.eye(2), eps=eps)


def test_bad_solver():
    with pytest.raises(TypeError, match=r"Add parentheses: Eigh\(\)"):
        oc.sqrtm(torch.eye(2), solver=oc.Eigh)
    with pytest.raises(TypeError, match="got 'eigh'"):
        oc.sqrtm(torch.eye(2), solver="eigh")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: oc.Eigh(precision="half"), "precision.*'auto', 'input', 'float64'; got 'half'"),
        (lambda: oc.Eigh(rank_tol=-1.0), "rank_tol"),
        (lambda: oc.SVD(gradient="exact"), "gradient.*'plain', 'truncated', 'top', 'taylor', 'pade'"),
        (lambda: oc.SVD(degree=-1), "degree"),
        (lambda: oc.SVD(keep=0), "keep"),
        (lambda: oc.SVD(precision="auto"), "precision"),
        (lambda: oc.NewtonSchulz(steps=0), "steps.*integer of at least 1; got 0"),
        (lambda: oc.NewtonSchulz(steps=2.5), "steps"),
        (lambda: oc.NewtonSchulz(normalize="max"), "normalize"),
        (lambda: oc.Pade(degree=0), "degree"),
        (lambda: oc.Taylor(degree=True), "degree"),
    ],
)
def test_bad_settings(make, text):
    with pytest.raises(ValueError, match=text):
        make()


# life cycle


@all_solvers
def test_solvers_are_values(solver):
    assert pickle.loads(pickle.dumps(solver)) == solver
    assert hash(solver) == hash(dataclasses.replace(solver))
    assert eval(repr(solver), vars(oc)) == solver
    with pytest.raises(dataclasses.FrozenInstanceError):
        solver.precision = "x"


def test_a_solver_of_your_own():
    class Diagonal(oc.Solver):
        def roots(self, a, eps, kinds):
            d = a.diagonal(dim1=-2, dim2=-1) + eps
            return tuple(torch.diag_embed(d.pow(0.5 if kind == "sqrt" else -0.5)) for kind in kinds)

    torch.testing.assert_close(oc.inv_sqrtm(4 * torch.eye(2), solver=Diagonal()), torch.eye(2) / 2)
