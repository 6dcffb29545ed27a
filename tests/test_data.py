"""Data by name or path: every format gives the pixels and labels that were written; every defect names the file."""

import pickle
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from data_files import encoded, pack, pixels, real_data, write_cifar10, write_cifar100, write_idx, write_tree
from PIL import Image

from orthocond.lab.data import BrokenImageError, ImageData, MissingSplitError, folders, load, load_pair, names
from orthocond.lab.data.images import balanced, shorter_side

CLASSES = ["cat/0.png", "cat/1.png", "dog/0.png", "dog/sub/1.png", "eel/0.png"]


def written(*seeds, **size):
    return torch.stack([torch.from_numpy(pixels(seed, **size)).movedim(2, 0) for seed in seeds])


# Values


@pytest.mark.parametrize("form", ["folder", "images.zip", "images.tar", "images.tar.gz"])
@pytest.mark.parametrize("wrapped", ["", "outer/inner/"])
@pytest.mark.parametrize("in_memory", [True, False])
def test_class_folders(tmp_path, form, wrapped, in_memory):
    folder = write_tree(tmp_path / "folder", [wrapped + name for name in CLASSES], height=6, width=9)
    (folder / wrapped / "notes.txt").write_text("not an image")
    (folder / ".hidden.png").write_text("not an image")
    path = folder if form == "folder" else pack(folder, tmp_path / form)
    data = load(path, in_memory=in_memory)
    assert data.classes == ("cat", "dog", "eel")
    assert data.labels.tolist() == [0, 0, 1, 1, 2]
    assert data.split == "all"
    assert data.size == (6, 9)
    assert isinstance(data.images, torch.Tensor) == in_memory
    expected = written(*range(5), height=6, width=9)
    assert torch.equal(torch.stack([data[i][0] for i in range(5)]), expected)
    assert data[-1][1] == 2


@pytest.mark.parametrize("form", ["folder", "images.zip", "images.tar"])
def test_split_folders(tmp_path, form):
    folder = write_tree(tmp_path / "folder", ["train/a/0.png", "train/b/1.png", "validation/b/2.png", "readme/x.png"])
    path = folder if form == "folder" else pack(folder, tmp_path / form)
    train, val = load(path), load(path, split="val")
    assert (train.split, train.labels.tolist(), train.classes) == ("train", [0, 1], ("a", "b"))
    assert (val.split, val.labels.tolist(), val.classes) == ("val", [1], ("a", "b"))
    assert torch.equal(val.images, written(2))
    assert load_pair(path).held_out.split == "val"


def test_a_split_alone_is_not_a_wrapping_folder(tmp_path):
    assert load(write_tree(tmp_path, ["set/train/a/0.png", "set/train/b/1.png"])).split == "train"


def test_classes_are_those_of_train(tmp_path):
    folder = write_tree(tmp_path, ["train/b/0.png", "train/c/1.png", "val/c/2.png", "test/a/3.png"])
    assert load(folder, split="val").classes == ("b", "c")
    assert load_pair(folder).held_out.split == "val"
    assert load(folder, split="val").labels.tolist() == [1]
    loose = write_tree(tmp_path / "loose", ["train/0.png", "test/a/1.png", "test/b/2.png"])
    assert load(loose).classes == ()
    assert load(loose, split="test").classes == ("a", "b")


def test_images_without_classes(tmp_path):
    folder = write_tree(tmp_path / "faces", ["0.png", "1.png", "2.png"])
    data = load(folder)
    assert data.classes == ()
    assert data.labels.tolist() == [-1, -1, -1]
    assert torch.equal(data.images, written(0, 1, 2))
    with pytest.raises(IndexError, match="out of bounds"):
        torch.nn.functional.cross_entropy(torch.zeros(3, 2), data.labels)


