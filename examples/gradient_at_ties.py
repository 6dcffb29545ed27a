"""Where gradients of an SVD layer break: two eigenvalues that meet.

Prints and draws the error of the gradient of P^-1/2 as two eigenvalues of P approach each other, for this library,
autograd through torch.linalg.eigh and the remedies in the literature. The reference solves the Lyapunov equation of the
gradient as one dense linear system, without any eigenvalue.
"""

import math
import sys
from pathlib import Path

import torch

import orthocond as oc

# Float64 throughout; the gap is relative to the eigenvalues, and the last one is an exact tie.
GAPS = [10.0**-k for k in range(1, 15)] + [0.0]
SHOWN = [1e-1, 1e-4, 1e-8, 1e-12, 0.0]


def autograd_through_eigh(p):
    values, u = torch.linalg.eigh(p)
    return (u * values.rsqrt()) @ u.mT


METHODS = {
    "orthocond.inv_sqrtm": oc.inv_sqrtm,
    "autograd through eigh": autograd_through_eigh,
    "SVD, plain (appendix A)": lambda p: oc.inv_sqrtm(p, solver=oc.SVD(gradient="plain")),
    "SVD, truncated at 1e10": lambda p: oc.inv_sqrtm(p, solver=oc.SVD(gradient="truncated")),
    "SVD, Taylor degree 9": lambda p: oc.inv_sqrtm(p, solver=oc.SVD(gradient="taylor", degree=9)),
    "SVD, Taylor degree 100": lambda p: oc.inv_sqrtm(p, solver=oc.SVD(gradient="taylor", degree=100)),
    "SVD, Padé (the paper)": lambda p: oc.inv_sqrtm(p, solver=oc.SVD(gradient="pade")),
    "Newton-Schulz, 5 steps": lambda p: oc.inv_sqrtm(p, solver=oc.NewtonSchulz(steps=5)),
}


def matrix(gap):
    """Eigenvalues 1, 1 + gap, 2, 3, 4, 5; a rotation that mixes only directions outside the pair keeps a tie exact."""
    rng = torch.Generator().manual_seed(0)
    rotation = torch.eye(6, dtype=torch.float64)
    rotation[2:, 2:] = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64, generator=rng))[0]
    p = rotation @ torch.diag(torch.tensor([1.0, 1.0 + gap, 2.0, 3.0, 4.0, 5.0], dtype=torch.float64)) @ rotation.mT
    return (p + p.mT) / 2


def reference(p, g):
    """The gradient X solves Q X + X Q = -S g S with Q = P^1/2 and S = P^-1/2: 36 equations in 36 unknowns."""
    n = len(p)
    identity = torch.eye(n, dtype=p.dtype)
    q, s = oc.square_roots(p)
    x = torch.linalg.solve(torch.kron(q, identity) + torch.kron(identity, q), -(s @ g @ s).flatten())
    return x.reshape(n, n)


def error(function, p, g):
    p = p.clone().requires_grad_()
    (found,) = torch.autograd.grad(function(p), p, g)
    expected = reference(p.detach(), g)
    return float((found - expected).norm() / expected.norm())


def show(errors):
    print("Relative error of the gradient of P^-1/2 when two eigenvalues are this far apart:\n")
    print(f"{'':24s}" + "".join(f"{'tie' if gap == 0 else f'{gap:.0e}':>10s}" for gap in SHOWN))
    for name, row in errors.items():
        cells = (row[GAPS.index(gap)] for gap in SHOWN)
        print(f"{name:24s}" + "".join(f"{'nan' if math.isnan(e) else f'{e:.0e}':>10s}" for e in cells))


def draw(errors, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    places = [gap or 1e-16 for gap in GAPS]
    for name, row in errors.items():
        ours = name.startswith("orthocond")
        axes.plot(
            places, row, label=name, marker="o", markersize=4, linewidth=2.5 if ours else 1.2, zorder=3 if ours else 2
        )
    axes.plot([1e-16], [1.0], "x", color="C1", markersize=11, markeredgewidth=3, zorder=4)
    axes.annotate(
        "NaN", (1e-16, 1.0), (-12, 0), textcoords="offset points", ha="right", va="center", color="C1", weight="bold"
    )
    axes.set(xscale="log", yscale="log", xlabel="gap between two eigenvalues", ylabel="relative error of the gradient")
    axes.invert_xaxis()
    axes.set_xticks([1e-1, 1e-4, 1e-8, 1e-12, 1e-16], ["0.1", "1e-4", "1e-8", "1e-12", "tie"])
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    axes.set_title("The gradient of $P^{-1/2}$ as two eigenvalues of $P$ meet")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    torch.set_num_threads(1)
    g = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    g = (g + g.mT) / 2
    errors = {name: [error(function, matrix(gap), g) for gap in GAPS] for name, function in METHODS.items()}
    assert max(errors["orthocond.inv_sqrtm"]) < 1e-13
    assert math.isnan(errors["autograd through eigh"][-1])
    show(errors)
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo/gradient_at_ties.png")
    draw(errors, target)
    print(f"\nThe figure is {target.resolve()}")
