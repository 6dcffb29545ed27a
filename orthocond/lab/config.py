"""One tree of frozen, validated dataclasses as configuration: to JSON and back; changes, hashes and differences.

A class of settings is a pydantic dataclass with the rules `STRICT`, and constraints stand on its fields. JSON, TOML and
the command line come in through `from_json` and `change`, so all of them refuse the same values with the same words.
"""

import hashlib
import json
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Annotated, Any, Literal, Protocol, TypeVar, get_args, get_origin

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from orthocond.lab.text import nearest

T = TypeVar("T")

Scale = Literal["paper", "workstation", "laptop"]
Precision = Literal["no", "bf16", "fp16"]

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
"""No silent conversion, no unknown name, no NaN and no infinity."""

_MANY = 2**31 - 1  # fits every counter and tensor size
Count = Annotated[int, Field(ge=1, le=_MANY)]
CountOrZero = Annotated[int, Field(ge=0, le=_MANY)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]


class Config(Protocol):
    """What the configurations of all kinds of experiments have."""

    @property
    def preset(self) -> str: ...
    @property
    def scale(self) -> Scale: ...
    @property
    def kind(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def precision(self) -> Precision: ...
    @property
    def method(self) -> Any: ...
    @property
    def data(self) -> Any: ...
    @property
    def model(self) -> Any: ...
    @property
    def schedule(self) -> Any: ...
    def describe(self) -> str: ...


FIXED = ("preset", "scale", "kind")
"""Settings that a preset chooses; they are no options."""

_BOUNDS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}
_KINDS = {
    "int": "an integer",
    "float": "a number",
    "string": "a text",
    "bool": "true or false",
    "tuple": "a list",
}


def to_json(config: object) -> dict[str, Any]:
    """A dataclass as JSON values: dataclasses become objects, and tuples lists.

    Args:
        config: An instance of a dataclass.

    Returns:
        A dictionary for ``json.dumps``; `from_json` reads it.

    Raises:
        TypeError: If ``config`` is not an instance of a dataclass.

    Example:
        >>> from pydantic.dataclasses import dataclass
        >>> @dataclass(frozen=True, config=STRICT)
        ... class SGD:
        ...     lr: Positive = 0.1
        ...     milestones: tuple[Count, ...] = (100, 200)
        >>> to_json(SGD())
        {'lr': 0.1, 'milestones': [100, 200]}
    """
    if not is_dataclass(config) or isinstance(config, type):
        raise TypeError(f"to_json needs an instance of a dataclass; got {config!r}.")
    result: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    return result


def find_scale(presets: Mapping[str, Mapping[Scale, T]], name: str, scale: Scale) -> T:
    """The configuration of a preset at a scale.

    Raises:
        ValueError: If there is no such preset or scale; the text gives the nearest name.
    """
    if name not in presets:
        raise ValueError(f"There is no preset {name!r}.{nearest(name, presets)} `orthocond list presets` shows all.")
    if scale not in presets[name]:
        raise ValueError(f"{name} has the scales {', '.join(map(repr, presets[name]))}; got {scale!r}.")
    return presets[name][scale]


def from_json(kind: type[T], data: Mapping[str, Any]) -> T:
    """The dataclass that `to_json` wrote, or that a person did: fields that are missing take their defaults.

    Args:
        kind: A pydantic dataclass.
        data: JSON values.

    Returns:
        An instance of ``kind``.

    Raises:
        TypeError: If a value does not have the type of its field; the text names the field.
        ValueError: If a name is unknown (the text gives the nearest valid one), a field without default is missing, or
            a value is outside what its field allows.

    Example:
        >>> from pydantic.dataclasses import dataclass
        >>> @dataclass(frozen=True, config=STRICT)
        ... class SGD:
        ...     lr: Positive = 0.1
        >>> from_json(SGD, {"lr": 1})
        SGD(lr=1.0)
        >>> from_json(SGD, {"rl": 1})
        Traceback (most recent call last):
        ValueError: SGD has no setting 'rl'. Did you mean 'lr'? It has: lr.
        >>> from_json(SGD, {"lr": -1})
        Traceback (most recent call last):
        ValueError: lr needs more than 0; got -1.
    """
    try:
        text = json.dumps(data, default=_refuse)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"The configuration needs JSON values, such as texts, numbers and lists; {error}.") from error
    try:
        return TypeAdapter(kind).validate_json(text)
    except ValidationError as error:
        raise _readable(kind, error) from None


