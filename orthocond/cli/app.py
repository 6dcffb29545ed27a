"""From words to a command, and from errors to exit codes."""

import gc
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

import orthocond
from orthocond.cli.terminal import speak_any_encoding
from orthocond.lab.errors import EXPECTED, UsageError, explain

if TYPE_CHECKING:
    from cyclopts import App, CycloptsError

_HELP = """Well-conditioned SVD layers and disentangled GAN latents: see it, train it, compare it.

`orthocond demo` shows it in two minutes, without any data. `orthocond list` shows what can be trained, and
`orthocond train PRESET --help` every setting of a preset with its default. `--debug` with any command shows where in
the code an error came from.
"""

COMMANDS = {
    "demo": ("demo:demo", "See what treatments do to the conditioning of an SVD layer, in two minutes on two cores."),
    "train": (
        "train:train",
        "Train a preset with a method, evaluate the result, and write the report of the run, all into a run folder.",
    ),
    "evaluate": (
        "evaluate:evaluate",
        "Evaluate the newest checkpoint of a run, and write the results to evaluation.json in its folder.",
    ),
    "diagnose": (
        "evaluate:diagnose",
        "Inspect every layer of a trained model: what is ill-conditioned, and what would help.",
    ),
    "traverse": (
        "traverse:traverse",
        "Draw the images along directions of a GAN's averaged generator.",
    ),
    "explore": (
        "explore:explore",
        "Write one HTML file in which a generator runs, and open it: sliders, strips, heat maps, regions, animations.",
    ),
    "report": (
        "report:report",
        "Write one HTML file about the results of a run, several runs or a table, and open it.",
    ),
    "compare": (
        "report:compare",
        "Compare two or more runs in one report, and open it.",
    ),
    "table": ("table:table", "Make a table or figure of the paper, and train what is missing for it."),
    "bench": ("bench:bench", "Time a training step of each method."),
    "list": ("listing:list_", "Show presets, methods and data sets."),
    "data": ("data:data", "List the known data sets, or get one."),
}
"""The commands: module and function, and the first line of its text. Only the one that is called is imported."""


def run(tokens: Sequence[str]) -> int:
    """Find the command, run it, and return the exit code; errors become one message."""
    speak_any_encoding()
    debug = "--debug" in tokens
    tokens = [token for token in tokens if token != "--debug"]
    try:
        return _find(tokens)() or 0
    except UsageError as error:
        named = " ".join(["orthocond", *(token for token in tokens[:1] if token in COMMANDS)])
        _complain(f"{explain(error)[0]}\n`{named} --help` explains every option.", debug)
        return 2
    except EXPECTED as error:
        text, code = explain(error)
        _complain(text, debug)
        return code


def _find(tokens: Sequence[str]) -> Callable[[], int | None]:
    """The command that the words call, with its arguments."""
    gc.disable()  # modules make no garbage, and looking for it takes a twentieth of the start
    try:
        if tokens == ["list"]:  # needs no parser, whose import takes a quarter of its time
            from orthocond.cli.listing import list_

            return list_
        from cyclopts import CycloptsError

        app, tokens = _app(tokens)
        try:
            command, bound, *_ = app.parse_args(tokens, exit_on_error=False, print_error=False)
        except CycloptsError as error:
            raise UsageError(_text(error, tokens)) from error
        return lambda: command(*bound.args, **bound.kwargs)
    finally:
        gc.enable()


def _app(tokens: Sequence[str]) -> "tuple[App, Sequence[str]]":
    """The application, of which only the command that is called is imported, and the tokens for it."""
    from cyclopts import App

    app = App(name="orthocond", help=_HELP, version=orthocond.__version__)
    called = tokens[0] if tokens else ""
    for name, (place, text) in COMMANDS.items():
        if called not in (name, "--install-completion"):
            app.command(f"orthocond.cli.{place}", name=name, help=text)
        elif name == "train":  # made when its preset is known
            from orthocond.cli import train

            app.command(train.command(tokens[1:] if called == name else ["--help"]), name=name)
            tokens = train.complete(tokens)
        else:
            module, _, function = place.partition(":")
            app.command(getattr(import_module(f"orthocond.cli.{module}"), function), name=name)
    app.register_install_completion_command(help="Let the shell complete commands and options of orthocond.")
    return app, tokens


def _text(error: "CycloptsError", tokens: Sequence[str]) -> str:
    """What the error says; for the last part of a setting's path the whole path, for a value too many its option."""
    from cyclopts import UnknownOptionError, UnusedCliTokensError

    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        first = error.unused_tokens[0]
        before = [token for token in tokens[: tokens.index(first)] if token.startswith("--")] if first in tokens else []
        return f"There is no place for {first!r}{f' after {before[-1]}' if before else ''}."
    if isinstance(error, UnknownOptionError):
        word = (error.token.keyword or error.token.value).partition("=")[0]
        names = (name for argument in error.argument_collection for name in argument.names)
        if found := [name for name in names if name.endswith(f".{word.removeprefix('--')}")]:
            return f"Unknown option: {word}. Did you mean {' or '.join(found)}?"
    return str(error)


def _complain(text: str, debug: bool) -> None:
    """Say what went wrong once: other processes of torchrun only what is their own."""
    rank = os.environ.get("RANK", "0")
    if debug:
        traceback.print_exc()
    elif rank == "0":
        print(text, file=sys.stderr)
    elif not text.startswith("Rank 0 failed"):
        print(f"Process {rank}: {text}", file=sys.stderr)
