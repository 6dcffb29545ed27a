"""When decompositions and their gradients fail, and which treatment of the weight prevents it, without training.

A stem makes features of real images; a solver takes the inverse root of their covariance and its gradient, in the
precision that it has. What exact arithmetic gives is known, since the features are a product of 27 numbers of a patch.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from orthocond.lab.classification.config import Method
from orthocond.lab.classification.data import load_data, pipeline
from orthocond.lab.classification.paper import PAPER_RATE
from orthocond.lab.classification.presets import PRESETS
from orthocond.lab.config import change
from orthocond.lab.data import Pipeline
from orthocond.lab.methods import treat_weights
from orthocond.lab.progress import Progress
from orthocond.lab.tables.measured import Measured
from orthocond.lab.tables.table import Material, Table
from orthocond.lab.tables.text import grid, power
from orthocond.layers.base import with_rank_tolerance
from orthocond.matrix import SVD, Eigh, NewtonSchulz, Solver, inv_sqrtm, solver_failures
from orthocond.weights import patch_covariance

WRONG = 0.1
"""Relative error of a value or gradient above which it counts as wrong."""

_CHANNELS, _BATCH, _SAMPLES = 64, 64, 4096
_COUNT = {"laptop": 60, "workstation": 400, "paper": 2000}
_TREATMENTS = {"svd": "none", "sn": "SN", "ow": "OW", "mow": "MOW", "wi": "WI"}
_PAIRS = "pairs of equal eigenvalues"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_RIDGES = (1e-2, 1e-5, 0.0)


def _by_svd(a: Tensor) -> Tensor:
    u, s, _ = torch.linalg.svd(a)
    return (u * s.rsqrt().unsqueeze(-2)) @ u.mT


def _by_eigh(a: Tensor) -> Tensor:
    values, u = torch.linalg.eigh(a)
    return (u * values.rsqrt().unsqueeze(-2)) @ u.mT


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share in (0, 1) or share > 0.1 else f"{100 * share:.1f} %"


class _Case(NamedTuple):
    """A covariance as a solver sees it, in float32 and in float64, and what it is: ``factor @ factor.mT``."""

    seen: Tensor
    sharp: Tensor
    factor: Tensor


def _autograd(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, float, torch.dtype], Tensor]:
    return lambda a, eps, _: function(a + eps * torch.eye(a.shape[-1], dtype=a.dtype))


def _solver(solver: Solver) -> Callable[[Tensor, float, torch.dtype], Tensor]:
    return lambda a, eps, _: inv_sqrtm(a, eps=eps, solver=solver)


def _layer(a: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    return inv_sqrtm(a, eps=eps, solver=with_rank_tolerance(Eigh(), eps, dtype, a.shape[-1]))


# Name, the inverse root, whether the covariance is float64.
SOLVERS: dict[str, tuple[Callable[[Tensor, float, torch.dtype], Tensor], bool]] = {
    "torch.linalg.svd, autograd": (_autograd(_by_svd), False),
    "torch.linalg.eigh, autograd": (_autograd(_by_eigh), False),
    "SVD, plain": (_solver(SVD(gradient="plain", precision="input")), False),
    "SVD, Taylor": (_solver(SVD(gradient="taylor", precision="input")), False),
    "SVD, Padé as released": (_solver(SVD(gradient="pade", ties="released", precision="input")), False),
    "SVD, Padé as released, float64": (_solver(SVD(gradient="pade", ties="released")), True),
    "Newton-Schulz, 5 steps": (_solver(NewtonSchulz()), False),
    "Eigh": (_solver(Eigh()), False),
    "Eigh, float64, as the layer": (_layer, True),
}
_NOTES = (
    "A cell is the share of covariances whose inverse root or gradient fails (the decomposition does not converge, the "
    "matrix is refused, or a number is not finite) or is wrong, by more than a tenth of what exact arithmetic gives. "
    "After it, the median relative error of the gradient where it does not fail.",
    "Features are those of a 3x3 convolution of 3 colors to 64 channels, stride 2, with a fresh weight and a batch of "
    "64 images for each covariance; float32, or rounded to bfloat16. Covariances are float32, as a plain "
    "implementation has them, and float64 where that is said. Errors are those on the features: of the whitened "
    "features, and of the gradient that reaches them, for random gradients of the output.",
    "Without a ridge (ε = 0) the exact whitening is that of the 27 directions that exist. With one, the other 37 "
    "eigenvalues are the ridge, equal up to rounding: in float32 they often tie, and what a gradient makes of ties "
    "reaches the features.",
    "Pairs of equal eigenvalues: covariances of full rank whose 32 pairs of eigenvalues, from 1 to 100, differ by "
    "rounding alone.",
    "Five steps of Newton-Schulz are no root at these condition numbers, but a function of their own: they are wrong "
    "here, and never fail.",
)


@dataclass(frozen=True)
class Stress(Measured):
    """How often solvers fail, for each treatment of the weight, precision of features and ridge."""

    def measure(self, material: Material) -> dict[str, Any]:
        """Failures and errors of fresh covariances."""
        count = _COUNT[material.scale]
        source, batches = _images()
        stream = itertools.chain.from_iterable(map(batches.batches, itertools.count()))
        images = [next(stream).images for _ in range(8)]
        cells = []
        groups = list(itertools.product((*_TREATMENTS, _PAIRS), _DTYPES))
        for done, (treatment, dtype) in enumerate(groups):
            cases = list(_cases(treatment, _DTYPES[dtype], images, count))
            for eps, (name, (root, sharp)) in itertools.product(_RIDGES, SOLVERS.items()):
                found = [_try(root, case, eps, _DTYPES[dtype], sharp=sharp) for case in cases]
                cells.append(_cell(treatment, dtype, eps, name, found))
            if material.progress is not None:
                material.progress(0, Progress(done + 1, len(groups), {}))
        total = sum(cell["count"] for cell in cells)
        return self.header(material) | {
            "images": source,
            "cells": cells,
            "decompositions": total,
            "not_converged": sum(cell["not_converged"] for cell in cells),
            "expected": total * PAPER_RATE,
            "verdict": _verdict(cells),
            "notes": [*_NOTES, f"Images: {source}.", *_counts(cells, total)],
        }

    def lines(self, content: Mapping[str, Any]) -> list[dict[str, Any]]:
        """A line for each cell."""
        return list(content["cells"])

    def markdown(self, content: Mapping[str, Any]) -> str:
        """A grid for each precision and ridge: solvers down, treatments across."""
        return _markdown(content)


class _Found(NamedTuple):
    """What a solver made of one covariance; errors are infinite where it failed."""

    value_error: float
    gradient_error: float
    failed: bool
    not_converged: int


def _images() -> tuple[str, Pipeline]:
    """CIFAR-10 if it is there, else sprites."""
    config = change(PRESETS["dbn-cifar10-convnet"]["laptop"], {"schedule.batch_size": _BATCH})
    try:
        return "CIFAR-10, 32x32", pipeline(config, load_data(config.data).train, train=True)
    except FileNotFoundError:
        sprites = change(config, {"data.source": "sprites", "data.limit": 2000, "data.padding": "zeros"})
        return "sprites, 32x32, since CIFAR-10 is not there", pipeline(
            sprites, load_data(sprites.data).train, train=True
        )


def _cases(treatment: str, dtype: torch.dtype, images: list[Tensor], count: int) -> Iterator[_Case]:
    """Covariances of the features of fresh stems, or with pairs of equal eigenvalues."""
    for seed in range(count):
        torch.manual_seed(seed)
        if treatment == _PAIRS:
            yield _pairs(dtype)
        else:
            yield _stem(treatment, dtype, images[seed % len(images)], images)


@torch.no_grad()
def _stem(treatment: str, dtype: torch.dtype, batch: Tensor, images: list[Tensor]) -> _Case:
    conv = nn.Conv2d(3, _CHANNELS, 3, 2, 1, bias=False)
    treat_weights(Method(treatment), [conv], lambda _: iter(images))
    patches = patch_covariance(conv, batch)
    weight = conv.weight.detach().flatten(1).double()
    features = conv(batch).to(dtype).movedim(1, 0).flatten(1)
    values, u = torch.linalg.eigh(patches)
    factor = weight @ u * values.clamp(min=0).sqrt()
    return _Case(_covariance(features.float()), _covariance(features.double()), factor)


def _pairs(dtype: torch.dtype) -> _Case:
    values = torch.logspace(0, 2, _CHANNELS // 2, dtype=torch.float64).repeat_interleave(2)
    q, _ = torch.linalg.qr(torch.randn(_CHANNELS, _CHANNELS, dtype=torch.float64))
    factor = q * values.sqrt()
    white = torch.linalg.qr(torch.randn(_SAMPLES, _CHANNELS, dtype=torch.float64))[0].mT * _SAMPLES**0.5
    features = (factor @ white).float().to(dtype)
    seen, sharp = (features.to(kind) @ features.to(kind).mT / _SAMPLES for kind in (torch.float32, torch.float64))
    return _Case(seen, sharp, factor)


def _covariance(features: Tensor) -> Tensor:
    centered = features - features.mean(1, keepdim=True)
    return centered @ centered.mT / features.shape[1]


def exact(factor: Tensor, outer: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Inverse root of ``factor @ factor.mT + eps I`` and gradient of its product with ``outer``, in float64.

    Without ridge, directions beyond the columns of the factor are left out. The gradient is that of divided
    differences (Daleckii and Krein).
    """
    u, s, _ = torch.linalg.svd(factor)
    values = torch.zeros(len(u), dtype=torch.float64)
    values[: len(s)] = s.square()
    kept = values + eps > 0
    r = torch.where(kept, values + eps, 1).sqrt()
    f = torch.where(kept, 1 / r, 0)
    slopes = -1 / (r[:, None] * r * (r[:, None] + r))
    # Between a direction that is kept and one that is left out the function goes from f to 0 over the eigenvalue.
    across = (f / r.square())[:, None] + f / r.square()
    slopes = torch.where(kept[:, None] & kept, slopes, torch.where(kept[:, None] | kept, across, 0))
    inner = u.mT @ ((outer + outer.mT) / 2) @ u
    return (u * f) @ u.mT, u @ (slopes * inner) @ u.mT


