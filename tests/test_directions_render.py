"""Traversals and their pictures."""

import sys

import pytest
import torch
from PIL import Image
from torch import nn

from orthocond.directions import Directions, axes, compare, gif, grid, sefa, strip, traverse
from orthocond.gans import EigenGenerator


class Flat(nn.Module):
    """Gray images of 4 x 6 pixels with the value of a linear function of the latents."""

    z_dim = 3

    def forward(self, z):
        return (z @ torch.tensor([0.1, 0.2, 0.3]))[:, None, None, None].expand(-1, 1, 4, 6)


def tiles(picture, images, scale):
    """Where each image stands in the picture, pixel by pixel; an error if it is not there as a whole."""
    pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).reshape(*picture.size[::-1], 3)
    places = []
    for image in images:
        rgb = ((image.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).expand(3, -1, -1)
        tile = rgb.permute(1, 2, 0).repeat_interleave(scale, 0).repeat_interleave(scale, 1)
        windows = pixels.unfold(0, tile.shape[0], 1).unfold(1, tile.shape[1], 1)
        corners = (windows[..., 0, 0] == tile[0, 0]).all(-1) & (windows[..., -1, -1] == tile[-1, -1]).all(-1)
        found = [(int(y), int(x)) for y, x in corners.nonzero() if torch.equal(windows[y, x].permute(1, 2, 0), tile)]
        assert len(found) == 1
        places += found
    return places


def noise(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0)) * 2 - 1


# traverse


@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_traverse(batch_size):
    g = Flat()
    z = torch.randn(5, 3)
    directions = sefa(torch.randn(6, 3))
    steps = (-2.0, 0.0, 0.5)
    added = traverse(g, z, directions, steps, batch_size=batch_size)
    placed = traverse(g, z, directions, torch.tensor(steps), mode="set", batch_size=batch_size)
    assert added.shape == placed.shape == (3, 5, 3, 1, 4, 6)
    for i, n in enumerate(directions.vectors):
        for j, one in enumerate(z):
            for s, a in enumerate(steps):
                torch.testing.assert_close(added[i, j, s], g((one + a * n)[None])[0])
                without = one - (one @ n) * n
                torch.testing.assert_close(placed[i, j, s], g((without + a * n)[None])[0])
    torch.testing.assert_close(traverse(g, z, directions.vectors, steps), added)


def test_noise_is_the_same_along_a_row_and_from_call_to_call():
    g = EigenGenerator(8, 3, noise_dim=4, base_channels=4)
    z = torch.randn(4, 3)
    state = torch.get_rng_state()
    images = traverse(g, z, axes(3), (0.0, 0.0, 1.0))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(images[0, :, 0], images[2, :, 1])
    assert not torch.equal(images[0, :, 0], images[0, :, 2])
    assert torch.equal(traverse(g, z, axes(3)[1:], (0.0, 0.0, 1.0)), images[1:])
    alike = traverse(g, z[:1].expand(2, -1), axes(3), (0.0,))
    assert not torch.equal(alike[0, 0], alike[0, 1])  # two samples have their own noise
    assert not images.requires_grad


