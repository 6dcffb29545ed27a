"""Orthogonal weights: values, invariants, gradients, shapes and dtypes, errors, life cycle."""

import copy
import io

import pytest
import scipy.linalg
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.utils import parametrize

from orthocond.matrix import inv_sqrtm, matrix_view, polar, sqrtm
from orthocond.steps import NearestOrthogonal, OptimalLR, treat
from orthocond.weights import orthogonal, spectral
from orthocond.weights.orthogonal_weight import Orthogonal
from tests.helpers import spd

MAPS = ("cayley", "exponential", "polar")
LAYERS = {
    "linear-wide": lambda: nn.Linear(7, 3),
    "linear-tall": lambda: nn.Linear(3, 7),
    "linear-square": lambda: nn.Linear(4, 4),
    "linear-row": lambda: nn.Linear(5, 1),
    "conv1d": lambda: nn.Conv1d(2, 3, 5),
    "conv2d-wide": lambda: nn.Conv2d(3, 4, 3),
    "conv2d-tall": lambda: nn.Conv2d(2, 9, 2),
    "conv2d-groups": lambda: nn.Conv2d(4, 6, 3, groups=2),
    "conv2d-groups-tall": lambda: nn.Conv2d(4, 12, (1, 2), groups=2),
    "conv2d-depthwise": lambda: nn.Conv2d(3, 3, 3, groups=3),
    "conv1d-groups": lambda: nn.Conv1d(4, 4, 2, groups=2),
    "conv3d": lambda: nn.Conv3d(2, 3, 2),
    "transposed1d": lambda: nn.ConvTranspose1d(3, 2, 4),
    "transposed2d": lambda: nn.ConvTranspose2d(3, 4, 2),
    "transposed2d-tall": lambda: nn.ConvTranspose2d(9, 2, 2),
    "transposed2d-groups": lambda: nn.ConvTranspose2d(4, 6, 2, groups=2),
    "transposed3d": lambda: nn.ConvTranspose3d(2, 2, 2),
}


def view(module):
    """The matrix view of the weight, always with the dimension of groups."""
    groups = getattr(module, "groups", 1)
    matrix = matrix_view(module.weight.detach(), groups)
    return matrix.reshape(groups, -1, matrix.shape[-1])


def error(w, gain=1.0):
    """Largest entry of W Wᵀ - g² I, or of WᵀW - g² I for a tall W."""
    gram = w @ w.mT if w.shape[-2] <= w.shape[-1] else w.mT @ w
    return float((gram - gain**2 * torch.eye(gram.shape[-1], dtype=w.dtype)).abs().max())


def move(module, size=0.5, name="weight"):
    """Take the raw parameter away from where it started."""
    raw = module.parametrizations[name].original
    with torch.no_grad():
        raw.add_(size * torch.randn_like(raw))
    return module


# values


@pytest.mark.parametrize("map", MAPS)
@pytest.mark.parametrize("layer", LAYERS)
def test_it_starts_at_the_nearest_orthogonal_matrix(layer, map):
    module = LAYERS[layer]().double()
    own = view(module)
    orthogonal(module, map=map, gain=0.7)
    torch.testing.assert_close(view(module), 0.7 * polar(own), rtol=0, atol=1e-13)  # polar: 1e-16 κ²


@pytest.mark.parametrize("layer", LAYERS)
def test_maps_equal_their_definitions_with_full_matrices(layer):
    for map in MAPS:
        module = LAYERS[layer]().double()
        base = polar(view(module))
        move(orthogonal(module, map=map))
        raw = module.parametrizations.weight.original.detach()
        x = raw.reshape(base.shape)
        if base.shape[-2] < base.shape[-1]:
            x, base = x.mT, base.mT
        expected = []
        for xi, bi in zip(x, base, strict=True):
            a = xi @ bi.mT - bi @ xi.mT
            eye = torch.eye(len(a), dtype=a.dtype)
            if map == "cayley":
                expected.append(torch.linalg.solve(eye - a / 2, eye + a / 2) @ bi)
            elif map == "exponential":
                expected.append(torch.from_numpy(scipy.linalg.expm(a.numpy())) @ bi)
            else:
                u, _, vh = torch.linalg.svd(xi, full_matrices=False)
                expected.append(u @ vh)
        q = view(module)
        expected = torch.stack(expected)
        torch.testing.assert_close(q, expected if q.shape == expected.shape else expected.mT, rtol=0, atol=1e-12)


