"""Networks by name or from a user's factory, with the SVD layer and the layer before it."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from orthocond.lab.classification.config import Method, Model
from orthocond.lab.classification.networks.convnet import ConvNet
from orthocond.lab.classification.networks.densenet import DenseNet121
from orthocond.lab.classification.networks.mobilenet import STAGES, MobileNetV2
from orthocond.lab.classification.networks.resnet import ResNet, resnet18, resnet50
from orthocond.lab.factories import FactoryError, FactoryKindError, call_factory, is_factory
from orthocond.lab.text import nearest
from orthocond.layers import CovariancePool2d, DecorrelatedBatchNorm2d, SVDLayer, convert_batchnorm
from orthocond.matrix import SVD, Eigh, NewtonSchulz, Pade, Solver, Taylor
from orthocond.monitor import pre_svd_layer

_GRADIENTS = ("plain", "truncated", "top", "taylor", "pade")
_SOLVERS: dict[str, Solver] = {
    "eigh": Eigh(),
    "ns": NewtonSchulz(),
    "ns7": NewtonSchulz(steps=7),
    "ns20": NewtonSchulz(steps=20),
    "pade": Pade(),
    "taylor": Taylor(),
    **{f"svd-{gradient}": SVD(gradient=gradient) for gradient in _GRADIENTS},
    **{f"released-{gradient}": SVD(gradient=gradient, ties="released") for gradient in _GRADIENTS},
}


class Network(NamedTuple):
    """A network and the names of its two layers of interest; None where there is none."""

    module: nn.Module
    svd_layer: str | None
    pre_svd: str | None


def build(model: Model, method: Method, classes: int, batch: Tensor) -> Network:
    """Make the network of a configuration, without treatments yet.

    Args:
        model: Which network.
        method: Which method: without SVD layer for ``bn``, with its solver otherwise.
        classes: Number of classes.
        batch: Some images, to find the Pre-SVD layer of a network that we do not know.

    Raises:
        ValueError: If there is no such network or layer.
        TypeError: If a factory does not return a module.
    """
    network = _build(model, method, classes, batch)
    if model.whiten_all is not None and network.svd_layer is not None:
        _whiten_all(network.module, model, method)
    for layer in network.module.modules():
        if isinstance(layer, (nn.BatchNorm2d, DecorrelatedBatchNorm2d)):
            layer.momentum = model.momentum
    return network


def _whiten_all(module: nn.Module, model: Model, method: Method) -> None:
    """Let every batch normalization decorrelate, in groups of at most ``whiten_all`` channels."""
    for name, layer in list(module.named_modules()):
        if isinstance(layer, nn.BatchNorm2d):
            channels = layer.num_features
            size = max(d for d in range(1, channels + 1) if channels % d == 0 and d <= (model.whiten_all or 1))
            groups = channels // size
            whitening = DecorrelatedBatchNorm2d(channels, eps=model.eps, groups=groups, solver=solver(method))
            module.set_submodule(name, whitening)


def _build(model: Model, method: Method, classes: int, batch: Tensor) -> Network:
    plain = "bn" in method.parts
    if is_factory(model.name):
        return _of_user(model, method, classes, batch, plain)
    if model.application == "gcp":
        pool = None if plain else CovariancePool2d(solver=solver(method))
        return Network(_resnet(model, classes, nn.BatchNorm2d, pool), *((None, None) if plain else _PLACES["gcp"]))
    norm: Callable[[int], nn.Module] = nn.BatchNorm2d
    if not plain:
        norm = functools.partial(DecorrelatedBatchNorm2d, eps=model.eps, solver=solver(method))
    svd_layer, pre_svd = _PLACES[model.name.rstrip("0123456789")]
    return Network(_backbone(model, classes, norm), None if plain else svd_layer, pre_svd)


def solver(method: Method) -> Solver:
    """How the SVD layer computes its roots."""
    return _SOLVERS["ns" if "ns" in method.parts and not method.solver.startswith("ns") else method.solver]


# The SVD layer and the layer before it.
_PLACES = {
    "gcp": ("avgpool", "reduce.0"),
    "resnet": ("bn1", "conv1"),
    "densenet": ("features.norm0", "features.conv0"),
    "mobilenetv": ("features.0.1", "features.0.0"),
    "convnet": ("bn1", "conv1"),
}


def _backbone(model: Model, classes: int, norm: Callable[[int], nn.Module]) -> nn.Module:
    if model.name == "densenet121":
        sizes = {"depths": model.depths} if model.depths else {}
        return DenseNet121(classes, stem=model.stem, stem_norm=norm, growth=model.width or 32, **sizes)
    if model.name == "mobilenetv2":
        depths = model.depths or tuple(depth for _, _, depth, _ in STAGES)
        stages = tuple((e, c, depth, s) for depth, (e, c, _, s) in zip(depths, STAGES, strict=False))
        return MobileNetV2(classes, stem=model.stem, stem_norm=norm, stages=stages, features=model.width or 1280)
    if model.name == "convnet":
        return ConvNet(classes, stem_norm=norm, width=model.width or 48, depths=model.depths or (1, 2, 2))
    return _resnet(model, classes, norm, None)


def _resnet(model: Model, classes: int, norm: Callable[[int], nn.Module], pool: CovariancePool2d | None) -> ResNet:
    make = resnet50 if model.name == "resnet50" else resnet18
    sizes: dict[str, Any] = {"depths": model.depths} if model.depths else {}
    return make(
        classes,
        stem=model.stem,
        stem_norm=norm,
        pool=pool,
        reduction=model.reduction,
        last_stride=model.last_stride,
        width=model.width or 64,
        **sizes,
    )


def _of_user(model: Model, method: Method, classes: int, batch: Tensor, plain: bool) -> Network:
    module = call_factory(model.name, classes, "the number of classes")
    if not isinstance(module, nn.Module):
        raise FactoryKindError(f"{model.name} has to return a torch.nn.Module; it returned {type(module).__name__}.")
    layers = dict(module.named_modules())
    name = model.meta_layer
    if name is None:
        found = [n for n, layer in layers.items() if isinstance(layer, SVDLayer)]
        if len(found) != 1 or plain:
            norms = [n for n, layer in layers.items() if isinstance(layer, nn.BatchNorm2d)]
            raise FactoryError(
                f"{model.name} has {len(found)} SVD layers{'' if not found else ': ' + ', '.join(found)}. Name the one "
                "to treat, or the batch normalization to replace, by --model.meta-layer. Its batch normalizations: "
                f"{', '.join(map(repr, norms)) or 'none'}."
            )
        name = found[0]
    if name not in layers:
        raise FactoryError(f"{model.name} has no layer {name!r}.{nearest(name, layers)}")
    if isinstance(layers[name], SVDLayer) and plain:
        raise FactoryError(f"The method bn needs a network with a batch normalization; {name} is an SVD layer.")
    if isinstance(layers[name], SVDLayer):
        layers[name].solver = solver(method)
    elif not plain:
        convert_batchnorm(module, [name], solver=solver(method))
    pre_svd = model.pre_svd or pre_svd_layer(module, name, batch).name
    if pre_svd not in layers:
        raise FactoryError(f"{model.name} has no layer {pre_svd!r}.{nearest(pre_svd, layers)}")
    return Network(module, None if plain else name, pre_svd)
