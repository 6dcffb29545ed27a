"""The report of a table of the paper."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from orthocond.lab.report import charts
from orthocond.lab.report.comparison import how_sure, interval
from orthocond.lab.report.content import Block, Chart, Code, Grid, Items, Legend, Page, Picture, Section
from orthocond.lab.report.problems import dead_discriminator
from orthocond.lab.report.quantities import compared, counted, listed, number, quantities, signed
from orthocond.lab.report.sources import Group, WrittenTable
from orthocond.lab.report.trainings import settings_grids
from orthocond.lab.report.verdict import OWN_GENERATOR, OWN_MODEL
from orthocond.lab.tables.text import lowered, seeds_of, trained, untrained

_CHARTS = 3  # measures whose differences are shown as charts
_OPEN = 2  # measures whose tables are open
_FEW_EMPTY = 3  # rows without numbers that need no folding
Row = Mapping[str, Any]


def table_page(table: WrittenTable) -> Page:
    """The report of a table: of a comparison of methods in full, of another one with its numbers."""
    content = table.content
    text = str(content.get("text", ""))
    if "experiments" not in content:
        return _plain_page(table, text)
    base = _baseline(content)
    warnings = _warnings(table)
    sections = [_numbers(content, each, base) for each in content["experiments"]]
    for each in content["experiments"]:
        several = f": {each['label']}" if len(content["experiments"]) > 1 else ""
        groups = _groups(table, each)
        sections.append(Section(f"Curves{several}", _curves(groups)))
        sections.append(Section(f"Settings{several}", settings_grids(groups) if groups else []))
    sections += [
        Section("Figures", _figures(table.folder, content["figures"])),
        Section(
            "Failures and warnings", [Items(warnings or ["None: all trainings have finished, and no solver failed."])]
        ),
        Section("What to know", [Items(content["notes"])] if content["notes"] else []),
        Section("How to reproduce it", _reproduce(content)),
    ]
    about = f"{text} {counted(_trainings(content), 'training')} at the scale of a {content['scale']}."
    if content["scale"] == "paper":
        about = about.replace("the scale of a paper", "the paper's scale")
    *first, last = verdict(content)
    which = counted(len(warnings), "warning") if len(warnings) > 1 else "warning"
    last += f" Before you believe it, read the {which} below." if warnings else ""
    return Page(content["title"], about.strip(), [*first, last], _steps(content), sections)


def _baseline(content: Mapping[str, Any]) -> str:
    rows = [row for each in content["experiments"] for row in each["rows"]]
    return next((r["label"] for r in rows if r["method"]["name"] == content["baseline"]), content["baseline"])


def _trainings(content: Mapping[str, Any]) -> int:
    return sum(len(row["seeds"]) for each in content["experiments"] for row in each["rows"])


# In words


def verdict(content: Mapping[str, Any]) -> list[str]:
    """Which methods differ, whether that agrees with the paper, and how small a difference could be seen."""
    measure = content["measures"][0]
    cells = [
        (each["label"], row["label"], row["measures"][measure["name"]])
        for each in content["experiments"]
        for row in each["rows"]
        if row["method"]["name"] != content["baseline"]
    ]
    return [_differs(content, measure, cells), _agrees(cells), _sees(content, cells)]


def _differs(content: Mapping[str, Any], measure: Mapping[str, Any], cells: Sequence[Any]) -> str:
    base = _baseline(content)
    tested = [(where, label, d) for where, label, cell in cells if (d := cell.get("difference"))]
    several = len(content["experiments"]) > 1
    if not tested:
        return f"Nothing can be compared with {base} yet: no trainings with the same seeds have finished."
    found = {
        kind: [f"{label} ({where})" if several else label for where, label, d in tested if d.get("verdict") == kind]
        for kind in ("better", "worse")
    }
    title = f"{measure['title']}, {'higher' if measure['higher'] else 'lower'} is better"
    words = [f"{listed(names)} {_be(names)} {kind} than {base}" for kind, names in found.items() if names]
    rest = len(tested) - sum(map(len, found.values()))
    if not words:
        return f"{title}: none of {counted(rest, 'difference')} from {base} is more than chance can explain."
    others = f"; the other {counted(rest, 'difference')} may be chance" if rest else ""
    return f"{title}: {'; '.join(words)}, by more than chance can explain{others}."


def _be(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _agrees(cells: Sequence[Any]) -> str:
    pairs = [
        (c["paper_difference"], c["difference"]) for *_, c in cells if c.get("paper_difference") and c.get("difference")
    ]
    if not pairs:
        known = any(cell["paper"] for *_, cell in cells)
        why = "no number for the baseline, so its differences are not known" if known else "no numbers for these rows"
        return f"The paper gives {why}; nothing can be compared with it."
    same = [ours for theirs, ours in pairs if theirs["mean"] * ours["mean"] > 0]
    sure = sum(d.get("verdict") in ("better", "worse") for d in same)
    against = sum(d.get("verdict") in ("better", "worse") for _, d in pairs) - sure
    text = f"{len(same)} of the paper's {counted(len(pairs), 'difference')} have the same sign here"
    text += f", {sure or 'none'} of them by more than chance" if same else ""
    return f"{text}; {against or 'none'} {'has' if against == 1 else 'have'} surely the opposite sign."


def _sees(content: Mapping[str, Any], cells: Sequence[Any]) -> str:
    halves = [(d["high"] - d["low"]) / 2 for *_, c in cells if (d := c.get("difference")) and d.get("low") is not None]
    paper = [abs(c["paper_difference"]["mean"]) for *_, c in cells if c.get("paper_difference")]
    seeds = counted(content["seeds"], "seed")
    if not halves:
        return f"With {seeds} there are no intervals: any difference may be chance."
    half = median(halves)
    text = f"With {seeds} the 95 % intervals typically reach ±{number(half, 2)} around a difference"
    if paper:
        size = median(paper)
        seen = "could not be seen reliably" if size < half else "could be seen"
        text += f"; differences of the paper's typical size, {number(size, 2)}, {seen}"
    if content["scale"] != "paper":
        text += "; this is not the paper's setting, so only differences compare, not the numbers themselves"
    return f"{text}."


def _steps(content: Mapping[str, Any]) -> list[Code]:
    more = f"{_command(content)} --seeds {2 * content['seeds']}"
    steps = [Code("Be surer, with more seeds; what is finished is not repeated:", more)]
    if content["scale"] != "paper":
        paper = f"orthocond table {content['table']} --scale paper"
        steps.append(Code("The paper's own setting, if you have the hardware:", paper))
    gan = content["experiments"][0]["preset"].startswith(("gan", "eigengan"))
    return [*steps, OWN_GENERATOR if gan else OWN_MODEL]


def _command(content: Mapping[str, Any]) -> str:
    """What makes the table again at its scale."""
    scale = content.get("scale") or "laptop"
    return f"orthocond table {content['table']}" + ("" if scale == "laptop" else f" --scale {scale}")


# Tables


def _numbers(content: Mapping[str, Any], experiment: Row, base: str) -> Section:
    """All numbers of an experiment; rows without any training are only named."""
    rows, gaps = trained(experiment), untrained(experiment)
    blocks = [*_measures(content, rows, base), _facts(rows, content, base)] if rows else [Items([gaps])]
    return Section(experiment["label"], blocks, gaps if rows else "")


def _measures(content: Mapping[str, Any], rows: Sequence[Row], base: str) -> list[Block]:
    """For each measure: paper, ours, interval, how sure; the first ones also as charts."""
    blocks: list[Block] = []
    if len(content["measures"]) > _CHARTS:
        blocks.append(_overview(content, rows))
    for place, measure in enumerate(content["measures"]):
        if not any(row["measures"][measure["name"]]["mean"] is not None for row in rows):
            continue
        blocks.append(_measure_grid(content, rows, measure, base, folded=place >= _OPEN))
        if place < _CHARTS and (chart := _differences(rows, measure, base)) is not None:
            blocks.append(chart)
    return blocks


def _measure_grid(content: Mapping[str, Any], rows: Sequence[Row], measure: Row, base: str, folded: bool) -> Grid:
    lines, strong = [], set()
    papers = any(row["measures"][measure["name"]]["paper"] for row in rows)
    gaps = any(row["measures"][measure["name"]].get("paper_difference") for row in rows)
    for place, row in enumerate(rows):
        cell = row["measures"][measure["name"]]
        ours, theirs = cell.get("difference") or {}, cell.get("paper_difference") or {}
        is_base = row["method"]["name"] == content["baseline"]
        line = [row["label"], _center(cell["paper"])] if papers else [row["label"]]
        line += [_center(cell), seeds_of(row, cell, content["seeds"])]
        line += [interval(theirs.get("mean"), theirs.get("low"), theirs.get("high"))] if gaps else []
        line += [interval(ours.get("mean"), ours.get("low"), ours.get("high"))]
        lines.append([*line, "baseline" if is_base else _sureness(ours)])
        if ours.get("verdict") in ("better", "worse"):
            strong.add(place)
    head = ["", *(["paper"] if papers else []), "ours", "seeds"]
    head += [*([f"paper − {base} [95 %]"] if gaps else []), f"ours − {base} [95 %]", "how sure"]
    better = "higher" if measure["higher"] else "lower"
    note = "Mean ± deviation over seeds; intervals are paired by seed; p is corrected for the number of rows (Holm)."
    return Grid(head, lines, f"{measure['title']}, {better} is better", note, folded, frozenset(strong))


def _sureness(difference: Mapping[str, Any]) -> str:
    if not difference:
        return "–"
    text = how_sure(difference.get("p_holm"), difference.get("count") or 1)
    kind = difference.get("verdict")
    return text.replace("significant", f"significantly {kind}", 1) if kind in ("better", "worse") else text


def _center(cell: Mapping[str, Any] | None) -> str:
    if cell is None or cell["mean"] is None:
        return "–"
    return f"{cell['mean']:.2f}".replace("-", "−") + ("" if cell["std"] is None else f" ± {cell['std']:.2f}")


def _overview(content: Mapping[str, Any], known: Sequence[Row]) -> Grid:
    marks = {"better": " ▲", "worse": " ▼"}
    rows = []
    for row in known:
        cells = [row["measures"][m["name"]] for m in content["measures"]]
        verdicts = [(cell.get("difference") or {}).get("verdict", "") for cell in cells]
        texts = [_center(c) + marks.get(v, "") for c, v in zip(cells, verdicts, strict=True)]
        rows.append([row["label"], *texts])
    head = [f"{m['title']} {'↑' if m['higher'] else '↓'}" for m in content["measures"]]
    note = "▲ significantly better than the baseline, ▼ significantly worse; ↑ higher is better, ↓ lower is better."
    return Grid(["", *head], rows, "Everything at a glance", note)


def _differences(rows: Sequence[Row], measure: Row, base: str) -> Chart | None:
    points = []
    for row in rows:
        cell = row["measures"][measure["name"]]
        for who, key in (("ours", "difference"), ("paper", "paper_difference")):
            if found := cell.get(key):
                ends = {end: found.get(end) if found.get(end) is not None else found["mean"] for end in ("low", "high")}
                sure = _sureness(found) if who == "ours" else "as published"
                label = row["label"].removeprefix("SVD + ")
                points.append({"label": label, "who": who, "mean": found["mean"], "sure": sure} | ends)
    sides = "Left is better" if not measure["higher"] else "Right is better"
    who = "ours and the paper's" if any(p["who"] == "paper" for p in points) else "ours"
    text = f"Each method minus {base}, with 95 % intervals, {who}. {sides}; the table above has the numbers."
    return charts.differences(points, f"{measure['title']}: differences from {base}", text, f"difference from {base}")


def _facts(known: Sequence[Row], content: Mapping[str, Any], base: str) -> Grid:
    columns: list[tuple[str, list[str]]] = []
    for fact in content["facts"]:
        cells = [row["facts"][fact["key"]] for row in known]
        if any(cell["paper"] is not None for cell in cells):
            texts = ["–" if cell["paper"] is None else str(cell["paper"]) for cell in cells]
            columns.append((f"paper: {fact['paper_title'] or fact['title']}", texts))
        if any(cell["mean"] is not None for cell in cells):
            columns.append((fact["title"], [_fact(cell["mean"], fact["style"]) for cell in cells]))
        if any(cell.get("ratio") for cell in cells):
            columns.append((f"times {base} [95 %]", [_ratio(cell.get("ratio")) for cell in cells]))
    rows = [[row["label"], *(texts[i] for _, texts in columns)] for i, row in enumerate(known)]
    return Grid(["", *(title for title, _ in columns)], rows, "Conditioning and cost")


def _fact(value: float | None, style: str) -> str:
    if value is None:
        return "–"
    if style == "percent":
        return f"{100 * value:.0f} %"
    return f"{1000 * value:,.0f}" if style == "milliseconds" else number(value, 2 if style == "log" else 3)


def _ratio(ratio: Mapping[str, Any] | None) -> str:
    if not ratio:
        return "–"
    ends = f" [{number(ratio['low'], 2)}, {number(ratio['high'], 2)}]" if ratio.get("low") is not None else ""
    return f"×{number(ratio['mean'], 2)}{ends}"


# The rest


def _groups(table: WrittenTable, experiment: Row) -> list[Group]:
    """The kept trainings of each method."""
    label = experiment["label"]
    return [Group(row["label"], found) for row in experiment["rows"] if (found := table.trainings[label, row["label"]])]


def _curves(groups: Sequence[Group]) -> list[Block]:
    """Curves of the kept trainings, a line for each method."""
    trainings = [t for g in groups for t in g.trainings]
    if not trainings:
        return []
    names = [g.label for g in groups]
    curves = [chart for q in quantities(trainings) if (chart := charts.curves(groups, q, names)) is not None]
    points = max(len(t.metrics) for t in trainings)
    return [Legend(names, points), *curves] if curves else []


def _figures(folder: Path, names: Sequence[str]) -> list[Picture]:
    """Pictures that are no charts: samples, traversals and effects. The charts are made anew, with hover."""
    pictures = "samples", "traversals", "effects", "predictability"
    return _pictures(folder, [name for name in names if name.startswith(pictures)])


def _pictures(folder: Path, names: Sequence[str]) -> list[Picture]:
    return [
        Picture(file.read_bytes(), name.replace("-", " ").capitalize(), f"Figure {name} of the table.", wide=True)
        for name in names
        if (file := folder / f"{name}.png").is_file()
    ]


def _warnings(table: WrittenTable) -> list[str]:
    content, texts = table.content, []
    for each in content["experiments"]:
        texts += [f"{each['label']}: {lowered(text)}" for text in (untrained(each),) if text]
        for row in trained(each):
            where = f"{each['label']}, {row['label']}"
            texts += [
                f"{where}, seed {s['seed']} did not finish: {s['why'] or 'it was stopped'}." for s in row["stopped"]
            ]
            if row["missing"]:
                texts.append(f"{where}: seeds {listed([str(s) for s in row['missing']])} are missing.")
            failures = (row["facts"].get("solver_failures") or {}).get("high")
            if failures:
                texts.append(f"{where}: the decomposition failed for up to {failures:.0f} matrices of a training.")
            dead = [text for t in table.trainings[each["label"], row["label"]] if (text := dead_discriminator(t))]
            texts += [f"{where}, {counted(len(dead), 'training')}: {dead[0]}"] if dead else []
    return texts


def _reproduce(content: Mapping[str, Any]) -> list[Code]:
    command = _command(content) + (f" --seeds {content['seeds']}" if "seeds" in content else "")
    return [
        Code("Train what is missing and make the table:", command),
        Code("Make it from what is there, without training:", f"{command} --no-train"),
    ]


# Tables that are no comparison of methods over seeds


def _plain_page(table: WrittenTable, text: str) -> Page:
    content = table.content
    sections = [Section(title or "Numbers", grids) for title, grids in _markdown(table.markdown)]
    sections.append(Section("Figures", _pictures(table.folder, content.get("figures") or [])))
    notes = content.get("notes") or []
    command = [Code("Make it again:", _command({"table": table.folder.name, **content}))]
    command = _reproduce(content) if "contrasts" in content else command
    sections += [Section("What to know", [Items(notes)] if notes else []), Section("How to reproduce it", command)]
    bench = Code("Time a preset of yours:", "orthocond bench PRESET")
    step = OWN_MODEL if "verdict" in content else bench
    return Page(content["title"], text, _plain_verdict(content), [step], sections)


def _claims_verdict(rows: Sequence[Row], titles: Mapping[str, str]) -> list[str]:
    """How many claims are settled and how, which of them hold, and which fail."""
    kinds = {
        "holds": ("holds", "hold"),
        "fails": ("fails", "fail"),
        "equivalent within the margin": ("makes no difference that matters", "make no difference that matters"),
        "cannot tell": ("cannot be told yet", "cannot be told yet"),
        "not trained": ("has not been trained", "have not been trained"),
    }
    by = {verdict: [row for row in rows if row["verdict"] == verdict] for verdict in kinds}
    counts = listed([counted(len(by[verdict]), *verbs) for verdict, verbs in kinds.items() if by[verdict]])
    measures = {titles[row["measure"]] for row in rows}
    settings = {row["setting"] for row in rows}

    def words(row: Row) -> str:
        found = f"{row['claim']} ({row['contrast']}: {signed(row['measures'][row['measure']]['difference']['mean'])}"
        found += f" in {titles[row['measure']]}" if len(measures) > 1 else ""
        return found + (f", {row['setting'].partition(' (')[0]})" if len(settings) > 1 else ")")

    one = f", by {measures.pop()}" if len(measures) == 1 else ""
    return [
        f"Of {counted(len(rows), 'contrast')}{one}, {counts}.",
        f"These hold: {listed(list(map(words, by['holds'])))}." if by["holds"] else "No claim holds significantly.",
        f"These fail: {listed(list(map(words, by['fails'])))}." if by["fails"] else "None fails significantly.",
    ]


def _plain_verdict(content: Mapping[str, Any]) -> list[str]:
    if "contrasts" in content:
        titles = {measure["name"]: lowered(measure["title"]) for measure in content["measures"]}
        return _claims_verdict(content["contrasts"], titles)
    if "verdict" in content:
        return list(content["verdict"])
    if "rows" in content:
        rows = [row for row in content["rows"] if row.get("ours")]
        slow = max(rows, key=lambda row: row["ours"]["total"])
        fast = min(rows, key=lambda row: row["ours"]["total"])
        costs = {key: median(row["ours"][key] for row in rows) for key in ("forward", "backward", "step")}
        most = max(costs, key=costs.__getitem__)
        both = [row for row in rows if row.get("paper")]
        gap = max(both, key=lambda r: abs(r["ours"]["relative"] - r["paper"]["relative"]), default=None)
        return [
            f"{fast['label']} is the fastest with {fast['ours']['total']:.0f} ms a step and {slow['label']} the "
            f"slowest with {slow['ours']['total']:.0f} ms, {compared(slow['ours']['total'], fast['ours']['total'])}.",
            f"Most of a step is its {most} part, {costs[most]:.0f} ms; the optimizer takes {costs['step']:.2g} ms.",
            "The paper gives no times."
            if gap is None
            else f"Relative to the baseline the paper differs most for {gap['label']}: {gap['paper']['relative']:.2f} "
            f"there, {gap['ours']['relative']:.2f} here.",
        ]
    rows = [(net["title"], name, row) for net in content.get("networks", ()) for name, row in net["rows"].items()]
    bad = [f"{name} on {net}" for net, name, row in rows if not row["finite"]]
    if not rows:
        return ["This table has numbers of its own kind; they are below."]
    slow = max(rows, key=lambda row: row[2]["seconds"])
    return [
        f"{counted(len(rows), 'pair')} of a method and a network made real steps at full size.",
        f"A loss was not finite with {listed(bad)}." if bad else "All losses are finite.",
        f"The slowest step is that of {slow[1]} on {slow[0]}, {slow[2]['seconds']:.1f} s.",
    ]


def _markdown(text: str) -> Iterator[tuple[str, list[Grid]]]:
    """The grids of a table's own text, by the headings before them."""
    for part in re.split(r"^## ", f"\n{text}", flags=re.MULTILINE):
        title = part.partition("\n")[0] if not part.startswith("\n") else ""
        grids = []
        for block in re.findall(r"(?:^\|.*\n)+", f"{part}\n", flags=re.MULTILINE):
            lines = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in block.splitlines()]
            if len(lines) > 2:
                grids += _grids(lines[0], lines[2:])
        if grids:
            yield title, grids


def _grids(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[Grid]:
    """A table with columns of words on the left; rows without any number are folded away, if they are many."""
    texts = frozenset(i for i in range(1, len(head)) if _are_words([row[i] for row in rows if i < len(row)]))
    empty = [
        all(re.fullmatch(r"|–|0( of \d+)?", cell) for i, cell in enumerate(row) if i and i not in texts) for row in rows
    ]
    if not _FEW_EMPTY < sum(empty) < len(rows):
        return [Grid(head, rows, texts=texts)]
    known, unknown = ([row for row, e in zip(rows, empty, strict=True) if e == which] for which in (False, True))
    title = f"{counted(len(unknown), 'row')} without numbers yet"
    return [Grid(head, known, texts=texts), Grid(head, unknown, title, folded=True, texts=texts)]


def _are_words(cells: Sequence[str]) -> bool:
    """Whether most cells that are not empty begin with a letter."""
    filled = [cell.lstrip("*`(") for cell in cells if cell not in ("", "–")]
    return sum(cell[:1].isalpha() for cell in filled) > len(filled) / 2
