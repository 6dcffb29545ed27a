"""One HTML file in which generators run: no server, no network."""

import base64
import gzip
import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import torch

from orthocond.directions import Directions

_STATIC = files("orthocond.lab.explorer") / "static"
_LIBRARIES = {"ort": "ort.wasm.bundle.min.mjs", "gifenc": "gifenc.esm.js"}
_SCRIPTS = ("numbers.js", "runtime.js", "state.js", "pictures.js", "regions.js", "exports.js", "controls.js", "app.js")
_DIGITS = 4  # of numbers that are shown

Scores = Mapping[str, Mapping[str, float]]
"""From the name of a direction to numbers by name."""


@dataclass(frozen=True)
class Kind:
    """Directions of one kind, as the page offers them.

    Attributes:
        name: Short name, for files and addresses.
        title: Name for people.
        about: One sentence: where they come from and what their importance is.
        directions: The directions, with their measured effect if they have one.
        scores: Scores of directions by their names, ``{"z0": {"predictability": 0.9}}``; what is unknown is left out.
        factors: How far directions move known factors, ``{"z0": {"hue": 0.5}}``.
    """

    name: str
    title: str
    about: str
    directions: Directions
    scores: Scores = field(default_factory=dict)
    factors: Scores = field(default_factory=dict)


@dataclass(frozen=True)
class Exhibit:
    """One generator of a page.

    Attributes:
        name: Its name for people.
        onnx: The generator as ONNX, from latents to images.
        z_dim: Number of latents.
        latent_shape: Shape of one latent as the model takes it.
        prior: ``normal`` or ``uniform``.
        sigma: Standard deviation of one latent.
        range: Least and largest value of a pixel.
        batch: Number of latents that the model takes at a time; None for any number.
        kinds: The directions to choose from, the best first.
        warning: A sentence about what may be wrong with it, and the remedy; empty if nothing is.
    """

    name: str
    onnx: bytes
    z_dim: int
    latent_shape: tuple[int, ...]
    prior: str
    sigma: float
    range: tuple[float, float]
    batch: int | None
    kinds: tuple[Kind, ...]
    warning: str = ""


def write_page(exhibits: Sequence[Exhibit], title: str) -> str:
    """The page of some generators, side by side from the same latent.

    Args:
        exhibits: The generators.
        title: The heading of the page.

    Raises:
        ValueError: If there is no generator, or one has no directions.
    """
    if not exhibits:
        raise ValueError("A page needs at least one generator.")
    for exhibit in exhibits:
        if not exhibit.kinds:
            raise ValueError(f"{exhibit.name} needs directions of at least one kind.")
    described = [_describe(exhibit, f"model-{i}") for i, exhibit in enumerate(exhibits)]
    parts = [_embed("models-data", json.dumps(described).replace("<", "\\u003c"), "application/json")]
    parts += [_packed(f"model-{i}", gzip.compress(exhibit.onnx, mtime=0)) for i, exhibit in enumerate(exhibits)]
    parts.append(_packed("ort-wasm", _read("ort-wasm-simd-threaded.wasm.gz")))
    parts += [_packed(name, gzip.compress(_read(file), mtime=0)) for name, file in _LIBRARIES.items()]
    values = {
        "title": html.escape(title),
        "css": _read("explorer.css").decode(),
        "payload": "\n".join(parts),
        "js": "\n".join(_read(name).decode() for name in _SCRIPTS),
    }
    # In one pass, so that nothing that is put in is read for marks.
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: values[mark[1]], _read("explorer.html").decode())


def _read(name: str) -> bytes:
    return (_STATIC / name).read_bytes()


def _packed(identity: str, data: bytes) -> str:
    return _embed(identity, base64.b64encode(data).decode(), "application/gzip")


def _embed(identity: str, text: str, kind: str) -> str:
    return f'<script id="{identity}" type="{kind}">{text}</script>'


def _describe(exhibit: Exhibit, onnx: str) -> dict[str, Any]:
    return {
        "name": exhibit.name,
        "onnx": onnx,
        "z_dim": exhibit.z_dim,
        "latent_shape": exhibit.latent_shape,
        "prior": exhibit.prior,
        "sigma": exhibit.sigma,
        "range": exhibit.range,
        "batch": exhibit.batch,
        "warning": exhibit.warning,
        "kinds": [_describe_kind(kind) for kind in exhibit.kinds],
    }


def _describe_kind(kind: Kind) -> dict[str, Any]:
    """The directions by decreasing effect, where it was measured."""
    found = kind.directions
    order = list(range(len(found.names)))
    if found.effect is not None:
        order = torch.argsort(found.effect, descending=True, stable=True).tolist()
    rows = []
    for i in order:
        name = found.names[i]
        row: dict[str, Any] = {
            "name": name,
            "vector": [round(float(x), 6) for x in found.vectors[i]],
            "importance": _rounded(found.importance[i]),
            "scores": {key: _rounded(value) for key, value in kind.scores.get(name, {}).items()},
            "factors": {key: _rounded(value) for key, value in kind.factors.get(name, {}).items()},
        }
        if found.effect is not None:
            row["effect"] = _rounded(found.effect[i])
        rows.append(row)
    place = {old: new for new, old in enumerate(order)}
    ties = [sorted(place[i] for i in group) for group in found.ties]
    described = {"kind": kind.name, "title": kind.title, "about": kind.about, "directions": rows}
    return described | {"ties": ties, "tie_tol": found.tie_tol}


def _rounded(value: Any) -> float:
    return float(f"{float(value):.{_DIGITS}g}")
