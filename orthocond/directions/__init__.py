"""Directions of a generator's latent space, and pictures of them (paper: section 5.1)."""

from orthocond.directions.basis import Directions, axes, effect_sizes
from orthocond.directions.diagonalize import JointDiagonalization, jointly_diagonalize
from orthocond.directions.factorize import eigengan_directions, sefa
from orthocond.directions.jacobian import jacobian_directions
from orthocond.directions.joint import JointDirections, joint_directions, off_diagonal_energies, off_diagonal_energy
from orthocond.directions.regions import region_directions
from orthocond.directions.render import compare, gif, grid, strip
from orthocond.directions.rotation import rotate
from orthocond.directions.traversal import traverse

__all__ = [
    "axes",
    "compare",
    "Directions",
    "effect_sizes",
    "eigengan_directions",
    "gif",
    "grid",
    "jacobian_directions",
    "joint_directions",
    "JointDiagonalization",
    "JointDirections",
    "jointly_diagonalize",
    "off_diagonal_energies",
    "off_diagonal_energy",
    "region_directions",
    "rotate",
    "sefa",
    "strip",
    "traverse",
]
