"""Fixtures that tests and doctests share."""

import pytest
import torch

import orthocond

collect_ignore = ["docs/_ext/pages.py"]  # an extension of Sphinx, which tests do not need


@pytest.fixture(autouse=True)
def _quiet_machine():
    """One thread: small decompositions are slower with two, and results do not depend on the machine."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    orthocond.solver_failures.reset()


@pytest.fixture(autouse=True)
def _names(doctest_namespace):
    doctest_namespace["torch"] = torch


@pytest.fixture
def without_vega(monkeypatch):
    """Bundling Vega takes seconds; the tests in the browser have it."""
    monkeypatch.setattr("orthocond.lab.report.write._vega", lambda: "/* Vega */")


@pytest.fixture
def runs(tmp_path):
    """A folder for runs."""
    return tmp_path / "runs"
