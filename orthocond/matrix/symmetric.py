"""Two small operations on symmetric matrices that many modules share."""

import torch
from torch import Tensor


def symmetric_part(a: Tensor) -> Tensor:
    """Return ``(A + Aᵀ) / 2``."""
    return torch.lerp(a, a.mT, 0.5)


def add_ridge(a: Tensor, eps: float) -> Tensor:
    """Return ``A + eps I``."""
    if eps == 0:
        return a
    return a + eps * torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
