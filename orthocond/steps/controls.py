"""Controls of the optimal learning rate: steps shortened as often and as much, but blind to the weight."""

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class FixedLR:
    """Setting for `treat`: every step of the weight is shortened by the same factor.

    It is the control for `OptimalLR`, whose exact form takes its floor in most steps: an effect that this control has
    too comes from the smaller rate, not from orthogonality. It differs from a smaller learning rate of the group in one
    way: decoupled weight decay and everything else that the optimizer does to the weight is shortened too.

    Args:
        factor: Part of the step that is made, in [0, 1].

    Raises:
        ValueError: If the factor is not valid.

    Example:
        >>> from orthocond.steps import FixedLR, treat
        >>> weight = torch.nn.Parameter(torch.ones(2, 2))
        >>> optimizer = torch.optim.SGD([weight], lr=1.0)
        >>> handle = treat(weight, optimizer, lr=FixedLR(0.1))
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> weight.detach()
        tensor([[0.9000, 0.9000],
                [0.9000, 0.9000]])
    """

    factor: float = 0.1

    def __post_init__(self) -> None:
        _check_fraction(self.factor, "FixedLR(factor=...)")

    def fraction(self, index: int, step: int) -> float:
        """Part of the step that is made, for the weight of this index at this step."""
        return self.factor


@dataclass(frozen=True)
class RandomLR:
    """Setting for `treat`: steps of the weight are shortened at random.

    Each step of each weight is shortened by ``factor`` with the probability ``occurrence``, independently of all
    others. Pass the occurrence and the mean length that `OptimalLR` had in a training. The control then
    shortens equally often and equally much, at steps that do not depend on the weight.

    The draw depends only on the seed, the place of the weight in `treat` and the number of its treated steps. It is
    the same on all processes, and continues after `Treatment.load_state_dict`.

    Args:
        occurrence: Probability that a step is shortened, in [0, 1].
        factor: Part of a shortened step that is made, in [0, 1].
        seed: Seed of the draws.

    Raises:
        ValueError: If a setting is not valid.

    Example:
        >>> from orthocond.steps import RandomLR
        >>> [RandomLR(occurrence=0.5, factor=0.1).fraction(0, step) for step in range(8)]
        [0.1, 0.1, 1.0, 1.0, 1.0, 1.0, 0.1, 1.0]
    """

    occurrence: float
    factor: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        _check_fraction(self.occurrence, "RandomLR(occurrence=...)")
        _check_fraction(self.factor, "RandomLR(factor=...)")

    def fraction(self, index: int, step: int) -> float:
        """Part of the step that is made, for the weight of this index at this step."""
        draw = random.Random(f"{self.seed} {index} {step}").random()
        return self.factor if draw < self.occurrence else 1.0


def _check_fraction(value: float, name: str) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} needs a number in [0, 1]; got {value!r}.")
