"""Finding the layer before an SVD layer by the flow of data."""

import pytest
import torch
from torch import nn

from orthocond.layers import DecorrelatedBatchNorm1d, DecorrelatedBatchNorm2d, WhitenColor2d
from orthocond.monitor import ConditionMonitor, diagnose, pre_svd_layer
from orthocond.weights import SkewOrthogonalConv2d, orthogonal, spectral
from tests.test_diagnose import Attention, Functional, Residual, Tokens, X, chain, deep, frozen, two

# Finding the Pre-SVD layer


FINDER = {
    "direct": (lambda: chain(nn.Conv2d(3, 5, 3), DecorrelatedBatchNorm2d(5)), "1", "0.weight", X),
    "linear": (lambda: chain(nn.Flatten(), nn.Linear(192, 4), DecorrelatedBatchNorm1d(4)), "2", "1.weight", X),
    "bn, relu, 1x1, bn, relu, pool": (deep, "7", "3.weight", X),
    "frozen": (frozen, "7", "3.weight", X),
    "residual": (Residual, "white", "b.weight", X),
    "functional": (Functional, "white", "second", X),
    "orthogonal": (
        lambda: chain(orthogonal(nn.Conv2d(3, 5, 3)), nn.BatchNorm2d(5), DecorrelatedBatchNorm2d(5)),
        "2",
        "0.weight",
        X,
    ),
    "spectral": (lambda: chain(spectral(nn.Conv2d(3, 5, 3)), DecorrelatedBatchNorm2d(5)), "1", "0.weight", X),
    "weight norm": (
        lambda: chain(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 5, 3)), DecorrelatedBatchNorm2d(5)),
        "1",
        "0.weight",
        X,
    ),
    "transposed": (lambda: chain(nn.ConvTranspose2d(3, 5, 3), DecorrelatedBatchNorm2d(5)), "1", "0.weight", X),
    "skew": (lambda: chain(SkewOrthogonalConv2d(3, 5, 3), DecorrelatedBatchNorm2d(5)), "1", "0.weight", X),
    "tokens": (Tokens, "white", "fc.weight", torch.randint(10, (8, 5))),
    "attention": (Attention, "white", "attention.out_proj.weight", torch.randn(7, 3, 4)),
    "two, first": (two, "1", "0.weight", X),
    "two, second": (two, "4", "3.weight", X),
}


@pytest.mark.parametrize("case", FINDER)
def test_finder(case):
    make, layer, expected, batch = FINDER[case]
    model = make()
    found = pre_svd_layer(model, layer, batch)
    assert str(found) == expected
    assert found.module is model.get_submodule(found.name)
    assert found == pre_svd_layer(model, model.get_submodule(layer), batch)
    # The same layer is found while training, where the input has no gradient.
    with ConditionMonitor(model, layers=[layer]) as monitor:
        model(batch).square().mean().backward()
        monitor.step()
    assert monitor.history[0]["pre_svd"] == expected


@pytest.mark.parametrize("by_name", [True, False])
def test_finder_takes_the_content_of_whitening_and_coloring(by_name):
    class Style(nn.Module):
        def __init__(self):
            super().__init__()
            self.content, self.style, self.mix = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1), WhitenColor2d()

        def forward(self, a, b):
            a, b = self.content(a), self.style(b)
            return self.mix(content=a, style=b) if by_name else self.mix(a, b)

    model = Style()
    assert str(pre_svd_layer(model, "mix", ((X, X), None))) == "content.weight"
    found = diagnose(model, ((X, X), None), lambda y: y.square().mean())
    assert found["mix"].fed_by == ("content",)
    assert (found["mix"].samples, found["mix"].size) == (64, 4)


def test_finder_errors():
    model = Residual(nn.Conv2d(6, 6, 1))
    with pytest.raises(ValueError, match=r"that feeds 'white'; found (b|shortcut).weight, (b|shortcut).weight"):
        pre_svd_layer(model, "white", X)
    alone = chain(DecorrelatedBatchNorm2d(3))
    with pytest.raises(ValueError, match="found none: its input depends on no weight"):
        pre_svd_layer(alone, "0", X)
    with pytest.raises(ValueError, match="none named 'wite'"):
        pre_svd_layer(model, "wite", X)
    model.unused = DecorrelatedBatchNorm2d(6)
    with pytest.raises(RuntimeError, match="did not reach 'unused'"):
        pre_svd_layer(model, "unused", X)
    with pytest.raises(TypeError, match=r"needs a torch.nn.Module; got int"):
        pre_svd_layer(3, "white", X)
