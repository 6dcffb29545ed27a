import math

import pytest
import torch
from features import F64, LAYERS, channels, covariance, features, root_of, set_affine, whitened
from torch import nn

from orthocond.layers import (
    CovariancePool2d,
    DecorrelatedBatchNorm1d,
    DecorrelatedBatchNorm2d,
    SVDLayer,
    WhitenColor2d,
    covariance_pool,
    statistics,
    whiten,
    whiten_color,
)
from orthocond.layers.base import flatten
from orthocond.matrix import SVD, Eigh, NewtonSchulz, sqrtm

SHAPES = {2: (60, 6), 3: (10, 6, 7), 4: (5, 6, 4, 5), 5: (4, 6, 3, 2, 4)}


# values


@pytest.mark.parametrize("dims", SHAPES)
def test_whitening_equals_its_definition(dims):
    x = features(*SHAPES[dims])
    layer = set_affine(LAYERS[dims](6))
    shape = (-1, *[1] * (dims - 2))
    expected = whitened(x) * layer.weight.reshape(shape) + layer.bias.reshape(shape)
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(whiten(x).double(), whitened(x), rtol=1e-4, atol=1e-5)


def test_the_positions_of_one_image_are_samples_enough():
    x = features(1, 6, 5, 8)
    torch.testing.assert_close(whiten(x).double(), whitened(x), rtol=1e-4, atol=1e-5)


