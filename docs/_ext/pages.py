"""What Sphinx does to every page: snippets without prompts, and names in the text that link to their pages."""

import re
from typing import Any

import doctests
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging
from sphinx.util.nodes import make_refnode

import orthocond
from orthocond import directions, gans, metrics

logger = logging.getLogger(__name__)
IMPORTS = {"torch": "import torch", "nn": "from torch import nn", "oc": "import orthocond as oc"}
for package in (metrics, gans, directions, orthocond):
    IMPORTS |= {name: f"from {package.__name__} import {name}" for name in package.__all__}
PREFIXES = ("", "orthocond.", "orthocond.directions.", "orthocond.gans.", "orthocond.metrics.")


class Snippets(SphinxTransform):
    """Doctests lose their prompts; those of docstrings get the imports that they need."""

    default_priority = 200

    def apply(self, **kwargs: Any) -> None:
        whole = ""
        for node in list(self.document.findall(lambda n: isinstance(n, (nodes.doctest_block, nodes.literal_block)))):
            code = node.astext()
            if not code.startswith(">>> "):
                if node.get("language") == "python":
                    whole += code + "\n"
                continue
            code = doctests.without_prompts(code)
            if "/generated/" in self.env.docname:
                code = self.with_imports(code)
            whole += code + "\n"
            node.replace_self(nodes.literal_block(code, code, language="python"))
        missing = doctests.missing_names(whole)
        if missing:
            logger.warning("snippets are not complete, they lack %s", ", ".join(missing), location=self.env.docname)

    def with_imports(self, code: str) -> str:
        needed = [IMPORTS[name] for name in doctests.missing_names(code) if name in IMPORTS]
        needed.sort(key=lambda line: (line.startswith("from orthocond"), line.startswith("from"), line))
        return "\n".join([*needed, *([""] if needed and "import" not in code.partition("\n")[0] else []), code])


class NamesAreLinks(SphinxPostTransform):
    """`treat`, `oc.treat(...)` and `Directions.load` in the text link to their pages."""

    default_priority = 5

    def run(self, **kwargs: Any) -> None:
        objects = self.env.domains.python_domain.objects
        for node in list(self.document.findall(nodes.literal)):
            parent = node.parent
            while parent is not None and not isinstance(parent, (nodes.reference, nodes.title, nodes.term)):
                parent = parent.parent
            match = re.match(r"^(?:oc\.)?([\w.]+)(?:\(.*\)|/.*)?$", node.astext().replace("\n", " "))
            if parent is not None or match is None:
                continue
            for prefix in PREFIXES:
                found = objects.get(prefix + match[1])
                if found is not None and found.objtype != "module" and found.docname != self.env.docname:
                    link = make_refnode(
                        self.app.builder, self.env.docname, found.docname, found.node_id, node.deepcopy(), match[1]
                    )
                    node.replace_self(link)
                    break


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_transform(Snippets)
    app.add_post_transform(NamesAreLinks)
    return {"parallel_read_safe": True}
