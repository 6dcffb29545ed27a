"""The lab: configurations, data, training, runs and tables on top of the library, which never imports it."""

from typing import TYPE_CHECKING

from orthocond._lazy import lazy

if TYPE_CHECKING:
    from orthocond.lab.classification.config import Classification
    from orthocond.lab.generation.config import Generation

__all__ = ["Classification", "Generation"]

__getattr__ = lazy(__name__, {"classification.config": ("Classification",), "generation.config": ("Generation",)})
