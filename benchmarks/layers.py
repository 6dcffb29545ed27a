"""Speed and memory of the layers beside honest baselines: `python benchmarks/layers.py --output FILE`.

Limit: one training step of the whitening layer, in processor time, against plain batch normalization and against the
five products of features and a C x C matrix that no whitening can do without. Whitening: one training step (forward
and backward) and one inference of the stem's layer in the paper's setting, against plain batch normalization and
against whitening written with a centered copy and torch.linalg.eigh. Pooling: forward and backward, against the
decomposition of the d x d covariance.
"""

import torch
from common import arguments, peak_memory, report, save
from paired import quartiles, ratios, take_turns
from torch import nn

import orthocond as oc
from orthocond.layers import DecorrelatedBatchNorm2d, covariance_pool
from orthocond.layers.base import flatten
from orthocond.layers.statistics import _float32_moments, _float64_moments

CHANNELS_LAST = torch.channels_last


def composed(x):
    flat = x.movedim(1, 0).flatten(1)
    centered = flat - flat.mean(1, keepdim=True)
    values, vectors = torch.linalg.eigh(centered @ centered.mT / flat.shape[1])
    y = (vectors * (values + 1e-5).rsqrt()) @ vectors.mT @ centered
    return y.reshape(x.shape[1], x.shape[0], *x.shape[2:]).movedim(1, 0)


def full_covariance(x):
    z = x.flatten(2).double()
    z = z - z.mean(-1, keepdim=True)
    return oc.sqrtm(z @ z.mT / z.shape[-1], solver=oc.Eigh(rank_tol=1e-13)).to(x.dtype)


def step(layer, x, gradient):
    x.grad = None
    layer(x).backward(gradient)


def inference(layer, x):
    with torch.inference_mode():
        layer(x)


def whitening(seconds):
    results = []
    mix = torch.randn(32, 32)
    for form in (torch.contiguous_format, torch.channels_last):
        x = (torch.randn(128, 64, 32, 32) @ mix + 3).contiguous(memory_format=form).requires_grad_()
        gradient = torch.randn(128, 64, 32, 32).contiguous(memory_format=form)
        layers = {
            "BatchNorm2d": nn.BatchNorm2d(64),
            "DecorrelatedBatchNorm2d": DecorrelatedBatchNorm2d(64),
            "DecorrelatedBatchNorm2d(groups=4)": DecorrelatedBatchNorm2d(64, groups=4),
            "composed, torch.linalg.eigh": composed,
            "BatchNorm2d, ReLU in place": nn.Sequential(nn.BatchNorm2d(64), nn.ReLU(inplace=True)),
            "DecorrelatedBatchNorm2d, ReLU in place": nn.Sequential(DecorrelatedBatchNorm2d(64), nn.ReLU(inplace=True)),
        }
        training = {name: (lambda f=f, x=x, g=gradient: step(f, x, g)) for name, f in layers.items()}
        title = f"whitening (128, 64, 32, 32) float32, {str(form).partition('.')[2]}"
        results.append(report(f"{title}, forward and backward", training, seconds, "BatchNorm2d"))
        fixed = {name: layer.eval() for name, layer in layers.items() if isinstance(layer, nn.Module)}
        contenders = {name: (lambda f=f, x=x: inference(f, x)) for name, f in fixed.items()}
        results.append(report(f"{title}, inference", contenders, seconds, "BatchNorm2d"))
    return results


def five_products(x, matrix):
    """Covariance, whitened features, and the gradients of the matrix, of the features and of the covariance."""
    flat = x.permute(0, 2, 3, 1).reshape(1, -1, x.shape[1]) if x.is_contiguous(memory_format=CHANNELS_LAST) else None
    if flat is not None:
        gram, apply = (lambda: flat.mT @ flat), (lambda: flat @ matrix)
    else:
        images, matrices = x.flatten(2), matrix.expand(len(x), -1, -1)
        gram, apply = (lambda: torch.bmm(images, images.mT).sum(0)), (lambda: torch.bmm(matrices, images))
    for product in (gram, apply, gram, apply, apply):
        product()


