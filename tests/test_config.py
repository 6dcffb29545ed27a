import json
import math
from dataclasses import dataclass, field
from typing import Literal, Optional

import pytest

from orthocond.lab.config import config_diff, config_hash, from_json, replace_at, to_json


@dataclass(frozen=True)
class Sgd:
    lr: float = 0.1
    nesterov: bool = False
    milestones: tuple[int, ...] = (100, 200)
    betas: tuple[float, float] = (0.9, 0.999)
    clip: float | None = None


@dataclass(frozen=True)
class Augment:
    padding: int = 4

    def __post_init__(self):
        if self.padding < 0:
            raise ValueError(f"padding needs at least 0; got {self.padding}.")


@dataclass(frozen=True)
class Training:
    name: str
    epochs: int = 350
    method: Literal["svd", "nog", "nog+ow+olr"] = "svd"
    optimizer: Sgd = field(default_factory=Sgd)
    augment: Optional[Augment] = None  # noqa: UP045  # the old spelling has to work too
    workers: int | Literal["auto"] = "auto"
    level: Literal[1, 2] = 1
    size: float | int = 2


FULL = Training("dbn", 3, "nog", Sgd(1e-3, True, (), (0.5, math.nextafter(0.5, 1)), math.inf), Augment(2), workers=2)


@pytest.mark.parametrize("config", [Training("x"), FULL])
def test_round_trip_through_text(config):
    assert from_json(Training, json.loads(json.dumps(to_json(config), allow_nan=False))) == config


def test_nan_survives():
    assert math.isnan(from_json(Sgd, json.loads(json.dumps(to_json(Sgd(lr=math.nan)), allow_nan=False))).lr)


def test_missing_fields_take_defaults_and_integers_become_floats():
    made = from_json(Training, {"name": "x", "optimizer": {"lr": 1}})
    assert made == Training("x", optimizer=Sgd(lr=1.0))
    assert type(made.optimizer.lr) is float
    assert type(from_json(Training, {"name": "x", "size": 3}).size) is int


@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        ({"name": "x", "epoch": 3}, ValueError, "Training has no setting 'epoch'. Did you mean 'epochs'?"),
        ({"name": "x", "optimizer": {"rl": 3}}, ValueError, "optimizer (Sgd) has no setting 'rl'. Did you mean 'lr'?"),
        ({"name": "x", "method": "nog+ow+ol"}, ValueError, "got 'nog+ow+ol'. Did you mean 'nog+ow+olr'?"),
        ({"epochs": 3}, ValueError, "Training needs a value for 'name'"),
        ({"name": 3}, TypeError, "name needs a text; got 3 (int)"),
        ({"name": "x", "epochs": 3.0}, TypeError, "epochs needs an integer; got 3.0 (float)"),
        ({"name": "x", "epochs": True}, TypeError, "epochs needs an integer; got True (bool)"),
        ({"name": "x", "optimizer": {"lr": "0.1"}}, TypeError, "optimizer.lr needs a number; got '0.1' (str)"),
        ({"name": "x", "optimizer": {"lr": False}}, TypeError, "optimizer.lr needs a number"),
        ({"name": "x", "optimizer": {"lr": None}}, TypeError, "optimizer.lr needs a number; got None"),
        ({"name": "x", "optimizer": {"nesterov": 1}}, TypeError, "optimizer.nesterov needs true or false; got 1"),
        ({"name": "x", "optimizer": {"milestones": [1, "2"]}}, TypeError, "optimizer.milestones[1] needs an integer"),
        ({"name": "x", "optimizer": {"milestones": 3}}, TypeError, "optimizer.milestones needs a list; got 3"),
        ({"name": "x", "optimizer": {"betas": [0.9]}}, ValueError, "optimizer.betas needs 2 values; got 1"),
        ({"name": "x", "optimizer": 3}, TypeError, "optimizer needs the settings of Sgd; got 3"),
        ({"name": "x", "workers": "many"}, TypeError, "workers needs an integer; got 'many' (str)"),
        ({"name": "x", "level": True}, ValueError, "level needs one of 1, 2; got True"),
        ({"name": "x", "augment": {"padding": -1}}, ValueError, "padding needs at least 0"),
        ([], TypeError, "The configuration needs the settings of Training; got []"),
    ],
)
def test_errors_name_the_place_and_the_nearest_name(data, error, text):
    with pytest.raises(error) as caught:
        from_json(Training, data)
    assert text in str(caught.value)


