"""Pictures of traversals: sheets of labeled rows, and animations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

import torch
from torch import Tensor

from orthocond._checks import check_choice, check_count
from orthocond.directions.basis import Directions
from orthocond.directions.traversal import STEPS, check_steps

_LEAST_TILE = 96  # pixels: smaller images are enlarged by a whole factor
_GAP = 4
_MARGIN = 16
_HEADING = 38  # height of a section's name and the line above it
_TEXT, _FAINT, _ACCENT, _RULE = "#1a1a1a", "#666666", "#D55E00", "#cccccc"


@dataclass(frozen=True)
class _Section:
    """Rows of images ``(rows, columns, H, W, 3)``, uint8, with the lines of text beside each row."""

    heading: str
    tiles: Tensor
    rows: list[list[str]]


def grid(
    images: Tensor,
    directions: Directions,
    steps: Sequence[float] | Tensor = STEPS,
    *,
    index: int = 0,
    mode: str = "add",
    original: Tensor | None = None,
    title: str | None = None,
    scale: int | None = None,
) -> Any:
    """Draw one direction: rows are samples, columns are steps.

    Args:
        images: Of `traverse`, ``(directions, samples, steps, C, H, W)`` with 1 or 3 channels, in [-1, 1].
        directions: Those that were traversed.
        steps: Those that were taken, in sigma.
        index: Which direction.
        mode: That of `traverse`: after ``"add"`` step 0 is the unchanged image, and its column is marked.
        original: Unchanged images ``(samples, C, H, W)`` for a first, marked column, as ``"set"`` needs it.
        title: Title of the picture; None takes method and name of the direction.
        scale: Factor by which images are enlarged; None makes them at least 96 pixels wide.

    Returns:
        A ``PIL.Image.Image``: ``grid(...).save("direction0.png")``.

    Raises:
        ImportError: If pillow or matplotlib, which has the font, is not installed.
        ValueError: If shapes do not fit, or pixels are not finite.

    Example:
        >>> from orthocond.directions import axes, grid
        >>> grid(torch.rand(2, 3, 7, 1, 16, 16), axes(2)).mode
        'RGB'
    """
    values = _check(images, directions, steps, mode, "grid")
    k = _pick(index, len(directions), "grid(index=...)")
    tiles = _with_original(images[k], original)
    rows = [[f"sample {i}"] for i in range(len(tiles))]
    subtitle = " · ".join(_describe(directions, k)[1:])
    heads, marked = _columns(values, mode, original is not None)
    return _sheet([_Section("", _pixels(tiles, scale), rows)], heads, marked, title or directions.names[k], subtitle)


def strip(
    images: Tensor,
    directions: Directions,
    steps: Sequence[float] | Tensor = STEPS,
    *,
    sample: int = 0,
    mode: str = "add",
    original: Tensor | None = None,
    title: str | None = None,
    scale: int | None = None,
) -> Any:
    """Draw all directions of one sample: rows are directions, columns the steps; arguments as in `grid`."""
    values = _check(images, directions, steps, mode, "strip")
    section = _directions_section("", images, directions, sample, original, scale, "strip")
    heads, marked = _columns(values, mode, original is not None)
    return _sheet([section], heads, marked, title or f"{directions.method}, sample {sample}", "")


def compare(
    traversals: Mapping[str, tuple[Tensor, Directions]],
    steps: Sequence[float] | Tensor = STEPS,
    *,
    sample: int = 0,
    mode: str = "add",
    original: Tensor | None = None,
    title: str | None = None,
    scale: int | None = None,
) -> Any:
    """Draw several methods side by side: for each the directions of one sample, as `strip` does, under its name.

    Args:
        traversals: Images and directions by the name of the method. Traverse the same latents for all.
        steps: Those that were taken, in sigma.
        sample: Which sample.
        mode: That of `traverse`.
        original: Unchanged images ``(samples, C, H, W)`` for a first, marked column.
        title: Title of the picture.
        scale: Factor by which images are enlarged; None makes them at least 96 pixels wide.

    Returns:
        A ``PIL.Image.Image``.

    Raises:
        ImportError: If pillow or matplotlib is not installed.
        ValueError: If there is nothing to draw, shapes do not fit, or pixels are not finite.

    Example:
        >>> from orthocond.directions import axes, compare
        >>> images = torch.rand(2, 3, 7, 1, 16, 16)
        >>> compare({"none": (images, axes(2)), "nog": (images, axes(2))}).size[1] > 4 * 96
        True
    """
    if not traversals:
        raise ValueError("compare needs at least one traversal; got none.")
    values: list[float] = []
    sections = []
    for name, (images, directions) in traversals.items():
        values = _check(images, directions, steps, mode, "compare")
        sections.append(_directions_section(name, images, directions, sample, original, scale, "compare"))
    if len({section.tiles.shape[1:] for section in sections}) > 1:
        raise ValueError("compare needs images of one size; these have " + _shapes(traversals))
    heads, marked = _columns(values, mode, original is not None)
    return _sheet(sections, heads, marked, title or f"Methods compared, sample {sample}", "")


def gif(
    path: str | PathLike[str],
    images: Tensor,
    directions: Directions,
    steps: Sequence[float] | Tensor = STEPS,
    *,
    mode: str = "add",
    title: str | None = None,
    scale: int | None = None,
    milliseconds: int = 150,
) -> None:
    """Save an animation with a frame for each step, forward and back: rows are samples, columns are directions.

    Args:
        path: File to write.
        images: Of `traverse`, ``(directions, samples, steps, C, H, W)``.
        directions: Those that were traversed.
        steps: Those that were taken, in sigma.
        mode: That of `traverse`.
        title: Title of the picture; None takes the method.
        scale: Factor by which images are enlarged; None makes them at least 96 pixels wide.
        milliseconds: Time of each frame.

    Raises:
        ImportError: If pillow or matplotlib is not installed.
        ValueError: If shapes do not fit, or pixels are not finite.
    """
    values = _check(images, directions, steps, mode, "gif")
    check_count(milliseconds, "gif(milliseconds=...)", 1)
    heads = [_describe(directions, i) for i in range(len(directions))]
    rows = [[f"sample {i}"] for i in range(images.shape[1])]
    frames = []
    for i, value in enumerate(values):
        section = _Section("", _pixels(images[:, :, i].transpose(0, 1), scale), rows)
        subtitle = f"step {_sigma(value)}" + (", unchanged" if mode == "add" and value == 0 else "")
        frames.append(_sheet([section], heads, None, title or directions.method, subtitle))
    frames += frames[-2:0:-1]
    # One palette for all frames: else the same color flickers from frame to frame.
    palette = _pillow()[0].new("RGB", (frames[0].width, frames[0].height * len(frames)))
    for i, frame in enumerate(frames):
        palette.paste(frame, (0, i * frame.height))
    palette = palette.quantize(256)
    shown = [frame.quantize(palette=palette) for frame in frames]
    shown[0].save(fspath(path), "GIF", save_all=True, append_images=shown[1:], duration=milliseconds, loop=0)


def _check(
    images: object, directions: Directions, steps: Sequence[float] | Tensor, mode: str, name: str
) -> list[float]:
    """Raise if images, directions and steps are not those of one traversal."""
    values = check_steps(steps, name)
    check_choice(mode, f"{name}(mode=...)", ("add", "set"))
    if not isinstance(images, Tensor) or images.ndim != 6 or images.shape[3] not in (1, 3) or not images.numel():
        came = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise ValueError(
            f"{name} needs images (directions, samples, steps, C, H, W) of traverse, with C of 1 or 3; got {came}."
        )
    if images.shape[0] != len(directions) or images.shape[2] != len(values):
        raise ValueError(
            f"{name} needs the directions and steps of the traversal: the images have {images.shape[0]} and "
            f"{images.shape[2]}; got {len(directions)} and {len(values)}."
        )
    return values


def _pick(index: int, count: int, name: str) -> int:
    if index not in range(-count, count):
        raise ValueError(f"{name} needs one of {count}, from 0 to {count - 1}; got {index!r}.")
    return index % count


def _shapes(traversals: Mapping[str, tuple[Tensor, Directions]]) -> str:
    return ", ".join(f"{name}: {tuple(images.shape[2:])}" for name, (images, _) in traversals.items())


def _with_original(walks: Tensor, original: Tensor | None) -> Tensor:
    """Rows ``(rows, steps, C, H, W)``, each with its original in front."""
    if original is None:
        return walks
    if original.shape != (len(walks), *walks.shape[2:]):
        raise ValueError(
            f"original needs shape {(len(walks), *walks.shape[2:])}, one image for each sample; "
            f"got {tuple(original.shape)}."
        )
    return torch.cat([original[:, None].to(walks), walks], dim=1)


def _directions_section(
    heading: str,
    images: Tensor,
    directions: Directions,
    sample: int,
    original: Tensor | None,
    scale: int | None,
    name: str,
) -> _Section:
    """The directions of one sample as rows."""
    place = _pick(sample, images.shape[1], f"{name}(sample=...)")
    tiles = torch.stack([_with_original(walks, original)[place] for walks in images])
    return _Section(heading, _pixels(tiles, scale), [_describe(directions, i) for i in range(len(directions))])


def _pixels(tiles: Tensor, scale: int | None) -> Tensor:
    """Images ``(rows, columns, C, H, W)`` in [-1, 1] as enlarged uint8 ``(rows, columns, H, W, 3)``."""
    if not tiles.isfinite().all():
        raise ValueError("Images to draw need finite pixels; some are NaN or infinite.")
    if scale is None:
        scale = max(1, -(-_LEAST_TILE // tiles.shape[-1]))
    check_count(scale, "scale", 1)
    values = (tiles.detach().cpu().float().clamp(-1, 1) + 1) * 127.5
    rgb = values.round().to(torch.uint8).movedim(2, -1).expand(*tiles.shape[:2], *tiles.shape[3:], 3)
    return rgb.repeat_interleave(scale, 2).repeat_interleave(scale, 3)


def _columns(values: list[float], mode: str, original: bool) -> tuple[list[list[str]], int | None]:
    """The lines above each column, and the column of unchanged images."""
    heads = [[_sigma(value)] for value in values]
    if original:
        return [["original"], *heads], 0
    if mode == "set" or 0.0 not in values:
        return heads, None
    marked = values.index(0.0)
    heads[marked].append("unchanged")
    return heads, marked


def _sigma(value: float) -> str:
    return f"{value:+.3g}σ".replace("-", "\N{MINUS SIGN}") if value else "0σ"


def _describe(directions: Directions, i: int) -> list[str]:
    """Name, importance, effect and ties of a direction, a line each."""
    lines = [directions.names[i], f"importance {float(directions.importance[i]):.3g}"]
    if directions.effect is not None:
        lines.append(f"effect {float(directions.effect[i]):.3g} / σ")
    for group in directions.ties:
        if i in group:
            lines.append(f"tied with {len(group) - 1} other" + "s" * (len(group) > 2))
    return lines


def _pillow() -> tuple[Any, Any, Any]:
    """``Image`` and ``ImageDraw`` of pillow, and a function that opens matplotlib's DejaVu Sans, which has σ."""
    try:
        from matplotlib import get_data_path
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise ImportError(
            f"Drawing needs pillow and matplotlib, and there is no {error.name}; pip install 'orthocond[lab]'."
        ) from error

    def font(size: int, style: str = "") -> Any:
        return ImageFont.truetype(f"{get_data_path()}/fonts/ttf/DejaVuSans{style}.ttf", size)

    return Image, ImageDraw, font


