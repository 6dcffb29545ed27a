"""The documentation: snippets can be copied and run, names and pictures are there, links lead somewhere."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import orthocond

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs" / "_ext"))
import doctests  # noqa: E402

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "tutorials").glob("*.md"))]
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


@pages
def test_snippets_are_complete(page):
    code = "\n".join(doctests.snippets(page.read_text()))
    assert doctests.missing_names(code) == []


@pages
def test_links_and_pictures_lead_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    local = [target.partition("#")[0] for target in targets if not target.startswith(("http", "mailto", "#"))]
    missing = [target for target in local if "generated/" not in target and not (page.parent / target).exists()]
    assert not missing
    assert not re.findall(r"!\[[^]]*\]\(http", text)  # the pages need no network


def test_prompts_go_and_results_become_comments():
    text = (
        ">>> import torch\n>>> _ = torch.manual_seed(0)\n>>> for i in range(2):\n...     print(i)\n0\n1\n"
        ">>> int('x')\nTraceback (most recent call last):\nValueError: no\n"
    )
    assert doctests.without_prompts(text) == (
        "import torch\n\ntorch.manual_seed(0)\nfor i in range(2):\n    print(i)\n# 0\n# 1\nint('x')\n# ValueError: no"
    )


def test_missing_names_are_found():
    code = "import torch.nn as nn\nx = [i for i in range(3)]\ndef f(a):\n    return nn.Linear(a, x, y)"
    assert doctests.missing_names(code) == ["y"]


def test_every_public_name_has_a_page():
    listed = set(re.findall(r"^   ~orthocond\.(\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE))
    names = set(orthocond.__all__) - {"directions", "gans", "metrics"}
    for package in ("directions", "gans", "metrics"):
        names |= {f"{package}.{name}" for name in getattr(orthocond, package).__all__}
    assert listed == names


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


# What torch's threads say, rarely and on busy machines, when they abort a process that has done its work.
_ABORTED = "terminate called without an active exception"
COMMANDS = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILES = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```", re.MULTILINE | re.DOTALL)
TUTORIALS = [page for page in sorted((ROOT / "docs" / "tutorials").glob("*.md")) if COMMANDS.search(page.read_text())]


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_commands_of_tutorials_run(page, tmp_path, monkeypatch, capfd, without_vega):
    """Fences marked sh are run, beside the files that the tutorial tells to save; those marked text are not."""
    from orthocond.cli.app import run

    text = page.read_text()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, code in FILES.findall(text):
        Path(name).write_text(code)
    if "results/" in text:
        shutil.copytree(ROOT / "results" / "runs", "results/runs")
    for command in "".join(COMMANDS.findall(text)).splitlines():
        program, *words = shlex.split(command)
        if program == "orthocond":
            code = run(words)
        else:
            module = {"torchrun": "torch.distributed.run"}[program]
            code = subprocess.run([sys.executable, "-m", module, *words], check=False).returncode
            if code and _ABORTED in capfd.readouterr().err:
                code = subprocess.run([sys.executable, "-m", module, *words], check=False).returncode
        assert code == 0, f"{command}\n{capfd.readouterr().err[-3000:]}"
    assert all(Path(name).exists() for name in re.findall(r"`((?:results/[\w/-]+|discs)\.\w+)`", text))
    sums = re.findall(r"sum of the weights (-?\d+\.\d{6})", capfd.readouterr().out)
    assert len(set(sums)) == (page.stem == "several-gpus")
