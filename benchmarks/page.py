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


WAYS = {
    "1": "one process",
    "2": "two processes",
    "pinned": "two processes, each on a core of its own",
    "own": "two processes, each on a core of its own, plain batch normalizations not synchronized",
    "apart": "two trainings apart, of half the batch",
}


def processes():
    data = load("processes")
    if data is None:
        return MISSING
    rows = []
    for case in data["results"]:
        for way, found in case["seconds"].items():
            times = [f"{1e3 * found[clock]:.0f}" for clock in ("wall", "processor")]
            rows.append([case["preset"], WAYS[way], *times, f"{case['gains'][way]:.2f}"])
    return table(["preset, scale", "", "wall ms", "processor ms", "times as fast"], rows) + measured_on(data)


def measured_on(data):
    """Which machine it was, where it is not that of the page, and its load."""
    processor, load = (data["environment"][name] for name in ("processor", "load"))
    other = "" if processor == environment()["processor"] else f"Another machine than that of the page: {processor}. "
    return f"\n\n{other}Load of the machine: {load}."


def start():
    data = load("start")
    rows = [[f"`{name}`", f"{row['median']:.2f}", f"{row['least']:.2f}"] for name, row in data["results"].items()]
    return table(["", "s, median", "s, least"], rows) + measured_on(data)


FACTORS = {"64 x 27": 1, "64 x 576": 3, "512 x 4608": 5, "30 x 16384": 8, "6 x 131072": 15}
"""How many times as fast as a thin SVD `polar` is to be, by shape."""


def bounds():
    """What was asked for, what was measured, and whether it is met: `(what, asked, measured, met, command)`."""
    rows = [*polar_bounds(), *root_bounds(), *step_bounds(), *layer_bounds(), *start_bounds(), *process_bounds()]
    cells = [[what, asked, found, "yes" if met else "**no**", f"`{name}.py`"] for what, asked, found, met, name in rows]
    return table(["what", "asked for", "measured", "met", "command: `python benchmarks/`"], cells)


def cases(name, start):
    """The tables of a benchmark whose title begins so, by the rest of the title."""
    found = (load(name) or {"results": []})["results"]
    return {case["title"].removeprefix(start): case["contenders"] for case in found if case["title"].startswith(start)}


def polar_bounds():
    name, errors = "matrix_functions", []
    for title, rows in cases(name, "polar of ").items():
        shape, _, kind = title.partition(" float32, ")
        found = rows['polar(method="gram")']
        errors.append(found["relative_error"])
        if kind == "independent normal entries":
            factor = round(1 / found["relative_time"], 2)
            what = f"`polar` at {shape}: times as fast as a float32 thin SVD"
            yield what, f"at least {FACTORS[shape]}", f"{factor:.3g}", factor >= FACTORS[shape], name
    what = "`polar`, all shapes, also at condition number 1e3: largest error against float64"
    yield what, "below 1e-5", f"{max(errors):.0e}", max(errors) < 1e-5, name


def root_bounds():
    name = "matrix_functions"
    for title, rows in cases(name, "inv_sqrtm of ").items():
        if title.startswith(("(64,", "(1,")) and "Eigh()" in rows:
            ratio = round(rows["Eigh()"]["relative_time"], 2)
            what = f"`inv_sqrtm` of {title}, relative to autograd through eigh"
            yield what, "at most 1", f"{ratio:.2f}", ratio <= 1, name


def step_bounds():
    for rows in cases("steps", "one step of all of ResNet-18").values():
        seconds = round(rows["NOG"]["median_ms"] / 1e3, 2)
        yield (
            "a step of NOG for all matrices of ResNet-18",
            "at most 0.25 s",
            f"{seconds:.2f} s",
            seconds <= 0.25,
            "steps",
        )


def layer_bounds():
    memory = []
    for title, rows in cases("layers", "limit ").items():
        what = "whitening " + title.partition(", forward")[0].replace(" float32", "").replace("_format", "")
        layer, compiled = rows["DecorrelatedBatchNorm2d"], rows["DecorrelatedBatchNorm2d, compiled"]
        ratio = round(layer["relative_to_products"], 2)
        yield f"{what}: relative to its five products", "at most 1.4", f"{ratio:.2f}", ratio <= 1.4, "layers"
        ratio = round(compiled["relative_to_layer"], 2)
        yield f"{what}: compiled relative to eager", "at most 1", f"{ratio:.2f}", ratio <= 1, "layers"
        memory.append(round(layer["peak_bytes"] / rows["BatchNorm2d"]["peak_bytes"], 2))
    what = "whitening, all of these: memory relative to batch normalization"
    yield what, "at most 1.2", f"at most {max(memory):.2f}", max(memory) <= 1.2, "layers"


def start_bounds():
    found = load("start")["results"]
    above = round(found["import torch, orthocond"]["median"] - found["import torch"]["median"], 2)
    yield "`import orthocond`, above `import torch`", "at most 0.15 s", f"{max(above, 0):.2f} s", above <= 0.15, "start"
    for command in ("orthocond --help", "orthocond list"):
        seconds = round(found[command]["median"], 2)
        yield f"`{command}`", "below 0.4 s", f"{seconds:.2f} s", seconds < 0.4, "start"


def process_bounds():
    for case in (load("processes") or {"results": []})["results"]:
        for way in ("2", "pinned", "own"):
            gain = round(case["gains"][way], 2)
            what = f"{WAYS[way]}, {case['preset']}: times as fast as one"
            yield what, "at least 1.7", f"{gain:.2f}", gain >= 1.7, "processes"


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
    for name, show in {"bounds": bounds, "growth": growth, "processes": processes, "start": start}.items():
        text = text.replace(f"{{{{{name}}}}}", show())
    Path(sys.argv[1]).write_text(text)
    print(f"written to {sys.argv[1]}")
