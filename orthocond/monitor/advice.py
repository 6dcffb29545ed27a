"""What would help a layer, in plain words and as a line of code."""

import ast
import inspect
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from orthocond._layers import CONVOLUTIONS
from orthocond.layers import DecorrelatedBatchNorm1d, DecorrelatedBatchNorm2d, DecorrelatedBatchNorm3d, SVDLayer
from orthocond.matrix import Eigh, NewtonSchulz, Pade, Solver, Taylor
from orthocond.monitor.diagnosis import Advice, LayerDiagnosis, number
from orthocond.monitor.operations import DecompositionCall
from orthocond.steps.treatment import attached

# Condition numbers from which advice is given. At 100 the approximate inverse roots are off by 30 % and more, and the
# gradient of P^-1/2 is a thousand times larger in the weakest direction than in the strongest. Many weights have 1,000
# from their initialization on.
_HIGH = 100.0
_HIGH_WEIGHT = 1e4
# Condition number up to which an output is as good as white.
_WHITE = 2.0
# Columns of the weight up to which a running metric costs little: it decomposes their covariance in each forward.
_COLUMNS = 256

# Names under which torch has eigenvectors.
_DECOMPOSITIONS = ("eigh", "eig", "svd", "svd_lowrank", "pca_lowrank")

_WHITENINGS = (DecorrelatedBatchNorm1d, DecorrelatedBatchNorm2d, DecorrelatedBatchNorm3d)

# Facts, module and expression of an SVD layer.
FedLayer = tuple[LayerDiagnosis, nn.Module, str]


def advise(
    row: LayerDiagnosis, module: nn.Module, path: str, source: str | None, fed: Sequence[FedLayer], groups: int = 1
) -> Iterator[Advice]:
    """What would help one layer.

    Args:
        row: Its facts.
        module: The layer.
        path: Expression for it.
        source: Expression for its input, if that is the input of the model.
        fed: Facts, module and expression of the SVD layers whose Pre-SVD layer it is.
        groups: Blocks of rows of a weight that is given by itself, not as a module.
    """
    if row.size is None:
        yield Advice("The batch did not pass through it.")
    elif row.rank is None:
        yield Advice("Its covariance is not finite.")
    elif row.rank == 0:
        yield Advice("Its covariance is zero: all samples are the same, so nothing reaches the layers after it.")
    elif isinstance(module, SVDLayer):
        yield from _of_svd_layer(row, module, path)
    elif fed:
        yield from _of_rank(row, module, fed)
        yield from _of_condition(row, module, path, source, max(_worst(s) for s, _, _ in fed))
        yield from _of_gradient(row, module, path)
    elif row.weight_condition is not None and row.weight_condition > _HIGH_WEIGHT:
        text = f"Its weight has condition number {number(row.weight_condition)}; a penalty brings it down."
        blocks = f", groups={groups}" if groups > 1 else ""
        yield Advice(text, f"loss = loss + 1e-2 * oc.orthogonality_loss({path}{blocks})")


def advise_decomposition(found: DecompositionCall) -> Iterator[Advice]:
    """The line that replaces a call of ``eigh`` or ``svd``, and the layer if there is one."""
    call = found.call
    text = f"The gradient of {call.operation}" + (f" ({call.location})" if call.location else "")
    text += " divides by differences of eigenvalues."
    size = min(found.shape[-2:])
    if found.ties:
        rank = f" (least rank {found.rank} of {size})" if found.rank is not None and found.rank < size else ""
        text += f" {found.ties} of {found.matrices} matrices have equal ones{rank}, where it is NaN or noise."
    matrix = _argument(call.source)
    ridge = f", eps={found.ridge:g}" if found.ridge else ""
    if found.shape[-1] != found.shape[-2]:
        yield Advice(f"{text} The nearest orthogonal matrix U Vᵀ without it:", f"oc.polar({matrix})")
    elif found.power == -0.5:
        layer = f" As a layer it is oc.DecorrelatedBatchNorm2d({size})." if found.matrices == 1 else ""
        yield Advice(f"{text}{layer} The inverse root with the exact gradient:", f"oc.inv_sqrtm({matrix}{ridge})")
    elif found.power == 0.5:
        layer = " As a layer it is oc.CovariancePool2d()." if len(found.shape) > 2 else ""
        yield Advice(f"{text}{layer} The root with the exact gradient:", f"oc.sqrtm({matrix}{ridge})")
    else:
        text += f" oc.sqrtm({matrix}) and oc.inv_sqrtm({matrix}) have the exact one, if it is a root that you compute."
        yield Advice(text)


