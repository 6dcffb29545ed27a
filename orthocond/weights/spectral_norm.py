"""Spectral normalization of the matrix view of a weight (paper: section 3.2, SN)."""

import torch
from torch import Tensor, nn

from orthocond._checks import at_least_float32, check_count, in_backward, warn_onnx, without_autocast
from orthocond._layers import find_parameter, groups_of, matrices
from orthocond.weights._common import follow_singular_vector, register


class SpectralNorm(nn.Module):
    """The parametrization behind `spectral`: divides a weight by its largest singular value.

    Args:
        weight: The weight that it will be registered on.
        groups: Number of groups of the convolution.
        iterations: Power iterations in each training forward.
    """

    v: Tensor

    def __init__(self, weight: Tensor, groups: int = 1, iterations: int = 1) -> None:
        super().__init__()
        check_count(iterations, "spectral(iterations=...)", 1)
        self.groups = groups
        self.iterations = iterations
        w = matrices(weight.detach(), groups)
        dtype = at_least_float32(w.dtype)
        self.register_buffer("v", w.new_zeros(w.shape[0], w.shape[-1], dtype=dtype))

    def forward(self, raw: Tensor) -> Tensor:
        """Return the raw weight divided by its largest singular value."""
        warn_onnx("operation for a parametrized weight")
        with without_autocast(raw):
            w = matrices(raw, self.groups).to(at_least_float32(raw.dtype))
            if self.training and not in_backward():
                self.v.copy_(follow_singular_vector(w.detach(), self.v.to(w.dtype), self.iterations))
            # A copy: the next forward overwrites the vectors, and a backward through this one still needs them.
            v = self.v.to(w.dtype, copy=True)
            # The norm of the block-diagonal matrix of all groups. A zero weight stays zero, with a finite gradient.
            sigma = torch.linalg.vector_norm(w @ v.unsqueeze(-1), dim=(-2, -1)).amax()
            return (raw / torch.where(sigma == 0, 1, sigma)).to(raw.dtype)

    def right_inverse(self, value: Tensor) -> Tensor:
        """Take the weight as the raw one, and its singular vectors, so that the norm is exact from the start."""
        w = matrices(value.detach(), self.groups).double()
        if not bool(w.isfinite().all()) or not bool(w.any()):
            raise ValueError("spectral needs a finite weight that is not zero, which has no direction to normalize.")
        _, _, vh = torch.linalg.svd(w, full_matrices=False)
        self.v.copy_(vh[..., 0, :])
        return value.detach().clone()

    def extra_repr(self) -> str:
        return f"groups={self.groups}, iterations={self.iterations}"


def spectral(module: nn.Module, name: str = "weight", *, iterations: int = 1) -> nn.Module:
    r"""Divide a weight by its largest singular value: SN of the paper.

    The weight becomes :math:`W / \sigma_{max}(W)`, with W the `matrix_view` and the raw W the parameter. It bounds the
    largest singular value and does not change the ratio of largest to smallest, the condition number of W.

    The norm is exact when the treatment starts, then followed by power iteration, one step for each forward in
    training mode, as in ``torch.nn.utils.parametrizations.spectral_norm``. Three things differ: a transposed
    convolution is normalized as ``(in, out·k·k)``, the matrix of all other treatments; groups are the blocks of one
    block-diagonal matrix, whose norm is the largest of theirs; and the vectors do not lose digits under autocast. As
    there, it is the norm of the matrix, not of the convolution with it, which is at most :math:`\sqrt{k k}` times it.

    Args:
        module: Linear, convolution, transposed convolution, or any module with a parameter of two or more dimensions.
        name: Which parameter.
        iterations: Power iterations in each training forward.

    Returns:
        The module, changed in place. ``torch.nn.utils.parametrize.remove_parametrizations(module, name)`` removes the
        treatment.

    Raises:
        TypeError: If ``module`` is not a module, or the parameter is not real floating point.
        ValueError: If there is no such parameter, it has fewer than two dimensions, or it is zero or not finite.
        RuntimeError: If the parameter is parametrized already or not initialized.

    Example:
        >>> conv = spectral(torch.nn.ConvTranspose2d(30, 8, 4))
        >>> print(f"{torch.linalg.matrix_norm(conv.weight.flatten(1), 2):.4f}")
        1.0000

    References:
        Song, Sebe, Wang (2022), section 3.2. Miyato et al. (2018).
    """
    weight = find_parameter(module, name, "spectral")
    parametrization = SpectralNorm(weight, groups_of(module, name), iterations)
    return register(module, name, parametrization)
