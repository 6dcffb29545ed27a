"""The rooms of the house: no cycles, the library below the lab, the page that shows it, and names."""

import ast
import functools
import importlib
import importlib.util
import inspect
import re
from collections import defaultdict
from pathlib import Path

import networkx as nx
import pytest

from orthocond.lab.experiments import TASKS
from orthocond.lab.presets import KINDS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
BRITISH = re.compile(
    r"(?i)(normal|initial|optim|synchron|organ|minim|maxim|summar|regular|parametr|diagonal|general|visual|serial|util|"
    r"recogn|standard|vector|quant|token)is(e|ing|ation)|analyse|colour|centre|behaviour|favour|neighbour|licence|grey"
)
OF_A = re.compile(r'(?m)(?:^ *(?:[#*-]|""")? *|[.!?:] )Of (?:an?|the|all|each|every|its|this|these|those) ')
VAGUE = {"judged", "drawn", "look", "Look", "_Look", "Given", "Sketch"}


def load(name):
    """A script of the documentation as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script():
    return load("import_graph")


@pytest.fixture(scope="module")
def sizes():
    return load("code_size").sizes(ROOT)


@functools.cache
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


def test_nothing_but_the_registry_and_the_tasks_asks_for_the_kind_of_an_experiment():
    kinds = set(KINDS)
    classes = {c.__name__ for task in TASKS.values() for c in (task, KINDS[task.kind].config)}
    asked = []
    for path, tree in sources("orthocond"):
        place = path.relative_to(ROOT / "orthocond").as_posix()
        if place.startswith(("lab/classification/", "lab/generation/")) or place == "lab/presets.py":
            continue
        for node in ast.walk(tree):
            names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} if _is_question(node) else set()
            if (isinstance(node, ast.Constant) and node.value in kinds) or names & classes:
                asked.append(f"{place}:{node.lineno}")
    assert asked == []


def _is_question(node):
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass")
    )


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


def test_code_of_the_tests_is_at_least_four_fifths_of_the_source(sizes):
    code = sum(sizes[name] for name in ("library", "lab without pages", "report and explorer", "command line"))
    assert sizes["tests"] >= 0.8 * code


def test_the_page_says_how_large_the_house_is(sizes):
    """To 5 %, so that not every change of a line changes the page."""
    rows = re.findall(r"^\| ([\w ]+)[^|]* \| [\d,]+ \| ([\d,]+) \|$", (DOCS / "architecture.md").read_text(), re.M)
    said = {name.removesuffix(" with docstrings"): int(number.replace(",", "")) for name, number in rows}
    assert said == pytest.approx(sizes, rel=0.05), "python docs/code_size.py writes it anew"


def test_lines_of_code_are_neither_empty_nor_comments_nor_docstrings(tmp_path):
    (tmp_path / "a.py").write_text('"""Doc\nstring."""\n\n# comment\nx = [\n    1,  # one\n]\ny = """two\nlines"""\n')
    assert load("code_size").lines_of_code(tmp_path / "a.py") == 5


def test_init_files_only_re_export():
    """They have imports, `__all__`, and what makes their names lazy."""
    wrong = []
    for path, tree in sources("orthocond"):
        defined = [n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name != "__dir__"]
        if path.name == "__init__.py" and defined:
            wrong.append((path.parent.name, defined))
    assert wrong == []


@pytest.mark.parametrize("folder", ["orthocond", "tests", "benchmarks", "examples", "docs"])
def test_identifiers_are_in_american_spelling_and_say_what_they_are(folder):
    wrong = set()
    for _, tree in sources(folder):
        wrong |= {name for name in identifiers(tree) if BRITISH.search(name) or name in VAGUE}
    assert wrong == set()


def test_no_function_has_the_name_of_a_module():
    """The package has that name once: for the module, or for what would hide it."""
    wrong = []
    for path in sorted((ROOT / "orthocond").rglob("__init__.py")):
        package = importlib.import_module(".".join(path.parent.relative_to(ROOT).parts))
        modules = {file.stem for file in path.parent.glob("*.py")} | {folder.name for folder in path.parent.iterdir()}
        hidden = modules & set(getattr(package, "__all__", ()))
        wrong += [(path.parent.name, name) for name in hidden if not inspect.ismodule(getattr(package, name))]
    assert wrong == []


def test_prose_is_in_american_spelling_and_begins_with_the_subject():
    """In pages, docstrings, comments and messages; only this file has to name what is wrong."""
    folders = ("orthocond", "tests", "benchmarks", "examples", "docs", "results", ".ci", ".github")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if "_build" not in path.parts]
    wrong = set()
    for path in (*files, *ROOT.glob("*.md"), ROOT / "Makefile", ROOT / "pyproject.toml"):
        if path != Path(__file__) and (path.suffix in (".py", ".md", ".toml", ".yml") or path.name == "Makefile"):
            text = path.read_text()
            words = {found.group() for found in (*BRITISH.finditer(text), *OF_A.finditer(text))}
            wrong |= {(path.relative_to(ROOT).as_posix(), word) for word in words}
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
    for path, tree in (*sources("orthocond"), *sources("examples")):
        for node in ast.walk(tree):
            typed = isinstance(node, ast.arg) and node.annotation is not None
            if typed and node.arg == "generator" and "torch.Generator" in ast.unparse(node.annotation):
                wrong.append(path.name)
            if isinstance(node, ast.Assign) and ast.unparse(node).startswith("generator = torch.Generator("):
                wrong.append(path.name)
    assert wrong == []
