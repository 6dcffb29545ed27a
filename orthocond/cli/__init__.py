"""The command `orthocond`: train, compare, evaluate, explore."""

from orthocond.cli.entry import main

__all__ = ["main"]
