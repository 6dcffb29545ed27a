"""orthocond: well-conditioned SVD layers and disentangled GAN latents for PyTorch."""

from orthocond import directions, gans, metrics
from orthocond.folding import FoldReport, fold
from orthocond.generators import Generator, NoiseAsLatent
from orthocond.layers import (
    CovariancePool2d,
    DecorrelatedBatchNorm1d,
    DecorrelatedBatchNorm2d,
    DecorrelatedBatchNorm3d,
    SVDLayer,
    WhitenColor2d,
    convert_batchnorm,
    convert_sync,
    covariance_pool,
    update_statistics,
    whiten,
    whiten_color,
)
from orthocond.matrix import (
    SVD,
    Eigh,
    NewtonSchulz,
    Pade,
    Solver,
    SolverFailures,
    Spectrum,
    SquareRoots,
    Taylor,
    inv_sqrtm,
    matrix_view,
    polar,
    singular_spectrum,
    solver_failures,
    spectrum,
    sqrtm,
    square_roots,
)
from orthocond.monitor import (
    Advice,
    ConditionMonitor,
    Diagnosis,
    History,
    LayerDiagnosis,
    PreSVDLayer,
    diagnose,
    pre_svd_layer,
)
from orthocond.steps import (
    FixedLR,
    NearestOrthogonal,
    OptimalLR,
    RandomLR,
    StepStatistics,
    Stiefel,
    Treatment,
    optimal_lr,
    treat,
)
from orthocond.weights import (
    SkewOrthogonalConv2d,
    orthogonal,
    orthogonality_loss,
    patch_covariance,
    spectral,
    whitening_init_,
)

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
    # layers
    "convert_batchnorm",
    "convert_sync",
    "covariance_pool",
    "CovariancePool2d",
    "DecorrelatedBatchNorm1d",
    "DecorrelatedBatchNorm2d",
    "DecorrelatedBatchNorm3d",
    "SVDLayer",
    "update_statistics",
    "whiten",
    "whiten_color",
    "WhitenColor2d",
    # treatments of the weight
    "orthogonal",
    "orthogonality_loss",
    "patch_covariance",
    "SkewOrthogonalConv2d",
    "spectral",
    "whitening_init_",
    # treatments of the step
    "FixedLR",
    "NearestOrthogonal",
    "optimal_lr",
    "OptimalLR",
    "RandomLR",
    "StepStatistics",
    "Stiefel",
    "treat",
    "Treatment",
    # see and deploy
    "Advice",
    "ConditionMonitor",
    "diagnose",
    "Diagnosis",
    "fold",
    "FoldReport",
    "History",
    "LayerDiagnosis",
    "pre_svd_layer",
    "PreSVDLayer",
    # generators and their latent spaces
    "directions",
    "gans",
    "Generator",
    "metrics",
    "NoiseAsLatent",
]
