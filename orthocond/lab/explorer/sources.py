"""Generators to explore: from a run, an ONNX file, a function of the user's, or the one that ships with the package."""

import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from orthocond.directions import Directions, axes, eigengan_directions, jacobian_directions, joint_directions, sefa
from orthocond.gans import EigenGenerator, SimpleGenerator
from orthocond.generators import Generator, all_images
from orthocond.lab.config import from_json
from orthocond.lab.explorer.page import Exhibit, Kind
from orthocond.lab.explorer.scores import changed_factors, scores_of
from orthocond.lab.generation.config import Generation
from orthocond.lab.generation.networks import load_generator
from orthocond.lab.presets import has_generator
from orthocond.lab.runs import Run

_SAMPLES = 32  # latents from which effects are measured
_SHOWN = 24  # directions of a kind at most: a page of sliders that a person can look through
_END = 3  # sigma, where a slider ends
_CHANNELS = (1, 3)  # of pictures that a page can draw as they are
_GRAY = 2 / 255  # a gray level, of pixels from -1 to 1
_HARDLY_MORE = 1.1  # times the entanglement of the joint directions: then the axes are as good


class _OnnxFile(nn.Module):
    """An ONNX model as a callable from latents to images."""

    def __init__(self, content: bytes, name: str) -> None:
        super().__init__()
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # errors are raised; it would print them too
        try:
            session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # of ONNX Runtime, which has classes of its own for every kind of damage
            reason = str(error).splitlines()[0]
            raise ValueError(f"{name} is not an ONNX model that ONNX Runtime can read ({reason}).") from error
        inputs, outputs = session.get_inputs(), session.get_outputs()
        if len(inputs) != 1 or inputs[0].type != "tensor(float)":
            described = ", ".join(f"{i.name}: {i.type} {i.shape}" for i in inputs)
            raise ValueError(f"{name} needs one input, latents in float32; it has {described or 'none'}.")
        if not inputs[0].shape:
            raise ValueError(f"{name} needs latents (n, …) as its input; it takes a single number.")
        self.name, self.session, self.input, self.output = name, session, inputs[0].name, outputs[0].name
        first, *self.shape = inputs[0].shape
        if not all(isinstance(n, int) for n in self.shape):
            raise ValueError(f"{name} needs a fixed number of latents; the shape of its input is {inputs[0].shape}.")
        self.batch = first if isinstance(first, int) else None

    def forward(self, z: Tensor) -> Tensor:
        """Images of latents ``(n, …)``, in parts of the size that the model takes."""
        size = self.batch or len(z)
        made = []
        for part in z.split(size):
            padded = torch.cat([part, part[-1:].expand(size - len(part), *part.shape[1:])])
            try:
                images = self.session.run([self.output], {self.input: padded.float().numpy()})[0]
            except Exception as error:  # of ONNX Runtime, as above
                reason = str(error).splitlines()[0]
                raise ValueError(f"{self.name} fails for latents {tuple(padded.shape)} ({reason}).") from error
            made.append(torch.from_numpy(images)[: len(part)])
        return torch.cat(made).to(z.dtype)


def from_onnx(path: Path, *, prior: str = "normal", range: tuple[float, float] = (-1.0, 1.0)) -> Exhibit:
    """A generator from an ONNX file, with latents as its only input.

    Args:
        path: The file.
        prior: ``normal`` or ``uniform`` in [-1, 1].
        range: Least and largest value of a pixel.

    Raises:
        FileNotFoundError: If there is no such file.
        ModuleNotFoundError: If ONNX Runtime is not installed.
        ValueError: If it is not a generator of images in that range.
    """
    content = _read_onnx(path)
    module = _OnnxFile(content, path.name)
    size = int(torch.tensor(module.shape).prod())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a range that is too large: the page tells it, with its option
        generator = Generator(module, size, prior=prior, range=range, latent_shape=tuple(module.shape))
    kinds = kinds_of(generator, derivative="difference")
    shape, warning = tuple(module.shape), _doubt(generator, path.name, kinds)
    return Exhibit(path.stem, content, size, shape, prior, generator.sigma, range, module.batch, kinds, warning)


def _doubt(generator: Generator, name: str, kinds: Sequence[Kind]) -> str:
    """What may be wrong with a generator, in sentences; nothing if nothing was noticed."""
    doubts = [_doubt_of_channels(generator, name), _doubt_of_range(generator, name)]
    return " ".join(filter(None, [*doubts, _doubt_of_training(generator, name, kinds)]))


