"""From runs, files and functions to one page."""

import warnings
from collections.abc import Callable
from os import PathLike, fspath
from os.path import isdir
from pathlib import Path

from torch import nn

from orthocond.generators import Generator
from orthocond.lab.errors import UsageError
from orthocond.lab.explorer import shipped
from orthocond.lab.explorer.page import Exhibit, write_page
from orthocond.lab.explorer.sources import from_module, from_onnx, from_run
from orthocond.lab.factories import FactoryKindError, load_factory
from orthocond.lab.runs import Run
from orthocond.lab.runs.files import write_atomically

NAME = "explore.html"
_WEIGHTS = (".pt", ".pth", ".ckpt", ".bin", ".pkl", ".safetensors")
_NAMED = 3  # generators in a heading


def write_explorer(
    *sources: str | PathLike[str],
    out: str | PathLike[str] | None = None,
    prior: str = "normal",
    range: tuple[float, float] = (-1.0, 1.0),
    z_dim: int | None = None,
    allow_import: str | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Path:
    """Write one HTML file in which generators run, side by side.

    Args:
        sources: Folders of runs of GANs, ONNX files, or functions ``package.module:function`` that return a generator.
            None at all takes the generator that comes with the package.
        out: The file; None is ``explore.html`` in the folder if there is one run, else in the current folder.
        prior: How latents of ONNX files and functions are distributed: ``normal``, or ``uniform`` in [-1, 1].
        range: Least and largest value of a pixel of ONNX files and functions.
        z_dim: Number of latents of a function's generator, if that has no ``z_dim``.
        allow_import: Function of the networks that a run may import and call, as its configuration names it.
        tell: Called with sentences: what is being done, and what may be wrong with a generator.

    Returns:
        The file.

    Raises:
        FileNotFoundError: If there is no such file or run.
        RuntimeError: If a run has no checkpoint yet.
        TypeError: If a function needs arguments or returns no generator.
        ValueError: If a source is no generator that can be shown; the text says why.
        OSError: If the file cannot be written; one that was there stays as it was.
    """
    exhibits = []
    for source in sources or (None,):
        tell(f"Measuring the directions of {source or 'the generator that comes with the package'} …")
        exhibits.append(shipped.exhibit() if source is None else _find(source, prior, range, z_dim, allow_import))
        if exhibits[-1].warning:
            tell(exhibits[-1].warning)
    folder = Path(sources[0]) if len(sources) == 1 and Path(sources[0]).is_dir() else Path()
    file = folder / NAME if out is None else Path(out)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, write_page(exhibits, title_of(exhibits)).encode())
    return file


def is_run(source: str) -> bool:
    """Whether a source can only be a run: no file of a network or of weights, and no function."""
    path = Path(source)  # whose is_dir is an error for names too long
    return isdir(source) or not (path.suffix.lower() in (".onnx", *_WEIGHTS) or ":" in source)


def _find(
    source: str | PathLike[str], prior: str, range: tuple[float, float], z_dim: int | None, allow_import: str | None
) -> Exhibit:
    text, path = fspath(source), Path(source)
    if is_run(text):
        return from_run(Run.open(path), allow_import=allow_import)
    if path.suffix.lower() in _WEIGHTS:
        raise ValueError(
            f"{path.name} holds weights, and a page needs the network, too. Write a function that makes the network, "
            "loads the weights and returns it, and name that: orthocond explore module:function. Or export the network "
            "to ONNX."
        )
    if path.suffix.lower() == ".onnx":
        if not path.is_file():
            raise FileNotFoundError(f"There is no file {text}.")
        return from_onnx(path, prior=prior, range=range)
    try:
        made = load_factory(text)()
    except TypeError as error:
        raise FactoryKindError(
            f"{text} has to be a function without arguments that returns a generator: {error}"
        ) from error
    if isinstance(made, Generator):
        return from_module(made, text)
    if isinstance(made, nn.Module) and z_dim is None and getattr(made, "z_dim", None) is None:
        raise UsageError(f"How many latents does {text} take? Pass their number: --z-dim 100 (in Python: z_dim=100).")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a range that is too large: the page tells it, with its option
        generator = Generator(made, z_dim, prior=prior, range=range)
    return from_module(generator, text)


def title_of(exhibits: list[Exhibit]) -> str:
    """The heading of a page: the names of the generators, of which a few stand for many."""
    names = list(dict.fromkeys(exhibit.name for exhibit in exhibits))
    rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + rest
