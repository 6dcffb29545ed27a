"""Directions that change one region of the image and leave the rest: LowRankGAN and ReSeFa (section 5.1)."""

import math

import torch
from torch import Tensor

from orthocond._checks import check_choice, check_count, check_not_negative
from orthocond.directions._masks import Region, check_mask
from orthocond.directions.basis import TIE_TOL, Directions, check_k, from_eigenvectors
from orthocond.directions.jacobian import check_derivatives, derivative_of, gram_matrices
from orthocond.generators import ImageGenerator, all_images, as_generator, evaluating, latents_of
from orthocond.matrix.decompose import eigh

_STOP, _MOST_ITERATIONS = 1e-7, 10_000  # of the authors


def robust_pca(m: Tensor, sparsity: float) -> tuple[Tensor, Tensor, int]:
    r"""Split a symmetric matrix into one of low rank and a sparse one: principal component pursuit by ADMM.

    .. math:: \min \|L\|_* + \lambda \|S\|_1 \quad \text{with } L + S = M

    Step length and limits are those of LowRankGAN's authors. They stop as soon as L + S is M, which may be the first
    iteration, long before the minimum; here S must have come to rest too.

    Args:
        m: Symmetric ``(d, d)``, float64.
        sparsity: :math:`\lambda`.

    Returns:
        L, S and the rank of L.

    Raises:
        RuntimeError: If 10,000 iterations are not enough.

    Example:
        >>> from orthocond.directions.regions import robust_pca
        >>> flat = torch.full((20, 20), 0.05, dtype=torch.float64)
        >>> noise = torch.zeros(20, 20, dtype=torch.float64)
        >>> noise[3, 3] = 0.5
        >>> low, sparse, rank = robust_pca(flat + noise, 20**-0.5)
        >>> rank, bool((sparse - noise).abs().max() < 1e-5)
        (1, True)
    """
    mu = m.numel() / (4 * m.abs().sum(0).max())
    sparse, dual = torch.zeros_like(m), torch.zeros_like(m)
    for _ in range(_MOST_ITERATIONS):
        values, vectors = eigh(m - sparse - dual / mu)
        kept = _shrink(values, 1 / mu)  # singular values of a symmetric matrix are the sizes of its eigenvalues
        low = (vectors * kept) @ vectors.mT
        before, sparse = sparse, _shrink(m - low - dual / mu, sparsity / mu)
        gap = low + sparse - m
        dual = dual + mu * gap
        if torch.maximum(gap.norm(), (sparse - before).norm()) <= _STOP * m.norm():
            return low, sparse, int(kept.count_nonzero())
    off = float(gap.norm() / m.norm())
    raise RuntimeError(
        f"Robust PCA did not converge in {_MOST_ITERATIONS} iterations; it is off by {off:.2g}. "
        "Use a larger sparsity, or method='resefa'."
    )


def _shrink(x: Tensor, by: Tensor | float) -> Tensor:
    return x.sign() * (x.abs() - by).clamp_min(0)


def _low_rank_part(m: Tensor, sparsity: float, where: str) -> tuple[Tensor, Tensor, int]:
    """Singular values, singular vectors and rank of what robust PCA finds of low rank.

    It takes a direction along a coordinate for a sparse entry, and a generator that is disentangled has just these. A
    random rotation, under which N(0, I) stays the same, makes the result independent of the coordinates.
    """
    start = torch.randn(m.shape, dtype=m.dtype, generator=torch.Generator().manual_seed(0))
    q = torch.linalg.qr(start.to(m.device))[0]
    low, _, rank = robust_pca(q.mT @ m @ q, sparsity)
    if not rank:
        raise ValueError(
            f"region_directions: robust PCA with sparsity={sparsity:.3g} finds nothing of low rank in how {where} "
            "changes. Use a larger sparsity, or method='resefa'."
        )
    values, vectors = eigh(low)
    order = values.abs().argsort(descending=True)
    return values.abs()[order], q @ vectors[:, order], rank


def _low_rank(inside: Tensor, outside: Tensor, sparsity: float, relax: int) -> tuple[Tensor, Tensor]:
    """Principal directions of the region, projected on what does not change the rest.

    Projections of different directions may coincide, so it is their span that counts: its orthonormal basis by how
    much the region changes. For a region of rank 1 this is the projection itself.
    """
    sizes, principal, rank = _low_rank_part(inside, sparsity, "the region")
    _, others, first = _low_rank_part(outside, sparsity, "the rest of the image")
    null = others[:, min(max(first - relax, 1), len(others) - 1) :]
    projected = null.mT @ principal[:, :rank]
    values, vectors = eigh((projected * sizes[:rank]) @ projected.mT)
    found = null @ vectors[:, values > 1e-6 * sizes[0]]
    if not found.shape[1]:
        raise ValueError(
            "region_directions(method='lowrank'): whatever changes the region changes the rest of the image too. "
            "Use a larger relax, or method='resefa'."
        )
    return (found * (inside @ found)).sum(0), found


