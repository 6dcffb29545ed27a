"""Treatments of one weight: orthogonal, normalized, penalized, or made for its input (paper: section 3.2)."""

from orthocond.weights.input_aware import patch_covariance, whitening_init_
from orthocond.weights.loss import orthogonality_loss
from orthocond.weights.orthogonal_weight import Orthogonal, orthogonal
from orthocond.weights.skew import SkewOrthogonalConv2d
from orthocond.weights.spectral_norm import SpectralNorm, spectral

__all__ = [
    "Orthogonal",
    "SkewOrthogonalConv2d",
    "SpectralNorm",
    "orthogonal",
    "orthogonality_loss",
    "patch_covariance",
    "spectral",
    "whitening_init_",
]
