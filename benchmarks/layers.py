"""Speed and memory of the layers beside honest baselines: `python benchmarks/layers.py --output FILE`.

Whitening: one training step (forward and backward) and one inference of the stem's layer in the paper's setting,
against plain batch normalization and against whitening written with a centered copy and torch.linalg.eigh. Pooling:
forward and backward, against the decomposition of the d x d covariance.
"""

import torch
from common import arguments, report, save
from torch import nn

import orthocond as oc
from orthocond.layers import DecorrelatedBatchNorm2d, covariance_pool


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
        }
        training = {name: (lambda f=f, x=x, g=gradient: step(f, x, g)) for name, f in layers.items()}
        title = f"whitening (128, 64, 32, 32) float32, {str(form).partition('.')[2]}"
        results.append(report(f"{title}, forward and backward", training, seconds, "BatchNorm2d"))
        fixed = {name: layer.eval() for name, layer in layers.items() if isinstance(layer, nn.Module)}
        contenders = {name: (lambda f=f, x=x: inference(f, x)) for name, f in fixed.items()}
        results.append(report(f"{title}, inference", contenders, seconds, "BatchNorm2d"))
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
    save(options.output, [*whitening(options.seconds), *pooling(options.seconds)])
