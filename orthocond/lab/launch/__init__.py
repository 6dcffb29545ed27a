"""Many trainings, each a process or job of its own, on this machine or a cluster; the same code watches both."""

from typing import TYPE_CHECKING

from orthocond._lazy import lazy

if TYPE_CHECKING:
    from orthocond.lab.launch.cluster import Cluster
    from orthocond.lab.launch.executor import Ending, Executor
    from orthocond.lab.launch.launching import launch
    from orthocond.lab.launch.local import Local
    from orthocond.lab.launch.slurm import Slurm

__getattr__ = lazy(
    __name__,
    {
        "cluster": ("Cluster",),
        "executor": ("Ending", "Executor"),
        "launching": ("launch",),
        "local": ("Local",),
        "slurm": ("Slurm",),
    },
)

__all__ = ["launch", "Ending", "Executor", "Local", "Slurm", "Cluster"]
