"""Advice of `diagnose`: it keeps what a layer has, and knows the projections of attention."""

import copy

import pytest
import torch
from diagnose_helpers import IMAGES, stem
from torch import nn
from torch.nn import functional as F

import orthocond as oc
from orthocond.monitor import diagnose

# Attention


@pytest.mark.parametrize("frozen", [False, True])
def test_projections_of_a_transformer(frozen):
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2).eval()
    attention = encoder.layers[0].self_attn
    attention.in_proj_weight.requires_grad_(not frozen)
    x = torch.randn(6, 5, 8)
    found = diagnose(encoder, x)
    assert not encoder.training
    assert len(found.rows) == 8
    row = found["layers.0.self_attn.in_proj_weight"]
    outputs = F.linear(x, attention.in_proj_weight, attention.in_proj_bias).detach().reshape(-1, 24)
    spectra = [oc.spectrum(torch.cov(o.double().T, correction=0), eps=1e-5) for o in outputs.chunk(3, -1)]
    assert row.condition == pytest.approx(float(torch.stack([s.condition for s in spectra]).median()), rel=1e-4)
    weights = oc.singular_spectrum(attention.in_proj_weight.detach().reshape(3, 8, 8))
    assert row.weight_condition == pytest.approx(float(weights.condition.median()), rel=1e-4)
    assert (row.weight_shape, row.size, row.samples, row.rank) == ((24, 8), 8, 30, 8)
    assert (row.gradient_condition is None) == frozen
    out = found["layers.0.self_attn.out_proj"]
    attended, _ = attention(x, x, x)
    expected = oc.spectrum(torch.cov(attended.detach().reshape(-1, 8).double().T, correction=0), eps=1e-5)
    assert out.condition == pytest.approx(float(expected.condition), rel=1e-4)
    assert "did not pass" not in str(found)


def test_separate_projections_and_their_advice():
    class Cross(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, kdim=5, vdim=6, bias=False)

        def forward(self, x, keys, values):
            return self.attention(x, keys, value=values)[0]

    model = Cross()
    x, keys, values = torch.randn(3, 4, 8), torch.randn(7, 4, 5), torch.randn(7, 4, 6)
    found = diagnose(model, ((x, keys, values), None))
    assert [(r.name, r.samples) for r in found.rows] == [
        ("attention.q_proj_weight", 12),
        ("attention.k_proj_weight", 28),
        ("attention.v_proj_weight", 28),
        ("attention.out_proj", 12),
    ]
    output = F.linear(values, model.attention.v_proj_weight).detach().reshape(-1, 8).double()
    expected = oc.spectrum(torch.cov(output.T, correction=0), eps=1e-5, rank_tol=1e-12)
    assert found["attention.v_proj_weight"].rank == int(expected.rank) == 6
    one = nn.MultiheadAttention(8, 2)
    with torch.no_grad():
        one.in_proj_weight[:, 0] = one.in_proj_weight[:, 1]
    (advice,) = diagnose(one, ((x, x, x), None))["in_proj_weight"].advice
    assert advice.code == "loss = loss + 1e-2 * oc.orthogonality_loss(model.in_proj_weight, groups=3)"
    names = {"loss": 0.0, "oc": oc, "model": one}
    exec(advice.code, names)
    assert names["loss"] > 0


def groups_code(model, images):
    advice = diagnose(model, images).rows[0].advice
    return next(a.code for a in advice if a.code and "groups" in a.code)


def test_advice_keeps_settings():
    model = stem(eps=1e-3, momentum=None, affine=False, solver=oc.NewtonSchulz(steps=7), synchronize=True)
    code = groups_code(model, IMAGES)
    exec(code, {"model": model, "oc": oc})
    layer = model.bn1
    assert (layer.eps, layer.momentum, layer.affine, layer.groups) == (1e-3, None, False, 2)
    assert (layer.solver, layer.synchronize) == (oc.NewtonSchulz(steps=7), True)
    double = stem(average="whitening").double().eval()
    exec(groups_code(double, IMAGES.double()), {"model": double, "oc": oc, "torch": torch})
    assert double.bn1.weight.dtype == torch.float64
    assert double.bn1.average == "whitening"
    assert not double.bn1.training


def test_advice_keeps_what_was_learned():
    model = stem()
    for _ in range(3):
        model(IMAGES)
    nn.init.uniform_(model.bn1.weight)
    before = copy.deepcopy(model.bn1)
    exec(groups_code(model, IMAGES), {"model": model, "oc": oc})
    after = model.bn1
    assert after is not before
    assert after.groups == 2
    assert torch.equal(after.weight, before.weight)
    assert torch.equal(after.running_mean, before.running_mean)
    assert torch.equal(after.num_batches_tracked, before.num_batches_tracked)
    whole = before.running_covariance[0]
    assert torch.equal(after.running_covariance, torch.stack([whole[:16, :16], whole[16:, 16:]]))


def test_a_treated_gradient_is_not_to_be_treated_again():
    """Following that advice would be an error, since the weight has its treatment."""
    model, scale = stem(), torch.logspace(0, -4, 32)[:, None, None]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def advised():
        return "oc.treat(" in str(diagnose(model, IMAGES, lambda y: (y * scale).pow(3).sum()))

    assert advised()
    for settings in ({"gradient": oc.NearestOrthogonal()}, {"manifold": oc.Stiefel()}):
        with oc.treat(model.conv1, optimizer, **settings):
            assert not advised()
        assert advised()
    with oc.treat(model.conv1, optimizer, lr=oc.OptimalLR()):  # of the step length alone
        assert advised()
