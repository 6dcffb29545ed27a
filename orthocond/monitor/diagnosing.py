"""`diagnose`: one look at every layer of a model, which of them are ill-conditioned, and what would help."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import LinAlgError  # type: ignore[attr-defined]  # public, but missing from the stubs

from orthocond._checks import check_not_negative
from orthocond.layers import SVDLayer
from orthocond.monitor.advice import advise, advise_decomposition
from orthocond.monitor.data_flow import WEIGHT_LAYERS, FlowTrace
from orthocond.monitor.diagnosis import Decomposition, Diagnosis, Failure, LayerDiagnosis
from orthocond.monitor.layer_names import named_layers, path_of, unwrap
from orthocond.monitor.layer_probe import LayerProbe
from orthocond.monitor.model_call import call, first_batch, split_batch, undisturbed
from orthocond.monitor.operations import Call, OperationLog, tensors_in


def diagnose(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[..., Tensor] | None = None,
    *,
    eps: float | None = None,
) -> Diagnosis:
    r"""Inspect every layer of a model in one forward and backward: what is ill-conditioned, and what would help.

    Every linear layer, convolution and SVD layer gets a row. It has the condition numbers of the weight and of its
    gradient, and says which SVD layer it feeds (see `pre_svd_layer`). It also has rank, :math:`\kappa(P + \varepsilon
    I)` and :math:`\kappa` on the range of the covariance P of the output channels; P of an SVD layer is the covariance
    that it decomposes. The projections of ``nn.MultiheadAttention`` count as layers too.

    If values are not finite, the result says where that begins: layer, torch function, file and line, in the forward or
    in the backward. Calls of ``torch.linalg.eigh`` and ``svd`` that autograd differentiates are listed with the line
    that replaces them.

    The model runs in training mode. Its modes, gradients, buffers (running statistics, power iterations), and the
    random state of torch and Python are restored bit for bit. No optimizer and no gradient hook is involved.

    Args:
        model: Any model; also inside DistributedDataParallel or torch.compile, which are left out.
        batch: A tensor; ``(inputs, targets)``; or a dictionary, of which ``forward`` gets what it has arguments for,
            and ``"target"``, ``"targets"``, ``"label"``, ``"labels"`` or ``"y"`` is the target otherwise. Inputs that
            are a tuple or dictionary are unpacked into the call. A loader gives its first batch, on the device of the
            model. A batch as large as in training gives the ranks of training.
        loss_fn: ``loss_fn(output, target)``, or ``loss_fn(output)`` if the batch has no target. None takes the output
            if it is one number, its entry ``loss`` if it has one, and otherwise a combination of the outputs with fixed
            random coefficients, so that there are gradients to look at.
        eps: Ridge in the condition numbers of covariances; None takes that of each SVD layer, and 1e-5 elsewhere.

    Returns:
        A `Diagnosis`: ``print`` it, or use ``failures``, ``rows``, ``decompositions``, ``to_markdown()`` or
        ``to_json()``. The last call counts if a layer is called several times.

    Raises:
        TypeError: If an argument is of the wrong kind, or ``loss_fn`` does not fit the batch.
        ValueError: If the batch cannot be divided into inputs and target, the model has no parameters, or the loss is
            not one number. Errors of the model itself pass through, but those that follow from values that are not
            finite, and decompositions that do not converge, are part of the result.

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
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(f"diagnose needs a function loss_fn(output, target) or None; got {type(loss_fn).__name__}.")
    if eps is not None:
        check_not_negative(eps, "diagnose(eps=...)")
    inner = unwrap(model)
    if not any(True for _ in inner.parameters()):
        raise ValueError("diagnose needs a model with parameters; this one has none.")
    probes = {probe.name: probe for probe in _probes(inner, eps)}
    svd = {name: probe.module for name, probe in probes.items() if isinstance(probe.module, SVDLayer)}
    log = OperationLog(inner)
    with undisturbed(inner):
        first = first_batch(inner, batch)
        inputs, target = split_batch(inner, first, "diagnose")
        failures = list(_broken_before(inner, inputs))
        with FlowTrace(inner, svd) as trace:
            handles = [probe.attach(trace) for probe in probes.values()]
            try:
                with log:
                    loss, error = _loss(loss_fn, call(inner, inputs), target), None
            except Exception as raised:
                if not (failures or log.nan or log.infinity or isinstance(raised, LinAlgError)):
                    raise
                loss, error = None, raised
            finally:
                for handle in handles:
                    handle.remove()
        if not failures and (loss is None or not loss.isfinite()):
            failures += _forward_failures(log, error)
        if loss is not None and loss.isfinite():
            parameters = [p for p in inner.parameters() if p.requires_grad]
            gradients = dict(zip(map(id, parameters), log.gradients(loss, parameters), strict=True))
            if log.broken_gradient is not None:
                what = "NaN" if any(g is not None and g.isnan().any() for g in gradients.values()) else "infinity"
                failures.append(Failure(what, "backward", **vars(log.broken_gradient)))
            for probe in probes.values():
                probe.gradient = gradients.get(id(probe.parameter()))
    rows = _rows(model, probes, svd, trace, _expression(batch, first, inputs))
    decompositions = tuple(
        Decomposition(
            **vars(found.call),
            shape=found.shape,
            matrices=found.matrices,
            ties=found.ties,
            advice=tuple(advise_decomposition(found)),
        )
        for found in log.decompositions
    )
    value = math.nan if loss is None else float(loss.detach())
    checked = _checked(len(probes), bool(svd), bool(decompositions), loss_fn is not None)
    return Diagnosis(rows, value, tuple(failures), decompositions, checked)


