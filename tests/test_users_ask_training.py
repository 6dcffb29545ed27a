"""What users of neighboring projects ask for, about training, deployment and metrics: each test says who asked what.

Matrix functions are in test_users_ask.py. Muon under FSDP needs the whole matrix (MoonshotAI/Moonlight#27,
NVIDIA/Megatron-LM#5533, #5961, pytorch/torchtitan#4034): `treat` gathers it, see test_two_processes_equal_one of
test_steps_distributed.py, and of test_monitor_life.py for the monitor, both with fully_shard.
"""

import math
import time
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import orthocond as oc
from orthocond.metrics import FrechetDistance, frechet_distance, mutual_information, mutual_information_gap

# "linalg.eigh: The algorithm failed to converge" in the middle of a training
# Michaelvll/DeepCCA#16, ClownsharkBatwing/RES4LYF#119


def train(model, batches, steps=10, lr=0.1):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in range(steps):
        x, y = batches(step)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
    return float(loss.detach())


def test_a_decomposition_that_does_not_converge_is_retried_counted_and_recorded(monkeypatch):
    """The training goes on where it used to end; the count says that it happened, in the monitor's records too."""
    real = torch.linalg.eigh
    calls = []

    def fragile(a, *args, **kwargs):
        calls.append(a.dtype)
        if len(calls) % 4 in (1, 2):  # the batch, and the matrix by itself
            raise torch.linalg.LinAlgError("linalg.eigh: The algorithm failed to converge")
        return real(a, *args, **kwargs)

    model = nn.Sequential(nn.Conv2d(3, 6, 3), oc.DecorrelatedBatchNorm2d(6), nn.Flatten(), nn.Linear(96, 3))
    monkeypatch.setattr(torch.linalg, "eigh", fragile)
    with oc.ConditionMonitor(model) as monitor:
        train(model, lambda step: (torch.randn(16, 3, 6, 6), torch.arange(16) % 3), steps=4)
    monkeypatch.undo()
    assert oc.solver_failures.count == oc.solver_failures.recovered > 0
    assert monitor.history[-1]["solver_failures"] == oc.solver_failures.count


def correlation_loss(x, y, eps=1e-4):
    """Deep CCA: minus the sum of the canonical correlations, the nuclear norm of Σx^-1/2 Σxy Σy^-1/2."""
    x, y = x - x.mean(0), y - y.mean(0)
    n = len(x) - 1
    whitened = oc.inv_sqrtm(x.T @ x / n, eps=eps) @ (x.T @ y / n) @ oc.inv_sqrtm(y.T @ y / n, eps=eps)
    return -(whitened * oc.polar(whitened.detach())).sum()


def test_deep_cca_trains_through_collapsed_features():
    """DeepCCA#16: "ill-conditioned or has too many repeated eigenvalues". One view has a covariance of rank one."""
    views = nn.Linear(8, 5), nn.Linear(6, 5)
    with torch.no_grad():
        views[0].weight.copy_(views[0].weight[:1].expand(5, 8))
    optimizer = torch.optim.SGD([p for v in views for p in v.parameters()], lr=0.01)
    shared = torch.randn(200, 3)
    data = (shared @ torch.randn(3, 8) + 0.1 * torch.randn(200, 8), shared @ torch.randn(3, 6))
    losses = []
    for _ in range(30):
        loss = correlation_loss(views[0](data[0]), views[1](data[1]))
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad.isfinite().all() for v in views for p in v.parameters())
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


def test_diagnose_names_the_decomposition_that_did_not_converge():
    """What people post is a traceback from the depths; what they need is the layer, and what was wrong before it."""

    class ByHand(nn.Module):
        def forward(self, x):
            return torch.linalg.eigh(torch.cov(x.T))[0]

    model = nn.Sequential(nn.Linear(4, 4), ByHand())
    with torch.no_grad():
        model[0].weight.mul_(1e25)
    found = oc.diagnose(model, torch.randn(10, 4))
    assert found.failures[0].layer == "1"
    assert found.failures[0].operation == "torch.cov"
    assert found.failures[0].what == "infinity"


