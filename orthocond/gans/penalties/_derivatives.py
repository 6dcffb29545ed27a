"""First and second derivatives of a network along given vectors, exact or by differences, at its chosen layers."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jvp
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from orthocond._checks import check_choice, check_count, check_floating, without_autocast
from orthocond.gans._common import uniform
from orthocond.gans.noise import same_noise

Network = Callable[[Tensor], Tensor]
Layers = Sequence[nn.Module] | None
DERIVATIVES = ("exact", "difference")


def along(
    network: Network,
    z: Tensor,
    order: int,
    *,
    layers: Layers,
    vectors: int,
    derivative: str,
    eps: float,
    rng: torch.Generator | None,
    caller: str,
) -> list[Tensor]:
    """Derivatives of this order along Rademacher vectors, ``(vectors, N, ...)`` for each layer."""
    check_floating(z, caller)
    if z.ndim != 2 or z.numel() == 0:
        raise ValueError(f"{caller} needs latents (N, z_dim); got shape {tuple(z.shape)}.")
    check_count(vectors, f"{caller}(vectors=...)", 2)
    check_choice(derivative, f"{caller}(derivative=...)", DERIVATIVES)
    if not 0 < eps < float("inf"):
        raise ValueError(f"{caller}(eps=...) needs a finite number above 0; got {eps!r}.")
    if layers is not None and (len(layers) == 0 or len(set(layers)) < len(layers)):
        raise ValueError(f"{caller}(layers=...) needs different modules of the network, or None for its output.")
    signs = [rademacher(z, rng) for _ in range(vectors)]

    def run(z: Tensor) -> tuple[Tensor, ...]:
        return outputs(network, z, layers, caller)

    method = _exact if derivative == "exact" else _difference
    with without_autocast(z):  # half precision would drown the differences
        found = method(run, z, signs, order, eps)
    return [torch.stack(per_vector) for per_vector in zip(*found, strict=True)]


def rademacher(z: Tensor, rng: torch.Generator | None) -> Tensor:
    """Independent signs of the shape of the latents."""
    return 1 - 2 * (uniform(tuple(z.shape), z, rng) < 0.5).to(z.dtype)


class _Complete(Exception):
    """All layers have been seen; the rest of the network need not run."""


def outputs(network: Network, z: Tensor, layers: Layers, caller: str) -> tuple[Tensor, ...]:
    """The output of the network, or those of its layers at their first call."""
    if layers is None:
        return (network(z),)
    found: dict[nn.Module, Any] = {}

    def keep(module: nn.Module, args: object, output: object) -> None:
        found.setdefault(module, output)
        if len(found) == len(layers):
            raise _Complete

    handles = [layer.register_forward_hook(keep) for layer in layers]
    try:
        network(z)
    except _Complete:
        pass
    finally:
        for handle in handles:
            handle.remove()
    for layer in layers:
        if not isinstance(found.get(layer), Tensor):
            raise ValueError(
                f"{caller}(layers=...) needs modules that the network runs and that return one tensor; "
                f"{type(layer).__name__} " + ("returned something else." if layer in found else "was not run.")
            )
    return tuple(found[layer] for layer in layers)


_Run = Callable[[Tensor], tuple[Tensor, ...]]


def _difference(run: _Run, z: Tensor, signs: list[Tensor], order: int, eps: float) -> list[list[Tensor]]:
    """Forward differences of first order, central ones of second order."""
    steps = [eps * v for v in signs]
    if order == 1:
        middle, *ahead = same_noise(run, [z, *(z + s for s in steps)])
        return [[(a - m) / eps for a, m in zip(one, middle, strict=True)] for one in ahead]
    middle, *sides = same_noise(run, [z, *(z + s for s in steps), *(z - s for s in steps)])
    ahead, behind = sides[: len(steps)], sides[len(steps) :]
    return [
        [(a - 2 * m + b) / eps**2 for a, m, b in zip(one, middle, other, strict=True)]
        for one, other in zip(ahead, behind, strict=True)
    ]


def _exact(run: _Run, z: Tensor, signs: list[Tensor], order: int, eps: float) -> list[tuple[Tensor, ...]]:
    """Forward-mode derivatives, nested for the second order."""

    def first(z: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return jvp(run, (z,), (v,))[1]

    def second(z: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return jvp(lambda z: first(z, v), (z,), (v,))[1]

    derivative = first if order == 1 else second
    with _ComposedNorms():
        return same_noise(lambda v: derivative(z, v), signs)


class _ComposedNorms(TorchFunctionMode):
    """Normalizations as compositions of elementary operations.

    torch differentiates batch, instance and layer normalization once in forward mode, but takes their mean and variance
    for constants when that derivative is differentiated again, in either mode (pytorch/pytorch#196699, #196700).
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _COMPOSED.get(func, func)(*args, **(kwargs or {}))


def _batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not training:
        return F.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
    return _affine(_standardize(x, [0, *range(2, x.ndim)], eps), weight, bias)


def _instance_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not use_input_stats:
        return F.instance_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
    return _affine(_standardize(x, list(range(2, x.ndim)), eps), weight, bias)


def _layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    y = _standardize(x, list(range(x.ndim - len(normalized_shape), x.ndim)), eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _standardize(x: Tensor, dims: list[int], eps: float) -> Tensor:
    centered = x - x.mean(dims, keepdim=True)
    return centered * (centered.square().mean(dims, keepdim=True) + eps).rsqrt()


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    shape = (-1,) + (1,) * (x.ndim - 2)
    x = x if weight is None else x * weight.reshape(shape)
    return x if bias is None else x + bias.reshape(shape)


_COMPOSED: dict[Any, Callable[..., Tensor]] = {
    F.batch_norm: _batch_norm,
    F.instance_norm: _instance_norm,
    F.layer_norm: _layer_norm,
}


def reduce(values: Tensor, reduction: str, caller: str) -> Tensor:
    """The mean or the largest of the values."""
    check_choice(reduction, f"{caller}(reduction=...)", ("mean", "max"))
    return values.mean() if reduction == "mean" else values.max()
