"""Style transfer by whitening and coloring, on two pictures that the script draws itself.

The content takes mean and covariance of the style: of the three colors, or of all 192 numbers of patches of 8 x 8
pixels, which carry textures too. Writes one PNG: content, style, and the content at several strengths.
"""

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch.nn import functional as F

import orthocond as oc

SIZE = 256
PATCH = 8


def mixed(below, above, where):
    return below + (above - below) * where


def color(red, green, blue):
    return torch.tensor([red, green, blue]).view(3, 1, 1) / 255


def coordinates():
    return torch.meshgrid(torch.linspace(0, 1, SIZE), torch.linspace(0, 1, SIZE), indexing="ij")


def landscape():
    """Blue sky, a sun, two ranges of hills and a meadow, on paper with a fine grain."""
    y, x = coordinates()
    picture = mixed(color(92, 150, 214), color(226, 238, 246), y[None] * 1.4)
    sun = torch.sigmoid((0.09 - torch.hypot(x - 0.72, y - 0.24)) * 150)
    picture = mixed(picture, color(255, 244, 190), sun)
    for base, height, waves, tone in ((0.55, 0.09, 3.1, (110, 130, 160)), (0.68, 0.07, 5.3, (64, 96, 92))):
        ridge = base + height * torch.sin(waves * math.pi * x + waves) * torch.cos(1.7 * x * math.pi)
        picture = mixed(picture, color(*tone), torch.sigmoid((y - ridge) * 160))
    meadow = torch.sigmoid((y - 0.8 - 0.03 * torch.sin(4 * math.pi * x)) * 120)
    grass = 0.5 + 0.5 * torch.sin(90 * x + 30 * torch.sin(12 * y)) * torch.sin(70 * y)
    picture = mixed(picture, mixed(color(78, 128, 52), color(132, 172, 82), grass), meadow)
    grain = torch.randn(1, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    return (picture + 0.01 * grain).clamp(0, 1)


def painting():
    """Warm brush strokes along a swirl."""
    y, x = coordinates()
    angle = torch.atan2(y - 0.45, x - 0.4)
    radius = torch.hypot(y - 0.45, x - 0.4)
    strokes = torch.sin(60 * radius + 5 * angle + 2 * torch.sin(3 * angle + 20 * x))
    slow = 0.5 + 0.5 * torch.sin(9 * radius - 2 * angle)
    warm = mixed(color(196, 72, 32), color(244, 190, 66), slow)
    return mixed(mixed(color(36, 22, 70), warm, torch.sigmoid(3 * strokes + 1)), color(252, 236, 190), (strokes > 0.97))


def transfer(content, style, patch, alpha):
    """Whiten and color patches of patch x patch pixels, for several grids of them, and average the pictures."""
    layer = oc.WhitenColor2d(alpha=alpha)
    style = F.unfold(style, patch).unsqueeze(-1)  # patches at all places, in the order of pixel_unshuffle
    offsets = range(0, patch, max(1, patch // 4))
    pictures = []
    for offset in offsets:
        patches = F.pixel_unshuffle(content.roll((offset, offset), (-2, -1)), patch)
        pictures.append(F.pixel_shuffle(layer(patches, style), patch).roll((-offset, -offset), (-2, -1)))
    return torch.stack(pictures).mean(0).clamp(0, 1)


def statistics(picture):
    pixels = picture[0].flatten(1).double()
    return pixels.mean(1), torch.cov(pixels)


def save(panels, path):
    image = Image.new("RGB", (len(panels) * (SIZE + 8), SIZE + 28), "white")
    draw = ImageDraw.Draw(image)
    for place, (name, picture) in enumerate(panels.items()):
        pixels = (picture[0].movedim(0, -1).numpy() * 255).round().astype(np.uint8)
        image.paste(Image.fromarray(pixels), (place * (SIZE + 8) + 4, 4))
        draw.text((place * (SIZE + 8) + 6, SIZE + 9), name, fill="black")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("runs/examples/style_transfer.png"))
    output = parser.parse_args().output
    content, style = landscape()[None], painting()[None]
    panels = {"content": content, "style": style}
    before = oc.metrics.frechet_distance(*statistics(content), *statistics(style))
    print(f"{'':24s}distance of its colors from those of the style\n{'content':24s}{before:.4f}")
    for patch, alpha in ((1, 1.0), (PATCH, 0.5), (PATCH, 1.0)):
        name = "colors" if patch == 1 else f"patches, strength {alpha:g}"
        panels[name] = transfer(content, style, patch, alpha)
        print(f"{name:24s}{oc.metrics.frechet_distance(*statistics(panels[name]), *statistics(style)):.4f}")
    save(panels, output)
    print(f"\nThe picture is {output.resolve()}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
