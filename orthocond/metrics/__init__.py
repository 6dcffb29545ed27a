"""Metrics of generators and of disentanglement, in memory and offline (paper: section 6.2)."""

from orthocond.metrics.effects import (
    EffectMatrix,
    FactorReport,
    effect_matrix,
    factor_report,
    plot_effect_matrix,
)
from orthocond.metrics.factors import DCI, dci, modularity, mutual_information, mutual_information_gap, sap
from orthocond.metrics.frechet import FrechetDistance, frechet_distance
from orthocond.metrics.geometry import PathLength, activeness, path_length, pixel_mse, projection_spectrum
from orthocond.metrics.inception import InceptionExtractor, inception_extractor
from orthocond.metrics.kernel import kernel_distance
from orthocond.metrics.moments import FeatureMoments
from orthocond.metrics.predictability import Predictability, VariationalPredictability

__all__ = [
    # images against images
    "frechet_distance",
    "FrechetDistance",
    "FeatureMoments",
    "kernel_distance",
    "inception_extractor",
    "InceptionExtractor",
    # directions
    "activeness",
    "path_length",
    "PathLength",
    "pixel_mse",
    "projection_spectrum",
    "Predictability",
    "VariationalPredictability",
    # directions against true factors
    "dci",
    "DCI",
    "effect_matrix",
    "EffectMatrix",
    "factor_report",
    "FactorReport",
    "modularity",
    "mutual_information",
    "mutual_information_gap",
    "plot_effect_matrix",
    "sap",
]
