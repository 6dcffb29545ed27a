"""Which derivative directions take, what they say of those that are wrong, and weights of latents."""

import math
from functools import partial

import pytest
import torch

import orthocond as oc
from orthocond.directions import jacobian_directions, joint_directions, off_diagonal_energy, region_directions


class Linear:
    """Images are a function of the latents, which may be cut from the graph in part."""

    def __init__(self, paint, z_dim=4):
        self.paint, self.z_dim = paint, z_dim

    def __call__(self, z):
        return self.paint(z).unflatten(1, (1, 1, -1))


def test_a_part_that_cuts_the_graph_is_noticed_also_beside_others():
    a = torch.randn(4, 6)
    g = Linear(lambda z: z[:, :2] @ a[:2] + 3 * z[:, 2:].detach() @ a[2:])
    with pytest.warns(UserWarning, match="a part of it cuts the graph"):
        found = jacobian_directions(g, 8)
    b = a * torch.tensor([1.0, 1, 3, 3])[:, None]
    torch.testing.assert_close(found.importance, torch.linalg.eigvalsh(b @ b.mT / 6).flip(0), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_part_that_cuts_the_graph_is_noticed_in_half_precision(dtype):
    a = torch.randn(4, 6).to(dtype)
    g = Linear(lambda z: z.to(dtype)[:, :2] @ a[:2] + 3 * z.to(dtype)[:, 2:].detach() @ a[2:])
    with pytest.warns(UserWarning, match="a part of it cuts the graph"):
        found = jacobian_directions(g, torch.randn(8, 4).to(dtype))
    b = a.float() * torch.tensor([1.0, 1, 3, 3])[:, None]
    expected = torch.linalg.eigvalsh(b @ b.mT / 6).flip(0)
    torch.testing.assert_close(found.importance, expected, rtol=0.05, atol=0.02 * expected[0].item())


class Overflowing(torch.autograd.Function):
    """sin(3000 z), of which forward mode overflows and differences cannot follow."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z):
        return (3000 * z).sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx, tangent):
        return tangent * math.inf

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3000 * (3000 * ctx.saved_tensors[0]).cos()


def test_a_derivative_that_is_not_finite_is_not_chosen():
    z = torch.randn(64, 4)
    found = jacobian_directions(Linear(Overflowing.apply), z)
    expected = (3000 * (3000 * z).cos()).square().mean(0) / 4
    torch.testing.assert_close(found.importance, expected.sort(descending=True).values, rtol=1e-4, atol=0)


@pytest.mark.parametrize("batch_size", [1, 3, 20])
def test_no_call_has_more_images_than_a_batch(batch_size):
    sizes = []

    def paint(z):
        sizes.append(len(z))
        return z.sin()

    for kind in ("auto", "difference"):
        for find in (jacobian_directions, joint_directions, partial(off_diagonal_energy, directions=None)):
            find(Linear(paint), z=torch.randn(40, 4), derivative=kind, batch_size=batch_size)
    region_directions(Linear(paint), torch.randn(40, 4), mask=torch.tensor([[1, 0, 0, 0]]), batch_size=batch_size)
    assert max(sizes) <= max(batch_size, 2)  # two directions or latents are compared in any case


def test_differences_of_latents_are_differentiated():
    g = Linear(lambda z: torch.stack([z[:, 0] - z[:, 1], z[:, 2] - z[:, 3]], 1))
    torch.testing.assert_close(jacobian_directions(g, 8).importance, torch.tensor([1.0, 1, 0, 0]))


def test_a_derivative_is_believed_where_differences_cannot_follow():
    g = Linear(lambda z: (3000 * z).sin())
    found = jacobian_directions(g, 64)
    z = oc.Generator(g, 4, range=None, latent_shape=(4,)).sample(64)
    expected = (3000 * (3000 * z).cos()).square().mean(0) / 4
    torch.testing.assert_close(found.importance, expected.sort(descending=True).values, rtol=1e-4, atol=0)


def test_pixels_of_8_bits_hide_changes():
    g = Linear(lambda z: (z * 3).round() / 3)
    with pytest.raises(ValueError, match=r"as far as their derivatives tell.*rounds them"):
        jacobian_directions(g, torch.full((3, 4), 0.5), derivative="forward")


def test_images_that_are_not_finite_at_some_latents_are_an_error():
    g = Linear(lambda z: (z * z).log() + 0 * z.sqrt().detach())  # the slope is finite
    with pytest.raises(ValueError, match="finite images"):
        jacobian_directions(g, torch.tensor([[1.0, 2, 3, 4], [1, 2, 3, -4], [4, 3, 2, 1]]))


def test_derivatives_that_are_not_finite_are_an_error():
    with pytest.raises(ValueError, match=r"derivatives are finite.*use generator.float"):
        jacobian_directions(Linear(lambda z: z.abs().sqrt()), torch.zeros(2, 4), derivative="forward")
    with pytest.raises(ValueError, match="jacobian_directions needs images whose derivatives are finite"):
        jacobian_directions(
            Linear(lambda z: z.abs().sqrt(), 40), torch.zeros(2, 40), 2, method="krylov", derivative="forward"
        )


@pytest.mark.parametrize("method", ["lowrank", "resefa"])
def test_derivatives_of_regions_that_are_not_finite_are_an_error(method):
    g, mask = Linear(lambda z: z.abs().sqrt()), torch.tensor([[1, 1, 0, 0]])
    with pytest.raises(ValueError, match="region_directions needs images whose derivatives are finite"):
        region_directions(g, torch.zeros(2, 4), mask=mask, method=method, derivative="forward")


# --- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"method": "exact"}, {"method": "krylov"}, {"blocks": (2, 2)}])
def test_weights_are_repetitions(settings):
    a = torch.randn(4, 6)
    g = Linear(lambda z: (z @ a).sin())
    z, counts = torch.randn(5, 4), torch.tensor([3, 0, 1, 2, 0])
    for batch_size in (4, 64):
        weighted = jacobian_directions(g, z, weights=counts / 7, tol=1e-9, batch_size=batch_size, **settings)
        repeated = jacobian_directions(g, z.repeat_interleave(counts, 0), tol=1e-9, **settings)
        torch.testing.assert_close(weighted.importance, repeated.importance)
        torch.testing.assert_close(weighted.vectors, repeated.vectors, atol=1e-4, rtol=0)


def test_weights_that_are_none_are_an_error():
    with pytest.raises(ValueError, match=r"jacobian_directions\(weights=...\) needs 5 finite numbers"):
        jacobian_directions(Linear(torch.sin), 5, weights=torch.zeros(5))
