"""A page in which generators run: one HTML file, no server."""

from orthocond.lab.explorer.write import write_explorer

__all__ = ["write_explorer"]
