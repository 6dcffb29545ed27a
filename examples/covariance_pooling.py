"""Global covariance pooling (a GCP head) in place of a hand-written one whose gradients are NaN.

The hand-written head differentiates through torch.linalg.eigh, and one constant image is enough to break it.
oc.diagnose names the line, oc.CovariancePool2d replaces it, and the network trains.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

import orthocond as oc


class HandWrittenPooling(nn.Module):
    """As it is often written."""

    def forward(self, x):
        x = x.flatten(2)
        x = x - x.mean(-1, keepdim=True)
        cov = x @ x.mT / x.shape[-1]
        values, vectors = torch.linalg.eigh(cov)
        root = vectors @ torch.diag_embed(values.clamp(min=1e-5).sqrt()) @ vectors.mT
        rows, columns = torch.triu_indices(*root.shape[-2:])
        return root[:, rows, columns]


def network(pooling):
    torch.manual_seed(0)
    model = nn.Sequential()
    model.features = nn.Sequential(nn.Conv2d(3, 24, 5, stride=2), nn.ReLU(), nn.Conv2d(24, 12, 1), nn.ReLU())
    model.pool = pooling
    model.classifier = nn.Linear(78, 3)
    return model


def textures(count, rng):
    """Noise, horizontal and vertical stripes with equal colors; the first image has no pattern at all."""
    labels = torch.randint(3, (count,), generator=rng)
    images = torch.randn(count, 3, 16, 16, generator=rng)
    images[labels == 1] = images[labels == 1].mean(-1, keepdim=True).expand(-1, -1, -1, 16) * 4
    images[labels == 2] = images[labels == 2].mean(-2, keepdim=True).expand(-1, -1, 16, -1) * 4
    images[0] = 0.5
    return images, labels


def train(model, steps=60):
    rng = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        images, labels = textures(48, rng)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        if not all(p.grad.isfinite().all() for p in model.parameters()):
            return f"gradients are not finite at step {step}"
        optimizer.step()
    images, labels = textures(500, torch.Generator().manual_seed(2))
    with torch.no_grad():
        accuracy = (model(images).argmax(1) == labels).float().mean()
    return f"loss {float(loss.detach()):.3f}, accuracy {accuracy:.0%} (chance is 33%)"


def main():
    by_hand = network(HandWrittenPooling())
    print(f"Hand-written: {train(by_hand)}\n")
    print("What oc.diagnose says:\n")
    batch = textures(48, torch.Generator().manual_seed(1))
    found = oc.diagnose(network(HandWrittenPooling()), batch, F.cross_entropy)
    for failure in found.failures:
        print(failure)
    for decomposition in found.decompositions:
        print(*decomposition.advice, sep="\n")
    replaced = network(oc.CovariancePool2d())
    print(f"\noc.CovariancePool2d(): {train(replaced)}")
    healthy = oc.diagnose(replaced, batch, F.cross_entropy)
    assert not healthy.failures
    assert math.isfinite(healthy.loss)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
