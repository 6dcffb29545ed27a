"""The Fréchet distance between two sets of images, FID among them (paper: section 6.2)."""

import os
import warnings
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from orthocond._checks import check_floating, check_square, without_autocast
from orthocond._distributed import agree, is_first, several_processes
from orthocond.matrix import decompose
from orthocond.matrix.symmetric import symmetric_part
from orthocond.metrics.inception import InceptionExtractor
from orthocond.metrics.moments import FeatureMoments, join_across

_FORMAT = "orthocond Fréchet reference 1"


def frechet_distance(mean_a: Tensor, cov_a: Tensor, mean_b: Tensor, cov_b: Tensor) -> float:
    r"""The squared Fréchet (2-Wasserstein) distance of two normal distributions.

    .. math:: \|\mu_a - \mu_b\|^2 + \mathrm{tr}\left(A + B - 2 (A^{1/2} B A^{1/2})^{1/2}\right)

    The roots come from two symmetric eigenproblems, so that nothing is ever complex and singular covariances need no
    ridge: eigenvalues within rounding of zero count as zero. The eigenvalues of :math:`A^{1/2} B A^{1/2}` are the
    squares of the singular values of :math:`A^{1/2} B^{1/2}`; these are computed directly, because a root taken after
    rounding would cost half of the digits of all small ones.

    Args:
        mean_a: ``(d,)``.
        cov_a: ``(d, d)``, symmetric positive semi-definite.
        mean_b: ``(d,)``.
        cov_b: ``(d, d)``.

    Returns:
        The distance, computed in float64; at least 0.

    Raises:
        TypeError: If an argument is not a real floating-point tensor.
        ValueError: If shapes do not fit, an entry is not finite, or a covariance has a negative eigenvalue.

    Accuracy:
        Against 50 digits, relative: 1e-14 for well-conditioned covariances, 4e-13 for condition numbers of 1e8. For
        covariances of two sets that are equal 1e-14 of their trace. At a singular covariance the distance is not
        smooth: the rounding of its entries to float64 alone moves it by 1e-8.

    Example:
        >>> eye = torch.eye(2)
        >>> frechet_distance(torch.zeros(2), eye, torch.tensor([3.0, 0.0]), 4 * eye)
        11.0

    References:
        Dowson, Landau (1982); Heusel et al. (2017). Song, Sebe, Wang (2022), section 6.2.
    """
    a, b = _normal(mean_a, cov_a, "a"), _normal(mean_b, cov_b, "b")
    if a[0].shape != b[0].shape:
        raise ValueError(f"frechet_distance needs equal numbers of features; got {len(a[0])} and {len(b[0])}.")
    b = (b[0].to(a[0].device), b[1].to(a[0].device))
    with without_autocast(a[0]):
        factors = [_factor(cov, name) for (_, cov), name in ((a, "a"), (b, "b"))]
        fidelity = torch.linalg.svdvals(factors[0].mT @ factors[1]).sum()
        distance = (a[0] - b[0]).square().sum() + a[1].trace() + b[1].trace() - 2 * fidelity
    return max(float(distance), 0.0)


def _normal(mean: Tensor, cov: Tensor, which: str) -> tuple[Tensor, Tensor]:
    mean = check_floating(mean, f"frechet_distance(mean_{which})").detach().double()
    cov = check_square(cov, f"frechet_distance(cov_{which})").detach().double()
    if mean.ndim != 1 or cov.shape != (len(mean), len(mean)) or not len(mean):
        raise ValueError(
            f"frechet_distance needs a mean (d,) and a covariance (d, d); got mean_{which} {tuple(mean.shape)} and "
            f"cov_{which} {tuple(cov.shape)}."
        )
    decompose.check_finite(mean[None])
    decompose.check_finite(cov)
    return mean, symmetric_part(cov)


