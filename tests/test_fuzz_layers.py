"""Random features, shapes, settings and memory formats for the layers, against plain float64 NumPy.

Bounded in time; prints what it tried (`pytest -m slow tests/test_fuzz_layers.py -s`).
"""

import collections
import random
import time

import numpy as np
import pytest
import torch

import orthocond as oc
from orthocond.layers import statistics

SECONDS = 60
pytestmark = pytest.mark.slow

LAYERS = {2: oc.DecorrelatedBatchNorm1d, 3: oc.DecorrelatedBatchNorm1d, 4: oc.DecorrelatedBatchNorm2d}
LAYERS[5] = oc.DecorrelatedBatchNorm3d
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
# Relative error that rounding to the dtype allows, where directions of tiny variance are kept away by the ridge.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


# The oracles: definitions, written out


def root(p, eps, power):
    """(P + eps I)^power; without ridge, eigenvalues that are rounding of float32 features are left out."""
    values, vectors = np.linalg.eigh((p + p.T) / 2)
    kept = values > (1e-12 * values[-1] if eps == 0 else -np.inf)
    scaled = np.where(kept, np.where(kept, np.maximum(values, 0) + eps, 1.0) ** power, 0.0)
    return (vectors * scaled) @ vectors.T


def moments(x):
    """Mean and biased covariance of rows of samples ``(C, n)``."""
    mean = x.mean(1, keepdims=True)
    return mean, (x - mean) @ (x - mean).T / x.shape[1]


def whitened(x, groups, eps):
    rows = np.moveaxis(x, 1, 0).reshape(x.shape[1], -1)
    parts = []
    for part in np.split(rows, groups):
        mean, covariance = moments(part)
        parts.append(root(covariance, eps, -0.5) @ (part - mean))
    moved = np.concatenate(parts).reshape(x.shape[1], x.shape[0], *x.shape[2:])
    return np.moveaxis(moved, 0, 1)


def pooled(x, eps):
    return np.stack([root(moments(image.reshape(len(image), -1))[1], eps, 0.5) for image in x])


def colored(content, style, eps, alpha):
    results = []
    for index, image in enumerate(content):
        x, s = (i.reshape(len(i), -1) for i in (image, style[min(index, len(style) - 1)]))
        (mean, cov), (style_mean, style_cov) = moments(x), moments(s)
        y = root(style_cov, eps, 0.5) @ root(cov, eps, -0.5) @ (x - mean) + style_mean
        results.append((alpha * y + (1 - alpha) * x).reshape(image.shape))
    return np.stack(results)


# Draws


