"""Features for the tests of the layers, and oracles in float64."""

import torch
from scipy.linalg import fractional_matrix_power

from orthocond.layers import DecorrelatedBatchNorm1d, DecorrelatedBatchNorm2d, DecorrelatedBatchNorm3d

F64 = torch.float64
LAYERS = {
    2: DecorrelatedBatchNorm1d,
    3: DecorrelatedBatchNorm1d,
    4: DecorrelatedBatchNorm2d,
    5: DecorrelatedBatchNorm3d,
}


def features(*shape, dtype=torch.float32, mean=2.0, spread=10.0):
    """Correlated channels with condition number of about spread² and a mean."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator, dtype=F64)
    mix = torch.linalg.qr(torch.randn(shape[1], shape[1], generator=generator, dtype=F64))[0]
    mix = mix * torch.linspace(0, -1, shape[1], dtype=F64).mul(torch.tensor(spread).log()).exp()
    offset = mean * torch.randn(shape[1], generator=generator, dtype=F64)
    return (torch.einsum("oi,ni...->no...", mix, x) + offset.reshape(-1, *[1] * (len(shape) - 2))).to(dtype)


def channels(x):
    """(C, samples) in float64."""
    return x.detach().movedim(1, 0).flatten(1).double()


def covariance(x):
    return torch.cov(channels(x), correction=0)


def root_of(p, power):
    """The oracle: a matrix power by SciPy's general algorithm."""
    return torch.from_numpy(fractional_matrix_power(p.numpy(), power).real)


def whitened(x, eps=1e-5):
    """Reference in float64, written as the definition."""
    flat = channels(x)
    centered = flat - flat.mean(1, keepdim=True)
    p = centered @ centered.T / flat.shape[1]
    y = root_of(p + eps * torch.eye(len(p), dtype=F64), -0.5) @ centered
    return y.reshape(x.shape[1], x.shape[0], *x.shape[2:]).movedim(1, 0)


def set_affine(layer):
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(0.5, 2, layer.num_features))
        layer.bias.copy_(torch.linspace(-1, 1, layer.num_features))
    return layer
