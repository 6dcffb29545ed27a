"""A bounded fuzz over matrix functions: random sizes, spectra, scales, dtypes, ranks and ridges, against oracles.

`pytest -m slow -s tests/test_fuzz_matrix.py` prints what was tried.
"""

import math
import random
import time
from collections import Counter

import pytest
import scipy.linalg
import torch

import orthocond as oc
from tests.helpers import gradient, mp_roots, relative_error, to_tensor

SECONDS = 25.0
SCALES = [1e-20, 1e-8, 1.0, 1.0, 1e8, 1e20]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def spectrum(rng, n):
    """Descending eigenvalues of at most 1, and the name of their kind."""
    kind = rng.choice(["flat", "log", "pairs", "equal", "cluster", "singular", "one"])
    if kind == "flat":
        values = [rng.uniform(0.1, 1.0) for _ in range(n)]
    elif kind == "log":
        span = rng.uniform(0, 5)
        values = [10 ** (-span * i / max(n - 1, 1)) for i in range(n)]
    elif kind == "pairs":
        values = [1.0 / (1 + i // 2) for i in range(n)]
    elif kind == "equal":
        values = [1.0] * n
    elif kind == "cluster":
        values = [1.0 - 1e-9 * i for i in range(n)]
    elif kind == "singular":
        rank = rng.randint(1, n)
        values = [rng.uniform(0.1, 1.0) if i < rank else 0.0 for i in range(n)]
    else:
        values = [1.0] + [0.0] * (n - 1)
    values = sorted(values, reverse=True)
    return kind, torch.tensor(values, dtype=torch.float64) / values[0]


def rotation(rng, n):
    generator = torch.Generator().manual_seed(rng.getrandbits(31))
    return torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=generator))[0]


def exact_root(values, u, power):
    """The root from the spectrum that made the matrix, and its gradient for g; left-out directions are zero."""
    f = torch.where(values > 0, values, 1).pow(power) * (values > 0)
    return (u * f) @ u.mT


def exact_gradient(values, u, power, g):
    """Divided differences, by the sums that have no gaps; only for spectra without zeros."""
    root = values.sqrt()
    slope = 1 / (root.unsqueeze(-1) + root)
    if power < 0:
        slope = -slope / (root.unsqueeze(-1) * root)
    return u @ (slope * (u.mT @ ((g + g.mT) / 2) @ u)) @ u.mT


def test_roots():
    """Values and gradients of both roots in float32 and float64, from the spectrum that made the matrix."""
    rng, tried, end = random.Random(0), Counter(), time.monotonic() + SECONDS
    while time.monotonic() < end:
        n, dtype = rng.choice([1, 2, 3, 5, 16, 64]), rng.choice([torch.float32, torch.float64])
        kind, values = spectrum(rng, n)
        scale, eps = rng.choice(SCALES), rng.choice([0.0, 0.0, 1e-10, 1e-5, 1e-2])
        u, inverse = rotation(rng, n), rng.random() < 0.5
        a = ((u * (scale * values)) @ u.mT).to(dtype)
        values = scale * (values + eps)  # a ridge relative to the scale
        case = (kind, n, dtype, scale, eps, inverse, len(tried))
        power = -0.5 if inverse else 0.5
        function = oc.inv_sqrtm if inverse else oc.sqrtm
        expected = exact_root(values, u, power)
        kept = values[values > 0]
        condition = float(kept.max() / kept.min())
        # What rounding the matrix does to it, with room: eps of the dtype times n times the condition number.
        limit = 20 * n * torch.finfo(dtype).eps * condition
        if limit > 0.1 and not (kind in ("singular", "one") and eps < torch.finfo(dtype).eps * math.sqrt(n)):
            tried["not checked: rounding alone is an error of 10 %"] += 1
            assert function(a, eps=scale * eps).isfinite().all(), case
            continue
        found = function(a, eps=scale * eps)
        assert found.isfinite().all(), case
        assert relative_error(found, expected) < max(limit if limit < 0.1 else 0.0, 1e-4), case
        if (values > 0).all() and limit < 0.1:
            g = torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
            gradients = gradient(function, a, g.to(dtype), eps=scale * eps)
            # The slopes differ by the condition number to the power 3/2, against which g is not aligned.
            assert relative_error(gradients, exact_gradient(values, u, power, g)) < max(10 * limit, 1e-4), case
            tried["gradients"] += 1
        tried[f"{kind}, {str(dtype).removeprefix('torch.')}"] += 1
    report("roots", tried)
    assert tried.total() > 300