def _generalized(inside: Tensor, outside: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Solutions of ``M_f n = λ M_b n`` by the Cholesky factor of ``M_b``."""
    eye = torch.eye(len(outside), dtype=outside.dtype, device=outside.device)
    factor, failed = torch.linalg.cholesky_ex(outside + ridge * outside.trace() * eye)
    if failed or not outside.any():
        raise ValueError(
            "region_directions(method='resefa'): there are directions that do not change the rest of the image at all, "
            "so that the quotient is infinite. Use a ridge above 0, or method='lowrank'."
        )
    half = torch.linalg.solve_triangular(factor, inside, upper=False)
    values, u = eigh(torch.linalg.solve_triangular(factor, half.mT, upper=False))
    return values, torch.linalg.solve_triangular(factor.mT, u, upper=True)


def region_directions(
    generator: ImageGenerator,
    z: Tensor | int = 16,
    *,
    mask: Region,
    method: str = "lowrank",
    k: int | None = None,
    sparsity: float | None = None,
    relax: int = 0,
    ridge: float = 1e-3,
    gray: bool = False,
    derivative: str = "auto",
    tie_tol: float = TIE_TOL,
    batch_size: int = 64,
    seed: int = 0,
) -> Directions:
    r"""Directions that change a region of the image and leave the rest as it is.

    With :math:`M_f, M_b` the averages of :math:`J^T J` over the pixels of the region and of the rest:

    - ``"lowrank"`` (LowRankGAN): both are cleaned by robust PCA, :math:`M = L + S`; the principal directions of
      :math:`L_f` are projected onto the null space of :math:`L_b`. The rest does not change, to first order. The
      importance is :math:`n^T M_f n`, the mean squared change of a pixel of the region for one sigma.
    - ``"resefa"`` (ReSeFa): the directions of largest quotient :math:`n^T M_f n / n^T M_b n`, which is the importance:
      solutions of :math:`M_f n = \lambda (M_b + r \operatorname{tr}(M_b) I)\, n`. Needs no rank, and gives as many
      directions as dimensions. They are not orthogonal to each other.

    The authors of LowRankGAN average the colors first (``gray=True``), which misses a change of hue, and take a
    sparsity of 1/60 for their 512 dimensions. At the minimum of robust PCA that leaves nothing of low rank in up to 60
    dimensions. The default, :math:`2 / \sqrt{d}` in a random rotation of the latents, found the right rank from 4 to
    128 dimensions up to a quarter of them; for a rest of the image of higher rank take ``"resefa"``.

    Args:
        generator: A `Generator`, or any callable with ``z_dim``.
        z: Latents ``(n, z_dim)``, or how many to sample from the prior. One latent gives directions for its own image.
        mask: Region: ``(H, W)`` of zeros and ones, or ``(center_row, center_col, height, width)`` in pixels.
        method: ``"lowrank"`` or ``"resefa"``.
        k: How many directions; None for all that there are.
        sparsity: Weight of the sparse part of ``"lowrank"``; None takes :math:`2 / \sqrt{d}`.
        relax: Dimensions added to the null space of ``"lowrank"``, for more freedom and more change of the rest.
        ridge: The r of ``"resefa"``. With 0, as the authors offer too, dead latents make the quotient infinite.
        gray: Whether to average colors first.
        derivative: As in `jacobian_directions`.
        tie_tol: Relative tolerance of ties; see `Directions`.
        batch_size: Images in one call of the generator, counted with their derivatives.
        seed: Seed of the latents that are sampled.

    Returns:
        Directions in the dtype of the latents, at least float32.

    Raises:
        TypeError: If the generator is not a callable with ``z_dim``, or the mask is of another kind.
        ValueError: If the mask does not fit the images, covers all or nothing, a setting is not valid, there are fewer
            than k directions, or there is none.

    Example:
        >>> from orthocond.directions import effect_sizes, region_directions
        >>> class Painter:  # the first latent paints the left half, the others the right
        ...     z_dim = 4
        ...     def __call__(self, z):
        ...         return torch.cat([z[:, :1, None], z[:, 1:, None].sin()], 1)[:, None].mT
        >>> found = region_directions(Painter(), mask=(0.5, 0.5, 1, 1))
        >>> found.vectors.abs().round(decimals=3)
        tensor([[1., 0., 0., 0.]])

    References:
        Zhu et al., *Low-Rank Subspaces in GANs* (2021). Zhu et al., *Region-Based Semantic Factorization in GANs*
        (2022). Candès et al., *Robust Principal Component Analysis?* (2011).
    """
    name = "region_directions"
    generator = as_generator(generator, name)
    z = latents_of(generator, z, name, seed)
    d = z.shape[1]
    check_k(k, d, name)
    check_choice(method, f"{name}(method=...)", ("lowrank", "resefa"))
    check_count(relax, f"{name}(relax=...)", 0)
    check_count(batch_size, "batch_size", 1)
    check_not_negative(ridge, f"{name}(ridge=...)")
    sparsity = 2 / math.sqrt(d) if sparsity is None else check_not_negative(sparsity, f"{name}(sparsity=...)")
    if d < 2:
        raise ValueError(f"{name} needs at least 2 latent dimensions, to choose between; got {d}.")
    region = check_mask(mask, all_images(generator, z[:1], 1, name), name)
    if region.all():
        raise ValueError(f"{name} needs a region smaller than the image; the mask covers all. Use jacobian_directions.")
    with evaluating(generator):
        found = derivative_of(generator, z, derivative, batch_size, name)
        grams = gram_matrices(found, z, batch_size, [region, ~region], gray)
    inside, outside = (check_derivatives(gram, name) * generator.sigma**2 for gram in grams)
    if not inside.any():
        raise ValueError(f"{name}: the region does not change with the latents at all. Choose another region.")
    if method == "lowrank":
        if outside.any():
            values, vectors = _low_rank(inside, outside, sparsity, relax)
        else:
            values, vectors = eigh(inside)
    else:
        values, vectors = _generalized(inside, outside, ridge)
    if k is not None and k > len(values):
        raise ValueError(f"{name}(method='lowrank') finds a region of rank {len(values)} here; got k={k}.")
    return from_eigenvectors(values, vectors, z.dtype, k, method, tie_tol)
