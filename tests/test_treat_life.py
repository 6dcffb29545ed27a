import copy
import gc
import math
import pickle
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from orthocond.matrix import polar
from orthocond.steps import NearestOrthogonal, OptimalLR, Stiefel, treat
from tests.steps_helpers import batch, goes_on, network, train

NOG = NearestOrthogonal()
UPDATE = NearestOrthogonal(of="update")
EXACT = OptimalLR()
PAPER = OptimalLR("paper")


# --- errors ----------------------------------------------------------------------------------------------------------


def treated(**settings):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, treat(model[0], optimizer, **(settings or {"gradient": NOG}))


def test_lbfgs_is_refused():
    model = network()
    with pytest.raises(TypeError, match=r"LBFGS computes many gradients in a step.*such as SGD or Adam"):
        treat(model[0], torch.optim.LBFGS(model.parameters()), gradient=NOG)


def test_a_closure_that_is_called_twice_is_refused():
    class Twice(torch.optim.SGD):
        def step(self, closure=None):
            with torch.enable_grad():
                closure()
            return super().step(closure)

    model = network()
    optimizer = Twice(model.parameters(), lr=0.1)
    treat(model[0], optimizer, gradient=NOG)
    with pytest.raises(RuntimeError, match=r"one gradient a step; Twice has called its closure again"):
        optimizer.step(lambda: model(batch()[0]).sum().backward())


@pytest.mark.parametrize(
    ("target", "kind", "message"),
    [
        (lambda m: [], ValueError, "at least one weight"),
        (lambda m: nn.ReLU(), ValueError, "found no matrix in ReLU"),
        (lambda m: nn.Sequential(nn.Linear(3, 3)), ValueError, "belongs to the optimizer"),
        (lambda m: nn.Sequential(nn.LazyLinear(3)), RuntimeError, "run one batch through the 0.weight first"),
        (lambda m: m[0].requires_grad_(False) and m[:1], ValueError, "can be trained"),
        (lambda m: m[0].bias, ValueError, "at least two dimensions"),
        (lambda m: nn.BatchNorm2d(3), ValueError, "at least two dimensions"),
        (lambda m: m.parameters(), ValueError, "at least two dimensions"),
        (lambda m: nn.LazyLinear(3), RuntimeError, "run one batch through the LazyLinear.weight first"),
        (lambda m: nn.Linear(3, 3), ValueError, "does not belong to the optimizer"),
        (lambda m: m[0].weight.flatten(1), ValueError, "computed tensor"),
        (lambda m: ["0.weight"], TypeError, "modules or parameters; got str"),
        (lambda m: 0, TypeError, "modules or parameters; got int"),
        (lambda m: [m[0], m[0].weight], RuntimeError, "two treatments of its gradient"),
        (lambda m: m[0].requires_grad_(False), ValueError, "frozen"),
        (lambda m: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), ValueError, "several parameters"),
    ],
)
def test_targets_that_cannot_be_treated(target, kind, message):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(kind, match=message):
        treat(target(model), optimizer, gradient=NOG)
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({}, ValueError, "something to do"),
        ({"gradient": NearestOrthogonal}, TypeError, r"Add parentheses: NearestOrthogonal\(...\)"),
        ({"gradient": EXACT}, TypeError, r"treat\(gradient=...\) needs a setting such as NearestOrthogonal"),
        ({"lr": 0.1}, TypeError, r"OptimalLR\(\); got 0.1"),
        ({"gradient": UPDATE, "lr": PAPER}, ValueError, "along the gradient"),
        ({"lr": EXACT, "history": 0}, ValueError, "at least 1"),
        ({"lr": EXACT, "spectrum_every": -1}, ValueError, "at least 0"),
    ],
)
def test_settings_that_make_no_sense(settings, kind, message):
    model = network()
    with pytest.raises(kind, match=message):
        treat(model[0], torch.optim.SGD(model.parameters(), lr=0.1), **settings)


def test_not_an_optimizer():
    model = network()
    with pytest.raises(TypeError, match=r"torch.optim.Optimizer, or what holds one; got Sequential"):
        treat(model[0], model, gradient=NOG)


