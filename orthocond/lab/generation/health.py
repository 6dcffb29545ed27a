"""Whether a GAN in training is still a game, over its last steps."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from orthocond import gans

_WINDOW = 100  # steps
_LEAST = 48  # steps; fewer may be chance


class Health:
    """Remembers what the last steps of a GAN say about it; `orthocond.gans.health` has the definitions."""

    def __init__(self) -> None:
        self._cannot_tell = torch.zeros(0)  # of each of the last steps
        self._penalty: Tensor | None = None
        self._spread: float | None = None

    def see(self, real_logits: Tensor, fake_logits: Tensor, penalty: Tensor | None) -> dict[str, Tensor]:
        """Take a step into account.

        Args:
            real_logits: The discriminator's logits of real images.
            fake_logits: Its logits of generated images.
            penalty: The penalty of its gradient, if the step has one.

        Returns:
            Mean logits ``"real_logit"`` and ``"fake_logit"`` of the step, ``"cannot_tell"``, the part of the last 100
            steps in which the discriminator could not tell, and ``"last_penalty"``, as soon as there was one.
        """
        found = gans.discriminator_health(real_logits, fake_logits)
        last = found["cannot_tell"].reshape(1)
        self._cannot_tell = torch.cat([self._cannot_tell.to(last.device), last])[-_WINDOW:]
        self._penalty = self._penalty if penalty is None else penalty.detach()
        known = {} if self._penalty is None else {"last_penalty": self._penalty}
        return found | {"cannot_tell": self._cannot_tell.mean()} | known

    def see_images(self, fake: Tensor, real: Tensor) -> dict[str, Tensor]:
        """Measure ``"sample_spread"``; nothing for a single image."""
        if len(fake) < 2:
            return {}
        spread = gans.sample_spread(fake.cpu(), real.cpu()).to(fake.device)
        self._spread = spread.item()
        return {"sample_spread": spread}

    def warnings(self) -> list[str]:
        """Sentences about what is wrong."""
        return gans.health_warnings(self._part(), self._settled_spread())

    def shown(self) -> dict[str, float | None]:
        """The numbers of what is wrong, for those who watch."""
        part, spread = self._part(), self._settled_spread()
        signs = {"dead discriminator: cannot tell": part, "collapsed samples: spread": spread}
        wrong = bool(gans.health_warnings(part)), bool(gans.health_warnings(0.0, spread))
        return {name: value for (name, value), bad in zip(signs.items(), wrong, strict=True) if bad}

    def _part(self) -> float:
        return float(self._cannot_tell.mean()) if len(self._cannot_tell) >= _LEAST else 0.0

    def _settled_spread(self) -> float | None:
        """The spread once there were some steps: initial weights draw nearly one image."""
        return self._spread if len(self._cannot_tell) >= _LEAST else None

    def state_dict(self) -> dict[str, Any]:
        """What the next steps depend on."""
        return {"cannot_tell": self._cannot_tell, "penalty": self._penalty, "spread": self._spread}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self._cannot_tell, self._penalty, self._spread = state["cannot_tell"], state["penalty"], state["spread"]
