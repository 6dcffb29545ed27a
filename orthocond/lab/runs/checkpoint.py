"""Checkpoints on disk: written atomically, checked when read, the newest two kept.

A checkpoint is ``<step>.json`` and the tensors it names, ``<step>-<hash>.safetensors``. The tensors are written first:
a checkpoint exists from the moment its JSON file does, and one of the same step is replaced in one moment too.
"""

import contextlib
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from orthocond.lab.runs.files import write_atomically
from orthocond.lab.runs.packing import dump_json, pack, unpack

_FORMAT = 1
_KEPT = 2  # the newest, and one in case it is damaged


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint that was read and found whole.

    Attributes:
        step: The step at which it was saved.
        state: The tree that was saved.
        skipped: Why newer ones were not used; empty if this is the newest.
        sizes: Bytes that the files of metrics had, by name.
        config: The configuration of the run that saved it; None if it was saved by a version that did not store it.
    """

    step: int
    state: Any
    skipped: tuple[str, ...]
    sizes: dict[str, int]
    config: dict[str, Any] | None = None


def save(folder: Path, state: object, step: int, sizes: dict[str, int], config: dict[str, Any]) -> None:
    """Write a checkpoint, then remove all but it and the one before.

    Those of later steps are removed too: they belong to a course of the run that was given up.

    Raises:
        TypeError: If the state holds what a checkpoint cannot.
        OSError: If it cannot be written; all others are then untouched.
    """
    skeleton, tensors = pack(state)
    data = save_tensors(tensors)
    digest = hashlib.sha256(data).hexdigest()
    name = f"{step:010d}-{digest[:12]}.safetensors"
    body = {
        "format": _FORMAT,
        "step": step,
        "tensors": {"file": name, "bytes": len(data), "sha256": digest},
        "files": sizes,
        "config": config,
        "state": skeleton,
    }
    path = folder / f"{step:010d}.json"
    text = dump_json({"sha256": hashlib.sha256(dump_json(body)).hexdigest(), "body": body})
    try:
        if not folder.exists():  # copies of a run often lose empty folders
            folder.mkdir()
        write_atomically(folder / name, data)
        write_atomically(path, text)
    except OSError:
        with contextlib.suppress(OSError):
            if not path.exists() or name.encode() not in path.read_bytes():
                (folder / name).unlink()
        raise
    _remove(folder, keep=[s for s in steps(folder) if s <= step][:_KEPT], newest=name)


def steps(folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder, newest first."""
    return sorted((int(p.stem) for p in folder.glob("*.json") if p.stem.isdecimal()), reverse=True)


def _remove(folder: Path, keep: list[int], newest: str) -> None:
    """Remove the files of all other steps, and of the newest step all tensors but those given."""
    for path in sorted(folder.iterdir()):  # the JSON file of a step before its tensors
        number = path.name.lstrip(".")[:10]
        if not number.isdecimal() or path.suffix not in (".json", ".safetensors", ".tmp"):
            continue
        replaced = path.suffix == ".safetensors" and newest[:10] == number and path.name != newest
        if path.suffix == ".tmp" or int(number) not in keep or replaced:
            path.unlink(missing_ok=True)


def read(folder: Path) -> tuple[bytes, bytes, list[str]] | None:
    """The bytes of the newest good checkpoint, JSON and tensors, and why newer ones were not good; None if none exist.

    Raises:
        RuntimeError: If there are some and none is good.
    """
    skipped: list[str] = []
    for step in steps(folder):
        try:
            text = (folder / f"{step:010d}.json").read_bytes()
            body = _checked_body(text)
            return text, _checked_tensors(folder, body["tensors"]), skipped
        except (_DamagedError, FileNotFoundError) as error:
            skipped.append(f"Checkpoint {step} is damaged and was not used: {error}")
    if skipped:
        raise RuntimeError(
            f"No checkpoint in {folder} is good. Start a new run, or delete that folder to start this one over. "
            + " ".join(skipped)
        )
    return None


def parse(text: bytes, data: bytes, skipped: list[str]) -> Checkpoint:
    """The checkpoint in bytes that `read` returned."""
    body = json.loads(text)["body"]
    state = unpack(body["state"], load_tensors(data))
    return Checkpoint(body["step"], state, tuple(skipped), body["files"], body.get("config"))


def remove_all(folder: Path) -> None:
    """Remove every checkpoint; the folder is there afterwards."""
    folder.mkdir(exist_ok=True)
    _remove(folder, keep=[], newest="")


class _DamagedError(Exception):
    pass


def _checked_body(text: bytes) -> dict[str, Any]:
    try:
        content = json.loads(text)
        body, expected = content["body"], content["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise _DamagedError(f"its JSON file ({len(text)} bytes) is cut off or not JSON.") from error
    if hashlib.sha256(dump_json(body)).hexdigest() != expected:
        raise _DamagedError("the content of its JSON file does not have the stored hash.")
    if body["format"] != _FORMAT:
        raise RuntimeError(
            f"The checkpoint has format {body['format']}, this version reads {_FORMAT}; use the version that wrote it."
        )
    return dict(body)


def _checked_tensors(folder: Path, entry: dict[str, Any]) -> bytes:
    data = (folder / entry["file"]).read_bytes()
    if len(data) != entry["bytes"]:
        raise _DamagedError(f"{entry['file']} has {len(data)} bytes instead of {entry['bytes']}.")
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise _DamagedError(f"the content of {entry['file']} does not have the stored hash.")
    return data