# "Whitening gives NaN": bhneo/decorrelated_bn#1; "the loss of fast-MPN-COV becomes NaN": jiangtaoxie/fast-MPN-COV#4


@pytest.mark.parametrize("case", ["dead channel", "twins", "few samples", "constant batch", "tiny", "huge"])
def test_whitening_does_not_give_nan(case):
    """Dead channels, equal channels, fewer samples than channels: the covariances where ZCA by hand breaks."""
    layer = oc.DecorrelatedBatchNorm2d(8)
    x = torch.randn(16, 8, 5, 5)
    if case == "dead channel":
        x[:, 3] = 0
    elif case == "twins":
        x[:, 4:] = x[:, :4]
    elif case == "few samples":
        x = x[:2, :, :1, :2]
    elif case == "constant batch":
        x = torch.ones_like(x)
    else:
        x = x * {"tiny": 1e-12, "huge": 1e12}[case]
    x.requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are few samples is said once
        y = layer(x)
    y.square().sum().backward()
    assert y.isfinite().all()
    assert x.grad.isfinite().all()
    assert layer.eval()(x).isfinite().all()


@pytest.mark.parametrize("solver", [oc.Eigh(), oc.NewtonSchulz(), oc.SVD(gradient="taylor")], ids=str)
def test_pooling_does_not_give_nan(solver):
    """One image without a pattern in the batch, one with two colors only, one of rank one."""
    x = torch.randn(6, 10, 6, 6)
    x[0] = 0.5
    x[1] = torch.randn(10, 1, 1) * torch.randn(1, 6, 6)
    x[2, 2:] = x[2, :1]
    x.requires_grad_()
    y = oc.CovariancePool2d(solver=solver)(x)
    y.sum().backward()
    assert y.isfinite().all()
    assert x.grad.isfinite().all()


def test_a_network_with_pooling_trains_after_a_relu_that_kills_channels():
    """fast-MPN-COV#4: the loss is NaN after some steps. Rank-deficient features after a ReLU are the normal case."""
    model = nn.Sequential(nn.Conv2d(3, 12, 3), nn.ReLU(), oc.CovariancePool2d(), nn.Linear(78, 3))
    with torch.no_grad():
        model[0].bias[:6] = -100.0
    labels = torch.arange(24) % 3
    base = torch.randn(24, 3, 8, 8) * (1 + labels)[:, None, None, None]
    assert train(model, lambda step: (base, labels), steps=30) < math.log(3)


# "Exporting the operator svd/eigh to ONNX is not supported": pytorch/pytorch#81084, onnx/onnx#5570


def exported_operators(model, x, path):
    onnx = pytest.importorskip("onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of its own internals
        torch.onnx.export(model, (x,), path, dynamo=True, verbose=False)
    return {node.op_type for node in onnx.load(path).graph.node}


def run_onnx(path, x):
    session = pytest.importorskip("onnxruntime").InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


def test_whitening_exports_as_convolutions(tmp_path):
    """Folded, a whitening layer is the convolution before it, so there is nothing to decompose."""
    model = nn.Sequential(nn.Conv2d(3, 6, 3), oc.DecorrelatedBatchNorm2d(6), nn.ReLU())
    model(torch.randn(16, 3, 8, 8))
    x = torch.randn(2, 3, 8, 8)
    operators = exported_operators(oc.fold(model), x, tmp_path / "m.onnx")
    assert operators == {"Conv", "Relu"}
    torch.testing.assert_close(run_onnx(tmp_path / "m.onnx", x), model.eval()(x).detach(), rtol=1e-4, atol=1e-4)


def test_pooling_exports_with_matrix_products(tmp_path):
    """A network trained with the exact root runs in ONNX with an iteration of matrix products."""
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), oc.CovariancePool2d()).eval()
    x = torch.randn(2, 3, 12, 12)
    exact = model(x).detach()
    model[2].solver = oc.NewtonSchulz(steps=15)
    operators = exported_operators(model, x, tmp_path / "m.onnx")
    assert "MatMul" in operators
    torch.testing.assert_close(run_onnx(tmp_path / "m.onnx", x), exact, rtol=1e-3, atol=1e-4)


