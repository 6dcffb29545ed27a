import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from orthocond.folding import FoldReport, PointwiseConv1d, fold
from orthocond.lab.classification.networks.resnet import resnet18
from orthocond.layers import (
    CovariancePool2d,
    DecorrelatedBatchNorm1d,
    DecorrelatedBatchNorm2d,
    DecorrelatedBatchNorm3d,
)
from orthocond.weights import SkewOrthogonalConv2d, orthogonal, spectral

WHITENING = {1: DecorrelatedBatchNorm1d, 2: DecorrelatedBatchNorm2d, 3: DecorrelatedBatchNorm3d}
PLAIN = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


def trained(model, *shape, batches=3, dtype=torch.float64):
    """The model with statistics of correlated features with a mean, and affine parameters that are not the start's."""
    model = model.to(dtype).train()
    for module in model.modules():
        if isinstance(module, (*WHITENING.values(), *PLAIN.values())) and module.affine:
            nn.init.normal_(module.weight, 1.0, 0.3)
            nn.init.normal_(module.bias)
    with torch.no_grad():
        for _ in range(batches):
            model(torch.randn(shape, dtype=dtype).cumsum(-1) + 1)
    return model


def difference(model, folded, x):
    model = copy.deepcopy(model).eval()
    with torch.no_grad():
        expected, found = model(x), folded(x)
    return float((expected - found).abs().max() / expected.abs().max())


def assert_plain(folded):
    for module in folded.modules():
        assert not isinstance(module, (*WHITENING.values(), *PLAIN.values(), nn.SyncBatchNorm))
        assert not parametrize.is_parametrized(module)


def network(pool=None):
    settings = {"pool": pool, "reduction": 8} if pool else {}
    model = resnet18(10, stem="cifar", stem_norm=DecorrelatedBatchNorm2d, **settings)
    orthogonal(model.conv1)
    return trained(model, 8, 3, 16, 16, dtype=torch.float32)


