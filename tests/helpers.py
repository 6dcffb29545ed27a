"""Matrices with a chosen spectrum, tolerances, and oracles that share no code with the library."""

import mpmath
import torch
from torch import Tensor


def with_spectrum(values: list[float] | Tensor, *batch: int, seed: int = 0) -> Tensor:
    """Random symmetric matrices (*batch, n, n) with these eigenvalues, float64."""
    values = torch.as_tensor(values, dtype=torch.float64)
    n = len(values)
    generator = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(*batch, n, n, dtype=torch.float64, generator=generator))
    a = (q * values) @ q.mT
    return (a + a.mT) / 2


def spd(n: int, cond: float, *batch: int, seed: int = 0) -> Tensor:
    """Random SPD matrices with eigenvalues from 1 to cond, evenly spaced in the logarithm, float64."""
    return with_spectrum(
        torch.logspace(0, float(torch.tensor(cond).log10()), n, dtype=torch.float64), *batch, seed=seed
    )


# name: (matrices, ridge that makes them regular)
CASES = {
    "well": (spd(5, 10.0), 0.0),
    "cond1e4": (spd(5, 1e4), 0.0),
    "cond1e8": (spd(5, 1e8), 0.0),
    "identity": (torch.eye(4, dtype=torch.float64), 0.0),
    "two-equal": (with_spectrum([1.0, 2.0, 2.0, 5.0]), 0.0),
    "rank-deficient": (with_spectrum([0.0, 0.0, 1.0, 3.0]), 0.1),
    "1x1": (torch.full((1, 1), 3.0, dtype=torch.float64), 0.0),
    "batch": (spd(3, 100.0, 2, 3), 0.0),
    "empty-batch": (torch.zeros(0, 3, 3, dtype=torch.float64), 0.0),
}


def tolerance(dtype: torch.dtype, n: int, cond: float = 1.0) -> float:
    """Relative error that an exact solver may have: n · machine epsilon · condition number."""
    return n * torch.finfo(dtype).eps * cond


def relative_error(found: Tensor, expected: Tensor) -> float:
    expected = expected.double()
    return float((found.double() - expected).norm() / expected.norm()) if expected.numel() else 0.0


def mp_matrix(a: Tensor) -> mpmath.matrix:
    return mpmath.matrix(a.double().tolist())


def to_tensor(a: mpmath.matrix) -> Tensor:
    return torch.tensor([[float(a[i, j]) for j in range(a.cols)] for i in range(a.rows)], dtype=torch.float64)


def mp_roots(a: Tensor, eps: float = 0.0) -> tuple[mpmath.matrix, mpmath.matrix]:
    """Root and inverse root of one matrix in 60 digits."""
    with mpmath.workdps(60):
        p = mp_matrix(a)
        p = (p + p.T) / 2 + mpmath.mpf(eps) * mpmath.eye(p.rows)
        values, u = mpmath.eigsy(p)
        root = u * mpmath.diag([mpmath.sqrt(v) for v in values]) * u.T
        inverse = u * mpmath.diag([1 / mpmath.sqrt(v) for v in values]) * u.T
    return root, inverse


def reference_roots(a: Tensor, eps: float = 0.0) -> tuple[Tensor, Tensor]:
    """`mp_roots` of a batch, rounded to float64."""
    batch = a.reshape(-1, *a.shape[-2:])
    both = [[to_tensor(r) for r in mp_roots(m, eps)] for m in batch]
    shape = a.shape
    return tuple(torch.stack([b[k] for b in both]).reshape(shape) if both else a.double() for k in (0, 1))


def reference_gradient(a: Tensor, g: Tensor, inverse: bool, eps: float = 0.0) -> Tensor:
    """Gradient of <g, f(a)> for one matrix by solving Q X + X Q = H as a linear system of n² unknowns, in 60 digits.

    No eigenvalue enters it: H is the symmetric part of g for the root, and -S g S for the inverse root S.
    """
    root, inverse_root = mp_roots(a, eps)
    with mpmath.workdps(60):
        h = mp_matrix(g)
        h = (h + h.T) / 2
        if inverse:
            h = -(inverse_root * h * inverse_root)
        n = root.rows
        system = mpmath.zeros(n * n)
        for i in range(n):
            for j in range(n):
                for k in range(n):
                    system[i * n + j, k * n + j] += root[i, k]
                    system[i * n + j, i * n + k] += root[k, j]
        x = mpmath.lu_solve(system, mpmath.matrix([h[i, j] for i in range(n) for j in range(n)]))
        return torch.tensor([float(v) for v in x], dtype=torch.float64).reshape(n, n)


def gradient(function, a: Tensor, g: Tensor, **settings) -> Tensor:
    """The gradient of <g, function(a)> at a."""
    a = a.detach().clone().requires_grad_()
    return torch.autograd.grad(function(a, **settings), a, g)[0]
