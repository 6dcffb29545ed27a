"""Square roots, inverse square roots and polar factors of batches of matrices, with gradients that stay right."""

from orthocond.matrix.decompose import SolverFailures, solver_failures
from orthocond.matrix.eigh import Eigh
from orthocond.matrix.iterative import NewtonSchulz, Pade, Taylor
from orthocond.matrix.polar_factor import GramPolar, NewtonSchulzPolar, PolarExpress, PolarMethod, SVDPolar, polar
from orthocond.matrix.roots import SquareRoots, inv_sqrtm, sqrtm, square_roots
from orthocond.matrix.solver import Solver
from orthocond.matrix.spectra import Spectrum, singular_spectrum, spectrum
from orthocond.matrix.svd import SVD
from orthocond.matrix.view import matrix_view

__all__ = [
    "SVD",
    "Eigh",
    "GramPolar",
    "NewtonSchulz",
    "NewtonSchulzPolar",
    "Pade",
    "PolarExpress",
    "PolarMethod",
    "SVDPolar",
    "Solver",
    "SolverFailures",
    "Spectrum",
    "SquareRoots",
    "Taylor",
    "inv_sqrtm",
    "matrix_view",
    "polar",
    "singular_spectrum",
    "solver_failures",
    "spectrum",
    "sqrtm",
    "square_roots",
]
