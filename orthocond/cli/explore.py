"""``orthocond explore``: a page in which generators run, to walk through their latents."""

import math
import webbrowser
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from orthocond.cli.runs import find_run
from orthocond.cli.settings import PositiveInt
from orthocond.lab.errors import UsageError
from orthocond.lab.text import printable


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

    The file needs no server and no network, and can be sent to anyone. Several sources are shown side by side.

    Args:
        sources: Runs of GANs, by folder or number; ONNX files; or `package.module:function`, a function of yours that
            returns a generator. Without a source, a small generator that comes with the package is shown.
        prior: How latents of an ONNX file or of your function are distributed; `uniform` is in [-1, 1].
        range: The smallest and the largest pixel value of an ONNX file or of your function, such as `--range 0 1`.
        z_dim: Number of latents of your function's generator, if that has no `z_dim`.
        out: File to write; by default `explore.html` in the folder of the run, or in the current folder.
        open: Whether to open it in a browser.
        runs: Folder of the runs.
        allow_import: Function of the networks that a run may import and call, as its configuration names it.
    """
    from orthocond.lab.explorer.write import is_run, write_explorer

    if out is not None and out.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--out needs a file that ends with .html; got {out}.")
    if not -math.inf < range[0] < range[1] < math.inf:
        raise UsageError(f"--range needs two finite values, the smaller value first; got {range[0]:g} {range[1]:g}.")
    found = [find_run(source, runs).path if is_run(source) else source for source in sources]
    file = write_explorer(*found, out=out, prior=prior, range=range, z_dim=z_dim, allow_import=allow_import, tell=_tell)
    print(f"Written to {printable(file)} ({file.stat().st_size / 1e6:.1f} MB). It needs no server and no network.")
    if open:
        webbrowser.open(file.resolve().as_uri())


def _tell(text: str) -> None:
    print(printable(text), flush=True)