def limits(seconds):
    results = []
    for channels, side in ((24, 32), (64, 32), (64, 8)):
        for form in (torch.contiguous_format, CHANNELS_LAST):
            shape = 250, channels, side, side
            x, gradient = (torch.randn(shape).contiguous(memory_format=form) for _ in range(2))
            trained = x.clone(memory_format=torch.preserve_format).requires_grad_()
            matrix = torch.randn(channels, channels)
            # With a tiny direction, float32 products are not enough, and the layer takes those in float64.
            ill = x.clone(memory_format=torch.preserve_format)
            ill[:, 0] = ill[:, 1] + 1e-4 * ill[:, 0]
            ill.requires_grad_()
            plain, layer = nn.BatchNorm2d(channels), DecorrelatedBatchNorm2d(channels)
            compiled = torch.compile(DecorrelatedBatchNorm2d(channels))
            contenders = {
                "BatchNorm2d": lambda f=plain, x=trained, g=gradient: step(f, x, g),
                "five products": lambda x=x, m=matrix: five_products(x, m),
                "DecorrelatedBatchNorm2d": lambda f=layer, x=trained, g=gradient: step(f, x, g),
                "DecorrelatedBatchNorm2d, ill-conditioned": lambda f=layer, x=ill, g=gradient: step(f, x, g),
                "DecorrelatedBatchNorm2d, compiled": lambda f=compiled, x=trained, g=gradient: step(f, x, g),
            }
            times = take_turns(contenders, 5, seconds)
            print(f"\nlimit {shape} float32, {str(form).partition('.')[2]}")
            rows = {}
            for name, run in contenders.items():
                bases = ("BatchNorm2d", "five products", "DecorrelatedBatchNorm2d")
                over = {base: ratios(times, name, base)["processor"]["median"] for base in bases}
                ms = quartiles(times[name]["processor"])
                rows[name] = {
                    **{f"{key}_ms": ms[key] for key in ("median", "low", "high")},
                    "relative_time": over["BatchNorm2d"],
                    "relative_to_products": over["five products"],
                    "relative_to_layer": over["DecorrelatedBatchNorm2d"],
                    "peak_bytes": peak_memory(run),
                }
                print(
                    f"  {name:42s} {ms['median']:8.2f} ms {over['BatchNorm2d']:6.2f}x {over['five products']:6.2f}x of"
                    f" the products {rows[name]['peak_bytes'] / 1e6:8.1f} MB"
                )
            title = f"limit {shape} float32, {str(form).partition('.')[2]}, forward and backward, processor time"
            results.append({"title": title, "base": "BatchNorm2d", "contenders": rows})
    return results


def parts(seconds):
    """Where the time of a small feature map goes: what comes on top of the five products."""
    results = []
    for form in (torch.contiguous_format, CHANNELS_LAST):
        x, gradient = (torch.randn(250, 64, 8, 8).contiguous(memory_format=form) for _ in range(2))
        flat, _ = flatten(x)
        trained = x.clone(memory_format=torch.preserve_format).requires_grad_()
        matrix, layer = torch.randn(64, 64), DecorrelatedBatchNorm2d(64)
        covariance = torch.cov(x.movedim(1, 0).flatten(1)).double().requires_grad_()
        root_gradient = torch.randn(64, 64, dtype=torch.float64)
        contenders = {
            "five products": lambda x=x, m=matrix: five_products(x, m),
            "the layer": lambda f=layer, x=trained, g=gradient: step(f, x, g),
            "mean and covariance, float32": lambda x=flat: _float32_moments(x, 1),
            "mean and covariance, float64": lambda x=flat: _float64_moments(x, 1),
            "inverse root of 64 x 64, forward and backward": lambda a=covariance, g=root_gradient: torch.autograd.grad(
                oc.inv_sqrtm(a, eps=1e-5), a, g
            ),
            "sum over the features": lambda x=x: x.sum((0, 2, 3)),
            "one pass that adds a vector": lambda x=x, m=matrix: x + m[0].reshape(1, -1, 1, 1),
        }
        title = f"parts of whitening (250, 64, 8, 8) float32, {str(form).partition('.')[2]}"
        results.append(report(title, contenders, seconds, "five products"))
    return results


def pooling(seconds):
    results = []
    for side in (7, 14):
        x = torch.randn(4, 256, side, side).relu().requires_grad_()
        gradient = torch.randn(4, 256, 256)
        functions = {
            "covariance_pool": lambda x: covariance_pool(x, output="matrix"),
            "of the d x d covariance": full_covariance,
            "covariance_pool, NewtonSchulz(5)": lambda x: covariance_pool(
                x, output="matrix", solver=oc.NewtonSchulz(steps=5)
            ),
        }
        contenders = {name: (lambda f=f, x=x, g=gradient: step(f, x, g)) for name, f in functions.items()}
        title = f"pooling (4, 256, {side}, {side}) float32, forward and backward"
        results.append(report(title, contenders, seconds, "covariance_pool"))
    return results


if __name__ == "__main__":
    options = arguments(__doc__)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    save(
        options.output,
        [*limits(options.seconds), *parts(options.seconds), *whitening(options.seconds), *pooling(options.seconds)],
    )
