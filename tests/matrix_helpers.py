"""The square roots, solvers and cases that the tests of matrix functions go through."""

import pytest

import orthocond as oc
from tests.helpers import CASES

FUNCTIONS = {"sqrtm": oc.sqrtm, "inv_sqrtm": oc.inv_sqrtm}
EXACT = {
    "eigh": oc.Eigh(),
    "eigh-float64": oc.Eigh(precision="float64"),
    "eigh-input": oc.Eigh(precision="input"),
    "svd": oc.SVD(),
    "svd-pade": oc.SVD(gradient="pade"),
    "newton-schulz": oc.NewtonSchulz(steps=40),
    "newton-schulz-frobenius": oc.NewtonSchulz(steps=40, normalize="frobenius"),
}

both_functions = pytest.mark.parametrize("name", FUNCTIONS)
exact_solvers = pytest.mark.parametrize("solver", EXACT.values(), ids=EXACT)


def condition(case: str) -> float:
    a, eps = CASES[case]
    return float(oc.spectrum(a, eps=eps).condition.max()) if a.numel() else 1.0
