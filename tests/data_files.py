"""Small files of every format for the tests of the data readers."""

import gzip
import io
import os
import pickle
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


def pixels(seed=0, height=8, width=8, channels=3):
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def encoded(array, form="PNG"):
    stream = io.BytesIO()
    Image.fromarray(array.squeeze()).save(stream, form)
    return stream.getvalue()


def write_tree(root, names, **size):
    """One PNG for each name, with pixels that depend on its position."""
    for seed, name in enumerate(names):
        file = Path(root, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(encoded(pixels(seed, **size)))
    return Path(root)


def pack(folder, path):
    """A folder as zip or tar, by the name of the archive."""
    files = sorted(file for file in Path(folder).rglob("*") if file.is_file())
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            for number, file in enumerate(files):
                method = zipfile.ZIP_DEFLATED if number % 2 else zipfile.ZIP_STORED
                member = zipfile.ZipInfo(file.relative_to(folder).as_posix())
                member.extra = b"\x99\x99\x03\x00abc"  # a private field, as some programs add before the data
                archive.writestr(member, file.read_bytes(), method)
    else:
        with tarfile.open(path, "w:gz" if path.name.endswith("gz") else "w") as archive:
            for file in files:
                archive.add(file, file.relative_to(folder).as_posix())
    return path


def write_cifar10(folder, per_file=4):
    """The official layout, written as Python 2 did: byte strings and protocol 2."""
    folder.mkdir()
    images = np.random.default_rng(0).integers(0, 256, (6 * per_file, 3072), dtype=np.uint8)
    labels = [i % 10 for i in range(6 * per_file)]
    for number, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        part = slice(number * per_file, (number + 1) * per_file)
        content = {b"data": images[part], b"labels": labels[part], b"batch_label": name.encode()}
        (folder / name).write_bytes(pickle.dumps(content, 2))
    meta = {b"label_names": [f"class {i}".encode() for i in range(10)]}
    (folder / "batches.meta").write_bytes(pickle.dumps(meta, 2))
    return images.reshape(-1, 3, 32, 32), labels


def write_cifar100(folder, labels=(3, 99), protocol=2):
    folder.mkdir(exist_ok=True)
    images = np.random.default_rng(0).integers(0, 256, (len(labels), 3072), dtype=np.uint8)
    for name in ("train", "test"):
        content = {b"data": images, b"fine_labels": list(labels), b"coarse_labels": [0] * len(labels)}
        (folder / name).write_bytes(pickle.dumps(content, protocol))
    meta = {b"fine_label_names": [f"fine {i}".encode() for i in range(100)]}
    (folder / "meta").write_bytes(pickle.dumps(meta, protocol))
    return images.reshape(-1, 3, 32, 32)


def write_idx(folder, compress, count=5):
    folder.mkdir()
    images = np.random.default_rng(0).integers(0, 256, (count, 28, 28), dtype=np.uint8)
    labels = np.arange(count, dtype=np.uint8)
    for prefix in ("train", "t10k"):
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            head = bytes((0, 0, 8, array.ndim)) + b"".join(n.to_bytes(4, "big") for n in array.shape)
            content = head + array.tobytes()
            name = f"{prefix}-{kind}-ubyte" + (".gz" if compress else "")
            (folder / name).write_bytes(gzip.compress(content) if compress else content)
    return images, labels


def real_data(name):
    """A real data set, from the folder that ORTHOCOND_DATA names or that lies beside the repository; else skip."""
    roots = [os.environ.get("ORTHOCOND_DATA"), Path(__file__).parents[2] / "shared" / "data"]
    for root in filter(None, roots):
        if Path(root, name).exists():
            return Path(root, name)
    pytest.skip(f"{name} is in none of $ORTHOCOND_DATA and ../shared/data")