def test_kinds_that_json_cannot_hold():
    @dataclass
    class Odd:
        values: list[int] = field(default_factory=list)
        either: Sgd | Augment = field(default_factory=Sgd)

    with pytest.raises(TypeError, match=r"values is annotated as list\[int\]"):
        from_json(Odd, {"values": []})
    with pytest.raises(TypeError, match="cannot tell apart"):
        from_json(Odd, {"either": {}})
    with pytest.raises(TypeError, match="needs a dataclass"):
        from_json(dict, {})
    with pytest.raises(TypeError, match="instance of a dataclass"):
        to_json(Training)
    with pytest.raises(TypeError, match=r"optimizer\.lr needs a number"):
        to_json(Training("x", optimizer=Sgd(lr="0.1")))


def test_replace_at():
    config = Training("x")
    assert replace_at(config, "optimizer.lr", 1) == Training("x", optimizer=Sgd(lr=1.0))
    assert replace_at(config, "optimizer.milestones", [3]) == Training("x", optimizer=Sgd(milestones=(3,)))
    assert replace_at(config, "augment", {"padding": 1}).augment == Augment(1)
    assert replace_at(config, "augment", Augment(1)).augment == Augment(1)
    assert config == Training("x")


@pytest.mark.parametrize(
    ("path", "value", "error", "text"),
    [
        ("optimizer.learning", 1, ValueError, "optimizer (Sgd) has no setting 'learning'."),
        ("optimzer.lr", 1, ValueError, "Did you mean 'optimizer'?"),
        ("optimizer.lr", "1", TypeError, "optimizer.lr needs a number"),
        ("augment.padding", 1, ValueError, "augment is None and has no setting 'padding'; set augment itself first."),
        ("epochs.lr", 1, ValueError, "epochs is 350 and has no setting 'lr'"),
    ],
)
def test_replace_at_errors(path, value, error, text):
    with pytest.raises(error) as caught:
        replace_at(Training("x"), path, value)
    assert text in str(caught.value)


def test_hash_stays_and_differs_with_each_setting():
    assert config_hash({"lr": 0.1, "optimizer": {"name": "sgd"}}) == "c50c11f2"  # in every process, version and order
    assert config_hash(FULL) == config_hash(dict(reversed(to_json(FULL).items())))
    changed = [replace_at(FULL, p, v) for p, v in (("epochs", 4), ("optimizer.clip", 1.0), ("augment", None))]
    assert len({config_hash(c) for c in (FULL, *changed)}) == 4


def test_hash_without_settings():
    one, two = Training("x"), Training("y", optimizer=Sgd(lr=1.0))
    assert config_hash(one, without=["name", "optimizer"]) == config_hash(two, without=["name", "optimizer"])
    assert config_hash(one, without=["name"]) != config_hash(two, without=["name"])
    with pytest.raises(ValueError, match=r"no setting 'nam'\. Did you mean 'name'"):
        config_hash(one, without=["nam"])


def test_diff():
    assert config_diff(FULL, FULL) == ""
    text = config_diff(Training("x"), Training("x", augment=Augment(), optimizer=Sgd(milestones=(1,))))
    assert text.splitlines() == [
        "optimizer.milestones: [100, 200] → [1]",
        "augment: null → (none)",
        "augment.padding: (none) → 4",
    ]
