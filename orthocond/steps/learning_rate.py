"""The optimal learning rate, OLR: the step length that brings a weight nearest to orthogonal (paper: section 4.2)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from orthocond._checks import can_read_freely, check_choice, check_floating, without_autocast
from orthocond.steps._quartic import minimizer, minimizer_by_numbers

_FORMS = ("exact", "newton", "paper")


@dataclass(frozen=True)
class OptimalLR:
    r"""Setting for `treat`: the step length that brings the weight nearest to an orthogonal matrix.

    With W the weight before the step, D the direction in which the optimizer moves it (momentum, Adam's scaling and
    weight decay included) and lr the learning rate of its group, the step is :math:`W - \eta D` with

    - ``"exact"``: the global minimizer over :math:`\eta \in [\text{floor} \cdot lr, lr]` of
      :math:`E(\eta) = \|(W - \eta D)(W - \eta D)^T - g^2 I\|_F^2`, a quartic. For tall W the Gram matrix is
      :math:`(W - \eta D)^T (W - \eta D)`, the one that can be the identity.
    - ``"newton"``: one Newton step of E from 0, clipped to the same interval; lr where E is not convex at 0.
    - ``"paper"``: the paper's :math:`\eta^\star = \langle W, G \rangle \|W\|^2 / (\|W\|^2 \|G\|^2 +
      2 \langle W, G \rangle^2)` with G the gradient that the optimizer receives (its negative under
      ``maximize``), where :math:`0 < \eta^\star < lr`, else lr. It shortens the weight; it does not make it orthogonal
      (docs/steps.md has the proof and numbers).

    At an orthogonal weight the best step is no step: without a floor the layer would stop learning.

    Args:
        form: ``"exact"``, ``"newton"`` or ``"paper"``.
        gain: The weight should be ``gain`` times an orthogonal matrix. None uses the current scale of the weight,
            :math:`g = \|W\|_F / \sqrt{r}`: then only its condition matters, as before a normalization that undoes any
            scale. Not for the paper's form.
        floor: Least step as a fraction of lr, in [0, 1]. Not for the paper's form.
        guard: Whether the paper's form needs :math:`\eta^\star > 0`, as in its authors' code. False is the rule as
            printed, :math:`\eta^\star < lr`, which moves up the gradient where :math:`\eta^\star` is negative.

    Raises:
        ValueError: If a setting is not valid, or has no effect on the form.

    Example:
        >>> from orthocond.steps import OptimalLR
        >>> w = torch.diag(torch.tensor([2.0, 1.0]))  # the step should shorten the first axis by 1
        >>> d = torch.diag(torch.tensor([4.0, 0.0]))
        >>> [round(float(OptimalLR(form).rate(w, d, lr=1.0)), 3) for form in ("exact", "newton", "paper")]
        [0.25, 0.136, 0.192]

    References:
        Song, Sebe, Wang (2022), section 4.2, equation (optimal_lr).
    """

    form: str = "exact"
    gain: float | None = 1.0
    floor: float = 0.1
    guard: bool = True

    def __post_init__(self) -> None:
        check_choice(self.form, "OptimalLR(form=...)", _FORMS)
        _check_gain(self.gain, "OptimalLR(gain=...)")
        if not 0 <= self.floor <= 1:
            raise ValueError(
                f"OptimalLR(floor=...) needs a fraction of the learning rate in [0, 1]; got {self.floor!r}."
            )
        paper = self.form == "paper"
        if paper and (self.gain, self.floor) != (OptimalLR.gain, OptimalLR.floor):
            raise ValueError("OptimalLR(form='paper') knows no gain or floor; use form='exact', or leave them out.")
        if not paper and not self.guard:
            raise ValueError(f"OptimalLR(guard=False) is for form='paper'; form={self.form!r} needs no guard.")

    def rate(self, weight: Tensor, direction: Tensor, lr: float | Tensor) -> Tensor:
        """Return the learning rate to use for ``weight - rate * direction`` instead of ``lr``.

        Args:
            weight: Weights as matrices ``(*, m, n)``; see `matrix_view`.
            direction: What the optimizer subtracts, divided by its learning rate; the gradient for the paper's form.
            lr: Learning rate, a number or a tensor of the batch shape, at least 0.

        Returns:
            The rates, float64, of the batch shape.
        """
        w, d, gain, unit = _of_unit_size(weight, direction, None if self.form == "paper" else self.gain)
        scaled = torch.as_tensor(lr, dtype=unit.dtype, device=unit.device) / unit
        return self.rate_from(_coefficients(w, d, self.form, gain), scaled) * unit

    def coefficients(self, weight: Tensor, direction: Tensor) -> Tensor:
        """The few numbers ``(*, k)`` the rate depends on; for several matrices with one common rate they add up."""
        _check_matrices(weight, direction)
        return _coefficients(weight, direction, self.form, self.gain)

    def rate_from(self, coefficients: Tensor, lr: float | Tensor) -> Tensor:
        """`rate` from `coefficients`."""
        if not isinstance(lr, Tensor):
            if self.form == "exact" and can_read_freely(coefficients) and not torch.is_grad_enabled():
                return minimizer_by_numbers(coefficients, self.floor * lr, lr)
            # Not torch.tensor, which would wait for the device.
            lr = torch.full((), lr, dtype=torch.float64, device=coefficients.device)
        lr = lr.to(coefficients).expand(coefficients.shape[:-1])
        if self.form == "exact":
            return minimizer(coefficients, self.floor * lr, lr)
        if self.form == "newton":
            return torch.clamp(_newton(coefficients), self.floor * lr, lr)
        rate = _paper(coefficients)
        return torch.where((rate < lr) & ((rate > 0) | (not self.guard)), rate, lr)


def optimal_lr(weight: Tensor, direction: Tensor, *, form: str = "exact", gain: float | None = 1.0) -> Tensor:
    r"""Step length for which ``weight - η direction`` is nearest to orthogonal, over all real η.

    ``"exact"`` is the global minimizer of :math:`E(\eta) = \|(W - \eta D)(W - \eta D)^T - g^2 I\|_F^2` (of the
    smaller Gram matrix); ``"newton"`` one Newton step of it from 0; ``"paper"`` the equation of the paper. It may be
    negative. `OptimalLR` keeps it within the learning rate.

    The quartic needs three products of the smaller side; its derivative is a cubic, solved in closed form without
    reading a value on the host.

    Args:
        weight: Matrices ``(*, m, n)``, wide or tall; see `matrix_view` for the weight of a convolution.
        direction: Matrices of the same shape.
        form: ``"exact"``, ``"newton"`` or ``"paper"``.
        gain: Scale of the orthogonal matrix aimed at; None takes that of the weight. Not for the paper's form.

    Returns:
        The step lengths, float64, of shape ``(*)``. 0 for a zero direction; infinity for ``"newton"`` where E is not
        convex at 0.

    Raises:
        TypeError: If an argument is not a real floating-point tensor.
        ValueError: If shapes differ or a setting is not valid.

    Accuracy:
        In float64 throughout: the value of E exceeds its minimum by less than 1e-12 (E(0) + 1).

    Example:
        >>> w = 2 * torch.eye(3)
        >>> optimal_lr(w, w), optimal_lr(w, w, form="newton"), optimal_lr(w, w, form="paper")
        (tensor(0.5000, dtype=torch.float64), tensor(0.2727, dtype=torch.float64), tensor(0.3333, dtype=torch.float64))

    References:
        Song, Sebe, Wang (2022), section 4.2, equation (optimal_lr).
    """
    check_choice(form, "optimal_lr(form=...)", _FORMS)
    _check_gain(gain, "optimal_lr(gain=...)")
    if form == "paper" and gain != 1:
        raise ValueError("optimal_lr(form='paper') knows no gain; use form='exact', or leave it out.")
    w, d, scaled_gain, unit = _of_unit_size(weight, direction, None if form == "paper" else gain)
    coefficients = _coefficients(w, d, form, scaled_gain)
    if form == "exact":
        return minimizer(coefficients) * unit
    return (_newton(coefficients) if form == "newton" else _paper(coefficients)) * unit


def _check_gain(gain: float | None, name: str) -> None:
    if gain is not None and not 0 < gain < math.inf:
        raise ValueError(f"{name} needs a positive number, or None for the weight's own scale; got {gain!r}.")


def _of_unit_size(
    weight: Tensor, direction: Tensor, gain: float | None
) -> tuple[Tensor, Tensor, float | Tensor | None, Tensor]:
    """Weight, direction and gain divided by powers of two of about their size, in float64, and the unit of the step.

    The quartic has fourth powers of the entries, which overflow above 1e77. The unit is that of the weight and the gain
    over that of the direction: a step of the scaled matrices times the unit is a step of the matrices.
    """
    _check_matrices(weight, direction)
    w, d = weight.double(), direction.double()
    size = w.detach().abs().amax((-2, -1))
    size = _power_of_two(size if gain is None else size.clamp(min=gain))
    length = _power_of_two(d.detach().abs().amax((-2, -1)))
    scaled = None if gain is None else gain / size
    return w / size[..., None, None], d / length[..., None, None], scaled, size / length


def _power_of_two(x: Tensor) -> Tensor:
    """The largest one that is not above ``x``; 1 for 0 and for what is not finite."""
    return torch.where((x > 0) & (x < math.inf), x.log2().floor().exp2(), 1)


def _check_matrices(weight: Tensor, direction: Tensor) -> None:
    weight = check_floating(weight, "optimal_lr")
    direction = check_floating(direction, "optimal_lr")
    if weight.ndim < 2 or weight.shape != direction.shape:
        raise ValueError(
            "optimal_lr needs weight and direction of the same shape (*, m, n); "
            f"got {tuple(weight.shape)} and {tuple(direction.shape)}."
        )


def _coefficients(weight: Tensor, direction: Tensor, form: str, gain: float | Tensor | None) -> Tensor:
    """The quartic's e1 to e4 in ``E(η) = e0 + e1 η + … + e4 η⁴``, or ``|W|², <W, G>, |G|²`` of the paper's form."""
    with without_autocast(weight):
        w, d = weight.double(), direction.double()
        if form == "paper":
            return torch.stack((_inner(w, w), _inner(w, d), _inner(d, d)), -1)
        if w.shape[-2] > w.shape[-1]:
            w, d = w.mT, d.mT
        a, x, c = w @ w.mT, w @ d.mT, d @ d.mT
        diagonal = a.diagonal(dim1=-2, dim2=-1)
        if gain is None:
            diagonal -= diagonal.mean(-1, keepdim=True)
        else:
            diagonal -= gain.square().unsqueeze(-1) if isinstance(gain, Tensor) else gain**2
        # E = |A - η S + η² C|² with S = X + Xᵀ: all inner products of the three at once.
        parts = torch.stack((a, x + x.mT, c), -3).flatten(-2)
        _, a_s, a_c, _, s_s, s_c, _, _, c_c = (parts @ parts.mT).flatten(-2).unbind(-1)
        return torch.stack((-2 * a_s, s_s + 2 * a_c, -2 * s_c, c_c), -1)


def _inner(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum((-2, -1))


def _paper(coefficients: Tensor) -> Tensor:
    a, b, c = coefficients.unbind(-1)
    below = a * c + 2 * b * b
    return torch.where(below > 0, a * b / below, 0)


def _newton(coefficients: Tensor) -> Tensor:
    e1, e2, _, _ = coefficients.unbind(-1)
    return torch.where(e2 > 0, -e1 / (2 * e2), torch.inf)