@pytest.mark.parametrize("archive", [False, True])
def test_cifar10(tmp_path, archive):
    images, labels = write_cifar10(tmp_path / "cifar-10-batches-py")
    if archive:
        (tmp_path / "packed").mkdir()
        pack(tmp_path, tmp_path / "packed" / "cifar-10-python.tar.gz")
    root = tmp_path / "packed" if archive else tmp_path
    train, test = load("cifar10", root=root), load("cifar10", root=root, split="test")
    assert torch.equal(train.images, torch.from_numpy(images[:20]))
    assert torch.equal(test.images, torch.from_numpy(images[20:]))
    assert (train.labels.tolist(), test.labels.tolist()) == (labels[:20], labels[20:])
    assert train.classes[3] == "class 3"
    assert len(load_pair("cifar10", root=root, limit=10).train) == 10


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_cifar100(tmp_path, protocol):
    images = write_cifar100(tmp_path / "cifar-100-python", protocol=protocol)
    data = load(tmp_path / "cifar-100-python")
    assert torch.equal(data.images, torch.from_numpy(images))
    assert data.labels.tolist() == [3, 99]
    assert data.classes[99] == "fine 99"


@pytest.mark.parametrize("compress", [True, False])
def test_idx(tmp_path, compress):
    images, labels = write_idx(tmp_path / "fashion-mnist", compress)
    data = load("fashion-mnist", root=tmp_path, split="test")
    assert data.images.shape == (5, 3, 28, 28)
    assert torch.equal(data.images[:, 1], torch.from_numpy(images))
    assert data.labels.tolist() == labels.tolist()
    assert data.classes[1] == "Trouser"
    assert "gray" in repr(data)
    assert load(tmp_path / "fashion-mnist", size=32, limit=3).images.shape == (3, 3, 32, 32)


def test_names_are_looked_up_in_the_root(tmp_path, monkeypatch):
    pack(write_tree(tmp_path / "folder", ["0.png"]), tmp_path / "faces.tar")
    monkeypatch.setenv("ORTHOCOND_DATA", str(tmp_path))
    assert len(load("faces")) == 1
    assert names()["faces"].endswith("faces.tar")
    assert names()["cifar10"] == f"not in {tmp_path}; orthocond data get cifar10"


@pytest.mark.parametrize(
    ("mode", "value", "expected"),
    [
        ("L", 7, (7, 7, 7)),
        ("1", 1, (255, 255, 255)),
        ("I;16", 0x1234, (0x12,) * 3),
        ("RGBA", (200, 100, 0, 0), (255, 255, 255)),
        ("RGBA", (200, 100, 0, 255), (200, 100, 0)),
        ("LA", (9, 255), (9, 9, 9)),
    ],
)
def test_conversion_to_rgb(tmp_path, mode, value, expected):
    Image.new(mode, (4, 4), value).save(tmp_path / "a.png")
    data = load(tmp_path)
    assert data.images[0, :, 0, 0].tolist() == list(expected)
    assert "gray images became RGB" in repr(data) or "laid on white" in repr(data)


def test_mixed_sizes_are_scaled_and_cropped_in_the_middle(tmp_path):
    left_right = np.zeros((8, 16, 3), np.uint8)
    left_right[:, :4], left_right[:, 12:] = 255, 255  # the middle square is black
    (tmp_path / "a.png").write_bytes(encoded(left_right))
    (tmp_path / "b.jpg").write_bytes(encoded(np.full((40, 20, 3), 90, np.uint8), "JPEG"))
    lazy = load(tmp_path)
    assert lazy.size is None
    assert "2 sizes" in repr(lazy)
    assert lazy[0][0].shape == (3, 8, 16)
    data = load(tmp_path, size=4)
    assert data.images.shape == (2, 3, 4, 4)
    assert data.images[0].max() < 60
    assert (data.images[1].int() - 90).abs().max() <= 1
    assert "shorter side scaled to 4" in repr(data)


