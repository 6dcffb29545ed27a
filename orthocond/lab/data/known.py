"""Data sets by name: what each is, where `load` looks for it, and how to get it."""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from orthocond.lab.data.archives import ARCHIVES, is_archive
from orthocond.lab.runs.files import explained, locked
from orthocond.lab.text import nearest

_CIFAR = "https://www.cs.toronto.edu/~kriz/"
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_CELEBA = "https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html"
_ANIMEFACE = "https://github.com/bchao1/Anime-Face-Dataset"
_CHUNK = 2**18
_ATTEMPTS = 3  # each goes on where the one before stopped
_PATIENCE = 30.0  # seconds without an answer


class RemoteFile(NamedTuple):
    """A file to download.

    Attributes:
        url: Where it is.
        checksum: ``sha256:`` or ``md5:`` and the digits, as its makers publish them.
        path: Where it goes, below the folder of data sets.
    """

    url: str
    checksum: str
    path: str


@dataclass(frozen=True)
class KnownSet:
    """A data set that has a name.

    Attributes:
        text: What it is.
        home: Its page.
        places: Where `load` looks for it below the folder of data sets.
        files: What `get` downloads; empty if it cannot be downloaded without you.
        recipe: What to do then.
    """

    text: str
    home: str
    places: tuple[str, ...]
    files: tuple[RemoteFile, ...] = ()
    recipe: str = ""

    def find(self, root: Path) -> Path | None:
        """Where it is in a folder of data sets; None if it is not there."""
        return next((root / place for place in self.places if (root / place).exists()), None)


def _cifar(count: int, folder: str, sha256: str) -> KnownSet:
    archive = f"cifar-{count}-python.tar.gz"
    file = RemoteFile(_CIFAR + archive, f"sha256:{sha256}", archive)
    return KnownSet(
        f"60,000 photographs of 32x32 pixels in {count} classes (170 MB)",
        f"{_CIFAR}cifar.html",
        (folder, archive),
        (file,),
    )


def _by_hand(name: str, text: str, home: str, recipe: str) -> KnownSet:
    return KnownSet(text, home, tuple(name + ending for ending in ("", *ARCHIVES)), recipe=recipe)


_FASHION_FILES = {
    "train-images-idx3-ubyte.gz": "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "md5:25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "md5:bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "md5:bb300cfdad3c16e7a12a480ee83cd310",
}
_ONE_FOLDER = "Put the images into the folder {name}, or pack them into {name}.tar or {name}.zip there."
_CLASS_FOLDERS = "Put them into the folder {name} as train/CLASS/*.JPEG and val/CLASS/*.JPEG."

