import copy
import math

import pytest
import scipy.linalg
import torch
from torch import nn

from orthocond.matrix import matrix_view
from orthocond.steps import Stiefel, treat
from tests.steps_helpers import batch, haar, network, train, train_scaled
from tests.test_treat import LAYERS, OPTIMIZERS

SHAPES = {"square": (6, 6), "odd": (5, 5), "wide": (4, 9), "tall": (9, 4), "row": (1, 7), "column": (7, 1)}


def tangent_vectors(q, count):
    """Random tangent vectors at q from their definition: Q Aᵀ skew for wide matrices, Qᵀ A for tall ones."""
    m, n = q.shape
    if m > n:
        return tangent_vectors(q.mT, count).mT
    skew = torch.randn(count, m, m, dtype=q.dtype)
    outside = torch.randn(count, m, n, dtype=q.dtype)
    return (skew - skew.mT) @ q + outside - outside @ q.mT @ q


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_the_circle_a_step_turns_by_the_arc_tangent_of_the_rate(shape, dtype):
    weight = nn.Parameter(torch.tensor([math.cos(0.3), math.sin(0.3)], dtype=dtype).reshape(shape))
    optimizer = torch.optim.SGD([weight], lr=0.2)
    treat(weight, optimizer, manifold=Stiefel(momentum=0.0))
    angle = 0.3
    for sign in (1.0, -1.0, -1.0):
        # Along the tangent the gradient is `sign`, along the normal anything; its size does not matter.
        tangent = torch.tensor([-math.sin(angle), math.cos(angle)], dtype=dtype)
        weight.grad = (37 * sign * tangent + 5 * weight.detach().flatten()).reshape(shape)
        optimizer.step()
        angle -= sign * math.atan(0.2)
        expected = torch.tensor([math.cos(angle), math.sin(angle)], dtype=dtype).reshape(shape)
        torch.testing.assert_close(weight.detach(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rotations_of_the_plane_and_of_space(dtype):
    """In 3 dimensions a tangent has a null direction, the axis of rotation: rounding must not make a step along it."""
    for n in (2, 3):
        for _ in range(20):
            q = haar(n, n)
            axis = torch.randn(n, n, dtype=torch.float64)
            axis = axis - axis.mT
            unit = axis / torch.linalg.matrix_norm(axis, 2)
            symmetric = torch.randn(n, n, dtype=torch.float64)
            gradient = q @ (3 * axis + symmetric + symmetric.mT)
            setting = Stiefel(momentum=0.0)
            w = q.to(dtype)
            found = setting.step(w, setting.tangent(w, gradient.to(dtype)), 0.4)
            expected = q @ torch.linalg.matrix_exp(-math.atan(0.4) * unit)
            torch.testing.assert_close(
                found, expected.to(dtype), atol=1e-5 if dtype is torch.float32 else 1e-12, rtol=0
            )


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_step_is_its_formula_by_scipy(shape):
    q, m = haar(*shape), torch.randn(shape, dtype=torch.float64)
    setting = Stiefel(scale=0.5, gain=2.0)
    found = setting.step(2 * q, setting.tangent(2 * q, m), 0.3)
    if shape[0] > shape[1]:
        tangent = m - q @ (q.T @ m + m.T @ q) / 2
    else:
        tangent = m - (m @ q.T + q @ m.T) @ q / 2
    rank = torch.linalg.matrix_rank(tangent)
    u, _, vh = torch.linalg.svd(tangent, full_matrices=False)
    moved = q - 0.15 * u[:, :rank] @ vh[:rank]
    expected = 2 * torch.from_numpy(scipy.linalg.polar(moved.numpy())[0])
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_tangent_is_the_projection_of_the_gradient(shape):
    q, m = haar(*shape), torch.randn(shape, dtype=torch.float64)
    t = Stiefel().tangent(q, m)
    gram = t @ q.mT if shape[0] <= shape[1] else q.mT @ t
    torch.testing.assert_close(gram + gram.mT, torch.zeros_like(gram), atol=1e-12, rtol=0)
    torch.testing.assert_close(Stiefel().tangent(q, t), t, atol=1e-12, rtol=0)
    vectors = tangent_vectors(q, 100)
    torch.testing.assert_close((vectors * (m - t)).sum((-2, -1)), torch.zeros(100).double(), atol=1e-11, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(8, 8), (6, 16), (16, 6), (64, 576), (1, 9), (30, 3072)])
def test_a_gradient_normal_to_the_manifold_is_no_step(shape, dtype):
    """Its part along the manifold is rounding, which must not become a step of full length."""
    weight = nn.Parameter(torch.randn(shape, dtype=torch.float64).to(dtype))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    treat(weight, optimizer, manifold=Stiefel(momentum=0.0))
    before = weight.detach().clone()
    normal = torch.randn(min(shape), min(shape), dtype=dtype)
    normal = normal + normal.mT
    weight.grad = normal @ before if shape[0] <= shape[1] else before @ normal
    optimizer.step()
    # In float64 the first weight has the errors of a polar factor, its squared condition times the machine epsilon.
    atol = 5e-7 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(weight.detach(), before, atol=atol, rtol=0)
    along = tangent_vectors(before, 1)[0] if shape != (1, 9) else before.roll(1)
    along *= weight.grad.norm() / along.norm()
    weight.grad += torch.finfo(dtype).eps ** 0.75 / 5 * along
    optimizer.step()
    torch.testing.assert_close(weight.detach(), before, atol=atol, rtol=0)
    weight.grad += 1e-3 * along
    optimizer.step()
    assert torch.linalg.matrix_norm(weight.detach() - before, 2) > 0.05


@pytest.mark.parametrize("shape", [s for name, s in SHAPES.items() if name not in ("row", "column")])
def test_no_tangent_step_of_the_same_spectral_norm_falls_faster(shape):
    q, gradient = haar(*shape), torch.randn(shape, dtype=torch.float64)
    setting = Stiefel()
    tangent = setting.tangent(q, gradient)
    slope = float(((q - setting.step(q, tangent, 1e-6)) * gradient).sum() / 1e-6)
    assert slope == pytest.approx(float(torch.linalg.svdvals(tangent).sum()), rel=1e-4)  # the nuclear norm
    others = tangent_vectors(q, 2000)
    others = others / torch.linalg.matrix_norm(others, 2, keepdim=True)
    assert slope > (others * gradient).sum((-2, -1)).max()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_finds_the_nearest_orthogonal_matrix(shape):
    """‖Q - B‖² over orthogonal Q is least at the polar factor of B; on a component of its own for square ones."""
    start, target = haar(*shape), haar(*shape)
    if shape[0] == shape[1] and torch.linalg.det(start) * torch.linalg.det(target) < 0:
        target[0] *= -1
    weight = nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([weight], lr=0.2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.96**step)
    treat(weight, optimizer, manifold=Stiefel(momentum=0.5))
    for _ in range(250):
        optimizer.zero_grad()
        (weight - target).square().sum().backward()
        optimizer.step()
        schedule.step()
    torch.testing.assert_close(weight.detach(), target, atol=1e-2, rtol=0)


def test_the_gradient_is_averaged_in_the_surrounding_space():
    w = nn.Parameter(haar(3, 5))
    optimizer = torch.optim.SGD([w], lr=0.1)
    treat(w, optimizer, manifold=Stiefel(momentum=0.8))
    expected, average = w.detach().clone(), torch.zeros(3, 5, dtype=torch.float64)
    for _ in range(4):
        w.grad = torch.randn(3, 5, dtype=torch.float64)
        average = 0.8 * average + 0.2 * w.grad
        expected = Stiefel().step(expected, Stiefel().tangent(expected, average), 0.1)
        optimizer.step()
        torch.testing.assert_close(w.detach(), expected)


@pytest.mark.parametrize("shape", [(30, 4096), (4096, 30), (128, 300)])
def test_a_large_float32_weight_takes_the_step_of_float64(shape):
    setting = Stiefel(gain=0.7)
    w = setting.nearest(torch.randn(shape))
    average = torch.randn(shape)
    found = setting.step(w, setting.tangent(w, average), 0.1)
    expected = setting.step(w.double(), setting.tangent(w.double(), average.double()), 0.1)
    assert torch.linalg.matrix_norm(found - expected, 2) < 1e-5 * torch.linalg.matrix_norm(expected - w, 2)
    values = torch.linalg.svdvals(found.double())
    torch.testing.assert_close(values, torch.full_like(values, 0.7), rtol=1e-7, atol=0)


@pytest.mark.parametrize("gain", [1.3, None])
@pytest.mark.parametrize("shape", [(8, 64), (64, 8), (128, 300)])
@pytest.mark.parametrize("rank", [1, 3, 8])
def test_float32_weights_take_the_step_of_float64(rank, shape, gain):
    """Also where the tangent has null directions; a batch, with a rate for each."""
    setting = Stiefel(gain=gain, scale=0.5)
    w = setting.nearest(torch.randn(2, 3, *shape))
    m, n = shape
    tangents = torch.randn(2, 3, m, rank, dtype=torch.float64) @ torch.randn(2, 3, rank, n, dtype=torch.float64)
    average = setting.tangent(w.double(), tangents) * 10.0 ** torch.randint(-20, 16, (2, 3, 1, 1))
    lr = torch.linspace(-0.5, 1, 6).reshape(2, 3)
    found = setting.step(w, average.float(), lr)
    expected = setting.step(w.double(), average, lr)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(4, 32), (300, 128)])
