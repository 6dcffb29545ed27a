"""Disentangled directions of a generator that you trained elsewhere, in one line each.

    python examples/directions_of_your_generator.py [FOLDER]

The generator here is small and untrained, so that this runs in seconds; put your own in its place. It writes
directions.json, which `Directions.load` and the explorer read, and directions.png, a picture of them.
"""

import sys
from pathlib import Path

import torch
from torch import nn

import orthocond as oc
from orthocond.directions import Directions, joint_directions, off_diagonal_energy, rotate, strip, traverse


def dcgan(z_dim: int = 16, width: int = 32) -> nn.Module:
    """A DCGAN of 16x16 pixels: latents (n, z_dim, 1, 1), pixels in [0, 1]."""
    return nn.Sequential(
        nn.ConvTranspose2d(z_dim, width, 4),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.ConvTranspose2d(width, width, 4, 2, 1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.ConvTranspose2d(width, 3, 4, 2, 1),
        nn.Sigmoid(),
    )


def main(folder: Path) -> None:
    torch.manual_seed(0)
    # What the library needs to know: how many latents, how they are distributed, what pixels mean.
    generator = oc.Generator(dcgan(), z_dim=16, prior="normal", range=(0, 1))
    found = joint_directions(generator, 64)
    print(found)
    folder.mkdir(parents=True, exist_ok=True)
    found.save(folder / "directions.json")
    shown = Directions.load(folder / "directions.json")[:6].measure(generator, 16)
    images = traverse(generator, 1, shown)
    strip(images, shown, title="Joint directions").save(folder / "directions.png")
    # A generator whose first latent is the first direction, and so on.
    turned = rotate(generator, found)
    print(f"off the diagonal: axes {off_diagonal_energy(generator):.3f}, rotated {off_diagonal_energy(turned):.3f}")
    print(f"Written to {folder / 'directions.json'} and {folder / 'directions.png'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("directions"))
