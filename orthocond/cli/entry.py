"""Where the command `orthocond` begins: it says what is missing, and then leaves all to `orthocond.cli.app`."""

import os
import sys
from collections.abc import Sequence

from orthocond._process import keep_freed_memory


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: What comes after ``orthocond``; that of this process if None.

    Returns:
        The exit code: 0; 1 for an error; 2 for bad usage; 3 for a training that diverged; 130 and 143 where Ctrl-C or
        SIGTERM ended a training after its state was saved.
    """
    # Pydantic would look for plugins, of which there are none, in the files of every package that is installed.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        from orthocond.cli.app import run
    except ModuleNotFoundError as error:
        print(f'The command line needs {error.name}: pip install "orthocond[lab]"', file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130
    if arguments is not None:
        return run(list(arguments))
    keep_freed_memory()
    return run(sys.argv[1:])
