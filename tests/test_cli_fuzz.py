"""A fuzz of command lines and configuration files: one message and an exit code, whatever is typed."""

import contextlib
import copy
import io
import json
import random
import time

import pytest

from orthocond.cli import app, main, settings
from orthocond.cli import train as train_module
from orthocond.lab import experiments
from orthocond.lab.config import flatten, to_json

_SECONDS = 60.0
_WORDS = (
    *("", " ", "0", "-1", "1", "3", "0.5", "-0.0", "1e999", "nan", "inf", "none", "true", "[]", "[1,2]", "{}", "--"),
    *("9" * 40, "1e-400", "a" * 5000, "\x1b[2J", "../../etc", "/dev/null", "κ", "\ud800", "%s%n", "a:b", "os:system"),
    *("nog", "nog+ow+olr", "nog@all", "nog@", "@all", "+", "nog+nog", "sprites", "paper", "laptop", "--help", "-h"),
)
_VALUES = (
    None,
    True,
    0,
    -1,
    3,
    10**30,
    0.5,
    -2.5,
    float("inf"),
    "",
    "nog",
    "x" * 3000,
    [],
    [1, 2],
    [None],
    {},
    {"a": 1},
)


def _say(tokens):
    """The exit code and what was printed, without a training."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = main(tokens)
    return code, out.getvalue(), errors.getvalue()


def _options(draw):
    """Some options of some command, with values that may fit."""
    name = draw.choice([name for name in app.COMMANDS if name not in ("demo", "data", "bench", "table")])
    tokens = [name]
    if name == "train":
        preset = draw.choice(experiments.names())
        tokens.append(preset if draw.random() < 0.9 else draw.choice(_WORDS))
        paths = [setting.path for setting in settings.settings(experiments.preset(preset))]
        known = ["--" + path.replace("_", "-") for path in paths]
        known += ["--config", "--resume", "--scale", "--seed", "--method", "--data", "--model", "--runs"]
    else:
        tokens.append(draw.choice(_WORDS))
        known = ["--runs", "--data-root", "--k", "--steps", "--samples", "--seed", "--directions", "--allow-import"]
    for _ in range(draw.randint(0, 4)):
        option = draw.choice(known)
        tokens += [f"{option}={draw.choice(_WORDS)}"] if draw.random() < 0.3 else [option, draw.choice(_WORDS)]
    return tokens


def _damage(draw, tree):
    """The configuration with a leaf or branch replaced, added or taken away."""
    paths = list(flatten(tree))
    for _ in range(draw.randint(1, 3)):
        *branches, leaf = draw.choice(paths).split(".")
        place = tree
        for branch in branches[: draw.randint(0, len(branches))]:
            if not isinstance(place.get(branch), dict):
                break
            place = place[branch]
        key = draw.choice([leaf, draw.choice(list(place) or ["x"]), "unknown"])
        place[key] = copy.deepcopy(draw.choice(_VALUES))
    return tree


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_command_lines(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_module, "_train", lambda *_: 0)
    draw, counts = random.Random(0), {}
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end:
        tokens = _options(draw)
        code, _, errors = _say(tokens)
        assert code in (0, 2), (tokens, errors)
        assert "Traceback" not in errors, tokens
        assert "\x1b" not in errors, tokens
        assert bool(errors.strip()) == (code != 0), tokens
        counts[tokens[0], code] = counts.get((tokens[0], code), 0) + 1
    with capsys.disabled():
        print(f"\ntried command lines, by command and exit code: {dict(sorted(counts.items()))}")
    assert sum(counts.values()) > 100


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_configurations(monkeypatch, tmp_path, capsys):
    """A damaged configuration is an error that names its setting, or it is one that can be trained."""
    monkeypatch.setattr(train_module, "_train", lambda *_: 0)
    draw, counts = random.Random(1), {}
    file = tmp_path / "config.json"
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end:
        preset = draw.choice(experiments.names())
        tree = _damage(draw, to_json(experiments.preset(preset)))
        with contextlib.suppress(TypeError, ValueError):
            assert experiments.read_config(tree).kind in experiments.TASKS
        file.write_text(json.dumps(tree))
        code, _, errors = _say(["train", preset, "--config", str(file)])
        assert code in (0, 2), tree
        assert "Traceback" not in errors
        counts[code] = counts.get(code, 0) + 1
    with capsys.disabled():
        print(f"\ntried configurations, by exit code: {counts}")
    assert sum(counts.values()) > 100
