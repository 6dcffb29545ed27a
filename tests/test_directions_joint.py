"""Joint directions: the diagonalizer against known bases and brute force, generators of rotated factors, rotation."""

import itertools
import math
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

import orthocond as oc
from orthocond.directions import (
    Directions,
    JointDirections,
    axes,
    effect_sizes,
    jacobian_directions,
    joint_directions,
    jointly_diagonalize,
    off_diagonal_energies,
    off_diagonal_energy,
    rotate,
    traverse,
)
from orthocond.gans import EigenGenerator, SimpleGenerator
from orthocond.metrics import activeness

F64 = torch.float64


def rotation(d, seed=0):
    return torch.linalg.qr(torch.randn(d, d, dtype=F64, generator=torch.Generator().manual_seed(seed)))[0]


def with_basis(basis, n=20, noise=0.0, seed=0):
    """Matrices (n, d, d) with a common basis of eigenvectors, plus symmetric noise."""
    rng = torch.Generator().manual_seed(seed)
    d = len(basis)
    values = torch.rand(n, d, dtype=F64, generator=rng) * torch.linspace(1, 0.3, d, dtype=F64)
    errors = noise * torch.randn(n, d, d, dtype=F64, generator=rng)
    return basis.mT @ torch.diag_embed(values) @ basis + errors + errors.mT


def off(matrices, r):
    """The energy by its definition."""
    turned = r @ matrices @ r.mT
    diagonals = torch.diag_embed(turned.diagonal(dim1=-2, dim2=-1))
    return float((turned - diagonals).square().sum() / turned.square().sum())


def cosines(a, b):
    return (a @ b.mT).abs().amax(1)


class Factors(nn.Module):
    """Each of d factors, which are the latents rotated, paints a stripe: by a sine of its own frequency."""

    def __init__(self, d=5, seed=0, dtype=F64):
        super().__init__()
        self.z_dim = d
        self.register_buffer("basis", rotation(d, seed).to(dtype))
        self.register_buffer("frequency", torch.linspace(0.4, 1.2, d, dtype=dtype))

    def forward(self, z):
        factors = (z @ self.basis.mT) * self.frequency
        return factors.sin()[:, None, None].repeat_interleave(2, 3)


# the diagonalizer


@pytest.mark.parametrize("d", [2, 3, 10, 40])
def test_matrices_with_a_common_basis(d):
    basis = rotation(d)
    found = jointly_diagonalize(with_basis(basis))
    assert cosines(found.rotation, basis).min() > 1 - 1e-7
    assert found.energies["joint"] < 1e-10 < found.energies["axes"]
    assert found.agreement > 1 - 1e-6
    assert found.converged
    torch.testing.assert_close(found.rotation @ found.rotation.mT, torch.eye(d, dtype=F64))
    means = found.diagonals.mean(0)
    assert (means.diff() <= 0).all()
    assert (found.rotation.gather(1, found.rotation.abs().argmax(1, keepdim=True)) > 0).all()


def test_noise_moves_the_basis_by_as_much():
    basis = rotation(12)
    errors = []
    for noise in (1e-4, 1e-3, 1e-2):
        matrices = with_basis(basis, 40, noise)
        found = jointly_diagonalize(matrices)
        assert found.energies["joint"] <= off(matrices, basis)
        assert found.energies["joint"] == pytest.approx(off(matrices, found.rotation), rel=1e-6)
        errors.append(float((1 - cosines(found.rotation, basis)).max().sqrt()) / noise)
    assert max(errors) < 5


def test_brute_force_over_angles_in_two_dimensions():
    for seed in range(5):
        matrices = torch.randn(6, 2, 2, dtype=F64, generator=torch.Generator().manual_seed(seed))
        matrices = matrices + matrices.mT
        grid = torch.linspace(0, math.pi / 2, 20_001, dtype=F64)
        c, s = grid.cos(), grid.sin()
        a, b, m = matrices[:, 0, 0, None], matrices[:, 1, 1, None], matrices[:, 0, 1, None]
        entries = m * (c**2 - s**2) + (b - a) * c * s
        best = 2 * entries.square().sum(0).min() / matrices.square().sum()
        assert jointly_diagonalize(matrices).energies["joint"] == pytest.approx(float(best), abs=1e-6)


