"""Error of every solver at every condition number, as a page of the documentation.

`python benchmarks/precision.py --output docs/precision.md` computes value and gradient of both roots of 16 x 16
matrices with eigenvalues evenly spaced in the logarithm, in float32 and float64, and compares them with mpmath in 60
digits. The oracle is the root of the matrix as it stands in that precision, so only the error of the solver counts.
"""

import argparse
import math
from pathlib import Path

import mpmath
import torch

import orthocond as oc

SIZE = 16
CONDITIONS = [10.0**k for k in range(1, 9)]
mpmath.mp.dps = 60


def eigh_autograd(inverse):
    def function(a):
        values, u = torch.linalg.eigh((a + a.mT) / 2)
        return (u * values.pow(-0.5 if inverse else 0.5)) @ u.mT

    return function


SOLVERS = {
    "`Eigh()`": oc.Eigh(),
    "`Eigh(rank_tol=0.0)`": oc.Eigh(rank_tol=0.0),
    '`Eigh(precision="input")`': oc.Eigh(precision="input"),
    "autograd through `eigh`": None,
    '`SVD(gradient="plain")`': oc.SVD(gradient="plain", precision="input"),
    '`SVD(gradient="truncated")`': oc.SVD(gradient="truncated", precision="input"),
    '`SVD(gradient="top", keep=12)`': oc.SVD(gradient="top", keep=12, precision="input"),
    '`SVD(gradient="taylor", degree=9)`': oc.SVD(gradient="taylor", degree=9, precision="input"),
    '`SVD(gradient="taylor", degree=100)`': oc.SVD(gradient="taylor", degree=100, precision="input"),
    '`SVD(gradient="pade")`': oc.SVD(gradient="pade", precision="input"),
    '`SVD(gradient="taylor", degree=100, ties="released")`': oc.SVD(
        gradient="taylor", degree=100, ties="released", precision="input"
    ),
    '`SVD(gradient="pade", ties="released")`': oc.SVD(gradient="pade", ties="released", precision="input"),
    "`NewtonSchulz(steps=5)`": oc.NewtonSchulz(steps=5),
    "`NewtonSchulz(steps=20)`": oc.NewtonSchulz(steps=20),
    "`Pade(degree=5)`": oc.Pade(degree=5),
    "`Taylor(degree=10)`": oc.Taylor(degree=10),
}


