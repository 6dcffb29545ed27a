"""When decompositions and their gradients fail, and which treatment of the weight prevents it.

A stem, or a network before covariance pooling, makes features of real images. A solver takes the root of their
covariance and its gradient in the precision that it has, and both are compared with exact arithmetic.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]  # public, but missing from the stubs

from orthocond.lab.classification import stress_cases, stress_report
from orthocond.lab.classification.paper import PAPER_RATE
from orthocond.lab.classification.stress_cases import FRESH, PAIRS, POOLED, TRAINED, Source, StressCase
from orthocond.lab.classification.stress_report import DTYPES, KINDS, LAYER, POOLING, RIDGES, STEM
from orthocond.lab.devices import one_thread
from orthocond.lab.progress import Progress
from orthocond.lab.tables.drawing import save
from orthocond.lab.tables.measured import Measured
from orthocond.lab.tables.table import Material, Table
from orthocond.layers import covariance_pool
from orthocond.layers.base import with_rank_tolerance
from orthocond.matrix import SVD, Eigh, NewtonSchulz, Solver, inv_sqrtm, solver_failures, sqrtm

WRONG = 0.1
"""Relative error of a root or gradient above which it counts as wrong."""

_COUNT = {"laptop": 60, "workstation": 400, "paper": 2000}


class Root(NamedTuple):
    """How a root is taken: of ``seen``, ``sharp`` or ``features`` of a case, with the ridge and the features' dtype."""

    function: Callable[[Tensor, float, torch.dtype], Tensor]
    takes: str = "seen"
    decomposes: bool = True


def _by_svd(function: Callable[[Tensor], Tensor]) -> Root:
    def root(a: Tensor, eps: float, _: torch.dtype) -> Tensor:
        u, s, _v = torch.linalg.svd(a + eps * torch.eye(a.shape[-1], dtype=a.dtype))
        return (u * function(s).unsqueeze(-2)) @ u.mT

    return Root(root)


def _by_eigh(function: Callable[[Tensor], Tensor]) -> Root:
    def root(a: Tensor, eps: float, _: torch.dtype) -> Tensor:
        values, u = torch.linalg.eigh(a + eps * torch.eye(a.shape[-1], dtype=a.dtype))
        return (u * function(values).unsqueeze(-2)) @ u.mT

    return Root(root)


def _solver(solver: Solver, takes: str = "seen", *, decomposes: bool = True) -> Root:
    return Root(lambda a, eps, _: inv_sqrtm(a, eps=eps, solver=solver), takes, decomposes)


