"""Batches: right pixels, a function of seed, epoch and index alone, whole over processes, resumable, never stuck."""

import threading
import time

import pytest
import torch
from data_files import encoded, pixels, write_tree
from torch.nn import functional as F

from orthocond.lab.data import ImageData, Pipeline, load, sprites


def numbered(count, height=4, width=4):
    """Images whose pixels are their number."""
    images = torch.arange(count, dtype=torch.uint8).reshape(-1, 1, 1, 1).expand(count, 3, height, width)
    return ImageData(images, torch.arange(count) % 2, ("even", "odd"))


def random_data(count=12, height=8, width=8):
    images = torch.randint(0, 256, (count, 3, height, width), dtype=torch.uint8)
    return ImageData(images, torch.arange(count), tuple(map(str, range(count))))


def raw(**settings):
    """A pipeline that gives back pixel values."""
    return Pipeline(mean=0.0, std=1 / 255, **settings)


def joined(batches):
    images, labels = zip(*batches, strict=True)
    return torch.cat(images), torch.cat(labels)


# Values


def test_crops_show_the_reflection_of_an_image():
    data = random_data(count=6)
    pipeline = raw(data=data, batch_size=6, train=True, crop_padding=3, padding="reflection", flip=False)
    padded = F.pad(data.images.float(), (3, 3, 3, 3), mode="reflect")
    places = set()
    for epoch in range(20):
        ((images, labels),) = pipeline.batches(epoch)
        for image, label in zip(images, labels, strict=True):
            windows = padded[label].unfold(1, 8, 1).unfold(2, 8, 1)  # (C, 7, 7, 8, 8)
            found = (windows - image[:, None, None]).abs().amax((0, 3, 4)).lt(1e-3).nonzero().tolist()
            assert len(found) == 1
            places.add(tuple(found[0]))
    assert {row for row, _ in places} == {column for _, column in places} == set(range(7))


def test_evaluation_gives_all_images_in_order():
    data = random_data()
    images, labels = joined(raw(data=data, batch_size=5, train=False).batches())
    torch.testing.assert_close(images, data.images.float())
    assert torch.equal(labels, data.labels)


