"""Files that survive a kill at any moment and a full disk, and errors that say what to do."""

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

_REMEDIES = {
    errno.ENOSPC: "The disk is full: free some space, then resume.",
    errno.EDQUOT: "Your disk quota is used up: free some space, then resume.",
    errno.EFBIG: "The file would be larger than the system allows (ulimit -f): raise the limit, then resume.",
    errno.EROFS: "The folder is on a read-only file system: choose another one, or make it writable and resume.",
    errno.EACCES: "The folder is not writable for you: choose another one, or change its permissions and resume.",
}


_PATIENCE = 60.0  # seconds that a process waits for another one that reads, changes and writes a file


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let one process or thread at a time work on the files of a folder; the others wait. The folder is made.

    The system takes the lock back when a process ends, however it ends.

    Raises:
        OSError: If the folder cannot be written.
        RuntimeError: If another process holds the lock for a minute.
    """
    from filelock import FileLock, Timeout  # which brings asyncio; lists of data sets do without

    path = folder / ".lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path)
        lock.acquire(_PATIENCE)
    except Timeout as error:
        raise RuntimeError(
            f"Another process has worked on {folder} for {_PATIENCE:g} seconds; wait until it ends, or stop it."
        ) from error
    except OSError as error:
        raise explained(error, path, 0) from error
    try:
        yield
    finally:
        lock.release()


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that at any moment, even after a power cut, there is the old one or the new one, whole.

    Raises:
        OSError: If it cannot be written; what was there before is untouched, and the text says what to do.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")  # each writer has its own
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise explained(error, path, len(data)) from error


def remove_temporaries(folder: Path) -> None:
    """Remove what writers that were killed have left. Only for one who holds the lock of the folder."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def append_line(path: Path, line: bytes) -> None:
    """Append a line to a file; all of it or nothing.

    Raises:
        OSError: If it cannot be written; the file is then as before.
    """
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(file).st_size
            try:
                rest = line
                while rest:
                    rest = rest[os.write(file, rest) :]
            except OSError:
                os.ftruncate(file, size)
                raise
        finally:
            os.close(file)
    except OSError as error:
        raise explained(error, path, len(line)) from error


def drop_half_line(path: Path) -> None:
    """Cut what follows the last end of line: a line that was being written when the process was killed."""
    data = path.read_bytes() if path.exists() else b""
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        truncate(path, whole)


def truncate(path: Path, size: int) -> None:
    """Cut a file to its first ``size`` bytes."""
    try:
        os.truncate(path, size)
    except OSError as error:
        raise explained(error, path, 0) from error


def sync(path: Path) -> None:
    """Wait until the content of a file is on the disk."""
    try:
        file = os.open(path, os.O_RDWR)
        try:
            os.fsync(file)
        finally:
            os.close(file)
    except OSError as error:
        raise explained(error, path, 0) from error


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    if os.name == "nt":  # which neither can nor needs to
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def explained(error: OSError, path: Path, size: int) -> OSError:
    """The same error with a text that says what was to be written, what is free, and what to do."""
    free = ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        with contextlib.suppress(OSError):
            free = f" {shutil.disk_usage(path.parent).free / 1e6:.1f} MB are free."
    remedy = _REMEDIES.get(error.errno or 0, "Check the folder, then resume.")
    text = f"Cannot write {path} ({size / 1e6:.1f} MB): {error.strerror or error}.{free} {remedy}"
    return OSError(error.errno, f"{text} What was written before is intact.")
