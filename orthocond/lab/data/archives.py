"""Files of a folder, zip or tar, listed once and read one by one from any thread or process; nothing is unpacked."""

import io
import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")


@dataclass(frozen=True, slots=True)
class Entry:
    """One file: a whole one in a folder, or a stretch of an archive.

    Each read opens the file anew, so that threads and forked processes share no position in it.
    """

    name: str
    """Path inside the folder or archive, with ``/``."""
    where: str
    """The folder or archive."""
    offset: int = 0
    length: int | None = None
    deflated: bool = False
    content: bytes | None = None

    def read(self) -> bytes:
        """The bytes of the file."""
        if self.content is not None:
            return self.content
        if self.length is None:
            return Path(self.where, self.name).read_bytes()
        with open(self.where, "rb") as file:
            file.seek(self.offset)
            content = file.read(self.length)
        return zlib.decompress(content, -15) if self.deflated else content

    def open(self) -> BinaryIO:
        """The file as a stream."""
        if self.content is None and self.length is None:
            return Path(self.where, self.name).open("rb")
        return io.BytesIO(self.read())

    def __str__(self) -> str:
        return f"{self.where}/{self.name}"


def is_archive(path: Path) -> bool:
    """Whether the name says zip or tar."""
    return path.name.lower().endswith(ARCHIVES)


def entries(path: Path, wanted: Callable[[str], bool]) -> tuple[list[Entry], list[str]]:
    """Files in a folder or archive, sorted by name, without hidden ones.

    Args:
        path: A folder, zip or tar; a compressed tar is read whole, and what is wanted is kept in memory.
        wanted: Which names to list.

    Returns:
        The wanted files, and the names of the others and of empty folders (which end in ``/``).

    Raises:
        ValueError: If the archive is broken, encrypted or packed in a way that cannot be read.
    """
    try:
        if path.is_dir():
            found = _folder(path)
        elif path.name.lower().endswith(".zip"):
            found = _zip(path)
        else:
            found = _tar(path, wanted)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, OSError) as error:
        raise ValueError(f"{path} cannot be read ({error}). Is the file complete? Copy or pack it again.") from error
    found = [e for e in found if not any(p.startswith(".") or p == "__MACOSX" for p in e.name.rstrip("/").split("/"))]
    found.sort(key=lambda entry: entry.name)
    kept = [entry for entry in found if wanted(entry.name)]
    return kept, [entry.name for entry in found if not wanted(entry.name)]


def _folder(path: Path) -> list[Entry]:
    found = []
    for folder, folders, files in os.walk(path, followlinks=True):
        inside = Path(folder).relative_to(path).as_posix()
        prefix = "" if inside == "." else f"{inside}/"
        found += [Entry(prefix + name, str(path)) for name in files]
        if not files and not folders:
            found.append(Entry(prefix, str(path)))
    return found


def _zip(path: Path) -> list[Entry]:
    found = []
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        for member in archive.infolist():
            if member.is_dir():
                continue
            if member.flag_bits & 1 or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError(
                    f"{path}: {member.filename} is encrypted or packed with method {member.compress_type}. "
                    "Pack the images again without encryption (zip -0 is fastest to read)."
                )
            # The local header repeats the name and has extra fields of its own length: the data start behind both.
            file.seek(member.header_offset + 26)
            lengths = file.read(4)
            offset = member.header_offset + 30 + int.from_bytes(lengths[:2], "little")
            offset += int.from_bytes(lengths[2:], "little")
            deflated = member.compress_type == zipfile.ZIP_DEFLATED
            found.append(Entry(member.filename, str(path), offset, member.compress_size, deflated))
    return found


def _tar(path: Path, wanted: Callable[[str], bool]) -> list[Entry]:
    found = []
    plain = tarfile.is_tarfile(path) and _is_plain_tar(path)
    with tarfile.open(path) as archive:
        for member in archive:
            if not member.isfile():
                continue
            name = member.name.removeprefix("./")
            if plain:
                found.append(Entry(name, str(path), member.offset_data, member.size))
            else:
                stream = archive.extractfile(member) if wanted(name) else None
                found.append(Entry(name, str(path), content=stream.read() if stream else b""))
    return found


def _is_plain_tar(path: Path) -> bool:
    try:
        with tarfile.open(path, "r:"):
            return True
    except tarfile.ReadError:
        return False