def test_exponential_around_the_identity_is_the_papers_form():
    module = nn.Linear(5, 5, bias=False).double()
    nn.init.eye_(module.weight)
    orthogonal(module, map="exponential")
    w = torch.randn(5, 5, dtype=torch.float64)
    with torch.no_grad():
        module.parametrizations.weight.original.copy_(w)
    torch.testing.assert_close(module.weight, torch.matrix_exp(w - w.mT))


def test_the_parameter_keeps_its_values():
    module = nn.Conv2d(3, 8, 3)
    own = module.weight.detach().clone()
    orthogonal(module)
    assert torch.equal(module.parametrizations.weight.original, own)


# invariants


@pytest.mark.parametrize("map", MAPS)
@pytest.mark.parametrize("layer", LAYERS)
def test_it_is_orthogonal_wherever_the_parameter_goes(layer, map):
    module = orthogonal(LAYERS[layer]().double(), map=map, gain=2.0)
    start = module.weight.detach()
    for size in (1e-3, 1.0, 10.0):
        assert error(view(move(module, size)), 2.0) < 1e-10
    # With one row and one column there is nowhere to go: +1 and -1 are not connected.
    assert (module.weight - start).abs().max() > 1e-2


@pytest.mark.parametrize("map", MAPS)
def test_training_keeps_it_orthogonal_and_moves_it(map):
    module = orthogonal(nn.Conv2d(3, 16, 3), map=map)
    start = module.weight.detach()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    handle = treat(module, optimizer, gradient=NearestOrthogonal(), lr=OptimalLR())
    losses = []
    target = torch.randn(8, 16, 6, 6)
    x = torch.randn(8, 3, 8, 8)
    for _ in range(10):
        loss = (module(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert error(view(module)) < 1e-5
    assert (module.weight - start).abs().max() > 1e-2
    handle.remove()


def test_all_orthonormal_matrices_can_be_reached():
    """Regression to a random target of the same determinant succeeds, for tall and wide."""
    for rows, columns in ((6, 3), (3, 6)):
        module = orthogonal(nn.Linear(columns, rows, bias=False).double())
        target = polar(torch.randn(rows, columns, dtype=torch.float64))
        optimizer = torch.optim.LBFGS(module.parameters(), max_iter=500, line_search_fn="strong_wolfe")

        def closure(module=module, target=target, optimizer=optimizer):
            optimizer.zero_grad()
            loss = (module.weight - target).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        torch.testing.assert_close(module.weight.detach(), target, rtol=0, atol=1e-4)


def test_a_tall_convolution_with_gain_one_over_k_is_an_isometry():
    conv = orthogonal(nn.Conv2d(3, 40, 3, padding=1, padding_mode="circular", bias=False).double(), gain=1 / 3)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(conv(x).norm(), x.norm())


@pytest.mark.parametrize("map", MAPS)
@pytest.mark.parametrize("layer", ["linear-wide", "linear-tall", "linear-square", "conv2d-wide", "conv2d-groups"])
def test_it_is_orthogonal_in_a_metric(layer, map):
    module = LAYERS[layer]().double()
    own = view(module)
    groups, _, n = own.shape
    sigma = spd(n, 1e3, groups)
    orthogonal(module, map=map, gain=0.5, metric=sigma if groups > 1 else sigma[0])
    root = sqrtm(sigma)
    # The weight that is nearest to the module's own in the metric, which is nearest in the outputs.
    torch.testing.assert_close(view(module), 0.5 * polar(own @ root) @ inv_sqrtm(sigma), rtol=0, atol=1e-12)
    move(module)
    assert error(view(module) @ root, 0.5) < 1e-10


def test_one_metric_serves_all_groups():
    module = orthogonal(nn.Conv2d(4, 6, 3, groups=2).double(), metric=spd(18, 10.0))
    assert error(view(module) @ sqrtm(spd(18, 10.0))) < 1e-12


def test_ridge_is_a_share_of_the_mean_eigenvalue():
    sigma = torch.diag(torch.tensor([4.0, 2.0, 0.0], dtype=torch.float64))
    module = orthogonal(nn.Linear(3, 2).double(), metric=sigma, ridge=0.5)
    w = view(module)
    ridge = torch.eye(3, dtype=torch.float64)
    torch.testing.assert_close(w @ (sigma + ridge) @ w.mT, torch.eye(2, dtype=torch.float64).unsqueeze(0))


# gradients


@pytest.mark.parametrize("at_start", [True, False])
@pytest.mark.parametrize("map", MAPS)
@pytest.mark.parametrize("layer", ["linear-wide", "linear-tall", "linear-square", "conv1d-groups", "linear-row"])
def test_gradients(layer, map, at_start):
    module = orthogonal(LAYERS[layer]().double(), map=map)
    if not at_start:
        move(module)
    raw = module.parametrizations.weight.original.detach().clone().requires_grad_()
    assert gradcheck(module.parametrizations.weight[0], raw, check_forward_ad=map == "cayley")
    assert gradgradcheck(module.parametrizations.weight[0], raw, atol=1e-4)


@pytest.mark.parametrize("map", ["cayley", "exponential"])
def test_a_small_step_is_the_step_of_the_weight_on_the_tangent_space(map):
    module = orthogonal(nn.Linear(3, 7, bias=False).double(), map=map)
    base, step = module.weight.detach(), torch.randn(7, 3, dtype=torch.float64)
    with torch.no_grad():
        module.parametrizations.weight.original.add_(1e-6 * step)
    torch.testing.assert_close((module.weight - base) / 1e-6, step - base @ step.mT @ base, rtol=0, atol=1e-4)


def test_no_gradient_to_a_metric():
    sigma = spd(7, 10.0).requires_grad_()
    module = orthogonal(nn.Linear(7, 3).double(), metric=sigma)
    module.weight.sum().backward()
    assert sigma.grad is None
    assert module.parametrizations.weight.original.grad.abs().max() > 0


# shapes and dtypes


@pytest.mark.parametrize(("map", "bound"), [("cayley", 5e-6), ("exponential", 1e-5), ("polar", 1e-6)])
@pytest.mark.parametrize("shape", [(64, 27), (64, 576), (128, 128)])
def test_accuracy_in_float32(shape, map, bound):
    module = move(orthogonal(nn.Linear(shape[1], shape[0], bias=False), map=map), 0.05)
    assert error(module.weight.detach().double()) < bound


@pytest.mark.parametrize("map", MAPS)
def test_accuracy_of_a_tall_weight_with_large_entries(map):
    """The table of an embedding starts with unit normal entries: sums of 30000 products of size 1 must not show."""
    module = orthogonal(nn.Embedding(30000, 20), map=map)
    assert error(module.weight.detach().double()) < 1e-5


@pytest.mark.parametrize("scale", [1e5, 1e8, 1e11])
@pytest.mark.parametrize("shape", [(64, 27), (33, 32), (32, 32)], ids=str)
def test_an_exponential_of_any_size_stays_orthogonal_or_raises(shape, scale):
    module = orthogonal(nn.Linear(shape[1], shape[0], bias=False), map="exponential")
    raw = module.parametrizations.weight.original
    with torch.no_grad():
        raw.normal_(std=scale)
    weight = module.weight
    assert error(weight.detach().double()) < 1e-6
    weight.sum().backward()
    assert raw.grad.isfinite().all()
    with torch.no_grad():
        raw[0, 0] = 2e12
    with pytest.raises(ValueError, match=r"needs parameters up to 1e\+12.* got 2.0e\+12. Lower the learning rate"):
        _ = module.weight


@pytest.mark.parametrize("scale", [1.0, 10.0, 100.0, 1e3, 1e4])
@pytest.mark.parametrize("shape", [(64, 32), (64, 27), (27, 64), (33, 32), (32, 32), (64, 300)], ids=str)
@pytest.mark.parametrize("map", ["cayley", "exponential"])
def test_accuracy_where_the_parameter_has_grown(map, shape, scale):
    """Both maps are orthogonal for any parameter. GeoTorch's exponential is off by 2e-5 at 10 and 3e-3 at 1e3."""
    module = orthogonal(nn.Linear(shape[1], shape[0], bias=False), map=map)
    with torch.no_grad():
        module.parametrizations.weight.original.normal_(std=scale)
    assert error(module.weight.detach().double()) < (5e-6 if scale < 1e4 else 2e-5)


def test_exponential_is_at_least_as_orthogonal_as_geotorch():
    geotorch = pytest.importorskip("geotorch")
    for scale in (1.0, 10.0, 100.0, 1e3):
        ours, theirs = orthogonal(nn.Linear(32, 64), map="exponential"), nn.Linear(32, 64)
        geotorch.orthogonal(theirs, "weight")
        with torch.no_grad():
            for module in (ours, theirs):
                module.parametrizations.weight.original.normal_(std=scale)
        assert error(ours.weight.detach().double()) <= error(theirs.weight.detach().double())


@pytest.mark.parametrize("shape", [(7, 3), (5, 3), (3, 3)], ids=str)
def test_exponential_of_a_large_parameter_against_scipy(shape):
    module = orthogonal(nn.Linear(shape[1], shape[0], bias=False).double(), map="exponential")
    base = module.weight.detach()
    with torch.no_grad():
        raw = module.parametrizations.weight.original.normal_(std=5.0).detach()
    a = raw @ base.mT - base @ raw.mT
    expected = torch.from_numpy(scipy.linalg.expm(a.numpy())) @ base
    torch.testing.assert_close(module.weight.detach(), expected, rtol=0, atol=1e-10)


def test_half_precision_and_autocast():
    module = orthogonal(nn.Conv2d(3, 8, 3).bfloat16())
    assert module.weight.dtype == torch.bfloat16
    assert error(view(move(module)).float()) < 0.05
    module = move(orthogonal(nn.Conv2d(3, 8, 3)))
    with torch.autocast("cpu", torch.bfloat16):
        w = view(module)
        module(torch.randn(1, 3, 5, 5)).float().sum().backward()
    assert error(w) < 1e-5
    assert module.parametrizations.weight.original.grad.isfinite().all()


def test_channels_last():
    module = nn.Conv2d(3, 8, 3)
    other = copy.deepcopy(module).to(memory_format=torch.channels_last)
    torch.testing.assert_close(orthogonal(other).weight, orthogonal(module).weight)


def test_the_longer_side_costs_no_square_matrix():
    """A matrix of 50,000 x 50,000 would take 10 GB."""
    module = move(orthogonal(nn.Linear(50_000, 4, bias=False)), 1e-3)
    module.weight.sum().backward()
    assert error(view(module)) < 1e-5


def test_several_threads_and_groups():
    """Batched LU decompositions of MKL with two threads return wrong results at this size."""
    torch.set_num_threads(2)
    module = move(orthogonal(nn.Conv1d(4 * 160, 4 * 160, 1, groups=4)), 0.05)
    module.weight.sum().backward()
    assert error(view(module)) < 2e-5


def test_any_module_with_a_matrix():
    class Subspace(nn.Module):
        def __init__(self):
            super().__init__()
            self.u = nn.Parameter(torch.randn(6, 20))

    module = move(orthogonal(Subspace(), "u"), name="u")
    assert error(module.u.detach()) < 1e-5


# errors


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: orthogonal(nn.ReLU()), ValueError, "no matrices of its own"),
        (lambda: orthogonal(nn.Linear(3, 3), "wieght"), ValueError, "it has 'weight'"),
        (lambda: orthogonal(nn.Sequential(nn.Linear(3, 3))), ValueError, "Pass the Linear or convolution itself"),
        (lambda: orthogonal(nn.BatchNorm2d(3)), ValueError, "at least two dimensions"),
        (lambda: orthogonal(nn.Linear(3, 3).weight), TypeError, "needs a torch.nn.Module"),
        (lambda: orthogonal(nn.LazyLinear(3)), RuntimeError, "lazy"),
        (lambda: orthogonal(orthogonal(nn.Linear(3, 3))), RuntimeError, "already parametrized"),
        (lambda: orthogonal(nn.Linear(3, 3, dtype=torch.complex64)), TypeError, "real matrices"),
        (lambda: orthogonal(nn.Linear(3, 3), map="caley"), ValueError, "'cayley', 'exponential', 'polar'"),
        (lambda: orthogonal(nn.Linear(3, 3), gain=0.0), ValueError, "above 0"),
        (lambda: orthogonal(nn.Linear(3, 2), metric=torch.eye(2)), ValueError, r"needs shape \(3, 3\)"),
        (lambda: orthogonal(nn.Linear(3, 2), metric=torch.eye(3).tolist()), TypeError, "needs a tensor"),
        (lambda: orthogonal(nn.Linear(3, 2), metric="runing"), ValueError, "'running'"),
        (lambda: orthogonal(nn.Linear(3, 2), metric=torch.tensor([[1.0, 2, 0]] * 3)), ValueError, "symmetric"),
        (lambda: orthogonal(nn.Linear(3, 2), metric=-torch.eye(3)), ValueError, "positive definite"),
        (lambda: orthogonal(nn.Linear(3, 2), metric=torch.diag(torch.tensor([1.0, 1, 0]))), ValueError, "rank 2 of 3"),
        (lambda: orthogonal(nn.Linear(3, 2), metric=torch.eye(3) * torch.nan), ValueError, "finite"),
        (lambda: orthogonal(nn.Linear(3, 2), metric="running", momentum=1.5), ValueError, "from 0 to 1"),
        (lambda: orthogonal(nn.Linear(3, 2), metric="running", ridge=-1.0), ValueError, "at least 0"),
        (lambda: orthogonal(nn.ConvTranspose2d(3, 2, 2), metric="running"), TypeError, "one position, not a patch"),
        (lambda: orthogonal(nn.Embedding(3, 2), metric="running"), TypeError, "Linear, Conv1d"),
    ],
)
def test_errors(make, kind, text):
    with pytest.raises(kind, match=text):
        make()


