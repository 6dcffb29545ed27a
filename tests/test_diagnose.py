import copy
import json
import math
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import orthocond
from orthocond import layers, steps, weights
from orthocond.layers import CovariancePool2d, DecorrelatedBatchNorm1d, DecorrelatedBatchNorm2d
from orthocond.matrix import NewtonSchulz
from orthocond.matrix.spectra import singular_spectrum, spectrum
from orthocond.monitor import ConditionMonitor, diagnose, pre_svd_layer
from orthocond.weights import orthogonal, spectral

X = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(2)).cumsum(-1).cumsum(-2) / 8


class Residual(nn.Module):
    def __init__(self, shortcut=None):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.a = nn.Conv2d(6, 6, 3, padding=1)
        self.bn = nn.BatchNorm2d(6)
        self.b = nn.Conv2d(6, 6, 3, padding=1)
        self.shortcut = shortcut or nn.Identity()
        self.white = DecorrelatedBatchNorm2d(6)

    def forward(self, x):
        x = F.relu(self.stem(x), inplace=True)
        return self.white(F.relu(self.b(F.relu(self.bn(self.a(x)))) + self.shortcut(x)))


class Functional(nn.Module):
    """No module owns an operation; one weight is scaled on the way, one is an einsum, and an offset is a matrix too."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(5, 3, 3, 3))
        self.second = nn.Parameter(torch.randn(4, 5))
        self.offset = nn.Parameter(torch.zeros(1, 4, 1, 1))
        self.position = nn.Parameter(torch.zeros(4, 6, 6))
        self.white = DecorrelatedBatchNorm2d(4)

    def forward(self, x):
        x = F.relu(F.conv2d(x, self.first / self.first.norm()))
        x = torch.einsum("oi,nihw->nohw", 2 * self.second, x)
        return self.white(F.relu(x + self.offset) + self.position)


def chain(*modules):
    return nn.Sequential(*modules)


def deep():
    relu = nn.ReLU(inplace=True)
    return chain(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), relu, nn.Conv2d(8, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.MaxPool2d(2), CovariancePool2d(), nn.Linear(10, 2)),
    )


def two():
    return chain(nn.Conv2d(3, 5, 3), DecorrelatedBatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 4, 1), CovariancePool2d())


def frozen():
    model = deep()
    model[3].requires_grad_(False)
    return model


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.fc, self.white = nn.Embedding(10, 6), nn.Linear(6, 4), DecorrelatedBatchNorm1d(4)

    def forward(self, tokens):
        return self.white(self.fc(self.embedding(tokens)).flatten(0, 1))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.white = nn.MultiheadAttention(4, 2), DecorrelatedBatchNorm1d(4)

    def forward(self, x):
        return self.white(self.attention(x, x, x)[0].flatten(0, 1))


# Values


def stem(channels=32):
    """As in the paper: a 3x3 convolution of 3 channels, whitened."""
    model = nn.Sequential()
    model.conv1 = nn.Conv2d(3, channels, 3, padding=1, bias=False)
    model.bn1 = DecorrelatedBatchNorm2d(channels)
    model.relu = nn.ReLU()
    model.flat = nn.Flatten()
    model.fc = nn.Linear(channels * 64, 4)
    return model


def batch(count=40):
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(count, 3, 8, 8, generator=generator).cumsum(-1).cumsum(-2) / 8
    return images, torch.randint(4, (count,), generator=generator)


def covariance(x):
    return torch.cov(x.detach().movedim(1, 0).flatten(1).double(), correction=0)


def test_numbers_are_those_of_spectrum():
    model = stem()
    images, labels = batch()
    outputs = {}
    reference = copy.deepcopy(model)
    for name, module in reference.named_children():
        module.register_forward_hook(lambda m, a, o, name=name: outputs.update({name: o}))
    loss = F.cross_entropy(reference(images), labels)
    loss.backward()
    found = diagnose(model, (images, labels), F.cross_entropy)
    assert found.loss == pytest.approx(float(loss.detach()))
    assert [row.name for row in found.rows] == ["conv1", "bn1", "fc"]
    for name, samples in (("conv1", 40 * 64), ("fc", 40)):
        row, layer = found[name], reference.get_submodule(name)
        features = spectrum(covariance(outputs[name]), eps=1e-5, rank_tol=1e-12)
        weight, gradient = (singular_spectrum(t.flatten(1)) for t in (layer.weight, layer.weight.grad))
        assert (row.rank, row.size, row.samples) == (int(features.rank), features.size, samples)
        assert row.condition == pytest.approx(float(features.condition), rel=1e-4)
        assert row.condition_on_range == pytest.approx(float(features.condition_on_range), rel=1e-4)
        assert row.weight_condition == pytest.approx(float(weight.condition), rel=1e-5)
        assert row.gradient_rank == int(gradient.rank)
        assert row.gradient_condition == pytest.approx(float(gradient.condition), rel=1e-3)
    white = found["bn1"]
    assert (white.rank, white.size, white.eps, white.samples) == (27, 32, 1e-5, 2560)
    assert white.condition == pytest.approx(found["conv1"].condition, rel=1e-5)
    assert (found["conv1"].feeds, found["conv1"].fed_by) == (("bn1",), ())
    assert (white.feeds, white.fed_by) == ((), ("conv1",))


def test_eps_as_given():
    found = diagnose(stem(), batch(), F.cross_entropy, eps=0.0)
    assert found["bn1"].condition == found["conv1"].condition == math.inf


def test_double_precision_and_linear_sequences():
    model = chain(nn.Linear(5, 3), nn.Conv1d(7, 2, 1)).double()
    x = torch.randn(4, 7, 5, dtype=torch.float64)
    found = diagnose(model, x, lambda y: y.square().mean())
    output = model[0](x)
    expected = spectrum(covariance(output.reshape(-1, 3)), eps=1e-5)
    assert found["0"].condition == pytest.approx(float(expected.condition))
    assert found["0"].samples == 28
    weight = singular_spectrum(model[0].weight)
    assert found["0"].weight_condition == pytest.approx(float(weight.condition), rel=1e-12)
    expected = spectrum(covariance(model[1](output)), eps=1e-5)
    assert found["1"].condition == pytest.approx(float(expected.condition))


def test_channels_last_and_one_image_without_batch():
    conv = nn.Conv2d(3, 4, 3)
    one = diagnose(chain(conv), X[0], lambda y: y.square().mean())
    batched = diagnose(chain(conv), X[:1].to(memory_format=torch.channels_last), lambda y: y.square().mean())
    assert one["0"].condition == pytest.approx(batched["0"].condition, rel=1e-5)
    assert one["0"].samples == batched["0"].samples == 36


def test_rounding_of_half_precision_is_no_rank():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = diagnose(stem(), batch(), F.cross_entropy)
    assert 5 <= found["conv1"].rank <= 27
    assert found["conv1"].condition_on_range < 1 / torch.finfo(torch.bfloat16).eps ** 2


def test_layers_called_never_or_with_parametrized_weights():
    model = deep()
    orthogonal(model[3])
    model.unused = nn.Linear(3, 3)
    model.forward = lambda x: nn.Sequential(*list(model)[:9])(x)
    found = diagnose(model, X, lambda y: y.square().mean())
    assert found["unused"].rank is None
    assert str(found["unused"].advice[0]) == "The batch did not pass through it."
    assert found["3"].kind == "Conv2d"
    assert found["3"].weight_condition == pytest.approx(1, abs=1e-5)
    assert found["3"].gradient_rank == 4
    assert found["3"].feeds == ("7",)


# Invariants: nothing changes


class Disturbing(nn.Module):
    """Everything that a forward in training mode changes."""

    def __init__(self):
        super().__init__()
        self.conv1 = spectral(nn.Conv2d(3, 6, 3, padding=1))
        self.bn = nn.BatchNorm2d(6)
        self.conv2 = orthogonal(nn.Conv2d(6, 6, 1), metric="running")
        self.white = DecorrelatedBatchNorm2d(6)
        self.dropout = nn.Dropout(0.5)
        self.fc = nn.Linear(6, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        x = self.white(self.conv2(F.relu(self.bn(self.conv1(x)))))
        if random.random() < 2:
            x = self.dropout(x)
        return self.fc(x.mean((2, 3)))


@pytest.mark.parametrize("training", [True, False])
def test_state_is_restored_bit_for_bit(training):
    model = Disturbing()
    images, labels = batch()
    F.cross_entropy(model(images), labels).backward()
    model.train(training)
    model.bn.eval()
    seen = []
    model.white.observer = seen.append
    fired = []
    model.fc.weight.register_post_accumulate_grad_hook(fired.append)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    objects = {k: (v, v._version) for k, v in [*model.named_buffers(), *model.named_parameters()]}
    gradients = {k: (p.grad, p.grad.clone()) for k, p in model.named_parameters()}
    modes = [m.training for m in model.modules()]
    flags = [p.requires_grad for p in model.parameters()]
    rng, python = torch.get_rng_state(), random.getstate()
    observer = model.white.observer

    diagnose(model, (images, labels), F.cross_entropy)
    pre_svd_layer(model, "white", images)

    assert [m.training for m in model.modules()] == modes
    assert [p.requires_grad for p in model.parameters()] == flags
    for k, v in model.state_dict().items():
        assert torch.equal(v, state[k]), k
    for k, v in [*model.named_buffers(), *model.named_parameters()]:
        assert v is objects[k][0], k
        assert v._version == objects[k][1], k
    for k, p in model.named_parameters():
        assert p.grad is gradients[k][0], k
        assert torch.equal(p.grad, gradients[k][1]), k
    assert torch.equal(torch.get_rng_state(), rng)
    assert random.getstate() == python
    assert model.white.observer is observer
    assert not seen
    assert not fired
    assert not any(m._forward_hooks for m in model.modules() if m is not model.conv2)


def test_state_is_restored_after_an_error():
    model = stem().eval()
    state = copy.deepcopy(model.state_dict())
    diagnose(model, X * math.nan, lambda y: y.mean())
    with pytest.raises(ZeroDivisionError):
        diagnose(model, X, lambda y: 1 / 0)
    assert not any(m.training for m in model.modules())
    assert not any(m._forward_hooks for m in model.modules())
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert model.bn1.observer is None


def test_a_running_monitor_records_nothing_of_it():
    model = stem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ConditionMonitor(model) as monitor:
        model(X).square().mean().backward()
        diagnose(model, batch(), F.cross_entropy)
        optimizer.step()
    assert [r["matrices"] for r in monitor.history] == [1]


# Advice


def namespace(model, given):
    """What a user's script has: model, batch, optimizer, and oc."""

    class Everything:
        def __getattr__(self, name):
            return next(getattr(m, name) for m in (orthocond, layers, steps, weights) if hasattr(m, name))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"model": model, "batch": given, "optimizer": optimizer, "oc": Everything(), "torch": torch, "loss": 0.0}


