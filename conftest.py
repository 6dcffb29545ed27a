"""Fixtures that tests and doctests share."""

import os
import sys

import pytest
import torch

import orthocond

collect_ignore = ["docs/_ext/pages.py"]  # an extension of Sphinx, which tests do not need

# Processes that tests start have one thread too: with two test processes on two cores, more only wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"
# Some virtual machines report AMX and fault when it is used: a product in bfloat16 ends the process. Tests do without.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

_LONG = ["classification", "launch", "explorer_browser", "explorer_models", "runs_kill", "demo", "explorer", "docs"]
_LONG += ["cli_runs", "examples", "report_browser", "generation_evaluate", "generation_resume", "fold_export", "matrix"]


def pytest_collection_modifyitems(items):
    """Files that take longest come first: at the end no process is left alone with one of them."""
    order = {f"test_{name}.py": place for place, name in enumerate(_LONG)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.fixture(autouse=True)
def _quiet_machine():
    """One thread: small decompositions are slower with two, and results do not depend on the machine."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    orthocond.solver_failures.reset()


@pytest.fixture(autouse=True)
def _compiled_anew():
    """torch.compile keeps eight compilations of a wrapper that all modules share: each test begins with none."""
    yield
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


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