def test_drawn_latents_depend_on_the_seed():
    first, again, other = (traverse(Flat(), 2, axes(3), seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


# pictures


@pytest.mark.parametrize(("size", "scale"), [(16, 6), (32, 3), (64, 2), (128, 1)])
def test_grid_shows_each_image_whole_and_in_its_place(size, scale):
    images = noise(2, 2, 3, 3, size, size)
    places = tiles(grid(images, axes(2), (-1, 0, 1), index=1), images[1].flatten(0, 1), scale)
    rows, columns = [y for y, _ in places], [x for _, x in places]
    assert rows[0] == rows[1] == rows[2] < rows[3] - scale * size
    assert columns[0] == columns[3] < columns[1] - scale * size
    assert columns[1] < columns[2] - scale * size


def test_strip_compare_and_original():
    images, other = noise(2, 2, 2, 1, 8, 8), -noise(1, 2, 2, 1, 8, 8)
    original = noise(2, 1, 8, 8).flip(-1)
    tiles(strip(images, axes(2), (-1, 1), sample=1), images[:, 1].flatten(0, 1), 12)
    one = Directions(torch.eye(2)[:1], torch.ones(1))
    both = {"a": (images, axes(2)), "b": (other, one)}
    picture = compare(both, (-1, 1), original=original, mode="set", scale=2)
    shown = torch.cat([images[0, 0], images[1, 0], other[0, 0]])
    places = tiles(picture, shown, 2)
    assert places[0][0] < places[2][0] < places[4][0]
    assert places[0][1] == places[2][1] == places[4][1]
    with pytest.raises(AssertionError):
        tiles(picture, original[:1], 2)  # it is there three times
    with pytest.raises(AssertionError):
        tiles(picture, original[1:], 2)  # that of another sample


def colors(picture):
    return {color for _, color in picture.getcolors(1 << 20)}


def test_the_unchanged_column_is_marked():
    images = torch.zeros(1, 1, 3, 1, 16, 16)
    one = Directions(torch.eye(2)[:1], torch.ones(1))
    accent = (0xD5, 0x5E, 0x00)
    assert accent in colors(grid(images, one, (-1, 0, 1)))
    assert accent not in colors(grid(images, one, (-1, 0, 1), mode="set"))
    assert accent not in colors(grid(images, one, (1, 2, 3)))
    assert accent in colors(grid(images, one, (-1, 0, 1), mode="set", original=torch.zeros(1, 1, 16, 16)))


def test_text_is_outside_the_images_whatever_its_length():
    images = noise(2, 1, 3, 1, 16, 16)
    long = Directions(torch.eye(2), torch.ones(2), ("a very long name of a direction " * 3, "b"), effect=torch.ones(2))
    tiles(strip(images, long, (-1e-9, 0, 123456.0)), images[:, 0].flatten(0, 1), 6)
    tiles(grid(images, long, (-1, 0, 1), title="title " * 60), images[0, 0], 6)
    small = noise(3, 1, 1, 1, 4, 4)  # four lines of text beside an image of four pixels
    picture = strip(small, Directions(torch.eye(3), torch.ones(3), effect=torch.ones(3)), (1,), scale=1)
    places = tiles(picture, small[:, 0, 0], 1)
    assert places[1][0] - places[0][0] >= 4 * 18


def test_labels_differ_with_what_they_say():
    images = torch.zeros(1, 1, 1, 1, 32, 32)
    one = Directions(torch.eye(2)[:1], torch.ones(1), ("a",))
    pictures = [
        grid(images, one, (1,)),
        grid(images, one, (2,)),
        grid(images, Directions(torch.eye(2)[:1], 2 * torch.ones(1), ("a",)), (1,)),
        grid(images, Directions(torch.eye(2)[:1], torch.ones(1), ("b",)), (1,)),
        grid(images, Directions(torch.eye(2)[:1], torch.ones(1), ("a",), effect=torch.ones(1)), (1,)),
    ]
    assert len({picture.tobytes() for picture in pictures}) == len(pictures)


def test_gif(tmp_path):
    images = noise(2, 2, 4, 1, 16, 16)
    gif(tmp_path / "a.gif", images, axes(2), (-1, 0, 1, 2), milliseconds=200)
    with Image.open(tmp_path / "a.gif") as animation:
        assert animation.n_frames == 6  # there and back
        assert animation.info["loop"] == 0
        assert animation.info["duration"] == 200
        frames = []
        for i in range(6):
            animation.seek(i)
            frames.append(animation.convert("RGB").tobytes())
    assert frames[1] == frames[5]
    assert frames[2] == frames[4]
    assert len(set(frames)) == 4


def test_png(tmp_path):
    grid(noise(1, 1, 7, 3, 16, 16), axes(1)).save(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


# errors

IMAGES = torch.zeros(2, 3, 7, 1, 4, 4)


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: traverse(Flat(), 2, axes(4)), ValueError, "3 latents; got 4"),
        (lambda: traverse(Flat(), 2, axes(3), []), ValueError, "finite numbers"),
        (lambda: traverse(Flat(), 2, axes(3), (0, torch.inf)), ValueError, "finite numbers"),
        (lambda: traverse(Flat(), 2, axes(3), mode="move"), ValueError, "'add', 'set'"),
        (lambda: traverse(Flat(), 2, axes(3), batch_size=0), ValueError, "at least 1"),
        (lambda: traverse(lambda z: z, 2, axes(3)), TypeError, "z_dim"),
        (lambda: traverse(Flat(), 2, torch.ones(2, 3)), ValueError, "length 1"),
        (lambda: grid(IMAGES[0], axes(2)), ValueError, r"of traverse, with C of 1 or 3; got \(3, 7, 1, 4, 4\)"),
        (lambda: grid(IMAGES.expand(-1, -1, -1, 2, -1, -1), axes(2)), ValueError, "C of 1 or 3"),
        (lambda: grid(IMAGES, axes(3)), ValueError, "the images have 2 and 7; got 3 and 7"),
        (lambda: grid(IMAGES, axes(2), (0, 1)), ValueError, "got 2 and 2"),
        (lambda: grid(IMAGES, axes(2), index=2), ValueError, "from 0 to 1; got 2"),
        (lambda: grid(IMAGES / 0, axes(2)), ValueError, "finite pixels"),
        (lambda: grid(IMAGES, axes(2), scale=0), ValueError, "at least 1"),
        (lambda: grid(IMAGES, axes(2), original=IMAGES[0, :1, 0]), ValueError, "one image for each sample"),
        (lambda: strip(IMAGES, axes(2), sample=3), ValueError, "from 0 to 2; got 3"),
        (lambda: compare({}), ValueError, "at least one traversal"),
        (
            lambda: compare({"a": (IMAGES, axes(2)), "b": (torch.zeros(2, 3, 7, 1, 8, 8), axes(2))}, scale=1),
            ValueError,
            "images of one size",
        ),
    ],
)
def test_errors(make, kind, text):
    with pytest.raises(kind, match=text):
        make()


@pytest.mark.parametrize("missing", ["PIL", "matplotlib"])
def test_drawing_says_what_is_missing(missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=rf"no {missing}; pip install 'orthocond\[lab\]'"):
        grid(IMAGES, axes(2))
