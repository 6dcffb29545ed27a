"""Decompositions that fail: retried, counted, and named when nothing helps."""

import pytest
import torch

import orthocond as oc
from orthocond.matrix import decompose
from tests.helpers import spd


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("solver", [oc.Eigh(), oc.Eigh(precision="input"), oc.SVD()], ids=str)
@pytest.mark.parametrize("n", [1, 2, 5])
def test_non_finite_matrix_is_named(value, solver, n):
    a = torch.eye(n).repeat(4, 1, 1)
    a[2, 0, 0] = value
    with pytest.raises(ValueError, match=r"matrix 2 of 4 .* NaN or infinite"):
        oc.inv_sqrtm(a, solver=solver)


def fail_unless(monkeypatch, name, condition):
    """Let torch.linalg.<name> converge only for inputs that meet the condition."""
    original = getattr(torch.linalg, name)

    def decomposition(a, *args, **kwargs):
        if not condition(a):
            raise torch.linalg.LinAlgError("did not converge")
        return original(a, *args, **kwargs)

    monkeypatch.setattr(torch.linalg, name, decomposition)


@pytest.mark.parametrize(("kind", "solver"), [("eigh", oc.Eigh(precision="input")), ("svd", oc.SVD(precision="input"))])
def test_failed_decomposition_is_retried_in_float64_and_counted(monkeypatch, kind, solver):
    a = spd(3, 10.0, 2, 2).float()
    expected = oc.sqrtm(a, solver=solver)
    bad = a[1, 0]
    fail_unless(
        monkeypatch, kind, lambda x: x.dtype == torch.float64 or not any((m == bad).all() for m in x.view(-1, 3, 3))
    )
    torch.testing.assert_close(oc.sqrtm(a, solver=solver), expected)
    assert oc.solver_failures == oc.SolverFailures(count=1, recovered=1)
    oc.solver_failures.reset()
    assert oc.solver_failures.count == 0


def test_failed_decomposition_is_jittered(monkeypatch):
    a = spd(3, 10.0)
    expected = oc.sqrtm(a)
    fail_unless(monkeypatch, "eigh", lambda x: not torch.equal(x, a))
    torch.testing.assert_close(oc.sqrtm(a), expected)
    assert oc.solver_failures.recovered == 1


def test_hopeless_decomposition_says_which_matrix_and_what_to_try(monkeypatch):
    a = spd(3, 10.0, 2)
    fail_unless(monkeypatch, "eigh", lambda x: x.ndim == 2 and abs(float(x[0, 0] - a[0, 0, 0])) < 1e-6)
    with pytest.raises(
        RuntimeError, match=r"matrix 1 of 2 \(3x3, torch.float64, finite entries in .*larger eps"
    ) as caught:
        oc.sqrtm(a)
    assert "NewtonSchulz" in str(caught.value)
    assert oc.solver_failures == oc.SolverFailures(count=1, recovered=0)


def test_jitter_grows_from_rounding_level():
    assert list(decompose._JITTERS) == sorted(decompose._JITTERS)
    assert decompose._JITTERS[0] > torch.finfo(torch.float64).eps
