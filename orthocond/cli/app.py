"""From words to a command, and from errors to exit codes."""

import os
import sys
import traceback
from collections.abc import Callable, Sequence

from cyclopts import App, CycloptsError, UnknownOptionError

import orthocond
from orthocond.cli import bench, data, demo, evaluate, explore, listing, report, table, train, traverse
from orthocond.cli.terminal import speak_any_encoding
from orthocond.lab.errors import EXPECTED, UsageError, explain

_HELP = """Well-conditioned SVD layers and disentangled GAN latents: see it, train it, compare it.

`orthocond demo` shows it in two minutes, without any data. `orthocond list` tells what can be trained, and
`orthocond train PRESET --help` every setting of a preset with its default. `--debug` with any command shows where in
the code an error came from.
"""

COMMANDS: dict[str, Callable[..., int | None] | None] = {
    "demo": demo.demo,
    "train": None,  # made when its preset is known
    "evaluate": evaluate.evaluate,
    "diagnose": evaluate.diagnose,
    "traverse": traverse.traverse,
    "explore": explore.explore,
    "report": report.report,
    "compare": report.compare,
    "table": table.table,
    "bench": bench.bench,
    "list": listing.list_,
    "data": data.data,
}


def run(tokens: Sequence[str]) -> int:
    """Find the command, run it, and return the exit code; errors become one message."""
    speak_any_encoding()
    debug = "--debug" in tokens
    tokens = [token for token in tokens if token != "--debug"]
    try:
        command, bound, *_ = _app(tokens).parse_args(train.complete(tokens), exit_on_error=False, print_error=False)
        return command(*bound.args, **bound.kwargs) or 0
    except (CycloptsError, UsageError) as error:
        named = " ".join(["orthocond", *(token for token in tokens[:1] if token in COMMANDS)])
        _complain(f"{explain(UsageError(_text(error)))[0]}\n`{named} --help` tells more.", debug)
        return 2
    except EXPECTED as error:
        text, code = explain(error)
        _complain(text, debug)
        return code


def _app(tokens: Sequence[str]) -> App:
    app = App(name="orthocond", help=_HELP, version=orthocond.__version__)
    for name, command in COMMANDS.items():
        app.command(command or train.command(tokens[1:] if tokens[:1] == ["train"] else ["--help"]), name=name)
    app.register_install_completion_command(help="Let the shell complete commands and options of orthocond.")
    return app


def _text(error: CycloptsError | UsageError) -> str:
    """What the error says; for the last part of a setting's path, the whole path."""
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
