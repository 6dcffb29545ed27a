"""Run folders: configuration, metrics, checkpoints, and training that goes on after it was stopped at any moment."""

from typing import TYPE_CHECKING

from orthocond._lazy import lazy

if TYPE_CHECKING:
    from orthocond.lab.runs.capture import capture_rng, restore_rng
    from orthocond.lab.runs.checkpoint import Checkpoint
    from orthocond.lab.runs.folder import Run
    from orthocond.lab.runs.guard import Guard
    from orthocond.lab.runs.packing import pack, unpack
    from orthocond.lab.runs.status import State, Status

__getattr__ = lazy(
    __name__,
    {
        "capture": ("capture_rng", "restore_rng"),
        "checkpoint": ("Checkpoint",),
        "folder": ("Run",),
        "guard": ("Guard",),
        "packing": ("pack", "unpack"),
        "status": ("State", "Status"),
    },
)

__all__ = [
    "Run",
    "Checkpoint",
    "Guard",
    "State",
    "Status",
    "capture_rng",
    "restore_rng",
    "pack",
    "unpack",
]
