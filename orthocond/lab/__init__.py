"""The lab: configurations, data, training, runs and tables on top of the library, which never imports it."""

from orthocond.lab.classification.config import Classification
from orthocond.lab.generation.config import Generation

__all__ = ["Classification", "Generation"]
