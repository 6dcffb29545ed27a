"""Regions of an image, as masks or rectangles."""

import math

import torch
from torch import Tensor

Region = Tensor | tuple[float, float, float, float]


def check_mask(mask: Region, images: Tensor, name: str) -> Tensor:
    """A region as bool ``(H, W)``: a mask of that size, or (center row, center column, height, width) in pixels."""
    height, width = images.shape[-2:]
    if isinstance(mask, (tuple, list)):
        numbers = [v for v in mask if isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v)]
        if len(mask) != 4 or len(numbers) != 4:
            raise ValueError(f"{name} needs a region (center_row, center_col, height, width); got {mask!r}.")
        row, column, tall, wide = mask
        top, left = round(row - tall / 2), round(column - wide / 2)
        if min(tall, wide) < 1 or top < 0 or left < 0 or top + tall > height or left + wide > width:
            raise ValueError(f"{name} needs a region inside the {height}x{width} image; got {tuple(mask)}.")
        region = torch.zeros(height, width, dtype=torch.bool, device=images.device)
        region[top : top + round(tall), left : left + round(wide)] = True
        return region
    if not isinstance(mask, Tensor):
        raise TypeError(
            f"{name} needs a mask tensor (H, W) or (center_row, center_col, height, width); got {type(mask).__name__}."
        )
    if mask.shape != (height, width):
        raise ValueError(f"{name} needs a mask of the size of the images, {height}x{width}; got {tuple(mask.shape)}.")
    region = mask.to(images.device).bool()
    if not bool((mask.to(images.device) == region).all()):
        raise ValueError(f"{name} needs a mask of zeros and ones; got other values. Use mask > 0.5.")
    if not region.any():
        raise ValueError(f"{name} needs a region with at least one pixel; the mask is empty.")
    return region
