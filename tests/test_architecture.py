"""The rooms of the house: no cycles, the library below the lab, the page that shows it, and names."""

import ast
import importlib.util
import io
import re
import tokenize
from collections import defaultdict
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
BRITISH = re.compile(
    r"(?i)(normal|initial|optim|synchron|organ|minim|maxim|summar|regular|parametr|diagonal|general|visual|serial|util|"
    r"recogn|standard|vector|quant|token)is(e|ing|ation)|analyse|colour|centre|behaviour|favour|neighbour|licence|grey"
)
VAGUE = {"judged", "drawn", "look", "Look", "_Look", "Given", "Sketch"}


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("import_graph", DOCS / "import_graph.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sources(folder):
    """The files of a folder with their syntax trees."""
    return [(path, ast.parse(path.read_text())) for path in sorted((ROOT / folder).rglob("*.py"))]


def identifiers(tree):
    """All names that the code of a file defines or uses, but for strings and the names of modules."""
    for node in ast.walk(tree):
        for field in ("name", "id", "arg", "attr", "asname"):
            name = getattr(node, field, None)
            if isinstance(name, str) and not (isinstance(node, ast.alias) and field == "name"):
                yield name


def lines_of_code(path):
    """Lines with code: neither empty, nor a comment, nor a docstring."""
    text = path.read_text()
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in layout:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


@pytest.fixture(scope="module")
def graph(script):
    return script.graph()


def test_there_are_no_cycles(graph):
    assert list(nx.simple_cycles(graph)) == []


def test_the_library_never_imports_the_lab(graph):
    upstairs = ("orthocond.lab", "orthocond.cli")
    wrong = [(a, b) for a, b in graph.edges if b.startswith(upstairs) and not a.startswith(upstairs)]
    assert wrong == []


def test_matrices_know_nothing_but_the_checks(graph):
    assert set(graph.successors("orthocond.matrix")) == {"orthocond._checks"}


def test_the_page_shows_the_graph_as_it_is(script):
    assert (DOCS / "architecture.md").read_text() == script.page(), "python docs/import_graph.py writes it anew"


def test_imports_in_functions_count(script):
    tree = script.ast.parse("def f():\n    from orthocond.lab import runs\n")
    assert script._imports(tree) == ["orthocond.lab.runs"]


def test_no_two_classes_have_one_name():
    places = defaultdict(list)
    for path, tree in sources("orthocond"):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path.name)
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_files_are_below_500_lines():
    files = [path for folder in ("orthocond", "tests") for path, _ in sources(folder)]
    assert [path.name for path in files if path.read_text().count("\n") >= 500] == []


def test_code_of_the_tests_is_at_least_four_fifths_of_the_source():
    source, tests = (sum(map(lines_of_code, dict(sources(folder)))) for folder in ("orthocond", "tests"))
    assert tests >= 0.8 * source


@pytest.mark.parametrize("folder", ["orthocond", "tests", "benchmarks", "examples", "docs"])
def test_identifiers_are_in_american_spelling_and_say_what_they_are(folder):
    wrong = set()
    for _, tree in sources(folder):
        wrong |= {name for name in identifiers(tree) if BRITISH.search(name) or name in VAGUE}
    assert wrong == set()


def test_a_training_takes_the_six_hops_of_the_page():
    """Each hop is on the page, and its code calls the next one; the table reads what the run has written."""
    hops = {
        "cli/train.py": ("_train", r"experiments\.train\("),
        "lab/experiments.py": ("train", r"Loop\(.*\)\.train\("),
        "lab/loop.py": ("make_step", r"self\.task\.step\("),
        "lab/runs/folder.py": ("log", "def log"),
        "lab/catalog.py": ("make", r"gather\("),
    }
    page = (DOCS / "architecture.md").read_text()
    for place, (name, call) in hops.items():
        tree = ast.parse((ROOT / "orthocond" / place).read_text())
        (function,) = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name]
        assert re.search(call, ast.unparse(function)), place
        assert f"`{place}`" in page
    loop = (ROOT / "orthocond" / "lab" / "loop.py").read_text()
    assert "self.run.log(" in loop
    assert "self.run.save(" in loop


def test_a_generator_makes_images_and_rng_random_numbers():
    wrong = []
    for path, tree in sources("orthocond"):
        for node in ast.walk(tree):
            typed = isinstance(node, ast.arg) and node.annotation is not None
            if typed and node.arg == "generator" and "torch.Generator" in ast.unparse(node.annotation):
                wrong.append(path.name)
            if isinstance(node, ast.Assign) and ast.unparse(node).startswith("generator = torch.Generator("):
                wrong.append(path.name)
    assert wrong == []