def test_a_weight_without_full_rank_is_refused_and_left_alone():
    module = nn.Linear(4, 3)
    with torch.no_grad():
        module.weight[1] = module.weight[0]
    own = module.weight.detach().clone()
    with pytest.raises(ValueError, match="rank 2 of 3"):
        orthogonal(module)
    assert not parametrize.is_parametrized(module)
    assert torch.equal(module.weight, own)


# life cycle


def test_assigning_a_weight_projects_it():
    module = move(orthogonal(nn.Conv2d(3, 4, 3), gain=2.0))
    raw = module.parametrizations.weight.original
    w = torch.randn(4, 3, 3, 3)
    given = w.clone()
    module.weight = w
    assert module.parametrizations.weight.original is raw
    torch.testing.assert_close(view(module)[0], 2 * polar(w.flatten(1)))
    with torch.no_grad():
        raw.zero_()
    assert torch.equal(w, given)
    for bad, text in ((torch.randn(4, 27), "needs shape"), (torch.zeros(4, 3, 3, 3), "full rank")):
        with pytest.raises(ValueError, match=text):
            module.weight = bad


def test_assigning_its_own_weight_changes_nothing():
    module = move(orthogonal(nn.Linear(6, 3).double(), metric=spd(6, 100.0), gain=0.3))
    own = module.weight.detach().clone()
    module.weight = own
    torch.testing.assert_close(module.weight.detach(), own, rtol=0, atol=1e-12)


