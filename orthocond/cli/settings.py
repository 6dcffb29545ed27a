"""Every setting of a configuration as an option of the command line, with the preset's own default."""

import inspect
import tomllib
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from cyclopts import Group, Parameter
from docstring_parser import parse

from orthocond.lab import experiments, methods
from orthocond.lab.classification.config import Scale
from orthocond.lab.config import replace_at
from orthocond.lab.experiments import Config
from orthocond.lab.generation import methods as gan_methods
from orthocond.lab.generation.config import Generation

FIXED = ("preset", "scale", "kind")  # chosen by the preset, not one by one


class UsageError(ValueError):
    """What was typed cannot be meant; the text says what can."""


class Setting(NamedTuple):
    """A leaf of the configuration's tree."""

    path: str
    kind: Any
    value: Any
    help: str


def find_preset(name: str, scale: str) -> Config:
    """The configuration of a preset.

    Raises:
        UsageError: If there is no such preset or scale; the text gives the nearest name.
    """
    try:
        return experiments.preset(name, typing.cast(Scale, scale))
    except ValueError as error:
        raise UsageError(str(error)) from error


def check(config: Config) -> Config:
    """The configuration, if its method exists.

    Raises:
        UsageError: If it does not; the text gives the nearest name.
    """
    try:
        (gan_methods if isinstance(config, Generation) else methods).parts(config.method.name)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return config


def settings(config: object, prefix: str = "") -> Iterator[Setting]:
    """The leaves of a tree of dataclasses, with the text that their class gives them."""
    kinds = typing.get_type_hints(type(config))
    texts = {p.arg_name: " ".join((p.description or "").split()) for p in parse(type(config).__doc__ or "").params}
    for field in fields(typing.cast(Any, config)):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from settings(value, f"{prefix}{field.name}.")
        elif prefix or field.name not in FIXED:
            yield Setting(prefix + field.name, kinds[field.name], value, texts.get(field.name, ""))


def options(config: object) -> list[inspect.Parameter]:
    """The settings as keyword arguments of a command; `apply` takes what comes back."""
    groups: dict[str, Group] = {}
    result = []
    for setting in settings(config):
        branch = setting.path.rpartition(".")[0] or "run"
        group = groups.setdefault(branch, Group.create_ordered(f"Settings: {branch}"))
        option = Parameter(
            name=_spellings(setting.path),
            help=_shown(setting.help),
            group=group,
            consume_multiple=typing.get_origin(setting.kind) is tuple,
            negative_iterable=(),
        )
        result.append(
            inspect.Parameter(
                setting.path.replace(".", "__"),
                inspect.Parameter.KEYWORD_ONLY,
                default=setting.value,
                annotation=Annotated[setting.kind, option],
            )
        )
    return result


def _spellings(path: str) -> list[str]:
    """``--model.name`` and the short ``--model``; treatments are so common that they need no ``--method.``."""
    branch, _, leaf = path.rpartition(".")
    short = []
    if branch and leaf in ("name", "source"):
        short = [branch]
    elif branch == "method":
        short = [leaf]
    return [f"--{name}".replace("_", "-") for name in (path, *short)]


def _shown(text: str) -> str:
    return text.replace("``", "`")


def apply(config: Config, values: Mapping[str, Any]) -> Config:
    """The configuration with the settings that were given as options.

    Raises:
        UsageError: If a value is not valid; the text gives the nearest that is.
    """
    return _replaced(config, ((name.replace("__", "."), value) for name, value in values.items()))


def read_toml(path: str | Path) -> dict[str, Any]:
    """The settings in a TOML file.

    Raises:
        UsageError: If there is no such file, or it is not TOML.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"There is no file {path}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}.") from error


def apply_toml(config: Config, values: Mapping[str, Any], path: str | Path) -> Config:
    """The configuration with the settings of a TOML file, whose tables are those of the tree.

    Raises:
        UsageError: If a setting or value is not valid; the text names the file and the nearest valid name.
    """
    given = [(name, value) for name, value in _flat(values) if name not in FIXED]
    try:
        return _replaced(config, given)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def _replaced(config: Config, values: Iterable[tuple[str, Any]]) -> Config:
    try:
        for path, value in values:
            config = replace_at(config, path, value)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    return config


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def value_of(tokens: Sequence[str], option: str) -> str | None:
    """The last value that was given for an option, before the command line is parsed."""
    found = None
    for token, following in zip(tokens, [*tokens[1:], None], strict=False):
        if token == option and following is not None and not following.startswith("-"):
            found = following
        elif token.startswith(f"{option}="):
            found = token.removeprefix(f"{option}=")
    return found
