"""The published snippets run; importing the library is quiet and loads torch alone."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("snippet", re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL))
def test_readme_snippet(snippet, capsys):
    exec(compile(snippet, "README.md", "exec"), {})
    assert "27 of 64" in capsys.readouterr().out


def test_results_are_those_of_the_kept_tables():
    script = runpy.run_path(str(ROOT / "docs" / "results_block.py"))
    assert (ROOT / "README.md").read_text() == script["page"](), "python docs/results_block.py writes it anew"


def test_example_gradient_at_ties(tmp_path, monkeypatch, capsys):
    figure = tmp_path / "figure.png"
    monkeypatch.setattr(sys, "argv", ["gradient_at_ties.py", str(figure)])
    runpy.run_path(str(ROOT / "examples" / "gradient_at_ties.py"), run_name="__main__")
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert "nan" in capsys.readouterr().out


def test_import_is_quiet_and_needs_torch_alone():
    code = (
        "import sys, torch; before = set(sys.modules); import orthocond; "
        "new = {m.partition('.')[0] for m in set(sys.modules) - before}; "
        "print(sorted(new & {'matplotlib', 'scipy', 'torchvision', 'mpmath', 'PIL', 'sympy', 'pandas'}))"
    )
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
    assert result.stderr == ""


def test_every_public_name_exists_and_is_documented():
    import orthocond

    for module in (orthocond, orthocond.directions, orthocond.gans, orthocond.metrics):
        for name in module.__all__:
            assert getattr(module, name).__doc__, name