def _argument(source: str | None) -> str:
    """The matrix that a line of code decomposes, as written there."""
    try:
        tree = ast.parse(source or "")
    except SyntaxError:  # one line of several
        return "cov"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _DECOMPOSITIONS:
            whole = ast.unparse(node.func.value)
            of_torch = whole in ("torch", "torch.linalg", "linalg", "LA", "th", "th.linalg")
            if of_torch and node.args:
                return ast.unparse(node.args[0])
            return whole if not of_torch else "cov"
    return "cov"


def _of_svd_layer(row: LayerDiagnosis, module: SVDLayer, path: str) -> Iterator[Advice]:
    if not row.fed_by:
        yield Advice("Its input depends on no weight, so no treatment of a weight can help; its eps can.")
    if len(row.fed_by) > 1:
        yield Advice(f"Several layers feed it: {', '.join(row.fed_by)}. Its condition depends on all of them.")
    if row.rank is not None and row.samples is not None and row.rank < row.samples <= (row.size or 0):
        text = f"Rank {row.rank} of {row.size} by construction: {row.samples} samples in each covariance."
        exact = isinstance(module.solver, Eigh) and row.eps == 0
        yield Advice(text + (" Zero eigenvalues are left out, in the gradient too." if exact else ""))
    if isinstance(module.solver, (NewtonSchulz, Pade, Taylor)) and (row.condition or 0) > _HIGH:
        text = f"{module.solver} is a regularizer at condition {number(row.condition)}, not a root. The exact one:"
        yield Advice(text, f"{path}.solver = oc.Eigh()")


def _of_rank(row: LayerDiagnosis, module: nn.Module, fed: Sequence[FedLayer]) -> Iterator[Advice]:
    if row.rank is None or row.size is None or row.rank == row.size or all(svd.rank == svd.size for svd, _, _ in fed):
        return
    bound, why = _bound(row, module)
    if row.rank == bound:
        text = f"Rank {row.rank} of {row.size} by construction: {why}."
    else:
        text = f"Rank {row.rank} of {row.size}, where {min(bound, row.size)} is possible: channels combine others."
    groups = _groups(row.size, row.rank)
    for _, svd, path in fed:
        fits = isinstance(svd, _WHITENINGS) and svd.num_features == row.size and groups > svd.groups
        if fits and svd.follows is None:  # groups would have fewer channels than inputs, and could not follow
            text += " Groups of channels can have full rank; an optimizer is made after such a change:"
            yield Advice(text, _regrouped(svd, path, groups))
            return
    yield Advice(text)


def _regrouped(layer: Any, path: str, groups: int) -> str:
    """Code that puts a layer with more groups in the place of this one, with its settings and what it has learned."""
    settings = [str(layer.num_features)]
    for name, parameter in inspect.signature(type(layer)).parameters.items():
        if name in ("num_features", "groups", "process_group", "device", "dtype") or (
            name == "bias" and not layer.affine
        ):
            continue
        value = layer.bias is not None if name == "bias" else getattr(layer, name)
        if value != parameter.default:
            settings.append(f"{name}={'oc.' if isinstance(value, Solver) else ''}{value!r}")
    like = next((t for t in (layer.weight, layer.running_mean) if t is not None), torch.empty(0))
    if like.device.type != "cpu":
        settings.append(f"device={str(like.device)!r}")
    if like.dtype != torch.get_default_dtype():
        settings.append(f"dtype={like.dtype}")
    made = f"oc.{type(layer).__name__}({', '.join([*settings, f'groups={groups}'])})" + (
        "" if layer.training else ".eval()"
    )
    untrained = layer.num_batches_tracked is not None and int(layer.num_batches_tracked) == 0
    if untrained or layer.average != "covariance":
        return f"{path} = {made}"
    lines = [f"regrouped = {made}", f"regrouped.load_state_dict({path}.state_dict())"]
    if layer.affine:  # an optimizer owns them
        lines.append(f"regrouped.weight, regrouped.bias = {path}.weight, {path}.bias")
    return "\n".join([*lines, f"{path} = regrouped"])


