"""Treat your own model: one line for each treatment, with the condition number live.

A small network with a whitening layer learns the orientation of gratings: untreated, with the paper's treatments of
gradient and step, and from a white start. Prints accuracy and the condition number of the whitening layer's input.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

import orthocond as oc

CLASSES = 6


def gratings(count, rng):
    """Colored stripes in one of six orientations under noise: neighboring pixels agree, as in photographs."""
    labels = torch.randint(CLASSES, (count,), generator=rng)
    angle = labels * math.pi / CLASSES
    phase = 2 * math.pi * torch.rand(count, generator=rng)
    y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    waves = torch.cos(0.9 * (x * angle.cos()[:, None, None] + y * angle.sin()[:, None, None]) + phase[:, None, None])
    color = 0.5 + torch.rand(count, 3, 1, 1, generator=rng)
    return color * waves[:, None] + 1.5 * torch.randn(count, 3, 16, 16, generator=rng), labels


def network():
    model = nn.Sequential()
    model.conv1 = nn.Conv2d(3, 24, 3, padding=1, bias=False)
    model.bn1 = oc.DecorrelatedBatchNorm2d(24)
    model.body = nn.Sequential(nn.ReLU(), nn.Conv2d(24, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU())
    model.head = nn.Sequential(nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(144, CLASSES))
    return model


def untreated(model, optimizer):
    """The model as it is."""


def treated_step(model, optimizer):
    oc.treat(model.conv1, optimizer, gradient=oc.NearestOrthogonal(), lr=oc.OptimalLR())


def white_start(model, optimizer):
    images, _ = gratings(256, torch.Generator().manual_seed(3))
    oc.whitening_init_(model.conv1, images)


def train(treatment, steps=60):
    torch.manual_seed(0)
    rng = torch.Generator().manual_seed(1)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    treatment(model, optimizer)
    with oc.ConditionMonitor(model) as monitor:
        for _ in range(steps):
            images, labels = gratings(64, rng)
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    images, labels = gratings(1000, torch.Generator().manual_seed(2))
    with torch.no_grad():
        accuracy = (model.eval()(images).argmax(1) == labels).float().mean()
    return monitor.history, float(accuracy)


def main():
    treatments = {"as it is": untreated, "oc.treat, NOG and OLR": treated_step, "oc.whitening_init_": white_start}
    print(f"{'':24s}{'accuracy':>10s}{'κ(P) at first':>16s}{'mean':>8s}{'at the end':>12s}{'κ(gradient)':>13s}")
    for name, treatment in treatments.items():
        history, accuracy = train(treatment)
        columns = history.columns("bn1")
        kappa, gradient = columns["condition"], sorted(columns["gradient_condition"])[30]
        mean = sum(kappa) / len(kappa)
        print(f"{name:24s}{accuracy:10.0%}{kappa[0]:16.0f}{mean:8.0f}{kappa[-1]:12.0f}{gradient:13.0f}")
    print("\nP is the covariance of conv1's output, which bn1 inverts. κ(gradient) is the median, before NOG.")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
