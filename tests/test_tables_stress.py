"""The table of solvers under stress: what fails, what does not, and how that is counted."""

import csv
import json

import pytest
import torch
from torch.linalg import LinAlgError

from orthocond.lab import catalog
from orthocond.lab.classification import stress, stress_cases
from orthocond.lab.classification.stress import POOLING, STEM
from orthocond.lab.tables.table import Material
from orthocond.matrix import solver_failures

_COVARIANCES = 2


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """The table of two covariances of a stem and one of pooling for each cell, of sprites; trainings of two steps."""
    folder = tmp_path_factory.mktemp("stress")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(stress._COUNT, "laptop", _COVARIANCES)
        patch.setattr(stress_cases, "SEEDS", 1)
        patch.setitem(stress_cases._SPRITES, "data.limit", 500)
        patch.setenv("ORTHOCOND_DATA", str(folder))  # no CIFAR-10 there
        done = []
        material = Material("laptop", 1, {}, progress=lambda _, progress: done.append(progress))
        catalog.TABLES["solver-stress"].write(folder, material)
    assert [progress.step for progress in done] == list(range(1, done[0].steps + 1))
    return folder


def _content(folder):
    return json.loads((folder / "table.json").read_text())


def _cells(folder, **settings):
    found = [cell for cell in _content(folder)["cells"] if all(cell[key] == settings[key] for key in settings)]
    assert found
    return found


# What fails


@pytest.mark.parametrize("place", [STEM, POOLING])
def test_the_layer_is_right_with_float32_features(table, place):
    cells = _cells(table, place=place, solver=stress.LAYER, features="float32")
    assert sum(cell["bad"] for cell in cells) == 0
    assert max(cell["median_gradient_error"] for cell in cells) < 1e-5


@pytest.mark.parametrize("name", ["svd", "eigh"])
def test_autograd_through_decompositions_fails_at_ties_and_without_ridge(table, name):
    solver = f"torch.linalg.{name}, autograd"
    for treatment in ("svd", "trained SVD", "trained NOG", "trained OLR", "trained NOG + OW + OLR"):
        (cell,) = _cells(table, place=STEM, solver=solver, features="float32", eps=0.0, treatment=treatment)
        assert cell["bad"] == cell["count"] == _COVARIANCES
    (cell,) = _cells(table, solver=solver, features="float32", eps=1e-2, treatment=stress_cases.PAIRS)
    assert cell["bad"] > 0


@pytest.mark.parametrize(("name", "kind"), [("svd", "gradient"), ("eigh", "root")])
@pytest.mark.parametrize("treatment", stress_cases.POOLED)
def test_without_ridge_covariance_pooling_by_autograd_is_not_finite(table, name, kind, treatment):
    """The root of an eigenvalue that rounding has made negative is NaN; the slope of the root at 0 is infinite."""
    solver = f"torch.linalg.{name}, autograd"
    (cell,) = _cells(table, place=POOLING, solver=solver, features="float32", eps=0.0, treatment=treatment)
    assert cell[kind] == cell["count"] == _COVARIANCES // 2


# How it is counted


