"""Decorrelated batch normalization in an existing network: one call, and the trained state is kept.

Trains a small network with nn.BatchNorm2d, converts it, and continues training. Prints how correlated the channels
after each normalization are, before and after, and shows that the conversion changes nothing in evaluation.
"""

import copy

import torch
from torch import nn
from torch.nn import functional as F

import orthocond as oc


def network():
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(128, 4)),
    )


def blobs(count, rng):
    """A bright blob in one of four quarters, over smooth noise that all colors share."""
    labels = torch.randint(4, (count,), generator=rng)
    images = F.avg_pool2d(torch.randn(count, 3, 20, 20, generator=rng), 5, 1) * 3
    images = images.mean(1, keepdim=True) + 0.3 * images
    for image, label in zip(images, labels.tolist(), strict=True):
        row, column = 2 + 8 * (label // 2), 2 + 8 * (label % 2)
        image[:, row : row + 4, column : column + 4] += 0.8
    return images, labels


def train(model, steps, rng):
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(steps):
        images, labels = blobs(64, rng)
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model):
    images, labels = blobs(1000, torch.Generator().manual_seed(9))
    return float((model.eval()(images).argmax(1) == labels).float().mean())


@torch.no_grad()
def correlations(model):
    """Mean absolute correlation of two channels behind each normalization, on a batch in training mode."""
    found = {}
    normalizations = [nn.BatchNorm2d, oc.DecorrelatedBatchNorm2d]
    for name, module in model.named_modules():
        if type(module) in normalizations:
            module.register_forward_hook(lambda m, a, y, name=name: found.update({name: y}))
    copy.deepcopy(model).train()(blobs(256, torch.Generator().manual_seed(8))[0])
    matrices = {name: torch.corrcoef(y.movedim(1, 0).flatten(1)) for name, y in found.items()}
    return {name: float(c.abs().triu(1).sum() / (len(c) * (len(c) - 1) / 2)) for name, c in matrices.items()}


def main():
    torch.manual_seed(0)
    rng = torch.Generator().manual_seed(1)
    model = network()
    train(model, 40, rng)
    converted = oc.convert_batchnorm(copy.deepcopy(model), groups={"5": 2})
    images = blobs(8, rng)[0]
    with torch.no_grad():
        change = (model.eval()(images) - converted.eval()(images)).abs().max()
    print(f"Converted: {converted[1]}\nLargest change of an output by the conversion: {change:.1e}\n")
    print(f"{'after 40 further steps':26s}{'accuracy':>10s}   mean |correlation| of two channels behind each layer")
    for name, net in (("nn.BatchNorm2d", model), ("oc.DecorrelatedBatchNorm2d", converted)):
        train(net, 40, torch.Generator().manual_seed(2))
        rest = "  ".join(f"{layer}: {value:.3f}" for layer, value in correlations(net).items())
        print(f"{name:26s}{accuracy(net):10.0%}   {rest}")
    print("\nLayer 5 whitens two groups of 16 channels each, so channels of different groups stay correlated.")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
