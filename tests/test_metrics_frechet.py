"""Fréchet distance: values, invariants, streams, references, errors."""

import sys
import warnings

import mpmath
import numpy as np
import pytest
import scipy.linalg
import torch
from safetensors.torch import save_file
from torch import nn
from torchmetrics.image.fid import FrechetInceptionDistance

from orthocond.metrics import FeatureMoments, FrechetDistance, frechet_distance
from tests.helpers import CASES, mp_matrix, spd, with_spectrum

F64 = torch.float64


def oracle(mean_a, cov_a, mean_b, cov_b):
    """The definition in 50 digits, with the root of the symmetric product."""
    with mpmath.workdps(50):
        a, b = mp_matrix(cov_a), mp_matrix(cov_b)
        values, u = mpmath.eigsy((a + a.T) / 2)
        root = u * mpmath.diag([mpmath.sqrt(max(v, 0)) for v in values]) * u.T
        product = root * b * root
        trace = sum(mpmath.sqrt(max(v, 0)) for v in mpmath.eigsy((product + product.T) / 2, eigvals_only=True))
        means = sum((mpmath.mpf(x) - mpmath.mpf(y)) ** 2 for x, y in zip(mean_a.tolist(), mean_b.tolist(), strict=True))
        return float(means + sum(a[i, i] + b[i, i] for i in range(a.rows)) - 2 * trace)


