"""Write index.html into a folder with one folder of documentation for each version: a list, the newest first.

Usage: python docs/versions.py FOLDER
"""

import html
import re
import sys
from pathlib import Path

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>orthocond: documentation by version</title>
<style>body {{ font: 1rem/1.6 system-ui, sans-serif; max-width: 40rem; margin: 3rem auto; padding: 0 1rem; }}</style>
</head>
<body>
<h1>orthocond</h1>
<p>Documentation by version:</p>
<ul>
{items}
</ul>
</body>
</html>
"""


def versions_in(folder: Path) -> list[str]:
    """Names of the folders that hold the documentation of a version, the newest first."""
    names = [path.parent.name for path in folder.glob("*/index.html") if re.match(r"\d", path.parent.name)]
    return sorted(names, key=lambda name: [int(part) for part in re.findall(r"\d+", name)], reverse=True)


def write(folder: Path) -> Path:
    """Write the list of versions, and return its file."""
    names = [html.escape(name) for name in versions_in(folder)]
    if not names:
        raise SystemExit(f"{folder} has no folder of a version with an index.html.")
    notes = [" (newest)", *[""] * (len(names) - 1)]
    items = [f'<li><a href="{name}/index.html">{name}</a>{note}</li>' for name, note in zip(names, notes, strict=True)]
    file = folder / "index.html"
    file.write_text(PAGE.format(items="\n".join(items)), encoding="utf-8")
    return file


if __name__ == "__main__":
    print(f"open {write(Path(sys.argv[1]))}")