def _try(
    root: Callable[[Tensor, float, torch.dtype], Tensor],
    case: _Case,
    eps: float,
    dtype: torch.dtype,
    *,
    sharp: bool,
) -> _Found:
    """Errors of inverse root and gradient on the features, for a random gradient of the whitened features."""
    features = case.factor  # all features of this covariance give the same errors
    draw = torch.Generator().manual_seed(0)
    outer = torch.randn(features.shape, generator=draw, dtype=torch.float64) @ features.mT
    value, gradient = exact(features, outer, eps)
    a = (case.sharp if sharp else case.seen).clone().requires_grad_()
    before = solver_failures.count
    try:
        found = root(a, eps, dtype)
        found.backward(outer.to(found.dtype))
        assert a.grad is not None
        pairs = ((found.detach(), value), ((a.grad + a.grad.mT) / 2, gradient))
        errors = [float(((x - y) @ features).norm() / (y @ features).norm()) for x, y in pairs]
        failed = not all(map(_is_finite, errors))
    except (RuntimeError, ValueError):  # LinAlgError is a RuntimeError
        errors, failed = [float("inf")] * 2, True
    return _Found(errors[0], errors[1], failed, solver_failures.count - before)


def _is_finite(value: float) -> bool:
    return value < float("inf")


def _cell(treatment: str, dtype: str, eps: float, name: str, found: list[_Found]) -> dict[str, Any]:
    gradients = sorted(each.gradient_error for each in found if not each.failed)
    return {
        "treatment": treatment,
        "features": dtype,
        "eps": eps,
        "solver": name,
        "count": len(found),
        "failed": sum(each.failed for each in found),
        "not_converged": sum(each.not_converged for each in found),
        "wrong_value": sum(not each.failed and each.value_error > WRONG for each in found),
        "wrong_gradient": sum(not each.failed and each.gradient_error > WRONG for each in found),
        "bad": sum(each.failed or max(each.value_error, each.gradient_error) > WRONG for each in found),
        "median_gradient_error": gradients[len(gradients) // 2] if gradients else None,
    }


def _verdict(cells: list[dict[str, Any]]) -> list[str]:
    """How often each treatment fails with float32 decompositions, and how often the layer does."""

    def share(**settings: Any) -> float:
        chosen = [c for c in cells if all(c[key] == value for key, value in settings.items())]
        return sum(c["bad"] for c in chosen) / sum(c["count"] for c in chosen)

    layer = "Eigh, float64, as the layer"
    words = ", ".join(
        f"{text} {_percent(share(treatment=name, solver='torch.linalg.svd, autograd'))}"
        for name, text in _TREATMENTS.items()
    )
    return [
        f"Autograd through a float32 SVD fails or is wrong, by treatment of the weight: {words}.",
        f"The layer's own solver fails or is wrong in {_percent(share(solver=layer))} of all cases, and in "
        f"{_percent(share(solver=layer, features='float32'))} of those with float32 features.",
    ]


def _counts(cells: list[dict[str, Any]], total: int) -> list[str]:
    failures = sum(cell["not_converged"] for cell in cells)
    return [
        f"{total:,} decompositions were made, of which {failures} did not converge at first. At the paper's rate, 5 in"
        f" about 77 million, {total * PAPER_RATE:.2g} were to be expected: failures to converge are rare, wrong "
        "gradients are not."
    ]


def _markdown(content: Mapping[str, Any]) -> str:
    parts = [f"# {content['title']}", content["text"], "\n".join(content["verdict"])]
    titles = {name: f"weight: {text}" for name, text in _TREATMENTS.items()} | {_PAIRS: _PAIRS}
    cells = {(c["features"], c["eps"], c["solver"], c["treatment"]): c for c in content["cells"]}
    for dtype, eps in itertools.product(_DTYPES, _RIDGES):
        rows = [[name, *(_share(cells[dtype, eps, name, t]) for t in titles)] for name in SOLVERS]
        parts += [f"## {dtype} features, ε = {eps:g}", grid(["solver", *titles.values()], rows)]
    parts += ["## Notes", "\n".join(f"- {note}" for note in content["notes"]) + "\n"]
    return "\n\n".join(parts)


def _share(cell: dict[str, Any]) -> str:
    bad, median = _percent(cell["bad"] / cell["count"]), cell["median_gradient_error"]
    return bad if median is None else f"{bad}, {power(median)}"


TABLES: tuple[Table, ...] = (
    Stress(
        "solver-stress",
        "When decompositions and gradients fail",
        "How often the inverse root of a stem's covariance, or its gradient, fails or is wrong: for treatments of the"
        " weight, precision of the features, ridges and solvers. Nothing is trained.",
    ),
)