def test_averages_of_another_dtype(shape, dtype, kind):
    w, average = Stiefel().nearest(torch.randn(shape).to(dtype)), torch.randn(shape).to(kind)
    found = Stiefel().step(w, average, 0.1)
    assert found.dtype == dtype
    expected = Stiefel().step(w.double(), average.double(), 0.1)
    atol = {torch.float16: 1e-3, torch.bfloat16: 1e-2, torch.float32: 1e-5, torch.float64: 1e-9}[dtype]
    torch.testing.assert_close(found.double(), expected, atol=atol, rtol=0)


@pytest.mark.parametrize("least", [0.9, 0.1])  # near the manifold, and far from it
@pytest.mark.parametrize("shape", [(30, 400), (400, 30)])
@pytest.mark.parametrize("gain", [1.0, 0.7])
def test_the_way_back_to_the_manifold_in_float32(shape, least, gain):
    u, _, v = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    matrix = (u * torch.linspace(least, 1.2, 30)) @ v
    found = Stiefel()._nearest_of(gain * matrix.float(), gain).double() / gain
    assert torch.linalg.matrix_norm(found - u @ v, 2) < 1e-6
    values = torch.linalg.svdvals(found)
    torch.testing.assert_close(values, torch.ones_like(values), rtol=5e-8, atol=0)


