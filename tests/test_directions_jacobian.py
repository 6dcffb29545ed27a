"""Directions of the Jacobian: all of the image, and regions of it."""

import pytest
import scipy.linalg
import torch
from torch import nn
from torch.func import jacrev

from orthocond.directions import effect_sizes, jacobian_directions, region_directions
from orthocond.directions.jacobian import Derivative, krylov
from orthocond.directions.regions import robust_pca
from orthocond.gans import EigenGenerator
from tests.helpers import with_spectrum


class Net(nn.Module):
    """A small generator with operations in place and instance normalization."""

    def __init__(self, z_dim=5):
        super().__init__()
        self.z_dim = z_dim
        self.first = nn.ConvTranspose2d(z_dim, 6, 4)
        self.norm = nn.InstanceNorm2d(6, affine=True)
        self.last = nn.ConvTranspose2d(6, 2, 4, stride=2, padding=1)

    def forward(self, z):
        h = self.norm(self.first(z[:, :, None, None]))
        h.mul_(0.7).add_(0.1)
        nn.functional.leaky_relu_(h, 0.2)
        return self.last(h).tanh_()


class Cut(torch.autograd.Function):
    """The sine, with a backward but no rule for forward mode."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].cos()


class Wrapped:
    """A generator behind a function of images."""

    def __init__(self, net, function):
        self.net, self.function, self.z_dim = net, function, net.z_dim

    def __call__(self, z):
        return self.function(self.net(z))


class Painter(nn.Module):
    """Latents, rotated or not, that paint disjoint regions: the first ones columns 0 to 3, the next ones the rest."""

    def __init__(self, z_dim, inside, outside, rotated):
        super().__init__()
        self.z_dim = z_dim
        q = torch.linalg.qr(torch.randn(z_dim, z_dim))[0] if rotated else torch.eye(z_dim)
        basis = torch.randn(z_dim, 3, 8, 10)
        basis[:inside, :, :, 4:] = 0
        basis[inside:, :, :, :4] = 0
        basis[inside + outside :] = 0
        self.inside = q.mT[:inside]
        self.register_buffer("q", q)
        self.register_buffer("basis", basis)
        self.mask = torch.zeros(8, 10)
        self.mask[:, :4] = 1

    def forward(self, z):
        return torch.einsum("nd,dchw->nchw", (z @ self.q).tanh(), self.basis)


def exact_gram(net, z, rows=slice(None)):
    """The average of JᵀJ / pixels by reverse mode, one latent after the other."""
    grams = []
    for one in z:
        j = jacrev(lambda x: net(x[None])[0].flatten(-2)[..., rows])(one).flatten(0, -2).double()
        grams.append(j.mT @ j / len(j))
    return torch.stack(grams).mean(0).detach()


def check_eigenvectors(found, gram, tol):
    """Each direction satisfies its eigenvalue equation, and the values are the largest ones."""
    v, values = found.vectors.double(), found.importance.double()
    assert (v @ gram - values[:, None] * v).norm(dim=1).max() < tol * values[0]
    expected = torch.linalg.eigvalsh(gram).flip(0)[: len(values)]
    torch.testing.assert_close(values, expected, rtol=0, atol=tol * float(expected[0]))
    torch.testing.assert_close(v @ v.mT, torch.eye(len(v)).double(), rtol=0, atol=1e-5)


# values


@pytest.mark.parametrize("derivative", ["auto", "forward", "reverse"])
@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_exact_jacobian(derivative, batch_size):
    net = Net().double()
    z = torch.randn(6, 5, dtype=torch.float64)
    found = jacobian_directions(net, z, derivative=derivative, batch_size=batch_size)
    check_eigenvectors(found, exact_gram(net, z), 1e-10)
    assert found.importance.dtype == torch.float64


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-8), (torch.float32, 0.03)])
def test_differences(dtype, tol):
    """The step of float32 is wide enough to cross kinks of the leaky ReLU."""
    net = Net().to(dtype)
    z = torch.randn(4, 5, dtype=dtype)
    check_eigenvectors(jacobian_directions(net, z, derivative="difference"), exact_gram(net, z), tol)


def test_linear_generator():
    """J is the matrix itself at every latent."""

    class Linear(nn.Module):
        z_dim = 4

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 12).double()

        def forward(self, z):
            return self.layer(z).reshape(-1, 3, 2, 2)

    g = Linear()
    gram = g.layer.weight.mT @ g.layer.weight / 12
    found = jacobian_directions(g, 3)
    check_eigenvectors(found, gram.detach(), 1e-12)
    torch.testing.assert_close(effect_sizes(g, found).square(), found.importance)


@pytest.mark.parametrize("derivative", ["forward", "reverse"])
def test_krylov_finds_the_top_of_a_large_latent_space(derivative):
    net = Net(z_dim=90).double()
    z = torch.randn(3, 90, dtype=torch.float64)
    found = jacobian_directions(net, z, 3, method="krylov", tol=1e-6, batch_size=8, derivative=derivative)
    check_eigenvectors(found, exact_gram(net, z), 2e-6)


def test_krylov_is_chosen_where_it_needs_fewer_products(monkeypatch):
    net = Net(z_dim=90)
    counts = []
    push = Derivative.push
    monkeypatch.setattr(Derivative, "push", lambda self, z, v, seed=0: counts.append(len(v)) or push(self, z, v, seed))
    jacobian_directions(net, 1, 2)
    assert 6 < sum(counts) < 60
    counts.clear()
    jacobian_directions(net, 1, 60)
    assert sum(counts) == 90 + 4  # and twice two to find out how to differentiate


@pytest.mark.parametrize("spectrum", [[1.0] * 20, [9.0, 8.0, *[0.0] * 18], [2.0**-i for i in range(20)], [0.0] * 20])
@pytest.mark.parametrize("k", [1, 4, 20])
def test_krylov_of_flat_low_rank_steep_and_zero_spectra(spectrum, k):
    m = with_spectrum(spectrum)
    values, vectors = krylov(lambda v: m @ v, torch.randn(20, min(20, k + 4), dtype=torch.float64), k, 1e-9)
    torch.testing.assert_close(values, torch.tensor(spectrum[:k]).double(), rtol=0, atol=1e-8)
    torch.testing.assert_close(m @ vectors, vectors * values, rtol=0, atol=1e-8)


# how generators are differentiated


@pytest.mark.parametrize("kind", ["forward", "reverse"])
def test_push_and_pull_are_adjoint_also_with_noise(kind):
    for g in (Net(), EigenGenerator(8, 5, noise_dim=4, base_channels=4)):
        g = g.double()
        d = Derivative(g, kind, noisy=True)
        z, v = torch.randn(3, g.z_dim).double(), torch.randn(4, g.z_dim).double()
        pushed = d.push(z, v, seed=3)
        u = torch.randn_like(pushed)
        pulled = d.pull(z, u, seed=3)
        torch.testing.assert_close((pushed * u).flatten(2).sum(-1), (pulled * v[:, None]).sum(-1))
        assert torch.equal(d.push(z, v, seed=3), pushed)


def test_kinds_agree_on_a_generator_that_draws_noise():
    g = EigenGenerator(16, 3, noise_dim=4, base_channels=4).double()
    state = torch.get_rng_state()
    found = [jacobian_directions(g, 4, derivative=kind) for kind in ("forward", "reverse", "difference")]
    assert torch.equal(torch.get_rng_state(), state)
    for other in found[1:]:
        torch.testing.assert_close(other.importance, found[0].importance, rtol=1e-5, atol=0)


@pytest.mark.parametrize("method", ["exact", "krylov"])
def test_each_batch_of_latents_has_noise_of_its_own(method):
    """Two equal latents in batches of one differ by their noise alone, and the result is the mean over both."""
    g = EigenGenerator(16, 3, noise_dim=4, base_channels=4).double()
    z = torch.randn(1, g.z_dim, dtype=torch.float64).expand(2, -1)
    derivative = Derivative(g.eval(), "forward", noisy=True)
    columns = [derivative.push(z[:1], torch.eye(g.z_dim).double(), seed).flatten(1) for seed in (0, 1)]
    one, two = (c @ c.mT / c.shape[1] for c in columns)
    assert (one - two).norm() > 1e-3 * one.norm()
    found = jacobian_directions(g, z, method=method, batch_size=1, tol=1e-10)
    check_eigenvectors(found, (one + two) / 2, 1e-8)


def test_a_part_without_forward_rule_is_differentiated_backward():
    net = Net().double()
    z = torch.randn(3, 5, dtype=torch.float64)
    found = jacobian_directions(Wrapped(net, Cut.apply), z)
    check_eigenvectors(found, exact_gram(Wrapped(net, torch.sin), z), 1e-10)


@pytest.mark.parametrize(
    "function", [lambda x: torch.from_numpy(x.detach().numpy()).sin(), lambda x: x.detach().sin()], ids=["numpy", "cut"]
)
def test_a_part_without_gradient_gives_differences_and_a_warning(function):
    net = Net().double()
    z = torch.randn(3, 5, dtype=torch.float64)
    with pytest.warns(UserWarning, match="central differences"):
        found = jacobian_directions(Wrapped(net, function), z)
    check_eigenvectors(found, exact_gram(Wrapped(net, torch.sin), z), 1e-8)


def test_eval_mode_and_modes_are_restored():
    class Normed(Net):
        def __init__(self):
            super().__init__()
            self.batch_norm = nn.BatchNorm2d(2)
            self.batch_norm.running_var.fill_(4.0)
            self.drop = nn.Dropout(0.5)

        def forward(self, z):
            return self.drop(self.batch_norm(super().forward(z)))

    net = Normed().double()
    net.drop.eval()
    z = torch.randn(3, 5, dtype=torch.float64)
    found = jacobian_directions(net, z)
    assert net.training
    assert net.batch_norm.training
    assert not net.drop.training
    assert net.batch_norm.num_batches_tracked == 0
    check_eigenvectors(found, exact_gram(net.eval(), z), 1e-10)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_inside_contexts_without_gradients(context):
    net = Net()
    with context():
        found = jacobian_directions(net, 2, 2, derivative="reverse" if context is torch.no_grad else "auto")
    torch.testing.assert_close(found.importance, jacobian_directions(net, 2, 2).importance)
    assert all(p.grad is None for p in net.parameters())


# regions


@pytest.mark.parametrize("method", ["lowrank", "resefa"])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize(("z_dim", "inside", "outside"), [(4, 1, 2), (8, 2, 3), (30, 3, 6)])
def test_latents_that_paint_disjoint_regions(z_dim, inside, outside, rotated, method):
    g = Painter(z_dim, inside, outside, rotated).double()
    found = region_directions(g, 8, mask=g.mask, method=method, k=inside)
    # the span of the directions is that of the latents that paint the region
    cosines = torch.linalg.svdvals(found.vectors @ g.inside.double().mT)
    assert cosines.min() > 1 - 1e-6
    assert effect_sizes(g, found, mask=g.mask).min() > 0.3
    assert effect_sizes(g, found, mask=g.mask == 0).max() < 1e-3


@pytest.mark.parametrize("method", ["lowrank", "resefa"])
def test_a_latent_that_changes_both_is_balanced_by_one_that_changes_the_rest(method):
    """The first latent paints all, the second the same outside alone: their difference leaves the outside."""
    g = Painter(8, 1, 1, rotated=False).double()
    g.basis[0] = g.basis[0] + g.basis[1]
    g.forward = lambda z: torch.einsum("nd,dchw->nchw", z, g.basis)
    found = region_directions(g, 4, mask=g.mask, method=method, k=1)
    expected = torch.tensor([1.0, -1.0, *[0.0] * 6]).double() / 2**0.5
    assert (found.vectors[0] @ expected).abs() > 1 - 1e-4
    assert effect_sizes(g, found, mask=g.mask == 0) < 0.01


def test_lowrank_importance_is_the_change_of_the_region():
    g = Painter(8, 2, 3, True).double()
    z = torch.randn(4, 8).double()
    found = region_directions(g, z, mask=g.mask)
    gram = exact_gram(g, z, g.mask.flatten().bool())
    torch.testing.assert_close(found.importance, (found.vectors @ gram * found.vectors).sum(1))
    assert len(found) == 2


def test_resefa_is_the_generalized_eigenproblem_of_scipy():
    net = Net().double()
    z = torch.randn(3, 5, dtype=torch.float64)
    mask = torch.zeros(8, 8)
    mask[2:5, 1:4] = 1
    inside = exact_gram(net, z, mask.flatten().bool())
    outside = exact_gram(net, z, ~mask.flatten().bool())
    for ridge in (0.0, 1e-3):
        values, vectors = scipy.linalg.eigh(inside, outside + ridge * outside.trace() * torch.eye(5))
        found = region_directions(net, z, mask=(3.5, 2.5, 3, 3), method="resefa", ridge=ridge)
        torch.testing.assert_close(found.importance, torch.from_numpy(values).flip(0), rtol=1e-8, atol=1e-12)
        expected = nn.functional.normalize(torch.from_numpy(vectors.T.copy()).flip(0), dim=1)
        torch.testing.assert_close((found.vectors * expected).sum(1).abs(), torch.ones(5).double(), rtol=0, atol=1e-8)


def test_gray_misses_a_change_of_hue():
    class Hue:
        z_dim = 2

        def __call__(self, z):
            color = torch.stack([z[:, 0], -z[:, 0], 0.1 * z[:, 1]], 1)
            return color[:, :, None, None] * torch.eye(4) + z[:, 1, None, None, None] * (1 - torch.eye(4)) * 1e-3

    mask = torch.eye(4)
    assert region_directions(Hue(), 2, mask=mask, method="resefa").vectors[0].abs().tolist() == [1, 0]
    assert region_directions(Hue(), 2, mask=mask, method="resefa", gray=True).vectors[0].abs().tolist() == [0, 1]


def test_robust_pca_is_at_the_minimum():
    """A convex function has its minimum where no move, large or small, makes it smaller."""
    m = with_spectrum([3.0, 1.0, *[0.0] * 18]) + torch.diag((torch.arange(20) % 3 == 0).double()) * 0.4
    lam = 20**-0.5
    low, sparse, rank = robust_pca(m, lam)
    torch.testing.assert_close(low + sparse, m, rtol=0, atol=1e-5)
    assert torch.linalg.matrix_rank(low, atol=1e-6) == rank
    best = float(torch.linalg.svdvals(low).sum() + lam * sparse.abs().sum())
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        move = torch.randn(20, 20, dtype=torch.float64, generator=generator) * 10 ** float(-4 * torch.rand(()))
        move = (move + move.mT) / 2
        other = torch.linalg.svdvals(low + move).sum() + lam * (sparse - move).abs().sum()
        assert other > best - 1e-5


def test_nothing_outside_changes():
    """Then all that changes the region is allowed."""
    g = Painter(6, 3, 0, True)
    found = region_directions(g, 4, mask=g.mask, k=3)
    assert effect_sizes(g, found).min() > 0.1
    with pytest.raises(ValueError, match="quotient is infinite"):
        region_directions(g, 4, mask=g.mask, method="resefa")


# errors


class Noisy(Net):
    def forward(self, z):
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(z) + self.calls


class Broken(Net):
    def forward(self, z):
        return super().forward(z) / 0


class Flat(Net):
    def forward(self, z):
        return super().forward(z).flatten(1)


NET = Net()
CUT = Wrapped(NET, torch.detach)
MASK = torch.zeros(8, 8)
MASK[:2] = 1
PAINTER = Painter(6, 0, 3, rotated=False)


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: jacobian_directions(nn.Identity()), TypeError, "needs a generator with z_dim"),
        (lambda: jacobian_directions(NET, 2, 6), ValueError, "latent dimensions, 5; got k=6"),
        (lambda: jacobian_directions(NET, 2, method="svd"), ValueError, "'exact', 'krylov'"),
        (lambda: jacobian_directions(NET, 2, derivative="fd"), ValueError, "'forward'"),
        (lambda: jacobian_directions(NET, 2, batch_size=0), ValueError, "at least 1"),
        (lambda: jacobian_directions(NET, 2, tol=-1.0), ValueError, "at least 0"),
        (lambda: jacobian_directions(NET, 2, 1, method="krylov", derivative="difference"), ValueError, "gradient"),
        (lambda: jacobian_directions(CUT, 2, derivative="forward"), ValueError, "cuts the graph"),
        (lambda: jacobian_directions(Noisy(), 2), ValueError, "two calls in eval mode differ"),
        (lambda: jacobian_directions(Broken(), 2), ValueError, "NaN or infinite pixels"),
        (lambda: jacobian_directions(Flat(), 2), ValueError, r"\(n, C, H, W\).* made shape \(1, 128\)"),
        (lambda: region_directions(NET, 2, mask=torch.ones(4, 4)), ValueError, "8x8; got \\(4, 4\\)"),
        (lambda: region_directions(NET, 2, mask=torch.zeros(8, 8)), ValueError, "mask is empty"),
        (lambda: region_directions(NET, 2, mask=torch.ones(8, 8)), ValueError, "covers all"),
        (lambda: region_directions(NET, 2, mask=MASK / 2), ValueError, "zeros and ones"),
        (lambda: region_directions(NET, 2, mask=(4, 4, 2)), ValueError, "center_row"),
        (lambda: region_directions(NET, 2, mask=(0, 4, 4, 4)), ValueError, "inside the 8x8 image"),
        (lambda: region_directions(NET, 2, mask="face"), TypeError, "mask tensor"),
        (lambda: region_directions(NET, 2, mask=MASK, method="pca"), ValueError, "'lowrank', 'resefa'"),
        (lambda: region_directions(NET, 2, mask=MASK, sparsity=1 / 60), ValueError, "nothing of low rank"),
        (lambda: region_directions(NET, 2, mask=MASK, k=5), ValueError, "got k=5"),
        (lambda: region_directions(NET, 2, mask=MASK, k=9), ValueError, "latent dimensions, 5"),
        (lambda: region_directions(NET, 2, mask=MASK, relax=-1), ValueError, "at least 0"),
        (lambda: region_directions(PAINTER, 2, mask=PAINTER.mask), ValueError, "does not change"),
    ],
)
def test_errors(make, kind, text):
    with pytest.raises(kind, match=text):
        make()
