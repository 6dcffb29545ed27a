"""Upsampling and convolution in one step, against the two steps: values, gradients, dtypes, life cycle."""

import pytest
import torch
from torch.nn import functional as F

from orthocond.gans import EigenGenerator, SimpleGenerator
from orthocond.gans.upsample import UpsampleConv2d


def two_steps(layer, x):
    return F.conv2d(F.interpolate(x, scale_factor=2), layer.weight, layer.bias, padding=1)


@pytest.mark.parametrize("size", [(1, 1), (2, 5), (8, 8)])
@pytest.mark.parametrize("bias", [True, False])
def test_value(size, bias):
    layer = UpsampleConv2d(3, 5, bias=bias).double()
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    torch.testing.assert_close(layer(x), two_steps(layer, x), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("weight", range(9))
def test_each_weight_alone(weight):
    """Borders included: a weight that points outside meets zeros."""
    layer = UpsampleConv2d(1, 1, bias=False)
    with torch.no_grad():
        layer.weight.zero_().view(-1)[weight] = 1.0
    x = torch.arange(1.0, 10.0).reshape(1, 1, 3, 3)
    assert torch.equal(layer(x), two_steps(layer, x))


def test_gradients():
    layer = UpsampleConv2d(2, 3).double()
    x = torch.randn(2, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    inputs = x, layer.weight, layer.bias

    def call(x, weight, bias):
        return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, x)

    assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_layouts(layout):
    layer = UpsampleConv2d(4, 6).to(memory_format=layout)
    x = torch.randn(2, 4, 4, 4).contiguous(memory_format=layout)
    torch.testing.assert_close(layer(x), two_steps(layer, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("autocast", [True, False])
def test_half_precision_takes_the_two_steps(autocast):
    layer = UpsampleConv2d(4, 6)
    x = torch.randn(2, 4, 4, 4)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        if not autocast:
            layer, x = layer.bfloat16(), x.bfloat16()
        found = layer(x)
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, two_steps(layer, x))


def test_meta_device():
    with torch.device("meta"):
        assert UpsampleConv2d(3, 5)(torch.empty(2, 3, 4, 4)).shape == (2, 5, 8, 8)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: SimpleGenerator(8, 2, channels=(4, 2), blocks="upsample"), ["blocks.0.1.weight"]),
        (
            lambda: EigenGenerator(8, 2, 3, 2),
            [
                f"blocks.0.{part}.{kind}"
                for part in ("feature_conv1.1.1", "subspace_conv2.1")
                for kind in ("weight", "bias")
            ],
        ),
    ],
)
def test_checkpoints_have_the_names_of_two_layers(make, names):
    """Weights that were trained when upsampling was a layer of its own can be loaded."""
    state = make().state_dict()
    assert set(names) <= state.keys()
    assert not any("sums" in name for name in state)
