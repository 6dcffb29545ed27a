"""Files of a folder, zip or tar, listed once and read one by one from any thread or process; nothing is unpacked."""

import bz2
import gzip
import io
import lzma
import os
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from orthocond.lab.text import printable

ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")

# More than any collection of images has, and little enough not to fill memory or disk by a small malicious file.
_FILES = 5_000_000  # in a folder or archive
_BYTES = 2**29  # of one file
_RATIO = 200  # of bytes unpacked to bytes packed, from
_FREE = 2**26  # bytes on


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
    """Bytes in the archive; None for a whole file."""
    deflated: int | None = None
    """Bytes after inflating; None if they are not deflated."""
    crc: int | None = None
    content: bytes | None = None

    def read(self) -> bytes:
        """The bytes of the file.

        Raises:
            OSError: If it cannot be read, or is not what the archive said it is.
        """
        if self.content is not None:
            return self.content
        if self.length is None:
            return read_file(Path(self.where, self.name))
        with open(self.where, "rb") as file:
            file.seek(self.offset)
            content = file.read(self.length)
        if len(content) != self.length:
            raise OSError("the archive ends in the middle of the file")
        if self.deflated is not None:
            inflate = zlib.decompressobj(-15)
            content = inflate.decompress(content, self.deflated + 1)
            if len(content) != self.deflated:
                raise OSError(f"it does not have the {self.deflated} bytes that the archive states")
        if self.crc is not None and zlib.crc32(content) != self.crc:
            raise OSError("its content does not have the checksum that the archive states")
        return content

    def open(self) -> BinaryIO:
        """The file as a stream."""
        if self.content is None and self.length is None:
            return Path(self.where, self.name).open("rb")
        return io.BytesIO(self.read())

    def __str__(self) -> str:
        return printable(f"{self.where}/{self.name}")


def read_file(path: Path) -> bytes:
    """The bytes of a file that is neither a pipe nor a device nor larger than any image.

    Raises:
        OSError: If it is, or cannot be read.
    """
    about = os.stat(path)
    if not stat.S_ISREG(about.st_mode):
        raise OSError("it is a pipe, device or folder")
    if about.st_size > _BYTES:
        raise OSError(f"it has {about.st_size} bytes, and {_BYTES} are allowed")
    return path.read_bytes()


