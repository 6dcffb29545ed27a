"""The process of a command: how it uses memory, and how it ends."""

import ctypes
import os
import platform
import sys
from typing import NoReturn

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of mallopt, in malloc.h
_SETTINGS = ("MALLOC_MMAP_", "MALLOC_TRIM_", "GLIBC_TUNABLES")


def keep_freed_memory() -> None:
    """Let this process keep the large blocks that it frees, if the C library is glibc and nobody set this otherwise.

    A training needs the same activations in every step. glibc would give them back to the system, which clears them
    page by page when they are needed again: up to half of the time of a step.
    """
    if platform.libc_ver()[0] == "glibc" and not any(name.startswith(_SETTINGS) for name in os.environ):
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_MAX, 0)
        libc.mallopt(_TRIM_THRESHOLD, -1)


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
