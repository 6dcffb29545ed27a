"""What is published: one version everywhere, wheel and sdist with all files, the wheel in empty environments."""

import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import orthocond

ROOT = Path(__file__).resolve().parent.parent
STATIC = "orthocond/lab/explorer/static/"


def script(path):
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_version_is_the_same_everywhere():
    heading, date = re.search(r"^## (\S+) - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.M).groups()
    citation = (ROOT / "CITATION.cff").read_text()
    assert orthocond.__version__ == heading
    assert f"\nversion: {heading}\n" in citation
    assert f"\ndate-released: {date}\n" in citation
    assert "version" in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dynamic"]


def test_the_workflow_runs_what_everybody_runs():
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    assert re.findall(r"- run: (.*)", workflow) == [".ci/run"]
    assert (ROOT / ".ci/run").stat().st_mode & 0o111
    assert "make test" in (ROOT / ".ci/run").read_text()


def test_constraints_hold_every_package_of_the_extras():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {line.split("==")[0].lower().replace("_", "-") for line in lines}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {re.match(r"[\w.-]+", text)[0].lower().replace("_", "-") for texts in extras.values() for text in texts}
    assert named - {"orthocond"} <= pins


def test_versions_of_the_documentation_are_listed_newest_first(tmp_path):
    versions = script("docs/versions.py")
    for name in ("0.2.0", "0.10.0", "0.9.1", "_static"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").write_text("x")
    (tmp_path / "1.0.0").mkdir()  # holds nothing
    page = versions.write(tmp_path).read_text()
    assert re.findall(r'href="([^"]+)/index.html"', page) == ["0.10.0", "0.9.1", "0.2.0"]
    assert page.count("(newest)") == 1
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match="no folder of a version"):
        versions.write(tmp_path / "empty")


def test_the_link_to_other_versions_has_its_place_in_the_theme():
    furo = pytest.importorskip("furo", reason="needs the extra docs")
    (file,) = (ROOT / "docs/_templates/sidebar").iterdir()
    assert f"sidebar/{file.name}" in (Path(furo.__file__).parent / "theme/furo/theme.conf").read_text()
    assert 'href="{{ content_root }}../index.html"' in file.read_text()


def test_extras_are_read_from_a_wheel(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as archive:
        archive.writestr("x-1.dist-info/METADATA", "Name: x\nProvides-Extra: lab\nProvides-Extra: docs\n\nText\n")
    assert script(".ci/try_wheel.py").extras_of(tmp_path / "x.whl") == ["", "lab", "docs"]


def test_what_is_imported_for_an_extra_is_what_it_installs():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, line in script(".ci/try_wheel.py").IMPORTS.items():
        installed = {re.match(r"[\w-]+", needed)[0].replace("-", "_") for needed in extras[extra]}
        assert set(line.removeprefix("import ").split(", ")) <= installed


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Wheel and sdist of a copy, so that nothing is written into the checkout; hatchling builds without network."""
    pytest.importorskip("hatchling", reason="needs hatchling, which make test installs")
    copy, out = tmp_path_factory.mktemp("copy") / "orthocond", tmp_path_factory.mktemp("dist")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("needs a git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy / name)
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(out)]
    subprocess.run(command, cwd=copy, check=True, capture_output=True, timeout=120)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist, {str(path.relative_to(copy)) for path in (copy / "orthocond").rglob("*") if path.is_file()}


def test_wheel_and_sdist_hold_the_package_the_explorer_and_the_licenses(built):
    wheel, sdist, package = built
    assert {STATIC + "ort-wasm-simd-threaded.wasm.gz", STATIC + "sprites.safetensors", "orthocond/py.typed"} <= package
    stem = f"orthocond-{orthocond.__version__}"
    assert wheel.name == f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    assert package <= inside
    assert f"{stem}.dist-info/licenses/LICENSE" in inside
    assert f"{stem}.dist-info/licenses/{STATIC}THIRD_PARTY.txt" in inside
    with tarfile.open(sdist) as archive:
        inside = set(archive.getnames())
    assert {f"{stem}/{name}" for name in package} <= inside
    assert {f"{stem}/{name}" for name in ("LICENSE", "CHANGELOG.md", "CITATION.cff", "pyproject.toml")} <= inside


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_wheel_works_in_empty_environments(built, tmp_path):
    """Needs an index of packages, as `make dist` does; two environments, which differ most."""
    for extra in ("", "lab"):
        script(".ci/try_wheel.py").attempt(built[0], extra, tmp_path / (extra or "alone"))