def test_brute_force_over_angles_in_three_dimensions():
    matrices = with_basis(rotation(3), 5, noise=0.1)
    found = jointly_diagonalize(matrices, starts=4)
    grid = torch.linspace(-math.pi / 2, math.pi / 2, 46, dtype=F64)
    x, y, w = torch.cartesian_prod(grid, grid, grid).unbind(1)
    generators = torch.zeros(len(x), 3, 3, dtype=F64)
    for (i, j), angle in zip(((0, 1), (0, 2), (1, 2)), (x, y, w), strict=True):
        generators[:, i, j], generators[:, j, i] = angle, -angle
    turned = torch.linalg.matrix_exp(generators)
    diagonals = torch.einsum("rij,njk,rik->rni", turned, matrices, turned)
    best = float(1 - diagonals.square().sum((1, 2)).max() / matrices.square().sum())
    assert found.energies["joint"] <= best + 1e-9
    assert found.energies["joint"] > best - 0.01


def test_no_plane_can_be_improved():
    """Structureless matrices have no common basis; still every plane of the result is at its best angle."""
    x = torch.randn(10, 8, 16, dtype=F64)
    matrices = x @ x.mT
    found = jointly_diagonalize(matrices, tol=1e-6)
    for i, j in itertools.combinations(range(8), 2):
        for angle in (-0.8, -0.3, -0.01, 0.01, 0.3, 0.8):
            turn = torch.eye(8, dtype=F64)
            turn[i, i] = turn[j, j] = math.cos(angle)
            turn[i, j], turn[j, i] = math.sin(angle), -math.sin(angle)
            assert off(matrices, turn @ found.rotation) > found.energies["joint"] - 1e-9


def test_the_start_may_be_the_worst_angle():
    """At 45 degrees the slope of the energy is zero and it is largest."""
    basis = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=F64) / math.sqrt(2)
    values = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=F64)  # the mean is a multiple of the identity
    found = jointly_diagonalize(basis.mT @ torch.diag_embed(values) @ basis, starts=1)
    assert found.energies["joint"] < 1e-12
    assert found.ties == ()


def test_one_matrix_is_the_eigenproblem():
    matrix = with_basis(rotation(6), 1)
    found = jointly_diagonalize(matrix)
    torch.testing.assert_close(found.diagonals[0], torch.linalg.eigvalsh(matrix[0]).flip(0))


def test_ties():
    values = torch.tensor([[3.0, 3.0, 1.0, 2.0], [5.0, 5.0, 4.0, 1.0]], dtype=F64)
    basis = rotation(4)
    found = jointly_diagonalize(basis.mT @ torch.diag_embed(values) @ basis)
    assert found.ties == ((0, 1),)
    # equal on average is no tie if it is not equal at each matrix
    values = torch.tensor([[3.0, 1.0], [1.0, 3.0]], dtype=F64)
    assert jointly_diagonalize(torch.diag_embed(values)).ties == ()
    assert jointly_diagonalize(torch.eye(3, dtype=F64).repeat(4, 1, 1)).ties == ((0, 1, 2),)
    assert math.isnan(jointly_diagonalize(torch.eye(3, dtype=F64)[None]).agreement)


@pytest.mark.parametrize("size", [1e-300, 1e-170, 1e170, 1e300])
def test_sizes_whose_squares_vanish_or_overflow(size):
    matrices = with_basis(rotation(4), n=6, noise=0.01)
    found, scaled = jointly_diagonalize(matrices), jointly_diagonalize(size * matrices)
    torch.testing.assert_close(scaled.rotation, found.rotation)
    torch.testing.assert_close(scaled.diagonals, size * found.diagonals, rtol=1e-10, atol=0)
    assert scaled.energies == pytest.approx(found.energies)
    assert scaled.ties == found.ties


def test_weights_choose_the_matrices():
    one, two = with_basis(rotation(4, 1)), with_basis(rotation(4, 2))
    weights = torch.cat([torch.ones(20), torch.zeros(20)])
    found = jointly_diagonalize(torch.cat([one, two]), weights)
    assert cosines(found.rotation, rotation(4, 1)).min() > 1 - 1e-6
    doubled = jointly_diagonalize(torch.cat([one, two, two]))
    weighted = jointly_diagonalize(torch.cat([one, two]), 1 - weights / 2)
    assert weighted.energies["joint"] == pytest.approx(doubled.energies["joint"], rel=1e-6)


# generators