def test_roots_against_mpmath():
    """The matrix as it stands in its dtype, in 60 digits: no model of the rounding is needed."""
    rng, tried, end = random.Random(1), Counter(), time.monotonic() + SECONDS / 2
    while time.monotonic() < end:
        n, dtype = rng.choice([2, 3, 4]), rng.choice([torch.float32, torch.float64])
        span, scale = rng.uniform(0, 4), rng.choice(SCALES)
        u = rotation(rng, n)
        values = torch.tensor([10 ** (-span * i / (n - 1)) for i in range(n)], dtype=torch.float64)
        a = ((u * (scale * values)) @ u.mT).to(dtype)
        a = (a + a.mT) / 2
        root, inverse = (to_tensor(m) for m in mp_roots(a))
        tolerance = 20 * torch.finfo(dtype).eps * (1 if span > 3 and dtype == torch.float32 else 10**span)
        assert relative_error(oc.sqrtm(a), root) < tolerance, (n, dtype, span, scale)
        assert relative_error(oc.inv_sqrtm(a), inverse) < 3 * tolerance, (n, dtype, span, scale)
        tried[f"{n} x {n}, {str(dtype).removeprefix('torch.')}"] += 1
    report("roots against mpmath", tried)
    assert tried.total() > 100


def test_polar_factors():
    """All methods against SciPy's polar decomposition, or the factors that made the matrix if the rank is not full."""
    rng, tried, end = random.Random(2), Counter(), time.monotonic() + SECONDS
    while time.monotonic() < end:
        m, n = rng.choice([1, 2, 3, 8, 40, 200]), rng.choice([1, 2, 3, 8, 40, 200])
        k, dtype, scale = min(m, n), rng.choice([torch.float32, torch.float64]), rng.choice(SCALES)
        kind, values = spectrum(rng, k)
        u, v = rotation(rng, m)[:, :k], rotation(rng, n)[:, :k]
        g = ((u * (scale * values)) @ v.mT).to(dtype)
        method = rng.choice(["gram", "svd", "newton-schulz", "polar-express"])
        found = oc.polar(g, method=method)
        case = (m, n, dtype, scale, kind, method)
        assert found.isfinite().all(), case
        rank = int((values > 0).sum())
        condition = float(1 / values[rank - 1])
        iterates = method in ("newton-schulz", "polar-express")
        if iterates and condition * math.sqrt(k) > 5e3:
            assert torch.linalg.matrix_norm(found.double(), 2) < 1.01, case
            tried["iterations beyond what they reach: bounded"] += 1
            continue
        limit = max(20 * math.sqrt(m * n) * torch.finfo(dtype).eps * condition, 1e-5)
        if rank == k:
            expected = torch.from_numpy(scipy.linalg.polar(g.double().numpy() / scale)[0])
            assert relative_error(found, expected) < limit, case
        else:
            on_range = u[:, :rank].mT @ found.double() @ v[:, :rank]
            assert (on_range - torch.eye(rank).double()).abs().max() < max(limit, 1e-3 if iterates else 0.0), case
            if not iterates:
                assert abs(float(found.double().square().sum()) - rank) < 1e-3 * rank, case
        tried[f"{method}, {'full rank' if rank == k else 'rank-deficient'}"] += 1
    report("polar factors", tried)
    assert tried.total() > 300


def report(title, tried):
    print(f"\n{title}: {tried.total()} cases")
    for name, count in sorted(tried.items()):
        print(f"  {count:6d}  {name}")
