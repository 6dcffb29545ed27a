"""What eigenvalues say: rank, condition number, condition on the range (paper: section 1)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from orthocond._checks import check_floating, check_not_negative, check_square
from orthocond.matrix import decompose
from orthocond.matrix.symmetric import symmetric_part

_SKEW = 0.01  # share of a covariance that rounding may have made antisymmetric, also in bfloat16


@dataclass(frozen=True)
class Spectrum:
    """The spectrum of a batch of matrices, in float64. Fields are tensors of the batch shape, except where noted.

    Attributes:
        eigenvalues: ``(*, n)``, descending, without the ridge.
        rank: Number of eigenvalues above ``tol * largest``.
        size: The dimension n, an integer.
        largest: Largest eigenvalue, without the ridge.
        smallest: Smallest eigenvalue, without the ridge; 0 where it is not above the tolerance.
        condition: ``(largest + eps) / (smallest + eps)``. It is infinite only where ``singular`` says why.
        condition_on_range: Largest over smallest eigenvalue above the tolerance, without the ridge: what the
            condition number is where the matrix acts. NaN for a zero matrix, which has no range.
        effective_rank: Exponential of the entropy of the eigenvalues as fractions of their sum (Roy and Vetterli,
            2007): n for a multiple of the identity, 1 for rank one. 0 for a zero matrix.
        eps: The ridge, a number.
        tol: The relative rank tolerance, a number.
    """

    eigenvalues: Tensor
    rank: Tensor
    size: int
    largest: Tensor
    smallest: Tensor
    condition: Tensor
    condition_on_range: Tensor
    effective_rank: Tensor
    eps: float
    tol: float

    @property
    def singular(self) -> Tensor:
        """Whether the matrix with its ridge is singular: rank below the size and no ridge."""
        return (self.rank < self.size) & (self.eps == 0)

    def __str__(self) -> str:
        if self.rank.ndim:
            return f"Spectrum of {self.rank.numel()} matrices of size {self.size}: rank {_range(self.rank, 'd')}, " + (
                f"condition (+{self.eps:g}) {_range(self.condition, '.3g')}, "
                f"on the range {_range(self.condition_on_range, '.3g')}"
            )
        condition = "singular" if self.singular else f"condition (+{self.eps:g}) {self.condition:.3g}"
        return (
            f"Spectrum: rank {int(self.rank)} of {self.size} (tolerance {self.tol:.2g}), {condition}, "
            f"condition on the range {self.condition_on_range:.3g}, eigenvalues {self.smallest:.3g} to "
            f"{self.largest:.3g}, effective rank {self.effective_rank:.3g}"
        )

    def _repr_html_(self) -> str:
        """The same as a table, for notebooks."""
        rows = [
            ("matrices", f"{self.rank.numel()} of size {self.size}"),
            (f"rank (tolerance {self.tol:.2g})", _range(self.rank, "d")),
            (f"condition (+{self.eps:g})", _range(self.condition, ".3g")),
            ("condition on the range", _range(self.condition_on_range, ".3g")),
            ("largest eigenvalue", _range(self.largest, ".3g")),
            ("smallest eigenvalue", _range(self.smallest, ".3g")),
            ("effective rank", _range(self.effective_rank, ".3g")),
        ]
        left, right = (f'style="text-align: {side}; padding: 2px 10px"' for side in ("left", "right"))
        cells = "".join(f"<tr><td {left}>{name}</td><td {right}>{value}</td></tr>" for name, value in rows)
        head = f"<tr><th {left}>spectrum</th><th {right}>value</th></tr>"
        return f"<table><thead>{head}</thead><tbody>{cells}</tbody></table>"


def _range(values: Tensor, form: str) -> str:
    if not values.numel():
        return "-"
    low, high = values.min().item(), values.max().item()
    return format(low, form) if low == high else f"{low:{form}} to {high:{form}}"


def spectrum(a: Tensor, *, eps: float = 0.0, rank_tol: float | None = None) -> Spectrum:
    r"""Rank, condition numbers and extreme eigenvalues of symmetric positive semi-definite matrices.

    A covariance can be singular by construction: a 3x3 convolution of 3 channels gives at most rank 27, and 196
    positions at most rank 195. Its condition number is then not 1e12, as rounding errors in the small eigenvalues
    suggest, but infinite without a ridge, and :math:`(\lambda_{max} + \varepsilon) / \varepsilon` with one. This
    function reports rank, both condition numbers and both extreme eigenvalues, and marks a singular matrix as
    ``singular``.

    Args:
        a: Matrices ``(*, n, n)``, symmetric up to 1 %; their symmetric part is taken. For the weight of a layer use
            `singular_spectrum`.
        eps: Ridge added to every eigenvalue for ``condition``.
        rank_tol: Eigenvalues at or below ``rank_tol * largest`` count as zero. None takes n times the machine epsilon
            of the input's dtype, as ``torch.linalg.matrix_rank`` does: compute the covariance in float64 to see
            condition numbers above 1e5.

    Returns:
        A `Spectrum`, computed in float64 and without gradient.

    Raises:
        TypeError: If ``a`` is not a real floating-point tensor.
        ValueError: If ``a`` is not square, not symmetric, empty or not finite, or ``eps`` or ``rank_tol`` is negative.

    Example:
        >>> s = spectrum(torch.diag(torch.tensor([4.0, 2.0, 0.0])), eps=1e-2)
        >>> print(s)
        Spectrum: rank 2 of 3 (tolerance 3.6e-07), condition (+0.01) 401, condition on the range 2,
        eigenvalues 0 to 4, effective rank 1.89
        >>> print(spectrum(torch.diag(torch.tensor([4.0, 2.0, 0.0]))).singular)
        tensor(True)

    References:
        Song, Sebe, Wang (2022), section 1, equation 1.
    """
    a = check_square(a, "spectrum")
    eps = check_not_negative(eps, "spectrum(eps=...)")
    n = a.shape[-1]
    if n == 0:
        raise ValueError(f"spectrum needs matrices of size at least 1; got shape {tuple(a.shape)}.")
    decompose.check_finite_batch(a)
    whole = a.detach().double()
    symmetric = symmetric_part(whole)
    if bool((torch.linalg.matrix_norm(whole - symmetric) > _SKEW * torch.linalg.matrix_norm(symmetric)).any()):
        raise ValueError(
            f"spectrum needs symmetric matrices, such as covariances; those of shape {tuple(a.shape)} are not. For the "
            "weight of a layer call singular_spectrum(matrix_view(layer.weight))."
        )
    values, _ = decompose.eigh(symmetric)
    return summarize(values.flip(-1), n, eps, rank_tolerance(rank_tol, n, a.dtype))


def singular_spectrum(w: Tensor, *, rank_tol: float | None = None) -> Spectrum:
    """The `Spectrum` of the singular values of rectangular matrices, such as weights and gradients.

    Args:
        w: Matrices ``(*, m, n)``. The weight of a convolution is one matrix, `matrix_view` of it, and not a batch of
            small kernels.
        rank_tol: Singular values at or below ``rank_tol * largest`` count as zero; None takes the longer side times
            the machine epsilon of the input's dtype.

    Returns:
        A `Spectrum` whose eigenvalues are the singular values, ``(*, min(m, n))``.

    Raises:
        TypeError: If ``w`` is not a real floating-point tensor.
        ValueError: If ``w`` is not a batch of non-empty finite matrices, is the weight of a convolution without
            `matrix_view`, or ``rank_tol`` is negative.

    Example:
        >>> singular_spectrum(torch.diag(torch.tensor([3.0, 1.5]))).condition
        tensor(2., dtype=torch.float64)
        >>> from orthocond import matrix_view
        >>> singular_spectrum(matrix_view(torch.nn.Conv2d(3, 64, 3).weight)).size
        27
    """
    w = check_floating(w, "singular_spectrum")
    if w.ndim < 2 or 0 in w.shape[-2:]:
        raise ValueError(f"singular_spectrum needs non-empty matrices (*, m, n); got shape {tuple(w.shape)}.")
    if isinstance(w, nn.Parameter) and w.ndim > 2:
        raise ValueError(
            f"singular_spectrum needs matrices; a parameter of shape {tuple(w.shape)} would be read as a batch of "
            "small kernels. Pass matrix_view(layer.weight), or matrix_view(layer.weight, layer.groups) of one with "
            "groups; parameter.detach() for a batch of matrices."
        )
    decompose.check_finite_batch(w)
    values = torch.linalg.svdvals(w.detach().double())
    return summarize(values, values.shape[-1], 0.0, rank_tolerance(rank_tol, max(w.shape[-2:]), w.dtype))


def rank_tolerance(rank_tol: float | None, n: int, dtype: torch.dtype) -> float:
    """The given relative tolerance, or n machine epsilons of ``dtype``."""
    return n * torch.finfo(dtype).eps if rank_tol is None else check_not_negative(rank_tol, "rank_tol")


def summarize(values: Tensor, n: int, eps: float, tol: float) -> Spectrum:
    """Summarize descending eigenvalues ``(*, n)``."""
    largest = values[..., 0].clamp(min=0)
    in_range = values > tol * largest.unsqueeze(-1)
    rank = in_range.sum(-1)
    smallest = torch.where(rank == n, values[..., -1], 0)
    least_in_range = torch.where(in_range, values, torch.inf).amin(-1)
    share = torch.where(in_range, values, 0) / values.clamp(min=0).sum(-1, keepdim=True)
    entropy = -torch.special.xlogy(share, share).sum(-1)
    return Spectrum(
        eigenvalues=values,
        rank=rank,
        size=n,
        largest=largest,
        smallest=smallest,
        condition=(largest + eps) / (smallest + eps),
        condition_on_range=torch.where(rank > 0, largest / least_in_range, torch.nan),
        effective_rank=torch.where(rank > 0, entropy.exp(), 0),
        eps=eps,
        tol=tol,
    )
