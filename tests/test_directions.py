"""Directions as a value, closed-form directions, and effect sizes."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from orthocond import orthogonal
from orthocond.directions import Directions, axes, effect_sizes, eigengan_directions, sefa
from orthocond.gans import EigenGenerator, SimpleGenerator


class Linear(nn.Module):
    """Images (n, 1, 4, 5) that are a linear function of the latents."""

    def __init__(self, z_dim=6, dtype=torch.float64):
        super().__init__()
        self.z_dim = z_dim
        self.register_buffer("a", torch.randn(z_dim, 20, dtype=dtype))

    def forward(self, z):
        return (z @ self.a).reshape(-1, 1, 4, 5)


def numpy_sefa(a, normalize):
    """Squared singular values and right singular vectors of A (outputs, z_dim) by NumPy."""
    a = a.detach().double().numpy()
    if normalize:
        a = a / np.linalg.norm(a, axis=1, keepdims=True)
    _, s, vt = np.linalg.svd(a, full_matrices=False)
    return torch.from_numpy(s**2), torch.from_numpy(vt)


# values


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(
    ("layer", "matrix"),
    [
        (nn.Linear(7, 40), lambda w: w),
        (nn.ConvTranspose2d(7, 5, 4), lambda w: w.reshape(7, -1).T),
        (nn.Conv2d(7, 5, 4, padding=3), lambda w: w.permute(0, 2, 3, 1).reshape(-1, 7)),
    ],
)
def test_sefa_is_the_svd_of_numpy(layer, matrix, normalize):
    layer = layer.double()
    values, vectors = numpy_sefa(matrix(layer.weight), normalize)
    found = sefa(layer, normalize)
    torch.testing.assert_close(found.importance, values, rtol=1e-10, atol=0)
    torch.testing.assert_close((found.vectors * vectors).sum(1).abs(), torch.ones(7).double(), rtol=0, atol=1e-9)


def test_sefa_counts_each_unit_alike():
    """One loud unit decides alone, unless units are scaled."""
    a = torch.tensor([[100.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    assert sefa(a, normalize=False).vectors[0].tolist() == [1, 0]
    assert sefa(a).vectors[0].tolist() == [0, 1]
    assert sefa(a).importance.tolist() == [2, 1]


def test_sefa_of_a_dead_unit():
    a = torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 1e-30]], dtype=torch.float64)
    torch.testing.assert_close(sefa(a).importance, torch.ones(2).double())


def test_sefa_of_several_layers_stacks_them():
    one, two = nn.Linear(5, 8), nn.ConvTranspose2d(5, 3, 2)
    stacked = torch.cat([one.weight, two.weight.flatten(1).mT])
    torch.testing.assert_close(sefa([one, two]).vectors, sefa(stacked).vectors)


def test_sefa_moves_the_first_layer_most():
    """Oracle by brute force: no random direction beats the first one, none is below the last."""
    layer = SimpleGenerator(size=16, z_dim=6, width=4).first_projection
    found = sefa(layer, normalize=False)
    n = nn.functional.normalize(torch.randn(500, 6), dim=1)
    moved = (layer(n[:, :, None, None]) - layer(torch.zeros(1, 6, 1, 1))).flatten(1).square().sum(1)
    assert found.importance[-1] <= moved.min()
    assert moved.max() <= found.importance[0]


def test_effect_sizes_of_a_linear_generator():
    g = Linear()
    n = nn.functional.normalize(torch.randn(3, 6, dtype=torch.float64), dim=1)
    expected = ((n @ g.a).square().sum(1) / 20).sqrt()
    for step in (0.1, 1.0, 3.0):
        torch.testing.assert_close(effect_sizes(g, n, 5, step=step), expected)


def test_effect_size_is_the_mean_over_samples_of_a_curved_generator():
    class Square:
        z_dim = 2

        def __call__(self, z):
            return z[:, :1, None, None].square() * torch.ones(1, 1, 2, 2)

    z = torch.tensor([[1.0, 0.0], [3.0, 0.0]])
    # ((z + s)² - (z - s)²) / 2s = 2z whatever s is
    expected = torch.tensor([(4 + 36) / 2, 0.0]).sqrt()
    torch.testing.assert_close(effect_sizes(Square(), torch.eye(2), z, step=0.5), expected)


def test_effect_of_a_region():
    g = Linear()
    mask = torch.zeros(4, 5)
    mask[1:3, 2:4] = 1
    inside = g.a.reshape(6, 4, 5)[:, 1:3, 2:4].flatten(1).square().mean(1).sqrt()
    torch.testing.assert_close(effect_sizes(g, torch.eye(6).double(), 3, mask=mask), inside)
    torch.testing.assert_close(effect_sizes(g, torch.eye(6).double(), 3, mask=(2, 3, 2, 2)), inside)
    torch.testing.assert_close(effect_sizes(g, torch.eye(6).double(), 3, mask=(2, 3, 1.6, 1.7)), inside)  # rounded
    for bad in ((2, 3, 2), (2, 3, math.nan, 2), (2, math.inf, 2, 2), (2, 3, True, 2), (2, 3, "2", 2)):
        with pytest.raises(ValueError, match=r"a region \(center_row, center_col, height, width\); got"):
            effect_sizes(g, torch.eye(6).double(), 3, mask=bad)


def test_eigengan_directions():
    g = EigenGenerator(size=16, directions=3, noise_dim=4, base_channels=4)
    with torch.no_grad():
        g.subspaces[0].scale.copy_(torch.tensor([1.0, -20.0, 3.0]))
        g.subspaces[1].weight[2] *= 20
    found = eigengan_directions(g)
    assert found.names[:3] == ("L1 D2", "L0 D1", "L1 D0")
    torch.testing.assert_close(found.importance[:3], torch.tensor([30.0, 20.0, 4.5]))
    assert found.vectors[0].argmax() == 5
    assert found.vectors[1].argmax() == 1
    assert found.ties == ()
    assert eigengan_directions(g, layer=0).names == ("L0 D1", "L0 D2", "L0 D0")


def test_eigengan_directions_move_their_own_subspace():
    """Oracle: the change of a subspace's output for one sigma has the length of the importance."""
    g = EigenGenerator(size=16, directions=3, noise_dim=4, base_channels=4)
    found = eigengan_directions(g)
    for n, importance in zip(found.vectors, found.importance, strict=True):
        moved = [s(c) - s(0 * c) for s, c in zip(g.subspaces, n.split(3), strict=True)]
        torch.testing.assert_close(torch.cat(moved).norm(), importance)


