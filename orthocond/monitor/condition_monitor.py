"""`ConditionMonitor`: what happens to covariances, weights and gradients while a model trains."""

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from orthocond._checks import check_count, check_not_negative
from orthocond._closures import Arguments, after_closure
from orthocond._layers import groups_of
from orthocond.layers import SVDLayer
from orthocond.matrix import solver_failures
from orthocond.monitor.data_flow import FlowTrace, PreSVDLayer, describe
from orthocond.monitor.deferred_spectra import DeferredSpectra
from orthocond.monitor.history import KEYS, History, Path_, Record, ScalarWriter
from orthocond.monitor.layer_names import find_layer, svd_layers, unwrap
from orthocond.monitor.model_call import is_compiled
from orthocond.monitor.output_covariance import covariance_of
from orthocond.monitor.plotting import plot
from orthocond.steps.treatment import attached

Listener = Callable[[Tensor], None]

# Forwards of one step that are kept for each layer; more come only from very long gradient accumulation.
_FORWARDS = 64


class ConditionMonitor:
    r"""Record the conditioning of covariances, Pre-SVD weights and their gradients during training.

    For each watched layer and step: rank, largest and smallest eigenvalue of the covariance P, :math:`\kappa(P +
    \varepsilon I)` and :math:`\kappa` of P on its range; the same of the Pre-SVD weight W and of its gradient; the step
    length η and occurrence of OLR; decompositions that failed. `History` lists the keys of a record.

    Covariances are those that the layers compute anyway in training forwards; evaluation is not recorded. A step is one
    of the optimizer that moves the Pre-SVD weight. Gradients are read when that step begins, before the treatments of
    `treat`: accumulated, averaged by DDP, unscaled, and not yet made orthogonal. A parametrized weight counts as the
    layer uses it, and its gradient is that of the raw parameter. Weights are read before the step too. In
    ``step(closure)`` both are read after the first call of the closure. Loops without a torch optimizer call `step`.

    It neither copies nor wraps anything: the model can be copied, pickled, evaluated, compiled or wrapped in
    DistributedDataParallel meanwhile, and several monitors can watch one model. Facts are computed in float64 when 16
    MB of small matrices have been collected or when the history is read, so a step does not wait for the device.

    Args:
        model: The model.
        every: Interval of steps that are recorded.
        layers: Layers to watch, as modules or names; None watches all SVD layers. For any other layer the covariance of
            its output channels is computed, and the weight is the one that makes this output.
        eps: Ridge in the condition number of the covariance; None takes that of each layer, 0 for those without one.
        rank_tol: Eigenvalues of the covariance at or below this fraction of the largest count as zero. The default is
            above the rounding of float32 features; for bfloat16 take 1e-4.
        matrices: At most this many of the covariances of one forward are read, evenly spaced, where a layer
            computes one for each group or image.
        pre_svd: For each watched layer the name of its Pre-SVD layer, or what `pre_svd_layer` found; None follows the
            data flow of the first forward, which is not possible in compiled models.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If there is nothing to watch, a layer is not part of the model, or a setting is not valid.
        RuntimeError: If it is started twice.

    Accuracy:
        Singular values of weights and gradients come from the smaller Gram matrix: those below 1e-7 of the largest are
        not resolved, which is below the rounding of float32 weights. Covariance spectra are those of `spectrum`.

    Example:
        >>> from torch import nn
        >>> from orthocond.layers import DecorrelatedBatchNorm2d
        >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), DecorrelatedBatchNorm2d(16))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with ConditionMonitor(model) as monitor:
        ...     for _ in range(3):
        ...         optimizer.zero_grad()
        ...         model(torch.randn(8, 3, 8, 8)).square().mean().backward()
        ...         optimizer.step()
        >>> monitor.history.columns("1")["rank"]
        [16, 16, 16]
        >>> monitor.history[0]["pre_svd"]
        '0.weight'

    References:
        Song, Sebe, Wang (2022), sections 3.1 and 6.1; the figures of covariance conditioning.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 1,
        layers: Iterable[nn.Module | str] | None = None,
        eps: float | None = None,
        rank_tol: float = 1e-12,
        matrices: int = 16,
        pre_svd: Mapping[str, str | PreSVDLayer] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"ConditionMonitor needs a torch.nn.Module; got {type(model).__name__}.")
        check_count(every, "ConditionMonitor(every=...)", 1)
        check_count(matrices, "ConditionMonitor(matrices=...)", 1)
        if eps is not None:
            check_not_negative(eps, "ConditionMonitor(eps=...)")
        self.every = every
        self._rank_tol = check_not_negative(rank_tol, "ConditionMonitor(rank_tol=...)")
        self._limit = matrices
        self._compiled = is_compiled(model)
        self._model = unwrap(model)
        self._watched = _choose(self._model, layers, eps)
        if self._compiled and not all(isinstance(w.module, SVDLayer) for w in self._watched.values()):
            raise ValueError("ConditionMonitor can watch only SVD layers in a compiled model; watch it uncompiled.")
        self._set_pre_svd(pre_svd)
        self._history = History()
        self._written: dict[tuple[int, str], tuple[ScalarWriter, int]] = {}
        self._spectra = DeferredSpectra()
        self._step = 0
        self._stepping: Optimizer | None = None
        self._forwarded = False
        self._handles: list[Any] = []
        self._trace: FlowTrace | None = None

    def _set_pre_svd(self, pre_svd: Mapping[str, str | PreSVDLayer] | None) -> None:
        self._automatic = pre_svd is None
        for layer, source in (pre_svd or {}).items():
            if layer not in self._watched:
                raise ValueError(
                    f"ConditionMonitor(pre_svd=...) needs names of watched layers; got {layer!r}, and these are "
                    f"watched: {', '.join(map(repr, self._watched))}."
                )
            if not isinstance(source, PreSVDLayer):
                source = PreSVDLayer(*find_layer(self._model, source, "ConditionMonitor(pre_svd=...)"))
            if not isinstance(getattr(source.module, source.attribute, None), Tensor):
                raise ValueError(f"ConditionMonitor(pre_svd=...) needs layers with a weight; {source.name!r} has none.")
            self._watched[layer].pre_svd = source

    # Life cycle

    def start(self) -> Self:
        """Begin to record."""
        if self._handles:
            raise RuntimeError("This monitor is running already; stop() it first, or make a second one.")
        if self._automatic and self._compiled:
            _warn_no_weight("the model is compiled, so the flow of data cannot be seen")
        self._failures = solver_failures.count
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        for w in self._watched.values():
            self._handles.append(self._watch(w))
        if self._automatic and not self._compiled and not all(w.traced for w in self._watched.values()):
            layers = {name: w.module for name, w in self._watched.items()}
            self._trace = FlowTrace(self._model, layers, outputs=True).__enter__()
        return self

    def stop(self, *, warn: bool = True) -> None:
        """End recording; the model is then as before. A second call does nothing.

        Args:
            warn: Whether to warn if there were training forwards but no step. A loop that may end before its first
                step, by an error or a signal, passes False.
        """
        unused = self._handles and not self._step and any(w.covariances for w in self._watched.values())
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._end_trace()
        self._stepping = None
        for w in self._watched.values():
            w.covariances.clear()
        if warn and unused:
            warnings.warn(
                "The monitor saw training forwards but no step of a torch optimizer that owns the model's parameters, "
                "so it recorded nothing. Call monitor.step() where your loop makes a step.",
                RuntimeWarning,
                stacklevel=2,
            )

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stop(warn=kind is None)

    def state_dict(self) -> dict[str, int]:
        """What a resumed training needs to go on recording at the same steps; the history is not in it."""
        return {"step": self._step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Count steps from where `state_dict` was taken."""
        self._step = state["step"]

    def __repr__(self) -> str:
        state = "running" if self._handles else "stopped"
        return f"ConditionMonitor of {', '.join(self._watched)}, every={self.every}, {self._step} steps, {state}"

    # What was recorded

    @property
    def history(self) -> History:
        """The records so far. Reading it computes what waits, and so waits for the device."""
        self._spectra.settle()
        return self._history

    def to_json(self, path: Path_) -> None:
        """Write the history as JSON; `History.from_json` reads it."""
        self.history.to_json(path)

    def to_csv(self, path: Path_) -> None:
        """Write the history as a table."""
        self.history.to_csv(path)

    def to_tensorboard(self, writer: ScalarWriter, prefix: str = "conditioning") -> None:
        """Write what is new to an object with ``add_scalar``, such as TensorBoard's ``SummaryWriter``.

        A second call with the same writer and prefix writes only the records since the first one, so you can call it in
        the training loop. `History.to_tensorboard` writes all.
        """
        history = self.history
        key = id(writer), prefix
        _, start = self._written.get(key, (writer, 0))
        History(history[start:]).to_tensorboard(writer, prefix)
        self._written[key] = writer, len(history)  # with the writer itself, so that its id stays its own

    def plot(
        self,
        target: Any = None,
        *,
        quantity: str = "condition",
        layer: str | None = None,
        compare: "Mapping[str, ConditionMonitor | History] | None" = None,
        title: str | None = None,
    ) -> Any:
        """Draw a quantity over the steps: the conditioning figure of the paper.

        Args:
            target: Path of the file to write, or matplotlib axes to draw on; None makes a new figure.
            quantity: A key of the records, such as ``"condition"``, ``"weight_condition"`` or ``"eta"``.
            layer: Layer to draw; None draws all.
            compare: Monitors or histories to draw instead, by their name in the legend.
            title: Title of the figure.

        Returns:
            The axes.

        Raises:
            ImportError: If matplotlib is not installed.
            ValueError: If there is nothing to draw.
        """
        runs: Mapping[str, ConditionMonitor | History] = {"": self} if compare is None else compare
        histories = {name: run.history if isinstance(run, ConditionMonitor) else run for name, run in runs.items()}
        return plot(target, compare=histories, quantity=quantity, layer=layer, title=title)

    # Recording

    def step(self) -> None:
        """Record a step that no torch optimizer makes: call it after ``backward()``, before the weights change."""
        if not self._handles:
            raise RuntimeError("This monitor is not running; start() it, or use it in a with statement.")
        self._read_weights()
        self._finish_step(None)

    def _watch(self, w: "_Watched") -> Any:
        def observe(covariance: Tensor) -> None:
            self._forwarded = True
            if self._step % self.every == 0:
                w.covariances.append(_evenly_spaced(covariance.detach(), self._limit))

        if isinstance(w.module, SVDLayer):
            observer = torch.compiler.disable(observe) if self._compiled else observe
            return _Subscription(w.module, observer)

        def after_forward(module: nn.Module, args: object, output: object) -> None:
            if module is w.module and module.training and self._step % self.every == 0:
                with torch.no_grad():
                    observe(covariance_of(module, output))

        return register_module_forward_hook(after_forward)

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        # An optimizer whose step calls that of its base class calls each hook twice; for the second call treatments
        # have acted already. After a step that failed there is another forward.
        if not ((self._stepping is None or self._forwarded) and self._is_clock(optimizer)):
            return None
        self._stepping, self._forwarded = optimizer, False

        def read(calls: int = 1) -> None:
            if calls == 1:
                self._read_weights(getattr(optimizer, "grad_scale", None))

        arguments = after_closure(args, kwargs, read)
        if arguments is None:
            read()
        return arguments

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if self._stepping is optimizer:
            self._stepping = None
            self._finish_step(optimizer)

    def _is_clock(self, optimizer: Optimizer) -> bool:
        """Whether it moves the first trainable Pre-SVD weight, or, if there is none, the model's first parameter."""
        self._take_trace()
        weights = [p for w in self._watched.values() if (p := w.parameter()) is not None]
        trainable = (p for p in (*weights, *self._model.parameters()) if p.requires_grad)
        first = next(trainable, None)
        return any(p is first for group in optimizer.param_groups for p in group["params"])

    @torch.no_grad()
    def _read_weights(self, grad_scale: Tensor | None = None) -> None:
        self._take_trace()
        if self._step % self.every:
            return
        for w in self._watched.values():
            w.record = dict.fromkeys(KEYS) | {"step": self._step, "layer": w.name, "matrices": 0}
            if w.pre_svd is None:
                continue
            w.record["pre_svd"] = str(w.pre_svd)
            groups = groups_of(w.pre_svd.module, w.pre_svd.attribute)
            self._spectra.add_matrix(w.record, "weight_", w.pre_svd.weight(), groups)
            gradient = getattr(w.parameter(), "grad", None)
            if gradient is not None and gradient.layout is torch.strided:
                gradient = gradient if grad_scale is None else gradient / grad_scale
                self._spectra.add_matrix(w.record, "gradient_", gradient, groups)

    def _finish_step(self, optimizer: Optimizer | None) -> None:
        recorded = self._step % self.every == 0
        self._step += 1
        if not recorded:
            return
        for w in self._watched.values():
            covariances, w.covariances = list(w.covariances), deque(maxlen=_FORWARDS)
            if covariances:
                joined = torch.cat(covariances)
                w.record |= {"size": joined.shape[-1], "matrices": len(joined)}
                self._spectra.add_covariances(w.record, joined, w.eps, self._rank_tol)
            if optimizer is not None:
                self._read_rates(w, optimizer)
            w.record["solver_failures"] = solver_failures.count - self._failures
            self._history.append(w.record)
        if self._spectra.full:
            self._spectra.settle()

    def _read_rates(self, w: "_Watched", optimizer: Optimizer) -> None:
        raw = w.parameter()
        for treatment in attached.get(optimizer, []):
            for treated in treatment.weights:
                if treated.parameter is raw and treated.rates:
                    self._spectra.add_scalar(w.record, "eta", treated.rates[-1])
                    shortened = torch.as_tensor(treated.shortened)
                    self._spectra.add_scalar(w.record, "olr_occurrence", shortened, treated.steps)

    def _take_trace(self) -> None:
        """Take what the forwards so far showed, and look no further when all is known."""
        if self._trace is None:
            return
        for name, found in self._trace.found.items():
            w = self._watched[name]
            if len(found) == 1:
                w.pre_svd = found[0]
            elif not w.traced:
                _warn_no_weight(f"the layers that feed {name!r} are {describe(found)}")
            w.traced = True
        if all(w.traced for w in self._watched.values()):
            self._end_trace()

    def _end_trace(self) -> None:
        if self._trace is not None:
            self._trace.__exit__()
            self._trace = None