def _doubt_of_channels(generator: Generator, name: str) -> str:
    """A sentence if pictures are neither gray nor of three colors, as those with their channels last."""
    channels, _, width = all_images(generator, generator.sample(1), 1, name).shape[1:]
    if channels in _CHANNELS:
        return ""
    last = " If its channels come last, put them first: (n, C, H, W)." if width in _CHANNELS else ""
    return (
        f"The pictures of {name} have {channels} channels, and a page draws 1 or 3: effects count all of them, what is "
        f"seen is the first {min(channels, max(_CHANNELS))}.{last}"
    )


def _doubt_of_training(generator: Generator, name: str, kinds: Sequence[Kind]) -> str:
    """A sentence if the network is as it was made, or its pictures do not depend on the latents.

    Many untrained networks are not noticed: their pictures change, and nothing tells for sure that it means nothing.
    """
    norms = [m for m in generator.modules() if isinstance(m, _BatchNorm)]
    means = [norm.running_mean for norm in norms if norm.running_mean is not None]
    effects = [float(k.directions.effect.max()) for k in kinds if k.directions.effect is not None]
    if means and not any(bool(mean.any()) for mean in means):
        reason = "the running statistics of its batch normalization are those of a new network"
    elif effects and _END * max(effects) < _GRAY:
        reason = f"no direction changes its pictures by a gray level within {_END} σ"
    else:
        return ""
    return f"{name} seems to be untrained: {reason}. Its directions then mean little. Were its weights loaded?"


def _doubt_of_range(generator: Generator, name: str) -> str:
    """A sentence if pictures keep to the upper half of a range of [-1, 1], as those of a sigmoid do."""
    if generator.range != (-1.0, 1.0):
        return ""
    images = all_images(generator, generator.sample(_SAMPLES), _SAMPLES, name)
    if float(images.min()) < 0:
        return ""
    return (
        f"The pixels of {name} count as going from -1 to 1, but none of {_SAMPLES} pictures has one below 0. If it "
        "ends in a sigmoid, its pictures look too bright here: make the page again with --range 0 1."
    )


def _read_onnx(path: Path) -> bytes:
    """The model in one piece, also if its weights are in a file beside it, as torch writes them."""
    import onnx

    try:
        content: bytes = onnx.load(path).SerializeToString()
    except FileNotFoundError:
        raise
    except Exception as error:  # of protobuf, which has classes of its own for every kind of damage
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{path.name} is not an ONNX model, or the file of its weights is missing ({reason})."
        ) from error
    return content


def from_module(generator: nn.Module, name: str, *, sprites: bool = False, run: Run | None = None) -> Exhibit:
    """A generator that is a module; it is exported to ONNX.

    Args:
        generator: A `Generator`, or a module with ``z_dim`` and images in [-1, 1] as the networks of `orthocond.gans`.
        name: Its name on the page.
        sprites: Whether it draws sprites, so that the factors that a direction changes can be measured.
        run: The run that it comes from, whose evaluation may have scores of single directions.

    Raises:
        TypeError: If it has no ``z_dim``.
        ValueError: If it makes no images, has a prior of its own, or cannot be exported.
    """
    if isinstance(generator, EigenGenerator):
        noise = torch.randn(generator.noise_dim, generator=torch.Generator().manual_seed(0))
        wrapped = Generator(generator, noise=noise)
    else:
        wrapped = generator if isinstance(generator, Generator) else Generator(generator)
    if not isinstance(wrapped.prior, str):
        raise ValueError(f"{name}: the page draws latents itself, normal or uniform ones; this prior is a function.")
    onnx, batch = to_onnx(wrapped, name)
    kinds = tuple(
        replace(
            kind,
            scores={} if run is None else scores_of(run, kind.name, kind.directions),
            factors=changed_factors(wrapped, kind.directions) if sprites else {},
        )
        for kind in kinds_of(wrapped)
    )
    shape, warning = (wrapped.z_dim,), _doubt(wrapped, name, kinds)
    return Exhibit(name, onnx, wrapped.z_dim, shape, wrapped.prior, wrapped.sigma, (-1.0, 1.0), batch, kinds, warning)


