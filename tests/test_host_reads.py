"""How often the host reads a value from the device: each read makes it wait for a GPU. No GPU is needed to count."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import orthocond as oc
from orthocond.layers import CovariancePool2d, DecorrelatedBatchNorm2d
from orthocond.steps import FixedLR, NearestOrthogonal, OptimalLR, Stiefel, treat
from tests.helpers import spd

NOG = NearestOrthogonal()


WAIT = {  # what .item(), float(x) and bool(x) become, and operations whose result has a shape that must be read
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.equal.default,
}


class Reads(TorchDispatchMode):
    """Counts the operations for which the host waits."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        by_mask = function is torch.ops.aten.index.Tensor and any(
            i is not None and i.dtype == torch.bool for i in args[1]
        )
        self.count += function in WAIT or by_mask
        return function(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """The code that runs where values cannot be read without waiting."""
    for module in ("matrix.eigh", "matrix.polar_factor", "layers.statistics", "layers.whitening"):
        monkeypatch.setattr(f"orthocond.{module}.can_read_freely", lambda x: False)


def reads_of(call):
    with Reads() as reads:
        call()
    return reads.count


def test_every_way_to_read_is_counted():
    x = torch.ones(())
    assert reads_of(lambda: (x.item(), float(x), bool(x), int(x), x + 1)) == 4
    assert reads_of(lambda: (x.nonzero(), x.reshape(1)[x.reshape(1) > 0], torch.equal(x, x))) == 3


def of_condition(m, n, cond):
    u, v = (torch.linalg.qr(torch.randn(side, min(m, n)))[0] for side in (m, n))
    return (u * torch.logspace(0, -torch.tensor(cond).log10().item(), min(m, n))) @ v.mT


MATRICES = {
    "well conditioned": (lambda: torch.randn(64, 300), 2),  # is it even, is it of full rank
    "condition number 1e3": (lambda: of_condition(64, 300, 1e3), 2),
    "square": (lambda: torch.randn(64, 64), 3),  # even, but not fit for float32
    "rank 3": (lambda: torch.randn(64, 3) @ torch.randn(3, 300), 3),  # and is it finite
    "rank 40": (lambda: torch.randn(64, 40) @ torch.linalg.qr(torch.randn(300, 40))[0].mT, 4),
    "float64": (lambda: torch.randn(64, 300, dtype=torch.float64), 1),
    "many at a time": (lambda: torch.randn(7, 64, 300), 2),
    "small": (lambda: torch.randn(64, 27), 1),
    "small, condition number 1e3": (lambda: of_condition(64, 27, 1e3), 2),
}


@pytest.mark.parametrize("case", MATRICES)
def test_polar(case):
    make, expected = MATRICES[case]
    g = make().requires_grad_()
    found = []
    assert reads_of(lambda: found.append(oc.polar(g))) == expected
    assert reads_of(found[0].sum().backward) == 0


@pytest.mark.parametrize("method", ["newton-schulz", "polar-express"])
def test_iterations_read_one_flag(method):
    assert reads_of(lambda: oc.polar(torch.randn(8, 5), method=method)) == 1


@pytest.mark.parametrize(("cond", "solver", "expected"), [(10, oc.Eigh(), 1), (1e5, oc.Eigh(), 2)])
def test_roots(cond, solver, expected):
    a = spd(16, cond, 3).float().requires_grad_()
    found = []
    assert reads_of(lambda: found.append(oc.inv_sqrtm(a, solver=solver))) == expected
    assert reads_of(found[0].sum().backward) == 0


LAYERS = {
    "whitening": (lambda: DecorrelatedBatchNorm2d(8), 1),
    "whitening that raises": (lambda: DecorrelatedBatchNorm2d(8, nonfinite="raise"), 2),
    "whitening, evaluation": (lambda: DecorrelatedBatchNorm2d(8).eval(), 1),
    "pooling": (lambda: CovariancePool2d(), 1),
}


@pytest.mark.parametrize("case", LAYERS)
@pytest.mark.parametrize("rank", [8, 3])
def test_layers(case, rank):
    make, expected = LAYERS[case]
    layer = make()
    x = torch.einsum("nchw,cd->ndhw", torch.randn(16, rank, 8, 8), torch.randn(rank, 8)).requires_grad_()
    found = []
    count = reads_of(lambda: found.append(layer(x)))
    # Where not all directions are there, one more tells whether the matrix is sound; evaluation knows it already.
    assert count == expected + (rank < 8 and layer.training)
    assert reads_of(found[0].sum().backward) == 0


STEPS = {
    "NOG": ({"gradient": NOG}, 2),
    "NOG of the update": ({"gradient": NearestOrthogonal(of="update")}, 4),
    "Stiefel": ({"manifold": Stiefel()}, 2),
    "OLR": ({"lr": OptimalLR()}, 0),
    "OLR, newton": ({"lr": OptimalLR("newton")}, 0),
    "OLR, paper": ({"lr": OptimalLR("paper")}, 0),
    "fixed rate": ({"lr": FixedLR(0.1)}, 0),
}


@pytest.mark.parametrize("case", STEPS)
def test_steps(case):
    """For each shape; weights of one shape are read as one, but for updates."""
    settings, expected = STEPS[case]
    weights = [nn.Parameter(torch.randn(40, 300)) for _ in range(2)]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    treat(weights, optimizer, spectrum_every=0, **settings)
    for w in weights:
        w.grad = torch.randn(40, 300)
    each = 2 if case == "NOG of the update" else 1
    assert reads_of(optimizer.step) == each * expected
