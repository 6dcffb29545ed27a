"""Every setting of a configuration as an option of the command line, with the preset's own default."""

import inspect
import json
import re
import tomllib
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from cyclopts import Group, Parameter, Token, convert, validators
from docstring_parser import parse

from orthocond.lab import presets
from orthocond.lab.config import FIXED, Config, Scale, change, flatten, option_names
from orthocond.lab.errors import UsageError


def whole(kind: Any, tokens: Sequence[Token]) -> Any:
    """Convert what was given for integers; one with a decimal point is refused, which cyclopts would round.

    Raises:
        ValueError: If a token has a decimal point.
    """
    for token in tokens:
        if "." in token.value:
            raise ValueError(f"needs a whole number; got {token.value}.")
    return convert(kind, tokens)


PositiveInt = Annotated[int, Parameter(converter=whole, validator=validators.Number(gte=1, lte=1_000_000))]
"""An option that counts something."""


class Setting(NamedTuple):
    """A leaf of the configuration's tree."""

    path: str
    kind: Any
    value: Any
    help: str


def find_preset(name: object, scale: object) -> Config:
    """The configuration of a preset.

    Raises:
        UsageError: If there is no such preset or scale; the text gives the nearest name.
    """
    if not isinstance(name, str) or not isinstance(scale, str):
        raise UsageError(f"Preset and scale need names; got {name!r} and {scale!r}.")
    try:
        return presets.preset(name, typing.cast(Scale, scale))
    except ValueError as error:
        raise UsageError(str(error)) from error


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
            name=option_names(setting.path),
            help=_shown(setting.help),
            group=group,
            consume_multiple=_is_list(setting),
            negative_iterable=(),
            converter=_converter(setting.kind),
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


def _converter(kind: Any) -> Callable[[Any, Sequence[Token]], Any] | None:
    """`whole` for integers, for lists of them, and for those that may be None."""
    if kind is int or int in typing.get_args(kind):
        return lambda _, tokens: whole(kind, tokens)
    return None


def _is_list(setting: Setting) -> bool:
    return typing.get_origin(setting.kind) is tuple


def _shown(text: str) -> str:
    return text.replace("``", "`")


def empty_lists(config: Config, tokens: Sequence[str]) -> list[str]:
    """The tokens with ``none`` as the value of a list spelled as an empty list.

    Example:
        >>> empty_lists(presets.preset("dbn-sprites-small"), ["--schedule.milestones", "none", "--seed", "1"])
        ['--schedule.milestones=[]', '--seed', '1']
    """
    lists = {spelling for setting in settings(config) if _is_list(setting) for spelling in option_names(setting.path)}
    result: list[str] = []
    for token in tokens:
        if token.lower() == "none" and result and result[-1] in lists:
            result[-1] += "=[]"
        elif token.lower().endswith("=none") and token[: -len("=none")] in lists:
            result.append(token[: -len("none")] + "[]")
        else:
            result.append(token)
    return result


def apply(config: Config, values: Mapping[str, Any]) -> Config:
    """The configuration with some settings changed, by their dotted paths.

    If the source of the images changes, settings that only sprites have are left out, unless they are given too.

    Raises:
        UsageError: If a setting or value is not valid; the text gives the nearest that is.
    """
    if config.data.source == "sprites" != values.get("data.source", "sprites"):
        from orthocond.lab.experiments import task_of

        values = {**task_of(config).sprites_only, **values}
    try:
        return change(config, values)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error


def apply_options(config: Config, values: Mapping[str, Any]) -> Config:
    """The configuration with the settings that were given as options, by their names as arguments.

    Raises:
        UsageError: If a value is not valid; the text names the option.
    """
    values = {name.replace("__", "."): value for name, value in values.items()}
    try:
        return apply(config, values)
    except UsageError as error:
        text = str(error)
        for path in values:
            text = re.sub(rf"(?m)^{re.escape(path)}(?=[ \[])", option_names(path)[0], text)
        raise UsageError(text) from error


def read_file(path: str | Path) -> dict[str, Any]:
    """The settings in a TOML or JSON file.

    Raises:
        UsageError: If there is no such file, or it holds something else.
    """
    kind = "JSON" if str(path).endswith(".json") else "TOML"
    try:
        text = Path(path).read_text(encoding="utf-8")
        values = json.loads(text, object_pairs_hook=_unique) if kind == "JSON" else tomllib.loads(text)
    except OSError as error:
        raise UsageError(f"The file {path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not {kind}: {error}.") from error
    if not isinstance(values, dict):
        raise UsageError(
            f"{path} needs settings by name, as config.json of a run has them; got {type(values).__name__}."
        )
    return values


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The settings by name; one that stands there twice is an error, as in TOML."""
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"it has {name!r} twice")
        values[name] = value
    return values


def apply_file(config: Config, values: Mapping[str, Any], path: str | Path) -> Config:
    """The configuration with the settings of a file, whose tables are those of the tree.

    Raises:
        UsageError: If a setting or value is not valid; the text names the file and the nearest valid name.
    """
    if values.get("kind", config.kind) != config.kind:
        raise UsageError(f"{path} is for the kind {values['kind']!r}; {config.preset} is of the kind {config.kind!r}.")
    try:
        return apply(config, {name: value for name, value in flatten(values).items() if name not in FIXED})
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def value_of(tokens: Sequence[str], option: str) -> str | None:
    """The last value that was given for an option, before the command line is parsed."""
    found = None
    for token, following in zip(tokens, [*tokens[1:], None], strict=False):
        if token == option and following is not None and not following.startswith("-"):
            found = following
        elif token.startswith(f"{option}="):
            found = token.removeprefix(f"{option}=")
    return found