def test_advice_for_the_stem_of_the_paper_helps():
    model, given = stem(), batch()
    before = diagnose(model, given, F.cross_entropy)
    advice = before["conv1"].advice
    assert advice[0].text.startswith("Rank 27 of 32 by construction: 3 input channels x 3x3.")
    assert advice[0].code == "model.bn1 = oc.DecorrelatedBatchNorm2d(32, groups=2)"
    assert advice[1].code == "oc.whitening_init_(model.conv1, batch[0])"
    names = namespace(model, given)
    for line in (a.code for a in advice):
        exec(line, names)
    after = diagnose(model, given, F.cross_entropy)
    assert before["bn1"].condition_on_range > 1000
    assert after["bn1"].condition < 20
    assert after["bn1"].rank == after["bn1"].size == 16
    assert not any("construction" in a.text for a in after["conv1"].advice)


def test_all_advice_can_be_executed():
    model, given = deep(), batch()
    with torch.no_grad():
        model[3].weight[1] = model[3].weight[0] + 0.01 * torch.randn(8, 1, 1)  # two channels that are nearly the same
        model[8].weight.copy_(torch.ones(2, 10))
    model[7].solver = NewtonSchulz()
    found = diagnose(model, given, lambda y, t: F.cross_entropy(y, t % 2))
    lines = [a.code for row in found.rows for a in row.advice if a.code]
    assert 'oc.orthogonal(model[3], metric="running")' in lines
    assert "model[7].solver = oc.Eigh()" in lines
    assert "loss = loss + 1e-2 * oc.orthogonality_loss(model[8])" in lines
    names = namespace(model, given)
    for line in lines:
        exec(line, names)
    assert names["loss"] > 0
    after = diagnose(model, given, lambda y, t: F.cross_entropy(y, t % 2))
    assert after["7"].condition_on_range < found["7"].condition_on_range


