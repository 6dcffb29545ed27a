"""The table of solvers under stress: its oracle against finite differences, what fails and what does not."""

import csv
import json

import numpy as np
import pytest
import torch
from scipy import linalg

from orthocond.lab import catalog
from orthocond.lab.classification import stress
from orthocond.lab.tables.table import Material

_LAYER = "Eigh, float64, as the layer"


def _factor(rows, columns):
    draw = torch.Generator().manual_seed(0)
    return torch.randn(rows, columns, dtype=torch.float64, generator=draw)


# The oracle


@pytest.mark.parametrize(("columns", "eps"), [(6, 0.0), (6, 0.1), (4, 0.1)])
def test_exact_gradient_is_that_of_finite_differences(columns, eps):
    """A central difference of SciPy's roots, in a random symmetric direction."""
    factor, outer, way = _factor(6, columns), _factor(6, 6), _factor(6, 6)
    way = way + way.mT
    value, gradient = stress.exact(factor, outer, eps)
    covariance = factor @ factor.mT + eps * torch.eye(6)
    np.testing.assert_allclose(value.numpy(), linalg.inv(linalg.sqrtm(covariance.numpy())).real, atol=1e-9)
    step = 1e-5
    ends = [linalg.inv(linalg.sqrtm((covariance + sign * step * way).numpy())).real for sign in (1, -1)]
    slope = float((outer.numpy() * (ends[0] - ends[1])).sum()) / (2 * step)
    assert float((gradient * way).sum()) == pytest.approx(slope, rel=1e-5)


def test_exact_gradient_without_ridge_is_that_of_the_pseudo_inverse():
    """In directions that change the features, so that the rank stays: central differences of the four that exist."""
    factor, outer, way = _factor(6, 4), _factor(6, 6), _factor(6, 4) * 0.3 + 1
    value, gradient = stress.exact(factor, outer, 0.0)

    def root(f):
        values, u = np.linalg.eigh((f @ f.mT).numpy())
        return (u[:, 2:] / np.sqrt(values[2:])) @ u[:, 2:].T

    np.testing.assert_allclose(value.numpy(), root(factor), atol=1e-10)
    step = 1e-6
    slope = float((outer.numpy() * (root(factor + step * way) - root(factor - step * way))).sum()) / (2 * step)
    change = way @ factor.mT + factor @ way.mT
    assert float((gradient * change).sum()) == pytest.approx(slope, rel=1e-5)


# What fails


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """The table of three covariances for each cell, of sprites."""
    folder = tmp_path_factory.mktemp("stress")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(stress._COUNT, "laptop", 3)
        patch.setenv("ORTHOCOND_DATA", str(folder))  # no CIFAR-10 there
        catalog.TABLES["solver-stress"].write(folder, Material("laptop", 1, {}))
    return folder


def _cells(folder, **settings):
    cells = json.loads((folder / "table.json").read_text())["cells"]
    found = [cell for cell in cells if all(cell[key] == value for key, value in settings.items())]
    assert found
    return found


def test_the_layer_is_right_with_float32_features(table):
    assert sum(cell["bad"] for cell in _cells(table, solver=_LAYER, features="float32")) == 0
    assert max(cell["median_gradient_error"] for cell in _cells(table, solver=_LAYER, features="float32")) < 1e-5


def test_autograd_through_decompositions_fails_at_ties_and_without_ridge(table):
    for solver in ("torch.linalg.svd, autograd", "torch.linalg.eigh, autograd"):
        (cell,) = _cells(table, solver=solver, features="float32", eps=0.0, treatment="svd")
        assert cell["bad"] == cell["count"] == 3
        (cell,) = _cells(table, solver=solver, features="float32", eps=1e-2, treatment=stress._PAIRS)
        assert cell["bad"] > 0


def test_the_table_tells_how_many_failures_were_to_be_expected(table):
    content = json.loads((table / "table.json").read_text())
    assert content["decompositions"] == 6 * 2 * 3 * len(stress.SOLVERS) * 3
    assert content["expected"] == pytest.approx(content["decompositions"] * 5 / 77e6)
    assert content["images"].startswith("sprites")
    text = (table / "table.md").read_text()
    assert "## bfloat16 features, ε = 0\n" in text
    assert "At the paper's rate" in text
    lines = list(csv.DictReader((table / "table.csv").read_text().splitlines()))
    assert len(lines) == len(content["cells"])


def test_numbers_that_are_there_are_kept(table, tmp_path):
    before = (table / "table.md").read_bytes()
    catalog.TABLES["solver-stress"].write(table, Material("laptop", 1, {}, measure=False))
    assert (table / "table.md").read_bytes() == before
    with pytest.raises(FileNotFoundError, match="run without --no-train"):
        catalog.TABLES["solver-stress"].write(tmp_path, Material("laptop", 1, {}, measure=False))


def test_a_solver_that_raises_or_gives_nan_has_failed():
    case = stress._pairs(torch.float32)

    def refuses(*_):
        raise ValueError("negative")

    found = stress._try(refuses, case, 0.0, torch.float32, sharp=False)
    assert found.failed
    assert stress._try(lambda a, *_: a * torch.nan, case, 0.0, torch.float32, sharp=False).failed
    cell = stress._cell("svd", "float32", 0.0, "mine", [found, stress._Found(0.2, 0.0, False, 0)])
    assert (cell["failed"], cell["wrong_value"], cell["wrong_gradient"], cell["bad"]) == (1, 1, 0, 2)