KNOWN: dict[str, KnownSet] = {
    "cifar10": _cifar(10, "cifar-10-batches-py", "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"),
    "cifar100": _cifar(100, "cifar-100-python", "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7"),
    "fashion-mnist": KnownSet(
        "70,000 gray pictures of clothes of 28x28 pixels in 10 classes (30 MB)",
        "https://github.com/zalandoresearch/fashion-mnist",
        ("fashion-mnist", "FashionMNIST/raw"),
        tuple(RemoteFile(_FASHION + name, digits, f"fashion-mnist/{name}") for name, digits in _FASHION_FILES.items()),
    ),
    "imagenet": _by_hand(
        "imagenet",
        "1.3 million photographs in 1,000 classes (ILSVRC 2012)",
        "https://image-net.org/download.php",
        "Register there, agree to the terms, and download the training and validation images. "
        + _CLASS_FOLDERS.format(name="imagenet"),
    ),
    "celeba": _by_hand(
        "celeba",
        "202,599 faces, aligned, 178x218 pixels",
        _CELEBA,
        "Agree to the terms there and download img_align_celeba.zip. Save it as celeba.zip.",
    ),
    "ffhq": _by_hand(
        "ffhq",
        "70,000 faces",
        "https://github.com/NVlabs/ffhq-dataset",
        "Download thumbnails128x128 or images1024x1024 as that page says. " + _ONE_FOLDER.format(name="ffhq"),
    ),
    "church": _by_hand(
        "church",
        "126,227 photographs of churches (LSUN church_outdoor)",
        "https://github.com/fyu/lsun",
        "Download and export church_outdoor_train as that page says. " + _ONE_FOLDER.format(name="church"),
    ),
    "animeface": _by_hand(
        "animeface",
        "63,632 drawn faces, 90 to 120 pixels",
        _ANIMEFACE,
        "Download the cropped faces as that page says. " + _ONE_FOLDER.format(name="animeface"),
    ),
    # What the presets of a laptop train on: small parts of larger sets, which anybody can make alike.
    "tiny-imagenet-20": _by_hand(
        "tiny-imagenet-20",
        "20 of the 200 classes of Tiny ImageNet, 64x64 pixels: 10,000 training and 1,000 held-out images",
        "https://huggingface.co/datasets/zh-plus/tiny-imagenet",
        "Download tiny-imagenet-200.zip from cs231n.stanford.edu and take 20 classes of it. "
        + _CLASS_FOLDERS.format(name="tiny-imagenet-20")
        + " All 200 classes need no preparation: --data hf:zh-plus/tiny-imagenet.",
    ),
    "animeface-64": _by_hand(
        "animeface-64",
        "7,000 drawn faces of animeface, 64x64 pixels",
        _ANIMEFACE,
        "Download the cropped faces as that page says, and scale 7,000 of them to 64x64 pixels. "
        + _ONE_FOLDER.format(name="animeface-64"),
    ),
    "utkface-128": _by_hand(
        "utkface-128",
        "2,500 faces of people of all ages, 128x128 pixels",
        "https://susanqq.github.io/UTKFace/",
        "Agree to the terms there, download the aligned and cropped faces, and scale 2,500 of them to 128x128 pixels. "
        + _ONE_FOLDER.format(name="utkface-128"),
    ),
    "celeba-10k": _by_hand(
        "celeba-10k",
        "10,000 faces of celeba, 89x109 pixels, half of the official size",
        _CELEBA,
        "Agree to the terms there, download img_align_celeba.zip, and scale 10,000 of its images to 89x109 pixels. "
        + _ONE_FOLDER.format(name="celeba-10k"),
    ),
    "buildings-64": _by_hand(
        "buildings-64",
        "2,628 photographs of buildings, 64x64 pixels",
        "https://www.kaggle.com/datasets/puneet6060/intel-image-classification",
        "Photographs of buildings from anywhere will do, such as the class buildings of that set; scale them to 64x64 "
        "pixels. " + _ONE_FOLDER.format(name="buildings-64"),
    ),
}


def data_root(root: str | os.PathLike[str] | None = None) -> Path:
    """The folder of data sets: the one given, else the environment variable ``ORTHOCOND_DATA``, else ``data``."""
    return Path(root or os.environ.get("ORTHOCOND_DATA") or "data")


def names(root: str | os.PathLike[str] | None = None) -> dict[str, str]:
    """Names that `load` knows, with where each lies or what it needs.

    Args:
        root: Folder in which names are looked up, as of `load`.

    Example:
        >>> names()["sprites"]
        'built in'
    """
    folder = data_root(root)
    found = {"sprites": "built in"}
    for name, known in KNOWN.items():
        found[name] = str(known.find(folder) or f"not in {folder}; orthocond data get {name}")
    taken = {place for known in KNOWN.values() for place in known.places}
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        if (file.is_dir() or is_archive(file)) and file.name not in taken and not file.name.startswith("."):
            found[_stem(file)] = str(file)
    return found


def _stem(path: Path) -> str:
    ending = next((e for e in ARCHIVES if path.name.lower().endswith(e)), "")
    return path.name[: len(path.name) - len(ending)]


Progress = Callable[[str, int, int | None], None]
"""Called with the name of a file, how many bytes have come, and how many there are (None if that is not known)."""


