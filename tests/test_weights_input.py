"""Treatments that know the input: patch covariance, whitening start, running metric."""

import copy

import pytest
import torch
import torch.distributed as dist
from processes import in_two_processes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from orthocond.matrix import matrix_view, polar, sqrtm
from orthocond.matrix.spectra import spectrum
from orthocond.steps import NearestOrthogonal, OptimalLR, treat
from orthocond.weights import (
    SkewOrthogonalConv2d,
    input_aware,
    orthogonal,
    patch_covariance,
    spectral,
    whitening_init_,
)
from tests.test_weights_orthogonal import move

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
# name: (layer, shape of an input)
LAYERS = {
    "linear": (lambda: nn.Linear(6, 4), (50, 6)),
    "linear-tokens": (lambda: nn.Linear(6, 4), (10, 5, 6)),
    "linear-one": (lambda: nn.Linear(6, 4), (6,)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 4, stride=2, padding=3), (9, 2, 11)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3), (5, 3, 8, 7)),
    "conv2d-tall": (lambda: nn.Conv2d(2, 9, 2), (5, 2, 8, 7)),
    "conv2d-unbatched": (lambda: nn.Conv2d(3, 4, 3), (3, 18, 17)),
    "conv2d-stride": (lambda: nn.Conv2d(3, 4, (3, 2), stride=(2, 1), padding=(0, 1)), (5, 3, 8, 7)),
    "conv2d-dilation": (lambda: nn.Conv2d(3, 4, 3, dilation=(2, 3), padding=2), (5, 3, 9, 8)),
    "conv2d-same": (lambda: nn.Conv2d(3, 4, (4, 3), padding="same", dilation=(1, 2)), (5, 3, 8, 7)),
    "conv2d-valid": (lambda: nn.Conv2d(3, 4, 3, padding="valid"), (5, 3, 8, 7)),
    "conv2d-groups": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), (5, 4, 8, 7)),
    "conv2d-depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), (5, 4, 8, 7)),
    "conv2d-reflect": (lambda: nn.Conv2d(3, 4, (3, 5), padding=(1, 2), padding_mode="reflect"), (5, 3, 8, 7)),
    "conv2d-replicate": (lambda: nn.Conv2d(3, 4, 4, padding="same", padding_mode="replicate"), (5, 3, 8, 7)),
    "conv2d-circular": (lambda: nn.Conv2d(3, 4, 3, padding=2, padding_mode="circular"), (5, 3, 8, 7)),
    "conv3d": (lambda: nn.Conv3d(2, 3, (2, 1, 3), stride=(1, 2, 1), padding=(1, 0, 1)), (4, 2, 5, 6, 7)),
}


def make(name):
    build, shape = LAYERS[name]
    # Correlated neighbors and a mean that is not zero.
    return build().double(), torch.randn(shape, dtype=torch.float64).cumsum(-1) + 3


def output_covariance(module, x):
    """Covariance of the output channels over images and positions, by running the layer."""
    y = module(x).detach()
    if isinstance(module, nn.Linear):
        return torch.cov(y.reshape(-1, y.shape[-1]).mT, correction=0)
    spatial = len(module.kernel_size)
    return torch.cov(y.movedim(-spatial - 1, 0).flatten(1), correction=0)


def blocks(matrix, groups):
    """The diagonal blocks of a matrix, one for each group."""
    size = len(matrix) // groups
    return torch.stack([matrix[i * size : (i + 1) * size, i * size : (i + 1) * size] for i in range(groups)])


def with_groups(matrix, groups):
    return matrix.reshape(groups, -1, matrix.shape[-1])


# values


@pytest.mark.parametrize("name", [n for n in LAYERS if n != "linear-one"])
def test_patch_covariance_gives_the_covariance_of_the_output(name):
    """W Σ Wᵀ for three random weights, which fix Σ up to accidents, against the layer itself."""
    module, x = make(name)
    groups = getattr(module, "groups", 1)
    sigma = with_groups(patch_covariance(module, x), groups)
    sigma = sigma.reshape(groups, sigma.shape[-1], sigma.shape[-1])
    for _ in range(3):
        nn.init.normal_(module.weight)
        w = with_groups(matrix_view(module.weight.detach(), groups), groups)
        torch.testing.assert_close(w @ sigma @ w.mT, blocks(output_covariance(module, x), groups))