def test_iterations_are_no_decompositions(table):
    content = _content(table)
    columns = len(stress_cases.FRESH) + len(stress_cases.TRAINED) + 1
    stems = columns * 2 * 3 * (len(stress.ROOTS[STEM]) - 1) * _COVARIANCES
    pooling = len(stress_cases.POOLED) * 2 * 3 * len(stress.ROOTS[POOLING]) * (_COVARIANCES // 2)
    assert content["decompositions"] == stems + pooling
    assert content["iterations"] == columns * 2 * 3 * _COVARIANCES
    assert content["expected"] == pytest.approx(content["decompositions"] * 5 / 77e6)


def test_the_files_have_every_cell_and_a_figure(table):
    content = _content(table)
    assert content["images"].startswith("sprites")
    text = (table / "table.md").read_text()
    assert "## Stem: bfloat16 features, ε = 0\n" in text
    assert "## Covariance pooling: float32 features, ε = 1e-05\n" in text
    assert "At the paper's rate" in text
    lines = list(csv.DictReader((table / "table.csv").read_text().splitlines()))
    assert len(lines) == len(content["cells"])
    assert (table / "failures.png").read_bytes().startswith(b"\x89PNG")
    assert "![failures](failures.png)" in text


def test_numbers_that_are_there_are_kept(table, tmp_path):
    before = (table / "table.md").read_bytes()
    catalog.TABLES["solver-stress"].write(table, Material("laptop", 1, {}, measure=False))
    assert (table / "table.md").read_bytes() == before
    with pytest.raises(FileNotFoundError, match="run without --no-train"):
        catalog.TABLES["solver-stress"].write(tmp_path, Material("laptop", 1, {}, measure=False))


class _Skewed(torch.autograd.Function):
    """The identity, whose gradient is a multiple of what it should be."""

    @staticmethod
    def forward(ctx, a, factor):
        ctx.factor = factor
        return a.clone()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.factor, None


def _outcome(function, place=STEM):
    (case,) = stress_cases.pairs(torch.float32, 1)
    truth = stress._truth(place, case, 0.5)
    return stress._try(stress.Root(function, "sharp"), case, truth, 0.5, torch.float32, place)


def _right(a, factor=1.0, power=-0.5):
    """The exact root, by SciPy's kind of formula in float64, with a gradient of that size."""
    values, u = torch.linalg.eigh(_Skewed.apply(a, factor) + 0.5 * torch.eye(len(a), dtype=a.dtype))
    return (u * values.pow(power)) @ u.mT


@pytest.mark.parametrize(("place", "power"), [(STEM, -0.5), (POOLING, 0.5)])
@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda root, a: root, None),
        (lambda root, a: root * torch.nan, "root"),
        (lambda root, a: root + torch.nan_to_num(_Skewed.apply(a, torch.inf)) * 0, "gradient"),
        (lambda root, a: 1.2 * root, "wrong_root"),
        (lambda root, a: _Skewed.apply(root, 1.2), "wrong_gradient"),
    ],
)
def test_what_goes_wrong_has_its_kind(place, power, change, kind):
    found = _outcome(lambda a, *_: change(_right(a, power=power), a), place)
    assert found.kind == kind
    assert found.not_converged is False
    if kind is None:
        assert found.error < 1e-6
    if kind == "wrong_gradient":
        assert found.error == pytest.approx(0.2, rel=1e-6)


def test_what_raises_has_its_kind(monkeypatch):
    def raises(error):
        def root(a, *_):
            if isinstance(error, RuntimeError) and "did not converge" in str(error):
                solver_failures.count += 1
            raise error

        return root

    monkeypatch.setattr(solver_failures, "count", 0)
    assert _outcome(raises(ValueError("negative"))) == ("refused", None, False)
    assert _outcome(raises(LinAlgError("torch.linalg.svd"))) == ("unsolved", None, True)
    assert _outcome(raises(RuntimeError("eigh did not converge"))) == ("unsolved", None, True)
    with pytest.raises(RuntimeError, match="a bug"):
        _outcome(raises(RuntimeError("a bug")))


def test_a_decomposition_that_converges_at_last_did_not_at_first(monkeypatch):
    def retried(a, *_):
        solver_failures.count += 1
        return _right(a)

    monkeypatch.setattr(solver_failures, "count", 0)
    assert _outcome(retried)[::2] == (None, True)


def test_a_cell_counts_each_covariance_once():
    found = [("gradient", None, False), ("gradient", None, True), ("wrong_gradient", 0.3, False), (None, 0.01, True)]
    cell = stress._summary([stress._Found(*each) for each in found])
    assert {kind: cell[kind] for kind in stress.KINDS if cell[kind]} == {"gradient": 2, "wrong_gradient": 1}
    assert (cell["count"], cell["bad"], cell["not_converged"]) == (4, 3, 2)
    assert cell["median_gradient_error"] == 0.3
