"""Write the page on speed from the results: `python benchmarks/page.py docs/speed.md`."""

import json
import sys
from pathlib import Path

from growth import slope
from paired import percent

HERE = Path(__file__).parent
MISSING = "Not measured yet; it needs a machine on which nothing else runs."


def load(name):
    """The results of one benchmark, or None."""
    file = HERE / "results" / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else None


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


# Columns that only some tables have: the key of a row, the head, and how it is written.
EXTRA = {
    "relative_to_products": ("relative to the five products", "{:.2f}"),
    "relative_error": ("relative error", "{:.0e}"),
}


def contenders(case):
    found = case["contenders"]
    extra = {key: how for key, how in EXTRA.items() if any(key in row for row in found.values())}
    columns = ["", "ms, median and quartiles", f"relative to {case['base']}", "peak MB"]
    rows = []
    for name, row in found.items():
        if "failed" in row:
            rows.append([name, row["failed"], "", "", *("" for _ in extra)])
            continue
        if "once_ms" in row or row.get("runs") == 1:
            time = f"{row.get('once_ms', row.get('median_ms')):.3g}, one run"
        else:
            time = f"{row['median_ms']:.3g} [{row['low_ms']:.3g}, {row['high_ms']:.3g}]"
        memory = row.get("peak_bytes")
        cells = [name, time, f"{row['relative_time']:.2f}", f"{memory / 1e6:.3g}" if memory else ""]
        rows.append([*cells, *(text.format(row[key]) for key, (_, text) in extra.items())])
    return f"### {case['title']}\n\n{table(columns + [head for head, _ in extra.values()], rows)}"


def growth():
    """The exponents of growth as tables: those of the figure."""
    data = load("growth")
    if data is None:
        return MISSING
    results = data["results"]
    rows = [
        [name, *(exponent(found[name], key) for found in results.values() for key in ("median_ms", "peak_bytes"))]
        for name in next(iter(results.values()))
    ]
    figure = "![Time and memory against channels, batch and rank](growth.png)\n\n"
    return figure + table(["", *(f"{axis}: {kind}" for axis in results for kind in ("time", "memory"))], rows)


def exponent(rows, key):
    return f"{slope([(int(value), row[key]) for value, row in rows.items()]):.1f}"


def processes():
    data = load("processes")
    if data is None:
        return MISSING
    rows = []
    for case in data["results"]:
        one, two = (case["seconds"][count] for count in "12")
        times = [f"{1e3 * found[clock]:.0f}" for clock in ("wall", "processor") for found in (one, two)]
        rows.append([case["preset"], *times, f"{case['gain']:.2f}", f"{case['bound']:.2f}", f"{case['load']:.0f}"])
    clocks = [f"{clock}, {count}" for clock in ("wall ms", "processor ms") for count in ("one", "two")]
    return table(["preset", *clocks, "gain by the wall", "most by processor time", "load of the machine"], rows)


def start():
    data = load("start")
    rows = [[f"`{name}`", f"{row['median']:.2f}", f"{row['least']:.2f}"] for name, row in data["results"].items()]
    return table(["", "s, median", "s, least"], rows) + f"\n\nLoad of the machine: {data['environment']['load']}."


def section(name):
    """The tables of one file of results; it says so where they are of another version than the page."""
    data = load(name)
    if data is None:
        return MISSING
    show = {"training_step": steps_of_training, "inference": inferences}.get(name, contenders)
    version, page = data["environment"]["orthocond"], environment()["orthocond"]
    note = [] if version == page else [f"These were measured with orthocond {version}."]
    return "\n\n".join(note + [show(case) for case in data["results"]])


def environment():
    return load("matrix_functions")["environment"]


def machine():
    return ", ".join(f"{key} {value}" for key, value in environment().items())


if __name__ == "__main__":
    text = (HERE / "speed.template.md").read_text().replace("{{machine}}", machine())
    for name in ("matrix_functions", "layers", "steps", "weights", "training_step", "inference"):
        text = text.replace(f"{{{{{name}}}}}", section(name))
    for name, show in {"growth": growth, "processes": processes, "start": start}.items():
        text = text.replace(f"{{{{{name}}}}}", show())
    Path(sys.argv[1]).write_text(text)
    print(f"written to {sys.argv[1]}")