def test_gradient_advice_attaches_a_treatment():
    model, given = stem(), batch()
    weights.whitening_init_(model.conv1, given[0])
    found = diagnose(model, given, F.cross_entropy)
    assert found["conv1"].gradient_condition > 100
    line = found["conv1"].advice[-1].code
    assert line == "oc.treat(model.conv1, optimizer, gradient=oc.NearestOrthogonal(), lr=oc.OptimalLR())"
    names = namespace(model, given)
    exec(line, names)
    F.cross_entropy(model(given[0]), given[1]).backward()
    names["optimizer"].step()
    assert singular_spectrum(model.conv1.weight.grad.flatten(1)).condition < 1.01


@pytest.mark.filterwarnings("ignore:DecorrelatedBatchNorm1d got 5 samples")
def test_advice_in_other_cases():
    def texts(model, name, given=X, loss=lambda y: y.square().mean()):
        return " ".join(map(str, diagnose(model, given, loss)[name].advice))

    assert "depends on no weight" in texts(chain(DecorrelatedBatchNorm2d(3), nn.Conv2d(3, 3, 1)), "0")
    assert "Several layers feed it" in texts(Residual(nn.Conv2d(6, 6, 1)), "white")
    constant = chain(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1))
    nn.init.zeros_(constant[0].weight)
    assert "covariance is zero" in texts(constant, "0")
    assert "by construction: 16 samples" in texts(
        chain(nn.AdaptiveAvgPool2d(4), nn.Conv2d(3, 20, 3, padding=1), CovariancePool2d()), "2"
    )
    treated = stem(20)
    orthogonal(treated.conv1)
    assert 'remove_parametrizations(model.conv1, "weight")' in texts(treated, "conv1", batch()[0])
    assert "frozen" in texts(frozen(), "3")
    few = chain(nn.Linear(20, 8), DecorrelatedBatchNorm1d(8))
    text = texts(few, "0", torch.randn(5, 20))
    assert text.startswith("Rank 4 of 8 by construction: 5 samples. Groups of channels can have full rank;")
    assert "model[1] = oc.DecorrelatedBatchNorm1d(8, groups=2)" in text
    few[1] = DecorrelatedBatchNorm1d(8, groups=4)
    assert "construction" not in texts(few, "0", torch.randn(5, 20))
    with torch.no_grad():
        few[0].weight.copy_(few[0].weight[:4].repeat_interleave(2, 0))
    text = texts(few, "0", torch.randn(9, 20))
    assert text.startswith("Rank 4 of 8, where 8 is possible: channels combine others. Its gradient")


