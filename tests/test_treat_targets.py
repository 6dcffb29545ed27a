"""What treat acts on: the weights of a target, and the optimizer that really moves them."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn

from orthocond import orthogonal, orthogonality_loss
from orthocond.matrix import matrix_view, polar
from orthocond.steps import FixedLR, NearestOrthogonal, OptimalLR, Stiefel, treat
from tests.steps_helpers import batch, network, train

NOG = NearestOrthogonal()
EXACT = OptimalLR()


# --- optimizers that hold others -------------------------------------------------------------------------------------


class Accelerated(torch.optim.Optimizer):
    """As training frameworks wrap optimizers: an Optimizer without state of its own."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def step(self, closure=None):
        self.optimizer.step(closure)


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization as it is usually written: steps by two methods of its own."""

    def __init__(self, params, base, rho=0.05, **kwargs):
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        for p in self.param_groups[0]["params"]:
            self.state[p]["perturbation"] = self.param_groups[0]["rho"] * p.grad / p.grad.norm()
            p.add_(self.state[p]["perturbation"])

    @torch.no_grad()
    def second_step(self):
        for p in self.param_groups[0]["params"]:
            p.sub_(self.state[p]["perturbation"])
        self.base_optimizer.step()

    def step(self, closure):
        with torch.enable_grad():
            closure()
        self.first_step()
        self.zero_grad()
        with torch.enable_grad():
            closure()
        self.second_step()


class Lookahead:
    """Not even an Optimizer, and its inner one has another name."""

    def __init__(self, optimizer):
        self._base_optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def step(self):
        self._base_optimizer.step()


class Nested(torch.optim.SGD):
    """Its step calls that of the base class, so torch calls all hooks twice."""

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize(
    ("wrap", "user_calls_wrapper"),
    [
        (lambda o: o, True),
        (Accelerated, True),
        (Accelerated, False),
        (Lookahead, True),
        (lambda o: Lookahead(Accelerated(o)), True),
    ],
)
@pytest.mark.parametrize("kind", [torch.optim.SGD, Nested])
def test_the_optimizer_within_a_wrapper_is_treated(wrap, user_calls_wrapper, kind):
    data, model = [batch() for _ in range(3)], network()
    twin = copy.deepcopy(model)
    plain, inner = torch.optim.SGD(model.parameters(), lr=0.1), kind(twin.parameters(), lr=0.1)
    wrapper = wrap(inner)
    expected = treat(model[0], plain, gradient=NOG, lr=EXACT)
    handle = treat(twin[0], wrapper, gradient=NOG, lr=EXACT)
    train(model, plain, data)
    for step in data:
        twin.zero_grad()
        nn.functional.mse_loss(twin(step[0]), step[1]).backward()
        (wrapper if user_calls_wrapper else inner).step()
    torch.testing.assert_close(twin[0].weight, model[0].weight)
    assert handle.statistics[0].steps == 3
    torch.testing.assert_close(handle.statistics[0].spectra, expected.statistics[0].spectra)


@pytest.mark.parametrize("by_closure", [False, True])
def test_the_step_of_sam_is_treated(by_closure):
    model = network()
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1)
    handle = treat(model[0], optimizer, gradient=NOG)
    for _ in range(8):  # enough for a warning, if SAM's own moves were taken for untreated steps
        x, y = batch()
        before = model[0].weight.detach().clone()

        def closure(x=x, y=y):
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            return loss

        optimizer.zero_grad()
        if by_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.first_step()
            optimizer.zero_grad()
            closure()
            optimizer.second_step()
        step = (model[0].weight.detach() - before).flatten(1) / 0.1
        torch.testing.assert_close(torch.linalg.svdvals(step), torch.ones(6, dtype=torch.float64))
    assert handle.statistics[0].steps == 8


def test_a_sam_that_holds_no_optimizer_is_refused():
    class Alone(torch.optim.SGD):
        def first_step(self): ...

        def second_step(self): ...

    model = network()
    with pytest.raises(TypeError, match=r"Alone makes its steps in first_step and second_step.*base_optimizer"):
        treat(model[0], Alone(model.parameters(), lr=0.1), gradient=NOG)


def test_a_wrapper_of_a_part_of_the_parameters_makes_the_step_itself():
    """As ZeroRedundancyOptimizer does, whose inner optimizer owns the parameters of one process only."""

    class Sharded(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})
            self.optim = torch.optim.SGD(self.param_groups[0]["params"][2:], lr=0.1)

        def step(self, closure=None):
            self.optim.step()

    model = network()
    optimizer = Sharded(model.parameters())
    handle = treat([model[0], model[3]], optimizer, gradient=NOG)
    train(model, optimizer, [batch()])
    assert [s.steps for s in handle.statistics] == [1, 1]


# --- a treatment that never runs -------------------------------------------------------------------------------------


def test_an_optimizer_made_anew_is_noticed_and_said_once():
    model = network()
    old = torch.optim.SGD(model.parameters(), lr=0.1)
    treat(model[0], old, gradient=NOG)
    train(model, old, [batch() for _ in range(5)])
    new = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, new, [batch() for _ in range(3)])
    with pytest.warns(RuntimeWarning, match=r"Conv2d.weight \(6, 2, 3, 3\) has moved.*treated SGD.*Call treat"):
        train(model, new, [batch()])
    train(model, new, [batch() for _ in range(5)])


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_every_kind_of_step_is_noticed(kind, options):
    model = network()
    treat(model[0], kind(model.parameters(), lr=0.1), gradient=NOG)
    with pytest.warns(RuntimeWarning, match="its treatment does nothing"):
        train(model, kind(model.parameters(), lr=0.1, **options), [batch() for _ in range(4)])


@pytest.mark.parametrize(
    "settings", [{"gradient": NOG}, {"lr": EXACT}, {"lr": FixedLR()}, {"manifold": Stiefel()}], ids=str
)
@pytest.mark.parametrize("fused", [False, True])
def test_nothing_is_said_of_a_treatment_that_runs(settings, fused):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    with warnings.catch_warnings(), treat(model[0], optimizer, **settings):
        warnings.simplefilter("error")
        for _ in range(6):
            for _ in range(10):  # accumulation
                model(batch()[0]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        model.load_state_dict(model.state_dict())
        train(model, optimizer, [batch() for _ in range(6)])
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), [batch() for _ in range(6)])  # it is removed


def test_a_treated_model_can_be_copied_and_saved():
    model = network()
    treat(model, torch.optim.SGD(model.parameters(), lr=0.1), gradient=NOG)
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        train(twin, torch.optim.SGD(twin.parameters(), lr=0.1), [batch() for _ in range(6)])


# --- all matrices of a model -----------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.position = nn.Parameter(torch.randn(1, 5, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.cross = nn.MultiheadAttention(8, 2, kdim=6, vdim=4)
        self.norm = nn.LayerNorm(8)
        self.conv = nn.Conv1d(8, 6, 3, groups=2)
        self.up = nn.ConvTranspose1d(6, 4, 3)
        self.recurrent = nn.GRU(4, 4)
        self.wide = orthogonal(nn.Linear(8, 4))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.shared = nn.Linear(8, 11, bias=False)
        self.shared.weight = self.embedding.weight
        self.again = nn.Sequential(self.conv)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position
        x = self.norm(x + self.attention(x, x, x)[0])
        return self.shared(x).sum() + self.wide(x).sum() + self.up(self.again(x.mT)).square().sum()


EXPECTED = {
    "attention.in_proj_weight (24, 8)": (3, 8, 8),
    "attention.out_proj.weight (8, 8)": (1, 8, 8),
    "cross.q_proj_weight (8, 8)": (1, 8, 8),
    "cross.k_proj_weight (8, 6)": (1, 8, 6),
    "cross.v_proj_weight (8, 4)": (1, 8, 4),
    "cross.out_proj.weight (8, 8)": (1, 8, 8),
    "conv.weight (6, 4, 3)": (2, 3, 12),
    "up.weight (6, 4, 3)": (1, 6, 12),
    "wide.parametrizations.weight.original (4, 8)": (1, 4, 8),
}


def test_a_model_stands_for_all_its_matrices():
    model = Model()
    handle = treat(model, torch.optim.SGD(model.parameters(), lr=0.1), gradient=NOG)
    assert {w.name: tuple(w.shape) for w in handle.weights} == EXPECTED
    assert [s.name for s in handle.statistics] == list(EXPECTED)
    assert f"Treatment of {len(EXPECTED)} weights under SGD" in repr(handle)


@pytest.mark.filterwarnings("ignore:cross:RuntimeWarning")  # this part is not used
def test_each_of_query_key_and_value_is_made_orthogonal():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = treat(model, optimizer, gradient=NOG)
    model(torch.randint(11, (3, 5))).backward()
    expected = [polar(block) for block in model.attention.in_proj_weight.grad.chunk(3)]
    plain = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    torch.testing.assert_close(model.attention.in_proj_weight.grad, torch.cat(expected))
    treated = {s.name.split()[0] for s in handle.statistics if s.steps}
    assert "conv.weight" in treated
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert torch.equal(parameter.grad, plain[name]) == (name not in treated)


def test_a_model_stands_for_the_matrices_of_its_optimizer():
    model = Model()
    groups = [model.conv.weight, model.conv.bias, model.norm.weight]
    assert [w.name for w in treat(model, torch.optim.SGD(groups, lr=0.1), gradient=NOG).weights] == [
        "conv.weight (6, 4, 3)"
    ]


def test_models_and_layers_together():
    model = nn.ModuleList([network(), nn.Linear(3, 2)])
    handle = treat(list(model), torch.optim.SGD(model.parameters(), lr=0.1), gradient=NOG)
    assert [w.name for w in handle.weights] == ["0.weight (6, 2, 3, 3)", "3.weight (3, 54)", "Linear.weight (2, 3)"]


# --- a parameter of another name -------------------------------------------------------------------------------------


class Subspace(nn.Module):
    def __init__(self):
        super().__init__()
        self.u = nn.Parameter(torch.randn(3, 7))


def test_a_parameter_by_its_name():
    layer = Subspace()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    handle = treat(layer, optimizer, name="u", manifold=Stiefel())
    assert handle.weights[0].name == "Subspace.u (3, 7)"
    torch.testing.assert_close(torch.linalg.svdvals(layer.u.detach()), torch.ones(3))
    handle.remove()
    attention = nn.MultiheadAttention(8, 2)
    handle = treat(attention, torch.optim.SGD(attention.parameters(), lr=0.1), name="in_proj_weight", gradient=NOG)
    assert handle.weights[0].shape == (3, 8, 8)


def test_the_loss_of_a_parameter_by_its_name():
    layer = Subspace()
    torch.testing.assert_close(orthogonality_loss(layer, name="u"), orthogonality_loss(layer.u))
    attention = nn.MultiheadAttention(8, 2)
    blocks = sum(orthogonality_loss(block) for block in attention.in_proj_weight.chunk(3))
    torch.testing.assert_close(orthogonality_loss(attention, name="in_proj_weight"), blocks)
    with pytest.raises(ValueError, match="needs a module with a tensor 'v'; Subspace has none"):
        orthogonality_loss(layer, name="v")
    with pytest.raises(ValueError, match="is for a module; got a tensor"):
        orthogonality_loss(layer.u, name="u")


def test_names_that_lead_nowhere():
    layer = Subspace()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="needs a module with a parameter 'v'; Subspace has none"):
        treat(layer, optimizer, name="v", gradient=NOG)
    with pytest.raises(TypeError, match=r"treat\(name=...\) is for modules"):
        treat([layer, layer.u], optimizer, name="u", gradient=NOG)
    with pytest.raises(ValueError, match="found no matrix in Subspace"):
        treat(layer, optimizer, gradient=NOG)


def test_the_matrix_of_every_weight_is_that_of_matrix_view():
    conv = nn.Conv2d(4, 6, 3, groups=2)
    handle = treat(conv, torch.optim.SGD(conv.parameters(), lr=0.1), gradient=NOG)
    torch.testing.assert_close(handle.weights[0].matrices(), matrix_view(conv.weight.detach(), 2))