def normal(n, d, seed, spectrum=1.0, shift=0.0):
    """n samples (n, d) whose standard deviations fall from 1 to ``spectrum``."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(0, float(np.log10(spectrum)), d, dtype=F64)
    mix, _ = torch.linalg.qr(torch.randn(d, d, generator=torch.Generator().manual_seed(1), dtype=F64))
    return torch.randn(n, d, generator=generator, dtype=F64) * scale @ mix + shift


def moments(x):
    return x.mean(0), x.mT.cov()


def pixels(name="pixels"):
    return FrechetDistance(nn.Flatten().eval(), name=name)


def images(n, seed=0, shift=0.0):
    return normal(n, 12, seed, 0.1, shift).float().reshape(n, 3, 2, 2)


# values


@pytest.mark.parametrize("name", [n for n in CASES if "batch" not in n])
def test_it_is_the_definition_in_50_digits(name):
    cov = CASES[name][0]
    n = len(cov)
    other = spd(n, 5.0, seed=3)
    found = frechet_distance(torch.zeros(n, dtype=F64), cov, torch.ones(n, dtype=F64), other)
    assert found == pytest.approx(oracle(torch.zeros(n), cov, torch.ones(n), other), rel=1e-7)


@pytest.mark.parametrize(("spectrum", "rel"), [(1.0, 1e-13), (1e-3, 1e-11), (1e-4, 1e-10)])
def test_it_keeps_its_digits_where_covariances_are_near_and_ill_conditioned(spectrum, rel):
    a, b = moments(normal(500, 12, 0, spectrum)), moments(1.01 * normal(400, 12, 1, spectrum))
    assert frechet_distance(*a, *b) == pytest.approx(oracle(*a, *b), rel=rel)


def test_diagonal_covariances_have_a_closed_form():
    a, b = torch.tensor([1.0, 4.0, 0.0, 9.0], dtype=F64), torch.tensor([4.0, 0.0, 0.0, 1.0], dtype=F64)
    mean = torch.tensor([1.0, 2.0, 0.0, 0.0], dtype=F64)
    expected = 5.0 + float((a.sqrt() - b.sqrt()).square().sum())
    assert frechet_distance(mean, a.diag(), 0 * mean, b.diag()) == pytest.approx(expected, rel=1e-14)


def test_scipy_agrees():
    a, b = moments(normal(300, 20, 0, 0.05)), moments(normal(200, 20, 1, 0.1, shift=0.3))
    root = scipy.linalg.sqrtm((a[1] @ b[1]).numpy())
    expected = (a[0] - b[0]).square().sum() + a[1].trace() + b[1].trace() - 2 * np.trace(root).real
    assert frechet_distance(*a, *b) == pytest.approx(float(expected), rel=1e-6)


def test_torchmetrics_agrees_on_the_same_features():
    class Features(nn.Module):
        num_features = 12

        def forward(self, x):
            return x.flatten(1).double() / 255

    generator = torch.Generator().manual_seed(0)
    real = torch.randint(0, 200, (300, 3, 2, 2), generator=generator, dtype=torch.uint8)
    fake = torch.randint(50, 256, (250, 3, 2, 2), generator=generator, dtype=torch.uint8)
    theirs = FrechetInceptionDistance(feature=Features(), input_img_size=(3, 2, 2)).set_dtype(F64)
    ours = FrechetDistance(Features().eval())
    for metric in (theirs, ours):
        for batch in real.split(64):
            metric.update(batch, real=True)
        for batch in fake.split(32):
            metric.update(batch, real=False)
    assert ours.compute() == pytest.approx(float(theirs.compute()), rel=1e-6)


# invariants


@pytest.mark.parametrize("rank", [0, 2, 6])
def test_equal_distributions_have_distance_zero(rank):
    cov = with_spectrum([0.0] * (6 - rank) + [1.0 + i for i in range(rank)])
    mean = torch.randn(6, dtype=F64)
    assert 0 <= frechet_distance(mean, cov, mean, cov) < 1e-13


def test_it_is_symmetric_and_does_not_see_rotations():
    a, b = moments(normal(50, 8, 0)), moments(normal(5, 8, 1, 0.01, shift=1.0))
    q, _ = torch.linalg.qr(torch.randn(8, 8, dtype=F64))
    there = frechet_distance(*a, *b)
    assert there == pytest.approx(frechet_distance(*b, *a), rel=1e-9)
    turned = [(m @ q, q.mT @ c @ q) for m, c in (a, b)]
    assert there == pytest.approx(frechet_distance(*turned[0], *turned[1]), rel=1e-7)


def test_fewer_images_than_features_equal_the_small_gram_matrix():
    """The nuclear norm of X Yᵀ for centered features: an oracle that forms no covariance."""
    x, y = normal(9, 40, 0), normal(7, 40, 1, shift=0.5)
    u, v = (x - x.mean(0)) / 8**0.5, (y - y.mean(0)) / 6**0.5
    nuclear = np.linalg.svd((u @ v.mT).numpy(), compute_uv=False).sum()
    expected = (x.mean(0) - y.mean(0)).square().sum() + u.square().sum() + v.square().sum() - 2 * nuclear
    assert frechet_distance(*moments(x), *moments(y)) == pytest.approx(float(expected), rel=1e-9)


def test_it_leaves_autocast():
    a, b = moments(normal(50, 8, 0)), moments(normal(50, 8, 1))
    expected = frechet_distance(*a, *b)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert frechet_distance(*a, *b) == expected


# streams


@pytest.mark.parametrize("sizes", [(1000,), (1, 999), (250, 250, 500), (1,) * 10 + (990,)])
def test_streams_equal_numpy(sizes):
    x = normal(1000, 5, 0, shift=1e6).numpy()  # where sums of squares would lose twelve digits
    found = None
    for part in np.split(x, np.cumsum(sizes)[:-1]):
        new = FeatureMoments.of(torch.from_numpy(part))
        found = new if found is None else found.join(new)
    assert found.count == 1000
    np.testing.assert_allclose(found.mean.numpy(), x.mean(0), rtol=1e-14)
    np.testing.assert_allclose(found.covariance.numpy(), np.cov(x.T), rtol=1e-9, atol=1e-9)


def test_merged_shards_and_a_restored_state_equal_one_stream():
    real, fake = images(90), images(70, 1, 0.2)
    whole, left, right = pixels(), pixels(), pixels()
    whole.update(real, real=True)
    whole.update(fake, real=False)
    left.update(real[:30], real=True)
    right.update(real[30:], real=True)
    right.update(fake, real=False)
    left.merge(right)
    assert left.compute() == pytest.approx(whole.compute(), rel=1e-12)
    again = pixels()
    again.load_state_dict(left.state_dict())
    assert again.compute() == left.compute()
    again.reset(keep_real=True)
    assert (again.count(real=True), again.count(real=False)) == (90, 0)
    assert left.count(real=False) == 70


def test_protocols_carry_kind_count_and_extractor():
    fd = pixels()
    for count, text in ((500, "500"), (500, "1k"), (1500, "2.5k"), (36, "2536")):
        fd.update(images(count), real=False)
        assert fd.protocol == f"fd{text}-pixels"
    assert FrechetDistance(nn.Flatten().eval()).protocol == "fd0-flatten"
    assert FrechetDistance(lambda x: x.flatten(1)).protocol == "fd0-lambda"
    assert FrechetDistance(nn.Flatten().eval(), name="inception").protocol == "fd0-inception"  # not FID: other features


def test_the_protocol_counts_images_that_come_after_a_distance():
    fd = pixels()
    fd.update(images(40), real=True)
    for count, total in ((30, 30), (20, 50)):
        fd.update(images(count, count), real=False)
        assert fd.protocol == f"fd{total}-pixels"
        fd.compute()
        assert fd.protocol == f"fd{total}-pixels"


def test_too_few_images_warn_once_with_the_counts():
    fd = pixels()
    fd.update(images(13), real=True)
    fd.update(images(12, 1), real=False)
    with pytest.warns(UserWarning, match=r"^12 generated images give a singular covariance of 12 features: .* biased"):
        first = fd.compute()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fd.compute() == first
    assert first > 0


# references


def test_a_reference_goes_through_a_file(tmp_path):
    fd, other = pixels(), pixels()
    fd.update(images(80), real=True)
    fd.update(images(60, 1), real=False)
    fd.save_reference(tmp_path / "reference.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["reference.safetensors"]
    other.update(images(60, 1), real=False)
    other.load_reference(tmp_path / "reference.safetensors", count=80)
    assert other.compute() == fd.compute()
    assert other.count(real=True) == 80
    with pytest.raises(RuntimeError, match=r"loaded from a file; call reset\(\)"):
        other.update(images(3), real=True)
    with pytest.raises(RuntimeError, match="would count twice"):
        fd.merge(other)
    other.reset()
    other.update(images(3), real=True)
    assert other.count(real=True) == 3


def test_a_wrong_or_damaged_reference_is_refused(tmp_path):
    path = tmp_path / "reference.safetensors"
    fd = pixels()
    fd.update(images(80), real=True)
    fd.save_reference(path)
    with pytest.raises(ValueError, match="features fd-pixels, this object has fd-others"):
        pixels("others").load_reference(path)
    with pytest.raises(ValueError, match="made of 80 images; 50000 are needed"):
        pixels().load_reference(path, count=50_000)
    wider = pixels()
    wider.update(torch.zeros(2, 3, 3, 3), real=False)
    with pytest.raises(ValueError, match="has seen 27 features; these have 12"):
        wider.load_reference(path)
    with pytest.raises(FileNotFoundError, match="There is no reference"):
        pixels().load_reference(tmp_path / "nowhere")
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match="damaged or not a safetensors file"):
        pixels().load_reference(path)
    save_file({"mean": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="not a Fréchet reference of this version"):
        pixels().load_reference(path)
    metadata = {"format": "orthocond Fréchet reference 1", "kind": "fd", "name": "pixels", "count": "3"}
    save_file({"mean": torch.zeros(2), "scatter": torch.zeros(3, 3)}, path, metadata)
    with pytest.raises(ValueError, match=r"got 3, \(2,\) and \(3, 3\)"):
        pixels().load_reference(path)
    save_file({"mean": torch.zeros(2), "scatter": torch.full((2, 2), torch.nan)}, path, metadata)
    with pytest.raises(ValueError, match="NaN or infinity"):
        pixels().load_reference(path)
    save_file({"mean": torch.zeros(2)}, path, metadata)
    with pytest.raises(ValueError, match="lacks scatter"):
        pixels().load_reference(path)


def test_a_failed_write_leaves_the_old_reference(tmp_path, monkeypatch):
    path = tmp_path / "reference.safetensors"
    fd = pixels()
    fd.update(images(80), real=True)
    fd.save_reference(path)
    before = path.read_bytes()
    fd.update(images(80, 1), real=True)

    def full(*_):
        raise OSError("No space left")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        fd.save_reference(path)
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


# errors


def test_arguments_that_are_no_covariances():
    zero, eye = torch.zeros(3), torch.eye(3)
    with pytest.raises(ValueError, match=r"mean_a \(3,\) and cov_a \(2, 2\)"):
        frechet_distance(zero, torch.eye(2), zero, eye)
    with pytest.raises(ValueError, match="got 3 and 2"):
        frechet_distance(zero, eye, torch.zeros(2), torch.eye(2))
    with pytest.raises(ValueError, match="square"):
        frechet_distance(zero, torch.ones(3, 2), zero, eye)
    with pytest.raises(ValueError, match="cov_b has the eigenvalue -1"):
        frechet_distance(zero, eye, zero, torch.diag(torch.tensor([1.0, 2.0, -1.0])))
    with pytest.raises(ValueError, match=r"cov_a has the eigenvalue -0\.0001"):
        frechet_distance(zero, torch.diag(torch.tensor([1.0, 0.5, -1e-4])), zero, eye)
    rounded = torch.diag(torch.tensor([1.0, 0.5, -1e-6]))  # as sums in float32 leave it
    assert frechet_distance(zero, rounded, zero, rounded.clamp(min=0)) == pytest.approx(0, abs=1e-5)
    with pytest.raises(ValueError, match="NaN or infinite"):
        frechet_distance(zero, eye, zero * torch.nan, eye)
    with pytest.raises(TypeError, match="floating-point"):
        frechet_distance(torch.zeros(3, dtype=torch.long), eye, zero, eye)
    with pytest.raises(TypeError, match="real"):
        frechet_distance(zero, eye.to(torch.complex64), zero, eye)


def test_features_that_cannot_be_used():
    with pytest.raises(TypeError, match="callable extractor"):
        FrechetDistance("inception")
    with pytest.raises(RuntimeError, match="evaluation mode"):
        FrechetDistance(nn.Flatten()).update(images(3), real=True)
    with pytest.raises(
        ValueError, match=r"one row of features for each of 3 images; the extractor gave \(3, 3, 2, 2\)"
    ):
        FrechetDistance(nn.Identity().eval()).update(images(3), real=True)
    with pytest.raises(ValueError, match="those of 1 of 3 generated images are not"):
        pixels().update(torch.cat([images(2), torch.full((1, 3, 2, 2), torch.nan)]), real=False)
    fd = pixels()
    fd.update(images(3), real=True)
    with pytest.raises(ValueError, match="has seen 12 features; these have 3"):
        fd.update(torch.zeros(2, 3, 1, 1), real=False)
    with pytest.raises(RuntimeError, match="at least two generated images; got 0"):
        fd.compute()
    fd.reset()
    fd.update(images(1), real=True)
    with pytest.raises(RuntimeError, match=r"two real images \(or load_reference\); got 1"):
        fd.save_reference("nowhere")
    with pytest.raises(ValueError, match="features fd-others, this object has fd-pixels"):
        fd.merge(pixels("others"))
    with pytest.raises(ValueError, match="lacks fake, loaded, real"):
        fd.load_state_dict({"kind": "fd", "name": "pixels"})
    pooled = FrechetDistance(nn.AdaptiveAvgPool2d(1).eval())  # (n, d, 1, 1) is as good as (n, d)
    pooled.update(images(3), real=True)
    assert pooled.count(real=True) == 3


def test_a_missing_safetensors_is_named(monkeypatch, tmp_path):
    fd = pixels()
    fd.update(images(3), real=True)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"orthocond\[lab\]"):
        fd.save_reference(tmp_path / "reference")