def _refuse(value: object) -> None:
    raise TypeError(f"got {value!r} ({type(value).__name__})")


def change(config: T, values: Mapping[str, Any]) -> T:
    """A copy of a configuration with some settings changed, anywhere in the tree.

    Args:
        config: The configuration.
        values: The new values, Python or JSON values, by names of fields joined by dots.

    Returns:
        The changed copy. All changes are made before it is checked, so their order does not matter.

    Raises:
        TypeError: If a value does not have the type of its field.
        ValueError: If there is no such setting (the text gives the nearest valid one), or a value is outside what its
            field allows.

    Example:
        >>> from pydantic.dataclasses import dataclass
        >>> @dataclass(frozen=True, config=STRICT)
        ... class SGD:
        ...     lr: Positive = 0.1
        >>> @dataclass(frozen=True, config=STRICT)
        ... class Training:
        ...     optimizer: SGD = SGD()
        >>> change(Training(), {"optimizer.lr": 0.05})
        Training(optimizer=SGD(lr=0.05))
    """
    tree = to_json(config)
    for path, value in values.items():
        *branches, leaf = path.split(".")
        place = tree
        for depth, name in enumerate(branches):
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                here = ".".join(branches[: depth + 1])
                raise ValueError(f"{here} is {place!r} and has no setting {path.removeprefix(here + '.')!r}.")
        place[leaf] = to_json(value) if is_dataclass(value) and not isinstance(value, type) else value
    return from_json(type(config), tree)


def config_hash(config: object, *, without: Iterable[str] = ()) -> str:
    """Eight hexadecimal digits that are the same for equal configurations, in every process and on every machine.

    Args:
        config: A dataclass, or JSON values such as `Run.config`.
        without: Settings that do not count, by their dotted paths, for example ``("seed",)``; a path of a dataclass
            stands for all in it.

    Returns:
        The digits.

    Raises:
        ValueError: If there is no setting of such a path.

    Example:
        >>> config_hash({"lr": 0.1, "seed": 0}, without=["seed"]) == config_hash({"lr": 0.1})
        True
    """
    flat = flatten(_values(config))
    for path in without:
        drop = [name for name in flat if name == path or name.startswith(f"{path}.")]
        if not drop:
            raise ValueError(f"The configuration has no setting {path!r}.{nearest(path, flat)}")
        for name in drop:
            del flat[name]
    return hashlib.sha256(json.dumps(flat, sort_keys=True).encode()).hexdigest()[:8]


