"""Speed of inv_sqrtm and polar beside honest baselines: `python benchmarks/matrix_functions.py --output FILE`.

The roots: forward and backward at one working precision, against autograd through torch.linalg.eigh, the SVD layer of
the paper's appendix A and five Newton-Schulz steps. The polar factor: against a thin SVD and torch.optim.Muon's
iteration, whose error is printed too.
"""

import torch
from common import arguments, report, save
from torch.optim._muon import _zeropower_via_newtonschulz

import orthocond as oc

ROOT_SHAPES = [(64, 64), (1, 64, 64), (32, 64, 64), (32, 256, 256)]
BASE = 'Eigh(precision="input")'
POLAR_SHAPES = [(64, 27), (64, 576), (512, 4608), (30, 16384), (6, 131072)]


def eigh_autograd(a):
    values, u = torch.linalg.eigh(a)
    return (u * values.rsqrt().unsqueeze(-2)) @ u.mT


def roots(seconds):
    results = []
    for shape in ROOT_SHAPES:
        n = shape[-1]
        for dtype in (torch.float32, torch.float64):
            x = torch.randn(*shape[:-1], 2 * n)
            a = (x @ x.mT / (2 * n)).to(dtype).requires_grad_()
            g = torch.randn(shape, dtype=dtype)
            functions = {
                BASE: lambda a: oc.inv_sqrtm(a, solver=oc.Eigh(precision="input")),
                "autograd through eigh": eigh_autograd,
                "SVD of appendix A": lambda a: oc.inv_sqrtm(a, solver=oc.SVD(precision="input")),
                "NewtonSchulz(steps=5)": lambda a: oc.inv_sqrtm(a, solver=oc.NewtonSchulz(steps=5)),
            }
            if dtype == torch.float32:
                functions["Eigh()"] = oc.inv_sqrtm
                functions['Eigh(precision="float64")'] = lambda a: oc.inv_sqrtm(a, solver=oc.Eigh(precision="float64"))
            contenders = {
                name: (lambda f=f, a=a, g=g: torch.autograd.grad(f(a), a, g)) for name, f in functions.items()
            }
            contenders["torch.linalg.eigh alone"] = lambda a=a: torch.linalg.eigh(a.detach())
            contenders["torch.linalg.svd alone"] = lambda a=a: torch.linalg.svd(a.detach())
            title = f"inv_sqrtm of {shape} {str(dtype).removeprefix('torch.')}, forward and backward"
            results.append(report(title, contenders, seconds, "autograd through eigh"))
    return results


def conditioned(m, n, cond):
    k = min(m, n)
    u, _ = torch.linalg.qr(torch.randn(m, k))
    v, _ = torch.linalg.qr(torch.randn(n, k))
    return (u * torch.logspace(0, -float(torch.tensor(cond).log10()), k)) @ v.mT


def thin_svd(g):
    u, _, v = torch.linalg.svd(g, full_matrices=False)
    return u @ v


def bare(g, dtype):
    """What cannot be left out: two products and one eigendecomposition."""
    work = g.to(dtype)
    wide = len(g) <= len(g.mT)
    values, u = torch.linalg.eigh(work @ work.mT if wide else work.mT @ work)
    root = (u * values.rsqrt()) @ u.mT
    return (root @ work if wide else work @ root).float()


def muon(g):
    return _zeropower_via_newtonschulz(g, (3.4445, -4.775, 2.0315), 5, 1e-7)


def polar_factors(seconds):
    results = []
    functions = {
        'polar(method="gram")': oc.polar,
        "its products and eigh alone, float32": lambda g: bare(g, torch.float32),
        "its products and eigh alone, float64": lambda g: bare(g, torch.float64),
        "thin SVD": thin_svd,
        "thin SVD in float64": lambda g: thin_svd(g.double()).float(),
        "iteration of torch.optim.Muon": muon,
        'polar(method="polar-express")': lambda g: oc.polar(g, method="polar-express"),
    }
    for m, n in POLAR_SHAPES:
        for title, g in {
            "independent normal entries": torch.randn(m, n),
            "condition number 1e3": conditioned(m, n, 1e3),
        }.items():
            expected = thin_svd(g.double())
            contenders = {name: (lambda f=f, g=g: f(g)) for name, f in functions.items()}
            result = report(f"polar of {m} x {n} float32, {title}", contenders, seconds, "thin SVD")
            for name, row in result["contenders"].items():
                row["relative_error"] = float((functions[name](g).double() - expected).norm() / expected.norm())
                print(f"  {name:36s} relative error {row['relative_error']:.1e}")
            results.append(result)
    return results


if __name__ == "__main__":
    options = arguments(__doc__)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    save(options.output, [*roots(options.seconds), *polar_factors(options.seconds)])
