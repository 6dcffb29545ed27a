"""Write the page on speed from the results: `python benchmarks/page.py docs/speed.md`."""

import json
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def cells(row):
    yield f"{row['median_ms']:.3g} [{row['low_ms']:.3g}, {row['high_ms']:.3g}]"
    yield f"{row['relative_time']:.3f}"
    yield f"{row['peak_bytes'] / 1e6:.3g}"
    if "relative_error" in row:
        yield f"{row['relative_error']:.0e}"


def table(case):
    columns = ["", "ms, median and quartiles", f"relative to {case['base']}", "peak MB"]
    rows = case["contenders"]
    if any("relative_error" in row for row in rows.values()):
        columns.append("relative error")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [f"| {name} | {' | '.join(cells(row))} |" for name, row in rows.items()]
    return "\n".join(lines)


def section(name):
    data = json.loads((RESULTS / f"{name}.json").read_text())
    machine = ", ".join(f"{key} {value}" for key, value in data["environment"].items())
    parts = [f"### {case['title']}\n\n{table(case)}" for case in data["results"]]
    return f"Measured with {machine}.\n\n" + "\n\n".join(parts)


if __name__ == "__main__":
    text = (Path(__file__).parent / "speed.template.md").read_text()
    for file in sorted(RESULTS.glob("*.json")):
        text = text.replace(f"{{{{{file.stem}}}}}", section(file.stem))
    Path(sys.argv[1]).write_text(text)
    print(f"written to {sys.argv[1]}")
