"""``orthocond traverse`` and ``orthocond bench`` of a GAN of a few steps."""

import json

import pytest
from gan_helpers import eigen, tiny
from lab_helpers import tiny as classifier
from lab_helpers import train
from PIL import Image

from orthocond.cli import main
from orthocond.cli.traverse import _steps
from orthocond.lab.runs import Run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A vanilla GAN, an EigenGAN, a GAN without checkpoint, and a classifier."""
    root = tmp_path_factory.mktemp("runs")
    for config in (tiny(), eigen()):
        run = Run.create(root, "gan", config)
        train(config, run)
    Run.create(root, "untrained", tiny())
    Run.create(root, "classifier", classifier())
    return root


def traverse(runs, run, *options):
    return main(["traverse", str(run), "--runs", str(runs), *map(str, options)])


def test_a_grid_for_each_direction(runs, capsys):
    assert traverse(runs, 0) == 0
    text = capsys.readouterr().out
    file = runs / "00000-gan" / "figures" / "traverse-own.png"
    assert f"Written to {file}" in text
    assert "axes: 4 directions of 4 dimensions" in text  # 6 are asked for where there are so many
    with Image.open(file) as image:
        assert image.width > 7 * 96
        assert image.height > 4 * 4 * 96


@pytest.mark.parametrize("kind", ["sefa", "jacobian", "axes", "joint"])
def test_kinds_and_numbers(kind, runs, tmp_path, capsys):
    out = tmp_path / "new" / "strip.png"
    assert traverse(runs, 0, "--directions", kind, "--k", 2, "--samples", 1, "--steps", "-1..1", "--out", out) == 0
    assert f"{kind}: 2 directions of 4 dimensions" in capsys.readouterr().out
    with Image.open(out) as image:
        assert 2 * 96 < image.height < 4 * 96
        assert 3 * 96 < image.width < 7 * 96


def test_an_animation_of_eigengan(runs, tmp_path, capsys):
    out = tmp_path / "a.gif"
    assert traverse(runs, 1, "--k", 2, "--samples", 2, "--steps=-2..2:3", "--gif", "--out", out) == 0
    assert "eigengan: 2 directions of 4 dimensions" in capsys.readouterr().out
    with Image.open(out) as image:
        assert image.n_frames == 4  # there and back


def test_the_same_seed_gives_the_same_picture(runs, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert traverse(runs, 1, "--k", 1, "--seed", seed, "--out", tmp_path / f"{name}.png") == 0
    a, b, c = ((tmp_path / f"{name}.png").read_bytes() for name in "abc")
    assert a == b != c


def test_steps():
    assert _steps("-3..3") == [-3, -2, -1, 0, 1, 2, 3]
    assert _steps("0.5..1.5:3") == [0.5, 1.0, 1.5]
    assert _steps("-.5..1.6") == [-0.5, 0.5, 1.5]


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("3",), 2, "traverse needs the run of a GAN"),
        (("2",), 1, "no checkpoint yet"),
        (("7",), 2, "no run '7'"),
        (("0", "--k", "5"), 2, "--k needs at most 4, the latents of this generator; got 5"),
        (("0", "--k", "0"), 2, "Must be >= 1"),
        (("0", "--samples", "0"), 2, "Must be >= 1"),
        (("0", "--samples", "1001"), 2, "Must be <= 1000"),
        (("0", "--steps", "-1000000000..1000000000"), 2, "at most 1000 steps"),
        (("0", "--steps", "0..1:100000"), 2, "at most 1000 steps"),
        (("0", "--seed", "-1"), 2, "Must be >= 0"),
        (("0", "--steps", "3"), 2, "LOW..HIGH"),
        (("0", "--steps", "3..-3"), 2, "go up"),
        (("0", "--gif", "--out", "a.png"), 2, "ends with .gif"),
        (("0", "--directions", "jacobi"), 2, "jacobian"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, tuple) else "",
)
def test_errors(options, code, words, runs, capsys):
    assert traverse(runs, *options) == code
    assert words in capsys.readouterr().err


def test_only_some_measures(runs, capsys):
    run = runs / "00000-gan"
    assert main(["evaluate", str(run), "--only", "energy", "axes", "joint", "--quiet", "--no-report"]) == 0
    found = json.loads((run / "evaluation.json").read_text())["directions"]
    assert list(found) == ["axes", "joint"]
    assert "energy" in found["joint"]
    assert "vp" not in found["joint"]
    assert "joint: off-diagonal energy" in capsys.readouterr().out
    assert main(["evaluate", str(run), "--only", "kappa", "--quiet"]) == 2
    assert "There is no measure 'kappa'; there are condition, frechet" in capsys.readouterr().err
    assert main(["evaluate", str(runs / "00003-classifier"), "--skip", "vp", "--quiet"]) == 2
    assert "run without --only and --skip" in capsys.readouterr().err


def test_bench_of_a_gan(tmp_path, capsys):
    out = tmp_path / "bench.json"
    options = ["--methods", "nog", "--repeats", "1", "--batch-size", "4", "--quiet", "--out", str(out)]
    assert main(["bench", "gan-sprites", *options]) == 0
    saved = json.loads(out.read_text())
    assert (saved["preset"], saved["batch_size"]) == ("gan-sprites", 4)
    assert list(saved["milliseconds"]) == ["nog", "none"]
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if line.startswith("nog"))
    row, cells = saved["milliseconds"]["nog"], line.split()
    assert list(row["parts"]) == ["discriminator", "generator", "optimizer", "average"]
    assert float(cells[6]) == pytest.approx(row["relative"]["median"], abs=1e-3)
    assert float(cells[9]) == pytest.approx(row["by_optimizer"]["median"], abs=1e-3)
    assert main(["bench", "gan-sprites", "--methods", "svd"]) == 2
    assert "There is no method 'svd'" in capsys.readouterr().err
