"""SVD layers, which decompose a covariance: whitening, covariance pooling, coloring (paper: section 6.1)."""

from orthocond.layers.base import SVDLayer
from orthocond.layers.batchnorm import (
    DecorrelatedBatchNorm1d,
    DecorrelatedBatchNorm2d,
    DecorrelatedBatchNorm3d,
)
from orthocond.layers.coloring import WhitenColor2d, whiten_color
from orthocond.layers.convert import convert_batchnorm, convert_sync
from orthocond.layers.pooling import CovariancePool2d, covariance_pool
from orthocond.layers.refresh import update_statistics
from orthocond.layers.whitening import whiten

__all__ = [
    "CovariancePool2d",
    "DecorrelatedBatchNorm1d",
    "DecorrelatedBatchNorm2d",
    "DecorrelatedBatchNorm3d",
    "SVDLayer",
    "WhitenColor2d",
    "convert_batchnorm",
    "convert_sync",
    "covariance_pool",
    "update_statistics",
    "whiten",
    "whiten_color",
]
