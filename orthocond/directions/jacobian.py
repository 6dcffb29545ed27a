"""Directions in which the image itself moves most: eigenvectors of the averaged Jacobian Gram (section 5.1)."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import jvp, vjp, vmap

from orthocond._checks import check_choice, check_count, check_not_negative
from orthocond.directions.basis import TIE_TOL, Directions, blocks_on_diagonal, check_k, from_eigenvectors, in_blocks
from orthocond.directions.factorize import check_blocks
from orthocond.generators import (
    Generator,
    ImageGenerator,
    as_generator,
    draws_noise,
    evaluating,
    images_of,
    latents_of,
    seeded,
)
from orthocond.matrix.decompose import eigh

# Central differences are off by h² (truncation) and eps / h (rounding): h = eps^(1/3) balances the two.
_DIFFERENCE_STEP = {torch.float16: 0.1, torch.bfloat16: 0.2, torch.float32: 5e-3, torch.float64: 6e-6}
_PROBED, _PROBES = 4, 2  # latents, at most, and vectors on which kinds of derivatives are compared
_APART = 0.3  # of a difference of images, from which a derivative is not that of the images
# More columns than k, so that the block sees past the k-th eigenvalue and converges at the rate of the next gap.
_OVERSAMPLING = 4


@dataclass(frozen=True)
class Derivative:
    """Products with the Jacobians of a generator at latents ``(n, d)``, for m vectors at once.

    Args:
        generator: In eval mode, so that an image depends on its own latent alone.
        kind: ``"forward"``: dual numbers. ``"reverse"``: twice backward, for generators with parts that have no
            forward rule. ``"difference"``: central differences, for those that cannot be differentiated.
        noisy: Whether the generator draws noise, which must be the same for all vectors: that of ``seed``.
        shorter: Factor of the step of differences.
    """

    generator: ImageGenerator
    kind: str
    noisy: bool
    shorter: float = 1.0

    def push(self, z: Tensor, v: Tensor, seed: int = 0) -> Tensor:
        """``J v``: changes ``(m, n, C, H, W)`` of the images along each of ``v``, ``(m, d)``."""
        if self.kind == "forward":
            with torch.no_grad(), seeded(z, seed):
                along = vmap(lambda one: jvp(self.generator, (z,), (one.expand_as(z),))[1], randomness="same")
                return along(v)
        if self.noisy and len(v) > 1:
            return torch.cat([self.push(z, one[None], seed) for one in v])
        m, n = len(v), len(z)
        rows, tangents = z.repeat(m, 1), v.repeat_interleave(n, 0)
        push = self._twice_backward if self.kind == "reverse" else self._difference
        return push(rows, tangents, seed).unflatten(0, (m, n))

    def _twice_backward(self, rows: Tensor, tangents: Tensor, seed: int) -> Tensor:
        """``Jᵀu`` is linear in u, so its own gradient along v is ``J v``."""
        with torch.enable_grad(), seeded(rows, seed):
            rows = rows.requires_grad_()
            images = self.generator(rows)
            u = torch.zeros_like(images, requires_grad=True)
            (pulled,) = torch.autograd.grad(images, rows, u, create_graph=True)
            return torch.autograd.grad(pulled, u, tangents)[0]

    def _difference(self, rows: Tensor, tangents: Tensor, seed: int) -> Tensor:
        h = _DIFFERENCE_STEP[rows.dtype] * self.shorter
        ends = []
        for sign in (1, -1):
            with torch.no_grad(), seeded(rows, seed):
                ends.append(self.generator(rows + sign * h * tangents))
        return (ends[0] - ends[1]) / (2 * h)

    def pull(self, z: Tensor, u: Tensor, seed: int = 0) -> Tensor:
        """``Jᵀ u``: ``(m, n, d)`` for changes ``(m, n, C, H, W)``."""
        if self.kind == "forward":
            with seeded(z, seed):
                back = vjp(self.generator, z)[1]
            return vmap(lambda one: back(one)[0])(u)
        if self.noisy and len(u) > 1:
            return torch.cat([self.pull(z, one[None], seed) for one in u])
        with torch.enable_grad(), seeded(z, seed):
            rows = z.repeat(len(u), 1).requires_grad_()
            return torch.autograd.grad(self.generator(rows), rows, u.flatten(0, 1))[0].unflatten(0, u.shape[:2])


def derivative_of(generator: Generator, z: Tensor, kind: str, batch_size: int, name: str) -> Derivative:
    """The best kind of derivative that a generator allows.

    A part that cuts the graph gives no error but a Jacobian in which what it does is missing. So each kind is compared
    with differences of images.

    Raises:
        ValueError: If images are not finite, or not those that this library needs.
    """
    check_choice(kind, f"{name}(derivative=...)", ("auto", "forward", "reverse", "difference"))
    noisy = draws_noise(generator, z, name)
    for _ in images_of(generator, z, batch_size, name):
        pass  # a derivative may be finite where the image is not
    if kind != "auto":
        return Derivative(generator, kind, noisy)
    difference = Derivative(generator, "difference", noisy)
    some = z[: max(1, min(_PROBED, batch_size // _PROBES))]
    v = torch.randn(_PROBES, z.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(z)
    moves = difference.push(some, v)
    for kind in ("forward", "reverse"):
        found = Derivative(generator, kind, noisy)
        try:
            if _agrees(found, difference, some, v, moves) and found.pull(some, moves).isfinite().all():
                return found
        except (RuntimeError, NotImplementedError):
            continue
    warnings.warn(
        f"{name}: this generator can be differentiated neither forward nor twice backward, or a part of it cuts the "
        "graph. So central differences are used, which have about half the digits. derivative='difference' says that "
        "this is meant.",
        stacklevel=3,
    )
    return difference


def _agrees(found: Derivative, difference: Derivative, z: Tensor, v: Tensor, moves: Tensor) -> bool:
    """Whether a derivative is that of the images, as far as differences of images, which are ``moves``, can tell."""
    pushed = found.push(z, v)
    if not pushed.isfinite().all():
        return False
    if _are_near(pushed, moves):
        return True
    return not _are_near(replace(difference, shorter=0.25).push(z, v), moves)  # they do not agree with each other


def _are_near(pushed: Tensor, moves: Tensor) -> bool:
    return bool((pushed - moves).double().norm() <= _APART * moves.double().norm())


def gram_matrices(
    derivative: Derivative,
    z: Tensor,
    batch_size: int,
    masks: list[Tensor] | None = None,
    gray: bool = False,
    weights: Tensor | None = None,
) -> list[Tensor]:
    r"""Averages of :math:`J^T J` over latents and pixels, float64 ``(d, d)``, for each mask ``(H, W)`` of pixels.

    The weights of the latents have a mean of 1.
    """
    d = z.shape[1]
    eye = torch.eye(d, dtype=z.dtype, device=z.device)
    sums: list[Tensor] = []
    size = max(1, batch_size // d)
    for seed, part in enumerate(z.split(size)):
        pushed = torch.cat([derivative.push(part, v, seed) for v in eye.split(max(1, batch_size // len(part)))])
        if weights is not None:
            pushed = pushed * _of_images(weights.split(size)[seed].sqrt(), pushed)
        if gray:
            pushed = pushed.mean(2, keepdim=True)
        regions = [pushed] if masks is None else [pushed[..., mask] for mask in masks]
        columns = [region.flatten(1).double() for region in regions]
        grams = [c @ c.mT / (c.shape[1] // len(part)) for c in columns]
        sums = grams if not sums else [a + b for a, b in zip(sums, grams, strict=True)]
    return [total / len(z) for total in sums]


def grams_of_latents(derivative: Derivative, z: Tensor, rows: Tensor, batch_size: int) -> Tensor:
    r"""The matrix :math:`V J^T J V^T` over pixels of each latent, ``(n, k, k)`` in float64, with V the rows."""
    grams = []
    for seed, part in enumerate(z.split(max(1, batch_size // len(rows)))):
        pushed = torch.cat([derivative.push(part, v, seed) for v in rows.split(max(1, batch_size // len(part)))])
        columns = pushed.flatten(2).transpose(0, 1).double()
        grams.append(columns @ columns.mT / columns.shape[-1])
    return torch.cat(grams)


def _of_images(weights: Tensor, images: Tensor) -> Tensor:
    """Numbers ``(n,)`` as factors of images ``(m, n, C, H, W)``."""
    return weights.to(images)[:, None, None, None]


def check_derivatives(found: Tensor, name: str) -> Tensor:
    """What was made of derivatives, if it is finite."""
    if not found.isfinite().all():
        raise ValueError(
            f"{name} needs images whose derivatives are finite; at some latents these are NaN or infinite. In half "
            "precision they may overflow: use generator.float()."
        )
    return found


def check_moves(gram: Tensor, name: str, along: str = "with the latents at all") -> None:
    """Raise if images do not change along what is meant, or their change is not finite."""
    if not check_derivatives(gram, name).any():
        raise ValueError(
            f"{name}: the images do not change {along}, as far as their derivatives tell. If they should, a part of "
            "the generator rounds them (to 8 bits, say) or cuts the graph: take it out, or in the latter case use "
            "derivative='difference'."
        )


def _product(derivative: Derivative, z: Tensor, v: Tensor, batch_size: int, weights: Tensor | None) -> Tensor:
    """The averaged Gram matrix times the columns of ``v``, ``(d, m)``, without the matrix."""
    total = torch.zeros_like(v)
    rows = v.mT.to(z.dtype)
    size = max(1, batch_size // len(rows))
    for seed, part in enumerate(z.split(size)):
        for i, block in enumerate(rows.split(batch_size)):
            pushed = derivative.push(part, block, seed)
            if weights is not None:
                pushed = pushed * _of_images(weights.split(size)[seed], pushed)
            pulled = derivative.pull(part, pushed, seed).double().sum(1) / pushed[0, 0].numel()
            total[:, i * batch_size : i * batch_size + len(block)] += pulled.mT
    return total / len(z)


def check_weights(weights: Tensor, z: Tensor, name: str) -> Tensor:
    """Checked weights of latents, float64, with a mean of 1."""
    w = torch.as_tensor(weights)
    if w.shape != (len(z),) or not bool((w.isfinite() & (w >= 0)).all()) or not bool(w.any()):
        raise ValueError(
            f"{name}(weights=...) needs {len(z)} finite numbers of at least 0, not all 0; got {w.tolist()}."
        )
    w = w.to(z.device).double()
    return w / w.mean()


def krylov(product: Callable[[Tensor], Tensor], start: Tensor, k: int, tol: float) -> tuple[Tensor, Tensor]:
    """Top k eigenpairs of a symmetric positive semi-definite matrix of which only products are known.

    Block Krylov with Rayleigh-Ritz: the basis grows by the part of the last product that it does not hold yet, until
    each of the k residuals is below ``tol`` times the largest eigenvalue. With d columns it is exact, so it ends.

    Args:
        product: Maps columns ``(d, m)`` to the matrix times them.
        start: Random columns ``(d, b)`` with b of at least k.
        k: Number of pairs.
        tol: Tolerance of the residuals.

    Returns:
        Eigenvalues ``(k,)`` and eigenvectors ``(d, k)``.
    """
    basis = torch.linalg.qr(start)[0]
    image = product(basis)
    while True:
        values, s = eigh((basis.mT @ image + image.mT @ basis) / 2)
        values, s = values.flip(0)[:k], s.flip(1)[:, :k]
        vectors = basis @ s
        residual = (image @ s - vectors * values).norm(dim=0)
        if bool((residual <= tol * values[0]).all()) or basis.shape[1] == len(basis):
            return values, vectors
        new = image[:, -start.shape[1] :]
        for _ in range(2):  # once leaves what rounding hides
            new = new - basis @ (basis.mT @ new)
        u, size, _ = torch.linalg.svd(new, full_matrices=False)
        # Columns that are rounding errors of the product would not be orthogonal to the basis.
        u = u[:, size > 1e-6 * values[0]][:, : len(basis) - basis.shape[1]]
        if not u.shape[1]:
            return values, vectors
        basis, image = torch.cat([basis, u], 1), torch.cat([image, product(u)], 1)


def jacobian_directions(
    generator: ImageGenerator,
    z: Tensor | int = 64,
    k: int | None = None,
    *,
    method: str = "auto",
    weights: Tensor | None = None,
    blocks: Sequence[int] | None = None,
    derivative: str = "auto",
    tol: float = 1e-3,
    tie_tol: float = TIE_TOL,
    batch_size: int = 64,
    seed: int = 0,
) -> Directions:
    r"""The directions in which images move most, on average over latents.

    They are the top eigenvectors of :math:`M = \operatorname{mean}_z J_z^T J_z / p` with J the Jacobian of the p pixel
    values. The importance is the eigenvalue, the mean squared change of a pixel for a step of one sigma. With one
    latent they are the local directions of the paper's section 5.1; with many they hold for the whole latent space.

    Columns of J come in batches: all of them by forward mode (``"exact"``), or, where k is small against z_dim, only
    the products :math:`J^T J v` that a block Krylov space needs (``"krylov"``). The generator is in eval mode
    meanwhile; noise that it draws from torch's random state is held fixed.

    Args:
        generator: A `Generator`, or any callable with ``z_dim``.
        z: Latents ``(n, z_dim)``, or how many to sample from the prior.
        k: How many directions; None for all.
        method: ``"exact"``, ``"krylov"``, or ``"auto"``: the one that needs fewer products.
        weights: Weights ``(n,)`` of the latents; None counts all alike.
        blocks: Sizes of groups of consecutive latents, each of which has directions of its own, such as the layers of
            an EigenGAN; None is one block. They need all columns of J, and so not ``"krylov"``.
        derivative: ``"forward"``; ``"reverse"``, twice backward, for generators with parts that have no forward rule;
            ``"difference"``, central differences; or ``"auto"``: the first of them that works, with a warning if it is
            the last.
        tol: Residual of each eigenvector of ``"krylov"``, as a share of the largest eigenvalue.
        tie_tol: Relative tolerance of ties; see `Directions`.
        batch_size: Images in one call of the generator, counted with their derivatives.
        seed: Seed of the latents that are sampled, and of the random start.

    Returns:
        Directions in the dtype of the latents, at least float32.

    Raises:
        TypeError: If the generator is not a callable with ``z_dim``.
        ValueError: If a shape or setting is not valid, k is above z_dim, images do not change, or the generator has
            noise that does not come from torch's random state.
        RuntimeError: If the generator cannot be differentiated in the way that is asked for.

    Accuracy:
        ``"exact"`` has the digits of the generator's dtype, ``"difference"`` about half of them. The error of one
        eigenvector of ``"krylov"`` is at most ``tol`` over the relative gap to the next eigenvalue. 64 latents leave a
        sampling error: see how the directions of two seeds differ.

    Example:
        >>> from orthocond.directions import jacobian_directions
        >>> class Painter:
        ...     z_dim = 2
        ...     def __call__(self, z):
        ...         return torch.stack([z[:, :1].expand(-1, 4), z[:, 1:].expand(-1, 4) * 3], 1)[:, None]
        >>> found = jacobian_directions(Painter(), 8)
        >>> found.vectors, found.importance
        (tensor([[0., 1.], [1., 0.]]), tensor([4.5000, 0.5000]))

    References:
        Zhu et al., *Low-Rank Subspaces in GANs* (2021). Musco, Musco, *Randomized Block Krylov Methods* (2015).
    """
    name = "jacobian_directions"
    generator = as_generator(generator, name)
    z = latents_of(generator, z, name, seed)
    d = z.shape[1]
    check_k(k, d, name)
    w = None if weights is None else check_weights(weights, z, name)
    check_choice(method, f"{name}(method=...)", ("auto", "exact", "krylov"))
    check_not_negative(tol, f"{name}(tol=...)")
    if tie_tol is not None:
        check_not_negative(tie_tol, f"{name}(tie_tol=...)")
    check_count(batch_size, "batch_size", 1)
    sizes = check_blocks([d] if blocks is None else blocks, d, name)
    if len(sizes) > 1:
        if method == "krylov":
            raise ValueError(f"{name}(method='krylov') has no blocks; use 'exact'.")
        method = "exact"
    with evaluating(generator):
        found = derivative_of(generator, z, derivative, batch_size, name)
        if method == "krylov" and found.kind == "difference":
            raise ValueError(f"{name}(method='krylov') needs a gradient, and differences have none; use 'exact'.")
        block = d if k is None else min(d, k + _OVERSAMPLING)
        if method == "auto":
            # Three blocks are the rule, and a product with its transpose costs as much as three columns.
            method = "krylov" if 9 * block < d and found.kind != "difference" else "exact"
        if method == "exact":
            gram = gram_matrices(found, z, batch_size, weights=w)[0] * generator.sigma**2
            check_moves(gram, name)
            parts = blocks_on_diagonal(gram, sizes)
            return in_blocks([from_eigenvectors(*eigh(one), z.dtype, None, "jacobian", tie_tol) for one in parts])[:k]
        rng = torch.Generator().manual_seed(seed)
        start = torch.randn(d, block, dtype=torch.float64, generator=rng).to(z.device)

        def product(v: Tensor) -> Tensor:
            return check_derivatives(_product(found, z, v, batch_size, w), name)

        values, vectors = krylov(product, start, min(block, k or d), tol)
    check_moves(values, name)
    return from_eigenvectors(values * generator.sigma**2, vectors, z.dtype, k, "jacobian", tie_tol)
