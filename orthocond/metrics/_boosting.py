"""Gradient-boosted trees for the importance of codes (DCI), in torch."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_BINS = 256  # quantiles of each code between which a tree may split


@dataclass(frozen=True)
class Boosting:
    r"""Settings of boosted regression trees with squared loss: each tree is fitted to what the ones before left over.

    A tree splits on quantiles of the codes, by the largest decrease of the squared error; the decreases of all trees,
    summed for each code, are its importance. Defaults are those of scikit-learn, as in the official DCI.

    Args:
        trees: Number of trees.
        depth: Splits from root to leaf.
        rate: Part of each tree that is taken.
    """

    trees: int = 100
    depth: int = 3
    rate: float = 0.1

    def fit(self, codes: Tensor, targets: Tensor, test: Tensor) -> tuple[Tensor, Tensor]:
        """Fit each of p targets by trees of its own, all at once.

        Args:
            codes: ``(n, d)``.
            targets: ``(p, n, m)``; the m columns of a target share their trees, as the indicators of classes do.
            test: Codes to predict for, ``(q, d)``.

        Returns:
            Importances ``(p, d)``, of sum 1 or all 0 if nothing helps, and predictions ``(p, q, m)``; float64.
        """
        codes, targets, test = codes.double(), targets.double(), test.double()
        into_bins = quantile_bins(codes, _BINS)
        binned, binned_test = (into_bins(x).mT.contiguous() for x in (codes, test))
        mean = targets.mean(1, keepdim=True)
        residual = targets - mean
        predictions = mean.repeat(1, len(test), 1)
        importance = targets.new_zeros(len(targets), codes.shape[1])
        for _ in range(self.trees):
            leaf, leaf_test = self._tree(binned, residual, binned_test, importance)
            value = self.rate * _leaf_means(leaf, residual, 2**self.depth)
            residual = residual - _taken(value, leaf)
            predictions += _taken(value, leaf_test)
        total = importance.sum(1, keepdim=True)
        return torch.where(total > 0, importance / total, importance), predictions

    def _tree(self, binned: Tensor, residual: Tensor, test: Tensor, importance: Tensor) -> tuple[Tensor, Tensor]:
        """The leaf of each sample and test sample; adds the decrease of the squared error to the importance."""
        leaf, leaf_test = (torch.zeros(len(residual), x.shape[1], dtype=torch.long) for x in (binned, test))
        for level in range(self.depth):
            gain = _gains(binned, residual, leaf, 2**level)
            best, where = gain.flatten(2).max(2)
            code, cut = where // _BINS, where % _BINS
            cut = torch.where(best > 0, cut, _BINS)  # no gain: all go left
            importance.scatter_add_(1, code, best.clamp(min=0))
            leaf = 2 * leaf + (binned.gather(0, code.gather(1, leaf)) > cut.gather(1, leaf))
            leaf_test = 2 * leaf_test + (test.gather(0, code.gather(1, leaf_test)) > cut.gather(1, leaf_test))
        return leaf, leaf_test


def _leaf_means(leaf: Tensor, residual: Tensor, leaves: int) -> Tensor:
    """The mean ``(p, leaves, m)`` of the residuals in each leaf; 0 in one without samples."""
    sums = residual.new_zeros(len(residual), leaves, residual.shape[2])
    sums.scatter_add_(1, leaf[..., None].expand_as(residual), residual)
    number = torch.zeros(leaf.shape[0], leaves, dtype=torch.long).scatter_add_(1, leaf, torch.ones_like(leaf))
    return sums / number.clamp(min=1)[..., None]


def _taken(value: Tensor, leaf: Tensor) -> Tensor:
    """The values ``(p, n, m)`` of the leaves ``(p, n)``."""
    return value.gather(1, leaf[..., None].expand(-1, -1, value.shape[2]))


def quantile_bins(values: Tensor, bins: int) -> Callable[[Tensor], Tensor]:
    """A function that puts columns ``(n, m)`` into bins, numbered from 0, of equal counts of these values."""
    ranks = torch.arange(1, bins) * (len(values) - 1) // bins
    edges = values.sort(0).values[ranks].mT.contiguous()
    return lambda x: torch.searchsorted(edges, x.mT.contiguous()).mT.contiguous()


def _gains(binned: Tensor, residual: Tensor, leaf: Tensor, nodes: int) -> Tensor:
    """Decrease of the squared error of each node for a split of each code after each bin: ``(p, nodes, d, bins)``.

    Args:
        binned: Bins ``(d, n)``.
        residual: What is left of the targets, ``(p, n, m)``.
        leaf: The node ``(p, n)`` of each sample.
        nodes: How many there are.
    """
    (codes, n), targets = binned.shape, len(residual)
    shape = (targets, nodes, codes, _BINS)
    node = leaf + nodes * torch.arange(targets)[:, None]
    place = (binned + _BINS * torch.arange(codes)[:, None] + (codes * _BINS * node)[:, None]).reshape(-1)
    size = math.prod(shape)
    number = torch.bincount(place, minlength=size).double().reshape(shape).cumsum(-1)
    whole = number[..., -1:]
    gain = torch.zeros_like(number)
    for column in residual.unbind(2):
        sums = residual.new_zeros(size).scatter_add_(0, place, column[:, None].expand(-1, codes, n).reshape(-1))
        left = sums.reshape(shape).cumsum(-1)
        right = left[..., -1:] - left
        gain += left.square() / number.clamp(min=1) + right.square() / (whole - number).clamp(min=1)
        gain -= left[..., -1:].square() / whole.clamp(min=1)
    return torch.where((number > 0) & (number < whole), gain, 0)
