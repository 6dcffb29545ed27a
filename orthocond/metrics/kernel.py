"""The kernel distance between two sets of features, KID with Inception's."""

from torch import Tensor

from orthocond._checks import check_floating


def kernel_distance(a: Tensor, b: Tensor) -> float:
    r"""The squared maximum mean discrepancy of two sets of features, with the cubic kernel of KID.

    .. math:: \frac{1}{m (m - 1)} \sum_{i \ne j} k(a_i, a_j) + \frac{1}{n (n - 1)} \sum_{i \ne j} k(b_i, b_j)
        - \frac{2}{m n} \sum_{i, j} k(a_i, b_j), \qquad k(x, y) = \bigl(x^T y / d + 1\bigr)^3

    Unlike the Fréchet distance it has no bias, so few images give the same number on average as many, and the distance
    of two samples of one distribution is 0 on average: it can be negative.

    Args:
        a: Features ``(m, d)``, of at least two images.
        b: Features ``(n, d)``, of at least two.

    Returns:
        The distance, computed in float64.

    Raises:
        TypeError: If the features are not real floating-point tensors.
        ValueError: If shapes do not fit, or a feature is not finite.

    Example:
        >>> from orthocond.metrics import kernel_distance
        >>> _ = torch.manual_seed(0)
        >>> a, b = torch.randn(500, 4), torch.randn(500, 4)
        >>> abs(kernel_distance(a, b)) < 0.05 < kernel_distance(a, b + 1)
        True

    References:
        Bińkowski et al. (2018), Demystifying MMD GANs.
    """
    x, y = (check_floating(t, f"kernel_distance({name})").detach().double() for t, name in ((a, "a"), (b, "b")))
    if x.ndim != 2 or y.ndim != 2 or x.shape[1] != y.shape[1] or min(len(x), len(y)) < 2 or not x.shape[1]:
        raise ValueError(
            f"kernel_distance needs features (m, d) and (n, d) of at least two images each; got {tuple(x.shape)} and "
            f"{tuple(y.shape)}."
        )
    if not (x.isfinite().all() and y.isfinite().all()):
        raise ValueError("kernel_distance needs finite features; some are NaN or infinite.")
    y = y.to(x.device)
    return float(_within(x) + _within(y) - 2 * _kernel(x, y).mean())


def _kernel(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y.mT / x.shape[1] + 1) ** 3


def _within(x: Tensor) -> Tensor:
    """The mean of the kernel over pairs of different rows."""
    values = _kernel(x, x)
    return (values.sum() - values.diagonal().sum()) / (len(x) * (len(x) - 1))
