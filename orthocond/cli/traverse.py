"""``orthocond traverse``: see what the directions of a trained GAN do."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter, validators

from orthocond.cli.runs import find_run
from orthocond.cli.settings import PositiveInt, whole
from orthocond.lab.errors import UsageError
from orthocond.lab.presets import has_generator
from orthocond.lab.text import printable

_SHOWN = 6  # directions, if not told
_MOST_STEPS = 1000
Samples = Annotated[int, Parameter(converter=whole, validator=validators.Number(gte=1, lte=1000))]


def traverse(
    run: Path,
    /,
    *,
    directions: Literal["own", "axes", "sefa", "jacobian", "joint"] = "own",
    k: PositiveInt | None = None,
    samples: Samples = 4,
    steps: Annotated[str, Parameter(allow_leading_hyphen=True)] = "-3..3",
    gif: bool = False,
    out: Path | None = None,
    seed: Annotated[int, Parameter(converter=whole, validator=validators.Number(gte=0, lt=2**63))] = 0,
    runs: Path = Path("runs"),
    allow_import: str | None = None,
) -> None:
    """Draw the images along directions of a GAN's averaged generator.

    A picture has one block per direction, in which rows are samples and columns are steps. With one sample, the rows
    are directions. An animation has samples as rows and directions as columns, and runs forward and back.

    Args:
        run: The run, by folder or number.
        directions: `own` are EigenGAN's, or else the axes of the latent space; `sefa` those of the first projection;
            `jacobian` those in which images move most; `joint` those whose effects are orthogonal at most latents.
        k: How many, those with the largest effect or importance first; by default 6, or all if there are fewer.
        samples: How many latents to start from.
        steps: Start and end, in sigma; `-3..3` goes in whole steps, `-2..2:9` in nine.
        gif: Whether to make an animation.
        out: File to write; by default one in the figures folder of the run. A name that ends with .gif makes an
            animation.
        seed: Seed of the latents.
        runs: Folder of the runs.
        allow_import: Function of the networks that the run may import and call, as its configuration names it.
    """
    values = _steps(steps)
    animated = gif or (out is not None and out.suffix.lower() == ".gif")
    if gif and out is not None and out.suffix.lower() != ".gif":
        raise UsageError(f"An animation needs a file that ends with .gif; got {out}.")
    found = find_run(run, runs)
    if not has_generator(found.config):
        raise UsageError(f"traverse needs the run of a GAN; {found.path} is the run of a classifier.")
    from orthocond import directions as drawing
    from orthocond.lab.generation.directions import find_directions
    from orthocond.lab.generation.networks import load_generator

    generator: Any = load_generator(found, allow_import=allow_import)
    if k is not None and k > generator.z_dim:
        raise UsageError(f"--k needs at most {generator.z_dim}, the latents of this generator; got {k}.")
    shown = find_directions(generator, directions, min(_SHOWN, generator.z_dim) if k is None else k)
    images = drawing.traverse(generator, samples, shown, values, seed=seed)
    file = out or found.figures / f"traverse-{directions}.{'gif' if animated else 'png'}"
    file.parent.mkdir(parents=True, exist_ok=True)
    title = f"{found.path.name}, {shown.method}"
    if animated:
        drawing.gif(file, images, shown, values, title=title)
    elif samples == 1:
        drawing.strip(images, shown, values, title=title).save(file)
    else:
        names = [f"{title}: {name}" for name in shown.names]
        _stacked([drawing.grid(images, shown, values, index=i, title=name) for i, name in enumerate(names)]).save(file)
    print(shown)
    print(f"Written to {printable(file)}")


def _steps(text: str) -> list[float]:
    """The steps from a text.

    Example:
        >>> _steps("-1..1"), _steps("0..1:5")
        ([-1.0, 0.0, 1.0], [0.0, 0.25, 0.5, 0.75, 1.0])
    """
    number = r"([+-]?\d*\.?\d+)"
    match = re.fullmatch(rf"{number}\.\.{number}(?::(\d+))?", text)
    if match is None:
        raise UsageError(f"--steps needs LOW..HIGH or LOW..HIGH:COUNT, such as -3..3 or -2..2:9; got {text!r}.")
    low, high = float(match[1]), float(match[2])
    count = int(match[3]) if match[3] else int(min(high - low, _MOST_STEPS)) + 1
    if high <= low or count < 2:
        raise UsageError(f"--steps needs to go up by at least one step; got {text!r}.")
    if count > _MOST_STEPS:
        raise UsageError(f"--steps needs at most {_MOST_STEPS} steps; got {text!r}.")
    size = (high - low) / (count - 1) if match[3] else 1.0
    return [low + i * size for i in range(count)]


def _stacked(images: list[Any]) -> Any:
    """Pictures of pillow below one another."""
    from PIL import Image

    sheet = Image.new("RGB", (max(i.width for i in images), sum(i.height for i in images)), "white")
    y = 0
    for image in images:
        sheet.paste(image, (0, y))
        y += image.height
    return sheet
