"""Where the quartic of OLR is least, ``E(η) - E(0) = e1 η + e2 η² + e3 η³ + e4 η⁴`` with e4 ≥ 0.

In units of the direction's own length, ``s = e4^(1/4) η``, it is monic: no coefficient is lost to its scale. Its
derivative is a cubic, whose roots are Cardano's, in complex numbers.
"""

import cmath
import math
import operator

import torch
from torch import Tensor

# Values of the quartic that differ by less than this part of the sum of its terms differ by rounding alone.
_ROUNDING = 1e-13
_THIRD, _TWO_THIRDS = (cmath.exp(2j * math.pi * k / 3) for k in (1, 2))  # of a turn


def minimizer(coefficients: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    """Global minimizer over ``[low, high]``, or over all numbers; no value is read on the host.

    Two minima can be equal: D = W gives both (1 - η) W and -(1 - η) W. Among values that differ by rounding alone, the
    one with the shortest step counts.

    Args:
        coefficients: e1 to e4, ``(*, 4)`` in float64.
        low: Lower ends ``(*)``, or None.
        high: Upper ends ``(*)``, or None.

    Returns:
        The minimizers ``(*)``; ``high``, or 0, where the quartic is 0.
    """
    e4 = coefficients[..., 3:]
    unit = _not_zero(e4).pow(0.25)
    e1, e2, e3 = (coefficients[..., :3] / torch.cat((unit, unit**2, unit**3), -1)).split(1, -1)
    candidates = cubic_roots(e3, e2, e1)
    if low is not None and high is not None:
        low, high = low[..., None] * unit, high[..., None] * unit
        candidates = torch.cat((low, high, candidates.clamp(low, high)), -1)
    values = candidates * (e1 + candidates * (e2 + candidates * (e3 + candidates)))
    sizes = candidates.abs()
    slack = _ROUNDING * sizes * (e1.abs() + sizes * (e2.abs() + sizes * (e3.abs() + sizes)))
    ties = values - slack <= (values + slack).amin(-1, keepdim=True)
    best = candidates.gather(-1, torch.where(ties, sizes, torch.inf).argmin(-1, keepdim=True))
    return (torch.where(e4 > 0, best, 0 if high is None else high) / unit).squeeze(-1)


def cubic_roots(e3: Tensor, e2: Tensor, e1: Tensor) -> Tensor:
    """Where the derivative ``4 s³ + 3 e3 s² + 2 e2 s + e1`` is 0: its real roots are among ``(*, 3)`` numbers.

    Rounding moves a root by 1e-16 of the largest one, or 1e-8 where two nearly coincide, and the value of the quartic
    at a minimum by the square of that, or the cube.
    """
    shift = e3 / 4
    # s = t - shift: t³ + 3 p t + 2 q = 0
    p = e2 / 6 - shift**2
    q = shift**3 - shift * e2 / 4 + e1 / 8
    root = (q**2 + p**3).to(torch.complex128).sqrt()
    u = -(q + root * torch.copysign(torch.ones_like(q), q)).pow(1 / 3)  # the sign that does not cancel
    u = torch.cat((u, u * _THIRD, u * _TWO_THIRDS), -1)
    return (u - p / _not_zero(u)).real - shift


def minimizer_by_numbers(coefficients: Tensor, low: float, high: float) -> Tensor:
    """`minimizer` over an interval in Python's numbers: on a CPU a tenth of the time of tensors with one element."""
    found = [_minimizer(row, low, high) for row in coefficients.reshape(-1, 4).tolist()]
    return torch.tensor(found, dtype=coefficients.dtype).reshape(coefficients.shape[:-1])


def _minimizer(coefficients: list[float], low: float, high: float) -> float:
    e1, e2, e3, e4 = coefficients
    unit = e4**0.25 or 1.0
    e1, e2, e3 = e1 / unit, e2 / unit**2, e3 / unit**3
    shift = e3 / 4
    p = e2 / 6 - shift * shift
    q = shift * (shift * shift - e2 / 4) + e1 / 8
    discriminant = q * q + p * p * p
    if not 0 < e4 < math.inf or not math.isfinite(discriminant):  # no direction, or no numbers
        return high
    u = -((q + math.copysign(1, q) * cmath.sqrt(discriminant)) ** (1 / 3))
    roots = [(v - p / v).real - shift for v in (u, u * _THIRD, u * _TWO_THIRDS)] if u else [-shift]
    low, high = low * unit, high * unit
    candidates = [low, high, *(min(max(low, s), high) for s in roots)]
    values = [s * (e1 + s * (e2 + s * (e3 + s))) for s in candidates]
    a1, a2, a3 = _ROUNDING * abs(e1), _ROUNDING * abs(e2), _ROUNDING * abs(e3)
    slack = [t * (a1 + t * (a2 + t * (a3 + t * _ROUNDING))) for t in map(abs, candidates)]
    least = min(map(operator.add, values, slack))
    ties = [s for s, value, width in zip(candidates, values, slack, strict=True) if value - width <= least]
    return min(ties, key=abs) / unit


def _not_zero(x: Tensor) -> Tensor:
    """``x``, with 1 in place of 0."""
    return x + (x == 0)