def from_run(run: Run, *, allow_import: str | None = None) -> Exhibit:
    """The averaged generator of a run, with what its evaluation says about single directions.

    Args:
        run: The run of a GAN, with a checkpoint.
        allow_import: Function of the networks that the run may import and call, as its configuration names it.

    Raises:
        NotAllowedError: If the run names another function.
        RuntimeError: If the run has no checkpoint yet.
        ValueError: If it is the run of a classifier, its evaluation is damaged, or as `from_module`.
    """
    if not has_generator(run.config):
        raise ValueError(f"explore needs the run of a GAN; {run.path} is the run of a classifier.")
    config = from_json(Generation, run.config)
    generator = load_generator(run, allow_import=allow_import)
    number = run.path.name.partition("-")[0]
    name = ", ".join(filter(None, [config.preset, config.method.name, f"seed {config.seed}"]))
    title = f"{name} (run {int(number)})" if number.isdecimal() else f"{name} ({run.path.name})"
    return from_module(generator, title, sprites=config.data.source == "sprites", run=run)


def to_onnx(generator: Generator, name: str) -> tuple[bytes, int | None]:
    """A generator as ONNX from latents ``(n, z_dim)`` to images in [-1, 1].

    Returns:
        The model, and the number n that it takes; None if any will do, as it does unless the generator's code fixes it.

    Raises:
        ValueError: If torch cannot export it.
    """
    modes = [(module, module.training) for module in generator.modules()]
    generator.eval()
    logger = logging.getLogger("torch.onnx")  # it warns of packages that are not needed here
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the exporter about itself
            program = torch.onnx.export(
                generator,
                (generator.sample(2).float(),),
                dynamo=True,
                dynamic_shapes=({0: torch.export.Dim("latents", min=1)},),
                input_names=["z"],
                output_names=["images"],
                verbose=False,
            )
        assert program is not None
        model = program.model_proto
        size = model.graph.input[0].type.tensor_type.shape.dim[0]
    except ModuleNotFoundError:
        raise
    except Exception as error:  # of the exporter, which raises what it meets
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{name} cannot be exported to ONNX ({reason}). Export it yourself and explore the file: "
            "orthocond explore generator.onnx"
        ) from error
    finally:
        logger.setLevel(level)
        for module, training in modes:
            module.training = training
    return model.SerializeToString(), size.dim_value or None


def kinds_of(generator: Generator, derivative: str = "auto") -> tuple[Kind, ...]:
    """The kinds of directions that a generator has, each with measured effects, the best first.

    These are the joint directions, unless the latents as they are entangle hardly more than those.
    """

    def measured(found: Directions) -> Directions:
        found = found.measure(generator, _SAMPLES)
        assert found.effect is not None
        if len(found) <= _SHOWN:
            return found
        return found[found.effect.argsort(descending=True)[:_SHOWN].tolist()]

    module, k = generator.module, min(_SHOWN, generator.z_dim)
    joint = joint_directions(generator, k=k, derivative=derivative)
    kinds = [Kind("joint", "joint", _about_joint(joint.energies), measured(joint))]
    about = "The directions in which pictures move most. Importance is the mean squared change of a pixel for one σ."
    found = jacobian_directions(generator, k=k, derivative=derivative)
    kinds.append(Kind("jacobian", "Jacobian", about, measured(found)))
    if isinstance(module, SimpleGenerator):
        about = "The singular vectors of the first projection. Importance is the squared singular value."
        kinds.append(Kind("sefa", "SeFa", about, measured(sefa(module.first_projection, normalize=False, k=k))))
    about = (
        "One latent each; all count as equally important. What an axis means depends on the training: an orthogonal "
        "weight alone chooses no axes."
    )
    own = [Kind("axes", "axes", about, measured(axes(generator.z_dim)))]
    if isinstance(module, EigenGenerator):
        about = "The directions that training gave to each layer. Importance is the factor that it gave to a direction."
        own.insert(0, Kind("layers", "EigenGAN's layers", about, measured(eigengan_directions(module))))
    plain = joint.energies.get("axes", math.inf)
    as_good = plain <= _HARDLY_MORE * joint.energies["joint"]
    return (*own, *kinds) if as_good else (*kinds, *own)


def _about_joint(energies: Mapping[str, float]) -> str:
    """What joint directions are, and how much better than others, where that was measured."""
    names = {"mean": "the Jacobian's", "axes": "the axes"}
    others = " and ".join(f"{energies[key]:.2f} of {name}" for key, name in names.items() if key in energies)
    return (
        "The directions that change pictures most independently of each other. Their entanglement, from 0 to 1, is "
        f"{energies['joint']:.2f}, against {others}. Importance is the mean squared change of a pixel for one σ."
    )