def test_two_treatments_of_one_kind_are_refused_and_two_kinds_are_not():
    model, optimizer, handle = treated()
    with pytest.raises(RuntimeError, match=r"two treatments of its gradient; remove\(\)"):
        treat(model[0].weight, optimizer, gradient=NOG)
    treat(model[0], optimizer, lr=EXACT)
    treat(model[3], optimizer, gradient=NOG)
    handle.remove()
    treat(model[0], optimizer, gradient=NOG)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_an_error_and_nothing_moves(bad):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    treat([model[3], model[0]], optimizer, gradient=NOG, lr=EXACT)
    model(batch()[0]).sum().backward()
    model[0].weight.grad[0, 0, 0, 0] = bad
    before = copy.deepcopy(model.state_dict())
    gradient = model[3].weight.grad.clone()
    with pytest.raises(ValueError, match=r"Conv2d.weight \(6, 2, 3, 3\) holds NaN or infinity"):
        optimizer.step()
    assert torch.equal(model[3].weight.grad, gradient)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    train(model, optimizer, [batch()])


def test_a_sparse_gradient_is_an_error():
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    treat(embedding, optimizer, gradient=NOG)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(TypeError, match=r"dense gradients.*sparse=False"):
        optimizer.step()


def test_a_weight_that_never_gets_a_gradient_is_said_once():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = treat([model[0], model[3]], optimizer, gradient=NOG, lr=EXACT)
    model[3](torch.randn(2, 54, dtype=torch.float64)).sum().backward()
    with pytest.warns(RuntimeWarning, match=r"Conv2d.weight \(6, 2, 3, 3\) has no gradient"):
        optimizer.step()
    optimizer.step()
    unused, used = handle.statistics
    assert (unused.steps, unused.without_gradient) == (0, 2)
    assert (used.steps, used.without_gradient) == (2, 0)
    assert math.isnan(unused.occurrence)


# --- life cycle ------------------------------------------------------------------------------------------------------


def test_remove_takes_everything_back():
    model, data = network(), [batch() for _ in range(4)]
    twin = copy.deepcopy(model)
    optimizer, plain = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, twin))
    with treat(model[0], optimizer, gradient=NOG, lr=EXACT) as handle:
        pass
    assert train(model, optimizer, data) == train(twin, plain, data)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert repr(handle).startswith("Treatment of Conv2d.weight (6, 2, 3, 3) under SGD, 0 steps, removed:")
    handle.remove()


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_spectra_of_huge_and_tiny_gradients(size):
    weight = torch.nn.Parameter(torch.eye(3, 5, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    handle = treat(weight, optimizer, gradient=NOG, spectrum_every=1)
    weight.grad = size * torch.diag(torch.tensor([3.0, 2.0, 1.0, 0, 0]).double())[:3]
    optimizer.step()
    expected = size * torch.tensor([[3.0, 2.0, 1.0]]).double()
    torch.testing.assert_close(handle.statistics[0].spectra[0] / size, expected / size)


def test_statistics():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    handle = treat([model[0], model[3].weight], optimizer, gradient=NOG, lr=EXACT, history=3, spectrum_every=2)
    spectra = []
    for _ in range(7):
        optimizer.zero_grad()
        model(batch()[0]).square().mean().backward()
        spectra.append(torch.linalg.svdvals(model[0].weight.grad.flatten(1)))
        optimizer.step()
    first, second = handle.statistics
    assert (first.name, second.name) == ("Conv2d.weight (6, 2, 3, 3)", "Parameter (3, 54)")
    assert first.parameter is model[0].weight
    assert (first.steps, first.skipped, len(first.rates)) == (7, 0, 3)
    assert first.occurrence == first.shortened / 7 > 0
    assert list(first.spectra) == [2, 4, 6]
    for step, values in first.spectra.items():
        torch.testing.assert_close(values.squeeze(0), spectra[step])
    assert "2 weights under SGD, 7 steps" in repr(handle)


def test_the_raw_parameter_of_a_parametrized_weight_is_treated():
    layer = parametrizations.spectral_norm(nn.Linear(6, 4))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    handle = treat(layer, optimizer, gradient=NOG)
    layer(torch.randn(9, 6)).square().sum().backward()
    raw = layer.parametrizations.weight.original
    expected = raw.detach() - 0.1 * polar(raw.grad)
    optimizer.step()
    torch.testing.assert_close(raw.detach(), expected)
    assert handle.statistics[0].name == "Linear.parametrizations.weight.original (4, 6)"


def test_training_continues_from_a_checkpoint():
    def fresh():
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        return model, optimizer, treat(model[0], optimizer, gradient=NOG, lr=EXACT)

    assert goes_on(fresh).statistics[0].steps == 3


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["deepcopy", "pickle"]
)
def test_a_copy_of_the_optimizer_is_not_treated_and_can_be(clone):
    data = [batch() for _ in range(4)]
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    treat(model[0], optimizer, gradient=NOG, lr=EXACT)
    train(model, optimizer, data[:2])
    twin, twin_optimizer = clone((model, optimizer))
    treat(twin[0], twin_optimizer, gradient=NOG, lr=EXACT)
    assert train(model, optimizer, data[2:]) == train(twin, twin_optimizer, data[2:])


def test_nothing_is_kept_alive():
    model, optimizer, handle = treated(gradient=NOG, lr=EXACT)
    train(model, optimizer, [batch()])
    alive = weakref.ref(optimizer), weakref.ref(model)
    del model, optimizer, handle
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


def test_no_copy_of_the_weight_is_kept_between_steps():
    model, optimizer, handle = treated(gradient=NOG, lr=EXACT)
    train(model, optimizer, [batch()])
    assert all(w.before.numel() == 0 for w in handle.weights)


def test_a_group_replaced_by_load_state_dict_is_followed():
    model, optimizer, handle = treated(lr=OptimalLR(floor=1.0))
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["lr"] = 0.025
    optimizer.load_state_dict(state)
    train(model, optimizer, [batch()])
    assert handle.statistics[0].rates == [0.025]


# --- compile ---------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor imports torch.jit
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_model_has_the_same_losses(backend):
    model, data = network(), [batch() for _ in range(4)]
    twin = copy.deepcopy(model)
    losses = []
    for m, call in ((model, model), (twin, torch.compile(twin, backend=backend))):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)
        treat(m[0], optimizer, gradient=NOG, lr=EXACT)
        losses.append(train(call, optimizer, data))
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