@pytest.mark.parametrize("size", [1e-6, 1e2, 1e5, 1e8, 1e12])
@pytest.mark.parametrize("shape", [(4, 32), (128, 300), (300, 128)])
def test_a_weight_of_any_size_is_brought_back(shape, size):
    found = Stiefel().step(size * torch.randn(shape), torch.randn(shape), 0.1)
    values = torch.linalg.svdvals(found.double())
    torch.testing.assert_close(values, torch.ones_like(values), rtol=1e-6, atol=0)


# --- under treat -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gain", [1.0, 0.3, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layer", LAYERS)
def test_every_layer_stays_orthogonal(layer, dtype, gain):
    make, shape = LAYERS[layer]
    module = make().to(dtype)
    groups = getattr(module, "groups", 1)
    before = matrix_view(module.weight.detach(), groups).double()
    g = gain or before.square().sum((-2, -1)).div(min(before.shape[-2:])).sqrt()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.05, weight_decay=0.1)
    handle = treat(module, optimizer, manifold=Stiefel(gain=gain))
    assert module.weight.stride() == make().weight.stride()
    for _ in range(15):
        values = torch.linalg.svdvals(matrix_view(module.weight.detach(), groups).double())
        expected = torch.as_tensor(g).double()[..., None].expand_as(values)
        torch.testing.assert_close(values, expected, rtol=2e-2 if dtype is torch.bfloat16 else 1e-6, atol=0)
        start = module.weight.detach().clone()
        optimizer.zero_grad()
        module(torch.randn(shape, dtype=dtype)).square().sum().backward()
        optimizer.step()
        assert not torch.equal(module.weight, start)
    assert handle.statistics[0].steps == 15


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n != "maximize"])
def test_the_update_of_the_optimizer_is_replaced(name):
    """Whatever the optimizer does to the weight, its momentum and weight decay too, has no effect."""
    make, settings = OPTIMIZERS[name]
    q, results = haar(3, 5), []
    for kind, options in ((torch.optim.SGD, {}), (make, settings)):
        torch.manual_seed(0)
        w, other = nn.Parameter(q.clone()), nn.Parameter(torch.ones(2, dtype=torch.float64))
        optimizer = kind([w, other], **{**options, "lr": 0.1})
        treat(w, optimizer, manifold=Stiefel())
        for _ in range(5):
            w.grad, other.grad = torch.randn(3, 5, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
            optimizer.step()
        results.append(w.detach())
        assert not torch.equal(other, torch.ones(2))
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_a_schedule_and_the_scale_set_the_angle():
    w = nn.Parameter(torch.tensor([[1.0, 0.0]], dtype=torch.float64))
    optimizer = torch.optim.Adam([w], lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    treat(w, optimizer, manifold=Stiefel(momentum=0.0, scale=20.0))
    angle = 0.0
    for step in range(4):
        w.grad = torch.tensor([[0.0, -1.0]], dtype=torch.float64)
        optimizer.step()
        schedule.step()
        angle += math.atan(0.2 * 0.5**step)
        assert math.atan2(*w.detach().flip(1)[0]) == pytest.approx(angle)


@pytest.mark.parametrize("shape", [(4, 32), (32, 4), (6, 6)])
def test_a_gradient_that_has_vanished_for_long_moves_nothing(shape):
    """Averages decay until they have no digits left, and end at the smallest number there is."""
    w = nn.Parameter(torch.randn(shape))
    optimizer = torch.optim.SGD([w], lr=0.01)
    treat(w, optimizer, manifold=Stiefel(momentum=0.5))
    for gradient in (torch.randn(shape), *[torch.zeros(shape)] * 200):
        before = w.detach().clone()
        w.grad = gradient
        optimizer.step()
    torch.testing.assert_close(w.detach(), before, atol=1e-7, rtol=0)
    values = torch.linalg.svdvals(w.detach().double())
    torch.testing.assert_close(values, torch.ones_like(values), rtol=1e-6, atol=0)


def test_it_stays_on_the_manifold_where_gradients_are_nearly_normal():
    """Near an optimum, with a gradient of rank one."""
    layer = nn.Linear(400, 40, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    treat(layer, optimizer, manifold=Stiefel(momentum=0.5))
    for _ in range(60):
        optimizer.zero_grad()
        layer(torch.randn(1, 400)).tanh().square().sum().backward()
        optimizer.step()
        values = torch.linalg.svdvals(layer.weight.detach().double())
        torch.testing.assert_close(values, torch.ones_like(values), rtol=1e-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [64, 512])
def test_square_weights_in_half_precision_have_a_nearest_one(size, dtype):
    layer = nn.Linear(size, size).to(dtype)
    treat(layer, torch.optim.SGD(layer.parameters(), lr=0.1), manifold=Stiefel())
    values = torch.linalg.svdvals(layer.weight.detach().double())
    torch.testing.assert_close(values, torch.ones_like(values), rtol=3e-2, atol=0)


def test_gradients_of_another_dtype_also_after_loading():
    results = []
    for load in (False, True):
        torch.manual_seed(0)
        w = nn.Parameter(torch.randn(4, 32))
        w.grad_dtype = torch.bfloat16
        optimizer = torch.optim.SGD([w], lr=0.1)
        treat(w, optimizer, manifold=Stiefel())
        for _ in range(3):
            w.grad = torch.randn(4, 32).bfloat16()
            optimizer.step()
            if load:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        results.append(w.detach())
    torch.testing.assert_close(*results)


def test_maximize_goes_up():
    for maximize in (False, True):
        w = nn.Parameter(torch.tensor([[1.0, 0.0]]))
        optimizer = torch.optim.SGD([w], lr=0.1, maximize=maximize)
        treat(w, optimizer, manifold=Stiefel())
        w.grad = torch.tensor([[0.0, 1.0]])
        optimizer.step()
        assert (w[0, 1] > 0) == maximize


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_scaler_changes_nothing(fused):
    model = network().float()
    twin = copy.deepcopy(model)
    optimizer, plain = (torch.optim.Adam(m.parameters(), lr=0.1, fused=fused) for m in (model, twin))
    treat(model[0], optimizer, manifold=Stiefel())
    treat(twin[0], plain, manifold=Stiefel())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    train_scaled(scaler, model, optimizer, twin, plain, steps=5)


def test_weights_of_one_shape_are_one_batch_and_each_has_its_own_rate():
    weights = [nn.Parameter(torch.tensor([[1.0, 0.0]])) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [w], "lr": lr} for w, lr in zip(weights, (0.1, 0.4), strict=True)])
    treat(weights, optimizer, manifold=Stiefel())
    for w in weights:
        w.grad = torch.tensor([[0.0, 1.0]])
    optimizer.step()
    for w, lr in zip(weights, (0.1, 0.4), strict=True):
        cosine, sine = w.detach()[0].tolist()
        assert math.atan2(-sine, cosine) == pytest.approx(math.atan(lr), rel=1e-6)


class Nested(torch.optim.Adam):
    """Its step calls that of the base class, so torch calls all hooks twice."""

    def step(self, closure=None):
        return super().step(closure)


def test_hooks_that_are_called_twice_average_once():
    data, results = [batch() for _ in range(3)], []
    model = network()
    for kind in (torch.optim.Adam, Nested):
        m = copy.deepcopy(model)
        optimizer = kind(m.parameters(), lr=0.1)
        treat(m[0], optimizer, manifold=Stiefel())
        train(m, optimizer, data)
        results.append(m[0].weight.detach())
    torch.testing.assert_close(*results, rtol=0, atol=0)
