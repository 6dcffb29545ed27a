"""Write the page on speed from the results: `python benchmarks/page.py docs/speed.md`."""

import json
import sys
from pathlib import Path

from paired import percent

HERE = Path(__file__).parent


def table(columns, rows):
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def share(row, base, kind):
    over = row.get(f"over {base}")
    return percent(over[kind]) if over else ""


def steps_of_training(case):
    columns = ["", "step, ms", "over BN", "over BN, whole step", "over SVD", "over SVD, whole step", "peak MB"]
    rows = [
        [
            name,
            f"{row['step_ms']['processor']['median']:.0f}",
            *(share(row, base, kind) for base in ("BN", "SVD") for kind in ("by_stem", "processor")),
            f"{row['peak_bytes'] / 1e6:.0f}",
        ]
        for name, row in case["contenders"].items()
    ]
    return f"### {case['title']}, batch {case['batch']}\n\n{table(columns, rows)}"


def inferences(case):
    rows = [
        [name, f"{row['ms']['processor']['median']:.1f}", percent(row["over"]["processor"])]
        for name, row in case["contenders"].items()
    ]
    return f"### {case['title']}, batch {case['batch']}\n\n{table(['', 'ms', 'over batch norm, folded'], rows)}"


def contenders(case):
    columns = ["", "ms, median and quartiles", f"relative to {case['base']}", "peak MB"]
    with_error = any("relative_error" in row for row in case["contenders"].values())
    rows = []
    for name, row in case["contenders"].items():
        cells = [
            name,
            f"{row['median_ms']:.3g} [{row['low_ms']:.3g}, {row['high_ms']:.3g}]",
            f"{row['relative_time']:.2f}",
            f"{row['peak_bytes'] / 1e6:.3g}",
        ]
        rows.append([*cells, f"{row['relative_error']:.0e}"] if with_error else cells)
    return f"### {case['title']}\n\n{table(columns + ['relative error'] * with_error, rows)}"


def section(name):
    data = json.loads((HERE / "results" / f"{name}.json").read_text())
    show = {"training_step": steps_of_training, "inference": inferences}.get(name, contenders)
    return "\n\n".join(show(case) for case in data["results"])


def machine():
    data = json.loads((HERE / "results" / "matrix_functions.json").read_text())
    return ", ".join(f"{key} {value}" for key, value in data["environment"].items())


if __name__ == "__main__":
    text = (HERE / "speed.template.md").read_text().replace("{{machine}}", machine())
    for name in ("matrix_functions", "layers", "steps", "training_step", "inference"):
        text = text.replace(f"{{{{{name}}}}}", section(name))
    Path(sys.argv[1]).write_text(text)
    print(f"written to {sys.argv[1]}")