def _probes(model: nn.Module, eps: float | None) -> Iterator[LayerProbe]:
    """What to look at: SVD layers, and the weights of linear layers, convolutions and attention."""
    attention: dict[int, nn.MultiheadAttention] = {}  # by the id of its output projection, whose forward nobody calls
    for name, module in named_layers(model).items():
        if isinstance(module, nn.MultiheadAttention):
            attention[id(module.out_proj)] = module
            for attribute in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
                if getattr(module, attribute) is not None:
                    yield LayerProbe(name, module, attribute, eps, attention=module)
        elif isinstance(module, (*WEIGHT_LAYERS, SVDLayer)):
            yield LayerProbe(name, module, "weight", eps, attention=attention.get(id(module)))


def _rows(
    model: nn.Module,
    probes: Mapping[str, LayerProbe],
    svd: Mapping[str, nn.Module],
    trace: FlowTrace,
    source: str | None,
) -> tuple[LayerDiagnosis, ...]:
    """What was found of each layer: which feeds which SVD layer, and what would help."""
    rows = {name: probe.row() for name, probe in probes.items()}
    for name, found in trace.found.items():
        rows[name] = replace(rows[name], fed_by=tuple(layer.row_name for layer in found))
    for name, row in rows.items():
        rows[name] = replace(row, feeds=tuple(s for s in svd if name in rows[s].fed_by and name not in svd))
    for name, probe in probes.items():
        fed = [(rows[s], svd[s], path_of(model, s)) for s in rows[name].feeds]
        start = source if probe.first else None
        advice = advise(rows[name], probe.module, probe.path(model), start, fed, probe.blocks)
        rows[name] = replace(rows[name], advice=tuple(advice))
    return tuple(rows.values())


def _broken_before(model: nn.Module, inputs: Any) -> Iterator[Failure]:
    """Parameters, buffers and inputs that are not finite before the forward."""
    named = [("parameter", name, t) for name, t in (*model.named_parameters(), *model.named_buffers())]
    named += [("batch", "its inputs", t) for t in tensors_in(inputs)]
    for stage, name, tensor in named:
        if tensor.is_floating_point() and not tensor.isfinite().all():
            yield Failure("NaN" if tensor.isnan().any() else "infinity", stage, name)


def _forward_failures(log: OperationLog, error: Exception | None) -> Iterator[Failure]:
    """Where the forward stopped being finite, the cause before what followed from it."""
    if log.infinity is not None:
        yield Failure("infinity", "forward", **vars(log.infinity))
    if log.nan is not None:
        yield Failure("NaN", "forward", **vars(log.nan))
    elif error is not None and log.infinity is None:
        kind = type(error).__name__.lstrip("_")
        yield Failure(f"{kind}: {error}", "forward", **vars(log.failed or Call(kind, "", None, None)))


def _stand_in(output: Any) -> Tensor:
    """A loss for models that are diagnosed without one."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    values = list(output.values()) if isinstance(output, Mapping) else output
    tensors = [t for t in tensors_in(values) if t.is_floating_point() and t.requires_grad]
    if not tensors:
        raise ValueError(
            f"diagnose needs an output that depends on the parameters; got {type(output).__name__} without one. Pass a "
            "loss_fn that makes one number of it."
        )
    if len(tensors) == 1 and tensors[0].numel() == 1:
        return tensors[0]
    rng = torch.Generator().manual_seed(0)
    weights = [torch.randn(t.shape, generator=rng).to(t) for t in tensors]
    return torch.stack([(t * w).mean() for t, w in zip(tensors, weights, strict=True)]).sum()


def _loss(loss_fn: Callable[..., Tensor] | None, output: Any, target: Any) -> Tensor:
    if loss_fn is None:
        return _stand_in(output)
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


def _expression(batch: Any, first: Any, inputs: Any) -> str | None:
    """How to write the input tensor in terms of the batch; None if it is not one tensor."""
    if not isinstance(inputs, Tensor):
        return None
    name = "batch" if batch is first or isinstance(batch, Mapping) else "next(iter(loader))"
    if isinstance(first, Tensor):
        return name
    if isinstance(first, dict):
        return next(f"{name}[{key!r}]" for key, value in first.items() if value is inputs)
    return f"{name}[0]"


def _checked(layers: int, has_svd: bool, decomposes: bool, has_loss: bool) -> str:
    """What was looked at and what was not, where that is not the whole."""
    parts = []
    if not has_svd:
        rest = "" if decomposes else ", nor differentiates through eigh or svd"
        parts.append(
            "Checked: whether all values are finite, forward and backward; weight, output covariance and gradient of "
            f"{layers} layer{'' if layers == 1 else 's'}. The model has no SVD layer of orthocond{rest}, so no "
            "covariance that a layer decomposes was checked, and a large κ of the outputs needs no cure by itself."
        )
    if not has_loss:
        parts.append("No loss_fn was given: κ gradient is that of a stand-in for the loss.")
    return "\n".join(parts)
