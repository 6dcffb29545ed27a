"""Generators to explore: from a run, an ONNX file, a function of the user's, or the one that ships with the package."""

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from orthocond.directions import (
    Directions,
    axes,
    eigengan_directions,
    jacobian_directions,
    joint_directions,
    sefa,
)
from orthocond.gans import EigenGenerator, SimpleGenerator
from orthocond.generators import Generator
from orthocond.lab.explorer.page import Exhibit, Kind

_SAMPLES = 32  # latents from which directions and their effects are measured
_SHOWN = 24  # directions of a kind at most: a page of sliders that a person can look through


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
    generator = Generator(module, size, prior=prior, range=range, latent_shape=tuple(module.shape))
    kinds = tuple(kinds_of(generator, derivative="difference"))
    return Exhibit(path.stem, content, size, tuple(module.shape), prior, generator.sigma, range, module.batch, kinds)


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


def from_module(generator: nn.Module, name: str) -> Exhibit:
    """A generator that is a module; it is exported to ONNX.

    Args:
        generator: A `Generator`, or a module with ``z_dim`` and images in [-1, 1] as the networks of `orthocond.gans`.
        name: Its name on the page.

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
    kinds = tuple(kinds_of(wrapped))
    return Exhibit(name, onnx, wrapped.z_dim, (wrapped.z_dim,), wrapped.prior, wrapped.sigma, (-1.0, 1.0), batch, kinds)


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


def kinds_of(generator: Generator, derivative: str = "auto") -> Iterator[Kind]:
    """The kinds of directions that a generator has, each with measured effects."""

    def measured(found: Directions) -> Directions:
        found = found.measure(generator, _SAMPLES)
        assert found.effect is not None
        if len(found) <= _SHOWN:
            return found
        return found[found.effect.argsort(descending=True)[:_SHOWN].tolist()]

    module = generator.module
    if isinstance(module, EigenGenerator):
        about = "EigenGAN's own directions, layer by layer. Importance is the factor that training gave to a direction."
        yield Kind("layers", "EigenGAN's layers", about, measured(eigengan_directions(module)))
    k = min(_SHOWN, generator.z_dim)
    about = "Those that change pictures most independently of each other. Importance as of the Jacobian directions."
    joint = joint_directions(generator, 2 * _SAMPLES, k=k, starts=1, derivative=derivative)
    yield Kind("joint", "joint", about, measured(joint))
    found = jacobian_directions(generator, _SAMPLES, k=k, derivative=derivative)
    about = "Those in which pictures move most. Importance is the mean squared change of a pixel."
    yield Kind("jacobian", "Jacobian", about, measured(found))
    if isinstance(module, SimpleGenerator):
        about = "SeFa: singular vectors of the first projection. Importance is the squared singular value."
        yield Kind("sefa", "SeFa", about, measured(sefa(module.first_projection, normalize=False, k=k)))
    about = "One latent each. What an axis means depends on the training; an orthogonal weight alone chooses no axes."
    yield Kind("axes", "axes of the latent space", about, measured(axes(generator.z_dim)))
