"""orthocond: well-conditioned SVD layers and disentangled GAN latents for PyTorch."""

from typing import TYPE_CHECKING

from orthocond._lazy import lazy

if TYPE_CHECKING:
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
        GramPolar,
        NewtonSchulz,
        NewtonSchulzPolar,
        Pade,
        PolarExpress,
        PolarMethod,
        Solver,
        SolverFailures,
        Spectrum,
        SquareRoots,
        SVDPolar,
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

_HOMES = {
    "directions": (),
    "folding": ("FoldReport", "fold"),
    "gans": (),
    "generators": ("Generator", "NoiseAsLatent"),
    "layers": (
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
    ),
    "matrix": (
        "SVD",
        "Eigh",
        "GramPolar",
        "NewtonSchulz",
        "NewtonSchulzPolar",
        "Pade",
        "PolarExpress",
        "PolarMethod",
        "Solver",
        "SolverFailures",
        "Spectrum",
        "SquareRoots",
        "SVDPolar",
        "Taylor",
        "inv_sqrtm",
        "matrix_view",
        "polar",
        "singular_spectrum",
        "solver_failures",
        "spectrum",
        "sqrtm",
        "square_roots",
    ),
    "metrics": (),
    "monitor": (
        "Advice",
        "ConditionMonitor",
        "Diagnosis",
        "History",
        "LayerDiagnosis",
        "PreSVDLayer",
        "diagnose",
        "pre_svd_layer",
    ),
    "steps": (
        "FixedLR",
        "NearestOrthogonal",
        "OptimalLR",
        "RandomLR",
        "StepStatistics",
        "Stiefel",
        "Treatment",
        "optimal_lr",
        "treat",
    ),
    "weights": (
        "SkewOrthogonalConv2d",
        "orthogonal",
        "orthogonality_loss",
        "patch_covariance",
        "spectral",
        "whitening_init_",
    ),
}
__getattr__ = lazy(__name__, _HOMES)
__version__ = "0.2.0"

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
    # methods of the polar factor
    "GramPolar",
    "NewtonSchulzPolar",
    "PolarExpress",
    "PolarMethod",
    "SVDPolar",
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


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