def _bound(row: LayerDiagnosis, module: nn.Module) -> tuple[int, str]:
    """The largest rank that the covariance of the output can have, and why."""
    assert row.samples is not None
    bounds = [(row.samples - 1, f"{row.samples} samples")]
    if isinstance(module, nn.Linear):
        bounds.append((module.in_features, f"{module.in_features} input features"))
    elif isinstance(module, CONVOLUTIONS):
        kernel = "x".join(map(str, module.kernel_size))
        inputs = module.in_channels * math.prod(module.kernel_size)
        bounds.append((inputs, f"{module.in_channels} input channels x {kernel}"))
    return min(bounds)


def _groups(channels: int, rank: int) -> int:
    """The fewest equal groups of at most ``rank`` channels."""
    return next(g for g in range(1, channels + 1) if channels % g == 0 and channels // g <= rank)


def _of_condition(
    row: LayerDiagnosis, module: nn.Module, path: str, source: str | None, condition: float
) -> Iterator[Advice]:
    if not condition > _HIGH:
        return
    text = f"The covariance that it makes has condition number {number(condition)} on its range."
    columns = _columns(module)
    if row.condition_on_range is not None and row.condition_on_range < _WHITE:
        yield Advice(f"{text} Its own output has {number(row.condition_on_range)}; what lies between makes the rest.")
    elif parametrize.is_parametrized(module, "weight"):
        text += " Its weight is treated already; to exchange the treatment, take it off first:"
        yield Advice(text, f'torch.nn.utils.parametrize.remove_parametrizations({path}, "weight")')
    elif columns is not None and source is not None:
        yield Advice(f"{text} A start that whitens its input:", f"oc.whitening_init_({path}, {source})")
    elif columns is not None and columns <= _COLUMNS:
        yield Advice(f"{text} Orthogonal in the metric of its input:", f'oc.orthogonal({path}, metric="running")')
    else:
        yield Advice(f"{text} An orthogonal weight adds nothing to that of its input:", f"oc.orthogonal({path})")


def _columns(module: nn.Module) -> int | None:
    """Entries of the input patches that the weight multiplies; None where the input's covariance is of no use."""
    if isinstance(module, nn.Linear):
        return module.in_features
    if isinstance(module, CONVOLUTIONS):
        return module.in_channels // module.groups * math.prod(module.kernel_size)
    return None


def _of_gradient(row: LayerDiagnosis, module: nn.Module, path: str) -> Iterator[Advice]:
    if row.gradient_condition is None:
        yield Advice("Its weight has no gradient: it is frozen, or the loss does not depend on it.")
    elif math.isnan(row.gradient_condition):
        yield Advice("Its gradient is not finite.")
    elif row.gradient_condition > _HIGH and not _has_treated_gradient(module):
        text = f"Its gradient has condition number {number(row.gradient_condition)}; the nearest orthogonal one has 1:"
        yield Advice(text, f"oc.treat({path}, optimizer, gradient=oc.NearestOrthogonal(), lr=oc.OptimalLR())")


def _has_treated_gradient(module: nn.Module) -> bool:
    own = {id(parameter) for parameter in module.parameters()}
    treatments = [t for several in list(attached.values()) for t in several]
    return any(id(w.parameter) in own for t in treatments if t.gradient or t.manifold for w in t.weights)


def _worst(svd: LayerDiagnosis) -> float:
    return -1.0 if svd.condition_on_range is None else svd.condition_on_range
