"""The configuration: JSON and back, the words of its errors, changes, hashes; the constraints of the real ones."""

import json
import math
from dataclasses import FrozenInstanceError, replace
from datetime import date
from typing import Annotated, Literal

import pytest
from pydantic import AfterValidator, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from orthocond.lab import experiments
from orthocond.lab.config import (
    STRICT,
    Count,
    CountOrZero,
    Fraction,
    Positive,
    Text,
    change,
    config_diff,
    config_hash,
    flatten,
    from_json,
    to_json,
)
from orthocond.lab.presets import KINDS


@dataclass(frozen=True, config=STRICT)
class Sgd:
    lr: Positive = 0.1
    nesterov: bool = False
    milestones: tuple[Count, ...] = (100, 200)
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    clip: Positive | None = None


@dataclass(frozen=True, config=STRICT)
class Augment:
    padding: CountOrZero = 4
    crop: CountOrZero = 8

    @model_validator(mode="after")
    def _fits(self):
        if self.crop < self.padding:
            raise ValueError(f"crop needs at least {self.padding}; got {self.crop}.")
        return self


def _known(name):
    if name == "bad":
        raise ValueError("There is no network 'bad'.")
    return name


@dataclass(frozen=True, config=STRICT)
class Training:
    name: Text
    epochs: Count = 350
    method: Literal["svd", "nog", "nog+ow+olr"] = "svd"
    optimizer: Sgd = Sgd()
    augment: Augment = Augment()
    shape: Literal["disc", "plus"] | None = None
    network: Annotated[str, AfterValidator(_known)] = "good"


FULL = Training("dbn", 3, "nog", Sgd(1e-3, True, (), (0.5, math.nextafter(0.5, 1)), 1.0), Augment(2), "disc")


@pytest.mark.parametrize("config", [Training("x"), FULL])
def test_round_trip_through_text(config):
    again = from_json(Training, json.loads(json.dumps(to_json(config), allow_nan=False)))
    assert again == config
    assert hash(again) == hash(config)


def test_missing_fields_take_defaults_and_integers_become_floats():
    made = from_json(Training, {"name": "x", "optimizer": {"lr": 1}})
    assert made == Training("x", optimizer=Sgd(lr=1.0))
    assert type(made.optimizer.lr) is float


def test_it_cannot_be_changed_in_place_and_a_copy_is_checked():
    with pytest.raises(FrozenInstanceError):
        FULL.epochs = 4
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        replace(FULL, epochs=0)
    with pytest.raises(ValidationError, match="valid integer"):
        Training("x", 3.0)


@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        ({"name": "x", "epoch": 3}, ValueError, "Training has no setting 'epoch'. Did you mean 'epochs'?"),
        ({"name": "x", "optimizer": {"rl": 3}}, ValueError, "optimizer (Sgd) has no setting 'rl'. Did you mean 'lr'?"),
        ({"name": "x", "method": "nog+ow+ol"}, ValueError, "got 'nog+ow+ol'. Did you mean 'nog+ow+olr'?"),
        (
            {"name": "x", "shape": "disk"},
            ValueError,
            "'disc', 'plus'; got 'disk'. Did you mean 'disc'",
        ),
        ({"epochs": 3}, ValueError, "Training needs a value for 'name'"),
        ({"name": 3}, TypeError, "name needs a text; got 3 (int)"),
        ({"name": ""}, ValueError, "name needs a text that is not empty"),
        ({"name": "x", "epochs": 3.0}, TypeError, "epochs needs an integer; got 3.0 (float)"),
        ({"name": "x", "epochs": True}, TypeError, "epochs needs an integer; got True (bool)"),
        ({"name": "x", "epochs": 0}, ValueError, "epochs needs at least 1; got 0"),
        ({"name": "x", "epochs": 10**30}, ValueError, "epochs needs at most 2147483647; got 1000"),
        ({"name": "x", "optimizer": {"lr": "0.1"}}, TypeError, "optimizer.lr needs a number; got '0.1' (str)"),
        ({"name": "x", "optimizer": {"lr": False}}, TypeError, "optimizer.lr needs a number"),
        ({"name": "x", "optimizer": {"lr": None}}, TypeError, "optimizer.lr needs a number; got None"),
        ({"name": "x", "optimizer": {"lr": -1}}, ValueError, "optimizer.lr needs more than 0"),
        ({"name": "x", "optimizer": {"lr": math.nan}}, ValueError, "optimizer.lr needs a finite number; got nan"),
        ({"name": "x", "optimizer": {"lr": math.inf}}, ValueError, "optimizer.lr needs a finite number; got inf"),
        ({"name": "x", "optimizer": {"nesterov": 1}}, TypeError, "optimizer.nesterov needs true or false; got 1"),
        ({"name": "x", "optimizer": {"milestones": [1, "2"]}}, TypeError, "optimizer.milestones[1] needs an integer"),
        ({"name": "x", "optimizer": {"milestones": 3}}, TypeError, "optimizer.milestones needs a list; got 3"),
        ({"name": "x", "optimizer": {"betas": [0.9]}}, ValueError, "optimizer.betas needs more values; got [0.9]"),
        ({"name": "x", "optimizer": {"betas": [0.9] * 3}}, ValueError, "optimizer.betas needs 2 values"),
        ({"name": "x", "optimizer": {"betas": [0.9, 2]}}, ValueError, "optimizer.betas[1] needs at most 1"),
        ({"name": "x", "optimizer": 3}, TypeError, "optimizer needs the settings of Sgd; got 3"),
        ({"name": "x", "augment": {"padding": 9}}, ValueError, "crop needs at least 9; got 8."),
        ({"name": "x", "network": "bad"}, ValueError, "There is no network 'bad'."),
        ([], TypeError, "The configuration needs the settings of Training; got []"),
        ({"name": {1}}, TypeError, "needs JSON values, such as texts, numbers and lists; got {1} (set)."),
        ({"name": date(2026, 1, 2)}, TypeError, "got datetime.date(2026, 1, 2) (date)."),
    ],
)
def test_errors_name_the_place_and_the_nearest_name(data, error, text):
    with pytest.raises(error) as caught:
        from_json(Training, data)
    assert text in str(caught.value)
    assert "pydantic" not in str(caught.value)