def _whiten(a: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    return inv_sqrtm(a, eps=eps, solver=with_rank_tolerance(Eigh(), eps, dtype, a.shape[-1]))


def _pool(features: Tensor, eps: float, _: torch.dtype) -> Tensor:
    return covariance_pool(features.unsqueeze(0), output="matrix", eps=eps)[0]


_RELEASED = SVD(gradient="pade", ties="released")

ROOTS: dict[str, dict[str, Root]] = {
    STEM: {
        "torch.linalg.svd, autograd": _by_svd(torch.rsqrt),
        "torch.linalg.eigh, autograd": _by_eigh(torch.rsqrt),
        "SVD, plain": _solver(SVD(gradient="plain", precision="input")),
        "SVD, Taylor": _solver(SVD(gradient="taylor", precision="input")),
        "SVD, Padé as released": _solver(SVD(gradient="pade", ties="released", precision="input")),
        "SVD, Padé as released, float64": _solver(_RELEASED, "sharp"),
        "Newton-Schulz, 5 steps": _solver(NewtonSchulz(), decomposes=False),
        "Eigh": _solver(Eigh()),
        LAYER: Root(_whiten, "sharp"),
    },
    POOLING: {
        "torch.linalg.svd, autograd": _by_svd(torch.sqrt),
        "torch.linalg.eigh, autograd": _by_eigh(torch.sqrt),
        "SVD, Padé as released, float64": Root(lambda a, eps, _: sqrtm(a, eps=eps, solver=_RELEASED), "sharp"),
        LAYER: Root(_pool, "features"),
    },
}
"""How roots are taken: the inverse root of a stem's covariance, the root of that of pooled features."""


@dataclass(frozen=True)
class Stress(Measured):
    """How often solvers fail, for each treatment of the weight, precision of features and ridge."""

    def measure(self, material: Material) -> dict[str, Any]:
        """Failures and errors of fresh covariances."""
        count = _COUNT[material.scale]
        done, total = 0, len(TRAINED) * stress_cases.SEEDS + len(DTYPES) * (len(FRESH) + len(TRAINED) + 1 + len(POOLED))

        def advance() -> None:
            nonlocal done
            done += 1
            if material.progress is not None:
                material.progress(0, Progress(done, total, {}))

        cells: list[dict[str, Any]] = []
        with one_thread():
            source = Source.load()
            for place, treatment, dtype, cases in _groups(source, count, advance):
                cells += _cells(place, treatment, dtype, cases)
                advance()
        tried = sum(cell["count"] for cell in cells)
        decomposed = sum(cell["count"] for cell in cells if ROOTS[cell["place"]][cell["solver"]].decomposes)
        return self.header(material) | {
            "images": source.name,
            "verdict": stress_report.verdict(cells),
            "cells": cells,
            "decompositions": decomposed,
            "iterations": tried - decomposed,
            "not_converged": sum(cell["not_converged"] for cell in cells),
            "expected": decomposed * PAPER_RATE,
        }

    def lines(self, content: Mapping[str, Any]) -> list[dict[str, Any]]:
        """A line for each cell."""
        return list(content["cells"])

    def markdown(self, content: Mapping[str, Any]) -> str:
        """A grid for each place, precision and ridge: solvers down, treatments across."""
        return stress_report.markdown(content)

    def draw(self, content: Mapping[str, Any], folder: Path) -> None:
        """Draw the shares that fail, by treatment and ridge."""
        save(stress_report.figure(content), folder / "failures")


def _groups(
    source: Source, count: int, advance: Callable[[], None]
) -> Iterator[tuple[str, str, str, list[StressCase]]]:
    """Place, treatment, precision of the features, and covariances of them; ``advance`` is called after a training."""
    for name in DTYPES:
        for treatment in FRESH:
            yield STEM, treatment, name, list(stress_cases.fresh_stems(treatment, DTYPES[name], source, count))
        yield STEM, PAIRS, name, list(stress_cases.pairs(DTYPES[name], count))
        for treatment in POOLED:
            yield POOLING, treatment, name, list(stress_cases.pooled(treatment, DTYPES[name], source, count // 2))
    for arm in TRAINED:
        weights: list[Tensor] = []
        for seed in range(stress_cases.SEEDS):
            weights += stress_cases.train_stem(arm, source, seed, count // stress_cases.SEEDS)
            advance()
        for name in DTYPES:
            yield STEM, f"trained {arm}", name, list(stress_cases.trained_stems(weights, DTYPES[name], source))


class _Truth(NamedTuple):
    """The gradient that reaches a root, the root in exact arithmetic, and the gradient that then reaches the factor."""

    outer: Tensor
    root: Tensor
    gradient: Tensor


class _Found(NamedTuple):
    """What a solver made of a covariance.

    Attributes:
        kind: What went wrong, one of `KINDS`; None if nothing did.
        error: Relative error of the gradient; None if there is no finite one.
        not_converged: Whether the first attempt of a decomposition failed.
    """

    kind: str | None
    error: float | None
    not_converged: bool


def _cells(place: str, treatment: str, dtype: str, cases: list[StressCase]) -> Iterator[dict[str, Any]]:
    largest = median(float(torch.linalg.eigvalsh(case.sharp)[-1]) for case in cases)
    for eps in RIDGES:
        truths = [_truth(place, case, eps) for case in cases]
        for name, root in ROOTS[place].items():
            pairs = zip(cases, truths, strict=True)
            found = [_try(root, case, truth, eps, DTYPES[dtype], place) for case, truth in pairs]
            settings = {"place": place, "treatment": treatment, "features": dtype, "eps": eps, "solver": name}
            yield settings | {"largest": largest} | _summary(found)


def _truth(place: str, case: StressCase, eps: float) -> _Truth:
    """For a random gradient: of a stem's whitened features, of the root that pooling gives."""
    draw = torch.Generator().manual_seed(0)
    factor = case.factor  # all features of this covariance give the same errors
    if place == STEM:
        outer = torch.randn(factor.shape, generator=draw, dtype=torch.float64) @ factor.mT
    else:
        outer = torch.randn(len(factor), len(factor), generator=draw, dtype=torch.float64)
    root, gradient = stress_cases.exact(factor, outer, eps, inverse=place == STEM)
    return _Truth(outer, root, gradient @ factor)


def _try(root: Root, case: StressCase, truth: _Truth, eps: float, dtype: torch.dtype, place: str) -> _Found:
    """What goes wrong with root and gradient, whose errors are those on the features."""
    leaf = getattr(case, root.takes).clone().requires_grad_()
    before = solver_failures.count
    try:
        found = root.function(leaf, eps, dtype)
        found.backward(truth.outer.to(found.dtype))
    except LinAlgError:
        return _Found("unsolved", None, True)
    except ValueError:
        return _Found("refused", None, solver_failures.count > before)
    except RuntimeError:  # the library's word for a decomposition of which no attempt converges
        if solver_failures.count == before:
            raise
        return _Found("unsolved", None, True)
    assert leaf.grad is not None
    value, gradient = found.detach().double(), leaf.grad.double()
    if root.takes == "features":  # of centered features over the root of their number, twice
        gradient = gradient.flatten(1) * case.factor.shape[1] ** 0.5 / 2
    else:
        gradient = (gradient + gradient.mT) / 2 @ case.factor
    if place == STEM:
        errors = _error(value @ case.factor, truth.root @ case.factor), _error(gradient, truth.gradient)
    else:
        errors = _error(value, truth.root), _error(gradient, truth.gradient)
    return _Found(_kind(*errors), errors[1], solver_failures.count > before)


def _error(found: Tensor, truth: Tensor) -> float | None:
    """The relative error; None if what was found is not finite."""
    return float((found - truth).norm() / truth.norm()) if bool(found.isfinite().all()) else None


def _kind(value: float | None, gradient: float | None) -> str | None:
    """What is wrong, given the errors of a root and its gradient."""
    if value is None:
        return "root"
    if gradient is None:
        return "gradient"
    if value > WRONG:
        return "wrong_root"
    return "wrong_gradient" if gradient > WRONG else None


def _summary(found: list[_Found]) -> dict[str, Any]:
    """Counts of what went wrong, and the median error of the gradients that are finite."""
    kinds = Counter(each.kind for each in found)
    errors = sorted(each.error for each in found if each.error is not None)
    return {
        "count": len(found),
        **{kind: kinds[kind] for kind in KINDS},
        "bad": len(found) - kinds[None],
        "not_converged": sum(each.not_converged for each in found),
        "median_gradient_error": errors[len(errors) // 2] if errors else None,
    }


TABLES: tuple[Table, ...] = (
    Stress(
        "solver-stress",
        "When decompositions and gradients fail",
        "How often the root of a covariance, or its gradient, fails or is wrong: of a stem and of pooled features, for"
        " treatments of the weight, precision of the features, ridges and solvers.",
    ),
)
