"""Gradient-boosted trees for the importance of codes (DCI), in torch."""

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
        """Fit targets ``(n, m)``, with one tree for all m at a time.

        Args:
            codes: ``(n, d)``.
            targets: ``(n, m)``.
            test: Codes to predict for, ``(p, d)``.

        Returns:
            Importances ``(d,)``, of sum 1 or all 0 if nothing helps, and predictions ``(p, m)``; float64.
        """
        codes, targets, test = codes.double(), targets.double(), test.double()
        into_bins = quantile_bins(codes, _BINS)
        binned, binned_test = into_bins(codes), into_bins(test)
        mean = targets.mean(0)
        residual = targets - mean
        predictions = mean.repeat(len(test), 1)
        importance = torch.zeros(codes.shape[1], dtype=torch.float64)
        for _ in range(self.trees):
            leaf, leaf_test = self._tree(binned, residual, binned_test, importance)
            sums = residual.new_zeros(2**self.depth, residual.shape[1]).index_add_(0, leaf, residual)
            value = self.rate * sums / torch.bincount(leaf, minlength=2**self.depth).clamp(min=1)[:, None]
            residual = residual - value[leaf]
            predictions += value[leaf_test]
        total = importance.sum()
        return (importance / total if total > 0 else importance), predictions

    def _tree(self, binned: Tensor, residual: Tensor, test: Tensor, importance: Tensor) -> tuple[Tensor, Tensor]:
        """The leaf of each sample and test sample; adds the decrease of the squared error to the importance."""
        leaf, leaf_test = (torch.zeros(len(x), dtype=torch.long) for x in (binned, test))
        for level in range(self.depth):
            gain = _gains(binned, residual, leaf, 2**level)
            best, where = gain.flatten(1).max(1)
            code, cut = where // _BINS, where % _BINS
            cut = torch.where(best > 0, cut, _BINS)  # no gain: all go left
            importance.index_add_(0, code, best.clamp(min=0))
            leaf = 2 * leaf + (binned.gather(1, code[leaf][:, None])[:, 0] > cut[leaf])
            leaf_test = 2 * leaf_test + (test.gather(1, code[leaf_test][:, None])[:, 0] > cut[leaf_test])
        return leaf, leaf_test


def quantile_bins(values: Tensor, bins: int) -> Callable[[Tensor], Tensor]:
    """A function that puts columns ``(n, m)`` into bins, numbered from 0, of equal counts of these values."""
    ranks = torch.arange(1, bins) * (len(values) - 1) // bins
    edges = values.sort(0).values[ranks].mT.contiguous()
    return lambda x: torch.searchsorted(edges, x.mT.contiguous()).mT.contiguous()


def _gains(binned: Tensor, residual: Tensor, leaf: Tensor, nodes: int) -> Tensor:
    """Decrease of the squared error of each node for a split of each code after each bin: ``(nodes, d, bins)``."""
    codes = binned.shape[1]
    place = ((leaf[:, None] * codes + torch.arange(codes)) * _BINS + binned).flatten()
    size = nodes * codes * _BINS
    number = torch.bincount(place, minlength=size).double().reshape(nodes, codes, _BINS).cumsum(-1)
    whole = number[..., -1:]
    gain = torch.zeros_like(number)
    for column in residual.mT:
        weights = column[:, None].expand(-1, codes).flatten()
        left = torch.bincount(place, weights, size).reshape(nodes, codes, _BINS).cumsum(-1)
        right = left[..., -1:] - left
        gain += left.square() / number.clamp(min=1) + right.square() / (whole - number).clamp(min=1)
        gain -= left[..., -1:].square() / whole.clamp(min=1)
    return torch.where((number > 0) & (number < whole), gain, 0)