def test_axes():
    found = axes(3)
    assert torch.equal(found.vectors, torch.eye(3))
    assert found.names == ("z0", "z1", "z2")
    assert found.ties == ()
    assert axes(3, torch.tensor([1.0, 3.0, 3.0])).names == ("z1", "z2", "z0")


# ties


def test_orthogonal_weights_tie():
    layer = orthogonal(nn.ConvTranspose2d(8, 16, 4))
    assert sefa(layer, normalize=False).ties == (tuple(range(8)),)


def test_ties_are_chains_of_neighbors():
    def ties(*values, tol=0.01):
        return Directions(torch.eye(len(values)), torch.tensor(values), tie_tol=tol).ties

    assert ties(10.0, 9.95, 5.0, 4.96, 4.93, 1.0) == ((0, 1), (2, 3, 4))
    assert ties(3.0, 2.0, 1.0) == ()
    assert ties(3.0, 2.0, 1.0, tol=0.5) == ((0, 1, 2),)
    assert ties(1.0, 1e-9, 0.0) == ((1, 2),)  # rounding errors of zero
    assert ties(1.0, 1e-3, 0.0) == ()
    assert ties(0.0, 0.0) == ((0, 1),)
    assert ties(2.0, 2.0, tol=None) == ()


# value object


def test_selection():
    found = Directions(torch.eye(4), torch.tensor([4.0, 2.0, 2.0, 1.0]), ("a", "b", "c", "d"), effect=torch.rand(4))
    part = found[[2, 0]]
    assert part.names == ("c", "a")  # in the order that was asked for
    assert torch.equal(part.vectors, torch.eye(4)[[2, 0]])
    assert torch.equal(part.importance, torch.tensor([2.0, 4.0]))
    assert torch.equal(part.effect, found.effect[[2, 0]])
    assert part.ties == ()
    assert found[1:3].ties == ((0, 1),)
    assert found[[2, 3, 0, 1]].ties == ((0, 3),)
    assert found[-1].names == ("d",)
    assert len(found[:2]) == 2
    with pytest.raises(IndexError):
        found[4]


def test_directions_go_through_a_file(tmp_path):
    path = tmp_path / "found.json"
    effect = torch.tensor([0.5, 0.25, 0.125])
    found = dataclasses.replace(sefa(torch.randn(9, 5), k=3), names=("Brille", "light → dark", "3"), effect=effect)
    found.save(path)
    again = Directions.load(path)
    for name in ("vectors", "importance", "effect"):
        assert torch.equal(getattr(again, name), getattr(found, name))
    assert (again.names, again.method, again.tie_tol) == (found.names, "sefa", found.tie_tol)
    told = Directions(torch.eye(4), torch.arange(4.0), tied=((0, 3), (1, 2)))
    told.save(path)
    assert Directions.load(path).ties == told.ties == ((0, 3), (1, 2))
    assert told[[3, 2, 0]].ties == ((0, 2),)
    axes(2).save(path)
    assert Directions.load(path).effect is None