def test_nothing_to_improve():
    model = chain(nn.Linear(4, 4))
    nn.init.orthogonal_(model[0].weight)
    found = diagnose(model, torch.randn(64, 4), lambda y: y.square().mean())
    assert "\n\nNothing to improve was found.\n\nChecked: " in str(found)
    assert "\n\nNothing to improve was found.\n\nChecked: " in found.to_markdown()


# Output


def test_text_markdown_and_json(tmp_path):
    found = diagnose(stem(), batch(), F.cross_entropy, eps=0.0)
    lines = str(found).splitlines()
    assert lines[0].split()[:3] == ["layer", "kind", "weight"]
    assert "27 of 32" in lines[2]
    assert "feeds bn1" in lines[2]
    assert "fed by conv1" in lines[3]
    assert "    oc.whitening_init_(model.conv1, batch[0])" in lines
    markdown = found.to_markdown().splitlines()
    assert {line.count("|") for line in markdown[:5]} == {10}
    assert any(line.startswith("- **conv1**: Rank 27") for line in markdown)
    data = json.loads(found.to_json(tmp_path / "d.json"), parse_constant=pytest.fail)
    assert json.loads((tmp_path / "d.json").read_text()) == data
    assert data["rows"][0]["name"] == "conv1"
    assert data["rows"][0]["condition"] == "inf"
    assert data["rows"][0]["feeds"] == ["bn1"]
    assert data["rows"][0]["advice"][1]["code"] == "oc.whitening_init_(model.conv1, batch[0])"
    with pytest.raises(KeyError, match="no layer 'conv2'; there are conv1, bn1, fc"):
        found["conv2"]


# Batches and errors


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, image, scale=1.0, labels=None):
        y = scale * self.fc(image)
        return y if labels is None else {"loss": F.cross_entropy(y, labels)}