# Values


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("settings", [{}, {"groups": 3}, {"affine": False}, {"average": "whitening", "groups": 2}])
@pytest.mark.parametrize("kind", [CONV, TRANSPOSED], ids=["conv", "transposed"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_whitening_is_merged_into_a_convolution(dims, kind, settings, bias):
    layer = kind[dims](4, 12, 3, stride=2, padding=1, bias=bias)
    model = trained(nn.Sequential(layer, WHITENING[dims](12, **settings), nn.Tanh()), 16, 4, *[7] * dims)
    folded = fold(model)
    assert_plain(folded)
    assert isinstance(folded[1], nn.Identity)
    assert difference(model, folded, torch.randn(3, 4, *[7] * dims, dtype=torch.float64)) < 1e-10


@pytest.mark.parametrize("settings", [{}, {"groups": 3}, {"affine": False}])
@pytest.mark.parametrize("bias", [True, False])
def test_whitening_is_merged_into_a_linear_layer(settings, bias):
    model = trained(nn.Sequential(nn.Linear(5, 12, bias=bias), DecorrelatedBatchNorm1d(12, **settings)), 100, 5)
    folded = fold(model)
    assert_plain(folded)
    assert difference(model, folded, torch.randn(7, 5, dtype=torch.float64)) < 1e-10


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("kind", [CONV, TRANSPOSED], ids=["conv", "transposed"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_batch_normalization_is_merged(dims, kind, affine):
    layer = kind[dims](4, 12, 3, groups=2, padding=1)
    model = trained(nn.Sequential(layer, PLAIN[dims](12, affine=affine)), 16, 4, *[7] * dims)
    folded = fold(model)
    assert_plain(folded)
    assert difference(model, folded, torch.randn(3, 4, *[7] * dims, dtype=torch.float64)) < 1e-10


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("groups", "merged"), [(4, True), (2, True), (1, False)])
def test_groups_of_the_convolution_must_hold_those_of_the_whitening(groups, merged, transposed):
    layer = (nn.ConvTranspose2d if transposed else nn.Conv2d)(4, 24, 3, groups=2)
    model = trained(nn.Sequential(layer, DecorrelatedBatchNorm2d(24, groups=groups)), 16, 4, 7, 7)
    folded = fold(model)
    assert_plain(folded)
    assert isinstance(folded[1], nn.Identity if merged else nn.Conv2d)
    assert difference(model, folded, torch.randn(3, 4, 7, 7, dtype=torch.float64)) < 1e-10


TREATMENTS = {
    "cayley": orthogonal,
    "exponential": lambda layer: orthogonal(layer, map="exponential"),
    "running metric": lambda layer: orthogonal(layer, metric="running"),
    "spectral": spectral,
    "torch orthogonal": parametrizations.orthogonal,
    "torch weight_norm": parametrizations.weight_norm,
    "torch spectral_norm": parametrizations.spectral_norm,
}


@pytest.mark.parametrize("treat", TREATMENTS.values(), ids=TREATMENTS)
def test_parametrizations_become_weights(treat):
    layer = nn.Conv2d(3, 8, 3)
    model = trained(nn.Sequential(treat(layer), DecorrelatedBatchNorm2d(8)), 8, 3, 9, 9)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(3, 3, 9, 9, dtype=torch.float64)
    folded = fold(model)
    assert_plain(folded)
    assert folded.fold_report.materialized == ("0.weight",)
    assert folded[0].weight.requires_grad
    assert set(folded.state_dict()) == {"0.weight", "0.bias"}
    assert difference(model, folded, x) < 1e-10
    # Nothing of the original has changed, and it still computes with its parametrization.
    assert parametrize.is_parametrized(model[0], "weight")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.train()(x).sum().backward()


def test_raw_weights_that_layers_share_are_materialized_one_by_one():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = orthogonal(nn.Linear(6, 6))
            self.second = orthogonal(nn.Linear(6, 6))
            self.third = nn.Linear(6, 6)
            raw = self.first.parametrizations.weight.original
            self.second.parametrizations.weight.original = self.third.weight = raw

        def forward(self, x):
            return self.third(self.second(self.first(x)))

    model = Tied().double()
    assert difference(model, fold(model), torch.randn(4, 6, dtype=torch.float64)) < 1e-12


def test_float32_and_half_precision():
    model = trained(resnet18(10, stem="cifar", stem_norm=DecorrelatedBatchNorm2d), 8, 3, 16, 16, dtype=torch.float32)
    x = torch.randn(2, 3, 16, 16).cumsum(-1)
    folded = fold(model)
    assert_plain(folded)
    assert difference(model, folded, x) < 1e-4
    model = model.bfloat16()
    folded = fold(model)
    assert all(p.dtype == torch.bfloat16 for p in folded.parameters())
    assert difference(model, folded, x.bfloat16()) < 0.1


def test_a_float64_network_to_ten_digits():
    model = resnet18(10, stem="cifar", stem_norm=DecorrelatedBatchNorm2d, pool=CovariancePool2d(), reduction=16)
    orthogonal(model.conv1)
    model = trained(model, 8, 3, 16, 16, batches=2)
    x = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    for folded in (fold(model), fold(model, x)):
        assert_plain(folded)
        assert len(folded.fold_report.merged) == 21
        assert difference(model, folded, x) < 1e-10


# Which norms are merged


class Branches(nn.Module):
    """A convolution and a norm that are connected in different ways."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = DecorrelatedBatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.conv(x)
        if self.way == "alone":
            return F.relu(self.norm(y))
        if self.way == "used elsewhere":
            return self.norm(y) + y
        if self.way == "layer twice":
            return self.norm(self.conv(torch.tanh(y)))
        if self.way == "norm twice":
            return self.norm(torch.tanh(self.norm(y)))
        if self.way == "activation between":
            return self.norm(self.relu(y))
        if self.way == "changed in place":
            y.add_(1)
            return self.norm(y)
        if self.way == "a part is used":
            return self.norm(y) + y.mean((2, 3), keepdim=True)
        if self.way == "weight is used":
            return self.norm(y) + F.conv2d(x, self.conv.weight, padding=1)
        assert self.way == "not used"
        return self.norm(torch.tanh(x)) + torch.tanh(y)


WAYS = [
    "alone", "used elsewhere", "layer twice", "norm twice", "activation between", "changed in place", "a part is used",
    "weight is used", "not used",
]  # fmt: skip


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_only_a_norm_that_alone_takes_the_output_is_merged(way, recorded):
    model = trained(Branches(way), 16, 4, 8, 8)
    x = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    folded = fold(model, x) if recorded else fold(model)
    assert isinstance(folded.norm, nn.Identity if way == "alone" else nn.Conv2d)
    assert ("norm" in folded.fold_report.merged) == (way == "alone")
    assert difference(model, folded, x) < 1e-10
    assert folded.fold_report.difference is None or folded.fold_report.difference < 1e-10


@pytest.mark.parametrize("container", [lambda a, b: (a, b), lambda a, b: {"a": a, "b": b}, "dataclass"])
def test_an_output_that_is_returned_stays(container):
    @dataclasses.dataclass
    class Result:
        a: torch.Tensor
        b: torch.Tensor

    class Model(Branches):
        def forward(self, x):
            y = self.conv(x)
            return (Result if container == "dataclass" else container)(self.norm(y), y)

    model = trained(Model("alone"), 16, 4, 8, 8)
    folded = fold(model, torch.randn(2, 4, 8, 8, dtype=torch.float64))
    assert "used elsewhere" in folded.fold_report.replaced["norm"]
    assert folded.fold_report.difference < 1e-10


@pytest.mark.parametrize("recorded", [False, True])
def test_a_norm_that_others_look_at_is_kept(recorded):
    class Model(Branches):
        def forward(self, x):
            return self.second(self.conv(x)) + self.norm(self.first(x)) + self.norm.bias[:, None, None]

    model = Model("alone")
    model.first, model.second = nn.Conv2d(4, 4, 1), nn.Identity()
    orthogonal(model.conv)
    model = trained(model, 16, 4, 8, 8)
    x = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    folded = fold(model, x if recorded else None)
    assert isinstance(folded.norm, DecorrelatedBatchNorm2d)
    assert "used outside" in folded.fold_report.kept["norm"]
    assert difference(model, folded, x) < 1e-10


@pytest.mark.parametrize("place", ["conv", "norm"])
@pytest.mark.parametrize("recorded", [False, True])
def test_hooks_keep_their_effect(place, recorded):
    model = trained(nn.Sequential(Branches("alone"), nn.Conv2d(4, 3, 1), nn.BatchNorm2d(3)), 16, 4, 8, 8)
    getattr(model[0], place).register_forward_hook(lambda module, args, output: 2 * output)
    x = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    folded = fold(model, x if recorded else None)
    assert isinstance(folded[0].norm, nn.Conv2d if place == "conv" else DecorrelatedBatchNorm2d)
    assert difference(model, folded, x) < 1e-10


def test_a_batch_normalization_that_cannot_be_merged_stays():
    model = trained(nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)), 16, 4, 8, 8)
    folded = fold(model)
    assert [type(m) for m in folded] == [nn.BatchNorm2d, nn.Conv2d, nn.Identity]
    assert "0" in folded.fold_report.kept
    assert difference(model, folded, torch.randn(2, 4, 8, 8, dtype=torch.float64)) < 1e-10


def test_a_subclass_with_a_forward_of_its_own_is_left_alone():
    class Scaled(nn.BatchNorm2d):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(nn.Conv2d(4, 4, 1), Scaled(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
    model = trained(model, 16, 4, 8, 8)
    folded = fold(model)
    assert type(folded[1]) is Scaled
    assert difference(model, folded, torch.randn(2, 4, 8, 8, dtype=torch.float64)) < 1e-10


@pytest.mark.parametrize("shape", [(30, 6), (30, 6, 5)])
@pytest.mark.parametrize("groups", [1, 2])
def test_whitening_without_a_layer_becomes_a_pointwise_convolution(shape, groups):
    layer = trained(DecorrelatedBatchNorm1d(6, groups=groups), *shape)
    folded = fold(layer)
    assert isinstance(folded, PointwiseConv1d)
    assert not any(p.requires_grad for p in folded.parameters())
    assert difference(layer, folded, torch.randn(6, *shape[1:], dtype=torch.float64)) < 1e-10
    assert difference(layer, fold(layer, torch.randn(shape, dtype=torch.float64)), torch.randn(shape).double()) < 1e-10


def test_a_pointwise_convolution_has_the_dtype_of_the_features():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), DecorrelatedBatchNorm2d(4, affine=False))
    model = trained(model, 16, 3, 8, 8, dtype=torch.float32).bfloat16()
    x = torch.randn(2, 3, 8, 8).bfloat16()
    assert difference(model, fold(model), x) < 0.05


def test_a_linear_layer_before_a_norm_of_images():
    model = trained(nn.Sequential(nn.Linear(5, 4), DecorrelatedBatchNorm2d(4)), 30, 4, 3, 5)
    folded = fold(model)
    assert isinstance(folded[1], nn.Conv2d)
    assert difference(model, folded, torch.randn(2, 4, 3, 5, dtype=torch.float64)) < 1e-10


def test_linear_layers_on_sequences_have_their_channels_elsewhere():
    model = trained(nn.Sequential(nn.Linear(5, 6), DecorrelatedBatchNorm1d(6)), 30, 6, 5)
    x = torch.randn(4, 6, 5, dtype=torch.float64)
    folded = fold(model, x)
    assert isinstance(folded[1], PointwiseConv1d)
    assert difference(model, folded, x) < 1e-10


def test_a_layer_by_two_names_is_replaced_in_both():
    model = Branches("activation between")
    model.again = model.norm
    folded = fold(trained(model, 16, 4, 8, 8))
    assert folded.again is folded.norm


def test_an_orthogonal_skew_convolution_keeps_its_series():
    model = trained(nn.Sequential(SkewOrthogonalConv2d(3, 8), DecorrelatedBatchNorm2d(8)), 8, 3, 8, 8)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    folded = fold(model)
    assert isinstance(folded[1], nn.Conv2d)
    assert difference(model, folded, x) < 1e-10


# Tracing


def test_arguments_take_their_defaults_in_the_trace():
    class Optional(Branches):
        def forward(self, x, scale=None):
            y = self.conv(x)
            if scale is None:
                y = torch.tanh(y)
            return self.norm(y)

    model = trained(Optional("alone"), 16, 4, 8, 8)
    folded = fold(model)
    assert isinstance(folded.norm, nn.Conv2d)
    assert difference(model, folded, torch.randn(2, 4, 8, 8, dtype=torch.float64)) < 1e-10


def test_nothing_of_the_trace_stays_in_the_copy():
    class Storing(Branches):
        def forward(self, x):
            self.features = self.conv(x)
            return self.norm(torch.tanh(self.features))

    assert not hasattr(fold(Storing("alone")), "features")


class DataDependent(Branches):
    def forward(self, x, *, offset=0.0):
        if x.sum() > 1e9:
            raise ValueError("too large")
        return self.norm(self.conv(x)) + offset


def test_a_forward_that_looks_at_values_needs_an_example():
    model = trained(DataDependent("alone"), 16, 4, 8, 8)
    with pytest.raises(RuntimeError, match=r"Pass an input as fold\(model, example\)"):
        fold(model)
    x = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    for example in (x, (x,), {"x": x, "offset": 1.0}):
        folded = fold(model, example)
        assert_plain(folded)
        assert difference(model, folded, x) < 1e-10


def test_an_operation_of_the_user_is_seen():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

    class Model(Branches):
        def forward(self, x):
            y = self.conv(x)
            return self.norm(y) + Double.apply(y)

    model = trained(Model("alone"), 16, 4, 8, 8)
    folded = fold(model, torch.randn(2, 4, 8, 8, dtype=torch.float64))
    assert isinstance(folded.norm, nn.Conv2d)


# Errors


@pytest.mark.parametrize("example", [None, torch.randn(2, 3, 6, 6)], ids=["traced", "recorded"])
def test_nothing_to_fold_gives_a_copy_and_says_so(example):
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    folded = fold(plain, example)
    assert folded[0] is not plain[0]
    assert torch.equal(folded[0].weight, plain[0].weight)
    assert not folded.training
    report = folded.fold_report
    assert (report.materialized, report.merged, report.replaced, report.kept) == ((), {}, {}, {})
    assert str(report).splitlines()[0] == "nothing to fold"
    first = fold(nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3)), example)
    assert "0: kept, since its input is not the output of a linear layer" in str(first.fold_report)
    batchwise = fold(nn.Sequential(nn.Conv2d(3, 4, 3), DecorrelatedBatchNorm2d(4, track_running_stats=False)), example)
    assert "1: kept, since it normalizes by the batch in evaluation too" in str(batchwise.fold_report)


def test_not_a_model():
    with pytest.raises(TypeError, match=r"fold needs a torch\.nn\.Module; got Tensor"):
        fold(torch.eye(3))


def test_outputs_that_differ_are_noticed():
    class Counting(Branches):
        calls = 0

        def forward(self, x):
            Counting.calls += 1
            return self.norm(self.conv(x)) + Counting.calls

    with pytest.raises(RuntimeError, match="fold changed the outputs on the example"):
        fold(trained(Counting("alone"), 16, 4, 8, 8), torch.randn(2, 4, 8, 8, dtype=torch.float64))


def test_random_numbers_are_the_same_before_and_after_and_the_state_is_kept():
    class Noisy(Branches):
        def forward(self, x):
            return self.norm(self.conv(x)) + torch.randn_like(x)

    model = trained(Noisy("alone"), 16, 4, 8, 8)
    x = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    state = torch.get_rng_state()
    assert fold(model, x).fold_report.difference < 1e-10
    assert torch.equal(torch.get_rng_state(), state)


# Life cycle


def test_the_model_is_untouched_and_the_copy_is_its_own(tmp_path):
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    folded = fold(model)
    assert model.training
    assert not folded.training
    with torch.no_grad():
        for p in folded.parameters():
            p.zero_()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    torch.save(folded, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert loaded.fold_report == folded.fold_report
    copy.deepcopy(folded)


def test_memory_format_is_kept():
    model = trained(nn.Sequential(nn.Conv2d(4, 8, 3), DecorrelatedBatchNorm2d(8)), 16, 4, 8, 8)
    folded = fold(model.to(memory_format=torch.channels_last))
    assert folded[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_folding_twice_finds_nothing():
    assert str(fold(fold(network())).fold_report) == "nothing to fold"


def test_report_reads_well():
    report = FoldReport(("stem.weight",), {"bn1": "conv1"}, {"bn2": "it is used 2 times"}, {"bn3": "why"}, 1.23e-12)
    assert str(report).splitlines() == [
        "stem.weight: parametrization materialized",
        "bn1: merged into conv1",
        "bn2: replaced by a 1x1 convolution, since it is used 2 times",
        "bn3: kept, since why",
        "largest difference on the example: 1e-12 of the largest output",
    ]
