"""Running statistics that go along with the weight of the layer before, so that they do not lag behind it."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from orthocond._checks import all_true
from orthocond._layers import CONVOLUTIONS
from orthocond.layers.whitening import are_finite
from orthocond.matrix.decompose import eigh

# Singular values of a float32 weight below this fraction of the largest are rounding.
_NOTHING = 1e-6
# The share of the variance of features that may be out of the range of the weight: rounding, of low precision too.
_FOREIGN = 0.1


class RunningStatistics(NamedTuple):
    """Mean ``(C,)``, covariance and its excess ``(groups, C / groups, C / groups)``; an excess need not be there."""

    mean: Tensor
    covariance: Tensor
    excess: Tensor | None


@contextmanager
def _at_rest(layer: nn.Module) -> Iterator[None]:
    """Parametrizations in evaluation mode: in training, some change with every reading of their weight."""
    moving = [part for part in layer.modules() if part is not layer and part.training]
    try:
        for part in moving:
            part.training = False
        yield
    finally:
        for part in moving:
            part.training = True


def weight_of(layer: nn.Module, groups: int) -> Tensor:
    """The matrices ``(groups, C / groups, inputs)`` that make features out of inputs; a bias is one more column."""
    with _at_rest(layer):
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
    if any(is_lazy(parameter) for parameter in layer.parameters(recurse=False)):
        return "its weight is not initialized: run one batch through it first"
    outputs = weight_of(layer, 1).shape[1]
    if outputs != channels:
        return f"it has {outputs} outputs, and the layer {channels} channels"
    parts = getattr(layer, "groups", 1)
    if groups % parts:
        return f"its {parts} groups are not made of whole ones of the {groups} of the layer"
    rows, columns = split(weight_of(layer, groups), layer)[0].shape[1:]
    if columns > rows:
        return (
            f"its weight makes {rows} channels of a group out of {columns} inputs, so that features do not tell their "
            "inputs"
        )
    return None


def split(matrix: Tensor, layer: nn.Module) -> tuple[Tensor, Tensor]:
    """Weight and bias ``(groups, C / groups, 1)`` of what `weight_of` gives, in double precision."""
    columns = matrix.shape[-1] - (layer.bias is not None)
    return matrix[..., :columns].double(), matrix[..., columns:].double().sum(-1, keepdim=True)


def _inverse(weight: Tensor) -> Tensor:
    """The pseudoinverse, from features to inputs; zeros for a weight of zeros."""
    values, vectors = eigh(weight.mT @ weight)
    floor = _NOTHING**2 * values.amax(-1, keepdim=True)
    return (
        (vectors * torch.where(values > floor, values, torch.inf).reciprocal().unsqueeze(-2)) @ vectors.mT @ weight.mT
    )


def check_origin(covariance: Tensor, layer: nn.Module, owner: str) -> bool:
    """Warn of features that the weight of a layer cannot have made; False where values tell nothing."""
    if torch.compiler.is_compiling():
        return False
    weight, _ = split(weight_of(layer, len(covariance)), layer)
    if not all_true(are_finite(weight, covariance)):
        return False
    own = weight @ _inverse(weight) @ covariance.double()
    variances = [each.diagonal(dim1=-2, dim2=-1).sum(-1) for each in (own, covariance)]
    foreign = float((1 - variances[0] / variances[1]).max())
    if foreign > _FOREIGN:
        warnings.warn(
            f"{owner} follows a {type(layer).__name__} whose weight cannot have made {foreign:.0%} of the variance of "
            "the features. Let it follow the layer right before it, or none: follow(None).",
            stacklevel=2,
        )
    return True


def moved(statistics: RunningStatistics, then: Tensor, layer: nn.Module) -> tuple[RunningStatistics, Tensor]:
    r"""Statistics of the features of one weight as those of the weight that a layer has now, with the same inputs.

    With the weight :math:`W`, features :math:`W p + b` have the covariance :math:`W S W^T`, where :math:`S` is that of
    the inputs. So with the weight :math:`W'` it is :math:`A W S W^T A^T` with :math:`A = W' W^+`, since a weight of
    full column rank has :math:`W^+ W = I`. The bias is known, so the mean is :math:`A (\mu - b) + b'`.

    Args:
        statistics: Those of the weight ``then``.
        then: As `weight_of` gives it; zeros and NaN mean that it is not known, and nothing is changed.
        layer: The layer whose weight it was.

    Returns:
        The statistics, and the weight that they are of. Both stay as they are if something is not finite.
    """
    now = weight_of(layer, len(then)).to(then)
    then = torch.where(are_finite(then), then, 0)
    sound = are_finite(now, *(each for each in statistics if each is not None))
    mean, covariance, excess = statistics
    (old, old_bias), (new, new_bias) = split(then, layer), split(now, layer)
    back = _inverse(old)
    known = old.any(-1, keepdim=True).any(-2, keepdim=True) & (then != now).any()

    # Rounding gives inputs of no variance a negative one, which another weight can multiply.
    variances, axes = eigh(back @ torch.where(sound, covariance, 0).double() @ back.mT)
    half = new @ (axes * variances.clamp(min=0).sqrt().unsqueeze(-2))
    center = new @ (back @ (mean.double().reshape(old_bias.shape) - old_bias)) + new_bias
    found = [(mean, center), (covariance, half @ half.mT)]
    if excess is not None:
        found.append((excess, new @ back @ excess.double() @ back.mT @ new.mT))

    found = [(a, b.to(a.dtype)) for a, b in found]
    sound = sound & are_finite(*(b for _, b in found))
    parts = [torch.where(sound & known, b, a.reshape(b.shape)).reshape(a.shape) for a, b in found]
    kept = RunningStatistics(parts[0], parts[1], None if excess is None else parts[2])
    return kept, torch.where(sound, now, then)