def test_batches():
    x, y = torch.randn(9, 4), torch.randint(2, (9,))
    named, plain = Named(), chain(nn.Linear(4, 2))
    cross = F.cross_entropy
    expected = diagnose(named, (x, y), cross).loss
    assert diagnose(named, {"image": x, "target": y}, cross).loss == expected
    assert diagnose(named, {"image": x, "labels": y}, lambda out: out["loss"]).loss == expected
    assert diagnose(named, {"image": x, "labels": y, "scale": 1.0}, lambda out: out["loss"]).loss == expected
    assert diagnose(named, ((x, 1.0), y), cross).loss == expected
    assert diagnose(named, ({"image": x, "scale": 1.0}, y), cross).loss == expected
    assert diagnose(named, [x], lambda out: cross(out, y)).loss == expected
    assert diagnose(named, iter([(x, y), (x, 0 * y)]), cross).loss == expected
    expected = diagnose(plain, (x, y), cross).loss
    assert diagnose(plain, {"pixels": x, "label": y}, cross).loss == expected


@pytest.mark.parametrize(
    ("given", "loss_fn", "error", "text"),
    [
        (3, F.mse_loss, TypeError, r"a dictionary or a loader of them; got int"),
        ((X, X, X), F.mse_loss, ValueError, r"got 3 items.* a list of batches as iter\(batches\)"),
        ([(X, X)], F.mse_loss, ValueError, r"A list of 1 tuples.* may be one batch or several.*iter\(batches\)"),
        ([{"image": X}, {"image": X}], F.mse_loss, ValueError, "A list of 2 tuples, lists or dictionaries"),
        ([], F.mse_loss, ValueError, "A list of 0"),
        ({"a": X, "b": X}, F.mse_loss, ValueError, "forward takes image, scale, labels, and 'a', 'b' are left"),
        (torch.randn(9, 4), F.cross_entropy, TypeError, r"loss_fn\(output\), as the batch has no target"),
        ((torch.randn(9, 4), 1), lambda y: y.mean(), TypeError, r"calls loss_fn\(output, target\)"),
        (torch.randn(9, 4), lambda y: y, ValueError, r"one number .* got a tensor of shape \(9, 2\)"),
        (torch.randn(9, 4), lambda y: y.mean().item(), ValueError, "got float"),
        (torch.randn(9, 4), lambda y: y.mean().detach(), ValueError, "do not detach"),
        (torch.randn(9, 4), 3, TypeError, "needs a function"),
    ],
)
def test_errors(given, loss_fn, error, text):
    with pytest.raises(error, match=text):
        diagnose(Named(), given, loss_fn)


def test_model_errors():
    with pytest.raises(TypeError, match=r"needs a torch.nn.Module; got function"):
        diagnose(batch, X, F.mse_loss)
    with pytest.raises(ValueError, match="this one has none"):
        diagnose(nn.ReLU(), X, F.mse_loss)
    with pytest.raises(ValueError, match=r"eps=...\) needs"):
        diagnose(stem(), X, F.mse_loss, eps=-1.0)


# Life cycle


@pytest.mark.filterwarnings("ignore")  # tracing itself warns of what torch does inside
def test_compiled_and_parallel_models():
    model, given = stem(), batch()
    expected = diagnose(model, given, F.cross_entropy)
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    found = diagnose(compiled, given, F.cross_entropy)
    assert found["conv1"].advice[1].code == "oc.whitening_init_(model._orig_mod.conv1, batch[0])"
    assert found["conv1"].condition == pytest.approx(expected["conv1"].condition)
    part = copy.deepcopy(model)
    part.conv1 = torch.compile(part.conv1, backend="eager")
    found = diagnose(part, given, F.cross_entropy)
    assert found["bn1"].fed_by == ("conv1",)
    assert found["conv1"].advice[1].code == "oc.whitening_init_(model.conv1._orig_mod, batch[0])"
    parallel = nn.DataParallel(model)
    found = diagnose(parallel, given, F.cross_entropy)
    assert found["conv1"].advice[1].code == "oc.whitening_init_(model.module.conv1, batch[0])"


def test_no_global_hook_is_left():
    """torch.compile warns while there is one."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), DecorrelatedBatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
    diagnose(model, torch.randn(8, 3, 4, 4), lambda y: y.square().mean())
    assert not torch.nn.modules.module._has_any_global_hook()