def test_a_file_of_the_explorer_is_read(tmp_path):
    path = tmp_path / "explorer.json"
    row = {"name": "smile", "vector": [0.6, 0.8, 0], "importance": 2}
    path.write_text(json.dumps({"z_dim": 3, "kind": "joint", "directions": [row]}))
    found = Directions.load(path)
    assert found.names == ("smile",)
    assert (found.method, found.z_dim, found.ties) == ("joint", 3, ())
    torch.testing.assert_close(found.vectors, torch.tensor([[0.6, 0.8, 0.0]]))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no json", "holds no directions"),
        ("[]", "holds no directions"),
        ('{"z_dim": 2, "kind": "x", "directions": []}', "needs vectors of z_dim = 2"),
        ('{"z_dim": 2, "kind": "x", "directions": [{"name": "a", "vector": [1, 0]}]}', "one number for each of 1"),
        ('{"z_dim": 2, "kind": "x", "directions": [{"vector": [1, 0], "importance": 1}]}', "KeyError: 'name'"),
        ('{"z_dim": 3, "kind": "x", "directions": [{"name": "a", "vector": [1, 0], "importance": 1}]}', "z_dim = 3"),
        ('{"z_dim": 2, "kind": "x", "directions": [{"name": "a", "vector": [1, 1], "importance": 1}]}', "length 1"),
        (
            '{"z_dim": 1, "kind": "x", "ties": [[0,1]], "directions": [{"name": "a", "vector": [1], "importance": 1}]}',
            r"indices 0 to 0.*got \(\(0, 1\),\)",
        ),
        ('{"z_dim": 2, "kind": "x", "directions": [{"name": "a", "vector": "no", "importance": 1}]}', "no directions"),
    ],
)
def test_a_file_without_directions(tmp_path, text, words):
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ValueError, match=words):
        Directions.load(tmp_path / "bad.json")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"z_dim": 2, "kind": "x", "directions": 5}',
        '{"z_dim": 2, "kind": "x", "directions": [null]}',
        '{"z_dim": 1, "kind": "x", "directions": [{"name": "a", "vector": [%s], "importance": 1}]}' % ("9" * 400),
        '{"z_dim": 1, "kind": "x", "directions": [{"name": "a", "vector": [{}], "importance": 1}]}',
        '{"z_dim": 1, "kind": "x", "directions": [{"name": "a", "vector": [1], "importance": %s}]}' % ("9" * 400),
        '{"z_dim": 1, "kind": "x", "directions": [{"name": "a", "vector": [1], "importance": 1, "effect": {}}]}',
        '{"z_dim": 1, "kind": "x", "ties": 5, "directions": [{"name": "a", "vector": [1], "importance": 1}]}',
        '{"z_dim": 1, "kind": "x", "ties": [[0.5]], "directions": [{"name": "a", "vector": [1], "importance": 1}]}',
        '{"z_dim": 1, "kind": "x", "tie_tol": [], "directions": [{"name": "a", "vector": [1], "importance": 1}]}',
        '{"z_dim": 1, "kind": "x", "tie_tol": "no", "directions": [{"name": "a", "vector": [1], "importance": 1}]}',
        '{"z_dim": 1, "kind": "x", "tie_tol": %s, "directions": [{"name": "a", "vector": [1], "importance": 1}]}'
        % ("9" * 400),
    ],
    ids=lambda text: text[:20] + text[30:60],
)
def test_an_absurd_file_is_a_value_error(tmp_path, text):
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ValueError, match=r"bad\.json holds no directions"):
        Directions.load(tmp_path / "bad.json")


def test_frozen_and_measured():
    g = Linear(dtype=torch.float32)
    found = axes(6)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.importance = torch.zeros(6)
    measured = found.measure(g, 4)
    torch.testing.assert_close(measured.effect, effect_sizes(g, found, 4))
    assert found.effect is None
    assert "effect" in str(measured)


def test_many_ties_are_shortened():
    assert "… (19 in all)" in str(sefa(torch.eye(20)))


