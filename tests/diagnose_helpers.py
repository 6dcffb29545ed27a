"""Models and batches for the tests of `diagnose`."""

import torch
from torch import nn

import orthocond as oc

IMAGES = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(0))


LABELS = torch.arange(8) % 4


def covariances(x):
    """The covariance of the channels of each image."""
    x = x.flatten(2)
    x = x - x.mean(-1, keepdim=True)
    return x @ x.mT / x.shape[-1]


class WithLinear(nn.Module):
    """A module with a linear layer, whose ``forward`` a test writes."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)


class HandWrittenPooling(nn.Module):
    """Covariance pooling as people write it: a decomposition, and autograd through it."""

    def forward(self, x):
        cov = covariances(x)
        values, vectors = torch.linalg.eigh(cov)
        root = vectors @ torch.diag_embed((values + 1e-3).sqrt()) @ vectors.mT
        return root.flatten(1)


def network(pooling, channels=12):
    """The channels repeat in pairs, so that each covariance has a sixfold zero eigenvalue."""
    model = nn.Sequential()
    model.conv = nn.Conv2d(3, channels, 3)
    with torch.no_grad():
        model.conv.weight.copy_(model.conv.weight[: channels // 2].repeat(2, 1, 1, 1))
        model.conv.bias.zero_()
    model.relu = nn.ReLU()
    model.pool = pooling
    model.head = nn.Linear(channels**2, 4)
    return model


# Advice keeps what the layer has


def stem(**settings):
    model = nn.Sequential()
    model.conv1 = nn.Conv2d(3, 32, 3, padding=1)
    model.bn1 = oc.DecorrelatedBatchNorm2d(32, **settings)
    return model
