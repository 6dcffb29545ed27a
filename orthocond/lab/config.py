"""One tree of frozen dataclasses as configuration: to JSON and back, checked; changes, hashes and differences."""

import difflib
import hashlib
import json
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar, get_args, get_origin

T = TypeVar("T")

_TEXTS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def to_json(config: object) -> dict[str, Any]:
    """A dataclass as JSON values: dataclasses become objects, tuples lists, infinity and NaN texts.

    Args:
        config: An instance of a dataclass whose fields are bool, int, float, str, Literal, tuples, dataclasses, or
            None. Values are checked against the annotations.

    Returns:
        A dictionary for ``json.dumps``; `from_json` reads it.

    Raises:
        TypeError: If ``config`` is not an instance of a dataclass, or a value does not have the type of its field.
        ValueError: If a value is not one of the choices of its field.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class SGD:
        ...     lr: float = 0.1
        ...     milestones: tuple[int, ...] = (100, 200)
        >>> to_json(SGD())
        {'lr': 0.1, 'milestones': [100, 200]}
    """
    _check_instance(config, "to_json")
    result: dict[str, Any] = _write(_read(type(config), config, ""))
    return result


def from_json(kind: type[T], data: Mapping[str, Any]) -> T:
    """The dataclass that `to_json` wrote, or that a person did: fields that are missing take their defaults.

    Args:
        kind: The dataclass.
        data: JSON values.

    Returns:
        An instance of ``kind``.

    Raises:
        TypeError: If a value does not have the type of its field; the text names the field.
        ValueError: If a name is unknown (the text gives the nearest valid one), a field without default is missing, or
            a value is not one of the choices of its field.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class SGD:
        ...     lr: float = 0.1
        >>> from_json(SGD, {"lr": 1})
        SGD(lr=1.0)
        >>> from_json(SGD, {"rl": 1})
        Traceback (most recent call last):
        ValueError: SGD has no setting 'rl'. Did you mean 'lr'? It has: lr.
    """
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise TypeError(f"from_json needs a dataclass; got {kind!r}.")
    result: T = _read(kind, data, "")
    return result


def replace_at(config: T, path: str, value: object) -> T:
    """A copy of a configuration with one setting changed, anywhere in the tree.

    Args:
        config: The configuration.
        path: Names of fields joined by dots.
        value: The new value, a Python or JSON value of the field's type.

    Returns:
        The changed copy.

    Raises:
        TypeError: If the value does not have the type of the field.
        ValueError: If there is no such setting (the text gives the nearest valid one), or the value is not one of its
            choices.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class SGD:
        ...     lr: float = 0.1
        >>> @dataclass(frozen=True)
        ... class Training:
        ...     optimizer: SGD = SGD()
        >>> replace_at(Training(), "optimizer.lr", 0.05)
        Training(optimizer=SGD(lr=0.05))
    """
    _check_instance(config, "replace_at")
    return typing.cast(T, _replace(config, path.split("."), value, ""))


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
    flat = _flat(_values(config))
    for path in without:
        drop = [name for name in flat if name == path or name.startswith(f"{path}.")]
        if not drop:
            raise ValueError(f"The configuration has no setting {path!r}.{_hint(path, list(flat))}")
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
    one, two = _flat(_values(first)), _flat(_values(second))
    lines = []
    for name in dict.fromkeys((*one, *two)):
        a, b = (json.dumps(flat[name]) if name in flat else "(none)" for flat in (one, two))
        if a != b:
            lines.append(f"{name}: {a} → {b}")
    return "\n".join(lines)


def _check_instance(config: object, name: str) -> None:
    if not is_dataclass(config) or isinstance(config, type):
        raise TypeError(f"{name} needs an instance of a dataclass; got {config!r}.")


def _values(config: object) -> dict[str, Any]:
    return dict(config) if isinstance(config, Mapping) else to_json(config)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            result |= _flat(value, f"{prefix}{name}.")
        else:
            result[f"{prefix}{name}"] = value
    return result