@pytest.mark.parametrize(
    ("sides", "expected"), [((10, 14), (4, 6)), ((14, 10), (6, 4)), ((10, 13), (4, 5)), ((3, 4), (4, 5))]
)
def test_the_longer_side_is_rounded_to_the_nearest_pixel(sides, expected):
    assert shorter_side(torch.zeros(1, 3, *sides, dtype=torch.uint8), 4).shape == (1, 3, *expected)


def test_statistics_of_files_and_of_memory_agree(tmp_path):
    folder = write_tree(tmp_path, [f"{i}.png" for i in range(4)])
    x = written(0, 1, 2, 3).double() / 255
    for in_memory in (True, False):
        mean, std = load(folder, in_memory=in_memory).statistics()
        torch.testing.assert_close(torch.tensor(mean), x.mean((0, 2, 3)).float())
        torch.testing.assert_close(torch.tensor(std), x.std((0, 2, 3), correction=0).float())


# Invariants


def test_parts_keep_the_shares_of_classes():
    labels = torch.tensor([0] * 60 + [1] * 30 + [2] * 10)
    for count in (10, 20, 50):
        part = labels[balanced(labels, count, seed=3)].bincount() / count
        assert (part - torch.tensor([0.6, 0.3, 0.1])).abs().max() <= 1 / count + 1e-6
    assert not torch.equal(balanced(labels, 20, 0), balanced(labels, 20, 1))
    assert torch.equal(balanced(labels, 20, 1), balanced(labels, 20, 1))
    first = {int(balanced(torch.arange(10), 1, seed)) for seed in range(30)}
    assert len(first) > 5  # no class is favored


def test_split_off_divides_without_overlap():
    images = torch.arange(20, dtype=torch.uint8).reshape(20, 1, 1, 1).expand(20, 3, 2, 2)
    train, held_out = ImageData(images, torch.arange(20) % 2, ("a", "b")).split_off(0.3)
    seen = torch.cat([train.images, held_out.images])[:, 0, 0, 0]
    assert (len(train), len(held_out)) == (14, 6)
    assert seen.sort().values.tolist() == list(range(20))
    assert (train.split, held_out.split) == ("train", "val")


def test_limit_takes_the_same_images_in_memory_and_lazily(tmp_path):
    folder = write_tree(tmp_path, [f"{c}/{i}.png" for c in "ab" for i in range(6)])
    eager, lazy = load(folder, limit=4), load(folder, limit=4, in_memory=False)
    assert eager.labels.tolist() == [0, 0, 1, 1]
    assert torch.equal(eager.images, torch.stack([image for image, _ in lazy]))


def test_the_memory_that_is_needed_decides(tmp_path, monkeypatch):
    folder = write_tree(tmp_path, ["0.png", "1.png"])
    monkeypatch.setattr(folders, "_MEMORY", 2 * 3 * 64 - 1)
    assert not isinstance(load(folder).images, torch.Tensor)
    monkeypatch.setattr(folders, "_MEMORY", 2 * 3 * 64)
    assert isinstance(load(folder).images, torch.Tensor)


@pytest.mark.parametrize("form", ["images.zip", "images.tar"])
def test_files_survive_a_pickle_for_worker_processes(tmp_path, form):
    path = pack(write_tree(tmp_path / "folder", CLASSES), tmp_path / form)
    data = pickle.loads(pickle.dumps(load(path, in_memory=False)))
    assert torch.equal(data[3][0], written(3)[0])


# Errors


def test_defects_of_cifar_files(tmp_path):
    write_cifar100(tmp_path / "label", labels=(0, 100))
    with pytest.raises(ValueError, match="label 100 of image 1 is out of range; 100 classes need labels from 0 to 99"):
        load(tmp_path / "label")
    write_cifar10(tmp_path / "missing")
    (tmp_path / "missing" / "data_batch_3").unlink()
    with pytest.raises(ValueError, match=r"lacks data_batch_3"):
        load(tmp_path / "missing")
    assert load(tmp_path / "missing", split="test").split == "test"
    with pytest.raises(MissingSplitError, match=r"no split 'val'; it has train, test.*split_off"):
        load(tmp_path / "label", split="val")
    write_cifar100(tmp_path / "cut")
    content = (tmp_path / "cut" / "train").read_bytes()
    (tmp_path / "cut" / "train").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"cut/train is not a CIFAR file"):
        load(tmp_path / "cut")
    (tmp_path / "cut" / "train").write_bytes(
        pickle.dumps({b"data": np.zeros((2, 5), np.uint8), b"fine_labels": [0, 0]})
    )
    with pytest.raises(ValueError, match=r"must be uint8 \(N, 3072\); got \(2, 5\)"):
        load(tmp_path / "cut")


