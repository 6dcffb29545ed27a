"""Mean and covariance of a stream of features, in float64, over any number of batches, shards and processes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orthocond._distributed import largest_across, message_device, sum_across


@dataclass(frozen=True)
class FeatureMoments:
    r"""Count, mean and scatter :math:`\sum (x - \mu)(x - \mu)^T` of features.

    Sets are joined by the pairwise formula of Chan, Golub and LeVeque (1979): with
    :math:`\delta = \mu_b - \mu_a`,

    .. math:: \mu = \mu_a + \tfrac{n_b}{n} \delta, \qquad S = S_a + S_b + \tfrac{n_a n_b}{n} \delta \delta^T,

    which loses nothing where the mean is far above the deviation, as sums of squares do.

    Attributes:
        count: Number of samples.
        mean: ``(d,)``, float64.
        scatter: ``(d, d)``, float64.
    """

    count: int
    mean: Tensor
    scatter: Tensor

    @classmethod
    def of(cls, features: Tensor) -> "FeatureMoments":
        """The moments of features ``(n, d)``."""
        x = features.double()
        mean = x.mean(0) if len(x) else x.new_zeros(x.shape[1])
        centered = x - mean
        return cls(len(x), mean, centered.mT @ centered)

    @property
    def features(self) -> int:
        """The number of features d."""
        return len(self.mean)

    @property
    def covariance(self) -> Tensor:
        """The unbiased covariance ``(d, d)``; needs at least two samples."""
        return self.scatter / (self.count - 1)

    def join(self, other: "FeatureMoments") -> "FeatureMoments":
        """The moments of both sets together."""
        count = self.count + other.count
        if count == 0:
            return self
        delta = other.mean.to(self.mean) - self.mean
        mean = self.mean + other.count / count * delta
        outer = torch.outer(delta, delta) * (self.count * other.count / count)
        return FeatureMoments(count, mean, self.scatter + other.scatter.to(self.scatter) + outer)

    def state_dict(self) -> dict[str, Any]:
        """The moments as plain values and tensors."""
        return {"count": self.count, "mean": self.mean.clone(), "scatter": self.scatter.clone()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], source: str) -> "FeatureMoments":
        """The moments of a `state_dict`, checked.

        Raises:
            ValueError: If entries are missing, or do not fit together.
        """
        missing = {"count", "mean", "scatter"} - set(state)
        if missing:
            raise ValueError(f"{source} needs count, mean and scatter; it lacks {', '.join(sorted(missing))}.")
        count, mean, scatter = int(state["count"]), state["mean"].double(), state["scatter"].double()
        if count < 0 or mean.ndim != 1 or scatter.shape != (len(mean), len(mean)):
            raise ValueError(
                f"{source} needs a count of at least 0, a mean (d,) and a scatter (d, d); got {count}, "
                f"{tuple(mean.shape)} and {tuple(scatter.shape)}. Make it again."
            )
        if not (mean.isfinite().all() and scatter.isfinite().all()):
            raise ValueError(f"{source} needs finite moments; it holds NaN or infinity. Make it again.")
        return cls(count, mean.clone(), scatter.clone())


def join_across(own: FeatureMoments | None, group: Any = None) -> FeatureMoments | None:
    """The moments of the samples of all processes; a process without any gives None. Every process has to call it.

    The mean is summed first and each process moves its scatter to it, which is the pairwise formula for many sets.

    Raises:
        ValueError: If the processes have different numbers of features.
    """
    device = message_device(group)
    width = 0 if own is None else own.features
    largest = largest_across(torch.tensor([width, -width if width else -(2**62)], device=device), group)
    size, least = int(largest[0]), -int(largest[1])
    if size == 0:
        return None
    if least != size:
        raise ValueError(f"All processes need the same number of features; they have {least} to {size}.")
    empty = FeatureMoments(0, torch.zeros(size, dtype=torch.float64), torch.zeros(size, size, dtype=torch.float64))
    mine = own or empty
    own_sum = torch.cat([torch.tensor([1.0], dtype=torch.float64), mine.mean.cpu()]).to(device) * mine.count
    total = sum_across(own_sum, group)
    count, mean = round(float(total[0])), total[1:] / total[0]
    delta = mine.mean.to(device) - mean
    scatter = sum_across(mine.scatter.to(device) + mine.count * torch.outer(delta, delta), group)
    home = mine.mean.device
    return FeatureMoments(count, mean.to(home), scatter.to(home))
