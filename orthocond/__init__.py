"""orthocond: well-conditioned SVD layers and disentangled GAN latents for PyTorch."""

from orthocond.matrix import (
    SVD,
    Eigh,
    NewtonSchulz,
    Pade,
    Solver,
    SolverFailures,
    SquareRoots,
    Taylor,
    inv_sqrtm,
    matrix_view,
    polar,
    solver_failures,
    sqrtm,
    square_roots,
)
from orthocond.spectrum import Spectrum, singular_spectrum, spectrum

__version__ = "0.1.0"

__all__ = [
    # matrix functions
    "inv_sqrtm",
    "matrix_view",
    "polar",
    "sqrtm",
    "square_roots",
    "SquareRoots",
    # their solvers
    "Eigh",
    "NewtonSchulz",
    "Pade",
    "Solver",
    "SVD",
    "Taylor",
    "solver_failures",
    "SolverFailures",
    # what eigenvalues say
    "singular_spectrum",
    "spectrum",
    "Spectrum",
]