def test_patch_covariance_equals_unfold():
    module, x = make("conv2d-dilation")
    patches = nn.functional.unfold(x, 3, dilation=(2, 3), padding=2).transpose(0, 1).flatten(1)
    torch.testing.assert_close(patch_covariance(module, x), torch.cov(patches, correction=0))


def test_one_position_has_no_covariance():
    assert not patch_covariance(*make("linear-one")).any()


@pytest.mark.parametrize("name", ["linear", "conv2d", "conv2d-groups"])
def test_streaming_equals_one_batch(name, monkeypatch):
    module, x = make(name)
    whole = patch_covariance(module, x)
    torch.testing.assert_close(patch_covariance(module, x.split(2)), whole)
    torch.testing.assert_close(patch_covariance(module, ((b, torch.zeros(len(b))) for b in x.split(3))), whole)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, torch.arange(len(x))), batch_size=2)
    torch.testing.assert_close(patch_covariance(module, loader), whole)
    monkeypatch.setattr(input_aware, "_CHUNK", 60)
    torch.testing.assert_close(patch_covariance(module, x), whole)


def test_a_large_mean_costs_no_digits():
    module = nn.Linear(3, 2)
    x = torch.randn(1000, 3, dtype=torch.float64)
    expected = torch.cov(x.mT, correction=0)
    torch.testing.assert_close(patch_covariance(module, (x + 1e6).split(10)), expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", [n for n in LAYERS if n != "linear-one"])
def test_whitening_init_whitens_the_output(name):
    module, x = make(name)
    bias = module.bias.detach().clone()
    assert whitening_init_(module, x, ridge=0.0, gain=0.5) is module
    groups = getattr(module, "groups", 1)
    covariance = blocks(output_covariance(module, x), groups)
    values = torch.linalg.eigvalsh(covariance)
    columns = module.weight[0].numel()
    rank = min(columns, covariance.shape[-1])
    torch.testing.assert_close(values[:, -rank:], torch.full_like(values[:, -rank:], 0.25))
    assert not (values[:, :-rank].abs() > 1e-10).any()
    assert torch.equal(module.bias, bias)


def test_whitening_init_is_the_nearest_in_the_outputs():
    """It beats random whitening weights, and is the start of the orthogonal weight in the same metric."""
    module, x = make("linear")
    own = module.weight.detach().clone()
    sigma = patch_covariance(module, x)
    other = orthogonal(copy.deepcopy(module), metric=sigma)
    nearest = whitening_init_(module, x, ridge=0.0).weight.detach().clone()
    torch.testing.assert_close(other.weight.detach(), nearest)

    def distance(w):
        return ((w - own) @ sqrtm(sigma)).norm()

    generator = torch.Generator().manual_seed(0)
    weights = []
    for _ in range(100):
        whitening_init_(module, x, ridge=0.0, rng=generator)
        torch.testing.assert_close(output_covariance(module, x), torch.eye(4, dtype=torch.float64))
        weights.append(module.weight.detach().clone())
        assert distance(weights[-1]) > distance(nearest)
    assert not torch.equal(weights[0], weights[1])
    whitening_init_(module, x, ridge=0.0, rng=torch.Generator().manual_seed(0))
    assert torch.equal(module.weight, weights[0])


def test_ridge_keeps_directions_without_variance_small():
    module = nn.Linear(4, 4).double()
    x = torch.randn(100, 4, dtype=torch.float64)
    x[:, 3] = x[:, 2]
    with pytest.raises(ValueError, match=r"rank 3 of 4.*ridge=1e-4"):
        whitening_init_(module, x, ridge=0.0)
    whitening_init_(module, x)
    mean = float(torch.cov(x.mT, correction=0).diagonal().mean())
    assert torch.linalg.matrix_norm(module.weight, 2) < 1.001 * (1e-4 * mean) ** -0.5


# invariants


def test_orthogonal_metric_whitens_and_stays_so_in_training():
    module = nn.Conv2d(3, 8, 3, padding=1, bias=False)
    x = torch.randn(64, 3, 8, 8).cumsum(-1).cumsum(-2)
    assert spectrum(output_covariance(module, x)).condition > 40
    orthogonal(module, metric=patch_covariance(module, x))
    start = module.weight.detach().clone()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    treat(module, optimizer, gradient=NearestOrthogonal(), lr=OptimalLR())
    for _ in range(5):
        optimizer.zero_grad()
        module(x).relu().square().mean().backward()
        optimizer.step()
    assert (module.weight - start).abs().max() > 1e-2
    assert spectrum(output_covariance(module, x)).condition < 1.01


@pytest.mark.parametrize("name", ["linear", "conv2d-groups", "conv2d-tall", "conv3d"])
def test_running_metric_follows_the_input(name):
    module, x = make(name)
    groups = getattr(module, "groups", 1)
    own = with_groups(matrix_view(module.weight.detach(), groups), groups)
    orthogonal(module, metric="running", momentum=0.25, ridge=0.0)
    metric = module.parametrizations.weight[0].metric
    # The identity until the first batch.
    torch.testing.assert_close(module.weight.detach(), polar(own).reshape(module.weight.shape))
    batches = [x * scale + torch.randn_like(x) for scale in (1, 2, 3, 4, 5, 6)]
    plain = copy.deepcopy(module)
    parametrize.remove_parametrizations(plain, "weight")
    covariances = [patch_covariance(plain, b).reshape(metric.covariance.shape) for b in batches]
    expected = torch.zeros_like(covariances[0])
    for count, (batch, covariance) in enumerate(zip(batches, covariances, strict=True)):
        module(batch)
        rate = max(0.25, 1 / (count + 1))
        expected = (1 - rate) * expected + rate * covariance
        torch.testing.assert_close(metric.covariance, expected)
    # The first four count the same.
    by_hand = sum(covariances[:4]) / 4 * 0.75**2 + covariances[4] * 0.1875 + covariances[5] / 4
    torch.testing.assert_close(expected, by_hand)
    w = with_groups(matrix_view(module.weight.detach(), groups), groups) @ sqrtm(expected)
    gram = w @ w.mT if w.shape[-2] <= w.shape[-1] else w.mT @ w
    torch.testing.assert_close(gram, torch.eye(gram.shape[-1], dtype=gram.dtype).expand_as(gram))


def test_momentum_zero_is_the_plain_average():
    module = orthogonal(nn.Linear(3, 2).double(), metric="running", momentum=0.0)
    batches = torch.randn(20, 30, 3, dtype=torch.float64)
    for batch in batches:
        module(batch)
    expected = torch.stack([torch.cov(b.mT, correction=0) for b in batches]).mean(0)
    torch.testing.assert_close(module.parametrizations.weight[0].metric.covariance[0], expected)


TREATED = {
    "running metric": lambda: orthogonal(nn.Conv2d(3, 4, 3), metric="running"),
    "spectral": lambda: move(spectral(nn.Conv2d(3, 4, 3))),
    "skew": lambda: SkewOrthogonalConv2d(3, 4, 3),
}


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("treatment", TREATED)
def test_activation_checkpointing(treatment, use_reentrant):
    """The forward that is repeated in the backward pass finds what the first one used, and leaves it alone."""
    plain = TREATED[treatment]()
    repeated = copy.deepcopy(plain)
    for _ in range(3):
        x = torch.randn(8, 3, 6, 6, requires_grad=True)
        plain.zero_grad()
        plain(x).square().mean().backward()
        repeated.zero_grad()
        checkpoint(repeated, x, use_reentrant=use_reentrant).square().mean().backward()
        for one, other in zip(plain.parameters(), repeated.parameters(), strict=True):
            torch.testing.assert_close(other.grad, one.grad, rtol=1e-5, atol=1e-8)
        for one, other in zip(plain.buffers(), repeated.buffers(), strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=0)


def test_evaluation_changes_nothing():
    module = orthogonal(nn.Conv2d(3, 4, 3), metric="running")
    x = torch.randn(8, 3, 6, 6)
    module(x)
    module.eval()
    before = copy.deepcopy(module.state_dict())
    first = module(3 * x)
    for key, value in module.state_dict().items():
        assert torch.equal(value, before[key]), key
    torch.testing.assert_close(module(3 * x), first, rtol=0, atol=0)


# gradients


def test_two_forwards_and_one_backward():
    """As in a discriminator: the metric moves in between, each gradient belongs to its own forward."""
    module = orthogonal(nn.Conv2d(3, 4, 3).double(), metric="running")
    x, y = torch.randn(2, 4, 3, 6, 6, dtype=torch.float64)
    raw = module.parametrizations.weight.original
    twin = copy.deepcopy(module)
    (module(x).square().sum() + module(5 * y).square().sum()).backward()
    both = raw.grad.clone()
    single = twin.parametrizations.weight.original
    twin(x).square().sum().backward()
    twin(5 * y).square().sum().backward()
    torch.testing.assert_close(both, single.grad)
    assert both.abs().max() > 0


# shapes and dtypes


def test_half_precision_and_autocast():
    x = torch.randn(16, 3, 8, 8).cumsum(-1)
    module = orthogonal(nn.Conv2d(3, 4, 3, bias=False), metric="running", ridge=0.0)
    with torch.autocast("cpu", torch.bfloat16):
        module(x).float().sum().backward()
    module.eval()
    torch.testing.assert_close(output_covariance(module, x), torch.eye(4), rtol=0, atol=1e-4)
    module = orthogonal(nn.Conv2d(3, 4, 3, bias=False), metric="running").bfloat16()
    module(x.bfloat16()).float().sum().backward()
    assert module.parametrizations.weight.original.grad.isfinite().all()
    conv = whitening_init_(nn.Conv2d(3, 4, 3, bias=False).bfloat16(), x.bfloat16())
    assert conv.weight.dtype == torch.bfloat16
    assert conv.weight.isfinite().all()


@pytest.mark.parametrize("scale", [0.0, 1e-6, 1e6])
def test_inputs_of_any_scale_stay_finite(scale):
    module = orthogonal(nn.Conv2d(3, 4, 3, bias=False), metric="running")
    x = scale * torch.randn(8, 3, 6, 6)
    module(x).square().mean().backward()
    assert module.parametrizations.weight.original.grad.isfinite().all()
    if scale:
        module.eval()
        torch.testing.assert_close(output_covariance(module, x), torch.eye(4), rtol=0, atol=2e-3)


def test_input_by_keyword():
    module = orthogonal(nn.Linear(3, 2), metric="running")
    module(input=torch.randn(20, 3))
    assert module.parametrizations.weight[0].metric.num_batches_tracked == 1


# errors


@pytest.mark.parametrize("function", [patch_covariance, whitening_init_])
@pytest.mark.parametrize(
    ("module", "batch", "kind", "text"),
    [
        (nn.ReLU(), torch.randn(2, 3), TypeError, "Linear, Conv1d, Conv2d or Conv3d"),
        (nn.BatchNorm2d(3), torch.randn(2, 3, 4, 4), TypeError, "got BatchNorm2d"),
        (nn.ConvTranspose2d(3, 4, 2), torch.randn(2, 3, 4, 4), TypeError, "one position, not a patch"),
        (nn.Conv2d(3, 4, 3), torch.randn(2, 1, 8, 8), ValueError, r"\(N, 3, H, W\); got shape \(2, 1, 8, 8\)"),
        (nn.Conv1d(3, 4, 3), torch.randn(2, 8), ValueError, r"\(N, 3, L\)"),
        (nn.Linear(3, 4), torch.randn(2, 5), ValueError, r"\(\*, 3\); got shape \(2, 5\)"),
        (nn.Linear(3, 4), [], ValueError, "needs data"),
        (nn.Linear(3, 4), torch.randn(0, 3), ValueError, "needs data"),
        (nn.Conv2d(3, 4, 3), torch.randn(0, 3, 8, 8), ValueError, "needs data"),
        (nn.Linear(3, 4), [{"x": torch.randn(2, 3)}], TypeError, "got dict"),
    ],
)
def test_errors(function, module, batch, kind, text):
    with pytest.raises(kind, match=text):
        function(module, batch)


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda m, x: whitening_init_(orthogonal(m), x), RuntimeError, "already parametrized"),
        (lambda m, x: whitening_init_(m, x, ridge=-1.0), ValueError, "at least 0"),
        (lambda m, x: whitening_init_(m, x, gain=float("inf")), ValueError, "above 0"),
        (lambda m, x: whitening_init_(m, torch.ones(10, 3)), ValueError, "rank 0 of 3"),
        (lambda m, x: whitening_init_(m, x * torch.nan), ValueError, "finite"),
        (lambda m, x: whitening_init_(nn.init.zeros_(m.weight) is None or m, x), ValueError, "full rank"),
    ],
)
def test_more_errors_of_whitening_init(call, kind, text):
    with pytest.raises(kind, match=text):
        call(nn.Linear(3, 2), torch.randn(10, 3))


