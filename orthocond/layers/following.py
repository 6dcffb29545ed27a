"""Running statistics that go along with the weight of the layer before, so that they do not lag behind it."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from orthocond._layers import CONVOLUTIONS
from orthocond.matrix.decompose import eigh

# Singular values of a float32 weight below this fraction of the largest are rounding.
_NOTHING = 1e-6


class RunningStatistics(NamedTuple):
    """Mean ``(C,)``, covariance and its excess ``(groups, C / groups, C / groups)``; an excess need not be there."""

    mean: Tensor
    covariance: Tensor
    excess: Tensor | None


def weight_of(layer: nn.Module, groups: int) -> Tensor:
    """The matrices ``(groups, C / groups, inputs)`` that make features out of inputs; a bias is one more column."""
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, Tensor)
    matrix = weight.detach().flatten(1)
    if isinstance(bias, Tensor):
        matrix = torch.cat([matrix, bias.detach().unsqueeze(1)], 1)
    return matrix.reshape(groups, -1, matrix.shape[1])


def obstacle(layer: nn.Module, channels: int, groups: int) -> str | None:
    """Why statistics of so many channels cannot go along with the weight of a layer; None if they can."""
    if not isinstance(layer, (nn.Linear, *CONVOLUTIONS)):
        return f"a {type(layer).__name__} is neither nn.Linear nor a convolution"
    if is_lazy(layer.weight):
        return "its weight is not initialized: run one batch through it first"
    if len(layer.weight) != channels:
        return f"it has {len(layer.weight)} outputs, and the layer {channels} channels"
    parts = getattr(layer, "groups", 1)
    if groups % parts:
        return f"its {parts} groups are not made of whole ones of the {groups} of the layer"
    rows, columns = weight_of(layer, groups).shape[1:]
    if columns > rows:
        return (
            f"its weight makes {rows} channels of a group out of {columns} inputs, so that features do not tell their "
            "inputs"
        )
    return None


def moved(statistics: RunningStatistics, then: Tensor, now: Tensor) -> RunningStatistics:
    """Statistics of the features of one weight as those of another weight with the same inputs.

    With the weight :math:`W`, features :math:`W p` have the covariance :math:`W S W^T`, where :math:`S` is that of the
    inputs. So with the weight :math:`W'` it is :math:`A W S W^T A^T` with :math:`A = W' W^+`, since a weight of full
    column rank has :math:`W^+ W = I`.

    Args:
        statistics: Those of the weight ``then``.
        then: ``(groups, rows, columns)``; zeros mean that it is not known, and nothing is changed.
        now: The other weight.
    """
    wide = then.double()
    values, vectors = eigh(wide.mT @ wide)
    largest = values.amax(-1, keepdim=True)
    inverse = torch.where(values > _NOTHING**2 * largest, values, torch.inf).reciprocal()
    back = (vectors * inverse.unsqueeze(-2)) @ vectors.mT @ wide.mT  # from features to inputs
    known = largest.unsqueeze(-1) > 0
    forth = now.double()

    # Rounding gives inputs of no variance a negative one, which another weight can multiply.
    variances, axes = eigh(back @ statistics.covariance.double() @ back.mT)
    half = forth @ (axes * variances.clamp(min=0).sqrt().unsqueeze(-2))

    def chosen(new: Tensor, old: Tensor) -> Tensor:
        return torch.where(known, new, old.double().reshape(new.shape)).to(old.dtype).reshape(old.shape)

    mean, covariance, excess = statistics
    if excess is not None:
        excess = chosen(forth @ back @ excess.double() @ back.mT @ forth.mT, excess)
    center = forth @ (back @ mean.double().reshape(len(back), -1, 1))
    return RunningStatistics(chosen(center, mean), chosen(half @ half.mT, covariance), excess)