def config_diff(first: object, second: object) -> str:
    """The settings in which two configurations differ, a line each; empty if they are equal.

    Args:
        first: A dataclass, or JSON values such as `Run.config`.
        second: Another one.

    Returns:
        Lines ``path: first → second``, with "(none)" where one has no such setting.

    Example:
        >>> print(config_diff({"lr": 0.1, "seed": 0}, {"lr": 0.05, "seed": 0, "ema": True}))
        lr: 0.1 → 0.05
        ema: (none) → true
    """
    one, two = flatten(_values(first)), flatten(_values(second))
    lines = []
    for name in dict.fromkeys((*one, *two)):
        a, b = (json.dumps(flat[name]) if name in flat else "(none)" for flat in (one, two))
        if a != b:
            lines.append(f"{name}: {a} → {b}")
    return "\n".join(lines)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of a tree of dictionaries, by their names joined by dots.

    Example:
        >>> flatten({"seed": 0, "schedule": {"lr": 0.1}})
        {'seed': 0, 'schedule.lr': 0.1}
    """
    result: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            result |= flatten(value, f"{prefix}{name}.")
        else:
            result[f"{prefix}{name}"] = value
    return result


def option_names(path: str) -> list[str]:
    """What a setting is called on the command line, the shortest name last; treatments need no ``--method.``.

    Example:
        >>> option_names("model.name"), option_names("method.nog_of"), option_names("schedule.lr")
        (['--model.name', '--model'], ['--method.nog-of', '--nog-of'], ['--schedule.lr'])
    """
    branch, _, leaf = path.rpartition(".")
    short = []
    if branch and leaf in ("name", "source"):
        short = [branch]
    elif branch == "method":
        short = [leaf]
    return [f"--{name}".replace("_", "-") for name in (path, *short)]


def _values(config: object) -> dict[str, Any]:
    return dict(config) if isinstance(config, Mapping) else to_json(config)


# Words for what pydantic has found


def _readable(kind: type, error: ValidationError) -> TypeError | ValueError:
    """All errors in our words, a line each; a `TypeError` if the first is one of kinds."""
    found = [_explain(kind, entry) for entry in error.errors()]
    lines = list(dict.fromkeys(text for _, text in found))
    return found[0][0]("\n".join(lines))


def _explain(kind: type, entry: Any) -> tuple[type[TypeError] | type[ValueError], str]:
    loc, name, value = entry["loc"], str(entry["type"]), entry["input"]
    where = _dotted(loc) or "The configuration"
    if name == "unexpected_keyword_argument":
        return ValueError, _unknown(_annotation(kind, loc[:-1]), str(loc[-1]), _dotted(loc[:-1]))
    if name in ("missing", "missing_argument") and isinstance(loc[-1], int):
        return ValueError, f"{_dotted(loc[:-1])} needs more values; got {value!r}."
    if name in ("missing", "missing_argument"):
        parent = _dotted(loc[:-1]) or kind.__name__
        return ValueError, f"{parent} needs a value for {str(loc[-1])!r}; none was given."
    if name == "value_error":
        return ValueError, str(entry["ctx"]["error"])
    if name == "literal_error":
        choices = _choices(_annotation(kind, loc))
        hint = nearest(str(value), map(str, choices))
        return ValueError, f"{where} needs one of {', '.join(map(repr, choices))}; got {value!r}.{hint}"
    if name in _BOUNDS:
        words, key = _BOUNDS[name]
        bound = entry["ctx"][key]
        return (
            ValueError,
            f"{where} needs {words} {f'{bound:g}' if isinstance(bound, float) else bound}; got {value!r}.",
        )
    if name == "string_too_short":
        return ValueError, f"{where} needs a text that is not empty."
    if name == "too_long":
        return ValueError, f"{where} needs {entry['ctx']['max_length']} values; got {value!r}."
    if name == "finite_number":
        return ValueError, f"{where} needs a finite number; got {value!r}."
    if name.startswith("dataclass"):
        return TypeError, f"{where} needs the settings of {_annotation(kind, loc).__name__}; got {_got(value)}."
    needed = _KINDS.get(name.partition("_")[0])
    if needed is not None:
        return TypeError, f"{where} needs {needed}; got {_got(value)}."
    return ValueError, f"{where}: {entry['msg']}; got {value!r}."


def _got(value: object) -> str:
    return f"{value!r} ({type(value).__name__})"


def _annotation(kind: Any, loc: Iterable[Any]) -> Any:
    """The annotated type at a place in the tree, without None and constraints."""
    for name in loc:
        if isinstance(name, int):
            kind = get_args(kind)[0]
        else:
            kind = typing.get_type_hints(kind)[name]
        if get_origin(kind) in (typing.Union, types.UnionType):
            (kind,) = (k for k in get_args(kind) if k is not type(None))
    return kind


def _choices(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) is Literal else ()


def _unknown(kind: Any, name: str, path: str) -> str:
    names = [f.name for f in fields(kind)]
    where = f"{path} ({kind.__name__})" if path else kind.__name__
    return f"{where} has no setting {name!r}.{nearest(name, names)} It has: {', '.join(names)}."


def _dotted(loc: Iterable[Any]) -> str:
    """A place as people write it: ``schedule.milestones[1]``."""
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
