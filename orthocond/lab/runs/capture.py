"""What else a run has to remember: random number generators."""

import random
import warnings
from typing import Any

import numpy as np
import torch

from orthocond.lab.runs import ranks
from orthocond.lab.runs.packing import from_bytes, to_bytes


def capture_rng() -> dict[str, Any]:
    """The state of all global random number generators: Python's, NumPy's, torch's, and that of the current GPU.

    Under torch.distributed the states of all ranks, which all have to call this. A generator of your own belongs into
    the checkpoint by its own state (``generator.get_state()``, ``numpy_generator.bit_generator.state``).

    Returns:
        Plain data for `Run.save`.

    Example:
        >>> saved = capture_rng()
        >>> first = torch.rand(3)
        >>> restore_rng(saved)
        >>> torch.equal(torch.rand(3), first)
        True
    """
    own = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002  # the global one is what libraries draw from
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }
    return {"ranks": [from_bytes(message) for message in ranks.gather(to_bytes(own))]}


def restore_rng(state: dict[str, Any]) -> None:
    """Set all global random number generators as `capture_rng` found them.

    Args:
        state: What `capture_rng` returned.

    Raises:
        RuntimeError: If the number of processes has changed, as their random numbers cannot continue then.
    """
    states = state["ranks"]
    if len(states) != ranks.world_size():
        raise RuntimeError(
            f"The random numbers of {len(states)} processes cannot continue on {ranks.world_size()}; resume with "
            f"{len(states)} (torchrun --nproc-per-node), or leave restore_rng out and accept another course."
        )
    own = states[ranks.rank()]
    random.setstate(own["python"])
    np.random.set_state(own["numpy"])  # noqa: NPY002
    torch.set_rng_state(own["torch"])
    if own["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(own["cuda"])
    elif own["cuda"] is not None or torch.cuda.is_initialized():
        warnings.warn(
            "The checkpoint was written on another kind of device (GPU or CPU), so random numbers drawn on the GPU do "
            "not continue: the run goes on, but not as it would have.",
            RuntimeWarning,
            stacklevel=2,
        )
