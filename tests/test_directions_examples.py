"""The example, and generators that somebody else trained where there are any."""

import os
import runpy
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from orthocond.directions import Directions, axes, joint_directions, off_diagonal_energy

ROOT = Path(__file__).parents[1]
FOLDER = Path(os.environ.get("ORTHOCOND_GENERATORS", "generators"))


def test_the_example_writes_directions_and_a_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["example", str(tmp_path)])
    runpy.run_path(str(ROOT / "examples" / "directions_of_your_generator.py"), run_name="__main__")
    found = Directions.load(tmp_path / "directions.json")
    assert (len(found), found.z_dim, found.method) == (16, 16, "joint")
    with Image.open(tmp_path / "directions.png") as picture:
        assert picture.height > 6 * 96
    assert "joint: 16 directions of 16 dimensions" in capsys.readouterr().out


@pytest.fixture(scope="module")
def foreign():
    return runpy.run_path(str(ROOT / "benchmarks" / "foreign_generators.py"))


def test_the_networks_of_others_have_the_shapes_that_are_declared(foreign):
    assert foreign["Decoder"](3)(torch.zeros(2, 10)).shape == (2, 3, 64, 64)
    assert foreign["Face32"]()(torch.zeros(2, 100, 1, 1)).shape == (2, 3, 32, 32)


@pytest.mark.skipif(not FOLDER.is_dir(), reason="ORTHOCOND_GENERATORS names no folder with trained generators")
def test_a_decoder_that_was_trained_to_be_disentangled_has_its_axes_as_joint_directions(foreign):
    generator = foreign["decoder"](FOLDER / "disvae-btcvae_celeba.pt")
    found = joint_directions(generator, 64)
    assert found.vectors.abs().amax(1).min() > 0.85
    assert found.agreement > 0.999
    assert found.energies["joint"] < found.energies["axes"] < 0.15
    other = off_diagonal_energy(generator, axes(10), 32)
    assert off_diagonal_energy(generator, found, 32) == pytest.approx(other, abs=0.03)