def _write(value: Any) -> Any:
    if is_dataclass(value):
        return {f.name: _write(getattr(value, f.name)) for f in fields(value) if f.init}
    if isinstance(value, tuple):
        return [_write(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return next(text for text, number in _TEXTS.items() if repr(number) == repr(value))
    return value


def _read(kind: Any, value: Any, path: str) -> Any:
    """The value as one of the annotated type, or an error that names the path."""
    origin = get_origin(kind)
    if isinstance(kind, type) and is_dataclass(kind):
        return _read_dataclass(kind, value, path)
    if origin in (typing.Union, types.UnionType):
        return _read_union(get_args(kind), value, path)
    if origin is Literal:
        return _read_literal(get_args(kind), value, path)
    if origin is tuple:
        return _read_tuple(get_args(kind), value, path)
    if kind is type(None) or kind is None:
        return value if value is None else _wrong("null", value, path)
    if kind is float:
        if isinstance(value, str) and value in _TEXTS:
            return _TEXTS[value]
        return float(value) if type(value) in (int, float) else _wrong("a number", value, path)
    if kind in (bool, int, str):
        names = {bool: "true or false", int: "an integer", str: "a text"}
        return value if type(value) is kind else _wrong(names[kind], value, path)
    raise TypeError(
        f"Settings are bool, int, float, str, Literal, tuples, dataclasses, or None; {path} is annotated as {kind}."
    )


def _read_dataclass(kind: Any, value: Any, path: str) -> Any:
    if isinstance(value, kind):
        value = {f.name: getattr(value, f.name) for f in fields(kind) if f.init}
    if not isinstance(value, Mapping):
        return _wrong(f"the settings of {kind.__name__}", value, path)
    hints = typing.get_type_hints(kind)
    settings = {f.name: f for f in fields(kind) if f.init}
    for name in value:
        if name not in settings:
            raise _unknown(kind, name, path)
    missing = [
        n for n, f in settings.items() if n not in value and f.default is MISSING and f.default_factory is MISSING
    ]
    if missing:
        raise ValueError(f"{path or kind.__name__} needs a value for {', '.join(map(repr, missing))}; none was given.")
    return kind(**{name: _read(hints[name], v, _join(path, name)) for name, v in value.items()})


def _read_union(kinds: tuple[Any, ...], value: Any, path: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    kinds = tuple(k for k in kinds if k is not type(None))
    if len(kinds) == 1:
        return _read(kinds[0], value, path)
    if sum(map(is_dataclass, kinds)) > 1:
        raise TypeError(f"{path} could be any of {kinds}, which JSON cannot tell apart; allow one dataclass.")
    errors = []
    for kind in sorted(kinds, key=lambda k: k is not type(value)):  # so that 1 stays an int in float | int
        try:
            return _read(kind, value, path)
        except (TypeError, ValueError) as error:
            errors.append(str(error))
    raise TypeError(" ".join(errors))


def _read_literal(choices: tuple[Any, ...], value: Any, path: str) -> Any:
    for choice in choices:
        if type(choice) is type(value) and choice == value:
            return choice
    names = ", ".join(map(repr, choices))
    raise ValueError(f"{path} needs one of {names}; got {value!r}.{_hint(str(value), [str(c) for c in choices])}")


def _read_tuple(kinds: tuple[Any, ...], value: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        _wrong("a list", value, path)
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    if len(kinds) != len(value):
        raise ValueError(f"{path} needs {len(kinds)} values; got {len(value)}: {value!r}.")
    return tuple(_read(k, v, f"{path}[{i}]") for i, (k, v) in enumerate(zip(kinds, value, strict=True)))


def _replace(config: Any, names: list[str], value: object, path: str) -> Any:
    name, rest = names[0], names[1:]
    if not is_dataclass(config) or isinstance(config, type):
        raise ValueError(f"{path} is {config!r} and has no setting {name!r}; set {path} itself first.")
    if name not in {f.name for f in fields(config) if f.init}:
        raise _unknown(type(config), name, path)
    here = _join(path, name)
    if rest:
        return replace(config, **{name: _replace(getattr(config, name), rest, value, here)})
    return replace(config, **{name: _read(typing.get_type_hints(type(config))[name], value, here)})


def _wrong(needed: str, value: object, path: str) -> typing.NoReturn:
    raise TypeError(f"{path or 'The configuration'} needs {needed}; got {value!r} ({type(value).__name__}).")


def _unknown(kind: type, name: object, path: str) -> ValueError:
    names = [f.name for f in fields(kind) if f.init]
    where = f"{path} ({kind.__name__})" if path else kind.__name__
    return ValueError(f"{where} has no setting {name!r}.{_hint(str(name), names)} It has: {', '.join(names)}.")


def _hint(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    return f" Did you mean {near[0]!r}?" if near else ""


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