@pytest.mark.parametrize("metric", [None, "given", "running"])
@pytest.mark.parametrize("map", MAPS)
def test_state_dict_and_deepcopy(map, metric):
    def make():
        metric_ = spd(27, 10.0).float() if metric == "given" else metric
        return orthogonal(nn.Conv2d(3, 8, 3), map=map, metric=metric_)

    module = make()
    module(torch.randn(4, 3, 8, 8))
    move(module)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other = make()
    other.load_state_dict(torch.load(file, weights_only=True))
    torch.testing.assert_close(other.weight, module.weight, rtol=0, atol=0)
    twin = copy.deepcopy(module)
    torch.testing.assert_close(twin.weight, module.weight, rtol=0, atol=0)
    move(twin)
    torch.testing.assert_close(other.weight, module.weight, rtol=0, atol=0)
    assert not torch.equal(twin.weight, module.weight)


def test_remove():
    module = nn.Conv2d(3, 8, 3)
    parameter = module.weight
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    orthogonal(module)
    assert optimizer.param_groups[0]["params"][0] is module.parametrizations.weight.original
    kept = module.weight.detach().clone()
    parametrize.remove_parametrizations(module, "weight")
    assert type(module) is nn.Conv2d
    assert module.weight is parameter
    assert torch.equal(module.weight, kept)
    assert set(module.state_dict()) == {"weight", "bias"}


