"""Variational Predictability: values, pairs, determinism, errors."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from orthocond.metrics import Predictability, VariationalPredictability
from orthocond.metrics.predictability import predictor
from tests.metrics_helpers import Tiles, rotation

SMALL = VariationalPredictability(pairs=400, test_ratio=0.5, epochs=4, widths=(8, 8, 16), repeats=2, validate_every=2)


class Blind(Tiles):
    """A generator that ignores its latents."""

    def forward(self, z):
        return super().forward(0 * z)


# values


@pytest.mark.parametrize("inputs", ["difference", "concatenation"])
def test_directions_that_change_disjoint_pixels_are_told_apart(inputs):
    setting = dataclasses.replace(SMALL, inputs=inputs, pairs=600, test_ratio=1 / 3, epochs=12, repeats=1)
    result = setting.measure(Tiles())
    assert result.best > (0.9 if inputs == "difference" else 0.75)
    assert result.protocol == f"vp600-{inputs}"
    assert result.chance == 0.25
    assert (result.train, result.test) == (400, 200)
    assert result.per_direction.shape == (4,)
    assert result.per_direction.min() > 0.5


def test_latents_that_do_nothing_are_guessed():
    result = SMALL.measure(Blind())
    # 200 test pairs: three standard deviations of guessing, and one class always named is as good as guessing.
    assert abs(result.final - 0.25) < 3 * math.sqrt(0.25 * 0.75 / 200)
    assert abs(float(result.per_direction.mean()) - 0.25) < 1e-6  # each network names one class for all


def test_changes_below_one_level_of_8_bits_do_not_count():
    class Faint(Tiles):
        def forward(self, z):
            return super().forward(1e-4 * z)

    assert SMALL.measure(Faint()).final < 0.4


def test_the_turned_generator_is_as_good_along_its_own_directions():
    turn = rotation(4)
    plain, turned = SMALL.measure(Tiles()), SMALL.measure(Tiles(turn=turn), turn.mT.contiguous())
    assert turned.bests == pytest.approx(plain.bests, abs=0.02)  # rounding to 8 bits


def test_the_network_is_the_official_one():
    network = predictor(3, 30)
    kinds = [type(m).__name__ for m in network]
    block = ["Conv2d", "BatchNorm2d", "ReLU"]
    assert kinds == [*block, *block, "MaxPool2d", *block, *block, "AdaptiveAvgPool2d", "Flatten", "Linear"]
    # 7²·3·64 + 9·64² + 9·64·128 + 9·128·256, two for each normalized channel, and the linear layer
    assert sum(p.numel() for p in network.parameters()) == 9408 + 36864 + 73728 + 294912 + 2 * 512 + 257 * 30
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 30)
    sides = []
    network[6].register_forward_hook(lambda m, i, o: sides.extend([i[0].shape[-1], o.shape[-1]]))
    network(torch.zeros(2, 3, 64, 64))
    assert sides == [32, 16]
    official = VariationalPredictability()
    assert (official.pairs, official.train_pairs, official.epochs, official.lr) == (10_000, 1_000, 200, 0.01)


# pairs


def coordinates(setting, size, directions=None):
    """The latents of both images of all pairs, as the generator saw them."""
    seen = []

    def generator(z):
        seen.append(z.clone())
        return torch.zeros(len(z), 1, 8, 8)

    generator.z_dim = size
    _, _, labels, count = setting.make_pairs(generator, directions)
    first, second = torch.cat(seen)[-2 * setting.pairs :].chunk(2)  # those before look for noise
    return first, second, labels, count


def test_one_coordinate_of_a_pair_is_drawn_again():
    setting = VariationalPredictability(pairs=4000, extent=3.0)
    first, second, labels, count = coordinates(setting, 5)
    assert count == 5
    changed = first != second
    assert torch.equal(changed.sum(1), torch.ones(4000, dtype=torch.long))
    assert torch.equal(changed.long().argmax(1), labels)
    for z in (first, second):
        assert z.abs().max() <= 3
        assert float(z.std()) == pytest.approx(3 / math.sqrt(3), rel=0.02)  # uniform
    moved = (first - second).abs().amax(1)
    assert float(moved.mean()) == pytest.approx(2, rel=0.05)  # two thirds of e, as triangular changes are
    assert torch.bincount(labels).min() > 700


def test_outside_the_directions_latents_are_normal_and_shared():
    setting = VariationalPredictability(pairs=4000, truncation=0.7)
    basis = rotation(6)[:2]
    first, second, labels, count = coordinates(setting, 6, basis)
    assert count == 2
    rest = first - first @ basis.mT @ basis
    torch.testing.assert_close(rest, second - second @ basis.mT @ basis, rtol=0, atol=1e-5)
    assert float(rest.square().sum(1).mean()) == pytest.approx(4 * 0.49, rel=0.05)
    along = (first - second) @ basis.mT
    assert along.gather(1, 1 - labels[:, None]).abs().max() < 1e-5
    assert (first @ basis.mT).abs().max() < 2 + 1e-5


def test_the_rest_is_outside_the_span_of_slanted_directions():
    setting = VariationalPredictability(pairs=500)
    basis = nn.functional.normalize(torch.tensor([[1.0, 0, 0, 0, 0], [1.0, 1, 0, 0, 0]]), dim=1)
    first, second, labels, _ = coordinates(setting, 5, basis)
    # the normal rest has no part in the plane of the two, so that coordinates stay within their range
    inside = torch.linalg.lstsq(basis.mT, first.mT).solution.mT
    assert inside.abs().max() < 2 + 1e-5
    torch.testing.assert_close(first[:, 2:], second[:, 2:])
    torch.testing.assert_close(first[:, 2:].std(), torch.tensor(1.0), rtol=0.1, atol=0)
    moved = torch.linalg.lstsq(basis.mT, (second - first).mT).solution.mT
    assert moved.gather(1, 1 - labels[:, None]).abs().max() < 1e-5


# determinism


def test_a_seed_fixes_everything_and_the_global_state_stays():
    short = dataclasses.replace(SMALL, epochs=1, pairs=100)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one = short.measure(Tiles())
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    two = short.measure(Tiles())
    assert one.finals == two.finals
    assert torch.equal(one.per_direction, two.per_direction)
    other = [dataclasses.replace(short, seed=s).make_pairs(Tiles())[0] for s in (0, 1)]
    assert not torch.equal(*other)


def test_each_repeat_has_a_split_and_a_network_of_its_own(monkeypatch):
    seen = []
    test = VariationalPredictability._test

    def spy(self, network, first, second, labels, part, count):
        seen.append((set(part.tolist()), network[0].weight.detach().clone()))
        return test(self, network, first, second, labels, part, count)

    monkeypatch.setattr(VariationalPredictability, "_test", spy)
    dataclasses.replace(SMALL, pairs=60, epochs=1, repeats=3).measure(Tiles())
    for i in range(3):
        assert len(seen[i][0]) == 30
        for j in range(i):
            assert seen[i][0] != seen[j][0]
            assert not torch.equal(seen[i][1], seen[j][1])


def test_progress_and_validation():
    calls = []
    setting = dataclasses.replace(SMALL, pairs=40, epochs=3, validate_every=2)
    result = setting.measure(Tiles(), progress=lambda done, total: calls.append((done, total)))
    assert calls == [(i, 6) for i in range(1, 7)]
    assert len(result.finals) == len(result.bests) == 2
    assert all(b >= f for b, f in zip(result.bests, result.finals, strict=True))


def test_the_generator_is_left_as_it_was():
    class Noisy(Tiles):
        def __init__(self):
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def forward(self, z):
            return self.dropout(super().forward(z))

    generator = Noisy()
    generator.dropout.train()
    one, two, labels, _ = dataclasses.replace(SMALL, pairs=20).make_pairs(generator)
    assert generator.training
    assert generator.dropout.training
    tiles = (one != two).reshape(20, 2, 8, 2, 8).any(4).any(2).flatten(1)
    assert int(tiles.sum()) <= 20  # no dropout: only the tile that was changed
    assert not tiles[torch.arange(4) != labels[:, None]].any()


def test_a_result_sums_up_its_repeats():
    result = Predictability("vp10k-difference", (0.2, 0.4), (0.3, 0.5), torch.zeros(4), 0.25, 1000, 9000)
    assert (result.final, result.best) == pytest.approx((0.3, 0.4))
    assert result.final_std == pytest.approx(math.sqrt(0.02))
    assert str(result) == ("vp10k-difference: best 40.0% ± 14.1%, final 30.0% ± 14.1% over 2 repeats, chance 25.0%")
    assert math.isnan(dataclasses.replace(result, finals=(0.2,)).final_std)


# errors


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"pairs": 1}, "pairs"),
        ({"batch_size": 1}, "batch_size"),
        ({"epochs": 0}, "epochs"),
        ({"repeats": 0}, "repeats"),
        ({"validate_every": 0}, "validate_every"),
        ({"widths": (8, 8)}, "three numbers"),
        ({"widths": (8, 8, 0)}, "widths"),
        ({"inputs": "sum"}, "'difference', 'concatenation'; got 'sum'"),
        ({"lr": 0}, "lr"),
        ({"extent": -1}, "extent"),
        ({"truncation": -1}, "truncation"),
        ({"test_ratio": 1.0}, "two pairs for training"),
        ({"test_ratio": 0.0}, "one for testing"),
    ],
)
def test_settings_are_checked(settings, text):
    with pytest.raises(ValueError, match=text):
        VariationalPredictability(**settings)


def test_generators_and_directions_are_checked():
    generator = Tiles()
    with pytest.raises(TypeError, match="z_dim of this function is None"):
        SMALL.measure(lambda z: z)
    with pytest.raises(ValueError, match="at least two directions"):
        SMALL.measure(generator, torch.eye(4)[:1])
    with pytest.raises(ValueError, match="at most as many directions as dimensions, 4"):
        SMALL.measure(generator, torch.cat([torch.eye(4)] * 2))
    with pytest.raises(ValueError, match="4 latents; got 3"):
        SMALL.measure(generator, torch.eye(3))
    with pytest.raises(ValueError, match="length 1"):
        SMALL.measure(generator, 2 * torch.eye(4))

    def make(images):
        def broken(z):
            return images(len(z))

        broken.z_dim = 4
        return broken

    with pytest.raises(ValueError, match="8 pixels"):
        SMALL.measure(make(lambda n: torch.zeros(n, 1, 4, 4)))
    with pytest.raises(ValueError, match=r"images \(n, C, H, W\)"):
        SMALL.measure(make(lambda n: torch.zeros(n, 8, 8)))
    with pytest.raises(ValueError, match="finite images"):
        SMALL.measure(make(lambda n: torch.full((n, 1, 8, 8), torch.nan)))
    with pytest.raises(ValueError, match=r"in \[-1, 1\]; got 3 to 3"):
        SMALL.measure(make(lambda n: torch.full((n, 1, 8, 8), 3.0)))
    with pytest.raises(TypeError, match="floating-point"):
        SMALL.measure(make(lambda n: torch.zeros(n, 1, 8, 8, dtype=torch.long)))
