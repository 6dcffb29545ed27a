"""The published snippets run; importing the library is quiet and loads torch alone."""

import json
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


def test_verdicts_that_a_wider_correction_would_take_away_have_a_star():
    """Holm by hand: the k-th smallest of n p-values times n - k + 1, and none below the one before."""
    found = []
    for name in ("claims", "conditioning", "pade"):
        rows = json.loads((ROOT / "results" / f"cifar10-{name}" / "table.json").read_text())["contrasts"]
        cells = [row["measures"][row["measure"]]["difference"] for row in rows]
        found += [cell for cell in cells if cell and cell["p"] is not None]
    wide, lost = 0.0, []
    for place, cell in enumerate(sorted(found, key=lambda cell: cell["p"])):
        wide = max(wide, (len(found) - place) * cell["p"])
        if cell["p_holm"] < 0.05 <= wide:
            lost.append((f"{cell['mean']:+.1f}".replace("-", "−"), f"{min(wide, 1):.2f}"))
    text = (ROOT / "README.md").read_text()
    starred = re.findall(r"\| (\S+) \[[^|]*\| \d+ of \d+ \| (?:holds|fails)\*", text)
    assert starred
    assert set(starred) <= {mean for mean, _ in lost}
    (count, wider) = re.findall(r"^\\\* not significant if all (\d+) contrasts .*: p = (.*)\.$", text, re.M)[0]
    assert int(count) == len(found)
    assert wider.split(" and ") == sorted({p for mean, p in lost if mean in starred})


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
