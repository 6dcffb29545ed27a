"""`diagnose`: one look at every layer of a model, which of them are ill-conditioned, and what would help."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from orthocond._checks import check_not_negative
from orthocond.layers import CovariancePool2d, SVDLayer, WhitenColor2d
from orthocond.matrix import matrix_view
from orthocond.matrix.spectra import Spectrum, singular_spectrum, spectrum
from orthocond.monitor.advice import advise
from orthocond.monitor.diagnosis import Diagnosis, LayerDiagnosis
from orthocond.monitor.facts import gram_matrices, summary
from orthocond.monitor.features import channels_of, covariance_of, feature_tolerance
from orthocond.monitor.run import call, split_batch, undisturbed
from orthocond.monitor.trace import WEIGHT_LAYERS, PreSVDLayer, Trace, named_layers, path_of, unwrap
from orthocond.weights._common import groups_of

# Ridge for layers that have none of their own: that of torch's normalization layers.
_EPS = 1e-5


def diagnose(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[..., Tensor],
    *,
    eps: float | None = None,
) -> Diagnosis:
    r"""Look at every layer of a model in one forward and backward, and say what is ill-conditioned and what would help.

    For each linear layer, convolution and SVD layer: condition number of its weight; rank, :math:`\kappa(P +
    \varepsilon I)` and :math:`\kappa` on the range of the covariance P of its output channels, or, for an SVD layer, of
    the covariance that it decomposes; condition number of the gradient; and which SVD layer it feeds (see
    `pre_svd_layer`).

    The model runs in training mode. Afterwards its modes, gradients, buffers (running statistics, power iterations),
    and the random state of torch and Python are bit for bit as before, and no optimizer or hook of a gradient is
    involved.

    Args:
        model: Any model; also inside DistributedDataParallel or torch.compile, which are left out.
        batch: A tensor; ``(inputs, targets)``; or a dictionary, of which ``forward`` gets what it has arguments for,
            and ``"target"``, ``"targets"``, ``"label"``, ``"labels"`` or ``"y"`` is the target otherwise. Inputs that
            are a tuple or dictionary are unpacked into the call. A batch as large as in training gives the ranks of
            training.
        loss_fn: ``loss_fn(output, target)``, or ``loss_fn(output)`` if the batch has no target.
        eps: Ridge in the condition numbers of covariances; None takes that of each SVD layer, and 1e-5 elsewhere.

    Returns:
        A `Diagnosis`: ``print`` it, or take ``rows``, ``to_markdown()`` or ``to_json()``. Of a layer that is called
        several times the last call counts.

    Raises:
        TypeError: If an argument is of the wrong kind, or ``loss_fn`` does not fit the batch.
        ValueError: If the batch cannot be divided into inputs and target, the model has no such layers, the loss is not
            one number, or activations are not finite.

    Accuracy:
        Covariances are accumulated in float64. Variances below 1e-12 of the largest (for half precision, the square of
        its epsilon) count as zero: they are rounding of the features. Singular values of float32 weights come from Gram
        matrices in float64, those of float64 weights from the SVD.

    Example:
        >>> from torch import nn
        >>> from orthocond.layers import DecorrelatedBatchNorm2d
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), DecorrelatedBatchNorm2d(8), nn.Flatten(), nn.Linear(288, 2))
        >>> images = torch.randn(32, 3, 8, 8).cumsum(-1).cumsum(-2)
        >>> result = diagnose(model, (images, torch.randint(2, (32,))), nn.functional.cross_entropy)
        >>> result["0"].feeds, result["0"].rank
        (('1',), 8)
        >>> print(result["0"].advice[0].code)
        oc.whitening_init_(model[0], batch[0])

    References:
        Song, Sebe, Wang (2022), section 3.1.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"diagnose needs a torch.nn.Module; got {type(model).__name__}.")
    if not callable(loss_fn):
        raise TypeError(f"diagnose needs a function loss_fn(output, target); got {type(loss_fn).__name__}.")
    if eps is not None:
        check_not_negative(eps, "diagnose(eps=...)")
    inner = unwrap(model)
    inputs, target = split_batch(inner, batch, "diagnose")
    layers = {name: m for name, m in named_layers(inner).items() if isinstance(m, (*WEIGHT_LAYERS, SVDLayer))}
    if not layers:
        raise ValueError("diagnose needs a model with linear layers, convolutions or SVD layers; this one has none.")
    looks = {name: _Look(name, m, _ridge(m, eps)) for name, m in layers.items()}
    svd = {name: m for name, m in layers.items() if isinstance(m, SVDLayer)}
    with undisturbed(inner), Trace(inner, svd) as trace:
        handles = [look.attach(trace) for look in looks.values()]
        try:
            loss = _loss(loss_fn, call(inner, inputs), target)
        finally:
            for handle in handles:
                handle.remove()
        _take_gradients(loss, looks)
    rows = {name: look.row() for name, look in looks.items()}
    for svd_name, found in trace.found.items():
        rows[svd_name] = replace(rows[svd_name], fed_by=tuple(layer.name for layer in found))
    for name, row in rows.items():
        rows[name] = replace(row, feeds=tuple(s for s in svd if name in rows[s].fed_by and name not in svd))
    source = _expression(batch, inputs)
    for name, look in looks.items():
        fed = [(rows[s], layers[s], path_of(model, s)) for s in rows[name].feeds]
        start = source if look.first else None
        rows[name] = replace(
            rows[name], advice=tuple(advise(rows[name], look.module, path_of(model, name), start, fed))
        )
    return Diagnosis(tuple(rows.values()), float(loss.detach()))


