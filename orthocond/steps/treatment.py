"""`treat`: act on chosen weights at the optimizer's step (paper: section 4)."""

from collections.abc import Callable, Iterable
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from orthocond._checks import NotFiniteError, check_count
from orthocond._closures import Arguments, after_closure
from orthocond._html import paragraph, table
from orthocond.steps._targets import find_optimizer, find_weights
from orthocond.steps._weight import MOMENTUM, StepStatistics, Weight, assign, batches, stack
from orthocond.steps.controls import FixedLR, RandomLR
from orthocond.steps.learning_rate import OptimalLR
from orthocond.steps.nearest import NearestOrthogonal
from orthocond.steps.stiefel import Stiefel

_KINDS = ("gradient", "lr", "manifold")
# The treatments attached to each optimizer, to refuse a second one of the same kind for a weight.
attached: WeakKeyDictionary[Optimizer, list["Treatment"]] = WeakKeyDictionary()


def treat(
    target: nn.Module | Tensor | Iterable[nn.Module | Tensor],
    optimizer: Optimizer,
    *,
    name: str | None = None,
    gradient: NearestOrthogonal | None = None,
    lr: OptimalLR | FixedLR | RandomLR | None = None,
    manifold: Stiefel | None = None,
    history: int = 1000,
    spectrum_every: int = 100,
) -> "Treatment":
    r"""Treat the gradient and the step length of chosen weights, or keep them orthogonal, at each step of an optimizer.

    With :math:`W` a treated weight as a matrix (see `matrix_view`), ``optimizer.step()`` becomes

    1. ``gradient``: :math:`G \leftarrow U V^T`, the nearest orthogonal matrix of what has been accumulated in
       ``weight.grad``, just before the optimizer reads it;
    2. the optimizer's own step, :math:`W \to W - lr\, D`;
    3. ``lr``: :math:`W - \eta D` instead, on the update that was really made, with the η of `OptimalLR`. It equals a
       step with the learning rate η for every optimizer whose update is proportional to its learning rate (SGD with
       momentum and weight decay, Adam, AdamW, RMSprop, ...), and touches neither parameter group nor schedule.

    With ``manifold`` the weight is orthogonal from now on, and the optimizer's step of it is replaced by an orthogonal
    one; see `Stiefel`.

    It acts when the step is made, not when gradients arrive, so it is right under gradient accumulation, DDP and
    gradient scaling, where a tensor hook would orthogonalize parts of a gradient. In ``step(closure)`` it acts once the
    closure has been called. The whole matrix of a weight that fully_shard has sharded is gathered. Weights of one shape
    are processed as one batch.

    If a weight is parametrized (`orthogonal`, `spectral`, ...), its raw parameter is treated,
    ``module.parametrizations.weight.original``, because the optimizer owns no other. The gradient and the step length
    are those of that parameter, not of the weight that the layer computes with.

    The optimizer's ``state_dict`` does not change, but for the average gradient of `Stiefel`. A copy of the optimizer,
    by deepcopy or pickle, is not treated, as torch copies no hooks: call `treat` on the copy. The memory cost is one
    copy of each weight where ``lr``, ``of="update"`` or ``manifold`` is used, none otherwise. It lives during the step
    only, as does the working memory in float64 for the weights of one shape.

    The host reads few values from the device. NOG reads two per shape (how even and how small the singular values are;
    only the second one up to 32 rows), and one more each where the condition number of a larger one is above 8 and
    where the rank is not full. ``of="update"`` reads four for each weight (two of them: is the gradient finite, and the
    rounding of the weight), and ``manifold`` two. A fused optimizer under a GradScaler takes one more. OLR reads
    nothing.

    Args:
        target: A module with a ``weight``, a parameter, a model, or several of them. A module knows the groups of its
            convolution; a parameter is one matrix. A module without a ``weight`` is a model, and stands for all its
            matrices that can be trained and belong to the optimizer: the weights of linear layers and convolutions, and
            the input projections of ``nn.MultiheadAttention`` (query, key and value are a matrix each, also where they
            share one parameter). Biases, norms, embeddings, recurrent layers and parameters of other modules are not
            among them. `Treatment.statistics` names what was found.
        optimizer: The optimizer that owns the weights, or a wrapper of it such as SAM or Lookahead. Create it before
            you call `treat`.
        name: Name of the parameter within the modules, if it is not ``"weight"``.
        gradient: What to do with the gradient, or None.
        lr: How to choose the step length, or None. `FixedLR` and `RandomLR` are controls of `OptimalLR`.
        manifold: How to move orthogonal weights, or None. It cannot be combined with ``gradient`` or ``lr``.
        history: How many step lengths and spectra the statistics keep.
        spectrum_every: Interval of treated steps at which the singular values of the gradient are recorded before it
            is made orthogonal; 0 for never.

    Returns:
        A `Treatment`: ``remove()`` ends it, ``statistics`` says what it did. It is a context manager too.

    Raises:
        TypeError: If an argument is of the wrong kind or the optimizer is LBFGS, or at a step if a gradient is sparse.
        ValueError: If nothing is asked for, there is no weight, it is frozen, has fewer than two dimensions or does
            not belong to the optimizer; at a step, if a gradient is not finite and a direction or a step on a manifold
            is to be made of it. (`OptimalLR` alone reads no gradient, and leaves such a step to the optimizer.)
        RuntimeError: If a weight already has a treatment of this kind; at a step, if its closure is called twice.

    Example:
        >>> from orthocond.steps import NearestOrthogonal, OptimalLR, treat
        >>> conv = torch.nn.Conv2d(3, 8, 3)
        >>> optimizer = torch.optim.SGD(conv.parameters(), lr=0.1, momentum=0.9)
        >>> handle = treat(conv, optimizer, gradient=NearestOrthogonal(), lr=OptimalLR())
        >>> conv(torch.randn(2, 3, 5, 5)).square().mean().backward()
        >>> optimizer.step()
        >>> torch.linalg.svdvals(conv.weight.grad.flatten(1))
        tensor([1.0000, 1.0000, 1.0000, 1.0000, 1.0000, 1.0000, 1.0000, 1.0000])
        >>> handle
        Treatment of Conv2d.weight (8, 3, 3, 3) under SGD, 1 step:
          gradient=NearestOrthogonal(method='gram', rank_tol=None, of='gradient', scale=None)
          lr=OptimalLR(form='exact', gain=1.0, floor=0.1, guard=True)
        >>> handle.remove()

    References:
        Song, Sebe, Wang (2022), section 4.
    """
    if gradient is None and lr is None and manifold is None:
        raise ValueError(
            "treat needs something to do; pass gradient=NearestOrthogonal(), lr=OptimalLR(), or both, or "
            "manifold=Stiefel()."
        )
    _check_setting(gradient, "gradient", NearestOrthogonal)
    _check_setting(lr, "lr", OptimalLR, FixedLR, RandomLR)
    _check_setting(manifold, "manifold", Stiefel)
    if manifold is not None and (gradient is not None or lr is not None):
        raise ValueError("treat(manifold=...) replaces the whole step, so gradient= and lr= would have no effect.")
    if isinstance(lr, OptimalLR) and lr.form == "paper" and gradient is not None and gradient.of == "update":
        raise ValueError(
            "OptimalLR(form='paper') chooses a step along the gradient, NearestOrthogonal(of='update') leaves it; "
            "use OptimalLR(form='exact') or NearestOrthogonal(of='gradient')."
        )
    check_count(history, "treat(history=...)", 1)
    check_count(spectrum_every, "treat(spectrum_every=...)", 0)
    optimizer = find_optimizer(optimizer)
    weights = find_weights(target, optimizer, name, history)
    treatment = Treatment(weights, gradient, lr, manifold, spectrum_every, type(optimizer).__name__)
    treatment._attach(optimizer)
    return treatment