@pytest.mark.parametrize("derivative", ["forward", "reverse", "difference"])
def test_a_known_function_of_rotated_factors(derivative):
    g = Factors()
    found = joint_directions(g, 32, derivative=derivative)
    assert cosines(found.vectors, g.basis).min() > 1 - 1e-6
    assert found.energies["joint"] < 1e-6 < 0.05 < found.energies["axes"]
    assert found.agreement > 0.999
    assert found.names[0] == "joint 0"


def test_factors_of_equal_size_are_found_where_the_mean_says_nothing():
    """All factors take all values in turn, so that the mean of JᵀJ is a multiple of I and any basis diagonalizes it."""

    class Equal(Factors):
        def forward(self, z):
            return ((z @ self.basis.mT) * 1.5).sin()[:, None, None]

    g = Equal()
    factors = torch.randn(20, 5, dtype=F64)
    z = torch.cat([factors.roll(i, 1) for i in range(5)]) @ g.basis
    found = joint_directions(g, z)
    assert cosines(found.vectors, g.basis).min() > 1 - 1e-6
    assert found.ties == ()
    assert jacobian_directions(g, z).ties == ((0, 1, 2, 3, 4),)


def test_importances_are_those_of_the_jacobian():
    g = Factors()
    z = torch.randn(10, 5, dtype=F64)
    found = joint_directions(g, z)
    torch.testing.assert_close(found.importance.sum(), jacobian_directions(g, z).importance.sum())
    small = effect_sizes(g, found, z, step=1e-4).square()
    torch.testing.assert_close(found.importance, small, rtol=1e-5, atol=0)
    assert (found.importance.diff() <= 0).all()
    uniform = joint_directions(oc.Generator(g, prior="uniform", range=None), z)
    torch.testing.assert_close(uniform.importance, found.importance / 3)


def test_a_subspace_of_a_large_latent_space():
    class Wide(Factors):
        """Only the first six of many rotated factors do anything much."""

        def forward(self, z):
            factors = (z @ self.basis.mT)[:, :6] * self.frequency[:6]
            rest = 1e-3 * (z @ self.basis.mT)[:, 6:].sum(1)
            return (torch.cat([factors.sin(), factors.cos()], 1) + rest[:, None])[:, None, None]

    g = Wide(60)
    found = joint_directions(g, 24, 6)
    assert found.vectors.shape == (6, 60)
    assert cosines(found.vectors, g.basis[:6]).min() > 0.999
    assert "axes" not in found.energies
    torch.testing.assert_close(found.vectors @ found.vectors.mT, torch.eye(6, dtype=F64), rtol=0, atol=1e-8)


def test_normalizations():
    g = Factors()
    z = torch.randn(16, 5, dtype=F64)
    for normalize in ("trace", "norm", "none"):
        found = joint_directions(g, z, normalize=normalize)
        assert cosines(found.vectors, g.basis).min() > 1 - 1e-6
        energy = off_diagonal_energy(g, found, z, normalize=normalize)
        assert energy == pytest.approx(found.energies["joint"], abs=1e-9)
        assert off_diagonal_energy(g, None, z, normalize=normalize) == pytest.approx(found.energies["axes"], rel=1e-6)


def test_weights_choose_the_latents():
    g = SimpleGenerator(size=8, z_dim=4, width=4).double()
    z = torch.randn(8, 4, dtype=F64)
    chosen = joint_directions(g, z, weights=torch.tensor([1.0] * 5 + [0.0] * 3))
    torch.testing.assert_close(chosen.importance, joint_directions(g, z[:5]).importance, rtol=1e-4, atol=0)


def test_eigengan_rotates_layer_by_layer():
    g = EigenGenerator(16, 3, noise_dim=4, base_channels=4)
    found = joint_directions(g, 8)
    assert len(found) == g.z_dim == 6
    for name, vector in zip(found.names, found.vectors, strict=True):
        inside = vector[:3] if name.startswith("L0") else vector[3:]
        torch.testing.assert_close(inside.norm(), torch.tensor(1.0))
    assert found.energies["joint"] <= found.energies["axes"]
    assert sorted(found.names)[0] == "L0 joint 0"
    torch.testing.assert_close(joint_directions(g, 8, 2).vectors, found[:2].vectors)


