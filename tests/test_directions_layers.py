"""Directions layer by layer: SeFa's, the Jacobian's and joint ones of an EigenGAN, and of blocks of any generator."""

import copy
import threading

import numpy as np
import pytest
import torch
from torch import nn

from orthocond.directions import (
    diagonalize,
    eigengan_directions,
    jacobian_directions,
    joint_directions,
    rotate,
    sefa,
)
from orthocond.directions.basis import in_blocks
from orthocond.gans import EigenGenerator
from orthocond.lab.generation.directions import directions_of, find_directions, kinds_of


class Linear(nn.Module):
    """Images are a matrix times the latents, so that JᵀJ is known."""

    def __init__(self, z_dim=5):
        super().__init__()
        self.z_dim = z_dim
        self.matrix = nn.Parameter(torch.randn(12, z_dim))

    def forward(self, z):
        return (z @ self.matrix.mT).unflatten(1, (1, 3, 4))


class Uncalled(Linear):
    """A generator that may not be called."""

    def forward(self, z):
        raise AssertionError


@pytest.fixture
def eigengan():
    g = EigenGenerator(16, 3, noise_dim=4, base_channels=4)
    for layer in g.subspaces:
        layer.weight.data = torch.randn_like(layer.weight)
        layer.scale.data = torch.rand(3) + 0.5
    return g


def _numpy_blocks(gram, sizes):
    """Eigenvectors of the blocks on the diagonal as rows of all latents, with their eigenvalues, largest first."""
    found, first = [], 0
    for size in sizes:
        values, vectors = np.linalg.eigh(gram[first : first + size, first : first + size])
        for value, column in zip(values, vectors.T, strict=True):
            row = np.zeros(len(gram))
            row[first : first + size] = column
            found.append((value, row))
        first += size
    return sorted(found, key=lambda pair: -pair[0])


# values


def test_jacobian_directions_of_blocks_are_eigenvectors_of_the_blocks():
    g = Linear()
    found = jacobian_directions(g, 4, blocks=[2, 3])
    a = g.matrix.detach().double().numpy()
    expected = _numpy_blocks(a.T @ a / len(a), [2, 3])
    np.testing.assert_allclose(found.importance, [value for value, _ in expected], rtol=1e-5)
    for row, (_, other) in zip(found.vectors.numpy(), expected, strict=True):
        assert abs(row @ other) == pytest.approx(1, abs=1e-5)
    assert sorted(found.names) == ["L0 jacobian 0", "L0 jacobian 1", *(f"L1 jacobian {i}" for i in range(3))]
    torch.testing.assert_close(jacobian_directions(g, 4, 2, blocks=[2, 3]).vectors, found.vectors[:2])


def test_one_block_is_all_latents():
    g = Linear()
    found = jacobian_directions(g, 4, blocks=[np.int64(5)])
    torch.testing.assert_close(found.vectors, jacobian_directions(g, 4).vectors)
    assert found.names[0] == "jacobian 0"


def test_sefa_of_eigengan_is_the_svd_of_each_layer(eigengan):
    found = directions_of(eigengan, "sefa")
    for i, layer in enumerate(eigengan.subspaces):
        mapped = (layer.scale[:, None] * layer.weight).detach().double().numpy()
        u, s, _ = np.linalg.svd(mapped, full_matrices=False)
        for j in range(3):
            (place,) = (n for n, name in enumerate(found.names) if name == f"L{i} sefa {j}")
            assert float(found.importance[place]) == pytest.approx(s[j] ** 2, rel=1e-5)
            row = found.vectors[place].double().numpy()[3 * i : 3 * i + 3]
            assert abs(row @ u[:, j]) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("kind", ["sefa", "jacobian", "joint"])
def test_kinds_of_eigengan_stay_in_their_layers(eigengan, kind):
    assert kinds_of(eigengan) == ("eigengan", "sefa", "jacobian", "joint")
    found = directions_of(eigengan, kind)
    assert len(found) == eigengan.z_dim == 6
    torch.testing.assert_close(found.vectors @ found.vectors.mT, torch.eye(6), rtol=0, atol=1e-5)
    parts = found.vectors.unflatten(1, (2, 3)).norm(dim=2)
    torch.testing.assert_close(parts.amax(1), torch.ones(6))
    rotate(eigengan, found)  # an error for directions that mix layers
    assert find_directions(eigengan, kind, 2).effect is not None


def test_sefa_of_an_orthogonal_layer_with_equal_scales_ties_within_it(eigengan):
    with torch.no_grad():
        for layer in eigengan.subspaces:
            layer.weight.copy_(torch.linalg.qr(layer.weight.mT)[0].mT)
            layer.scale.fill_(2.0)
    found = directions_of(eigengan, "sefa")
    assert len(found.ties) == 2
    assert [{found.names[i][:2] for i in group} for group in found.ties] == [{"L0"}, {"L1"}]


@pytest.mark.parametrize("kind", ["sefa", "jacobian", "joint"])
def test_a_layer_without_effect_has_a_basis_of_tied_directions(eigengan, kind):
    eigengan.subspaces[0].scale.data.zero_()
    found = directions_of(eigengan, kind)
    torch.testing.assert_close(found.vectors @ found.vectors.mT, torch.eye(6), rtol=0, atol=1e-5)
    assert [name[:2] for name in found.names] == ["L1"] * 3 + ["L0"] * 3
    assert found.importance[3:].tolist() == [0, 0, 0]
    assert (3, 4, 5) in found.ties