def check_expansion(name: object, packed: int, unpacked: int) -> None:
    """Refuse what would grow out of proportion when unpacked.

    Raises:
        ValueError: If it would.
    """
    if unpacked > max(_FREE, _RATIO * packed):
        raise ValueError(
            f"{printable(name)} has {packed} bytes and would have {unpacked} when unpacked, more than {_RATIO} times "
            "as many. If you trust it, unpack it yourself and load the folder."
        )


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
        ValueError: If the archive is broken, cut off, encrypted or packed in a way that cannot be read; if it holds
            links, or a name twice; if it is too large; if a folder contains itself by a link, or holds a pipe.
    """
    try:
        if path.is_dir():
            listing = _folder(path)
        elif not path.is_file():
            raise OSError("it is neither a folder nor a regular file")
        elif path.name.lower().endswith(".zip"):
            listing = _zip(path)
        else:
            listing = _tar(path, wanted)
        found: dict[str, Entry] = {}
        for entry in listing:
            if any(p.startswith(".") or p == "__MACOSX" for p in entry.name.rstrip("/").split("/")):
                continue
            if not entry.name:
                raise OSError("it holds a file without a name")
            if entry.name in found:
                raise OSError(f"it holds {entry.name} twice")
            if len(found) == _FILES:
                raise OSError(f"it holds more than {_FILES} files")
            found[entry.name] = entry
    except _UNREADABLE as error:
        raise ValueError(
            f"{printable(path)} cannot be read ({printable(error)}). Is the file complete? Copy or pack it again."
        ) from error
    ordered = [found[name] for name in sorted(found)]
    kept = [entry for entry in ordered if wanted(entry.name)]
    return kept, [entry.name for entry in ordered if not wanted(entry.name)]


# What the standard library raises on damaged archives. Decoders of names raise UnicodeError.
_UNREADABLE = (
    *(OSError, EOFError, UnicodeError, OverflowError, NotImplementedError),
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, RecursionError),
)
_PACKED: dict[bytes, Callable[[Any], Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open}
_ZIP_END = 22 + 2**16  # bytes at most from the last record of a zip archive on, of which the most are its comment
_TOO_LARGE = f"a file in it is longer than it, or it would be more than {_RATIO} times as large when unpacked"
_LINK = "the link {}; pack the files themselves (tar --dereference --hard-dereference)"


def _folder(path: Path) -> Iterator[Entry]:
    """Files below a folder, following links, but not into a folder that contains itself."""
    waiting: list[tuple[Path, str, tuple[Path, ...]]] = [(path, "", (path.resolve(),))]
    while waiting:
        folder, prefix, above = waiting.pop()
        empty = True
        with os.scandir(folder) as files:
            for file in files:
                empty = False
                name = prefix + file.name
                if file.name.startswith("."):
                    continue
                if file.is_dir():
                    inside = Path(file.path).resolve() if file.is_symlink() else above[-1] / file.name
                    if inside in above:
                        raise OSError(f"{name} is a link to a folder that contains it")
                    waiting.append((Path(file.path), f"{name}/", (*above, inside)))
                elif file.is_file():
                    yield Entry(name, str(path))
                else:
                    raise OSError(f"{name} is a pipe, a device, or a link to nothing")
        if empty and prefix:
            yield Entry(prefix, str(path))


def _zip(path: Path) -> Iterator[Entry]:
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        members = archive.infolist()
        file.seek(max(0, path.stat().st_size - _ZIP_END))
        end = file.read()
        (told,) = struct.unpack_from("<H", end, end.rfind(b"PK\x05\x06") + 10)
        # zipfile does not compare them. For more files 0xFFFF stands here, or what is left of their number.
        if told not in (len(members) % 2**16, 0xFFFF):
            raise OSError(f"its list has {len(members)} files, and it tells of {told}")
        check_expansion(path, path.stat().st_size, sum(member.file_size for member in members))
        for member in members:
            if "\0" in member.orig_filename:  # zipfile cuts the name there, and a picture becomes a folder
                raise OSError(f"{member.filename} has a name that is cut off")
            if member.filename.endswith("/"):
                continue
            if stat.S_ISLNK(member.external_attr >> 16):
                raise OSError(f"it holds {_LINK.format(member.filename)}")
            if member.file_size > _BYTES:
                raise OSError(f"{member.filename} has {member.file_size} bytes, and {_BYTES} are allowed")
            if member.flag_bits & 1 or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError(
                    f"{printable(path)}: {printable(member.filename)} is encrypted or packed with method "
                    f"{member.compress_type}. Pack the images again without encryption (zip -0 is fastest to read)."
                )
            # The local header repeats the name and has extra fields of its own length: the data start behind both.
            file.seek(max(0, member.header_offset))
            header = file.read(30)
            if header[:4] != b"PK\x03\x04" or len(header) < 30:
                raise OSError(f"{member.filename} is not where the archive says")
            length, extra = struct.unpack("<HH", header[26:30])
            if file.read(length) != member.orig_filename.encode("utf-8" if member.flag_bits & 0x800 else "cp437"):
                raise OSError(f"{member.filename} has another name where it lies")
            offset = member.header_offset + 30 + length + extra
            deflated = member.file_size if member.compress_type == zipfile.ZIP_DEFLATED else None
            yield Entry(member.filename, str(path), offset, member.compress_size, deflated, member.CRC)


def _tar(path: Path, wanted: Callable[[str], bool]) -> Iterator[Entry]:
    with open(path, "rb") as file:
        packed, first = path.stat().st_size, file.read(6)
        file.seek(0)
        unpack = next((opened for magic, opened in _PACKED.items() if first.startswith(magic)), None)
        limit = packed if unpack is None else max(_FREE, _RATIO * packed)
        stream = _Bounded(file if unpack is None else unpack(file), limit + 2**21)  # the end is looked for behind it
        with tarfile.open(fileobj=stream, mode="r:") as archive:  # type: ignore[call-overload]
            for member in archive:
                name = member.name.removeprefix("./")
                if member.isdir():
                    continue
                if not member.isreg() or member.issparse():
                    link = member.issym() or member.islnk()
                    raise OSError(f"it holds {_LINK.format(name) if link else f'{name}, which is no regular file'}")
                if not 0 <= member.size <= _BYTES:
                    raise OSError(f"{name} has {member.size} bytes, and {_BYTES} are allowed")
                if unpack is None:
                    yield Entry(name, str(path), member.offset_data, member.size)
                elif not wanted(name):
                    yield Entry(name, str(path), content=b"")
                else:
                    stream.seek(member.offset_data)
                    yield Entry(name, str(path), content=stream.read(member.size))
            _check_end(stream, archive.offset)


def _check_end(stream: "_Bounded", offset: int) -> None:
    """A tar ends with a block of zeros and zeros only: else it was cut off or damaged, and there may be more images."""
    stream.seek(offset)
    end = stream.read(tarfile.BLOCKSIZE)
    if len(end) < tarfile.BLOCKSIZE or any(end):
        raise OSError(f"it is cut off or damaged at byte {offset}")
    while block := stream.read(2**16):
        if any(block):
            raise OSError("there is more after its end, as in joined archives; pack the files into one")


class _Bounded:
    """A stream that gives up where it has unpacked more than a limit, however the reader came to ask for it."""

    def __init__(self, stream: Any, limit: int) -> None:
        self._stream = stream
        self._limit = limit

    def read(self, size: int = -1) -> bytes:
        if size < 0 or self._stream.tell() + size > self._limit:
            raise OSError(_TOO_LARGE)
        return bytes(self._stream.read(size))

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence != 0 or not 0 <= offset <= self._limit:
            raise OSError(_TOO_LARGE)
        return int(self._stream.seek(offset))

    def tell(self) -> int:
        return int(self._stream.tell())
