"""Directions of generators that somebody else trained: energies off the diagonal, effects, stability, pictures.

    python benchmarks/foreign_generators.py FOLDER [--out results/foreign-generators] [--latents 64] [--k 24]

The folder holds decoders of YannDubs/disentangling-vae (disvae-*.pt) and the face32.pt of
fletchersarip93/face-generator; those that are missing are skipped. The output has table.md, numbers.json, and strips of
directions: of faces all kinds, regions too, and the joint ones from a second latent; of dSprites the axes and the joint
ones.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import orthocond as oc
from orthocond.directions import (
    Directions,
    axes,
    effect_sizes,
    jacobian_directions,
    joint_directions,
    off_diagonal_energies,
    region_directions,
    sefa,
    strip,
    traverse,
)
from orthocond.matrix import matrix_view
from orthocond.matrix.spectra import singular_spectrum

SHOWN = 16  # directions in a picture, at most
KINDS = ("axes", "sefa", "jacobian", "joint")
STARTS = {"disvae": (1, 6), "face32": (10, 22)}  # latents of seed 1 that pictures start from: images that are clear
REGIONS = {  # of faces: center row, center column, height, width
    "celeba": {"eyes": (30, 32, 8, 30), "mouth": (43, 32, 8, 18), "hair": (12, 32, 14, 40)},
    "face32": {"eyes": (13, 16, 6, 24), "mouth": (25, 16, 6, 14), "hair": (3, 16, 6, 32)},
}


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


def first_layer(generator: oc.Generator) -> nn.Module:
    """The layer that meets the latents."""
    module = generator.module
    return module.lin1 if isinstance(module, Decoder) else module.generator_deconv[0][0]


def by_effect(directions: Directions, generator: oc.Generator) -> Directions:
    """The directions with the largest effect first."""
    return directions[effect_sizes(generator, directions).argsort(descending=True).tolist()]


def region_study(
    generator: oc.Generator, regions: dict[str, tuple[int, ...]]
) -> tuple[list[dict[str, Any]], Directions]:
    """Effects of the two first directions of each region inside and outside of it, and those of ReSeFa."""
    rows, found = [], []
    size = generator(generator.sample(1)).shape[-1]
    for name, (row, column, height, width) in regions.items():
        outside = torch.ones(size, size, dtype=torch.bool)
        outside[row - height // 2 : row + height // 2, column - width // 2 : column + width // 2] = False
        for method in ("resefa", "lowrank"):
            directions = region_directions(generator, 32, mask=~outside, method=method)[:2]
            effects = [effect_sizes(generator, directions, mask=mask).tolist() for mask in (~outside, outside)]
            rows.append({"region": name, "method": method, "inside": effects[0], "outside": effects[1]})
            if method == "resefa":
                found.append(replace(directions, names=tuple(f"{name} {i}" for i in range(len(directions)))))
    vectors, importance = (torch.cat([getattr(one, of) for one in found]) for of in ("vectors", "importance"))
    return rows, Directions(vectors, importance, sum((one.names for one in found), ()), "region", tie_tol=None)


def draw(name: str, generator: oc.Generator, found: dict[str, Directions], out: Path) -> None:
    """Strips of the directions; the joint ones of faces from two latents."""
    faces = "dsprites" not in name
    latents = generator.sample(24, 1)[list(STARTS["face32" if name == "face32" else "disvae"])]
    for kind, directions in found.items():
        if not faces and kind not in ("axes", "joint"):
            continue
        shown = directions[: min(SHOWN, len(directions))].measure(generator)
        images = traverse(generator, latents, shown)
        for i in range(2 if kind == "joint" and faces else 1):
            picture = strip(images, shown, sample=i, title=f"{name}, {kind}")
            picture.save(out / f"{name}-{kind}{'-again' * i}.jpg", quality=75)


def study(name: str, generator: oc.Generator, latents: int, k: int, out: Path) -> dict[str, Any]:
    """Measure all kinds of directions of a generator, and draw them."""
    k = min(k, generator.z_dim)
    layer = first_layer(generator)
    start = time.process_time()
    joint = joint_directions(generator, latents, k)
    seconds = time.process_time() - start
    found = {
        "axes": by_effect(axes(generator.z_dim), generator)[:k],
        "sefa": sefa(layer, normalize=False, k=k),
        "jacobian": jacobian_directions(generator, latents, k),
        "joint": joint,
    }
    energies = dict(zip(found, off_diagonal_energies(generator, list(found.values()), latents), strict=True))
    effects = {kind: effect_sizes(generator, directions).tolist() for kind, directions in found.items()}
    regions: list[dict[str, Any]] = []
    if asked := next((masks for part, masks in REGIONS.items() if part in name), None):
        regions, found["region"] = region_study(generator, asked)
    draw(name, generator, found, out)
    return {
        "generator": name,
        "latents": generator.z_dim,
        "directions": k,
        "condition": float(singular_spectrum(matrix_view(layer.weight.detach())).condition),
        "energies": energies,
        "effects": effects,
        "regions": regions,
        "starts": joint.agreement,
        "stability": agreement(joint, joint_directions(generator, latents, k, seed=1)),
        "largest_entries": joint.vectors.abs().amax(1).tolist(),
        "seconds": seconds,
    }


def page(rows: list[dict[str, Any]]) -> str:
    """The table for people."""
    head = ["generator", "latents", "κ of the first layer", *KINDS, "starts", "other latents", "effects of joint ones"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        effects = row["effects"]["joint"]
        lines.append(
            [
                row["generator"],
                str(row["latents"]) + (f", k = {row['directions']}" if row["directions"] < row["latents"] else ""),
                f"{row['condition']:.1f}",
                *(f"{row['energies'][kind]:.3f}" for kind in KINDS),
                f"{row['starts']:.2f}",
                f"{row['stability']:.2f}",
                f"{max(effects):.2f} to {min(effects):.2f}",
            ]
        )
    head = ["generator", "region", "method", "effect inside", "effect outside"]
    parts = [head, ["---"] * len(head)]
    for row in rows:
        for one in row["regions"]:
            effects = (", ".join(f"{value:.3f}" for value in one[where]) for where in ("inside", "outside"))
            parts.append([row["generator"], one["region"], one["method"], *effects])
    first, second = ("\n".join(f"| {' | '.join(line)} |" for line in table) for table in (lines, parts))
    return f"""# Generators of others