def _factor(cov: Tensor, which: str) -> Tensor:
    """A matrix F ``(d, rank)`` with F Fᵀ = cov."""
    values, vectors = decompose.eigh(cov)
    noise = len(cov) * torch.finfo(cov.dtype).eps * values.abs().max()
    # A covariance that was accumulated in float32 has negative eigenvalues of its rounding, which are no mistake.
    if values[0] < -max(noise, 1e-5 * values[-1]):
        raise ValueError(
            f"frechet_distance needs positive semi-definite covariances; cov_{which} has the eigenvalue "
            f"{float(values[0]):.3g} beside {float(values[-1]):.3g}. Pass covariances, not correlations of parts."
        )
    kept = values > noise
    return vectors[:, kept] * values[kept].sqrt()


class FrechetDistance:
    """Fréchet distance between real and generated images in the features of any extractor; FID with Inception's.

    Features are accumulated in float64 as they come, so memory is one matrix ``(d, d)`` a side. Under torch.distributed
    each process updates with its own images. `compute` and `save_reference` join them, and all processes have to call
    both.

    Below d + 1 images the covariance is singular. The distance is still defined and computed, but its upward bias is
    far larger than usual, and `compute` warns once. The bias shrinks like 1/n for any n, so compare only distances of
    the same ``protocol``, which carries the number of generated images, and the same reference.

    Args:
        extractor: Callable from a batch of images to features ``(n, d)``, such as `inception_extractor()`; a module
            has to be in evaluation mode. It decides which images it takes.
        name: Name of the extractor in ``protocol``; None takes its attribute ``name``, or that of its class or
            function.

    Raises:
        TypeError: If ``extractor`` is not callable.

    Example:
        >>> fd = FrechetDistance(torch.nn.Flatten().eval(), name="pixels")
        >>> for _ in range(10):
        ...     fd.update(torch.randn(100, 1, 2, 2), real=True)
        ...     fd.update(1 + torch.randn(100, 1, 2, 2), real=False)
        >>> print(f"{fd.protocol}: {fd.compute():.1f}")
        fd1k-pixels: 4.0

    References:
        Heusel et al. (2017); Song, Sebe, Wang (2022), section 6.2.
    """

    def __init__(self, extractor: Callable[[Tensor], Tensor], name: str | None = None) -> None:
        if not callable(extractor):
            raise TypeError(f"FrechetDistance needs a callable extractor; got {type(extractor).__name__}.")
        self.extractor = extractor
        own = getattr(extractor, "name", None) or getattr(extractor, "__name__", type(extractor).__name__)
        self.name = name or str(own).strip("<>").lower()
        self._sides: dict[bool, FeatureMoments | None] = {True: None, False: None}
        self._loaded = False  # the reference came from a file and holds the images of all processes
        self._computed: int | None = None  # generated images of all processes, if none came since `compute`
        self._warned = False

    @property
    def protocol(self) -> str:
        """Name of the measurement: ``fid10k-inception`` for 10,000 generated images and `InceptionExtractor`.

        Anything but these features is ``fd…``. Under torch.distributed the count is that of this process until
        `compute` is called.
        """
        return self._protocol(self.count(real=False) if self._computed is None else self._computed)

    @property
    def _kind(self) -> str:
        return "fid" if isinstance(self.extractor, InceptionExtractor) else "fd"

    def _protocol(self, count: int) -> str:
        return f"{self._kind}{short_count(count)}-{self.name}"

    def count(self, *, real: bool) -> int:
        """Number of real or generated images so far in this process."""
        side = self._sides[real]
        return 0 if side is None else side.count

    @torch.no_grad()
    def update(self, images: Tensor, real: bool) -> None:
        """Add a batch of images.

        Args:
            images: What the extractor takes.
            real: Whether they are real or generated.

        Raises:
            RuntimeError: If the extractor is in training mode, or real images come after `load_reference`.
            ValueError: If the features are not ``(n, d)``, their number changes, or one is not finite.
        """
        if real and self._loaded:
            raise RuntimeError("The reference was loaded from a file; call reset() before you update it with images.")
        if getattr(self.extractor, "training", False) and isinstance(self.extractor, nn.Module):
            raise RuntimeError("FrechetDistance needs an extractor in evaluation mode; call extractor.eval().")
        features = check_floating(self.extractor(images), "FrechetDistance(extractor)")
        features = features.flatten(1) if features.ndim > 2 and features[0].numel() == features.shape[1] else features
        if features.ndim != 2 or len(features) != len(images) or not features.shape[1]:
            raise ValueError(
                f"FrechetDistance needs one row of features for each of {len(images)} images; the extractor gave "
                f"{tuple(features.shape)}. Pool over positions, or flatten."
            )
        if not features.isfinite().all():
            bad = int((~features.isfinite()).any(1).sum())
            raise ValueError(
                f"FrechetDistance needs finite features; those of {bad} of {len(images)} "
                f"{'real' if real else 'generated'} images are not. Look for NaN in the images."
            )
        # MPS has no float64.
        self._add(real, FeatureMoments.of(features.cpu() if features.device.type == "mps" else features))

    def _add(self, real: bool, new: FeatureMoments) -> None:
        known = self._sides[real] or self._sides[not real]
        if known is not None and known.features != new.features:
            raise ValueError(f"FrechetDistance has seen {known.features} features; these have {new.features}.")
        side = self._sides[real]
        self._sides[real] = new if side is None else side.join(new)
        self._computed = None

    def compute(self) -> float:
        """The distance of all images so far, of all processes.

        Returns:
            The distance; `frechet_distance` of the unbiased covariances.

        Raises:
            RuntimeError: If a side has fewer than two images.
        """
        real, fake = self._joined(True), self._joined(False)
        self._check_counts(real, fake)
        self._computed = fake.count
        return frechet_distance(real.mean, real.covariance, fake.mean, fake.covariance)

    def _joined(self, real: bool) -> FeatureMoments:
        side = self._sides[real]
        if several_processes(None):
            loaded = real and self._agree_on_loaded()
            side = side if loaded else join_across(side)
        if side is None or side.count < 2:
            count = 0 if side is None else side.count
            what = "real images (or load_reference)" if real else "generated images"
            raise RuntimeError(f"FrechetDistance needs at least two {what}; got {count}. Call update first.")
        return side

    def _agree_on_loaded(self) -> bool:
        if not agree(self._loaded):
            raise RuntimeError("load_reference has to be called in all processes or in none; some have not.")
        return self._loaded

    def _check_counts(self, real: FeatureMoments, fake: FeatureMoments) -> None:
        short = [f"{s.count} {n}" for s, n in ((real, "real"), (fake, "generated")) if s.count <= s.features]
        if short and not self._warned:
            self._warned = True
            warnings.warn(
                f"{' and '.join(short)} images give a singular covariance of {real.features} features: the distance is "
                f"biased upward. Use more than {real.features} images, or compare only values of the same counts.",
                stacklevel=3,
            )

    def reset(self, *, keep_real: bool = False) -> None:
        """Forget all images, or the generated ones only.

        Args:
            keep_real: Keep the real images or the loaded reference.
        """
        self._sides[False] = self._computed = None
        if not keep_real:
            self._sides[True] = None
            self._loaded = False

    def merge(self, other: "FrechetDistance") -> None:
        """Add the images that another object has seen, of a shard or of a process.

        Raises:
            RuntimeError: If one of the references was loaded from a file and the other has images too.
            ValueError: If its features are others.
        """
        self._check_same(other._kind, other.name)
        if other._sides[True] is not None and self._sides[True] is not None and (self._loaded or other._loaded):
            raise RuntimeError("A reference from a file cannot be merged: its images would count twice. Reset one.")
        for real in (True, False):
            side = other._sides[real]
            if side is not None:
                self._add(real, side)
        self._loaded |= other._loaded

    def _check_same(self, kind: str, name: str) -> None:
        if (kind, name) != (self._kind, self.name):
            raise ValueError(
                f"These statistics are of the features {kind}-{name}, this object has {self._kind}-{self.name}: they "
                "cannot be compared. Make them with the same extractor and name."
            )

    def state_dict(self) -> dict[str, Any]:
        """What was seen so far as plain values and tensors, for a checkpoint."""
        sides = {name: self._sides[real] for name, real in (("real", True), ("fake", False))}
        state = {name: None if s is None else s.state_dict() for name, s in sides.items()}
        return {"kind": self._kind, "name": self.name, "loaded": self._loaded} | state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace what was seen by a `state_dict`.

        Raises:
            ValueError: If it is of other features, or damaged.
        """
        missing = {"kind", "name", "loaded", "real", "fake"} - set(state)
        if missing:
            raise ValueError(f"The state of a FrechetDistance lacks {', '.join(sorted(missing))}; pass a state_dict().")
        self._check_same(state["kind"], state["name"])
        both = {}
        for name, real in (("real", True), ("fake", False)):
            side = state[name]
            both[real] = None if side is None else FeatureMoments.from_state(side, f"The state {name!r}")
        self._sides, self._loaded, self._computed = both, bool(state["loaded"]), None

    def save_reference(self, path: str | PathLike[str]) -> None:
        """Write the statistics of the real images of all processes to a safetensors file, atomically.

        Raises:
            ImportError: If safetensors is not installed.
            RuntimeError: If there are fewer than two real images.
        """
        _, _, save_file = _safetensors()
        real = self._joined(True)
        if not is_first():
            return
        tensors = {"mean": real.mean.cpu(), "scatter": real.scatter.cpu().contiguous()}
        metadata = {
            "format": _FORMAT,
            "protocol": self._protocol(real.count),
            "kind": self._kind,
            "name": self.name,
            "count": str(real.count),
        }
        target = Path(path)
        temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
        try:
            save_file(tensors, temporary, metadata)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)

    def load_reference(self, path: str | PathLike[str], *, count: int | None = None) -> None:
        """Take the statistics of the real images from a file of `save_reference`; in all processes or in none.

        Args:
            path: The file.
            count: Number of images that it has to be made of; None takes any.

        Raises:
            FileNotFoundError: If there is no such file.
            ImportError: If safetensors is not installed.
            ValueError: If the file is damaged, of other features, or of another number of images.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(
                f"There is no reference {path}; make it with update(..., real=True), save_reference."
            )
        metadata, tensors = _read_reference(Path(path))
        found = int(metadata["count"])
        self._check_same(metadata["kind"], metadata["name"])
        if count is not None and found != count:
            raise ValueError(f"{path} was made of {found} images; {count} are needed. Make it again.")
        side = FeatureMoments.from_state(tensors | {"count": found}, str(path))
        self._sides[True] = None
        self._add(True, side)
        self._loaded = True


def _read_reference(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    safe_open, error_kind, _ = _safetensors()
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (not a dictionary)
    except error_kind as error:
        raise ValueError(f"{path} is damaged or not a safetensors file ({error}). Make it again.") from error
    if metadata.get("format") != _FORMAT or not {"kind", "name", "count"} <= set(metadata):
        raise ValueError(f"{path} is not a Fréchet reference of this version; make it with save_reference.")
    return metadata, tensors


def _safetensors() -> tuple[Any, Any, Any]:
    """``safe_open``, ``SafetensorError`` and ``save_file``."""
    try:
        from safetensors import SafetensorError, safe_open
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError("References need safetensors; pip install safetensors, or orthocond[lab].") from error
    return safe_open, SafetensorError, save_file


def short_count(count: int) -> str:
    """A count as protocols write it: 10k, 2.5k, 2048."""
    return f"{count / 1000:g}k" if count >= 1000 and count % 100 == 0 else str(count)
