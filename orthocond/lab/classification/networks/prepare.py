"""The network of a configuration with its weight treated, before any training, or as a run has trained it."""

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from orthocond.lab.classification.config import Classification
from orthocond.lab.classification.data import load_data, pipeline
from orthocond.lab.classification.networks.build import Network, build
from orthocond.lab.config import from_json
from orthocond.lab.data import Pair, Pipeline
from orthocond.lab.factories import check_import
from orthocond.lab.methods import treat_weights
from orthocond.lab.runs import Run
from orthocond.layers import DecorrelatedBatchNorm1d, DecorrelatedBatchNorm2d, DecorrelatedBatchNorm3d
from orthocond.weights import SkewOrthogonalConv2d

_INPUT_BATCHES = 8  # from which treatments that know the input of their layer learn its covariance


def prepare(config: Classification, pair: Pair) -> Network:
    """The network of a configuration with its weight treated, before any training.

    Raises:
        TypeError: If the treatment does not fit the layer.
        ValueError: If there is no such network or layer.
    """
    torch.manual_seed(config.seed)
    batches = pipeline(config, pair.train, train=True)
    first = next(iter(batches.batches()))
    network = build(config.model, config.method, len(pair.train.classes), first.images[:4])
    if network.pre_svd is None:
        return network
    layer = network.module.get_submodule(network.pre_svd)
    if "ow" in config.method.parts and config.method.ow == "skewconv":
        network.module.set_submodule(network.pre_svd, _skew(layer))
    else:
        treat_weights(config.method, [layer], _inputs_of(network, batches))
    if config.model.follow and network.svd_layer is not None:
        whitening = network.module.get_submodule(network.svd_layer)
        if not isinstance(whitening, (DecorrelatedBatchNorm1d, DecorrelatedBatchNorm2d, DecorrelatedBatchNorm3d)):
            raise ValueError(f"model.follow needs decorrelated batch normalization; the SVD layer is {whitening}.")
        whitening.follow(network.module.get_submodule(network.pre_svd))
    return network


def _inputs_of(network: Network, batches: Pipeline) -> Callable[[nn.Module], Iterator[Tensor]]:
    """What the Pre-SVD layer gets, from a copy of the network in training mode."""

    @torch.no_grad()
    def inputs(layer: nn.Module) -> Iterator[Tensor]:
        model = copy.deepcopy(network.module).train()
        seen: list[Tensor] = []
        model.get_submodule(network.pre_svd or "").register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        for images, _ in itertools.islice(batches.batches(), _INPUT_BATCHES):
            model(images)
            yield seen.pop()

    return inputs


def _skew(layer: nn.Module) -> SkewOrthogonalConv2d:
    if not isinstance(layer, nn.Conv2d) or layer.kernel_size[0] != layer.kernel_size[1] or layer.groups != 1:
        raise TypeError(f"--ow skewconv needs a square Conv2d without groups as Pre-SVD layer; got {layer}.")
    return SkewOrthogonalConv2d(
        layer.in_channels, layer.out_channels, layer.kernel_size[0], stride=layer.stride[0], bias=layer.bias is not None
    )


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


def load_model(run: Run, *, root: str | None = None, allow_import: str | None = None) -> Restored:
    """Make the classifier of a run again, with the weights of its newest good checkpoint.

    Args:
        run: The run.
        root: Folder of data sets.
        allow_import: The function of a user's network that may be imported and called, as the run names it.

    Raises:
        NotAllowedError: If the run names another function.
        RuntimeError: If it has no checkpoint yet.
        ValueError: If it is not the run of a classifier.
    """
    if run.config.get("kind", "classification") != "classification":
        raise ValueError(f"{run.path} is a run of kind {run.config['kind']!r}; a classifier is needed.")
    config = from_json(Classification, run.config)
    check_import(config.model.name, allow_import, run.path)
    found = run.load()
    if found is None:
        raise RuntimeError(f"{run.path} has no checkpoint yet; train it: orthocond train --resume {run.path}")
    pair = load_data(config.data, root)
    network = prepare(config, pair)
    network.module.load_state_dict(found.state["model"])
    return Restored(config, network, pair, found.step)