class Treatment:
    """Handle of the weights treated by one call of `treat`.

    Attributes:
        gradient: The setting of the gradient, or None.
        lr: The setting of the step length, or None.
        manifold: The setting of steps along a manifold, or None.
        weights: The treated weights, with what is counted of each.
    """

    def __init__(
        self,
        weights: list[Weight],
        gradient: NearestOrthogonal | None,
        lr: OptimalLR | FixedLR | RandomLR | None,
        manifold: Stiefel | None,
        spectrum_every: int,
        optimizer_name: str,
    ) -> None:
        self.gradient, self.lr, self.manifold = gradient, lr, manifold
        self.weights = weights
        self._spectrum_every = spectrum_every
        self._optimizer_name = optimizer_name
        self._pending: list[Weight] = []
        self._handles: list[Any] = []

    @property
    def statistics(self) -> list[StepStatistics]:
        """What was done to each weight, in the order given to `treat`. Reads values from the device."""
        return [w.statistics() for w in self.weights]

    def state_dict(self) -> dict[str, Any]:
        """The statistics as plain data and tensors, for a checkpoint.

        They change no step but those of `RandomLR`. A training that is resumed without them reports other counts.

        Returns:
            What `load_state_dict` takes.
        """
        return {"weights": [w.state() for w in self.weights]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the statistics of another handle.

        Args:
            state: What `state_dict` of a treatment of the same weights in the same order returned.

        Raises:
            ValueError: If the number of weights differs.
        """
        saved = state["weights"]
        if len(saved) != len(self.weights):
            raise ValueError(
                f"The treatment has {len(self.weights)} weights, the state {len(saved)}; treat the same weights again."
            )
        for w, found in zip(self.weights, saved, strict=True):
            w.load(found)

    def remove(self) -> None:
        """End the treatment; the optimizer is then as before. The statistics stay. A second call does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for optimizer, treatments in attached.items():
            if self in treatments:
                treatments.remove(self)
                if self.manifold is not None:
                    for w in self.weights:
                        optimizer.state[w.parameter].pop(MOMENTUM, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        names = self.weights[0].name if len(self.weights) == 1 else f"{len(self.weights)} weights"
        steps = max(w.steps for w in self.weights)
        state = f"{steps} step{'' if steps == 1 else 's'}" + ("" if self._handles else ", removed")
        settings = [f"\n  {kind}={value}" for kind in _KINDS if (value := getattr(self, kind)) is not None]
        return f"Treatment of {names} under {self._optimizer_name}, {state}:{''.join(settings)}"

    def _repr_html_(self) -> str:
        """The same with what was done to each weight, for notebooks. Reads values from the device."""
        header = ("weight", "steps", "without gradient", "skipped", "OLR acted", "at its floor", "last η")
        rows = []
        for s in self.statistics:
            counts = (s.steps, s.without_gradient, s.skipped, s.shortened, s.at_floor)
            rows.append((s.name, *map(str, counts), f"{s.rates[-1]:.3g}" if s.rates else ""))
        return paragraph(repr(self)) + table(header, rows, right=range(1, len(header)))

    def _attach(self, optimizer: Optimizer) -> None:
        """Check every weight against the optimizer, then register the hooks."""
        groups = _groups_by_parameter(optimizer)
        others = attached.setdefault(optimizer, [])
        for kind in _KINDS:
            if getattr(self, kind) is None:
                continue
            taken = {id(w.parameter) for t in others if t._excludes(kind) for w in t.weights}
            for w in self.weights:
                if id(w.parameter) in taken:
                    raise RuntimeError(
                        f"{w.name} would get two treatments of its {kind}; remove() the first one, or give it once."
                    )
                taken.add(id(w.parameter))
        for w in self.weights:
            if id(w.parameter) not in groups:
                raise ValueError(
                    f"{w.name} does not belong to the optimizer, which would never move it. Pass the optimizer that "
                    "was given this parameter; after fully_shard or a parametrization make the optimizer anew."
                )
            if self._needs_rate() and "lr" not in groups[id(w.parameter)]:
                raise ValueError(
                    f"This treatment needs parameter groups with an 'lr'; {self._optimizer_name} has none."
                )
        if self.manifold is not None:
            self._enter_manifold(self.manifold)
        others.append(self)
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            *(w.watch(self._optimizer_name) for w in self.weights),
        ]

    def _needs_rate(self) -> bool:
        """Whether the learning rates of the parameter groups are used."""
        fixed_length = self.gradient is not None and self.gradient.of == "update" and self.gradient.scale is not None
        return self.lr is not None or self.manifold is not None or fixed_length

    def _excludes(self, kind: str) -> bool:
        """Whether a weight of this treatment can have no other of a kind."""
        return self.manifold is not None or kind == "manifold" or getattr(self, kind) is not None

    @torch.no_grad()
    def _enter_manifold(self, manifold: Stiefel) -> None:
        """Put the weights on the manifold."""
        for w in self.weights:
            if ".parametrizations." in f".{w.name}":
                raise ValueError(
                    f"treat(manifold=...) needs a plain weight; {w.name} is only the raw parameter of one. Take the "
                    "parametrization off with torch.nn.utils.parametrize.remove_parametrizations first."
                )
        nearest = []
        for w in self.weights:
            try:
                nearest.append(manifold.nearest(w.matrices()))
            except ValueError as error:
                raise type(error)(f"{w.name} cannot be put on the manifold. {error}") from error
        for w, matrices in zip(self.weights, nearest, strict=True):  # only now: an error leaves all as they were
            if not _are_close(w.matrices(), matrices):  # those of a training that continues stay as they are
                assign(w.parameter.detach(), matrices)

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Act on the gradient now, or, where a closure makes it, as soon as that has been called."""
        self._pending = []

        def then(calls: int) -> None:
            if calls > 1:
                raise RuntimeError(
                    f"A treatment needs one gradient a step; {self._optimizer_name} has called its closure again "
                    "before the step was made. Treat an optimizer that calls it once, such as SGD or Adam."
                )
            self._use_gradients(optimizer)

        arguments = after_closure(args, kwargs, then)
        if arguments is None:
            self._use_gradients(optimizer)
        return arguments

    @torch.no_grad()
    def _use_gradients(self, optimizer: Optimizer) -> None:
        # A fused optimizer gets the scaled gradients from a GradScaler and skips the step itself if one is infinite.
        found_inf, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
        if found_inf is not None and found_inf.item():
            for w in self.weights:
                w.skipped += 1
            return
        active = [w for w in self.weights if w.has_gradient()]
        if self.gradient is not None and self.gradient.of == "gradient":
            self._orthogonalize_gradients(active, self.gradient, scale)
        elif self.gradient is not None:
            for w in active:  # now: at the update it would be too late, the weight has moved
                _check_finite([w], [w.gradient()], "NearestOrthogonal")
        if self.lr is not None or (self.gradient is not None and self.gradient.of == "update"):
            for w in active:
                w.before = w.parameter.detach().clone()
        if self._needs_rate():
            groups = _groups_by_parameter(optimizer)
            for w in active:
                w.lr = groups[id(w.parameter)]["lr"]
                w.maximize = groups[id(w.parameter)].get("maximize", False)
        if self.manifold is not None:
            self._choose_weights(active, self.manifold, optimizer, scale)
        if isinstance(self.lr, OptimalLR) and self.lr.form == "paper":
            self._choose_rates_by_gradient(active, self.lr, scale)  # now: some optimizers use it as scratch space
        self._pending = active

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # An optimizer whose step calls that of its base class calls each hook twice; the second call finds nothing.
        active, self._pending = self._pending, []
        if self.gradient is not None and self.gradient.of == "update":
            self._orthogonalize_updates(active, self.gradient)
        if self.lr is not None:
            if not isinstance(self.lr, OptimalLR):
                self._choose_rates_blindly(active, self.lr)
            elif self.lr.form != "paper":
                self._choose_rates_by_update(active, self.lr)
            floor = self.lr.floor if isinstance(self.lr, OptimalLR) and self.lr.form != "paper" else None
            for w in active:
                w.shorten_update(floor)
        if self.manifold is not None:
            for w in active:
                assign(w.parameter.detach(), w.after)
                optimizer.state[w.parameter][MOMENTUM] = w.average
        for w in active:
            w.release()

    def _orthogonalize_gradients(self, active: list[Weight], setting: NearestOrthogonal, scale: Tensor | None) -> None:
        prepared: list[tuple[list[Weight], Callable[[], Tensor]]] = []
        for batch in batches(active):
            gradients = stack([w.gradient() for w in batch])
            try:
                prepared.append((batch, setting.prepare(gradients, scale)))
            except ValueError as error:
                _check_finite(batch, gradients, "NearestOrthogonal", error)
                raise
            for w, g in zip(batch, gradients, strict=True):
                if self._spectrum_every and w.steps % self._spectrum_every == 0:
                    w.record_spectrum(g)
        for batch, finish in prepared:  # only now, so that an error leaves all gradients as they were
            for w, nearest in zip(batch, finish(), strict=True):
                assign(w.parameter.grad, nearest)

    def _orthogonalize_updates(self, active: list[Weight], setting: NearestOrthogonal) -> None:
        for w in active:  # one by one: the noise in an update depends on the weight it was taken from
            assign(w.parameter, setting.nearest_update(w.matrices_before(), w.matrices(), w.lr_tensor()))

    def _choose_weights(
        self, active: list[Weight], manifold: Stiefel, optimizer: Optimizer, scale: Tensor | None
    ) -> None:
        for batch in batches(active):
            averages = [w.average_gradient(optimizer.state[w.parameter], manifold.momentum, scale) for w in batch]
            weights, gradients = stack([w.matrices() for w in batch]), stack(averages)
            lr = torch.stack([-w.lr_tensor() if w.maximize else w.lr_tensor() for w in batch])
            try:
                after = manifold.step(weights, gradients, lr[:, None])
            except ValueError as error:
                _check_finite(batch, averages, "Stiefel", error)
                raise
            for w, matrices, average in zip(batch, after, gradients, strict=True):
                if self._spectrum_every and w.steps % self._spectrum_every == 0:
                    w.record_spectrum(manifold.tangent(w.matrices(), average))
                w.after = matrices

    def _choose_rates_by_gradient(self, active: list[Weight], setting: OptimalLR, scale: Tensor | None) -> None:
        for batch in batches(active):
            gradients = stack([-w.gradient() if w.maximize else w.gradient() for w in batch])
            gradients = gradients if scale is None else gradients / scale
            weights = stack([w.matrices() for w in batch])
            lr = torch.stack([w.lr_tensor() for w in batch])
            rates = setting.rate_from(setting.coefficients(weights, gradients).sum(1), lr)
            for w, fraction in zip(batch, torch.where(lr > 0, rates / lr, 1), strict=True):
                w.fraction = fraction

    def _choose_rates_by_update(self, active: list[Weight], setting: OptimalLR) -> None:
        for batch in batches(active):
            before = stack([w.matrices_before() for w in batch])
            after = stack([w.matrices() for w in batch])
            # In units of the update that was made, the learning rate is 1.
            fractions = setting.rate_from(setting.coefficients(before, before - after).sum(1), 1.0)
            for w, fraction in zip(batch, fractions, strict=True):
                w.fraction = fraction

    def _choose_rates_blindly(self, active: list[Weight], setting: FixedLR | RandomLR) -> None:
        chosen = {id(w) for w in active}
        for index, w in enumerate(self.weights):
            if id(w) in chosen:
                fraction = setting.fraction(index, w.steps)
                w.fraction = torch.full((), fraction, dtype=torch.float64, device=w.parameter.device)


def _check_setting(value: object, name: str, *kinds: type) -> None:
    if value is not None and not isinstance(value, kinds):
        hint = f" Add parentheses: {value.__name__}(...)." if isinstance(value, type) and value in kinds else ""
        raise TypeError(f"treat({name}=...) needs a setting such as {kinds[0].__name__}(); got {value!r}.{hint}")


def _are_close(one: Tensor, other: Tensor) -> bool:
    """Whether matrices differ by no more than rounding."""
    size = 2 * torch.finfo(one.dtype).eps * float(other.abs().max())
    return float((one.double() - other.double()).abs().max()) <= size


def _check_finite(
    batch: list[Weight], gradients: Iterable[Tensor], caller: str, error: ValueError | None = None
) -> None:
    """Raise an error that names the first weight whose gradient is not finite, if there is one."""
    for w, g in zip(batch, gradients, strict=True):
        if not g.isfinite().all():
            raise NotFiniteError(
                f"{caller} needs finite gradients; that of {w.name} holds NaN or infinity. Skip such steps with "
                "torch.amp.GradScaler, or look for an overflow in the loss."
            ) from error


def _groups_by_parameter(optimizer: Optimizer) -> dict[int, dict[str, Any]]:
    """The parameter group of each parameter, by its id; anew at each step, as load_state_dict replaces the groups."""
    return {id(p): group for group in optimizer.param_groups for p in group["params"]}
