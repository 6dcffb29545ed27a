"""Doctests as a reader wants them: code without prompts that can be copied and run, results as comments."""

import ast
import builtins
import doctest
import re

_FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def without_prompts(text: str) -> str:
    """The code of a doctest, each result in comments below its line."""
    lines: list[str] = []
    before = ""
    for part in doctest.DocTestParser().parse(text):
        if isinstance(part, doctest.Example):
            source = re.sub(r"\s*# doctest:.*", "", part.source.rstrip())
            source = re.sub(r"^(\s*)_ = (?=torch\.manual_seed)", r"\1", source, flags=re.MULTILINE)
            kind = {"import": "import", "from": "import", "def": "block", "class": "block"}.get(
                source.split()[0], "line"
            )
            if lines and lines[-1] and (kind != before or kind == "block"):
                lines.append("")  # around imports, functions and classes
            before = kind
            lines += source.splitlines()
            result = part.exc_msg if part.exc_msg is not None else part.want
            lines += [("# " + line.replace("<BLANKLINE>", "")).rstrip() for line in result.rstrip().splitlines()]
        elif lines and part.strip(" ") == "\n":
            lines.append("")
    return "\n".join(lines).strip("\n")


def snippets(page: str) -> list[str]:
    """The Python code of a page in Markdown, fence by fence."""
    return [without_prompts(code) if ">>> " in code else code for code in _FENCE.findall(page)]


def missing_names(code: str) -> list[str]:
    """Names that are used and neither made in this code nor built in."""
    tree = ast.parse(code)
    made = {"__name__", "__file__", *dir(builtins)}
    used = []
    for node in ast.walk(tree):
        match node:
            case ast.Name(ctx=ast.Load()):
                used.append(node.id)
            case ast.Name():
                made.add(node.id)
            case ast.FunctionDef() | ast.ClassDef():
                made.add(node.name)
            case ast.arg():
                made.add(node.arg)
            case ast.alias():
                made.add((node.asname or node.name).partition(".")[0])
            case ast.ExceptHandler(name=str()):
                made.add(node.name)
    return sorted(set(used) - made)