def test_defects_of_idx_files(tmp_path):
    write_idx(tmp_path / "a", compress=False)
    images = tmp_path / "a" / "train-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte says \[5, 28, 28\].*not complete"):
        load(tmp_path / "a")
    images.write_bytes(b"GIF89a")
    with pytest.raises(ValueError, match="is not an IDX file"):
        load(tmp_path / "a")
    images.unlink()
    with pytest.raises(ValueError, match=r"lacks the file train-images-idx3-ubyte"):
        load(tmp_path / "a")
    write_idx(tmp_path / "b", compress=True)
    labels = tmp_path / "b" / "train-labels-idx1-ubyte.gz"
    labels.write_bytes(labels.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"train-labels-idx1-ubyte.gz is broken"):
        load(tmp_path / "b")


def break_header(file):
    file.write_bytes(b"no image at all")


def break_body(file):
    file.write_bytes(file.read_bytes()[:100])


@pytest.mark.parametrize("damage", [break_header, break_body])
@pytest.mark.parametrize("form", ["folder", "images.zip", "images.tar"])
def test_broken_image_is_named_before_training(tmp_path, damage, form):
    folder = write_tree(tmp_path / "folder", CLASSES)
    damage(folder / "dog" / "0.png")
    path = folder if form == "folder" else pack(folder, tmp_path / form)
    with pytest.raises(BrokenImageError, match=r"dog/0.png .*Replace or remove"):
        load(path)


def test_broken_header_stops_lazy_data_too(tmp_path):
    folder = write_tree(tmp_path, CLASSES)
    break_header(folder / "eel" / "0.png")
    with pytest.raises(BrokenImageError, match=r"eel/0.png"):
        load(folder, in_memory=False)


