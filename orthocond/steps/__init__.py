"""Treatments of the step: nearest orthogonal gradient, optimal learning rate, Stiefel (paper: section 4)."""

from orthocond.steps._weight import StepStatistics
from orthocond.steps.controls import FixedLR, RandomLR
from orthocond.steps.learning_rate import OptimalLR, optimal_lr
from orthocond.steps.nearest import NearestOrthogonal
from orthocond.steps.stiefel import Stiefel
from orthocond.steps.treatment import Treatment, treat

__all__ = [
    "FixedLR",
    "NearestOrthogonal",
    "OptimalLR",
    "RandomLR",
    "StepStatistics",
    "Stiefel",
    "Treatment",
    "optimal_lr",
    "treat",
]
