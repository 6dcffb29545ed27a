"""Penalties that disentangle the latents of any generator: the rivals that the paper compares with."""

from orthocond.gans.penalties.hessian import hessian_penalty
from orthocond.gans.penalties.jacobian import orthogonal_jacobian
from orthocond.gans.penalties.predictability import LatentPredictor, latent_predictability

__all__ = ["LatentPredictor", "hessian_penalty", "latent_predictability", "orthogonal_jacobian"]
