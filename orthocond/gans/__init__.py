"""Generative adversarial networks whose latents are to be disentangled (paper: sections 5 and 6.2).

A generator is any callable ``G(z)`` that maps latents ``(N, z_dim)`` to images ``(N, C, H, W)`` in [-1, 1] and has an
attribute ``z_dim``; a discriminator is any callable that maps images to N logits.
"""

from orthocond.gans.augmentation import augment
from orthocond.gans.eigengan import EigenBlock, EigenDiscriminator, EigenGenerator, SubspaceLayer, parameter_groups
from orthocond.gans.ema import EMA
from orthocond.gans.health import discriminator_health, health_warnings, sample_spread
from orthocond.gans.noise import same_noise
from orthocond.gans.objectives import (
    Hinge,
    LazyR1,
    LeastSquares,
    NonSaturating,
    Objective,
    Wasserstein,
    gradient_penalty,
    r1,
    r1_weight,
    r2,
)
from orthocond.gans.penalties import LatentPredictor, hessian_penalty, latent_predictability, orthogonal_jacobian
from orthocond.gans.simple import SimpleDiscriminator, SimpleGenerator

__all__ = [
    "EMA",
    "EigenBlock",
    "EigenDiscriminator",
    "EigenGenerator",
    "Hinge",
    "LatentPredictor",
    "LazyR1",
    "LeastSquares",
    "NonSaturating",
    "Objective",
    "SimpleDiscriminator",
    "SimpleGenerator",
    "SubspaceLayer",
    "Wasserstein",
    "augment",
    "discriminator_health",
    "gradient_penalty",
    "health_warnings",
    "hessian_penalty",
    "latent_predictability",
    "orthogonal_jacobian",
    "parameter_groups",
    "r1",
    "r1_weight",
    "r2",
    "same_noise",
    "sample_spread",
]
