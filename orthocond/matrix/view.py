"""The one place that says which matrix a layer's weight is."""

from torch import Tensor

from orthocond._checks import check_count, check_floating


def matrix_view(weight: Tensor, groups: int = 1) -> Tensor:
    """View the weight of a linear layer or convolution as the matrix that all treatments act on.

    ============================  ==================================  =======================
    layer                         weight                              matrix
    ============================  ==================================  =======================
    ``Linear``                    ``(out, in)``                       ``(out, in)``
    ``Conv1d/2d/3d``              ``(out, in/groups, k, ...)``        ``(out, in/groups·k·…)``
    ``ConvTranspose1d/2d/3d``     ``(in, out/groups, k, ...)``        ``(in, out/groups·k·…)``
    ============================  ==================================  =======================

    A grouped convolution is one matrix for each group of rows. (``torch.nn.utils.parametrizations.orthogonal`` takes
    the last two dimensions of a convolution weight instead, so it acts on each 3x3 kernel.)

    Args:
        weight: Weight or gradient with at least two dimensions.
        groups: Number of groups of the convolution.

    Returns:
        The matrix, or matrices ``(groups, rows / groups, columns)`` for more than one group. It shares memory with the
        weight where its layout allows; ``reshape(weight.shape)`` goes back.

    Raises:
        TypeError: If ``weight`` is not a real floating-point tensor.
        ValueError: If it has fewer than two dimensions, or ``groups`` does not divide its rows.

    Example:
        >>> matrix_view(torch.nn.Conv2d(3, 64, 3).weight).shape
        torch.Size([64, 27])
        >>> matrix_view(torch.nn.ConvTranspose2d(30, 1024, 4).weight).shape
        torch.Size([30, 16384])
        >>> matrix_view(torch.nn.Conv2d(8, 16, 3, groups=4).weight, groups=4).shape
        torch.Size([4, 4, 18])
    """
    weight = check_floating(weight, "matrix_view")
    check_count(groups, "matrix_view(groups=...)", 1)
    if weight.ndim < 2:
        raise ValueError(
            f"matrix_view needs a weight of at least two dimensions; got shape {tuple(weight.shape)}. "
            "Biases and norm scales are not matrices."
        )
    rows = weight.shape[0]
    if rows % groups:
        raise ValueError(f"matrix_view needs groups that divide the {rows} rows; got {groups}.")
    matrix = weight.flatten(1)
    return matrix if groups == 1 else matrix.unflatten(0, (groups, rows // groups))
