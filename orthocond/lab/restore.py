"""The trained model of a run."""

from typing import NamedTuple

from torch import nn

from orthocond.lab.classification.config import Classification
from orthocond.lab.classification.networks.build import Network
from orthocond.lab.classification.task import load_data, prepare
from orthocond.lab.data import Pair
from orthocond.lab.experiments import read_config
from orthocond.lab.runs import Run


class Restored(NamedTuple):
    """A trained network with what it was trained by.

    Attributes:
        config: The configuration.
        network: The network, with its weights at the checkpoint.
        pair: Training and held-out images.
        step: The step of the checkpoint.
    """

    config: Classification
    network: Network
    pair: Pair
    step: int

    @property
    def model(self) -> nn.Module:
        """The network's module."""
        return self.network.module


def load_model(run: Run, *, root: str | None = None) -> Restored:
    """Make the classifier of a run again, with the weights of its newest good checkpoint.

    Args:
        run: The run.
        root: Folder of data sets.

    Raises:
        RuntimeError: If it has no checkpoint yet.
        ValueError: If it is not the run of a classifier.
    """
    config = read_config(run.config)
    if not isinstance(config, Classification):
        raise ValueError(f"{run.path} is a run of kind {run.config.get('kind')!r}; a classifier is needed.")
    found = run.load()
    if found is None:
        raise RuntimeError(f"{run.path} has no checkpoint yet; train it: orthocond train --resume {run.path}")
    pair = load_data(config.data, root)
    network = prepare(config, pair)
    network.module.load_state_dict(found.state["model"])
    return Restored(config, network, pair, found.step)