# --- closures --------------------------------------------------------------------------------------------------------


class Nested(torch.optim.SGD):
    """Its step calls that of the base class, so torch calls all hooks twice."""

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("call", [lambda o, c: o.step(c), lambda o, c: o.step(closure=c)], ids=["position", "name"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, Nested])
@pytest.mark.parametrize(
    "settings",
    [{"gradient": NOG, "lr": EXACT}, {"lr": PAPER}, {"gradient": UPDATE}, {"manifold": Stiefel(momentum=0.9)}],
    ids=["nog+olr", "olr-paper", "update", "stiefel"],
)
def test_a_step_with_a_closure_is_that_after_backward(call, kind, settings):
    data, model = [batch() for _ in range(3)], network()
    twin = copy.deepcopy(model)
    optimizers = [kind(m.parameters(), lr=0.1) for m in (model, twin)]
    handles = [treat(m[0], o, **settings) for m, o in zip((model, twin), optimizers, strict=True)]
    train(model, optimizers[0], data)
    losses = []

    def closure(x, y):
        optimizers[1].zero_grad()
        loss = nn.functional.mse_loss(twin(x), y)
        loss.backward()
        losses.append(loss)
        return loss

    for pair in data:
        assert call(optimizers[1], partial(closure, *pair)) is losses[-1]
    assert len(losses) == 3  # called exactly once a step
    assert torch.equal(twin[0].weight, model[0].weight)
    found, expected = (h.statistics[0] for h in reversed(handles))
    assert (found.steps, found.rates, found.shortened) == (3, expected.rates, expected.shortened)
    for step, spectrum in expected.spectra.items():
        assert torch.equal(found.spectra[step], spectrum)


def test_two_treatments_act_after_one_closure_in_the_order_of_their_calls():
    data, model = [batch() for _ in range(2)], network()
    twin = copy.deepcopy(model)
    plain, closing = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    treat(model[0], plain, gradient=NOG, lr=PAPER)
    treat(twin[0], closing, gradient=NOG)
    treat(twin[0], closing, lr=PAPER)
    train(model, plain, data)
    for x, y in data:
        closing.zero_grad()
        closing.step(lambda x=x, y=y: nn.functional.mse_loss(twin(x), y).backward())
    assert torch.equal(twin[0].weight, model[0].weight)


def test_a_closure_that_fails_leaves_the_treatment_in_place():
    model, optimizer, handle = treated()

    def fails():
        raise KeyError("no data")

    with pytest.raises(KeyError, match="no data"):
        optimizer.step(fails)
    train(model, optimizer, [batch()])
    assert handle.statistics[0].steps == 1


def test_an_update_is_checked_before_the_weight_moves():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    treat([model[3], model[0]], optimizer, gradient=NearestOrthogonal(of="update"))
    train(model, optimizer, [batch()])
    model(batch()[0]).sum().backward()
    model[0].weight.grad[0, 0, 0, 0] = math.nan
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    with pytest.raises(ValueError, match=r"Conv2d.weight \(6, 2, 3, 3\) holds NaN or infinity"):
        optimizer.step()
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), before, rtol=0, atol=0)
