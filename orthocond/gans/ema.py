"""Moving average of a model's weights."""

import copy
from typing import Any

import torch
from torch import nn


class EMA:
    r"""An exponential moving average of a model: the generator that is shown and measured.

    At each update :math:`\bar\theta \leftarrow \beta \bar\theta + (1 - \beta)\, \theta` for parameters; buffers are
    copied, as they are running averages or constants already. Either β is given, or the number of images after which
    a weight counts half, :math:`\beta = 2^{-\text{images} / \text{half-life}}`, which keeps its meaning when the batch
    size changes.

    Args:
        model: The model to follow; the average starts as its copy.
        decay: The β of each update, from 0 to below 1.
        half_life: Images instead; EigenGAN: 10,000.

    Attributes:
        model: The average, in evaluation mode and without gradients.

    Raises:
        ValueError: If not exactly one of ``decay`` and ``half_life`` is given, or it is out of range.

    Example:
        >>> from orthocond.gans import EMA
        >>> model = torch.nn.Linear(1, 1)
        >>> ema = EMA(model, half_life=1000)
        >>> before = model.weight.item()
        >>> with torch.no_grad():
        ...     _ = model.weight.add_(1)
        >>> ema.update(model, images=1000)
        >>> print(f"{ema.model.weight.item() - before:.4f}")
        0.5000
    """

    def __init__(self, model: nn.Module, *, decay: float | None = None, half_life: float | None = None) -> None:
        if (decay is None) == (half_life is None):
            raise ValueError("EMA needs either decay= or half_life=; got " + ("none." if decay is None else "both."))
        if decay is not None and not 0 <= decay < 1:
            raise ValueError(f"EMA(decay=...) needs a number from 0 to below 1; got {decay!r}.")
        if half_life is not None and not 0 < half_life < float("inf"):
            raise ValueError(f"EMA(half_life=...) needs a finite number of images above 0; got {half_life!r}.")
        self.decay, self.half_life = decay, half_life
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
                f"EMA.update needs the model that it was made of; {others[0]!r} is not in both. Unwrap it, or make the "
                "EMA after parametrizations."
            )
        for name, average in averages.items():
            average.lerp_(parameters[name].to(average.device), 1 - decay)
        for name, buffer in copies.items():
            buffer.copy_(buffers[name])

    def _decay(self, images: int | None) -> float:
        if self.decay is not None:
            if images is not None:
                raise ValueError("EMA.update(images=...) is for half_life=; this average has a fixed decay.")
            return self.decay
        if images is None or images < 1:
            raise ValueError(f"EMA.update needs images=, the size of the batch, with half_life; got {images!r}.")
        return float(0.5 ** (images / self.half_life))  # type: ignore[operator]

    def state_dict(self) -> dict[str, Any]:
        """The state of the averaged model."""
        return self.model.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` gave."""
        self.model.load_state_dict(state)