def test_groups_are_whitened_by_themselves():
    x = features(20, 6, 5, 5)
    y = whiten(x, groups=3)
    for start in (0, 2, 4):
        part = slice(start, start + 2)
        torch.testing.assert_close(y[:, part], whiten(x[:, part]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whiten(x, groups=6), nn.BatchNorm2d(6, affine=False)(x), rtol=1e-4, atol=1e-5)


def test_evaluation_uses_running_covariance():
    layer = set_affine(DecorrelatedBatchNorm2d(6, momentum=0.3, lag="ignore")).double()
    mean, running = torch.zeros(6, dtype=F64), torch.eye(6, dtype=F64)
    for seed in range(3):
        x = features(5, 6, 4, 4, dtype=F64) * (seed + 1)
        layer(x)
        mean = 0.7 * mean + 0.3 * channels(x).mean(1)
        running = 0.7 * running + 0.3 * torch.cov(channels(x))  # unbiased, as nn.BatchNorm's running variance
    torch.testing.assert_close(layer.running_mean, mean)
    torch.testing.assert_close(layer.running_covariance[0], running)
    assert layer.num_batches_tracked == 3
    x = features(2, 6, 3, 3, dtype=F64)
    whitening = root_of(running + 1e-5 * torch.eye(6, dtype=F64), -0.5)
    y = torch.einsum("oi,nihw->nohw", whitening, x - mean.reshape(-1, 1, 1))
    y = y * layer.weight.reshape(-1, 1, 1) + layer.bias.reshape(-1, 1, 1)
    torch.testing.assert_close(layer.eval()(x), y)


def test_average_of_whitening_matrices_as_the_authors_do():
    layer = DecorrelatedBatchNorm2d(6, average="whitening", momentum=0.1).double()
    expected = torch.eye(6, dtype=F64)
    for seed in range(3):
        x = features(5, 6, 4, 4, dtype=F64) * (seed + 1)
        layer(x)
        expected = 0.9 * expected + 0.1 * root_of(covariance(x) + 1e-5 * torch.eye(6, dtype=F64), -0.5)
    torch.testing.assert_close(layer.running_whitening[0], expected)
    assert layer.running_covariance is None
    x = features(2, 6, 3, 3, dtype=F64)
    y = torch.einsum("oi,nihw->nohw", expected, x - layer.running_mean.reshape(-1, 1, 1))
    torch.testing.assert_close(layer.eval()(x), y)


def test_momentum_none_averages_all_batches_equally():
    layer = DecorrelatedBatchNorm1d(4, momentum=None).double()
    batches = [features(50, 4, dtype=F64) * scale for scale in (1, 2, 5)]
    for x in batches:
        layer(x)
    torch.testing.assert_close(layer.running_mean, sum(x.mean(0) for x in batches) / 3)
    torch.testing.assert_close(layer.running_covariance[0], sum(torch.cov(x.T) for x in batches) / 3)


@pytest.mark.parametrize(("d", "positions", "eps"), [(3, 5, 0.0), (3, 5, 0.1), (9, 4, 0.0), (9, 4, 0.1), (9, 9, 0.0)])
def test_pooling_equals_its_definition(d, positions, eps):
    x = features(4, d, positions, positions)[..., : positions // 2 + 1]
    root = covariance_pool(x, output="matrix", eps=eps).double()
    for image, q in zip(x.double().flatten(2), root, strict=True):
        p = torch.cov(image, correction=0) + eps * torch.eye(d, dtype=F64)
        torch.testing.assert_close(q @ q, p, rtol=1e-4, atol=1e-5 * p.trace().item())
        torch.testing.assert_close(q, q.mT, rtol=0, atol=1e-6)
        assert torch.linalg.eigvalsh(q).min() > -1e-6
    packed = covariance_pool(x, eps=eps)
    assert packed.shape == (4, d * (d + 1) // 2)
    rows, columns = torch.triu_indices(d, d)
    assert torch.equal(packed, root.float()[:, rows, columns])


def test_both_sides_of_a_wide_covariance_give_the_same_root():
    """The decomposition of the N x N product stands for that of the d x d covariance: values and gradients."""
    x = features(2, 12, 2, 3, dtype=F64, spread=3.0).requires_grad_()
    weight = torch.randn(12, 12, dtype=F64)
    for eps in (0.0, 0.3):
        thin = covariance_pool(x, output="matrix", eps=eps)
        centered = x.flatten(2) - x.flatten(2).mean(-1, keepdim=True)
        full = sqrtm(centered @ centered.mT / 6, eps=eps, solver=Eigh(rank_tol=1e-12 if eps == 0 else None))
        torch.testing.assert_close(thin, full)
        gradients = [torch.autograd.grad((q * weight).sum(), x)[0] for q in (thin, full)]
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("per", ["image", "batch"])
def test_colored_features_take_mean_and_covariance_of_the_style(per):
    content, style = features(3, 5, 8, 9, dtype=F64), features(3, 5, 6, 6, dtype=F64, mean=7.0, spread=3.0).flip(1)
    y = whiten_color(content, style, per=per, eps=0.0)
    pairs = zip(y, style, strict=True) if per == "image" else [(y.movedim(1, 0), style.movedim(1, 0))]
    for ours, theirs in pairs:
        ours, theirs = ours.flatten(1), theirs.flatten(1)
        torch.testing.assert_close(torch.cov(ours, correction=0), torch.cov(theirs, correction=0))
        torch.testing.assert_close(ours.mean(1), theirs.mean(1))
    half = whiten_color(content, style, per=per, eps=0.0, alpha=0.5)
    torch.testing.assert_close(half, (y + content) / 2)


def test_own_style_changes_nothing():
    x = features(2, 5, 2, 2, dtype=F64)  # four positions: rank 3 of 5
    torch.testing.assert_close(whiten_color(x, x), x)


def test_one_style_for_all_images():
    content, style = features(3, 4, 6, 6), features(1, 4, 5, 5).flip(1)
    y = WhitenColor2d()(content, style)
    torch.testing.assert_close(y[2:], whiten_color(content[2:], style))


# invariants


@pytest.mark.parametrize(("dtype", "spread", "bound"), [
    (torch.float32, 1e1, 2e-6),
    (torch.float32, 1e3, 5e-4),
    (F64, 1e3, 1e-9),
    (torch.bfloat16, 3.0, 2e-2),
])  # fmt: skip
@pytest.mark.parametrize("groups", [1, 2])
def test_output_has_identity_covariance(dtype, spread, bound, groups):
    x = features(16, 8, 8, 8, dtype=dtype, spread=spread)
    y = whiten(x, eps=0.0, groups=groups)
    assert y.dtype == dtype
    size = 8 // groups
    for start in range(0, 8, size):
        block = covariance(y)[start : start + size, start : start + size]
        assert torch.dist(block, torch.eye(size, dtype=F64)) < bound * 8
    assert y.double().mean((0, 2, 3)).abs().max() < 50 * bound


def of_condition(kappa, layout, channels=16, samples=2**14, seed=0):
    """Float32 features whose covariance has the condition number kappa, in one of three layouts."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.linalg.qr(torch.randn(channels, channels, dtype=F64, generator=generator)).Q
    scales = torch.logspace(0, -0.5 * math.log10(kappa), channels, dtype=F64)
    rows = torch.randn(samples, channels, dtype=F64, generator=generator) * scales @ mix.mT
    x = rows.reshape(-1, 16, 16, channels).movedim(-1, 1).float()
    return {"rows": rows.float(), "contiguous": x.contiguous(), "channels_last": x}[layout]


@pytest.mark.parametrize("layout", ["rows", "contiguous", "channels_last"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("kappa", "eps", "bound", "in_float32"), [
    (1e2, 0.0, 3e-6, True),
    (1e8, 1e-1, 3e-6, False),  # the ridge does not count: a layer that is observed computes the same
    (1e5, 0.0, 5e-6, False),
    (1e8, 0.0, 3e-4, False),
    (1e8, 1e-6, 3e-4, False),
])  # fmt: skip
def test_products_are_in_float32_only_where_that_is_enough(kappa, eps, bound, in_float32, groups, layout, monkeypatch):
    """The covariance after whitening is that of P (P + eps I)^-1, by the definition in float64."""
    calls = []
    exact = statistics._float64_moments
    monkeypatch.setattr(statistics, "_float64_moments", lambda *args: calls.append(1) or exact(*args))
    x = of_condition(kappa, layout)
    y = whiten(x, eps=eps, groups=groups)
    assert not calls if in_float32 else calls == [1]
    for start in range(0, 16, 16 // groups):
        block = slice(start, start + 16 // groups)
        p = covariance(x)[block, block]
        expected = p @ torch.linalg.inv(p + eps * torch.eye(len(p), dtype=F64))
        assert torch.linalg.matrix_norm(covariance(y)[block, block] - expected, 2) < bound


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_the_covariance_of_a_stem_of_low_rank_is_that_of_float64(form):
    """64 channels of 27 inputs: what is zero but for rounding must not be hidden below the rounding of products."""
    torch.manual_seed(0)
    x = nn.functional.conv2d(torch.randn(40, 3, 16, 16), torch.randn(64, 3, 3, 3), torch.randn(64), padding=1)
    found = statistics.moments(flatten(x.contiguous(memory_format=form))[0])[1]
    expected = covariance(x)
    assert (found.covariance[0] - expected).abs().max() < 1e-13 * expected.abs().max()
    values = torch.linalg.eigvalsh(found.covariance[0])
    assert values[36] < 1e-11 * values[-1] < values[37]


@pytest.mark.parametrize("layout", ["rows", "contiguous", "channels_last"])
def test_products_in_float32_need_a_moderate_mean_and_finite_squares(layout, monkeypatch):
    x = of_condition(10.0, layout)
    shape = (1, 16) if layout == "rows" else (1, 16, 1, 1)
    expected = whiten(x, eps=0.0)
    far = whiten(x + torch.full(shape, 1e3), eps=0.0)
    assert (far - expected).abs().max() < 3e-3  # the features themselves are rounded to 6e-5
    torch.testing.assert_close(whiten(x * 1e25, eps=0.0), expected, rtol=1e-4, atol=1e-4)
    x[5, 3] = float("nan")
    with pytest.raises(ValueError, match="needs finite features"):
        whiten(x)
    monkeypatch.setattr(statistics, "_float64_moments", None)
    with pytest.raises(TypeError):  # it would have been asked for
        whiten(of_condition(10.0, layout) + 1e3)


@pytest.mark.parametrize("mean", [1e2, 1e4])
def test_a_large_mean_costs_no_more_than_in_batch_normalization(mean):
    x = features(16, 4, 8, 8, mean=mean, spread=2.0)
    reference = nn.BatchNorm2d(4, affine=False).double()(x.double())
    error_of_batchnorm = (nn.BatchNorm2d(4, affine=False)(x) - reference).abs().max()
    error = (whiten(x).double() - whitened(x)).abs().max()
    assert error < 10 * error_of_batchnorm


def test_evaluation_tends_to_training():
    layer = DecorrelatedBatchNorm2d(6)
    x = features(64, 6, 8, 8)
    for _ in range(200):
        trained = layer(x)
    torch.testing.assert_close(layer.eval()(x), trained, rtol=1e-2, atol=1e-3)  # biased against unbiased: 1/4096


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_rounding_is_not_blown_up(scale):
    """Channels that depend on others: whitening has no variance to divide by there, in values and gradients."""
    x = torch.einsum("oi,nihw->nohw", torch.randn(7, 4), scale * features(16, 4, 8, 8)).requires_grad_()
    y = whiten(x, eps=0.0)
    p = covariance(y)
    torch.testing.assert_close(p @ p, p, rtol=0, atol=1e-4)  # a projection
    assert p.trace().round() == 4
    (gradient,) = torch.autograd.grad((y * torch.randn_like(y)).sum(), x)
    assert gradient.abs().max() * scale < 100
    layer = DecorrelatedBatchNorm2d(7, momentum=1.0)
    layer(x)
    assert layer.eval()(x).abs().max() < 10


def test_pooling_of_few_positions_has_no_noise():
    """196 positions and 256 channels: zero eigenvalues give no noise, neither in float32 nor in its gradient."""
    x = torch.randn(2, 256, 14, 14).relu()
    results = []
    for dtype in (torch.float32, F64):
        z = x.to(dtype, copy=True).requires_grad_()
        root = CovariancePool2d(output="matrix")(z)
        (root * torch.linspace(-1, 1, 256, dtype=dtype)).sum().backward()
        assert torch.linalg.matrix_rank(root[0].double(), rtol=1e-5) == 195
        results.append((root.detach().double(), z.grad.double()))
    (root, gradient), (root64, gradient64) = results
    torch.testing.assert_close(root, root64, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, gradient64, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("positions", [4, 20])
def test_pooling_of_dependent_channels_has_no_noise(positions):
    """12 channels that a linear layer made of 3: rank 3 and a bounded gradient, whatever rounding adds."""
    x = torch.einsum("oi,nihw->nohw", torch.randn(12, 3), features(2, 3, positions, positions, spread=2.0))
    x.requires_grad_()
    root = covariance_pool(x, output="matrix")
    assert (torch.linalg.matrix_rank(root.double(), rtol=1e-5) == 3).all()
    (gradient,) = torch.autograd.grad((root * torch.randn(12, 12)).sum(), x)
    assert gradient.abs().max() < 10


def test_observer_sees_the_covariance_of_training_only():
    seen = []
    x = features(4, 6, 5, 5)
    for layer, inputs in (
        (DecorrelatedBatchNorm2d(6, groups=2), (x,)),
        (CovariancePool2d(), (x,)),
        (WhitenColor2d(per="batch"), (x, x.flip(1))),
    ):
        assert isinstance(layer, SVDLayer)
        layer.observer = seen.append
        layer(*inputs)
        layer.eval()(*inputs)
    whitening, pooling, coloring = seen
    assert not any(p.requires_grad for p in seen)
    expected = covariance(x)
    torch.testing.assert_close(whitening, torch.stack([expected[:3, :3], expected[3:, 3:]]))
    torch.testing.assert_close(pooling[1], torch.cov(x[1].flatten(1).double(), correction=0))
    torch.testing.assert_close(coloring[0], expected)


# shapes and dtypes


@pytest.mark.parametrize("groups", [1, 2])
def test_channels_last_is_kept(groups):
    layer = DecorrelatedBatchNorm2d(8, groups=groups)
    x = features(4, 8, 6, 5)
    last = x.to(memory_format=torch.channels_last)
    for _ in range(2):
        y = layer(last)
        assert y.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(y, layer(x), rtol=1e-5, atol=1e-5)
        layer.eval()
    assert layer(x).is_contiguous()


@pytest.mark.parametrize("groups", [1, 2])
def test_input_of_any_strides(groups):
    """Transposed rows, every second position: what others hand over is not always contiguous."""
    rows, images = torch.randn(4, 32).t(), torch.randn(8, 4, 5, 12)[..., ::2]
    for x in (rows, images):
        assert not x.is_contiguous()
        torch.testing.assert_close(whiten(x, groups=groups), whiten(x.contiguous(), groups=groups))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    x = features(32, 8, 8, 8, dtype=dtype, spread=5.0)
    layer = DecorrelatedBatchNorm2d(8).to(dtype)
    assert layer.weight.dtype == dtype
    assert layer.running_covariance.dtype == torch.float32  # a covariance in half precision cannot be inverted
    y = layer(x)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), whitened(x), rtol=2e-2, atol=2e-2)
    assert layer.eval()(x).dtype == dtype
    assert covariance_pool(x).dtype == dtype
    assert whiten_color(x, x).dtype == dtype


def test_autocast_does_not_touch_the_matrix_work():
    layer = DecorrelatedBatchNorm2d(8)
    x = features(32, 8, 8, 8, spread=100.0)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        assert y.dtype == torch.float32
        torch.testing.assert_close(y, layer(x.clone()))
        torch.testing.assert_close(CovariancePool2d()(x), covariance_pool(x))
        assert nn.Sequential(nn.Conv2d(8, 8, 1), layer)(x).dtype == torch.bfloat16
        inferred = layer.eval()(x)
    torch.testing.assert_close(inferred, layer(x), rtol=0, atol=0)
    torch.testing.assert_close(y, layer.train()(x), rtol=0, atol=0)


def test_autocast_does_not_touch_the_products_of_many_samples():
    x = torch.randn(32, 8, 16, 16)  # so many and so even that their products are in float32
    for compute in (DecorrelatedBatchNorm2d(8), whiten):
        with torch.autocast("cpu", torch.bfloat16):
            y = compute(x)
        torch.testing.assert_close(y, compute(x), rtol=0, atol=0)


@pytest.mark.parametrize("solver", [Eigh(), SVD(), NewtonSchulz(steps=20)], ids=repr)
def test_every_solver_fits_every_layer(solver):
    x = features(3, 4, 6, 6, spread=2.0).requires_grad_()
    exact = Eigh()
    for compute in (
        lambda solver: DecorrelatedBatchNorm2d(4, solver=solver)(x),
        lambda solver: CovariancePool2d(solver=solver)(x),
        lambda solver: WhitenColor2d(solver=solver)(x, x.flip(1)),
    ):
        torch.testing.assert_close(compute(solver), compute(exact), rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore:DecorrelatedBatchNorm2d got 36 samples")
@pytest.mark.parametrize("case", ["constant", "duplicated", "zero", "one image", "1e6", "1e-6", "bfloat16"])
def test_training_stays_finite(case):
    """Inputs that break others, through DBN and covariance pooling, for several steps of SGD."""
    x = features(1 if case == "one image" else 8, 3, 8, 8)
    if case == "constant":
        x[:, 1] = 3
    elif case == "duplicated":
        x[:, 1] = x[:, 0]
    elif case == "zero":
        x.zero_()
    elif case in ("1e6", "1e-6"):
        x = x * float(case)
    model = nn.Sequential(
        nn.Conv2d(3, 40, 3), DecorrelatedBatchNorm2d(40), nn.ReLU(), CovariancePool2d(), nn.Linear(820, 4)
    )
    model.append(nn.LogSoftmax(-1))
    if case == "bfloat16":
        x, model = x.bfloat16(), model.bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    target = torch.arange(len(x)) % 4
    for _ in range(6):
        optimizer.zero_grad()
        nn.functional.nll_loss(model(x).float(), target).backward()
        for parameter in model.parameters():
            assert torch.isfinite(parameter.grad).all()
        optimizer.step()
    assert torch.isfinite(model.eval()(x)).all()