def test_normalization_of_each_channel():
    data = random_data()
    mean, std = data.statistics()
    images, _ = joined(Pipeline(data=data, batch_size=12, train=False, mean=mean, std=std).batches())
    torch.testing.assert_close(images.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(images.std((0, 2, 3), correction=0), torch.ones(3))
    default, _ = joined(Pipeline(data=data, batch_size=12, train=False).batches())
    torch.testing.assert_close(default, data.images / 127.5 - 1)


@pytest.mark.parametrize("shape", [(8, 8), (6, 10)])
def test_every_training_image_is_a_crop_of_the_padded_image_or_its_mirror(shape):
    data = random_data(12, *shape)
    height, width = shape
    padded = F.pad(data.images, (2, 2, 2, 2)).float()
    seen = set()
    for epoch in range(12):
        images, labels = joined(raw(data=data, batch_size=4, train=True, crop_padding=2).batches(epoch))
        assert sorted(labels.tolist()) == list(range(12))
        for image, label in zip(images, labels, strict=True):
            found = [
                (top, left, mirrored)
                for top in range(5)
                for left in range(5)
                for mirrored in (False, True)
                for crop in [padded[label, :, top : top + height, left : left + width]]
                if torch.allclose(image, crop.flip(2) if mirrored else crop, atol=1e-2)
            ]
            assert len(found) == 1
            seen.update(found)
    assert {place[:2] for place in seen} == {(i, j) for i in range(5) for j in range(5)}
    assert {place[2] for place in seen} == {False, True}


def test_default_padding_is_4_and_flip_can_be_off():
    data = ImageData(torch.full((64, 3, 8, 8), 200, dtype=torch.uint8), torch.zeros(64).long(), ("a",))
    images, _ = joined(raw(data=data, batch_size=64, train=True).batches())
    assert (images == 0).any((1, 2, 3)).float().mean() > 0.9
    plain = random_data()
    images, labels = joined(raw(data=plain, batch_size=12, train=True, crop_padding=0, flip=False).batches())
    torch.testing.assert_close(images, plain.images[labels].float())


def test_crop_of_larger_images():
    data = random_data(4, 12, 16)
    images, _ = joined(raw(data=data, batch_size=4, train=False, size=8).batches())
    torch.testing.assert_close(images, data.images[:, :, 2:10, 4:12].float())
    images, labels = joined(raw(data=data, batch_size=4, train=True, size=8, flip=False).batches())
    places = data.images.float().unfold(2, 8, 1).unfold(3, 8, 1)
    for image, label in zip(images, labels, strict=True):
        assert (places[label] - image[:, None, None]).abs().amax((0, 3, 4)).min() < 1e-2


def test_scaling_before_the_crop():
    data = numbered(3, 20, 40)
    for train in (True, False):
        images, labels = joined(raw(data=data, batch_size=3, train=train, size=14, resize=16, prefetch=0).batches())
        assert images.shape == (3, 3, 14, 14)
        assert torch.equal(images[:, 0, 3, 3].round().long() % 2, labels)


@pytest.mark.parametrize("train", [True, False])
def test_files_and_memory_give_the_same_batches(tmp_path, train):
    folder = write_tree(tmp_path, [f"{c}/{i}.png" for c in "ab" for i in range(5)])
    settings = {"batch_size": 4, "train": train, "size": 6, "seed": 5}
    for loaded, batched in [({}, {}), ({"size": 7}, {"resize": 9})]:
        eager = list(raw(data=load(folder, **loaded), **settings, **batched).batches(2))
        lazy = list(raw(data=load(folder, **loaded, in_memory=False), **settings, **batched).batches(2))
        for one, other in zip(eager, lazy, strict=True):
            assert torch.equal(one.images, other.images)
            assert torch.equal(one.labels, other.labels)


def test_files_of_several_sizes_follow_the_recipe_of_256_and_224(tmp_path):
    for index, (height, width) in enumerate([(30, 50), (64, 40), (9, 9)]):
        (tmp_path / f"{index}.jpg").write_bytes(encoded(pixels(index, height, width), "JPEG"))
    pipeline = Pipeline(data=load(tmp_path), batch_size=3, train=True, size=28)
    assert pipeline._resize == 32
    assert next(pipeline.batches()).images.shape == (3, 3, 28, 28)


# Invariants


def test_batches_depend_on_seed_epoch_and_index_alone():
    data = sprites(100, size=16)
    pipeline = Pipeline(data=data, batch_size=16, train=True, seed=7)
    whole = list(pipeline.batches(epoch=3))
    assert len(whole) == len(pipeline) == 6
    for start in (0, 2, 5, 6):
        rest = list(Pipeline(data=data, batch_size=16, train=True, seed=7, prefetch=0).batches(epoch=3, start=start))
        assert len(rest) == 6 - start
        assert all(torch.equal(a.images, b.images) for a, b in zip(rest, whole[start:], strict=True))
    for other in (pipeline.batches(epoch=4), Pipeline(data=data, batch_size=16, train=True, seed=8).batches(epoch=3)):
        assert not torch.equal(next(other).labels, whole[0].labels)


def test_global_state_of_random_numbers_is_neither_used_nor_changed():
    pipeline = Pipeline(data=sprites(64, size=16), batch_size=16, train=True)
    torch.manual_seed(1)
    first = joined(pipeline.batches())
    expected = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(expected, torch.rand(1))
    assert torch.equal(first[0], joined(pipeline.batches())[0])


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("train", [True, False])
def test_processes_share_the_batches_of_one(world_size, train):
    data = random_data(31)
    settings = {"data": data, "batch_size": 6, "train": train, "seed": 2}
    one = list(Pipeline(**settings).batches(epoch=1))
    ranks = [list(Pipeline(**settings, rank=r, world_size=world_size).batches(epoch=1)) for r in range(world_size)]
    for index, batch in enumerate(one):
        parts = [rank[index] for rank in ranks if index < len(rank)]
        for r, part in enumerate(parts):
            assert torch.equal(part.images, batch.images[r::world_size])
        assert sum(len(part.labels) for part in parts) == len(batch.labels)
    # The last of 31 images is a batch of its own in evaluation: only the first process has it.
    assert [len(rank) for rank in ranks] == [5] * world_size if train else [6] + [5] * (world_size - 1)


def test_an_incomplete_last_batch_is_for_evaluation_only():
    data = numbered(10)
    assert len(Pipeline(data=data, batch_size=4, train=True)) == 2
    assert len(Pipeline(data=data, batch_size=4, train=False)) == 3


# Errors


def test_broken_file_is_named_where_its_batch_is_made(tmp_path):
    folder = write_tree(tmp_path, [f"{c}/{i}.png" for c in "ab" for i in range(3)])
    file = folder / "b" / "1.png"
    file.write_bytes(file.read_bytes()[:100])
    settings = {"batch_size": 3, "train": False, "size": 8, "resize": 8}
    pipeline = Pipeline(data=load(folder, in_memory=False), **settings)
    batches = pipeline.batches()
    assert len(next(batches).labels) == 3
    with pytest.raises(ValueError, match=r"b/1.png cannot be decoded"):
        next(batches)


def test_errors():
    data = numbered(10)
    for settings, message in [
        ({"batch_size": 0}, "batch_size=...\\) needs an integer of at least 1; got 0"),
        ({"batch_size": 11}, "10 images make no batch of 11"),
        ({"batch_size": 5, "world_size": 2}, "needs a multiple of world_size=2; got 5"),
        ({"batch_size": 4, "world_size": 2, "rank": 2}, "needs less than world_size=2; got 2"),
        ({"batch_size": 4, "std": 0.0}, "std=...\\) needs numbers above 0"),
        ({"batch_size": 4, "size": 8}, "size=8\\) is larger than the images, whose shorter side is 4\\. Pass resize"),
        ({"batch_size": 4, "crop_padding": -1}, "crop_padding=...\\) needs an integer of at least 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            Pipeline(data=data, train=True, **settings)
    with pytest.raises(ValueError, match="shorter side is 6"):
        Pipeline(data=data, batch_size=4, train=True, size=8, resize=6)
    with pytest.raises(TypeError, match="Pipeline needs ImageData"):
        Pipeline(data=data.images, batch_size=2, train=True)
    with pytest.raises(ValueError, match="needs at most 2"):
        Pipeline(data=data, batch_size=5, train=True).batches(start=3)


def test_files_of_several_sizes_need_a_size(tmp_path):
    write_tree(tmp_path, ["0.png"])
    write_tree(tmp_path, ["1.png"], width=9)
    with pytest.raises(ValueError, match=r"several or unknown sizes: pass size=..."):
        Pipeline(data=load(tmp_path), batch_size=2, train=True)


# Life cycle


def test_leaving_the_loop_ends_the_thread():
    before = set(threading.enumerate())

    def threads():
        new = set(threading.enumerate()) - before
        return [thread for thread in new if thread.name == "orthocond-batches"]

    batches = Pipeline(data=sprites(100, size=16), batch_size=10, train=True).batches()
    next(batches)
    assert len(threads()) == 1
    batches.close()
    assert not threads()


def test_batches_are_made_ahead():
    batches = Pipeline(data=sprites(100, size=16), batch_size=10, train=True, prefetch=3).batches()
    next(batches)
    ready = batches.gi_frame.f_locals["ready"]
    end = time.monotonic() + 10
    while not ready.full() and time.monotonic() < end:
        time.sleep(0.01)
    assert ready.full()
    batches.close()