class Draw:
    """One random case; equal seeds draw the same."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def __getattr__(self, name):
        return getattr(self.random, name)

    def features(self, shape, dtype):
        """Correlated channels with a mean, at some scale, in some memory format."""
        channels = shape[1]
        mix = torch.randn(channels, channels, generator=self.generator, dtype=torch.float64)
        mix = mix + self.choice([0, 3]) * torch.eye(channels)
        x = torch.einsum("oi,ni...->no...", mix, torch.randn(shape, generator=self.generator, dtype=torch.float64))
        x = x + self.choice([0, 5]) * torch.randn(channels, generator=self.generator).view(
            1, -1, *[1] * (len(shape) - 2)
        )
        half = dtype in (torch.float16, torch.bfloat16)
        x = (x * self.choice([1.0] if half else [1e-3, 1.0, 1e3])).to(dtype)
        layout = self.choice(["contiguous", "channels last", "sliced"])
        if layout == "channels last" and x.ndim in FORMATS:
            x = x.to(memory_format=FORMATS[x.ndim])
        elif layout == "sliced":
            x = torch.stack([x, x], -1)[..., 0]
        return x, layout

    def shape(self, dims):
        channels = self.choice([1, 2, 3, 4, 6, 8, 12])
        positions = [self.randint(1, 6) for _ in range(dims - 2)]
        return (self.randint(2, 40), channels, *positions)


def scale_of(x):
    return float(x.detach().double().square().mean().sqrt())


def close(found, expected, tolerance):
    """By the largest error, relative to the largest entry."""
    found = found.detach().double().numpy()
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= tolerance * max(np.abs(expected).max(), 1e-30)


def whitening_case(draw):
    dims = draw.choice([2, 3, 4, 5])
    dtype = draw.choice([torch.float64, torch.float32, torch.float32, torch.float16, torch.bfloat16])
    x, layout = draw.features(draw.shape(dims), dtype)
    channels = x.shape[1]
    groups = draw.choice([g for g in range(1, channels + 1) if channels % g == 0])
    eps = draw.choice([1e-1, 1e-2, 1e-3]) * scale_of(x) ** 2
    mode = draw.choice(["train", "eval", "functional", "untracked"])
    x.requires_grad_(draw.random.random() < 0.5)
    expected = whitened(x.detach().double().numpy(), groups, eps)
    if mode == "functional":
        y = oc.whiten(x, groups=groups, eps=eps)
    else:
        layer = LAYERS[dims](channels, eps=eps, momentum=1.0, groups=groups, track_running_stats=mode != "untracked")
        layer.to(dtype)
        weight, bias = (torch.randn(channels, generator=draw.generator) for _ in range(2))
        with torch.no_grad():
            layer.weight.copy_(weight)
            layer.bias.copy_(bias)
        weight, bias = (p.detach().double().numpy().reshape(1, -1, *[1] * (dims - 2)) for p in layer.parameters())
        samples = x.numel() // channels
        if mode == "eval":  # the unbiased covariance of one batch, and the ridge of its rounding
            layer(x)
            layer.eval()
            unbiased = whitened(x.detach().double().numpy(), groups, eps * (samples - 1) / samples)
            expected = unbiased * np.sqrt((samples - 1) / samples)
        expected = expected * weight + bias
        y = layer(x)
    assert y.dtype == dtype
    close(y, expected, TOLERANCE[dtype])
    if x.requires_grad:
        y.float().square().sum().backward()
        assert x.grad.isfinite().all()
    return f"whitening {mode}", dtype, layout


def pooling_case(draw):
    dtype = draw.choice([torch.float64, torch.float32, torch.bfloat16])
    x, layout = draw.features(
        (draw.randint(1, 5), draw.choice([1, 2, 5, 9, 16]), draw.randint(1, 6), draw.randint(2, 6)), dtype
    )
    eps = draw.choice([0.0, 1e-2 * scale_of(x) ** 2])
    output = draw.choice(["triu", "matrix"])
    expected = pooled(x.double().numpy(), eps)
    if output == "triu":
        rows, columns = np.triu_indices(x.shape[1])
        expected = expected[:, rows, columns]
    layer = oc.CovariancePool2d(output=output, eps=eps).train(draw.choice([True, False]))
    x.requires_grad_()
    y = layer(x)
    assert y.dtype == dtype
    close(y, expected, TOLERANCE[dtype])
    y.float().sum().backward()
    assert x.grad.isfinite().all()
    return f"pooling {'with' if eps else 'without'} ridge", dtype, layout


def coloring_case(draw):
    dtype = draw.choice([torch.float64, torch.float32])
    channels, count = draw.choice([1, 2, 4, 8]), draw.randint(1, 4)
    content, layout = draw.features((count, channels, draw.randint(2, 6), draw.randint(2, 6)), dtype)
    style, _ = draw.features((draw.choice([1, count]), channels, draw.randint(2, 6), draw.randint(2, 6)), dtype)
    # Below the style's own size the root of a zero eigenvalue amplifies its rounding, in the oracle as in the layer.
    eps = 1e-2 * max(scale_of(content), scale_of(style)) ** 2
    alpha = draw.choice([1.0, 0.5, 0.0])
    y = oc.WhitenColor2d(alpha=alpha, eps=eps)(content, style)
    close(y, colored(content.double().numpy(), style.double().numpy(), eps, alpha), TOLERANCE[dtype])
    return "coloring", dtype, layout


def gradient_case(draw):
    """The gradient along a random direction, against a central difference of the oracle."""
    dims = draw.choice([2, 4])
    x, layout = draw.features(draw.shape(dims), torch.float64)
    groups = draw.choice([g for g in range(1, x.shape[1] + 1) if x.shape[1] % g == 0])
    eps = 1e-1 * scale_of(x) ** 2
    pool = dims == 4 and x[0, 0].numel() > 1 and draw.random.random() < 0.5
    oracle = (lambda a: pooled(a, eps)) if pool else (lambda a: whitened(a, groups, eps))
    x.requires_grad_()
    y = oc.covariance_pool(x, output="matrix", eps=eps) if pool else oc.whiten(x, groups=groups, eps=eps)
    weights = torch.randn(y.shape, generator=draw.generator, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((y * weights).sum(), x)
    direction = torch.randn(x.shape, generator=draw.generator, dtype=torch.float64)
    step = 1e-5 * scale_of(x)
    at = [oracle((x.detach() + sign * step * direction).numpy()) for sign in (1, -1)]
    numeric = ((at[0] - at[1]) * weights.numpy()).sum() / (2 * step)
    analytic = float((gradient * direction).sum())
    bound = 1e-5 * float(gradient.norm() * direction.norm())
    assert abs(analytic - numeric) <= bound + 1e-12 * abs(at[0]).sum() / step
    return f"gradient of {'pooling' if pool else 'whitening'}", torch.float64, layout


CASES = (whitening_case, whitening_case, whitening_case, pooling_case, coloring_case, gradient_case)


@pytest.mark.filterwarnings("ignore:.*samples")  # few samples are among the cases
@pytest.mark.timeout(10 * SECONDS)
def test_layers_equal_numpy(capsys, monkeypatch):
    tried = collections.Counter()
    end = time.monotonic() + SECONDS
    seed = 0
    while time.monotonic() < end:
        case = CASES[seed % len(CASES)]
        monkeypatch.setattr(statistics, "_CHUNK", (2**16, 64)[seed % 5 == 0])  # small features in several parts too
        try:
            name, dtype, layout = case(Draw(seed))
        except Exception as error:
            raise AssertionError(f"{case.__name__}(Draw({seed})) failed") from error
        tried[name] += 1
        tried[str(dtype)] += 1
        tried[layout] += 1
        seed += 1
    with capsys.disabled():
        print(f"\n{seed} cases: " + ", ".join(f"{count} {name}" for name, count in sorted(tried.items())))
    assert seed > 200
