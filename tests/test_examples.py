"""Each example runs, is quick, and shows what it promises."""

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def run(capsys, monkeypatch):
    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_each_says_what_it_is(path):
    text = ast.get_docstring(ast.parse(path.read_text()))
    assert text.count("\n") >= 3
    assert text.splitlines()[0].endswith(".")
    tests = "".join(test.read_text() for test in Path(__file__).parent.glob("test_*.py"))
    assert f'"{path.name}"' in tests  # and is run


def numbers(text, row):
    """The numbers of the row that begins with these words."""
    (line,) = [line for line in text.splitlines() if line.startswith(row)]
    return [float(n) for n in re.findall(r"-?\d+\.?\d*(?:e[+-]?\d+)?", line.removeprefix(row))]


def test_treat_your_model(run):
    text = run("treat_your_model.py")
    plain, treated, white = (numbers(text, row) for row in ("as it is", "oc.treat, NOG and OLR", "oc.whitening_init_"))
    assert min(plain[0], treated[0], white[0]) > 80  # percent; chance is 17
    assert white[1] < 2 < 100 < plain[1] == treated[1]
    assert white[2] < treated[2] < plain[2]


def test_decorrelated_batchnorm(run):
    text = run("decorrelated_batchnorm.py")
    (change,) = numbers(text, "Largest change of an output by the conversion:")
    assert change < 1e-4
    assert numbers(text, "nn.BatchNorm2d")[2] > 0.1
    assert numbers(text, "oc.DecorrelatedBatchNorm2d")[2] < 0.002


def test_covariance_pooling(run):
    text = run("covariance_pooling.py")
    assert "Hand-written: gradients are not finite at step 0" in text
    assert "NaN begins in the backward of torch.linalg.eigh, called in layer 'pool'" in text
    assert "    oc.sqrtm(cov)" in text
    assert numbers(text, "oc.CovariancePool2d(): loss")[1] > 90


def test_style_transfer(run, tmp_path):
    image = pytest.importorskip("PIL.Image")
    text = run("style_transfer.py", "--output", tmp_path / "new" / "style.png")
    with image.open(tmp_path / "new" / "style.png") as picture:
        assert picture.size == (5 * 264, 284)
    assert numbers(text, "colors")[0] < 0.01 < 0.2 < numbers(text, "content")[0]


def test_diagnose(run):
    text = run("diagnose.py")
    assert "model.bn1 = oc.DecorrelatedBatchNorm2d(64, groups=4)" in text
    assert "bn1    rank 27 of 64 → 16 of 16" in text
    kappa = re.search(r"bn1 .*κ on the range (\S+) → (\S+)", text)
    assert float(kappa[2]) < 20 < 1e4 < float(kappa[1])


def test_two_processes():
    result = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / "two_processes.py")], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("relative difference") == 4


def test_fold_and_onnx(run, tmp_path):
    pytest.importorskip("onnxruntime")
    text = run("fold_and_onnx.py", "--output", tmp_path / "model.onnx")
    assert "1: merged into 0" in text
    assert numbers(text, "onnxruntime, 3 images: relative difference")[0] < 1e-4
    assert (tmp_path / "model.onnx").stat().st_size > 1000


def test_nog_beside_muon(run):
    text = run("nog_beside_muon.py")
    sgd, nog = (numbers(text, row) for row in ("SGD   ", "SGD, NOG of the update"))
    assert nog[2] > 5 * sgd[2]  # even singular values
    assert ("torch.optim.Muon" in text) == hasattr(torch.optim, "Muon")


@pytest.mark.parametrize(
    ("package", "name", "steps", "expected"),
    [
        ("lightning", "lightning_loop.py", "32 treated steps", 80),
        ("transformers", "hugging_face_trainer.py", "12 matrices treated in 100 steps", 80),
    ],
)
def test_loops_of_others(package, name, steps, expected):
    """In a process of its own: these packages change warnings and logging. `make test-integrations` installs them."""
    pytest.importorskip(package, reason=f"needs {package}; make test-integrations installs it")
    result = subprocess.run([sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert steps in result.stdout
    assert int(re.search(r"accuracy (\d+)%", result.stdout)[1]) > expected
