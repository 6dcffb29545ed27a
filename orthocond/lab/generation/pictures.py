"""Pictures of generated images."""

import io

import numpy as np
import torch
from torch import Tensor

COLUMNS = 8


def picture(images: Tensor, columns: int = COLUMNS) -> bytes:
    """A PNG of images ``(N, 3, H, W)`` in [-1, 1], in rows; small ones are enlarged."""
    from PIL import Image

    count, channels, height, width = images.shape
    rows = -(-count // columns)
    sheet = images.new_ones(rows * columns, channels, height + 2, width + 2)  # a white line around each
    sheet[:count, :, 1:-1, 1:-1] = images.clamp(-1, 1)
    tiles = sheet.unflatten(0, (rows, columns)).permute(0, 3, 1, 4, 2).reshape(rows * (height + 2), -1, channels)
    pixels = tiles.add(1).mul(127.5).round().to(torch.uint8).cpu().numpy()
    enlarged = Image.fromarray(np.repeat(np.repeat(pixels, f := max(1, 96 // height), 0), f, 1))
    file = io.BytesIO()
    enlarged.save(file, "PNG")
    return file.getvalue()
