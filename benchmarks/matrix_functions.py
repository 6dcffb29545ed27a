"""Speed of inv_sqrtm and polar beside honest baselines: `python benchmarks/matrix_functions.py --output FILE`.

The roots: forward and backward at one working precision, against autograd through torch.linalg.eigh, the SVD layer of
the paper's appendix A and five Newton-Schulz steps. The polar factor: against a thin SVD and torch.optim.Muon's
iteration, whose error is printed too.
"""

import torch
from common import arguments, compare, peak_memory, save
from torch.optim._muon import _zeropower_via_newtonschulz

import orthocond as oc

ROOT_SHAPES = [(1, 64, 64), (32, 64, 64), (32, 256, 256)]
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
                "Eigh(input)": lambda a: oc.inv_sqrtm(a, solver=oc.Eigh(precision="input")),
                "eigh + autograd": eigh_autograd,
                "SVD, appendix A": lambda a: oc.inv_sqrtm(a, solver=oc.SVD(precision="input")),
                "NewtonSchulz(5)": lambda a: oc.inv_sqrtm(a, solver=oc.NewtonSchulz(steps=5)),
            }
            if dtype == torch.float32:
                functions["Eigh(auto)"] = oc.inv_sqrtm
                functions["Eigh(float64)"] = lambda a: oc.inv_sqrtm(a, solver=oc.Eigh(precision="float64"))
            contenders = {
                name: (lambda f=f, a=a, g=g: torch.autograd.grad(f(a), a, g)) for name, f in functions.items()
            }
            times = compare(contenders, seconds)
            base = times["Eigh(input)"]["median_ms"]
            print(f"\ninv_sqrtm {tuple(shape)} {dtype}, forward and backward")
            for name, row in times.items():
                row["time_of_Eigh_input"] = base / row["median_ms"]
                row["peak_bytes"] = peak_memory(contenders[name])
                print(
                    f"  {name:18s} {row['median_ms']:9.3f} ms [{row['low_ms']:.3f}, {row['high_ms']:.3f}]"
                    f"   Eigh(input) is {row['median_ms'] / base:5.2f}x as fast   peak {row['peak_bytes'] / 1e6:.2f} MB"
                )
            results.append({"function": "inv_sqrtm", "shape": shape, "dtype": str(dtype), "contenders": times})
    return results


def conditioned(m, n, cond):
    k = min(m, n)
    u, _ = torch.linalg.qr(torch.randn(m, k))
    v, _ = torch.linalg.qr(torch.randn(n, k))
    return (u * torch.logspace(0, -float(torch.tensor(cond).log10()), k)) @ v.mT


def thin_svd(g):
    u, _, v = torch.linalg.svd(g, full_matrices=False)
    return u @ v


def polar_factors(seconds):
    results = []
    functions = {
        "polar(gram)": oc.polar,
        "thin SVD": thin_svd,
        "Muon's iteration": lambda g: _zeropower_via_newtonschulz(g, (3.4445, -4.775, 2.0315), 5, 1e-7),
        "polar(polar-express)": lambda g: oc.polar(g, method="polar-express"),
    }
    for m, n in POLAR_SHAPES:
        g = conditioned(m, n, 1e3)
        expected = thin_svd(g.double())
        times = compare({name: (lambda f=f, g=g: f(g)) for name, f in functions.items()}, seconds)
        base = times["polar(gram)"]["median_ms"]
        print(f"\npolar {m}x{n} float32, condition number 1e3")
        for name, row in times.items():
            row["relative_error"] = float((functions[name](g).double() - expected).norm() / expected.norm())
            row["time_of_gram"] = base / row["median_ms"]
            print(
                f"  {name:20s} {row['median_ms']:9.3f} ms [{row['low_ms']:.3f}, {row['high_ms']:.3f}]"
                f"   gram is {row['median_ms'] / base:6.2f}x as fast   error {row['relative_error']:.1e}"
            )
        results.append({"function": "polar", "shape": (m, n), "contenders": times})
    return results


if __name__ == "__main__":
    options = arguments(__doc__)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    save(options.output, [*roots(options.seconds), *polar_factors(options.seconds)])
