"""Soft orthogonality: a penalty added to the loss (paper: section 3.2, OL)."""

import torch
from torch import Tensor, nn

from orthocond._checks import at_least_float32, check_choice, check_count, without_autocast
from orthocond._layers import groups_of, matrices
from orthocond.weights._common import eye_like


def orthogonality_loss(
    weight: Tensor | nn.Module,
    *,
    name: str = "weight",
    form: str = "squared",
    side: str | None = None,
    groups: int = 1,
) -> Tensor:
    r"""Distance of a weight from orthogonality: OL of the paper, to be added to the loss.

    With W the `matrix_view` of the weight, m x n,

    * ``"squared"``: :math:`\|W W^T - I\|_F^2` for :math:`m \le n` and :math:`\|W^T W - I\|_F^2` for a tall W. The two
      differ by the constant :math:`m - n`, so their gradient is the same, but only this side can reach zero.
    * ``"paper"``: :math:`\|W W^T - I\|_F`, as the paper writes it. For a tall W its minimum is
      :math:`\sqrt{m - n}`, not 0 (6.1 for 64 x 27); pass ``side="columns"`` to bring it to 0.

    The squared form pulls in proportion to the distance. The unsquared one pulls with the same force however near the
    weight is, so it oscillates around the optimum; at the optimum itself its gradient is 0, not NaN.

    Args:
        weight: A weight of at least two dimensions, or a module that has one.
        name: Name of the weight within the module.
        form: ``"squared"`` or ``"paper"``.
        side: ``"rows"`` for :math:`W W^T`, ``"columns"`` for :math:`W^T W`. None takes the side where zero is
            reachable for ``"squared"``, and rows for ``"paper"``.
        groups: Number of groups of a convolution whose weight is given as a tensor; of a module it is read. The groups
            are the blocks of one block-diagonal matrix.

    Returns:
        A scalar, in float32 for half precision.

    Raises:
        TypeError: If ``weight`` is neither a real floating-point tensor nor a module.
        ValueError: If there is no weight of two dimensions, or a setting is not valid.

    Example:
        >>> conv = torch.nn.Conv2d(3, 64, 3)
        >>> loss = 1e-2 * orthogonality_loss(conv)
        >>> w = torch.nn.init.orthogonal_(torch.empty(64, 27))
        >>> print(f"{orthogonality_loss(w):.3f} {orthogonality_loss(w, form='paper'):.3f}")
        0.000 6.083

    References:
        Song, Sebe, Wang (2022), section 3.2.
    """
    check_choice(form, "orthogonality_loss(form=...)", ("squared", "paper"))
    if side is not None:
        check_choice(side, "orthogonality_loss(side=...)", ("rows", "columns"))
    if isinstance(weight, nn.Module):
        if groups != 1:
            raise ValueError("orthogonality_loss(groups=...) is for a tensor; of a module the groups are read.")
        groups = groups_of(weight, name)
        weight = _weight_of(weight, name)
    elif name != "weight":
        raise ValueError(f"orthogonality_loss(name=...) is for a module; got a tensor and the name {name!r}.")
    check_count(groups, "orthogonality_loss(groups=...)", 1)
    w = matrices(weight, groups)
    w = w.to(at_least_float32(w.dtype))
    if side is None:
        side = "columns" if form == "squared" and w.shape[-2] > w.shape[-1] else "rows"
    with without_autocast(w):
        gram = w @ w.mT if side == "rows" else w.mT @ w
    error = gram - eye_like(gram)
    return error.square().sum() if form == "squared" else torch.linalg.vector_norm(error)


def _weight_of(module: nn.Module, name: str) -> Tensor:
    """The weight that the module computes with: of a parametrized one, the result of its parametrization."""
    weight = getattr(module, name, None)
    if not isinstance(weight, Tensor):
        raise ValueError(
            f"orthogonality_loss needs a module with a tensor {name!r}; {type(module).__name__} has none. Pass the "
            "Linear or convolution itself, name= if its weight has another name, or the weight."
        )
    return weight
