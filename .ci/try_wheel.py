"""Install a wheel into empty environments, with torch alone and with each extra, and try what a newcomer tries there.

Usage: python .ci/try_wheel.py WHEEL [EXTRA ...], where "" is torch alone. All extras of the wheel if none is given.
"""

import email
import os
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints.txt"
LIBRARY = """
import torch, orthocond as oc
covariance = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
root = oc.inv_sqrtm(covariance)
assert torch.allclose(root @ covariance @ root, torch.eye(2), atol=1e-5)
"""
IMPORTS = {
    "docs": "import sphinx, furo, myst_parser",
    "dev": "import pytest, playwright, mypy",
    "dist": "import build, twine, hatchling",
}


def extras_of(wheel: Path) -> list[str]:
    """The extras that a wheel names, after "" for none."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    return ["", *metadata.get_all("Provides-Extra", [])]


def attempt(wheel: Path, extra: str, folder: Path) -> None:
    """Install the wheel with one extra into an empty environment and try it; any failure is an exception."""
    venv.create(folder, with_pip=True, clear=True)
    python = folder / "bin" / "python"
    # Neither a path of the caller nor the checkout may help the installed package.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}

    def run(*command: str | Path, code: int = 0) -> str:
        found = subprocess.run(list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True)
        if found.returncode != code:
            raise RuntimeError(f"{' '.join(map(str, command))} gave {found.returncode}:\n{found.stdout}{found.stderr}")
        return found.stdout + found.stderr

    named = f"orthocond[{extra}]" if extra else "orthocond"
    run(python, "-m", "pip", "install", "-q", "-c", CONSTRAINTS, f"{named} @ {wheel.resolve().as_uri()}")
    run(python, "-c", LIBRARY)
    command = folder / "bin" / "orthocond"
    if extra in ("lab", "dev", "all"):
        assert "explore" in run(command, "--help")
        assert "gan-sprites" in run(command, "list")
        run(command, "explore", "--no-open", "--out", "page.html")
        assert (folder / "page.html").stat().st_size > 4e6
    else:
        assert 'pip install "orthocond[lab]"' in run(command, "--help", code=1)
    for part in IMPORTS if extra == "all" else [extra]:
        run(python, "-c", IMPORTS.get(part, ""))


def main(wheel: str, *extras: str) -> None:
    """Try one extra after the other, and tell how long each took."""
    for extra in extras or extras_of(Path(wheel)):
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            attempt(Path(wheel), extra, Path(folder))
        print(f"{extra or 'torch alone'}: works ({time.monotonic() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
