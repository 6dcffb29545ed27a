"""Variational Predictability: can a small network tell which direction was changed? (paper: section 6.2)."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from orthocond._checks import check_choice, check_count, check_not_negative
from orthocond.directions.basis import Directions, direction_rows
from orthocond.generators import ImageGenerator, as_generator, draws_noise, images_of
from orthocond.metrics.frechet import short_count
from orthocond.metrics.inception import to_8_bits

_INPUTS = ("difference", "concatenation")
_TEST_BATCH = 500


@dataclass(frozen=True)
class Predictability:
    """What `VariationalPredictability` measures; accuracies from 0 to 1.

    Attributes:
        protocol: Name of the measurement, such as ``vp10k-difference``.
        finals: Test accuracy after the last epoch, for each repeat.
        bests: Largest test accuracy of all epochs, for each repeat: what the authors of the metric report. It is
            chosen on the test pairs, hence optimistic.
        per_direction: ``(k,)``, mean over the repeats of the accuracy after the last epoch for the pairs of each
            direction: the recall. NaN for one that no test pair has.
        chance: Accuracy of guessing, 1 / k.
        train: Number of training pairs.
        test: Number of test pairs.
    """

    protocol: str
    finals: tuple[float, ...]
    bests: tuple[float, ...]
    per_direction: Tensor
    chance: float
    train: int
    test: int

    @property
    def final(self) -> float:
        """Mean over the repeats of the accuracy after the last epoch."""
        return statistics.fmean(self.finals)

    @property
    def final_std(self) -> float:
        """Its standard deviation over the repeats; NaN for one."""
        return _deviation(self.finals)

    @property
    def best(self) -> float:
        """Mean over the repeats of the best accuracy."""
        return statistics.fmean(self.bests)

    @property
    def best_std(self) -> float:
        """Its standard deviation over the repeats; NaN for one."""
        return _deviation(self.bests)

    def __str__(self) -> str:
        return (
            f"{self.protocol}: best {self.best:.1%} ± {self.best_std:.1%}, final {self.final:.1%} ± "
            f"{self.final_std:.1%} over {len(self.finals)} repeats, chance {self.chance:.1%}"
        )


def _deviation(values: tuple[float, ...]) -> float:
    return statistics.stdev(values) if len(values) > 1 else float("nan")


@dataclass(frozen=True)
class VariationalPredictability:
    r"""Few-shot accuracy of a small network that sees two images and names the direction in which they differ.

    Coordinates :math:`c \sim U[-e, e]^k` along the directions D and a rest of the prior outside their span give
    :math:`z_1 = c D + r`. In :math:`z_2` one coordinate, chosen uniformly, is drawn again. A convolutional network
    learns from few pairs which one, and is tested on the others; defaults are the official protocol: 10,000 pairs of
    which 1,000 train, difference of the images, Adam with 0.01, batches of 32, 200 epochs. For EigenGAN the paper's
    authors take ``extent=4`` and ``truncation=0.7``. Pairs are kept as 8-bit images in memory, as a viewer sees them:
    changes below 1/255 do not count.

    A high value means that directions can be told apart, not that each changes only one factor. Larger changes are
    easier, so compare at one ``extent``. Look at the effect matrix too, where true factors can be read.

    Args:
        pairs: Number of pairs.
        test_ratio: Part of them for testing.
        inputs: The network sees the ``"difference"`` of the images or their ``"concatenation"``.
        epochs: Epochs of training.
        lr: Learning rate of Adam.
        batch_size: Pairs in a training batch.
        widths: Channels of the network: first two, third and fourth convolution. Smaller ones are faster, and another
            protocol.
        repeats: Number of splits and networks for the same pairs.
        extent: Half-width e of the coordinates' range, in sigma of the prior.
        truncation: Factor of the latent outside the span of the directions.
        validate_every: Epochs from one test to the next; ``best`` is over these. The last epoch is always tested.
        seed: Seed of pairs, splits and networks. The global random state is neither used nor changed.

    Raises:
        ValueError: If a setting is not valid.

    Example:
        >>> def generator(z):  # each latent is one quarter of the image
        ...     return z.tanh().reshape(-1, 1, 2, 2).repeat_interleave(4, 2).repeat_interleave(4, 3)
        >>> generator.z_dim = 4
        >>> small = VariationalPredictability(pairs=400, test_ratio=0.5, epochs=5, widths=(4, 8, 16), repeats=2)
        >>> result = small.measure(generator)
        >>> result.protocol, result.chance, result.best > 0.8
        ('vp400-difference', 0.25, True)

    References:
        Zhu, Xu, Tao (2020), Learning disentangled representations with latent variation predictability; Song, Sebe,
        Wang (2022), section 6.2.
    """

    pairs: int = 10_000
    test_ratio: float = 0.9
    inputs: str = "difference"
    epochs: int = 200
    lr: float = 0.01
    batch_size: int = 32
    widths: tuple[int, int, int] = (64, 128, 256)
    repeats: int = 3
    extent: float = 2.0
    truncation: float = 1.0
    validate_every: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("pairs", "batch_size"):
            check_count(getattr(self, name), f"VariationalPredictability({name}=...)", 2)
        for name in ("epochs", "repeats", "validate_every"):
            check_count(getattr(self, name), f"VariationalPredictability({name}=...)", 1)
        if len(self.widths) != 3:
            raise ValueError(f"VariationalPredictability(widths=...) needs three numbers; got {self.widths!r}.")
        for width in self.widths:
            check_count(width, "VariationalPredictability(widths=...)", 1)
        check_choice(self.inputs, "VariationalPredictability(inputs=...)", _INPUTS)
        check_not_negative(self.truncation, "VariationalPredictability(truncation=...)")
        for name in ("lr", "extent"):
            if check_not_negative(getattr(self, name), f"VariationalPredictability({name}=...)") == 0:
                raise ValueError(f"VariationalPredictability({name}=...) needs a number above 0; got 0.")
        if not 2 <= self.train_pairs < self.pairs:
            raise ValueError(
                f"VariationalPredictability(test_ratio=...) needs to leave two pairs for training and one for testing; "
                f"got {self.test_ratio} of {self.pairs}."
            )

    @property
    def train_pairs(self) -> int:
        """Number of pairs for training."""
        return self.pairs - round(self.pairs * self.test_ratio)

    @property
    def protocol(self) -> str:
        """Name of the measurement: number of pairs and inputs."""
        return f"vp{short_count(self.pairs)}-{self.inputs}"

    def measure(
        self,
        generator: ImageGenerator,
        directions: Directions | Tensor | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> Predictability:
        """Measure a generator.

        Args:
            generator: A `Generator`, or a callable ``G(z) -> images (n, C, H, W)`` in [-1, 1] with ``z_dim``. Noise
                that it draws is the same for both images of a pair.
            directions: `Directions`, or unit rows ``(k, z_dim)``, 2 <= k <= z_dim, such as those of SeFa or the
                subspaces of EigenGAN; None takes the axes.
            progress: Called after each epoch with the number of epochs done and of all, over all repeats.

        Returns:
            A `Predictability`.

        Raises:
            TypeError: If the generator or its images are of another kind.
            ValueError: If directions or images do not fit.
        """
        first, second, labels, count = self.make_pairs(generator, directions)
        runs = [self._repeat(i, first, second, labels, count, progress) for i in range(self.repeats)]
        per_direction = torch.stack([r for _, _, r in runs]).nanmean(0)
        return Predictability(
            protocol=self.protocol,
            finals=tuple(f for f, _, _ in runs),
            bests=tuple(b for _, b, _ in runs),
            per_direction=per_direction,
            chance=1 / count,
            train=self.train_pairs,
            test=self.pairs - self.train_pairs,
        )

    def make_pairs(
        self, generator: ImageGenerator, directions: Directions | Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        """Make the pairs.

        Returns:
            First images and second images ``(pairs, C, H, W)``, uint8, the changed direction ``(pairs,)``, and the
            number of directions.

        Raises:
            TypeError: If the generator or its images are of another kind.
            ValueError: If directions or images do not fit.
        """
        generator = as_generator(generator, "VariationalPredictability")
        size = generator.z_dim
        basis = direction_rows(directions, size, "VariationalPredictability").cpu().double()
        count = len(basis)
        if count < 2:
            raise ValueError("VariationalPredictability needs at least two directions to tell apart; got 1.")
        rng = torch.Generator().manual_seed(self.seed)
        reach = self.extent * generator.sigma
        coordinates = (2 * torch.rand(self.pairs, count, generator=rng, dtype=torch.float64) - 1) * reach
        rest = generator.sample(self.pairs, rng).cpu().double() * self.truncation
        labels = torch.randint(count, (self.pairs,), generator=rng)
        again = (2 * torch.rand(self.pairs, generator=rng, dtype=torch.float64) - 1) * reach
        outside = torch.eye(size, dtype=torch.float64) - torch.linalg.pinv(basis) @ basis
        first = coordinates @ basis + (rest @ outside if count < size else 0)
        moved = again - coordinates[torch.arange(self.pairs), labels]
        second = first + moved[:, None] * basis[labels]
        images = []
        draws_noise(generator, first.to(generator.like), "VariationalPredictability")
        for latents in (first, second):
            batches = images_of(generator, latents.to(generator.like), 128, "VariationalPredictability")
            images.append(torch.cat([to_8_bits(batch, "VariationalPredictability") for batch in batches]))
        if min(images[0].shape[-2:]) < 8:
            raise ValueError(
                f"VariationalPredictability needs images of 8 pixels at least; got {tuple(images[0].shape)}."
            )
        return images[0], images[1], labels.to(generator.like.device), count

    def _repeat(
        self,
        index: int,
        first: Tensor,
        second: Tensor,
        labels: Tensor,
        count: int,
        progress: Callable[[int, int], None] | None,
    ) -> tuple[float, float, Tensor]:
        """Final accuracy, best accuracy and final recall of each direction, for one split and network."""
        rng = torch.Generator().manual_seed(self.seed + 1 + index)
        order = torch.randperm(self.pairs, generator=rng).to(labels.device)
        train, test = order[: self.train_pairs], order[self.train_pairs :]
        with torch.random.fork_rng():
            torch.manual_seed(self.seed + 1 + index)
            channels = first.shape[1] * (1 if self.inputs == "difference" else 2)
            network = predictor(channels, count, self.widths).to(labels.device)
        optimizer = torch.optim.Adam(network.parameters(), lr=self.lr)
        best, final, recall = 0.0, 0.0, torch.empty(0)
        for epoch in range(1, self.epochs + 1):
            network.train()
            shuffled = train[torch.randperm(len(train), generator=rng).to(train.device)]
            with torch.enable_grad():
                for batch in shuffled.split(self.batch_size):
                    loss = functional.cross_entropy(network(self._input(first, second, batch)), labels[batch])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            if epoch % self.validate_every == 0 or epoch == self.epochs:
                final, recall = self._test(network, first, second, labels, test, count)
                best = max(best, final)
            if progress is not None:
                progress(index * self.epochs + epoch, self.repeats * self.epochs)
        return final, best, recall

    def _input(self, first: Tensor, second: Tensor, batch: Tensor) -> Tensor:
        one, two = first[batch].float() / 127.5 - 1, second[batch].float() / 127.5 - 1
        return one - two if self.inputs == "difference" else torch.cat([one, two], 1)

    @torch.no_grad()
    def _test(
        self, network: nn.Module, first: Tensor, second: Tensor, labels: Tensor, test: Tensor, count: int
    ) -> tuple[float, Tensor]:
        network.eval()
        parts = test.split(_TEST_BATCH)
        right = torch.cat([network(self._input(first, second, part)).argmax(1) == labels[part] for part in parts])
        found = torch.bincount(labels[test][right], minlength=count).cpu().double()
        return float(right.double().mean()), found / torch.bincount(labels[test], minlength=count).cpu()


def predictor(channels: int, classes: int, widths: tuple[int, int, int] = (64, 128, 256)) -> nn.Sequential:
    """The network of the metric.

    Args:
        channels: Channels of its input.
        classes: Number of directions.
        widths: Channels of its convolutions.

    Returns:
        From ``(n, channels, H, W)`` to scores ``(n, classes)``.
    """
    w0, w1, w2 = widths

    def block(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]

    return nn.Sequential(
        *block(channels, w0, 7, 2),
        *block(w0, w0, 3),
        nn.MaxPool2d(3, 2, 1),
        *block(w0, w1, 3),
        *block(w1, w2, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(w2, classes),
    )