def test_dtype_and_same_result_twice():
    layer = nn.Linear(5, 30)
    first, again = sefa(layer), sefa(layer)
    assert first.vectors.dtype == first.importance.dtype == torch.float32
    assert torch.equal(first.vectors, again.vectors)
    assert (first.vectors.gather(1, first.vectors.abs().argmax(1, keepdim=True)) > 0).all()
    assert not first.vectors.requires_grad


def test_half_precision_gives_directions_of_unit_length():
    layer = nn.Linear(5, 30)
    half = sefa(layer.bfloat16())
    assert half.vectors.dtype == torch.float32
    torch.testing.assert_close(half.vectors, sefa(layer.float()).vectors)


# errors

ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: Directions(torch.eye(3)[:, :2], torch.ones(3)), ValueError, "at most as many directions .* 2; got 3"),
        (lambda: Directions(2 * torch.eye(2), torch.ones(2)), ValueError, "length 1"),
        (lambda: Directions(torch.eye(2) * torch.nan, torch.ones(2)), ValueError, "length 1"),
        (lambda: Directions(torch.eye(2), torch.tensor([1.0, torch.nan])), ValueError, "finite numbers"),
        (lambda: Directions(torch.eye(2), torch.tensor([1.0, -1.0])), ValueError, "at least 0"),
        (lambda: Directions(torch.eye(2), ONE), ValueError, "one number for each of 2"),
        (lambda: Directions(torch.eye(2), torch.ones(2), ("a",)), ValueError, "one name for each of 2"),
        (lambda: Directions(torch.ones(2), ONE), ValueError, r"\(k, z_dim\)"),
        (lambda: Directions([[1.0]], ONE), TypeError, "torch.Tensor"),
        (lambda: Directions(torch.eye(2), torch.ones(2), tie_tol=-1.0), ValueError, "at least 0"),
        (lambda: Directions(torch.eye(2), torch.ones(2), effect=ONE), ValueError, "effect"),
        (lambda: axes(3)[[]], ValueError, "selects none"),
        (lambda: axes(0), ValueError, "at least 1"),
        (lambda: axes(2, torch.tensor([1.0, torch.inf])), ValueError, "finite"),
        (lambda: sefa(nn.Linear(3, 5), k=4), ValueError, "at most as many directions as latent dimensions, 3; got k=4"),
        (lambda: sefa(nn.Linear(3, 5), k=0), ValueError, "at least 1"),
        (lambda: sefa(nn.ConvTranspose2d(4, 4, 2, groups=2)), ValueError, "without groups"),
        (lambda: sefa(torch.zeros(3, 3)), ValueError, "not zero"),
        (lambda: sefa(torch.eye(3) / 0), ValueError, "finite"),
        (lambda: sefa(torch.rand(3, 3, 3)), ValueError, r"\(outputs, z_dim\)"),
        (lambda: sefa([]), ValueError, "at least one layer"),
        (lambda: sefa([nn.Linear(3, 5), nn.Linear(4, 5)]), ValueError, r"\[3, 4\]"),
        (lambda: sefa(SimpleGenerator(size=8, width=4)), TypeError, "first layer"),
        (lambda: eigengan_directions(SimpleGenerator(size=8, width=4)), TypeError, "subspaces"),
        (lambda: eigengan_directions(EigenGenerator(8, 2, 4, 4), layer=1), ValueError, "from 0 to 0"),
        (lambda: effect_sizes(lambda z: z, axes(2)), TypeError, "z_dim of this function is None"),
        (lambda: effect_sizes(3, axes(2)), TypeError, "can be called"),
        (lambda: effect_sizes(Linear(), axes(2)), ValueError, "6 latents; got 2"),
        (lambda: effect_sizes(Linear(), axes(6), torch.zeros(2, 5)), ValueError, r"\(n, 6\)"),
        (lambda: effect_sizes(Linear(), axes(6), torch.full((2, 6), torch.nan)), ValueError, "finite latents"),
        (lambda: effect_sizes(Linear(), axes(6), 0), ValueError, "at least 1"),
        (lambda: effect_sizes(Linear(dtype=torch.float32), axes(6), 2, step=0.0), ValueError, "above 0"),
        (lambda: effect_sizes(Linear(dtype=torch.float32), axes(6), 2, mask=torch.ones(5, 4)), ValueError, "4x5"),
    ],
)
def test_errors(make, kind, text):
    with pytest.raises(kind, match=text):
        make()


def test_more_than_one_thread():
    torch.set_num_threads(2)
    layer = nn.Linear(64, 400).double()
    values, _ = numpy_sefa(layer.weight, False)
    torch.testing.assert_close(sefa(layer, False).importance, values, rtol=1e-10, atol=0)
