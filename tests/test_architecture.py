"""The rooms of the house: no cycles, the library below the lab, and the page that shows it."""

import importlib.util
from pathlib import Path

import networkx as nx
import pytest

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("import_graph", DOCS / "import_graph.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    assert set(graph.successors("orthocond.matrix")) <= {"orthocond._checks", "orthocond._html"}


def test_the_page_shows_the_graph_as_it_is(script):
    assert (DOCS / "architecture.md").read_text() == script.page(), "python docs/import_graph.py writes it anew"


def test_imports_in_functions_count(script):
    tree = script.ast.parse("def f():\n    from orthocond.lab import runs\n")
    assert script._imports(tree) == ["orthocond.lab.runs"]