@dataclass
class _Watched:
    """One watched layer, and what is collected of it during a step."""

    name: str
    module: nn.Module
    eps: float
    pre_svd: PreSVDLayer | None = None
    traced: bool = False
    covariances: deque[Tensor] = field(default_factory=lambda: deque(maxlen=_FORWARDS))
    record: Record = field(default_factory=dict)

    def parameter(self) -> Tensor | None:
        """The parameter whose gradient is read."""
        return None if self.pre_svd is None else self.pre_svd.parameter()


class _Observers:
    """The observer of a layer that several listen to, after the one that was there before."""

    def __init__(self, before: Listener | None) -> None:
        self.before = before
        self.listeners: list[Listener] = []

    def __call__(self, covariance: Tensor) -> None:
        if self.before is not None:
            self.before(covariance)
        for listener in self.listeners:
            listener(covariance)


class _Subscription:
    """One listener of one layer; `remove` leaves the others."""

    def __init__(self, layer: SVDLayer, listener: Listener) -> None:
        self.layer, self.listener = layer, listener
        if not isinstance(layer.observer, _Observers):
            layer.observer = _Observers(layer.observer)
        layer.observer.listeners.append(listener)

    def remove(self) -> None:
        """End it."""
        observers = self.layer.observer
        if not isinstance(observers, _Observers) or self.listener not in observers.listeners:
            return  # somebody put another observer in its place
        observers.listeners.remove(self.listener)
        if not observers.listeners:
            self.layer.observer = observers.before


