"""Generators whose measurements are known."""

import torch
from torch import Tensor, nn


class Tiles(nn.Module):
    """Each latent is the brightness of one tile of the image, through an orthogonal matrix if one is given.

    The images ``(n, 1, 8 side, 8 side)`` do not change with latents beyond the tiles.
    """

    def __init__(self, side: int = 2, z_dim: int | None = None, turn: Tensor | None = None) -> None:
        super().__init__()
        self.side = side
        self.z_dim = side**2 if z_dim is None else z_dim
        self.register_buffer("turn", torch.eye(self.z_dim) if turn is None else turn)

    def forward(self, z: Tensor) -> Tensor:
        tiles = (z @ self.turn)[:, : self.side**2].tanh().reshape(-1, 1, self.side, self.side)
        return tiles.repeat_interleave(8, 2).repeat_interleave(8, 3)


class Linear(nn.Module):
    """The image is a linear map of the latent."""

    def __init__(self, matrix: Tensor, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.matrix = nn.Parameter(matrix)
        self.shape = shape
        self.z_dim = len(matrix)

    def forward(self, z: Tensor) -> Tensor:
        return (z @ self.matrix).reshape(-1, *self.shape)


def read_tiles(images: Tensor) -> Tensor:
    """The latents of the tiles."""
    return images[:, 0, ::8, ::8].flatten(1).atanh()


def rotation(n: int, seed: int = 0) -> Tensor:
    q, _ = torch.linalg.qr(torch.randn(n, n, generator=torch.Generator().manual_seed(seed)))
    return q