@pytest.mark.parametrize("treatment", [orthogonal, spectral])
def test_removal_from_a_copy_leaves_the_original(treatment):
    module = treatment(nn.Linear(4, 3))
    module.eval()
    twin = copy.deepcopy(module)
    triplet = copy.deepcopy(twin)
    own = module.weight.detach().clone()
    parametrize.remove_parametrizations(twin, "weight")
    assert type(twin) is nn.Linear
    for m in (module, twin, triplet):
        torch.testing.assert_close(m.weight.detach(), own, rtol=0, atol=0)
    assert parametrize.is_parametrized(module)


def test_frozen_weights_stay_frozen():
    module = nn.Linear(4, 3).requires_grad_(False)
    assert not orthogonal(module).weight.requires_grad


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, in dynamo
@pytest.mark.parametrize("map", MAPS)
def test_compile(map):
    module = orthogonal(nn.Conv2d(3, 8, 3), map=map)
    compiled = torch.compile(copy.deepcopy(module), backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 3, 6, 6)
    for m in (module, compiled):
        m(x).square().sum().backward()
    torch.testing.assert_close(compiled(x), module(x))
    raw = [m.parametrizations.weight.original.grad for m in (module, compiled)]
    torch.testing.assert_close(raw[1], raw[0], rtol=1e-4, atol=1e-4)


def test_repr():
    text = repr(orthogonal(nn.Linear(4, 3), gain=0.5, metric="running"))
    assert "map='cayley', gain=0.5, groups=1" in text
    assert "Metric(4, ridge=0.0001, momentum=0.1)" in text
    assert isinstance(orthogonal(nn.Linear(4, 3)).parametrizations.weight[0], Orthogonal)