def _choose(model: nn.Module, layers: Iterable[nn.Module | str] | None, eps: float | None) -> dict[str, _Watched]:
    """The layers to watch, by name."""
    if isinstance(layers, (str, nn.Module)):
        layers = [layers]
    chosen = svd_layers(model) if layers is None else dict(find_layer(model, x, "ConditionMonitor") for x in layers)
    if not chosen:
        raise ValueError(
            "ConditionMonitor needs a layer to watch, and this model has no SVD layer (DecorrelatedBatchNorm, "
            "CovariancePool2d, WhitenColor2d). Name the layers whose output you want to watch: layers=['conv1']."
        )
    ridge = {name: getattr(m, "eps", 0.0) if isinstance(m, SVDLayer) else 0.0 for name, m in chosen.items()}
    return {name: _Watched(name, m, ridge[name] if eps is None else eps) for name, m in chosen.items()}


def _evenly_spaced(covariance: Tensor, limit: int) -> Tensor:
    """At most ``limit`` matrices ``(k, d, d)``, evenly spaced; a copy where it leaves most out."""
    matrices = covariance.reshape(-1, *covariance.shape[-2:])
    stride = -(-len(matrices) // limit)
    return matrices if stride <= 1 else matrices[::stride].clone()


def _warn_no_weight(why: str) -> None:
    warnings.warn(
        f"ConditionMonitor records no weight and gradient, since {why}. Name the layer, as in "
        "pre_svd={'bn1': 'conv1'}, or pass pre_svd={} to go without.",
        RuntimeWarning,
        stacklevel=2,
    )
