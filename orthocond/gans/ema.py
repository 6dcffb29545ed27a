"""Moving average of a model's weights."""

import copy
from typing import Any

import torch
from torch import nn


class EMA:
    r"""An exponential moving average of a model: the generator that is shown and measured.

    At each update :math:`\bar\theta \leftarrow \beta_t \bar\theta + (1 - \beta_t)\, \theta` for parameters; buffers are
    copied, as they are running averages or constants already. Either β is given, or the number of images after which
    a weight counts half, :math:`\beta = 2^{-\text{images} / \text{half-life}}`, which keeps its meaning when the batch
    size changes.

    The average starts as a copy of the random initial weights. With a constant β they keep the share
    :math:`\beta^t` after t updates: 22 % after 750 updates with 0.998. With warm-up, the default,

    .. math:: \beta_t = \min\Bigl(\beta, \frac{1 + t}{10 + t}\Bigr),

    where t counts the updates before. The average then spans about the last ninth of the training until that is as
    long as β requires, and the initial weights keep a share of less than 1e-6 after 20 updates.

    Args:
        model: The model to follow; the average starts as its copy.
        decay: The β of each update, from 0 to below 1.
        half_life: Images instead; EigenGAN: 10,000.
        warmup: Whether to shorten the average at the start. False is a constant β: the average of EigenGAN's authors,
            whose 500,000 steps forget the initial weights. Use it where the model has been trained already.

    Attributes:
        model: The average, in evaluation mode and without gradients.
        updates: Number of updates so far.

    Raises:
        ValueError: If not exactly one of ``decay`` and ``half_life`` is given, or it is out of range.

    Example:
        >>> from orthocond.gans import EMA
        >>> model = torch.nn.Linear(1, 1)
        >>> ema = EMA(model, half_life=1000, warmup=False)
        >>> before = model.weight.item()
        >>> with torch.no_grad():
        ...     _ = model.weight.add_(1)
        >>> ema.update(model, images=1000)
        >>> print(f"{ema.model.weight.item() - before:.4f}")
        0.5000
    """

    def __init__(
        self, model: nn.Module, *, decay: float | None = None, half_life: float | None = None, warmup: bool = True
    ) -> None:
        if (decay is None) == (half_life is None):
            raise ValueError("EMA needs either decay= or half_life=; got " + ("none." if decay is None else "both."))
        if decay is not None and not 0 <= decay < 1:
            raise ValueError(f"EMA(decay=...) needs a number from 0 to below 1; got {decay!r}.")
        if half_life is not None and not 0 < half_life < float("inf"):
            raise ValueError(f"EMA(half_life=...) needs a finite number of images above 0; got {half_life!r}.")
        self.decay, self.half_life, self.warmup = decay, half_life, warmup
        self.updates = 0
        self.model = copy.deepcopy(model).eval().requires_grad_(False)

    @torch.no_grad()
    def update(self, model: nn.Module, images: int | None = None) -> None:
        """Follow the model, after a step of its optimizer.

        Args:
            model: The model that was given at the start.
            images: Size of the batch, over all processes; needed with ``half_life``.

        Raises:
            ValueError: If the model has other parameters or buffers, or ``images`` is missing or needless.
        """
        decay = self._decay(images)
        parameters, averages = dict(model.named_parameters()), dict(self.model.named_parameters())
        buffers, copies = dict(model.named_buffers()), dict(self.model.named_buffers())
        others = sorted(parameters.keys() ^ averages.keys() | buffers.keys() ^ copies.keys())
        if others:
            raise ValueError(
                f"EMA.update needs the model that it was made from; {others[0]!r} is not in both. Unwrap it, or make "
                "the EMA after parametrizations."
            )
        for name, average in averages.items():
            average.lerp_(parameters[name].to(average.device), 1 - decay)
        for name, buffer in copies.items():
            buffer.copy_(buffers[name])
        self.updates += 1

    def _decay(self, images: int | None) -> float:
        """The β of the next update."""
        if self.decay is not None:
            if images is not None:
                raise ValueError("EMA.update(images=...) is for half_life=; this average has a fixed decay.")
            decay = self.decay
        else:
            if images is None or images < 1:
                raise ValueError(f"EMA.update needs images=, the size of the batch, with half_life; got {images!r}.")
            decay = float(0.5 ** (images / self.half_life))  # type: ignore[operator]
        return min(decay, (1 + self.updates) / (10 + self.updates)) if self.warmup else decay

    def state_dict(self) -> dict[str, Any]:
        """The state: ``"model"``, that of the averaged model, and ``"updates"``, their number."""
        return {"model": self.model.state_dict(), "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` gave.

        Raises:
            ValueError: If it is not the state of an EMA.
        """
        if state.keys() != {"model", "updates"}:
            found = ", ".join(sorted(map(repr, state))[:3]) or "nothing"
            raise ValueError(f"EMA.load_state_dict needs the state of an EMA, 'model' and 'updates'; got {found}.")
        self.model.load_state_dict(state["model"])
        self.updates = int(state["updates"])
