"""The rooms of the house and who imports whom, read from the source; `python docs/import_graph.py` writes the page.

A room is a package of the library, or a module of the lab. Imports inside functions count: a cycle hidden there is a
cycle.
"""

import ast
from collections.abc import Iterable
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).parent.parent
PAGE = Path(__file__).parent / "architecture.md"
BEGIN, END = "<!-- import graph: begin -->", "<!-- import graph: end -->"
_WHOLE = ("data", "runs", "explorer", "report", "launch")  # packages of the lab that are one room


def room(module: str) -> str:
    """The room of a module."""
    parts = module.split(".")
    if parts[1:2] == ["lab"]:
        return ".".join(parts[:3] if parts[2:3] and parts[2] in _WHOLE else parts)
    return ".".join(parts[:2])


def graph() -> nx.DiGraph:
    """Rooms, with an edge to each room that is imported."""
    found = nx.DiGraph()
    modules = {}
    for path in sorted((ROOT / "orthocond").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        modules[name.removesuffix(".__init__")] = path
    for name, path in modules.items():
        if (path.name == "__init__.py" and name in ("orthocond", *_opened(modules))) or path.name == "__main__.py":
            continue  # a front door: it re-exports what is inside
        found.add_node(room(name))
        for target in _imports(ast.parse(path.read_text())):
            while target not in modules and "." in target:
                target = target.rpartition(".")[0]
            if target.startswith("orthocond.") and room(target) != room(name):
                found.add_edge(room(name), room(target))
    return found


def _opened(modules: Iterable[str]) -> list[str]:
    """The packages of the lab whose modules are rooms."""
    return [name for name in modules if name.startswith("orthocond.lab") and room(name + ".x") != room(name)]


def _imports(tree: ast.AST) -> list[str]:
    typing_only = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.walk(node)
    }
    names = []
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return names


def text(found: nx.DiGraph) -> str:
    """The rooms by floor, each with the rooms that it imports; nothing imports from a floor above its own."""
    floors = list(nx.topological_generations(found.reverse()))
    lines = ["| floor | room | imports |", "|---|---|---|"]
    for number, floor in enumerate(floors):
        for name in sorted(floor):
            short = ", ".join(sorted(f"`{t.removeprefix('orthocond.')}`" for t in found.successors(name)))
            lines.append(f"| {number} | `{name.removeprefix('orthocond.')}` | {short or 'nothing of ours'} |")
    return "\n".join(lines)


def page() -> str:
    """The page with the graph as it is now."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n\n{text(graph())}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page())
