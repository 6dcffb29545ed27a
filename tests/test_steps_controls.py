import copy
import math
import pickle

import pytest
import torch
from torch import nn

from orthocond.steps import FixedLR, NearestOrthogonal, OptimalLR, RandomLR, Stiefel, treat
from tests.steps_helpers import batch, network, train


@pytest.mark.parametrize("factor", [0.1, 0.5])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_fixed_factor_is_a_smaller_rate(factor, momentum):
    model, data = network(), [batch() for _ in range(4)]
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=momentum, weight_decay=0.01)
    handle = treat(model[0], optimizer, lr=FixedLR(factor))
    weight = twin[0].weight
    others = [p for p in twin.parameters() if p is not weight]
    groups = [{"params": others}, {"params": [weight], "lr": 0.2 * factor}]
    train(model, optimizer, data)
    train(twin, torch.optim.SGD(groups, lr=0.2, momentum=momentum, weight_decay=0.01), data)
    torch.testing.assert_close(model[0].weight, weight)
    found = handle.statistics[0]
    assert found.rates == pytest.approx([0.2 * factor] * 4)
    assert (found.shortened, found.at_floor) == (4, 0)


def test_printed_statistics_are_the_counts_and_no_matrices():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    handle = treat(model[0], optimizer, gradient=NearestOrthogonal(), lr=FixedLR(0.5))
    train(model, optimizer, [batch() for _ in range(4)])
    text = repr(handle.statistics[0])
    assert "steps=4" in text
    assert "shortened=4" in text
    assert "tensor" not in text
    assert len(text) < 200


def test_a_factor_of_one_changes_no_bit():
    model, data = network(), [batch() for _ in range(3)]
    twin = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters())
    handle = treat(model[0], optimizer, lr=FixedLR(1.0))
    assert train(model, optimizer, data) == train(twin, torch.optim.Adam(twin.parameters()), data)
    assert handle.statistics[0].occurrence == 0


def test_random_shortening_has_its_occurrence_and_is_independent():
    setting = RandomLR(0.3, factor=0.2)
    draws = torch.tensor([[setting.fraction(index, step) for step in range(4000)] for index in range(4)])
    assert draws.unique().tolist() == pytest.approx([0.2, 1.0])
    short = (draws < 1).double()
    deviation = math.sqrt(0.3 * 0.7 / 4000)
    assert ((short.mean(1) - 0.3).abs() < 4 * deviation).all()
    assert (torch.corrcoef(short) - torch.eye(4)).abs().max() < 4 / math.sqrt(4000)
    lagged = torch.corrcoef(torch.stack((short[0, 1:], short[0, :-1])))[0, 1]
    assert lagged.abs() < 4 / math.sqrt(4000)
    other = RandomLR(0.3, factor=0.2, seed=1)
    assert [other.fraction(0, step) for step in range(50)] != draws[0, :50].tolist()


def test_random_shortening_under_treat_and_after_resuming():
    data = [batch() for _ in range(8)]

    def fresh():
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        lr = RandomLR(0.5, factor=0.25)
        return model, optimizer, treat([model[0], model[3]], optimizer, gradient=NearestOrthogonal(), lr=lr)

    model, optimizer, handle = fresh()
    train(model, optimizer, data[:5])
    saved = pickle.dumps((model.state_dict(), optimizer.state_dict(), handle.state_dict()))
    losses = train(model, optimizer, data[5:])
    for index, found in enumerate(handle.statistics):
        expected = [0.1 * RandomLR(0.5, factor=0.25).fraction(index, step) for step in range(8)]
        assert found.rates == pytest.approx(expected)
        assert found.shortened == sum(rate < 0.1 for rate in expected)
    again, again_optimizer, again_handle = fresh()
    states = pickle.loads(saved)
    for part, state in zip((again, again_optimizer, again_handle), states, strict=True):
        part.load_state_dict(state)
    assert train(again, again_optimizer, data[5:]) == losses
    assert again_handle.statistics[0].rates == handle.statistics[0].rates


@pytest.mark.parametrize("form", ["exact", "newton"])
@pytest.mark.parametrize("floor", [0.0, 0.1, 0.3])
def test_steps_at_the_floor_are_counted(form, floor):
    """At an orthogonal weight the best step is none, so OLR takes the floor; a weight too long by far it does not."""
    orthogonal = torch.eye(4, 6)  # without rounding, which would put the best step on either side of 0
    for start, expected in ((orthogonal, 1), (10 * orthogonal, 0)):
        weight = nn.Parameter(start)
        optimizer = torch.optim.SGD([weight], lr=0.2)
        handle = treat(weight, optimizer, lr=OptimalLR(form, floor=floor))
        weight.grad = start.clone() / torch.linalg.matrix_norm(start, 2)
        optimizer.step()
        found = handle.statistics[0]
        assert (found.steps, found.at_floor) == (1, expected)
        assert found.rates[0] == pytest.approx(floor * 0.2 if expected else 0.2)


def test_a_floor_of_the_whole_rate_is_none():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = treat(model[0], optimizer, lr=OptimalLR(floor=1.0))
    train(model, optimizer, [batch()])
    assert handle.statistics[0].at_floor == 0


def test_the_state_of_a_treatment():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = treat([model[0], model[3]], optimizer, gradient=NearestOrthogonal(), lr=OptimalLR())
    train(model, optimizer, [batch() for _ in range(3)])
    state = pickle.loads(pickle.dumps(handle.state_dict()))
    handle.remove()
    again = treat([model[0], model[3]], optimizer, gradient=NearestOrthogonal(), lr=OptimalLR())
    again.load_state_dict(state)
    for found, expected in zip(again.statistics, handle.statistics, strict=True):
        assert (found.steps, found.at_floor, found.rates) == (3, expected.at_floor, expected.rates)
        torch.testing.assert_close(found.spectra, expected.spectra)
    assert handle.statistics[0].at_floor > 0
    with pytest.raises(ValueError, match="has 2 weights, the state 1; treat the same weights again"):
        again.load_state_dict({"weights": state["weights"][:1]})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedLR(1.5), r"FixedLR\(factor=...\) needs a number in \[0, 1\]; got 1.5"),
        (lambda: RandomLR(math.nan), r"RandomLR\(occurrence=...\) needs a number in \[0, 1\]"),
        (lambda: RandomLR(0.5, factor=-1), r"RandomLR\(factor=...\) needs a number in \[0, 1\]; got -1"),
    ],
)
def test_settings_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_control_is_a_treatment_of_the_rate():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    treat(model[0], optimizer, lr=FixedLR())
    with pytest.raises(RuntimeError, match="two treatments of its lr"):
        treat(model[0], optimizer, lr=OptimalLR())
    with pytest.raises(TypeError, match=r"needs a setting such as OptimalLR\(\); got Stiefel"):
        treat(model[0], optimizer, lr=Stiefel())
    with pytest.raises(TypeError, match=r"Add parentheses: RandomLR\(...\)"):
        treat(model[0], optimizer, lr=RandomLR)