def test_all_errors_are_named_at_once():
    with pytest.raises(ValueError, match="needs") as caught:
        from_json(Training, {"name": "x", "epochs": 0, "optimizer": {"lr": 0}})
    assert str(caught.value).splitlines() == [
        "epochs needs at least 1; got 0.",
        "optimizer.lr needs more than 0; got 0.",
    ]


def test_only_instances_of_dataclasses_become_json():
    with pytest.raises(TypeError, match="instance of a dataclass"):
        to_json(Training)
    with pytest.raises(TypeError, match="instance of a dataclass"):
        to_json({})


def test_change():
    config = Training("x")
    assert change(config, {"optimizer.lr": 1}) == Training("x", optimizer=Sgd(lr=1.0))
    assert change(config, {"optimizer.milestones": [3]}) == Training("x", optimizer=Sgd(milestones=(3,)))
    assert change(config, {"augment": {"padding": 1}}).augment == Augment(1)
    assert change(config, {"augment": Augment(1)}).augment == Augment(1)
    assert config == Training("x")


def test_changes_are_checked_together():
    """In any order one of them alone would not fit."""
    for order in (("augment.padding", "augment.crop"), ("augment.crop", "augment.padding")):
        changed = change(Training("x"), dict.fromkeys(order, 20))
        assert changed.augment == Augment(20, 20)


@pytest.mark.parametrize(
    ("path", "value", "error", "text"),
    [
        ("optimizer.learning", 1, ValueError, "optimizer (Sgd) has no setting 'learning'."),
        ("optimzer.lr", 1, ValueError, "Did you mean 'optimizer'?"),
        ("optimizer.lr", "1", TypeError, "optimizer.lr needs a number"),
        ("epochs.lr", 1, ValueError, "epochs is 350 and has no setting 'lr'"),
    ],
)
def test_errors_of_changes(path, value, error, text):
    with pytest.raises(error) as caught:
        change(Training("x"), {path: value})
    assert text in str(caught.value)


def test_hash_stays_and_differs_with_each_setting():
    assert config_hash({"lr": 0.1, "optimizer": {"name": "sgd"}}) == "c50c11f2"  # in every process, version and order
    assert config_hash(FULL) == config_hash(dict(reversed(to_json(FULL).items())))
    changed = [change(FULL, {p: v}) for p, v in (("epochs", 4), ("optimizer.clip", 2.0), ("shape", None))]
    assert len({config_hash(c) for c in (FULL, *changed)}) == 4


def test_hash_without_settings():
    one, two = Training("x"), Training("y", optimizer=Sgd(lr=1.0))
    assert config_hash(one, without=["name", "optimizer"]) == config_hash(two, without=["name", "optimizer"])
    assert config_hash(one, without=["name"]) != config_hash(two, without=["name"])
    with pytest.raises(ValueError, match=r"no setting 'nam'\. Did you mean 'name'"):
        config_hash(one, without=["nam"])


def test_diff():
    assert config_diff(FULL, FULL) == ""
    text = config_diff(Training("x"), Training("x", shape="plus", optimizer=Sgd(milestones=(1,))))
    assert text.splitlines() == ["optimizer.milestones: [100, 200] → [1]", 'shape: null → "plus"']
    assert config_diff({}, {"augment": {"padding": 4}}) == "augment.padding: (none) → 4"


# The real configurations

PRESETS = [(name, scale) for kind in KINDS.values() for name in kind.presets for scale in kind.presets[name]]


@pytest.mark.parametrize(("name", "scale"), PRESETS)
def test_presets_are_what_their_name_says_and_are_read_back(name, scale):
    config = experiments.preset(name, scale)
    assert (config.preset, config.scale) == (name, scale)
    assert experiments.read_config(json.loads(json.dumps(to_json(config)))) == config


@pytest.mark.parametrize("name", ["dbn-sprites-small", "gan-sprites"])
def test_every_number_of_the_configurations_has_bounds(name):
    """No number takes what no training can have: a fuzz over all leaves."""
    config = experiments.preset(name)
    numbers = [path for path, value in flatten(to_json(config)).items() if type(value) in (int, float)]
    assert len(numbers) > 10
    for path in numbers:
        for value in (-1, 10**30, math.nan, math.inf, -0.5):
            if isinstance(value, float) or value < 0 or type(flatten(to_json(config))[path]) is int:
                with pytest.raises((TypeError, ValueError)) as caught:
                    change(config, {path: value})
                assert path in str(caught.value)


@pytest.mark.parametrize("values", [[], "text", 3, None])
def test_a_configuration_of_another_shape_is_an_error(values):
    with pytest.raises(TypeError, match="A configuration needs names with values"):
        experiments.read_config(values)


@pytest.mark.parametrize("kind", ["gan", 3, ["classification"], None])
def test_kinds_that_do_not_exist(kind):
    with pytest.raises(ValueError, match=r"no experiment of the kind .*There are: classification, generation"):
        experiments.read_config({"kind": kind})