def _sheet(sections: list[_Section], heads: list[list[str]], marked: int | None, title: str, subtitle: str) -> Any:
    """Draw sections of rows below one another, with one line of heads above all columns."""
    image_module, draw_module, font = _pillow()
    text, bold, heavy, large = font(13), font(13, "-Bold"), font(15, "-Bold"), font(17, "-Bold")
    line = 18
    height, width = sections[0].tiles.shape[2:4]
    label = max(bold.getlength(part) for section in sections for row in section.rows for part in row)
    pitch = max(width, *(int(bold.getlength(part)) + 8 for head in heads for part in head)) + _GAP
    tall = max(height, line * max(len(row) for section in sections for row in section.rows)) + _GAP
    left = _MARGIN + int(label) + 12
    top = _MARGIN + 26 + (line + 4 if subtitle else 0) + 6
    body = top + line * max(map(len, heads)) + 4
    longest = max(large.getlength(title), text.getlength(subtitle), *(heavy.getlength(s.heading) for s in sections))
    size = (
        max(left + pitch * len(heads), _MARGIN + int(longest)) + _MARGIN,
        body + sum(tall * len(s.rows) + (_HEADING if s.heading else 0) for s in sections) + _MARGIN,
    )
    sheet = image_module.new("RGB", size, "white")
    draw = draw_module.Draw(sheet)
    draw.text((_MARGIN, _MARGIN), title, _TEXT, large)
    draw.text((_MARGIN, _MARGIN + 26), subtitle, _FAINT, text)
    for column, head in enumerate(heads):
        center = left + pitch * column + (pitch - _GAP) / 2
        for i, part in enumerate(head):
            chosen = column == marked
            color = _ACCENT if chosen else (_TEXT if i == 0 else _FAINT)
            draw.text((center, top + line * i), part, color, bold if chosen else text, anchor="ma")
    y = body
    for section in sections:
        if section.heading:
            draw.line((_MARGIN, y + 6, size[0] - _MARGIN, y + 6), _RULE)
            draw.text((_MARGIN, y + 13), section.heading, _TEXT, heavy)
            y += _HEADING
        for row, tiles in zip(section.rows, section.tiles, strict=True):
            for i, part in enumerate(row):
                middle = y + (tall - _GAP) / 2 + line * (i - (len(row) - 1) / 2)
                draw.text((_MARGIN, middle), part, _TEXT if i == 0 else _FAINT, bold if i == 0 else text, anchor="lm")
            for column, tile in enumerate(tiles):
                x = left + pitch * column + (pitch - _GAP - width) // 2
                place = y + (tall - _GAP - height) // 2
                if column == marked:
                    draw.rectangle((x - 2, place - 2, x + width + 1, place + height + 1), _ACCENT)
                sheet.paste(image_module.fromarray(tile.numpy()), (x, place))
            y += tall
    return sheet
