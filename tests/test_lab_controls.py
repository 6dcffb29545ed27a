"""Methods beyond the paper and controls in real trainings of a second: each does what its name says, and resumes."""

from dataclasses import replace

import pytest
import torch
from lab_helpers import tiny
from torch import nn

from orthocond import SVD, matrix_view
from orthocond.lab.classification.config import Method, Model, Schedule
from orthocond.lab.classification.networks.build import solver
from orthocond.lab.experiments import train
from orthocond.lab.generation.config import GanMethod
from orthocond.lab.methods import scoped_layers, treat_steps
from orthocond.lab.runs import Run
from orthocond.steps import RandomLR

SMALL = Model("convnet", depths=(1, 1), width=4, momentum=0.3)


def trained(tmp_path, method, name="run"):
    schedule = Schedule(epochs=1, batch_size=32, milestones=(), steps=3, momentum=0.9, nesterov=True)
    config = replace(tiny("svd", model=SMALL, schedule=schedule, log_every=1), method=method)
    run = Run.create(tmp_path, name, config)
    assert train(config, run) == 0
    return run.resume().state["model"], run


def network():
    return nn.ModuleDict({"stem": nn.Conv2d(3, 4, 3), "inner": nn.Conv2d(4, 5, 3), "head": nn.Linear(5, 2)})


# Values


def test_stiefel_keeps_the_stem_orthogonal(tmp_path):
    state, _ = trained(tmp_path, Method("stiefel", stiefel_scale=0.1))
    weight = matrix_view(state["conv1.weight"]).double()
    torch.testing.assert_close(weight.mT @ weight, torch.eye(27, dtype=torch.float64), rtol=0, atol=1e-5)


def test_scopes_name_their_layers():
    net = network()
    stem = [net["stem"]]
    names = {id(m): n for n, m in net.items()}
    for name, expected in (("nog", ["stem"]), ("nog@inner", ["inner"]), ("nog@all", ["stem", "inner", "head"])):
        assert [names[id(m)] for m in scoped_layers(Method(name), stem, net)] == expected


def test_a_scope_has_a_rate_of_its_own(tmp_path):
    start, _ = trained(tmp_path, Method("nog@inner", scope_lr=0.0, nog_of="update"), "still")
    other, _ = trained(tmp_path, Method("nog@inner", scope_lr=0.1, nog_of="update"), "moves")
    inner = [n for n in start if n.startswith("stages") and start[n].ndim == 4]
    assert inner
    assert all(not torch.equal(start[n], other[n]) for n in inner)


def test_fixed_length_reaches_the_step():
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    treat_steps(Method("nog", nog_of="update", nog_scale="spectral"), [net["stem"]], optimizer, model=net)
    before = net["stem"].weight.detach().clone()
    net["stem"].weight.grad = 1000 * torch.randn_like(before)
    optimizer.step()
    moved = torch.linalg.svdvals(matrix_view(net["stem"].weight.detach() - before))
    torch.testing.assert_close(moved, torch.full_like(moved, 0.1), rtol=1e-4, atol=0)


def test_short_shortens_as_often_as_said():
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    handle = treat_steps(Method("short", short=(0.7, 0.25)), [net["stem"]], optimizer, model=net, seed=5)
    lengths = []
    for _ in range(200):
        before = net["stem"].weight.detach().clone()
        net["stem"].weight.grad = torch.ones_like(before)
        optimizer.step()
        lengths.append(float((before - net["stem"].weight.detach()).mean()))
    assert {round(length, 3) for length in lengths} == {0.25, 1.0}
    assert sum(length < 0.5 for length in lengths) / 200 == pytest.approx(0.7, abs=0.1)
    assert handle is not None
    assert [length < 0.5 for length in lengths] == [
        RandomLR(0.7, seed=5).fraction(0, step) < 0.5 for step in range(200)
    ]


@pytest.mark.parametrize("gradient", ["plain", "truncated", "top", "taylor", "pade"])
def test_released_solvers_are_those_of_the_releases(gradient):
    assert solver(Method(solver=f"released-{gradient}")) == SVD(gradient=gradient, ties="released")
    assert solver(Method(solver=f"svd-{gradient}")) == SVD(gradient=gradient)


# Errors


@pytest.mark.parametrize(
    ("method", "name", "error"),
    [
        (Method, "stiefel+nog", "stiefel takes no treatment but"),
        (Method, "stiefel+ow", "stiefel takes no treatment but"),
        (Method, "short+olr", "One treatment of the step length at a time"),
        (Method, "ow@inner", "has no such layers; there are: nog@all, nog@inner, olr@all, olr@inner"),
        (Method, "nog@outer", "has no such layers"),
        (Method, "nogg", "no method 'nogg'. Did you mean 'nog'?"),
        (Method, "nog+nog", "counts once"),
        (Method, "sn+ow", r"One treatment of the weight at a time; 'sn\+ow' has sn and ow"),
        (Method, "bn+nog", "bn takes no treatment but wi"),
        (GanMethod, "none+nog", "none stands alone"),
        (GanMethod, "nog+nog", "counts once"),
        (GanMethod, "ol+ow", r"One treatment of the weight at a time; 'ol\+ow' has ol and ow"),
        (GanMethod, "hp+lvp", r"One rival at a time; 'hp\+lvp' has hp and lvp"),
    ],
)
def test_what_does_not_go_together(method, name, error):
    with pytest.raises(ValueError, match=error):
        method(name)
