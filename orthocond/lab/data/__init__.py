"""Images by name or path, one record for all sources, and batches that no model has to wait for."""

from typing import TYPE_CHECKING

from orthocond._lazy import lazy

if TYPE_CHECKING:
    from orthocond.lab.data.encoded import BrokenImageError
    from orthocond.lab.data.images import ImageData, Statistics
    from orthocond.lab.data.known import KNOWN, KnownSet, data_root, get, names
    from orthocond.lab.data.loading import Pair, load, load_pair
    from orthocond.lab.data.options import MissingSplitError
    from orthocond.lab.data.pipeline import Batch, Pipeline
    from orthocond.lab.data.rendering import FACTORS, SHAPES, SpriteFactors, Sprites, read_factors, render, sprites

__getattr__ = lazy(
    __name__,
    {
        "encoded": ("BrokenImageError",),
        "images": ("ImageData", "Statistics"),
        "known": ("KNOWN", "KnownSet", "data_root", "get", "names"),
        "loading": ("Pair", "load", "load_pair"),
        "options": ("MissingSplitError",),
        "pipeline": ("Batch", "Pipeline"),
        "rendering": ("FACTORS", "SHAPES", "SpriteFactors", "Sprites", "read_factors", "render", "sprites"),
    },
)

__all__ = [
    "load",
    "load_pair",
    "names",
    "get",
    "data_root",
    "KNOWN",
    "KnownSet",
    "ImageData",
    "Pair",
    "Statistics",
    "BrokenImageError",
    "MissingSplitError",
    "Batch",
    "Pipeline",
    "FACTORS",
    "SHAPES",
    "SpriteFactors",
    "Sprites",
    "read_factors",
    "render",
    "sprites",
]
