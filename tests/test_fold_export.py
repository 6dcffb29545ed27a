"""Folded models leave torch: torch.export and ONNX."""

import warnings

import onnxruntime
import pytest
import torch
from torch import nn

from orthocond import NewtonSchulz, orthogonal, spectral
from orthocond.folding import fold
from orthocond.layers import CovariancePool2d
from tests.test_fold import network


@pytest.mark.parametrize("pool", [None, CovariancePool2d(), CovariancePool2d(solver=NewtonSchulz())], ids=str)
def test_export_agrees_for_any_batch(pool):
    folded = fold(network(pool))
    x = torch.randn(3, 3, 16, 16)
    program = torch.export.export(folded, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    for batch in (1, 5):
        x = torch.randn(batch, 3, 16, 16)
        torch.testing.assert_close(program.module()(x), folded(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pool", [None, CovariancePool2d(solver=NewtonSchulz())], ids=str)
def test_onnx_agrees_for_any_batch(pool, tmp_path):
    folded = fold(network(pool))
    path = tmp_path / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batch = torch.export.Dim("batch")
        x = torch.randn(3, 3, 16, 16)
        torch.onnx.export(folded, (x,), path, dynamo=True, dynamic_shapes=({0: batch},), verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for batch in (1, 5):
        x = torch.randn(batch, 3, 16, 16)
        (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), folded(x).detach(), rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("treat", [None, orthogonal, spectral])
def test_onnx_of_an_unfolded_model_says_fold_first(treat, tmp_path):
    conv = nn.Conv2d(3, 4, 3)
    model = (nn.Sequential(conv, CovariancePool2d()) if treat is None else treat(conv)).eval()
    with pytest.warns(UserWarning, match="Fold first"), pytest.raises(torch.onnx.errors.OnnxExporterError):
        torch.onnx.export(model, (torch.randn(3, 3, 8, 8),), tmp_path / "model.onnx", dynamo=True, verbose=False)