def test_selections_and_files(tmp_path):
    found = joint_directions(Factors(), 8)
    part = found[[2, 0]]
    assert part.energies == found.energies
    assert part.names == ("joint 2", "joint 0")
    assert "off the diagonal: axes" in str(found)
    found.save(tmp_path / "joint.json")
    again = JointDirections.load(tmp_path / "joint.json")
    assert (again.method, again.energies, again.agreement) == ("joint", found.energies, found.agreement)

    class Dead(Factors):
        def forward(self, z):
            return (z @ self.basis.mT)[:, :2].tanh()[:, None, None]

    dead = joint_directions(Dead(), 8)
    assert dead.ties == ((2, 3, 4),)
    assert dead[[0, 4, 3]].ties == ((1, 2),)
    assert dead[:3].ties == ()
    dead.save(tmp_path / "dead.json")
    assert Directions.load(tmp_path / "dead.json").ties == ((2, 3, 4),)
    one = joint_directions(Factors(), 8, starts=1)
    one.save(tmp_path / "one.json")
    assert math.isnan(JointDirections.load(tmp_path / "one.json").agreement)


def test_importances_that_are_equal_in_a_file_are_no_tie(tmp_path):
    found = replace(joint_directions(Factors(), 8), importance=torch.ones(5))
    found.save(tmp_path / "joint.json")
    assert Directions.load(tmp_path / "joint.json").ties == found.ties == ()


def test_many_dimensions_are_quick():
    """128 dimensions of 64 matrices, with noise: seconds of one core, whatever the load of the machine."""
    matrices = with_basis(rotation(128), 64, 1e-3)
    start = time.process_time()
    found = jointly_diagonalize(matrices)
    assert time.process_time() - start < 30
    assert found.agreement > 0.999


# rotation


@pytest.mark.parametrize("treated", [False, True])
def test_a_rotated_simple_generator_is_exact(treated):
    g = SimpleGenerator(size=8, z_dim=5, width=4).double()
    if treated:
        oc.orthogonal(g.first_projection)
    before = g.first_projection.weight.detach().clone()
    r = rotation(5)
    turned = rotate(g, r)
    assert isinstance(turned, SimpleGenerator)
    z = torch.randn(4, 5, dtype=F64)
    torch.testing.assert_close(turned(z), g(z @ r))
    assert torch.equal(g.first_projection.weight, before)


def test_a_rotated_eigengan_is_exact():
    g = EigenGenerator(16, 3, noise_dim=4, base_channels=4).double()
    oc.orthogonal(g.subspaces[0])
    found = joint_directions(g, 6)
    turned = rotate(g, found)
    by_layer = [i for layer in "01" for i, name in enumerate(found.names) if name.startswith(f"L{layer}")]
    z, noise = torch.randn(4, 6, dtype=F64), torch.randn(4, 4, dtype=F64)
    torch.testing.assert_close(turned(z, noise), g(z @ found.vectors[by_layer], noise))
    lengths = torch.cat([layer.weight.norm(dim=1) for layer in turned.subspaces])
    torch.testing.assert_close(lengths, torch.ones(6, dtype=F64))
    one = found[[found.names.index("L1 joint 2")]]
    first_of_layer_1 = torch.eye(6, dtype=F64)[3:4]
    torch.testing.assert_close(rotate(g, one)(first_of_layer_1, noise[:1]), g(one.vectors, noise[:1]))


def test_foreign_generators_are_wrapped():
    g = Factors()
    found = joint_directions(g, 16, 2)
    turned = rotate(g, found)
    z = torch.randn(3, 5, dtype=F64)
    torch.testing.assert_close(turned.rotation @ turned.rotation.mT, torch.eye(5, dtype=F64))
    torch.testing.assert_close(turned(z), g(z @ turned.rotation))
    torch.testing.assert_close(
        traverse(turned, torch.zeros(1, 5, dtype=F64), axes(5)[:2]),
        traverse(g, torch.zeros(1, 5, dtype=F64), found),
    )
    assert off_diagonal_energy(rotate(g, joint_directions(g, 16))) < 1e-6
    assert activeness(turned).shape == (5,)


