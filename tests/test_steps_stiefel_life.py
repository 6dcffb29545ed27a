import copy
import math

import pytest
import torch
from torch import nn

import orthocond as oc
from orthocond.steps import NearestOrthogonal, OptimalLR, Stiefel, treat
from tests.steps_helpers import batch, goes_on, network, train

# --- life cycle ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
def test_the_state_of_the_optimizer_is_all_that_resuming_needs(kind):
    def fresh():
        model = network()
        optimizer = kind(model.parameters(), lr=0.05)
        return model, optimizer, treat(model[0], optimizer, manifold=Stiefel())

    goes_on(fresh)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop])
def test_after_remove_the_optimizer_goes_on(kind):
    model = network()
    optimizer = kind(model.parameters(), lr=0.05)
    plain_keys = None
    with treat(model[0], optimizer, manifold=Stiefel()):
        train(model, optimizer, [batch()])
        plain_keys = set(optimizer.state[model[3].weight])
    assert set(optimizer.state[model[0].weight]) == plain_keys
    train(model, optimizer, [batch()])
    assert torch.linalg.cond(model[0].weight.detach().flatten(1)) > 1 + 1e-6


def test_a_weight_is_orthogonal_from_the_start_and_an_orthogonal_one_is_not_changed():
    layer = nn.Linear(6, 4)
    start = layer.weight.detach().clone()
    treat(layer, torch.optim.SGD(layer.parameters(), lr=0.1), manifold=Stiefel(gain=2.0))
    torch.testing.assert_close(layer.weight.detach(), 2 * oc.polar(start))
    again = nn.Linear(6, 4)
    again.weight.data = layer.weight.detach().clone()
    treat(again, torch.optim.SGD(again.parameters(), lr=0.1), manifold=Stiefel(gain=None))
    torch.testing.assert_close(again.weight, layer.weight)


@pytest.mark.parametrize("size", [10, 0.01])
@pytest.mark.parametrize("columns", [6, 60])
def test_a_weight_loaded_later_is_orthogonal_after_one_step(columns, size):
    layer = nn.Linear(columns, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    treat(layer, optimizer, manifold=Stiefel())
    layer.load_state_dict({"weight": size * torch.randn(4, columns), "bias": torch.zeros(4)})
    layer(torch.randn(9, columns)).square().sum().backward()
    optimizer.step()
    torch.testing.assert_close(torch.linalg.svdvals(layer.weight.detach()), torch.ones(4))


def test_the_spectrum_of_the_tangent_is_recorded():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = treat(model[0], optimizer, manifold=Stiefel(momentum=0.0), spectrum_every=1)
    model(batch()[0]).square().mean().backward()
    tangent = Stiefel().tangent(model[0].weight.detach().flatten(1), model[0].weight.grad.flatten(1))
    optimizer.step()
    torch.testing.assert_close(handle.statistics[0].spectra[0][0], torch.linalg.svdvals(tangent))
    assert "manifold=Stiefel(momentum=0.0, scale=1.0, gain=1.0, method='gram')" in repr(handle)


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Stiefel(momentum=1.0), r"momentum=...\) needs a number in \[0, 1\); got 1.0"),
        (lambda: Stiefel(momentum=math.nan), r"momentum=...\) needs a number in \[0, 1\)"),
        (lambda: Stiefel(scale=0.0), r"scale=...\) needs a finite number above 0; got 0.0"),
        (lambda: Stiefel(gain=math.inf), r"gain=...\) needs a finite number above 0; got inf"),
        (lambda: Stiefel(method="qr"), "'gram', 'svd'"),
    ],
)
def test_settings_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("settings", [{"gradient": NearestOrthogonal()}, {"lr": OptimalLR()}])
def test_it_stands_alone(settings):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="replaces the whole step"):
        treat(model[0], optimizer, manifold=Stiefel(), **settings)
    first = treat(model[0], optimizer, **settings)
    with pytest.raises(RuntimeError, match="two treatments of its manifold"):
        treat(model[0], optimizer, manifold=Stiefel())
    first.remove()
    treat(model[0], optimizer, manifold=Stiefel())
    with pytest.raises(RuntimeError, match="two treatments"):
        treat(model[0], optimizer, **settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: nn.init.zeros_(m[0].weight), r"Stiefel needs a weight of full rank.*orthogonal_"),
        (lambda m: oc.orthogonal(m[0]), "needs a plain weight"),
        (lambda m: m[0].register_parameter("weight", nn.Parameter(torch.zeros(0, 3, 3, 3))), "weight with entries"),
    ],
)
def test_weights_that_cannot_be_on_the_manifold(change, message):
    model = network()
    change(model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        treat([model[3], model[0]], torch.optim.SGD(model.parameters(), lr=0.1), manifold=Stiefel())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_gradient_that_is_not_finite_is_an_error_and_nothing_moves():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    treat([model[3], model[0]], optimizer, manifold=Stiefel())
    train(model, optimizer, [batch()])
    model(batch()[0]).sum().backward()
    model[0].weight.grad[0, 0, 0, 0] = math.nan
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"Stiefel needs finite gradients.*Conv2d.weight \(6, 2, 3, 3\)"):
        optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    train(model, optimizer, [batch()])


def test_a_setting_of_the_wrong_kind():
    model = network()
    with pytest.raises(TypeError, match=r"Add parentheses: Stiefel\(...\)"):
        treat(model[0], torch.optim.SGD(model.parameters(), lr=0.1), manifold=Stiefel)


def test_a_child_that_is_called_original_is_no_parametrization():
    model = nn.ModuleDict({"original": nn.Linear(8, 4)})
    treat(model, torch.optim.SGD(model.parameters(), lr=0.1), manifold=Stiefel())
    values = torch.linalg.svdvals(model["original"].weight.detach())
    torch.testing.assert_close(values, torch.ones(4))


@pytest.mark.parametrize("shape", [(4, 6), (4, 60), (128, 300)])
def test_a_weight_that_is_not_finite_is_told(shape):
    layer = nn.Linear(*shape[::-1])
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    treat(layer, optimizer, manifold=Stiefel())
    layer.weight.detach()[0, 0] = math.nan
    layer.weight.grad = torch.randn(shape)
    with pytest.raises(ValueError, match=r"finite"):
        optimizer.step()


@pytest.mark.parametrize("value", [0.0, math.nan])
def test_a_weight_that_cannot_be_put_on_the_manifold_is_named_and_none_moves(value):
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    nn.init.constant_(model[1].weight, value)
    before = model[0].weight.detach().clone()
    with pytest.raises(ValueError, match=r"1.weight \(3, 4\) cannot be put on the manifold"):
        treat(model, torch.optim.SGD(model.parameters(), lr=0.1), manifold=Stiefel())
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_is_on_the_manifold_is_not_moved_by_treating_it_again(dtype):
    layer = nn.Linear(60, 20, dtype=dtype)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    handle = treat(layer, optimizer, manifold=Stiefel())
    for _ in range(3):
        layer(torch.randn(9, 60, dtype=dtype)).square().sum().backward()
        optimizer.step()
    before = layer.weight.detach().clone()
    handle.remove()
    treat(layer, optimizer, manifold=Stiefel())
    assert torch.equal(layer.weight, before)
