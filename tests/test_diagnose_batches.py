"""What `diagnose` takes: batches, loaders, models without a loss."""

import pytest
import torch
from diagnose_helpers import IMAGES, LABELS, WithLinear, network, stem
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import orthocond as oc
from orthocond.monitor import diagnose
from orthocond.monitor.model_call import first_batch

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


@pytest.mark.parametrize("form", ["batch", "batch[0]"])
def test_advice_names_the_input_as_the_batch_has_it(form):
    images = IMAGES.cumsum(-1).cumsum(-2)
    batch = {"batch": images, "batch[0]": (images, LABELS)}[form]
    advice = diagnose(stem(), batch, lambda y, *_: y.mean())["conv1"].advice
    assert f"oc.whitening_init_(model.conv1, {form})" in [each.code for each in advice]


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
    class Model(WithLinear):
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
    class Constant(WithLinear):
        def forward(self, x):
            return self.fc(x).detach()

    with pytest.raises(ValueError, match="depends on the parameters"):
        diagnose(Constant(), torch.randn(3, 4))