def test_sefa_of_layers_is_shown_by_effect(eigengan):
    eigengan.subspaces[0].scale.data.mul_(100)  # lengths in another feature space, which importances are
    found = find_directions(eigengan, "sefa")
    assert found.effect.tolist() == sorted(found.effect.tolist(), reverse=True)


class Subspace(nn.Module):
    def __init__(self, weight, scale):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.ones(weight)), nn.Parameter(torch.ones(scale))


@pytest.mark.parametrize(
    "subspaces",
    [
        [nn.Linear(12, 2), nn.Linear(12, 3)],  # no scale
        [nn.Linear(2, 12), nn.Linear(3, 12)],
        [Subspace((2, 12), ()), Subspace((3, 12), ())],
        [Subspace((2, 12), 2), Subspace((2, 12), 2)],  # four directions of five latents
        [Subspace((5, 2, 6), 5)],
    ],
    ids=["no scale", "transposed", "one scale", "too few", "no matrix"],
)
def test_layers_that_are_no_subspaces_are_no_eigengan(subspaces):
    g = Linear()
    g.subspaces = nn.ModuleList(subspaces)
    assert "eigengan" not in kinds_of(g)
    assert joint_directions(g, 4).names == tuple(f"joint {i}" for i in range(5))
    assert directions_of(g, "jacobian").names == tuple(f"jacobian {i}" for i in range(5))
    with pytest.raises(TypeError, match=r"weight \(directions, features\) and a scale \(directions,\)"):
        eigengan_directions(g)
    if len(subspaces) > 1:
        assert kinds_of(g) == ("axes", "jacobian", "joint")
        with pytest.raises(ValueError, match="one layer that all latents go through; Linear has 2"):
            directions_of(g, "sefa")


def test_an_attribute_that_is_called_subspaces_may_be_anything():
    g = Linear()
    g.subspaces = 4
    assert joint_directions(g, 4).names == tuple(f"joint {i}" for i in range(5))


def test_sefa_takes_no_layer_for_a_subspace():
    with pytest.raises(TypeError, match="got Subspace"):
        sefa(Subspace((12, 6), 12))


def test_blocks_are_joined_by_importance():
    parts = [jacobian_directions(Linear(2), 2), jacobian_directions(Linear(3), 2)]
    found = in_blocks(parts)
    assert found.importance.tolist() == sorted(torch.cat([part.importance for part in parts]).tolist(), reverse=True)
    assert found.method == "jacobian"
    assert found.ties == ()


# life cycle


def test_a_rotated_module_is_a_copy():
    g = Linear()
    turned = rotate(g, torch.eye(5))
    z, before = torch.randn(2, 5), copy.deepcopy(g)
    with torch.no_grad():
        g.matrix.zero_()
    assert torch.equal(turned(z), before(z))


def test_a_module_that_cannot_be_copied_is_wrapped_as_it_is():
    g = Linear()
    g.lock = threading.Lock()
    z = torch.randn(2, 5)
    assert torch.equal(rotate(g, torch.eye(5))(z), g(z))


def test_a_rotation_that_did_not_come_to_rest_says_so(monkeypatch, tmp_path):
    g = EigenGenerator(16, 4, noise_dim=4, base_channels=4)
    rested = joint_directions(g, 8)
    assert rested.converged
    assert "limit" not in str(rested)
    monkeypatch.setattr(diagonalize, "_MOST_STEPS", 1)
    stopped = joint_directions(g, 8)
    assert not stopped.converged
    assert "stopped at the limit of steps" in str(stopped)
    stopped.save(tmp_path / "joint.json")
    assert not type(stopped).load(tmp_path / "joint.json").converged


# errors


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"blocks": [2, 2]}, "of sum 5"),
        ({"blocks": [5, 0]}, "at least 1"),
        ({"blocks": [2, 3], "method": "krylov"}, "use 'exact'"),
        ({"blocks": (size for size in [2, 2])}, r"of sum 5, as many as latents; got \[2, 2\]"),
        ({"tie_tol": -1.0}, "tie_tol"),
    ],
)
def test_errors_of_blocks(settings, text):
    with pytest.raises(ValueError, match=text):
        jacobian_directions(Uncalled(), torch.zeros(4, 5), **settings)


@pytest.mark.parametrize("blocks", [5, [2.5, 2.5], "ab"])
def test_blocks_that_are_no_sizes(blocks):
    with pytest.raises(TypeError, match=r"a list of sizes such as \[6, 6\]"):
        jacobian_directions(Uncalled(), torch.zeros(4, 5), blocks=blocks)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"normalize": "max"}, r"joint_directions\(normalize=...\) needs one of 'trace', 'norm', 'none'"),
        ({"starts": 0}, r"joint_directions\(starts=...\)"),
        ({"tie_tol": -1.0}, r"joint_directions\(tie_tol=...\)"),
        ({"weights": torch.ones(3)}, "4 finite numbers"),
        ({"blocks": []}, "of sum 5"),
    ],
)
def test_settings_are_checked_before_the_generator_is_called(settings, text):
    with pytest.raises(ValueError, match=text):
        joint_directions(Uncalled(), torch.zeros(4, 5), **settings)
