"""What `diagnose` says of a model that does not work: where NaN begins, and which line replaces a decomposition."""

import copy
import json
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import orthocond as oc
from orthocond.monitor import diagnose
from orthocond.monitor.model_call import first_batch

IMAGES = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(8) % 4
FILE = "test_diagnose_failures.py"


class HandWrittenPooling(nn.Module):
    """Covariance pooling as people write it: a decomposition, and autograd through it."""

    def forward(self, x):
        x = x.flatten(2)
        x = x - x.mean(-1, keepdim=True)
        cov = x @ x.mT / x.shape[-1]
        values, vectors = torch.linalg.eigh(cov)
        root = vectors @ torch.diag_embed((values + 1e-3).sqrt()) @ vectors.mT
        return root.flatten(1)


class Replaced(nn.Module):
    """The same after the advice."""

    def forward(self, x):
        x = x.flatten(2)
        x = x - x.mean(-1, keepdim=True)
        cov = x @ x.mT / x.shape[-1]
        return oc.sqrtm(cov, eps=0.001).flatten(1)


class Whitening(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form = form

    def forward(self, x):
        x = x.movedim(1, -1).flatten(0, 2)
        x = x - x.mean(0)
        values, vectors = torch.linalg.eigh(torch.cov(x.T))
        inverse = {
            "rsqrt": lambda: values.rsqrt(),
            "power": lambda: values**-0.5,
            "reciprocal": lambda: 1 / values.clamp(min=1e-6).sqrt(),
            "divided": lambda: torch.div(torch.ones_like(values), torch.sqrt(values)),
            "torch.pow": lambda: torch.pow(values.diag(), -0.5).diagonal(),
        }[self.form]()
        return x @ (vectors * inverse) @ vectors.T


def network(pooling, channels=12):
    """The channels repeat in pairs, so that each covariance has a sixfold zero eigenvalue."""
    model = nn.Sequential()
    model.conv = nn.Conv2d(3, channels, 3)
    with torch.no_grad():
        model.conv.weight.copy_(model.conv.weight[: channels // 2].repeat(2, 1, 1, 1))
        model.conv.bias.zero_()
    model.relu = nn.ReLU()
    model.pool = pooling
    model.head = nn.Linear(channels**2, 4)
    return model


def tied_network():
    """Images without a pattern: all covariances are zero, which is a tie of all eigenvalues, exactly."""
    return network(HandWrittenPooling()), (torch.ones(8, 3, 6, 6), LABELS)


# Where NaN begins


def test_hand_written_pooling_with_nan_gradients():
    model, batch = tied_network()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    assert model.conv.weight.grad.isnan().any()  # the very bug that people come with
    found = diagnose(model, batch, F.cross_entropy)
    (failure,) = found.failures
    assert (failure.what, failure.stage, failure.layer) == ("NaN", "backward", "pool")
    assert failure.operation == "torch.linalg.eigh"
    assert failure.source == "values, vectors = torch.linalg.eigh(cov)"
    assert FILE in failure.location
    assert math.isnan(found["conv"].gradient_condition)
    assert found["conv"].gradient_rank is None
    (call,) = found.decompositions
    assert (call.layer, call.shape, call.matrices, call.ties) == ("pool", (8, 12, 12), 8, 8)
    assert call.advice[0].code == "oc.sqrtm(cov, eps=0.001)"
    text = str(found)
    assert text.startswith("NaN begins in the backward of torch.linalg.eigh, called in layer 'pool' (")
    assert "oc.CovariancePool2d()" in text
    assert "- **pool**: The gradient of torch.linalg.eigh" in found.to_markdown()


def test_the_advice_cures_it():
    model, batch = tied_network()
    model.pool = Replaced()
    found = diagnose(model, batch, F.cross_entropy)
    assert not found.failures
    assert not found.decompositions
    different = network(HandWrittenPooling()), network(Replaced())
    different[1].load_state_dict(different[0].state_dict())
    outputs = [m.double()(IMAGES.double()) for m in different]
    assert torch.allclose(*outputs, atol=1e-9)


@pytest.mark.parametrize("form", ["rsqrt", "power", "reciprocal", "divided", "torch.pow"])
def test_whitening_by_hand_is_an_inverse_root(form):
    model = nn.Sequential(nn.Conv2d(3, 5, 3), Whitening(form))
    (call,) = diagnose(model, IMAGES).decompositions
    assert call.advice[0].code == "oc.inv_sqrtm(torch.cov(x.T))"
    assert "oc.DecorrelatedBatchNorm2d(5)" in call.advice[0].text


class Decomposed(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.function = function

    def forward(self, x):
        return x @ self.function(self.weight)


def orthogonal_by_svd(w):
    u, _, vh = torch.linalg.svd(w, full_matrices=False)
    return u @ vh


def test_svd_of_a_rectangular_matrix_is_a_polar_factor():
    found = diagnose(Decomposed(orthogonal_by_svd), torch.randn(5, 4))
    assert found.decompositions[0].operation == "torch.linalg.svd"
    assert found.decompositions[0].advice[0].code == "oc.polar(w)"


def test_old_names_and_methods_are_seen():
    found = diagnose(Decomposed(lambda w: w.svd()[0]), torch.randn(5, 4))
    assert found.decompositions[0].operation == "torch.Tensor.svd"
    found = diagnose(Decomposed(lambda w: torch.linalg.eigh(w @ w.T)[1]), torch.randn(5, 4))
    assert "oc.sqrtm(w @ w.T) and oc.inv_sqrtm(w @ w.T)" in found.decompositions[0].advice[0].text


def test_what_needs_no_replacement_is_not_listed():
    """Eigenvalues without eigenvectors have a safe gradient; ours, and those without gradient, are no matter."""
    for function in (
        lambda w: w * torch.linalg.svdvals(w).sum(),
        lambda w: w * torch.linalg.eigvalsh(w @ w.T).sum(),
        lambda w: w * torch.linalg.eigh((w @ w.T).detach())[1].sum(),
        oc.polar,
    ):
        assert not diagnose(Decomposed(function), torch.randn(5, 4)).decompositions
    model = nn.Sequential(nn.Conv2d(3, 5, 3), oc.DecorrelatedBatchNorm2d(5), oc.CovariancePool2d())
    assert not diagnose(model, IMAGES).decompositions


class Logarithm(nn.Module):
    def forward(self, x):
        return (x - 10).log()


def test_nan_in_the_forward():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(nn.ReLU(), Logarithm()), nn.Flatten(), nn.Linear(64, 2))
    found = diagnose(model, IMAGES, lambda y: y.mean())
    (failure,) = found.failures
    assert (failure.what, failure.stage, failure.layer) == ("NaN", "forward", "1.1")
    assert (failure.operation, failure.source) == ("torch.Tensor.log", "return (x - 10).log()")
    assert math.isnan(found.loss)
    assert found["3"].rank is None
    assert "Its covariance is not finite." in str(found)
    assert json.loads(found.to_json())["failures"][0]["layer"] == "1.1"


class Overflow(nn.Module):
    def forward(self, x):
        grown = (100 * x.square() + 100).exp()
        return grown / grown.sum()


def test_infinity_before_nan_is_the_cause():
    found = diagnose(nn.Sequential(nn.Conv2d(3, 4, 3), Overflow()), IMAGES, lambda y: y.mean())
    assert [(f.what, f.operation) for f in found.failures] == [
        ("infinity", "torch.Tensor.exp"),
        ("NaN", "torch.Tensor.div"),
    ]


class Masked(nn.Module):
    """Infinities that are meant, uninitialized memory, and a gradient that is infinite where nobody reads it."""

    def __init__(self, broken):
        super().__init__()
        self.fc, self.broken = nn.Linear(4, 4), broken

    def forward(self, x):
        scores = self.fc(x)
        scratch = torch.empty_like(scores).fill_(math.nan)
        mask = torch.full((4, 4), -math.inf).triu(1)
        y = torch.softmax(scores + mask, -1) + scratch.zero_()
        root = (y * 0).sqrt()
        return torch.where(y > 2, root, y) if self.broken else y + root.detach()


def test_meant_infinities_are_no_failure():
    found = diagnose(Masked(broken=False), torch.randn(4, 4), lambda y: y.square().sum())
    assert not found.failures


def test_the_gradient_of_a_branch_that_is_not_taken():
    """The classic of torch.where: 0 times infinity."""
    (failure,) = diagnose(Masked(broken=True), torch.randn(4, 4), lambda y: y.square().sum()).failures
    assert (failure.stage, failure.operation) == ("backward", "torch.Tensor.sqrt")
    assert failure.source == "root = (y * 0).sqrt()"


class FullyMasked(nn.Module):
    """Attention that may look at nothing: a softmax over infinities only, all of them meant."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        scratch = torch.full_like(x, math.nan)
        scores = self.fc(x) + torch.full((4, 4), -math.inf).triu(1)
        masked = scores.masked_fill(torch.ones(4, 4, dtype=torch.bool), -math.inf)
        return torch.softmax(masked, -1) + torch.where(scratch > 0, scratch, x)


def test_constants_are_not_blamed():
    (failure,) = diagnose(FullyMasked(), torch.randn(4, 4)).failures
    assert (failure.what, failure.operation) == ("NaN", "torch.softmax")


def test_an_operation_in_place_is_blamed():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return (self.fc(x) * 0 - 1).sqrt_()

    (failure,) = diagnose(InPlace(), torch.randn(4, 4)).failures
    assert failure.operation == "torch.Tensor.sqrt_"


class HiddenInfinity(nn.Module):
    """An infinite gradient that a ReLU stops comes before the one that reaches the parameters."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        y = self.fc(x)
        reaches = (y * 0).pow(0.3).sum()
        return reaches + torch.relu(y * 0 - 1).sqrt().sum()


def test_only_what_reaches_a_parameter_counts():
    (failure,) = diagnose(HiddenInfinity(), torch.randn(4, 4)).failures
    assert failure.operation == "torch.Tensor.pow"


class Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * math.inf


class WithCustom(nn.Module):
    def forward(self, x):
        return Custom.apply(x)


def test_a_custom_function_is_named_with_its_layer():
    model = nn.Sequential(nn.Linear(4, 4), WithCustom(), nn.Linear(4, 1))
    (failure,) = diagnose(model, torch.randn(3, 4)).failures
    assert (failure.stage, failure.layer, failure.operation, failure.location) == ("backward", "1", "Custom", None)


def test_the_loss_is_no_layer():
    found = diagnose(nn.Linear(4, 1), torch.randn(3, 4), lambda y: (y * 0).sqrt().sum())
    assert str(found).startswith("NaN begins in the backward of torch.Tensor.sqrt, called in the loss (")


def test_a_broken_batch_and_a_broken_parameter():
    model = network(oc.CovariancePool2d(output="matrix"))
    model.head = nn.Sequential(nn.Flatten(), model.head)
    found = diagnose(model, IMAGES * math.nan, lambda y: y.mean())
    assert str(found).startswith("The batch itself holds NaN, in its inputs.")
    with torch.no_grad():
        model.conv.bias[0] = math.inf
    found = diagnose(model, IMAGES, lambda y: y.mean())
    assert str(found).startswith("conv.bias already holds infinity before the forward.")


class Failing(nn.Module):
    def forward(self, x):
        values, _ = torch.linalg.eigh(x.flatten(2) @ x.flatten(2).mT)
        return values


def test_failed_to_converge_is_part_of_the_result(monkeypatch):
    """Michaelvll/DeepCCA#16 and many others: LinAlgError in the middle of a training."""

    def fail(*args, **kwargs):
        raise torch.linalg.LinAlgError("linalg.eigh: The algorithm failed to converge")

    model = nn.Sequential(nn.Conv2d(3, 4, 3), Failing())
    monkeypatch.setattr(torch.linalg, "eigh", fail)
    (failure,) = diagnose(model, IMAGES).failures
    assert failure.what == "LinAlgError: linalg.eigh: The algorithm failed to converge"
    assert failure.stage == "forward"
    monkeypatch.undo()
    with torch.no_grad():
        model[0].weight.mul_(1e30)
    found = diagnose(model, IMAGES)
    assert found.failures[0].what == "infinity"
    assert "matmul" in found.failures[0].operation
    assert found.failures[0].layer == "1"


def test_errors_of_the_model_itself_pass_through():
    with pytest.raises(RuntimeError, match="shape"):
        diagnose(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(5, 5)), IMAGES)


# Without a loss, from a loader


def test_a_loader_and_no_loss():
    model = network(oc.CovariancePool2d(output="matrix"), channels=4)
    model.pool = nn.Sequential(model.pool, nn.Flatten())
    loader = DataLoader(TensorDataset(IMAGES, LABELS), batch_size=4)
    state = torch.get_rng_state()
    found = diagnose(model, loader)
    assert torch.equal(torch.get_rng_state(), state)
    assert found["conv"].samples == 4 * 16
    assert found["conv"].gradient_condition is not None
    assert str(found).endswith("No loss_fn was given: κ gradient is that of a stand-in for the loss.")
    smooth = DataLoader(TensorDataset(IMAGES.cumsum(-1).cumsum(-2), LABELS), batch_size=4)
    code = [a.code for a in diagnose(stem(), smooth, lambda y, t: y.mean())["conv1"].advice]
    assert "oc.whitening_init_(model.conv1, next(iter(loader))[0])" in code
    with_loss = diagnose(model, loader, F.cross_entropy)
    assert with_loss.loss == pytest.approx(float(F.cross_entropy(model(IMAGES[:4]), LABELS[:4]).detach()))
    assert with_loss.checked == ""
    with pytest.raises(ValueError, match="gave no batch"):
        diagnose(model, iter([]))


def test_batches_of_a_loader_move_to_the_device_of_the_model():
    loader = DataLoader([{"image": torch.ones(3), "label": 1, "id": "a"}], batch_size=1)
    found = first_batch(nn.Linear(3, 2, device="meta"), loader)
    assert found["image"].is_meta
    assert found["label"].is_meta
    assert found["id"] == ["a"]
    pair = first_batch(nn.Linear(3, 2, device="meta"), DataLoader(TensorDataset(IMAGES, LABELS)))
    assert isinstance(pair, list)
    assert all(t.is_meta for t in pair)


class Output(dict):
    pass


@pytest.mark.parametrize(
    "wrap",
    [
        lambda y, loss: loss,
        lambda y, loss: {"loss": loss, "logits": y},
        lambda y, loss: Output(logits=y, loss=loss),
        lambda y, loss: type("Named", (), {"loss": loss})(),
    ],
)
def test_the_loss_of_the_output_itself(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def forward(self, x):
            y = self.fc(x)
            return wrap(y, y.square().mean())

    model, x = Model(), torch.randn(5, 4)
    assert diagnose(model, x).loss == pytest.approx(float(model.fc(x).square().mean().detach()))


def test_a_stand_in_sees_a_gradient_behind_a_whitening():
    """The mean square of whitened features is a constant, so its gradient would be zero."""
    found = diagnose(nn.Sequential(nn.Linear(4, 3), oc.DecorrelatedBatchNorm1d(3)), torch.randn(20, 4))
    assert found["0"].gradient_rank == 3


def test_output_without_gradient():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x):
            return self.fc(x).detach()

    with pytest.raises(ValueError, match="depends on the parameters"):
        diagnose(Constant(), torch.randn(3, 2))


# What was checked


def test_it_says_what_it_did_not_check():
    plain = diagnose(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)), torch.randn(9, 4), lambda y: y.mean())
    assert plain.checked.startswith("Checked: whether all values are finite, forward and backward;")
    assert "of 2 layers" in plain.checked
    assert "no SVD layer of orthocond, nor differentiates through eigh or svd" in plain.checked
    by_hand = diagnose(network(HandWrittenPooling()), (IMAGES, LABELS), F.cross_entropy)
    assert "nor differentiates" not in by_hand.checked


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


