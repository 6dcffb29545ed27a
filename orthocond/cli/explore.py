"""``orthocond explore``: a page in which generators run, to walk through their latents."""

import math
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from orthocond.cli.runs import find_run
from orthocond.cli.settings import PositiveInt
from orthocond.lab.errors import UsageError
from orthocond.lab.text import printable

if TYPE_CHECKING:
    from orthocond.lab.explorer.page import Exhibit


def explore(
    *sources: str,
    prior: Literal["normal", "uniform"] = "normal",
    range: Annotated[tuple[float, float], Parameter(allow_leading_hyphen=True)] = (-1.0, 1.0),
    z_dim: PositiveInt | None = None,
    out: Path | None = None,
    open: bool = True,
    runs: Path = Path("runs"),
    allow_import: str | None = None,
) -> None:
    """Write one HTML file in which a generator runs, and open it: sliders, strips, heat maps, regions, animations.

    The file needs no server and no network, and can be sent to anybody. Several sources stand side by side.

    Args:
        sources: Runs of GANs, by folder or number; ONNX files; or `package.module:function`, a function of yours that
            returns a generator. Nothing opens a small generator that comes with the package.
        prior: How latents of an ONNX file or of your function are distributed; `uniform` is in [-1, 1].
        range: The least and the largest value of a pixel of an ONNX file or of your function, such as `--range 0 1`.
        z_dim: Number of latents of your function's generator, if that has no `z_dim`.
        out: File to write; `explore.html` in the folder of the run, or here, if not given.
        open: Whether to open it in a browser.
        runs: Folder of the runs.
        allow_import: Function of the networks that a run may import and call, as its configuration names it.
    """
    from orthocond.lab.explorer import shipped
    from orthocond.lab.explorer.page import write_page

    if out is not None and out.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--out needs a file that ends with .html; got {out}.")
    if not -math.inf < range[0] < range[1] < math.inf:
        raise UsageError(f"--range needs two finite values, the smaller value first; got {range[0]:g} {range[1]:g}.")
    file = out or Path("explore.html")
    exhibits: list[Exhibit] = []
    for source in sources:
        print(f"Measuring the directions of {printable(source)} …", flush=True)
        exhibit, folder = _find(source, prior, range, z_dim, runs, allow_import)
        exhibits.append(exhibit)
        if out is None and folder is not None and len(sources) == 1:
            file = folder / "explore.html"
    if not sources:
        exhibits = [shipped.exhibit()]
    title = ", ".join(exhibit.name for exhibit in exhibits)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(write_page(exhibits, title), encoding="utf-8")
    print(f"Written to {printable(file)} ({file.stat().st_size / 1e6:.1f} MB). It needs no server and no network.")
    if open:
        webbrowser.open(file.resolve().as_uri())


def _find(
    source: str, prior: str, range: tuple[float, float], z_dim: int | None, runs: Path, allow_import: str | None
) -> "tuple[Exhibit, Path | None]":
    from orthocond.generators import Generator
    from orthocond.lab.explorer import sources

    if source.endswith(".onnx"):
        if not Path(source).is_file():
            raise UsageError(f"There is no file {source}.")
        return sources.from_onnx(Path(source), prior=prior, range=range), None
    if ":" in source and not Path(source).exists():
        from orthocond.lab.factories import load_factory

        try:
            made = load_factory(source)()
        except TypeError as error:
            raise UsageError(
                f"{source} has to be a function without arguments that returns a generator: {error}"
            ) from error
        generator = made if isinstance(made, Generator) else Generator(made, z_dim, prior=prior, range=range)
        return sources.from_module(generator, source), None
    from orthocond.lab.config import read_config
    from orthocond.lab.generation.networks import load_generator

    run = find_run(source, runs)
    if read_config(run.config).kind != "generation":
        raise UsageError(f"explore needs the run of a GAN; {run.path} is one of a classifier.")
    return sources.from_module(load_generator(run, allow_import=allow_import), run.path.name), run.path
