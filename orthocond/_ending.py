"""How a command ends its process."""

import os
import sys
from typing import NoReturn


def leave(code: int | None) -> NoReturn:
    """End this process with an exit code.

    One of several processes leaves without clearing up: threads of torch's collectives can abort a process that does,
    after all its work is done, and torchrun then ends the others.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)