@dataclass
class _Look:
    """One layer, and what the forward and backward showed of it."""

    name: str
    module: nn.Module
    eps: float
    covariances: Tensor | None = None
    samples: int = 0
    dtype: torch.dtype = torch.float32
    first: bool = False  # whether its input is the model's
    gradient: Tensor | None = None

    def attach(self, trace: Trace) -> Any:
        """Watch the next forwards; returns a handle to end it."""

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            x = next((a for a in args if isinstance(a, Tensor)), output)
            self.first = x.grad_fn in trace.inputs
            self.dtype, self.samples = output.dtype, _samples(module, x, output)
            if not isinstance(module, SVDLayer):
                self.observe(covariance_of(module, output))

        if isinstance(self.module, SVDLayer):
            self.module.observer = self.observe
        return self.module.register_forward_hook(after)

    def observe(self, covariance: Tensor) -> None:
        """Take the covariance of this forward."""
        self.covariances = covariance.reshape(-1, *covariance.shape[-2:])

    def parameter(self) -> Tensor | None:
        """The parameter of which the gradient is taken."""
        return None if isinstance(self.module, SVDLayer) else PreSVDLayer(self.name, self.module).parameter()

    def row(self) -> LayerDiagnosis:
        """The facts."""
        facts: dict[str, Any] = {"kind": parametrize.type_before_parametrizations(self.module).__name__}
        groups = groups_of(self.module)
        if not isinstance(self.module, SVDLayer):
            weight = PreSVDLayer(self.name, self.module).weight()
            found = _singular(weight, groups)
            facts |= {"weight_shape": tuple(weight.shape), "weight_rank": int(found.rank.median())}
            facts |= {"weight_condition": float(found.condition.median())}
        if self.covariances is not None:
            found = spectrum(self.covariances, eps=self.eps, rank_tol=feature_tolerance(self.dtype))
            facts |= {"size": found.size, "samples": self.samples, "rank": int(found.rank.median()), "eps": self.eps}
            facts |= {key: float(getattr(found, key).nanmedian()) for key in ("condition", "condition_on_range")}
        if self.gradient is not None:
            found = _singular(self.gradient, groups)
            facts |= {"gradient_rank": int(found.rank.median()), "gradient_condition": float(found.condition.median())}
        return LayerDiagnosis(name=self.name, **facts)


def _samples(module: nn.Module, x: Tensor, output: Tensor) -> int:
    """How many samples one covariance has."""
    if isinstance(module, CovariancePool2d) or (isinstance(module, WhitenColor2d) and module.per == "image"):
        return x[0, 0].numel()
    if isinstance(module, SVDLayer):
        return x[:, 0].numel()
    return output.numel() // channels_of(module, output)


def _ridge(module: nn.Module, eps: float | None) -> float:
    if eps is not None:
        return float(eps)
    return float(getattr(module, "eps", 0.0)) if isinstance(module, SVDLayer) else _EPS


def _singular(tensor: Tensor, groups: int) -> Spectrum:
    """The spectrum of a weight or gradient; by Gram matrices, ten times as fast, where they lose nothing."""
    if tensor.dtype == torch.float64:
        return singular_spectrum(matrix_view(tensor, groups))
    gram, tol = gram_matrices(tensor, groups)
    return summary(torch.linalg.eigvalsh(gram).clamp(min=0).sqrt(), 0.0, tol)


def _loss(loss_fn: Callable[..., Tensor], output: Any, target: Any) -> Tensor:
    arguments = (output,) if target is None else (output, target)
    try:
        inspect.signature(loss_fn).bind(*arguments)
    except TypeError as error:
        form = "loss_fn(output), as the batch has no target" if target is None else "loss_fn(output, target)"
        raise TypeError(f"diagnose calls {form}; this loss_fn does not take that: {error}.") from error
    except ValueError:
        pass  # a builtin without a signature
    loss = loss_fn(*arguments)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"diagnose needs a loss that is one number and depends on the model's parameters; got {what}. Reduce it "
            "with mean(), and do not detach it."
        )
    return loss


def _take_gradients(loss: Tensor, looks: dict[str, _Look]) -> None:
    """Differentiate without touching ``.grad``, nor the hooks that wait for it."""
    pairs = [(look, p) for look in looks.values() if (p := look.parameter()) is not None and p.requires_grad]
    gradients = torch.autograd.grad(loss.sum(), [p for _, p in pairs], allow_unused=True) if pairs else ()
    for (look, _), gradient in zip(pairs, gradients, strict=True):
        look.gradient = gradient


def _expression(batch: Any, inputs: Any) -> str | None:
    """How to write the input tensor in terms of the batch; None if it is not one tensor."""
    if not isinstance(inputs, Tensor):
        return None
    if isinstance(batch, Tensor):
        return "batch"
    if isinstance(batch, dict):
        return next(f"batch[{key!r}]" for key, value in batch.items() if value is inputs)
    return "batch[0]"
