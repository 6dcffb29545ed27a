"""Differentiable augmentation: values, invariants, gradients, shapes and dtypes, errors."""

import pytest
import torch
from torch.autograd import gradcheck

from orthocond.gans import augment
from orthocond.gans.augmentation import POLICY


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def images(n=64, channels=3, height=16, width=16):
    return torch.rand(n, channels, height, width, generator=seeded(9), dtype=torch.float64) * 2 - 1


def apply(name, x, **settings):
    return augment(x, (name,), **{"probability": 1.0, "rng": seeded()} | settings)


# values


def test_brightness_adds_one_number_to_each_image():
    x = images(2000)
    added = apply("brightness", x) - x
    first = added[:, :1, :1, :1]
    torch.testing.assert_close(added, first.expand_as(added))
    check_uniform(first, -0.5, 0.5)


def test_saturation_scales_the_colors():
    x = images(2000)
    y = apply("saturation", x)
    torch.testing.assert_close(y.mean(1), x.mean(1))
    factor = ((y - y.mean(1, keepdim=True)) / (x - x.mean(1, keepdim=True))).flatten(1)
    torch.testing.assert_close(factor, factor[:, :1].expand_as(factor))
    check_uniform(factor[:, 0], 0, 2)


def test_contrast_scales_the_image():
    x = images(2000)
    y = apply("contrast", x)
    mean = x.mean((1, 2, 3), keepdim=True)
    factor = ((y - mean) / (x - mean)).flatten(1)
    torch.testing.assert_close(factor, factor[:, :1].expand_as(factor))
    check_uniform(factor[:, 0], 0.5, 1.5)


def check_uniform(values, low, high):
    values = values.flatten()
    assert low <= values.min() < low + 0.02 * (high - low)
    assert high - 0.02 * (high - low) < values.max() <= high
    assert abs(values.mean() - (low + high) / 2) < 4 * (high - low) / 12**0.5 / len(values) ** 0.5


@pytest.mark.parametrize(("height", "width"), [(16, 16), (8, 24)])
def test_translation_shifts_by_whole_pixels(height, width):
    """Each image is found among all shifts with zeros, and every shift occurs."""
    x = images(800, height=height, width=width)
    y = apply("translation", x)
    down, right = (int(0.125 * n + 0.5) for n in (height, width))
    shifts = []
    for before, after in zip(x, y, strict=True):
        fits = [
            (i, j)
            for i in range(-down, down + 1)
            for j in range(-right, right + 1)
            if torch.equal(shift(before, i, j), after)
        ]
        assert len(fits) == 1
        shifts += fits
    assert len(set(shifts)) == (2 * down + 1) * (2 * right + 1)


def shift(image, down, right):
    result = torch.zeros_like(image)
    height, width = image.shape[1:]
    result[:, max(down, 0) : height + min(down, 0), max(right, 0) : width + min(right, 0)] = image[
        :, max(-down, 0) : height + min(-down, 0), max(-right, 0) : width + min(-right, 0)
    ]
    return result


def test_cutout_sets_a_rectangle_to_zero():
    x = images(500)
    y = apply("cutout", x)
    cut = y == 0
    assert torch.equal(y[~cut], x[~cut])
    for mask in cut:
        rows, columns = mask[0].any(1), mask[0].any(0)
        assert torch.equal(mask, (rows[:, None] & columns[None, :]).expand_as(mask))
        for side in (rows, columns):
            on = side.nonzero().flatten()
            assert len(on) == int(on.max() - on.min()) + 1
            assert 8 / 2 <= len(on) <= 8


@pytest.mark.parametrize("length", [15, 16])
def test_every_place_of_the_cut_is_as_likely(length):
    y = apply("cutout", images(3000, 1, length, length))
    starts = range(-4, 13 if length == 16 else 12)  # a cut of 8 pixels, half of it may lie outside
    side = torch.tensor([sum(s <= i < s + 8 for s in starts) / len(starts) for i in range(length)]).double()
    expected = side[:, None] * side[None, :]
    found = (y == 0).double().mean((0, 1))
    assert ((found - expected).abs() < 4.5 * (expected * (1 - expected) / 3000).sqrt()).all()


# invariants


def test_chances_and_who_shares_them():
    x = images(1000)
    changed = (augment(x, ("brightness",), rng=seeded()) != x).flatten(1).any(1)
    assert abs(changed.double().mean() - 0.6) < 0.06
    rates = []
    for seed in range(200):
        y = augment(x[:4], ("brightness",), each="batch", rng=seeded(seed))
        changed = (y != x[:4]).flatten(1).any(1)
        assert changed.all() or not changed.any()
        rates.append(float(changed[0]))
        if changed.any():
            assert len((y - x[:4])[:, 0, 0, 0].unique()) == 4
    assert abs(sum(rates) / 200 - 0.6) < 0.12
    assert torch.equal(augment(x, probability=0.0), x)


@pytest.mark.parametrize("each", ["image", "batch"])
def test_random_numbers(each):
    x = images(8)
    first, same, other = (augment(x, each=each, probability=1.0, rng=seeded(s)) for s in (1, 1, 2))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    torch.manual_seed(3)
    a = augment(x, each=each)
    torch.manual_seed(3)
    assert torch.equal(augment(x, each=each), a)
    states = []
    for probability in (0.0, 0.5, 1.0):
        rng = seeded()
        augment(x, each=each, probability=probability, rng=rng)
        states.append(rng.get_state())
    assert all(torch.equal(s, states[0]) for s in states)


def test_policy_is_applied_in_order():
    x = images(4)
    rng = seeded()
    stepwise = x
    for name in ("cutout", "brightness"):
        stepwise = augment(stepwise, (name,), rng=rng)
    assert torch.equal(augment(x, ("cutout", "brightness"), rng=seeded()), stepwise)
    assert torch.equal(augment(x, ()), x)
    assert torch.equal(augment(x, "cutout", rng=seeded()), augment(x, ("cutout",), rng=seeded()))
    assert not torch.equal(x, stepwise)


# gradients


@pytest.mark.parametrize("name", POLICY)
def test_gradients(name):
    x = images(2, height=4, width=4).requires_grad_()
    assert gradcheck(lambda x: apply(name, x), x)


# shapes and dtypes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_shapes_and_dtypes(channels, dtype):
    x = images(3, channels, 8, 12).to(dtype)
    y = augment(x, probability=1.0)
    assert y.shape == x.shape
    assert y.dtype == dtype
    assert augment(x[:0]).shape == (0, channels, 8, 12)


def test_gray_images_have_no_saturation():
    x = images(8, 1)
    torch.testing.assert_close(apply("saturation", x), x)


# errors


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: augment(torch.zeros(3, 8, 8)), ValueError, r"\(N, C, H, W\)"),
        (lambda: augment(torch.zeros(1, 3, 8, 8, dtype=torch.uint8)), TypeError, "floating"),
        (lambda: augment(images(1), ("color",)), ValueError, "'brightness', 'saturation'"),
        (lambda: augment(images(1), "color,translation"), ValueError, "'brightness'"),
        (lambda: augment(images(1), probability=1.5), ValueError, "from 0 to 1"),
        (lambda: augment(images(1), each="pixel"), ValueError, "'image', 'batch'"),
    ],
)
def test_errors(call, kind, text):
    with pytest.raises(kind, match=text):
        call()