# FID is slow, imaginary, undefined for few images, bound to one extractor:
# Lightning-AI/torchmetrics#1705, #2266, mseitzer/pytorch-fid#96, #117, bioinf-jku/TTUR#4


def test_it_is_not_slow():
    """torchmetrics#1705, pytorch-fid#96: the root of a general matrix by SciPy is slow. Here all is symmetric."""
    features = torch.randn(2, 1000, 512, dtype=torch.float64)
    means, covariances = features.mean(1), torch.stack([torch.cov(f.T) for f in features])
    start = time.process_time()
    frechet_distance(means[0], covariances[0], means[1], covariances[1])
    assert time.process_time() - start < 5


def test_it_is_real_where_scipy_is_complex():
    """TTUR#4: "Imaginary component". With fewer images than features the product has roots of rounding noise."""
    generator = torch.Generator().manual_seed(0)
    factors = torch.randn(2, 40, 6, dtype=torch.float64, generator=generator)
    a, b = (f @ f.T for f in factors)
    distance = frechet_distance(torch.zeros(40).double(), a, torch.zeros(40).double(), b)
    # Oracle: the fidelity is the nuclear norm of the product of the factors.
    small = factors[0].numpy().T @ factors[1].numpy()
    expected = np.trace(a.numpy()) + np.trace(b.numpy()) - 2 * np.linalg.svd(small, compute_uv=False).sum()
    assert distance == pytest.approx(expected, rel=1e-9)


def test_fewer_images_than_features_is_computed_and_said():
    """Fewer images than features: an answer, and a warning with the numbers."""
    metric = FrechetDistance(nn.Flatten().eval(), name="pixels")
    metric.update(torch.randn(20, 1, 6, 6), real=True)
    metric.update(torch.randn(20, 1, 6, 6), real=False)
    with pytest.warns(UserWarning, match="36"):
        assert math.isfinite(metric.compute())


def test_any_extractor():
    """Features of one's own network, for images of any kind: any callable."""
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    for extractor in (network, lambda x: x.mean((2, 3)).repeat(1, 2) ** torch.tensor([1, 2])):
        metric = FrechetDistance(extractor, name="own")
        same, other = torch.randn(50, 1, 8, 8), torch.randn(50, 1, 8, 8) * 3 + 1
        metric.update(same, real=True)
        metric.update(same, real=False)
        assert metric.compute() == pytest.approx(0, abs=1e-6)
        metric.update(other, real=False)
        assert metric.compute() > 0.1


# MIG near 0 despite clean traversals: YannDubs/disentangling-vae#52


def test_mutual_information_gap_near_zero_has_reasons():
    """The gap is 0 when two codes share a factor, clean as each traversal may be, and when bins are too coarse.

    The mutual information of each code with each factor tells these cases apart.
    """
    factors = torch.randint(5, (4000, 2))
    noise = 0.01 * torch.randn(4000, 2)
    clean = factors + noise
    assert mutual_information_gap(clean, factors) > 0.9
    shared = torch.cat([clean, clean + 0.01 * torch.randn(4000, 2)], 1)
    assert mutual_information_gap(shared, factors) < 0.05
    information = mutual_information(shared, factors)
    assert information.shape == (4, 2)
    assert (information.amax(0) > 1.4).all()  # nats: each factor is known, ln 5 = 1.61, only twice
    outlier = clean.clone()
    outlier[0] = 1e4  # one outlier puts all others into one bin of equal width
    assert mutual_information_gap(outlier, factors) < 0.05
    assert mutual_information_gap(outlier, factors, binning="quantile") > 0.8
