"""What the tests of the step treatments share."""

import math
import pickle

import numpy as np
import torch
from torch import nn


def haar(*shape):
    """Orthonormal columns (rows, if wide), uniformly distributed."""
    m, n = shape[-2:]
    q, r = torch.linalg.qr(torch.randn(*shape[:-2], max(m, n), min(m, n), dtype=torch.float64))
    q = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    return q if m >= n else q.mT


def error(w, gain=1.0):
    """||W Wᵀ - gain² I||² of the smaller Gram matrix, as written in the paper."""
    gram = w @ w.mT if w.shape[-2] <= w.shape[-1] else w.mT @ w
    return (gram - gain**2 * torch.eye(gram.shape[-1], dtype=w.dtype)).square().sum((-2, -1))


def best_rate(w, d, low, high, gain=1.0):
    """The minimizer by another way: the quartic through five values, the roots of its derivative by NumPy."""
    nodes = torch.linspace(-1, 1, 5, dtype=torch.float64) * high
    values = torch.stack([error(w - t * d, gain) for t in nodes])
    quartic = np.polynomial.Polynomial.fit(nodes.numpy(), values.numpy(), 4)
    roots = [r.real for r in quartic.deriv().roots() if abs(r.imag) < 1e-6 * abs(r) and low < r.real < high]
    return min((low, high, *roots), key=quartic)


def network():
    return nn.Sequential(nn.Conv2d(2, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(54, 3)).double()


def batch(size=8):
    return torch.randn(size, 2, 5, 5, dtype=torch.float64), torch.randn(size, 3, dtype=torch.float64)


def train(model, optimizer, data, scheduler=None):
    """Train with plain loops; the losses."""
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def goes_on(fresh):
    """A model and optimizer that go on from a pickled checkpoint with the losses of those that were never saved.

    Args:
        fresh: Makes a model, its optimizer and its treatment.

    Returns:
        The treatment that went on, for three steps.
    """
    data = [batch() for _ in range(6)]
    model, optimizer, _ = fresh()
    train(model, optimizer, data[:3])
    saved = pickle.dumps((model.state_dict(), optimizer.state_dict()))
    losses = train(model, optimizer, data[3:])
    model, optimizer, treatment = fresh()
    for part, state in zip((model, optimizer), pickle.loads(saved), strict=True):
        part.load_state_dict(state)
    assert train(model, optimizer, data[3:]) == losses
    return treatment


def train_scaled(scaler, model, optimizer, twin, plain, *, steps, unscale=False):
    """Train with a gradient scaler whose second loss is infinite, and a twin without: the weights become the same."""
    for step in range(steps):
        x, y = (t.float() for t in batch())
        optimizer.zero_grad()
        before = model[0].weight.detach().clone()
        scaler.scale(nn.functional.mse_loss(model(x), y) * (math.inf if step == 1 else 1.0)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if step == 1:
            assert torch.equal(model[0].weight, before)
        else:
            train(twin, plain, [(x, y)])
    torch.testing.assert_close(model[0].weight, twin[0].weight, rtol=1e-5, atol=1e-6)