def test_folders_that_do_not_fit_together(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty holds no images \(.jpg"):
        load(tmp_path / "empty")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.heic").touch()
    with pytest.raises(ValueError, match=r"1 other files, such as a.heic"):
        load(tmp_path / "other")
    folder = write_tree(tmp_path / "loose", ["a/0.png", "b/0.png", "stray.png"])
    with pytest.raises(ValueError, match=r"1 images beside class folders, such as stray.png"):
        load(folder)
    folder = write_tree(tmp_path / "gap", ["a/0.png", "b/0.png"])
    (folder / "c").mkdir()
    with pytest.raises(ValueError, match=r"gap/c/ holds no images"):
        load(folder)
    folder = write_tree(tmp_path / "unknown", ["train/a/0.png", "train/b/0.png", "val/images/0.png"])
    with pytest.raises(ValueError, match=r"val has 1 class folders that train does not have, such as 'images'"):
        load(folder, split="val")
    folder = write_tree(tmp_path / "flat", ["train/a/0.png", "train/b/0.png", "test/0.png"])
    with pytest.raises(ValueError, match=r"train has class folders, test has none"):
        load(folder, split="test")
    with pytest.raises(MissingSplitError, match=r"has no split 'val'; it has train, test"):
        load(folder, split="val")
    folder = write_tree(tmp_path / "whole", ["a/0.png", "b/0.png"])
    with pytest.raises(MissingSplitError, match=r"not divided into splits.*split_off"):
        load(folder, split="train")


def test_broken_and_strange_files(tmp_path):
    tar = pack(write_tree(tmp_path / "f", CLASSES), tmp_path / "a.tar.gz")
    tar.write_bytes(tar.read_bytes()[:-200])
    for name in ("a.tar.gz", "b.zip", "c.tar"):
        if name != "a.tar.gz":
            (tmp_path / name).write_bytes(b"nothing")
        with pytest.raises(ValueError, match=rf"(?s){name} cannot be read .*Copy or pack it again"):
            load(tmp_path / name)
    (tmp_path / "d.txt").touch()
    with pytest.raises(ValueError, match=r"d.txt is not a data set"):
        load(tmp_path / "d.txt")


def test_a_misspelled_folder_gets_the_one_beside_it(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"'mien'. Did you mean 'mine'\?"):
        load("mien")
    with pytest.raises(FileNotFoundError, match=re.escape(f"Did you mean '{tmp_path / 'mine'}'?")):
        load(tmp_path / "mien")
    with pytest.raises(FileNotFoundError, match="no data set or path"):
        load(tmp_path / "nothing" / "mien")


def test_unknown_names(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"'cifar-100'. Did you mean 'cifar100'\?.*sprites"):
        load("cifar-100", root=tmp_path)
    with pytest.raises(FileNotFoundError, match=r"cifar100 needs cifar-100-python or .*ORTHOCOND_DATA"):
        load("cifar100", root=tmp_path)
    with pytest.raises(ValueError, match=r"sprites is always in memory"):
        load("sprites", in_memory=False)
    with pytest.raises(ValueError, match=r"load\(limit=...\) needs an integer of at least 1; got 0"):
        load("sprites", limit=0)


def test_record_checks_what_it_is_given():
    images = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    with pytest.raises(ValueError, match="uint8 images"):
        ImageData(images.float(), torch.tensor([0, 0]), ("a",))
    with pytest.raises(ValueError, match="2 images need as many int64 labels"):
        ImageData(images, torch.tensor([0]), ("a",))
    with pytest.raises(ValueError, match="label 1 of image 1 is out of range"):
        ImageData(images, torch.tensor([0, 1]), ("a",))
    with pytest.raises(ValueError, match="it has no classes"):
        ImageData(images, torch.tensor([0, 0]))
    with pytest.raises(IndexError):
        ImageData(images, torch.tensor([0, 0]), ("a",))[2]
    with pytest.raises(ValueError, match="leaves images on both sides"):
        ImageData(images, torch.tensor([0, 0]), ("a",)).split_off(0.1)
    with pytest.raises(ValueError, match="between 1 and 2 images"):
        ImageData(images, torch.tensor([0, 0]), ("a",)).sample(3)


def test_in_memory_needs_one_size(tmp_path):
    write_tree(tmp_path, ["0.png"])
    write_tree(tmp_path, ["1.png"], width=9)
    with pytest.raises(ValueError, match=r"in_memory=True needs images of one size.*size=..."):
        load(tmp_path, in_memory=True)


# Real files


def test_real_cifar100():
    data = load(real_data("cifar-100-python"), split="test")
    assert data.images.shape == (4000, 3, 32, 32)
    assert (data.labels.bincount() == 40).all()
    assert data.classes[:2] == ("apple", "aquarium_fish")
    mean, _ = data.statistics()
    assert mean == pytest.approx((0.507, 0.487, 0.441), abs=0.01)  # the well-known ones of the whole set


def test_real_tiny_imagenet():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair = load_pair(real_data("tiny-imagenet-20.tar"), limit=200)
    assert len(pair.train.classes) == 20
    assert (pair.train.labels.bincount() == 10).all()
    assert (len(pair.held_out), pair.held_out.size) == (1000, (64, 64))


@pytest.mark.parametrize(("name", "size"), [("celeba-10k.tar", (109, 89)), ("utkface-128.tar", (128, 128))])
def test_real_faces(name, size):
    path = real_data(name)
    assert load(path, limit=20).size == size
    assert load(Path(path), limit=20, size=32).images.shape == (20, 3, 32, 32)
