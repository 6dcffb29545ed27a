"""`LayerProbe`: what one forward and backward show of one layer."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from orthocond._layers import groups_of
from orthocond.layers import CovariancePool2d, SVDLayer, WhitenColor2d
from orthocond.matrix import matrix_view
from orthocond.matrix.spectra import Spectrum, singular_spectrum
from orthocond.monitor.data_flow import FlowTrace, PreSVDLayer
from orthocond.monitor.deferred_spectra import eigenvalues_or_nan, gram_matrices, spectrum_of
from orthocond.monitor.diagnosis import LayerDiagnosis
from orthocond.monitor.layer_names import path_of
from orthocond.monitor.output_covariance import channels_of, covariance_of, feature_tolerance

# Ridge for layers that have none of their own: that of torch's normalization layers.
_EPS = 1e-5
_PROJECTIONS = {"q_proj_weight": 0, "k_proj_weight": 1, "v_proj_weight": 2}


@dataclass
class LayerProbe:
    """One layer, and what the forward and backward showed of it.

    Args:
        layer: Name of the module in the model.
        module: The module.
        attribute: Name of its weight.
        ridge: Ridge in the condition numbers of covariances; None takes that of the layer.
        attention: The attention module that uses the weight without calling the module.
    """

    layer: str
    module: nn.Module
    attribute: str
    ridge: float | None
    attention: nn.MultiheadAttention | None = None
    covariances: Tensor | None = field(default=None, init=False)
    samples: int = field(default=0, init=False)
    dtype: torch.dtype = field(default=torch.float32, init=False)
    first: bool = field(default=False, init=False)  # whether its input is the model's
    gradient: Tensor | None = field(default=None, init=False)

    @property
    def weight(self) -> PreSVDLayer:
        """Where its weight is."""
        return PreSVDLayer(self.layer, self.module, self.attribute)

    @property
    def name(self) -> str:
        """Name of its row: that of the module, with the weight if that is not its ``weight``."""
        return self.weight.row_name

    @property
    def blocks(self) -> int:
        """Blocks of rows, query, key and value, of a weight that several projections share."""
        return 3 if self.attribute == "in_proj_weight" else 1

    @property
    def eps(self) -> float:
        """The ridge of its covariance."""
        if self.ridge is not None:
            return float(self.ridge)
        return float(getattr(self.module, "eps", 0.0)) if isinstance(self.module, SVDLayer) else _EPS

    def path(self, model: nn.Module) -> str:
        """The expression for what advice acts on: the module, or a weight of another name."""
        path = path_of(model, self.layer)
        return path if self.attribute == "weight" else f"{path}.{self.attribute}"

    def attach(self, trace: FlowTrace) -> Any:
        """Watch the next forwards; returns a handle to end it."""
        if self.attention is not None:
            return self.attention.register_forward_hook(self._after_attention, with_kwargs=True)

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            x = next((a for a in args if isinstance(a, Tensor)), output)
            self.first = x.grad_fn in trace.inputs
            self.dtype, self.samples = output.dtype, _samples(module, x, output)
            if not isinstance(module, SVDLayer):
                self._observe(covariance_of(module, output))

        if isinstance(self.module, SVDLayer):
            self.module.observer = self._observe
        return self.module.register_forward_hook(after)

    @torch.no_grad()
    def _after_attention(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Take the outputs of its projections, which no module returns."""
        if self.attribute == "weight":
            results = [output[0]]
        else:
            weight, bias = self.weight.weight(), module.in_proj_bias
            inputs = [*args, *(kwargs[k] for k in ("query", "key", "value") if k in kwargs)][:3]
            weights = list(weight.chunk(self.blocks))
            biases = [None] * 3 if bias is None else list(bias.chunk(3))
            if self.blocks == 1:
                place = _PROJECTIONS[self.attribute]
                inputs, biases = [inputs[place]], [biases[place]]
            results = [F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True)]
        rows = [y.reshape(-1, y.shape[-1]) for y in results]
        self.dtype, self.samples = rows[0].dtype, len(rows[0])
        self._observe(torch.cat([covariance_of(nn.Identity(), y) for y in rows]))

    def _observe(self, covariance: Tensor) -> None:
        """Take the covariance of this forward."""
        self.covariances = covariance.detach().reshape(-1, *covariance.shape[-2:])

    def parameter(self) -> Tensor | None:
        """The parameter of which the gradient is taken."""
        return None if isinstance(self.module, SVDLayer) else self.weight.parameter()

    def row(self) -> LayerDiagnosis:
        """The facts."""
        facts: dict[str, Any] = {"kind": parametrize.type_before_parametrizations(self.module).__name__}
        groups = max(self.blocks, groups_of(self.module, self.attribute))
        if not isinstance(self.module, SVDLayer):
            weight = self.weight.weight()
            found = _singular(weight, groups)
            facts |= {"weight_shape": tuple(weight.shape), "weight_rank": _median_rank(found)}
            facts |= {"weight_condition": float(found.condition.median())}
        if self.covariances is not None:
            values = eigenvalues_or_nan(self.covariances.double())
            found = spectrum_of(values, self.eps, feature_tolerance(self.dtype))
            facts |= {"size": found.size, "samples": self.samples, "rank": _median_rank(found), "eps": self.eps}
            facts |= {key: float(getattr(found, key).nanmedian()) for key in ("condition", "condition_on_range")}
        if self.gradient is not None:
            found = _singular(self.gradient, groups)
            facts |= {"gradient_rank": _median_rank(found), "gradient_condition": float(found.condition.median())}
        return LayerDiagnosis(name=self.name, **facts)


def _samples(module: nn.Module, x: Tensor, output: Tensor) -> int:
    """How many samples one covariance has."""
    if isinstance(module, CovariancePool2d) or (isinstance(module, WhitenColor2d) and module.per == "image"):
        return x[0, 0].numel()
    if isinstance(module, SVDLayer):
        return x[:, 0].numel()
    return output.numel() // channels_of(module, output)


def _median_rank(found: Spectrum) -> int | None:
    """The median rank; None if nothing finite was decomposed."""
    known = found.rank[~found.eigenvalues.isnan().any(-1)]
    return int(known.median()) if known.numel() else None


def _singular(tensor: Tensor, groups: int) -> Spectrum:
    """The spectrum of a weight or gradient; by Gram matrices, ten times as fast, where they lose nothing."""
    if tensor.dtype == torch.float64 and bool(tensor.isfinite().all()):
        return singular_spectrum(matrix_view(tensor, groups))
    gram, tol = gram_matrices(tensor, groups)
    return spectrum_of(eigenvalues_or_nan(gram).clamp(min=0).sqrt(), 0.0, tol)
