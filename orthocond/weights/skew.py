"""Orthogonal convolutions by the exponential of a skew-symmetric convolution: what the authors' release calls OW."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orthocond._checks import at_least_float32, check_count, in_backward, without_autocast
from orthocond.weights._common import follow_singular_vector

# The power-iterated norms bound the norm of the convolution by this factor times the kernel's side. The authors' 0.7
# for 3x3 kernels keeps the skew convolution below norm 2.1; the same limit is kept here for other kernels, and the
# authors' exception for 1x1 kernels, whose norm is known exactly, too.
_NORM_LIMIT = 2.1
# Power iterations at the start, as the authors do: the norm is then known to a few percent, at worst too small.
_FIRST_ITERATIONS = 50
# The four matrices (rows, columns) of a kernel (out, in, h, w) whose norms, times the root of h·w, each bound the norm
# of the convolution.
_FOUR = (((0, 2), (1, 3)), ((0, 3), (1, 2)), ((0,), (1, 2, 3)), ((1,), (0, 2, 3)))


class SkewOrthogonalConv2d(nn.Module):
    r"""Convolution that is orthogonal as a whole, with a receptive field larger than its kernel.

    The kernel V of C x C channels is made skew-symmetric, :math:`K = V - V^{flip,T}` (channels exchanged, kernel
    turned by 180 degrees): as a linear map of images, the convolution with K is a skew-symmetric matrix, also with zero
    padding at the borders. Its exponential, cut after some terms, is the layer:

    .. math:: y = x + K * x + \tfrac{1}{2!} K * K * x + \dots + \tfrac{1}{T!} K^{*T} * x

    Each term widens the receptive field by the kernel: 5 terms of a 3x3 kernel cover 11x11. For C channels in and out
    and stride 1 the map is orthogonal. Otherwise C is the larger of ``in · stride²`` and ``out``. A narrower input is
    padded with zero channels, which keeps norms. A wider output is cut to its first channels, which does not increase
    norms. The stride moves blocks of pixels to channels first, which is orthogonal.

    K is divided by a bound on its norm (the least of four reshapes, by power iteration: 50 steps at the start, one for
    each forward in training mode) to make the series short. All of the state is in buffers.

    This costs ``terms`` convolutions of C x C channels: for a 3 -> 64 stem with 3x3 kernels 107 times the operations of
    the plain convolution, and 21 times its parameters. `orthogonal` is the cheap treatment.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        kernel_size: Side of the square kernel, odd.
        stride: Side of the blocks of pixels that become channels; it must divide the image.
        terms: Terms of the series in training mode.
        eval_terms: Terms of the series in evaluation mode.
        bias: Whether to add a bias.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Attributes:
        weight: The raw kernel V, ``(C, C, kernel_size, kernel_size)``: what an optimizer and `treat` see.
        bias: ``(out_channels,)`` or None.

    Raises:
        ValueError: If a setting is not valid, or the input has the wrong shape.

    Accuracy:
        With 5 and 10 terms of a new 3x3 layer of 64 channels the norm of a random image changes by 2e-4 and 1e-8, that
        of the worst one by 3e-3 and 3e-7. The bound on K allows 0.12 and 9e-5.

    Example:
        >>> conv = SkewOrthogonalConv2d(3, 8, 3, bias=False).eval()
        >>> x = torch.randn(1, 3, 16, 16)
        >>> print(f"{conv(x).norm() / x.norm():.4f}")
        1.0000

    References:
        Singla and Feizi (2021). Song, Sebe, Wang (2022), section 3.2.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 3,
        *,
        stride: int = 1,
        terms: int = 5,
        eval_terms: int = 10,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size, self.stride = kernel_size, stride
        self.terms, self.eval_terms = terms, eval_terms
        for key in ("in_channels", "out_channels", "kernel_size", "stride", "terms", "eval_terms"):
            check_count(getattr(self, key), f"SkewOrthogonalConv2d({key}=...)", 1)
        if kernel_size % 2 == 0:
            raise ValueError(
                f"SkewOrthogonalConv2d(kernel_size=...) needs an odd number; got {kernel_size}. A kernel without "
                "a center is not skew-symmetric."
            )
        channels = max(in_channels * stride**2, out_channels)
        shape = (channels, channels, kernel_size, kernel_size)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_channels, device=device, dtype=dtype)) if bias else None
        work = at_least_float32(self.weight.dtype)
        for index, (_, columns) in enumerate(_FOUR):
            size = math.prod(self.weight.shape[axis] for axis in columns)
            self.register_buffer(f"v{index}", torch.empty(size, device=device, dtype=work))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the kernel from N(0, 1/C), as the authors do, set the bias to zero, and start the power iteration."""
        nn.init.normal_(self.weight, std=self.weight.shape[0] ** -0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        self.reset_norms()

    @torch.no_grad()
    def reset_norms(self) -> None:
        """Restart the power iteration; needed after the kernel was changed by hand."""
        skew = _skew(self.weight.to(at_least_float32(self.weight.dtype)))
        for index in range(len(_FOUR)):
            v = F.normalize(torch.randn_like(self.get_buffer(f"v{index}")), dim=0)
            self._iterate(_unfold(skew, *_FOUR[index]), index, v, _FIRST_ITERATIONS)

    def kernel(self) -> Tensor:
        """The skew-symmetric kernel of the series, after division by its norm."""
        with without_autocast(self.weight):
            skew = _skew(self.weight.to(at_least_float32(self.weight.dtype)))
            norms = torch.stack([self._norm(skew, index) for index in range(len(_FOUR))])
            # A zero kernel stays zero, with a finite gradient.
            norm = norms.amin()
            scale = min(1.0, _NORM_LIMIT / self.kernel_size)
            return (skew * (scale / torch.where(norm == 0, 1, norm))).to(self.weight.dtype)

    def _norm(self, skew: Tensor, index: int) -> Tensor:
        """Norm of one of the four matrices by its followed singular vector, differentiable in the matrix."""
        matrix = _unfold(skew, *_FOUR[index])
        # A copy: the next forward may overwrite it, and a backward through this one still needs it.
        v = self.get_buffer(f"v{index}").to(matrix.dtype, copy=True)
        if self.training and not in_backward():
            v = self._iterate(matrix.detach(), index, v, 1)
        return torch.linalg.vector_norm(matrix @ v)

    def _iterate(self, matrix: Tensor, index: int, v: Tensor, steps: int) -> Tensor:
        v = follow_singular_vector(matrix, v, steps)
        self.get_buffer(f"v{index}").copy_(v)
        return v

    def forward(self, x: Tensor) -> Tensor:
        """Return the truncated exponential of the skew convolution applied to ``(N, in_channels, H, W)``."""
        self._check(x)
        x = F.pixel_unshuffle(x, self.stride)
        x = F.pad(x, (0, 0, 0, 0, 0, self.weight.shape[0] - x.shape[-3]))
        kernel = self.kernel()
        term = total = x
        for index in range(1, 1 + (self.terms if self.training else self.eval_terms)):
            term = F.conv2d(term, kernel, padding=self.kernel_size // 2) / index
            total = total + term
        total = total.narrow(-3, 0, self.out_channels)
        return total if self.bias is None else total + self.bias[:, None, None]

    def _check(self, x: Tensor) -> None:
        if x.ndim not in (3, 4) or x.shape[-3] != self.in_channels:
            raise ValueError(
                f"SkewOrthogonalConv2d needs inputs (N, {self.in_channels}, H, W); got shape {tuple(x.shape)}."
            )
        if x.shape[-1] % self.stride or x.shape[-2] % self.stride:
            raise ValueError(
                f"SkewOrthogonalConv2d needs images whose sides the stride {self.stride} divides; got shape "
                f"{tuple(x.shape)}. Pad or crop them."
            )

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"terms={self.terms}, eval_terms={self.eval_terms}" + ("" if self.bias is not None else ", bias=False")
        )


def _skew(kernel: Tensor) -> Tensor:
    """The skew-symmetric part (times 2) of a convolution as a linear map."""
    return kernel - kernel.transpose(0, 1).flip(-2, -1)


def _unfold(kernel: Tensor, rows: tuple[int, ...], columns: tuple[int, ...]) -> Tensor:
    """The kernel as a matrix with the given axes as rows and columns."""
    return kernel.permute(*rows, *columns).flatten(len(rows)).flatten(0, len(rows) - 1)