{first}

- The columns of the four kinds are off-diagonal energies on latents that were not used to find the directions: the part
  of the squared entries of JᵀJ that is off the diagonal, 0 if all directions change the image in orthogonal ways. Where
  not all directions are taken (k), it is of the k axes with the largest effect.
- Starts: the least cosine of joint directions from different starts. Other latents: their mean cosine with those that
  another set of latents gives.
- Effects: root mean square change of a pixel, from -1 to 1, for one sigma.

## Directions of regions

{second}

The two first directions of each region.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("results/foreign-generators"))
    parser.add_argument("--latents", type=int, default=64)
    parser.add_argument("--k", type=int, default=24)
    arguments = parser.parse_args()
    files = [*sorted(arguments.folder.glob("disvae-*.pt")), *arguments.folder.glob("face32.pt")]
    if not files:
        parser.error(f"{arguments.folder} has neither disvae-*.pt nor face32.pt.")
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for path in files:
        make = face32 if path.stem == "face32" else decoder
        rows.append(study(path.stem, make(path), arguments.latents, arguments.k, arguments.out))
        print(path.stem, rows[-1]["energies"], flush=True)
    (arguments.out / "numbers.json").write_text(json.dumps(rows, indent=1) + "\n")
    (arguments.out / "table.md").write_text(page(rows))


if __name__ == "__main__":
    main()