def matrices(dtype):
    """The columns of the table: name and matrix."""
    generator = torch.Generator().manual_seed(0)
    q, _ = torch.linalg.qr(torch.randn(SIZE, SIZE, dtype=torch.float64, generator=generator))

    def rotated(values):
        a = (q * values) @ q.mT
        return ((a + a.mT) / 2).to(dtype)

    pairs = torch.linspace(1, 2, SIZE // 2, dtype=torch.float64).repeat_interleave(2)
    columns = {
        f"κ=1e{round(math.log10(c))}": rotated(torch.logspace(0, math.log10(c), SIZE, dtype=torch.float64))
        for c in CONDITIONS
    }
    return {"ties": torch.diag(pairs).to(dtype), "near ties": rotated(pairs)} | columns


def oracle(a, g, inverse):
    """Value and gradient of <g, f(a)> in 60 digits, by divided differences; None if a has an eigenvalue below 0."""
    values, u = mpmath.eigsy(mpmath.matrix(a.double().tolist()))
    if min(values) <= 0:
        return None
    root = [mpmath.sqrt(v) for v in values]
    f = [1 / r for r in root] if inverse else root
    t = u.T * mpmath.matrix(((g + g.mT) / 2).double().tolist()) * u
    for i in range(SIZE):
        for j in range(SIZE):
            slope = 1 / (root[i] + root[j])
            t[i, j] *= -f[i] * f[j] * slope if inverse else slope
    return to_tensor(u * mpmath.diag(f) * u.T), to_tensor(u * t * u.T)


def to_tensor(m):
    return torch.tensor([[float(x) for x in row] for row in m.tolist()], dtype=torch.float64)


def error(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


def errors(solver, a, g, inverse, expected):
    """Relative error of the value and of the gradient, as text."""
    if expected is None:
        return "–", "–"
    verb = oc.inv_sqrtm if inverse else oc.sqrtm
    function = eigh_autograd(inverse) if solver is None else lambda x: verb(x, solver=solver)
    x = a.clone().requires_grad_()
    value = function(x)
    (gradient,) = torch.autograd.grad(value, x, g)
    return show(error(value.detach(), expected[0])), show(error(gradient, expected[1]))


def show(value):
    return "**nan**" if math.isnan(value) else f"**{value:.0e}**" if value > 0.1 else f"{value:.0e}"


def tables(dtype, inverse):
    """The table of the values and that of the gradients."""
    columns = matrices(dtype)
    g = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = {name: oracle(a, g, inverse) for name, a in columns.items()}
    found = {
        name: [errors(solver, a, g, inverse, expected[column]) for column, a in columns.items()]
        for name, solver in SOLVERS.items()
    }
    for part in (0, 1):
        lines = ["| | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
        lines += [f"| {name} | " + " | ".join(cell[part] for cell in cells) + " |" for name, cells in found.items()]
        yield "\n".join(lines)


HEADER = f"""# Precision

This page shows how accurate each solver is, so that you can choose one. The tables give the relative error of value and
gradient in the Frobenius norm, measured against mpmath with 60 digits. The matrices are {SIZE} x {SIZE}, with
eigenvalues evenly spaced in the logarithm from 1 to κ. Errors above 10 % are bold. "Ties" is a diagonal matrix with
eight pairs of exactly equal eigenvalues. "Near ties" is the same matrix rotated, which leaves them equal up to
rounding. The reference is the root of the matrix after rounding to that precision. A dash means that rounding to
float32 alone made the matrix indefinite. `benchmarks/precision.py` writes this page.

What the tables show:

* `Eigh()` is accurate wherever float32 can represent the matrix, including at ties. In float32 it switches to float64
  by itself where the condition number is above 1e3; `precision="input"` shows what it would lose otherwise.
* In float32, at κ = 1e7 and above, the smallest eigenvalues are as small as the rounding errors of the entries, and
  without `eps` they are left out. `rank_tol=0.0` keeps them. An `eps` below that size replaces them, so that the
  inverse root is `1/sqrt(eps)` there; a larger one is added to them.
* One case is not in the tables. Where a left-out eigenvalue is within a factor of 2 of a kept one, the gradient between
  their directions is capped. The whole gradient was off by 53 % in one test. This requires a tolerance in the middle of
  a cluster of eigenvalues.
* Autograd through `torch.linalg.eigh` is accurate for separated eigenvalues, wrong by 30 to 70 % at near ties and NaN
  at ties.
* Every remedy in the literature keeps the gradient finite. At ties it sets the factor between equal eigenvalues to 0
  (`ties="released"` excepted) and loses that part, here a fifth of the gradient or more. At near ties the remedies are
  off by 10 to 90 %.
* The Padé gradient equals the plain gradient except at ties: the [50/50] approximant of the rational function 1/(1 - x)
  is that function. At ties the authors' code divides by a rounding error. Both entries of a pair get the same sign, as
  in their Taylor series. `ties="released"` does the same.
* Five Newton-Schulz steps and the Padé and Taylor approximants are regularizers: from κ = 1e3 on, the error of their
  gradient is of the order of the gradient. Twenty Newton-Schulz steps are accurate up to κ = 1e5.
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="write the page to this file; else it is printed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts = [HEADER]
    for dtype in (torch.float64, torch.float32):
        for inverse in (False, True):
            title = f"`{'inv_sqrtm' if inverse else 'sqrtm'}` in {str(dtype).removeprefix('torch.')}"
            for part, table in zip(("value", "gradient"), tables(dtype, inverse), strict=True):
                parts.append(f"## {title}: {part}\n\n{table}\n")
    text = "\n".join(parts)
    if options.output:
        options.output.write_text(text)
        print(f"written to {options.output}")
    else:
        print(text)
