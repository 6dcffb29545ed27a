"""Hugging Face datasets, without a network: saved to disk, Parquet."""

import datasets
import huggingface_hub
import pytest
import torch
from data_files import encoded, pixels

from orthocond.lab.data import MissingSplitError, Pipeline, load, load_pair


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def table(count, labels=("label",), split=None, first=0):
    features = {"image": datasets.Image()}
    rows = {"image": [{"bytes": encoded(pixels(first + i)), "path": None} for i in range(count)]}
    for name in labels:
        features[name] = datasets.ClassLabel(names=["cat", "dog"])
        rows[name] = [i % 2 for i in range(count)]
    return datasets.Dataset.from_dict(rows, datasets.Features(features), split=split)


def save(form, folder):
    if form == "saved":
        datasets.DatasetDict(train=table(6), test=table(2, first=6)).save_to_disk(folder)
    else:
        (folder / "data").mkdir(parents=True)
        table(6).to_parquet(folder / "data" / "train-00000-of-00001.parquet")
        table(2, first=6).to_parquet(folder / "data" / "test-00000-of-00001.parquet")
    return folder


def written(*seeds):
    return torch.stack([torch.from_numpy(pixels(seed)).movedim(2, 0) for seed in seeds])


@pytest.mark.parametrize("form", ["saved", "parquet"])
@pytest.mark.parametrize("how", [{}, {"in_memory": False}])
def test_values(tmp_path, form, how):
    path = save(form, tmp_path / "set")
    data = load(path, root=tmp_path / "cache", **how)
    assert (data.split, data.classes, data.labels.tolist()) == ("train", ("cat", "dog"), [0, 1] * 3)
    assert torch.equal(torch.stack([image for image, _ in data]), written(*range(6)))
    assert torch.equal(load(path, root=tmp_path / "cache", split="test", **how)[1][0], written(7)[0])


def test_pair_and_batches(tmp_path):
    path = save("saved", tmp_path / "set")
    pair = load_pair(path)
    assert (len(pair.train), len(pair.held_out)) == (6, 2)
    batch = next(Pipeline(data=load(path, in_memory=False), batch_size=4, train=True).batches())
    assert batch.images.shape == (4, 3, 8, 8)
    datasets.DatasetDict(train=table(4), validation=table(2), test=table(1)).save_to_disk(tmp_path / "three")
    assert len(load_pair(tmp_path / "three").held_out) == 2


def test_single_part_and_images_without_labels(tmp_path):
    table(3, labels=()).save_to_disk(tmp_path / "a")
    data = load(tmp_path / "a")
    assert (data.split, data.classes, data.labels.tolist()) == ("all", (), [-1] * 3)
    table(3).to_parquet(tmp_path / "b.parquet")
    assert load(tmp_path / "b.parquet", root=tmp_path / "cache").labels.tolist() == [0, 1, 0]


def test_errors(tmp_path):
    path = save("saved", tmp_path / "set")
    with pytest.raises(MissingSplitError, match=r"no split 'val'; it has train, test"):
        load(path, split="val")
    table(2, labels=("color", "kind")).save_to_disk(tmp_path / "two")
    with pytest.raises(ValueError, match=r"several labels: color, kind. Save it with one of them"):
        load(tmp_path / "two")
    with pytest.raises(ValueError, match=r"datasets cannot open no-such-set .*[Ww]ithout a network"):
        load("hf:no-such-set", root=tmp_path / "cache")
    named = table(2, labels=()).add_column("label", ["cat", "dog"])
    named.save_to_disk(tmp_path / "names")
    with pytest.raises(ValueError, match=r"'label' needs whole numbers as labels; got 'cat'"):
        load(tmp_path / "names")
    datasets.Dataset.from_dict({"x": [1]}).save_to_disk(tmp_path / "no")
    with pytest.raises(ValueError, match=r"needs one column of images; of x these are: \[\]"):
        load(tmp_path / "no")
    broken = {"image": [{"bytes": b"nothing", "path": None}], "label": [0]}
    datasets.Dataset.from_dict(broken, table(1).features).save_to_disk(tmp_path / "broken")
    with pytest.raises(ValueError, match=r"broken, row 0 is not an image"):
        load(tmp_path / "broken")
