"""Directions of generators that somebody else trained: energies off the diagonal, stability, pictures.

    python benchmarks/foreign_generators.py FOLDER [--out PICTURES] [--latents 64] [--k 16]

The folder holds decoders of YannDubs/disentangling-vae (disvae-*.pt) and the face32.pt of
fletchersarip93/face-generator; those that are missing are skipped.
"""

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import orthocond as oc
from orthocond.directions import (
    Directions,
    jacobian_directions,
    joint_directions,
    off_diagonal_energy,
    strip,
    traverse,
)


class Decoder(nn.Module):
    """The decoder of disentangling-vae: three linear layers, then transposed convolutions; 10 normal latents."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.lin1, self.lin2, self.lin3 = nn.Linear(10, 256), nn.Linear(256, 256), nn.Linear(256, 512)
        self.convT_64, self.convT1, self.convT2 = (nn.ConvTranspose2d(32, 32, 4, 2, 1) for _ in range(3))
        self.convT3 = nn.ConvTranspose2d(32, channels, 4, 2, 1)

    def forward(self, z: Tensor) -> Tensor:
        for layer in (self.lin1, self.lin2, self.lin3):
            z = layer(z).relu()
        z = z.unflatten(1, (32, 4, 4))
        for layer in (self.convT_64, self.convT1, self.convT2):
            z = layer(z).relu()
        return self.convT3(z).sigmoid()


def decoder(path: Path) -> oc.Generator:
    """A decoder of disentangling-vae as a generator."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    state = {key.removeprefix("decoder."): value for key, value in state.items() if key.startswith("decoder.")}
    module = Decoder(len(state["convT3.bias"]))
    module.load_state_dict(state)
    return oc.Generator(module, 10, range=(0, 1))


class Face32(nn.Module):
    """The DCGAN of face-generator, for faces of 32 pixels; 100 uniform latents as (100, 1, 1)."""

    def __init__(self) -> None:
        super().__init__()

        def up(inputs: int, outputs: int) -> nn.Sequential:
            convolution = nn.ConvTranspose2d(inputs, outputs, 4, 2, 1, bias=False)
            return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.LeakyReLU(0.2))

        self.generator_deconv = nn.Sequential(
            nn.Sequential(nn.ConvTranspose2d(100, 256, 4, bias=False), nn.BatchNorm2d(256)),
            nn.Sequential(nn.Conv2d(256, 128, 3, padding=1, bias=False), nn.BatchNorm2d(128), nn.LeakyReLU(0.2)),
            up(128, 64),
            up(64, 32),
            nn.Sequential(nn.ConvTranspose2d(32, 3, 4, 2, 1), nn.Tanh()),
        )

    def forward(self, z: Tensor) -> Tensor:
        return self.generator_deconv(z)


def face32(path: Path) -> oc.Generator:
    """The DCGAN of faces as a generator."""
    module = Face32()
    module.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return oc.Generator(module, 100, prior="uniform")


def agreement(a: Directions, b: Directions) -> float:
    """Mean cosine of the directions of a with their partners in b."""
    return float((a.vectors @ b.vectors.mT).abs().amax(1).mean())


def study(name: str, generator: oc.Generator, latents: int, k: int, out: Path | None) -> None:
    k = min(k, generator.z_dim)
    start = time.perf_counter()
    joint = joint_directions(generator, latents, k)
    seconds = time.perf_counter() - start
    mean = jacobian_directions(generator, latents, k)
    other = joint_directions(generator, latents, k, seed=1)
    print(f"{name}: {generator.z_dim} latents, {k} directions, {seconds:.1f} s")
    energies = {key: round(value, 3) for key, value in joint.energies.items()}
    print(f"  energies {energies}, starts {joint.agreement:.3f}")
    fresh = {"axes": None, "mean": mean, "joint": joint}
    found = {key: round(off_diagonal_energy(generator, value, latents, seed=1), 3) for key, value in fresh.items()}
    print(f"  on other latents {found}, two sets of latents agree by {agreement(joint, other):.2f}")
    print(f"  largest entry {[round(v, 2) for v in joint.vectors.abs().amax(1).tolist()]}")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        z = generator.sample(2, 5)
        for kind, shown in (("joint", joint[:10]), ("mean", mean[:10])):
            for i in range(2):
                images = traverse(generator, z[i : i + 1], shown)
                strip(images, shown, title=f"{name}, {kind}").save(out / f"{name}-{kind}-{i}.png")
        joint.save(out / f"{name}.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--latents", type=int, default=64)
    parser.add_argument("--k", type=int, default=16)
    arguments = parser.parse_args()
    files = [*sorted(arguments.folder.glob("disvae-*.pt")), *arguments.folder.glob("face32.pt")]
    if not files:
        parser.error(f"{arguments.folder} has neither disvae-*.pt nor face32.pt.")
    for path in files:
        make = face32 if path.stem == "face32" else decoder
        study(path.stem, make(path), arguments.latents, arguments.k, arguments.out)


if __name__ == "__main__":
    main()