# Advice keeps what the layer has


def stem(**settings):
    model = nn.Sequential()
    model.conv1 = nn.Conv2d(3, 32, 3, padding=1)
    model.bn1 = oc.DecorrelatedBatchNorm2d(32, **settings)
    return model


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


def test_statistics_of_fewer_groups_can_be_loaded():
    source = oc.DecorrelatedBatchNorm1d(12, groups=2)
    source(torch.randn(30, 12))
    blocks = torch.block_diag(*source.running_covariance)
    target = oc.DecorrelatedBatchNorm1d(12, groups=6)
    target.load_state_dict(source.state_dict())
    expected = torch.stack([blocks[i : i + 2, i : i + 2] for i in range(0, 12, 2)])
    assert torch.equal(target.running_covariance, expected)
    for groups in (3, 1):
        with pytest.raises(RuntimeError, match="size mismatch"):
            oc.DecorrelatedBatchNorm1d(12, groups=groups).load_state_dict(source.state_dict())


# Notebooks


class Script(nn.Module):
    """A layer whose name would be markup."""

    def __init__(self):
        super().__init__()
        self.add_module("<b>", nn.Linear(3, 2))

    def forward(self, x):
        return self._modules["<b>"](x)


def test_html():
    html = diagnose(Script(), torch.randn(7, 3))._repr_html_()
    assert html.startswith("<table>")
    assert "<b>" not in html
    assert "&lt;b&gt;" in html
    assert "http" not in html
    model, batch = tied_network()
    html = diagnose(model, batch, F.cross_entropy)._repr_html_()
    assert html.startswith("<div>⚠ NaN begins in the backward of torch.linalg.eigh")
    assert "<pre>oc.sqrtm(cov, eps=0.001)</pre>" in html