def get(name: str, root: str | os.PathLike[str] | None = None, progress: Progress | None = None) -> Path:
    """Download a data set that is public, so that `load` finds it.

    A download that was interrupted goes on where it stopped. A file appears under its name when all of it has come and
    its checksum is right; a wrong one is deleted. What is there already, with the right checksum, is left as it is.

    Args:
        name: A name of `KNOWN`, or ``hf:NAME`` of a Hugging Face data set, which ``datasets`` downloads.
        root: Folder of data sets; see `data_root`.
        progress: See `Progress`.

    Returns:
        Where it is.

    Raises:
        ValueError: If there is no such name, if it cannot be downloaded without you (the text says what to do), or if
            a file has another checksum.
        OSError: If the network or the disk fails; the text says what to do.
        RuntimeError: If another process downloads into the same folder.
    """
    folder = data_root(root)
    if name.startswith("hf:"):
        from orthocond.lab.data.hub import fetch

        fetch(name[3:], Path(root) if root else None)
        return folder
    if name == "sprites":
        raise ValueError("sprites are built in: there is nothing to get.")
    if name not in KNOWN:
        raise ValueError(
            f"There is no data set {name!r} to download.{nearest(name, KNOWN)} There are: {', '.join(KNOWN)}, and "
            "hf:<name of a Hugging Face data set>."
        )
    known = KNOWN[name]
    found = known.find(folder)
    if not known.files:
        if found is not None:
            return found
        raise ValueError(
            f"{name} cannot be downloaded without you. {known.home}: {known.recipe} The folder of data sets is "
            f"{folder.absolute()}."
        )
    if found is not None and not any((folder / file.path).is_relative_to(found) for file in known.files):
        return found  # unpacked by hand
    with locked(folder):
        for file in known.files:
            _retrieve(file, folder, known.home, progress)
    return known.find(folder) or folder


def _retrieve(file: RemoteFile, root: Path, home: str, progress: Progress | None) -> None:
    pooch: Any = importlib.import_module("pooch")
    pooch.get_logger().setLevel("ERROR")
    target = root / file.path
    part = target.with_name(f".{target.name}.part")

    def download(url: str, output: str, _: Any) -> None:
        _fetch(url, part, lambda done, total: progress(target.name, done, total) if progress else None)
        os.replace(part, output)

    try:
        pooch.retrieve(file.url, file.checksum, target.name, target.parent, downloader=download)
    except ValueError as error:  # of pooch: another checksum
        raise ValueError(
            f"The file from {file.url} does not have the checksum {file.checksum}, and was deleted. Try again; if it "
            f"fails again, see {home}."
        ) from error


def _fetch(url: str, part: Path, progress: Callable[[int, int | None], None]) -> None:
    """Append what is missing to a file that holds the beginning."""
    import http.client
    import urllib.error

    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return _go_on(url, part, progress)
        except urllib.error.HTTPError as error:
            raise OSError(f"{url} is not there ({error}). Try again later, or look for its new address.") from error
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
            if attempt == _ATTEMPTS:
                came = part.stat().st_size if part.exists() else 0
                raise OSError(
                    f"The download of {url} stopped after {came} bytes ({str(error).strip()}). What was downloaded "
                    "is kept: check the network and run the same command to resume."
                ) from error
        except OSError as error:
            raise explained(error, part, 0) from error
    return None


def _go_on(url: str, part: Path, progress: Callable[[int, int | None], None]) -> None:
    import urllib.error
    import urllib.request

    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        answer = urllib.request.urlopen(request, timeout=_PATIENCE)
    except urllib.error.HTTPError as error:
        if have and error.code == 416:  # there is nothing after what we have: the checksum decides
            return
        raise
    with answer:
        if answer.status != 206:  # from the beginning
            have = 0
        length = answer.headers.get("Content-Length", "")
        total = have + int(length) if length.isdecimal() else None
        part.parent.mkdir(parents=True, exist_ok=True)
        with part.open("ab" if have else "wb") as file:
            while chunk := answer.read(_CHUNK):
                file.write(chunk)
                have += len(chunk)
                progress(have, total)
    if total is not None and have < total:
        raise ConnectionError(f"{total - have} bytes are missing")
