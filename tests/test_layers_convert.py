"""Which layer a converted batch normalization follows, by the code of the model."""

import pytest
from torch import nn

import orthocond as oc


class Stem(nn.Module):
    """A network whose order is in its code, with several uses of a layer if asked for."""

    def __init__(self, way):
        super().__init__()
        self.norm, self.other, self.conv, self.way = nn.BatchNorm2d(32), nn.Conv2d(3, 32, 1), nn.Conv2d(3, 32, 3), way

    def forward(self, x):
        y = self.conv(x)
        if self.way == "twice":
            return self.norm(y) + self.norm(self.other(x)).mean()
        if self.way == "changed":
            y = y + 1
        if self.way == "values" and y.mean() > 0:
            y = -y
        return self.norm(y)


@pytest.mark.parametrize(("way", "follows"), [("plain", True), ("twice", False), ("changed", False), ("values", False)])
def test_conversion_reads_the_order_from_the_code_of_a_model(way, follows):
    model = oc.convert_batchnorm(Stem(way), "norm")
    assert model.norm.follows is (model.conv if follows else None)


def test_conversion_does_not_call_the_hooks_of_a_model():
    model, called = Stem("plain"), []
    model.register_forward_hook(lambda *_: called.append(1))
    assert oc.convert_batchnorm(model, "norm").norm.follows is None
    assert not called