def test_a_batch_that_is_not_finite_does_not_spoil_the_average():
    module = orthogonal(nn.Linear(3, 2), metric="running")
    module(torch.randn(20, 3))
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(ValueError, match="finite"):
        module(torch.full((20, 3), torch.nan))
    for key, value in module.state_dict().items():
        assert torch.equal(value, before[key]), key


# life cycle


def test_removal_removes_the_hook():
    module = orthogonal(nn.Linear(3, 2), metric="running")
    x = torch.randn(20, 3)
    module(x)
    module.eval()
    expected = module(x)
    parametrize.remove_parametrizations(module, "weight")
    module.train()
    torch.testing.assert_close(module(x), expected)
    assert not module._forward_pre_hooks
    orthogonal(module)
    module(x)


def test_a_copy_follows_its_own_input():
    module = orthogonal(nn.Linear(3, 2), metric="running")
    twin = copy.deepcopy(module)
    twin(torch.randn(20, 3))
    assert module.parametrizations.weight[0].metric.num_batches_tracked == 0
    parametrize.remove_parametrizations(twin, "weight")
    twin(torch.randn(20, 3))
    assert not twin._forward_pre_hooks
    assert module._forward_pre_hooks


@pytest.mark.filterwarnings("ignore")  # of the compiler itself
def test_compile():
    module = orthogonal(nn.Conv2d(3, 4, 3), metric="running")
    compiled = torch.compile(copy.deepcopy(module), backend="aot_eager")
    for _ in range(3):
        x = torch.randn(8, 3, 6, 6)
        torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(compiled._orig_mod.state_dict(), module.state_dict(), rtol=1e-4, atol=1e-5)


def _two_processes(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        torch.manual_seed(0)
        module = orthogonal(nn.Conv2d(3, 4, 3).double(), metric="running")
        alone = copy.deepcopy(module)
        parallel = DistributedDataParallel(module)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (module, alone)]
        for step in range(4):
            # The two halves differ in mean and scale.
            x = torch.randn(8, 3, 6, 6, dtype=torch.float64) * (1 + step)
            x[4:] = 3 * x[4:] + 2
            for model, optimizer, batch in zip((parallel, alone), optimizers, (x.chunk(2)[rank], x), strict=True):
                optimizer.zero_grad()
                model(batch).tanh().mean().backward()
                optimizer.step()
        # Both processes hand `alone` the same whole batch, so what it synchronizes is itself.
        torch.testing.assert_close(module.state_dict(), alone.state_dict(), rtol=1e-9, atol=1e-10)
        assert module.parametrizations.weight[0].metric.num_batches_tracked == 4
        sharded = fully_shard(copy.deepcopy(alone), mesh=init_device_mesh("cpu", (2,)))
        torch.testing.assert_close(sharded(x), alone(x))
    finally:
        dist.destroy_process_group()


def test_two_processes_equal_one(tmp_path):
    in_two_processes(_two_processes, str(tmp_path))