def test_a_uniform_prior_is_rotated_with_the_latents():
    dcgan = nn.Sequential(nn.ConvTranspose2d(6, 3, 8), nn.Sigmoid())
    g = oc.Generator(dcgan, 6, prior="uniform", range=(0, 1))
    turned = rotate(g, rotation(6))
    assert isinstance(turned, oc.Generator)
    torch.testing.assert_close(turned(turned.sample(5, 3)), g(g.sample(5, 3)))
    assert turned.sample(500).abs().max() > 1
    assert turned.sigma == g.sigma  # steps along directions are as long as before
    simple = oc.Generator(SimpleGenerator(size=8, z_dim=6, width=4))
    assert isinstance(rotate(simple, rotation(6)).module, SimpleGenerator)
    assert rotate(simple, rotation(6)).prior == "normal"


# errors


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: jointly_diagonalize(torch.eye(3)), ValueError, r"\(n, d, d\); got \(3, 3\)"),
        (lambda: jointly_diagonalize(torch.ones(2, 3, 2)), ValueError, "square"),
        (lambda: jointly_diagonalize(torch.zeros(2, 3, 3)), ValueError, "not zero"),
        (lambda: jointly_diagonalize(torch.full((2, 3, 3), torch.nan)), ValueError, "NaN"),
        (lambda: jointly_diagonalize([torch.eye(3)]), TypeError, "Tensor"),
        (lambda: jointly_diagonalize(torch.ones(2, 3, 3), torch.ones(3)), ValueError, "2 finite numbers"),
        (lambda: jointly_diagonalize(torch.ones(2, 3, 3), starts=0), ValueError, "starts"),
        (lambda: joint_directions(Factors(), 4, 6), ValueError, "latent dimensions, 5; got k=6"),
        (lambda: joint_directions(Factors(), 4, normalize="max"), ValueError, "'trace', 'norm', 'none'"),
        (lambda: joint_directions(Factors(), 4, blocks=[2, 2]), ValueError, "of sum 5"),
        (lambda: joint_directions(Factors(), 4, weights=torch.zeros(4)), ValueError, "not all 0"),
        (lambda: joint_directions(Factors(), 4, weights=torch.ones(3)), ValueError, "4 finite numbers"),
        (lambda: joint_directions(lambda z: z), TypeError, "z_dim"),
        (lambda: rotate(Factors(), torch.tensor([[1.0, 0, 0, 0, 0], [0.6, 0.8, 0, 0, 0]])), ValueError, "orthogonal"),
        (lambda: rotate(Factors(), axes(4)), ValueError, "5 latents; got 4"),
        (lambda: rotate(EigenGenerator(16, 3, 4, 4), rotation(6)), ValueError, "mix layers"),
    ],
)
def test_errors(make, kind, text):
    with pytest.raises(kind, match=text):
        make()


# --- what cannot be measured -----------------------------------------------------------------------------------------


def test_energies_are_never_perfect_for_want_of_a_number():
    class Steep:  # finite images with an infinite slope
        z_dim = 4

        def __call__(self, z):
            return z.relu().sqrt().reshape(-1, 1, 2, 2)

    with pytest.raises(ValueError, match=r"off_diagonal_energy needs .*finite"):
        off_diagonal_energy(Steep(), derivative="forward")

    class Half:  # only the first two latents do anything
        z_dim = 4

        def __call__(self, z):
            return (z[:, :2] * torch.tensor([1.0, 2.0])).sin().reshape(-1, 1, 1, 2)

    with pytest.raises(ValueError, match="do not change along these directions"):
        off_diagonal_energies(Half(), [torch.eye(4)[2:], torch.eye(4)])


def test_leading_directions_know_the_weights():
    def paint(z):
        s = (z[:, :1] > 0).to(z)
        return torch.cat([10 * s * z[:, 1:3], 2 * (1 - s) * z[:, 3:4], (1 - s) * z[:, 4:5]], 1).reshape(-1, 1, 1, 4)

    class Switch:
        z_dim = 5
        __call__ = staticmethod(paint)

    z = torch.randn(64, 5)
    found = joint_directions(Switch(), z, 2, weights=(z[:, 0] < 0).float())
    torch.testing.assert_close(found.importance, joint_directions(Switch(), z[z[:, 0] < 0], 2).importance)
    torch.testing.assert_close(found.importance, torch.tensor([1.0, 0.25]))


def test_a_warning_comes_once_and_names_the_call():
    class Cut:
        z_dim = 5

        def __call__(self, z):
            return (z.detach().sin() + z).reshape(-1, 1, 1, 5)

    with pytest.warns(UserWarning, match="joint_directions: .*cuts the graph") as found:
        joint_directions(Cut(), 8, 2)
    assert [w.filename for w in found] == [__file__]
