"""Makes the pictures of the documentation anew: those that tutorials show, by the code of the tutorials themselves.

    python docs/make_figures.py [NAME ...]       all of them, or those of these pages and parts

Tutorials write kappa.png, axes.png, joint.png where they stand; `style`, `traversal` and `spectra` are drawn here,
`report` and `explorer` photographed in Chromium.
"""

import base64
import contextlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).parent.resolve()
FIGURES = DOCS / "figures"
sys.path.insert(0, str(DOCS / "_ext"))
import doctests  # noqa: E402


def of_tutorial(page: Path) -> None:
    """Run the code of a page and take the pictures that it shows."""
    text = page.read_text()
    shown = set(re.findall(r"\.\./figures/([\w-]+\.\w+)", text))
    if not shown:
        return
    code = [part for part in doctests.snippets(text) if not re.match(r"# \w+\.py", part)]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        exec(compile("\n".join(code), page.name, "exec"), {"__name__": page.stem})
        for name in sorted(shown):
            shutil.copy(name, FIGURES / name)


def shrink(picture: Path, colors: int = 192) -> None:
    from PIL import Image

    with Image.open(picture) as found:
        found.convert("RGB").quantize(colors).save(picture, optimize=True)


def style() -> None:
    """What the example draws."""
    target = FIGURES / "style.png"
    sys.argv = ["style_transfer.py", "--output", str(target)]
    runpy.run_path(str(DOCS.parent / "examples" / "style_transfer.py"), run_name="__main__")
    shrink(target, 128)


def traversal() -> None:
    """Joint directions of the generator that comes with the package, as a strip and as an animation."""
    import torch

    from orthocond.directions import gif, joint_directions, strip, traverse
    from orthocond.lab.explorer import shipped

    generator = shipped.generator()
    found = joint_directions(generator, 64).measure(generator, 16)[:4]
    steps = torch.linspace(-1.5, 1.5, 9).tolist()
    latents = 0.5 * torch.randn(4, generator.z_dim, generator=torch.Generator().manual_seed(2))
    images = traverse(generator, latents, found, steps)
    strip(images, found, steps, title="Joint directions of a GAN").save(FIGURES / "traversal.png")
    gif(FIGURES / "traversal.gif", images[1:, :2], found[1:], steps)


def spectra() -> None:
    """Eigenvalues of the covariance behind a stem, for four weights of it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import torch
    from torch import nn
    from torch.nn import functional as F

    import orthocond as oc

    torch.manual_seed(0)
    images = F.avg_pool2d(torch.randn(256, 3, 22, 22), 7, 1) * 5  # neighboring pixels agree, as in photographs
    images = images.mean(1, keepdim=True) + 0.3 * images + 0.05 * torch.randn(256, 3, 16, 16)

    def stem() -> nn.Conv2d:
        torch.manual_seed(1)
        return nn.Conv2d(3, 24, 3, padding=1, bias=False)

    stems = {
        "plain": stem(),
        "spectral": oc.spectral(stem()),
        "orthogonal": oc.orthogonal(stem()),
        "whitening_init_": oc.whitening_init_(stem(), images),
    }
    figure, axes = plt.subplots(figsize=(7, 3.8), layout="constrained")
    for width, (name, conv) in zip((6, 2, 2, 2), stems.items(), strict=True):  # two of them coincide
        with torch.no_grad():
            found = oc.spectrum(torch.cov(conv(images).double().movedim(1, 0).flatten(1)))
        values = found.eigenvalues.sort(descending=True).values
        axes.semilogy(range(1, 25), values / values[0], linewidth=width, label=f"{name}: κ = {found.condition:.2g}")
    axes.set(xlabel="eigenvalue of the covariance, largest first", ylabel="relative to the largest")
    axes.set_title("What a stem of 24 channels makes of smooth images")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(FIGURES / "spectra.png", dpi=130)


def photograph(page: Path, target: Path, *, ready: str, size: tuple[int, int], state: str = "") -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium") or shutil.which("google-chrome"))
        view = browser.new_page(viewport={"width": size[0], "height": size[1]}, color_scheme="light")
        view.goto(page.resolve().as_uri() + state)
        view.wait_for_selector(ready, timeout=60_000)
        view.wait_for_timeout(1500)
        view.screenshot(path=target)
        browser.close()


def orthocond(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "orthocond", *words], check=True)


def report() -> None:
    """The report of three small trainings on sprites: `orthocond demo`."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        orthocond("demo", "--no-open")
        photograph(Path("runs/demo/report.html"), FIGURES / "report.png", ready="svg", size=(1200, 800))
    shrink(FIGURES / "report.png")


def explorer() -> None:
    """The generator that comes with the package: four samples, directions with names, the strip of one."""
    names = ["ground", "left and right", "up and down", "hue", "size", "stretch"]
    state = {"samples": 4, "truncation": 0.8, "picked": 3, "names": {"0:joint": dict(enumerate(names))}}
    link = "#" + base64.urlsafe_b64encode(json.dumps(state).encode()).decode().rstrip("=")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        orthocond("explore", "--no-open", "--out", "explore.html")
        photograph(
            Path("explore.html"), DOCS / "explorer.png", ready="body[data-previews]", size=(1500, 950), state=link
        )


def main() -> None:
    parts = {"style": style, "traversal": traversal, "spectra": spectra, "report": report, "explorer": explorer}
    parts |= {page.stem: lambda page=page: of_tutorial(page) for page in sorted((DOCS / "tutorials").glob("*.md"))}
    unknown = set(sys.argv[1:]) - set(parts)
    if unknown:
        sys.exit(f"There is no part {', '.join(sorted(unknown))}; there are {', '.join(parts)}.")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    FIGURES.mkdir(exist_ok=True)
    for name in sys.argv[1:] or parts:
        print(name, flush=True)
        parts[name]()


if __name__ == "__main__":
    main()
