"""The report of one run, or of several."""

import os
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from orthocond.lab.report import charts
from orthocond.lab.report.comparison import compare, how_sure, interval
from orthocond.lab.report.content import Block, Chart, Code, Grid, Items, Legend, Page, Picture, Section
from orthocond.lab.report.problems import problems, progress, unequal_length, why_nothing
from orthocond.lab.report.quantities import Quantity, counted, late, listed, number, outcome, quantities
from orthocond.lab.report.sources import (
    Group,
    Training,
    differing,
    group,
    initial_singular_values,
    layers_of,
    singular_values,
    text_of,
    train_command,
)
from orthocond.lab.report.verdict import next_steps, verdict

_SAMPLES = 6  # pictures of a training over its steps
_SHOWN = 6  # trainings whose pictures are in a report
_COLUMNS_UP_TO = 3  # groups that stand side by side
_LOG = 40  # last lines of a log
_FACTS = (
    *("condition", "condition_on_range", "weight_condition", "rank"),
    *("olr_occurrence", "olr_at_floor", "sample_spread", "step_seconds"),
)


def trainings_page(trainings: Sequence[Training], out: Path) -> Page:
    """The report of some trainings.

    Args:
        trainings: The trainings, at least one.
        out: The file that the report will be in, from which links lead to others.
    """
    groups = group(trainings)
    begun = [g for g in groups if any(t.metrics for t in g.trainings)]
    sections = [
        Section("Numbers", [_numbers(begun or groups, len(groups)), *_evaluation(groups)]),
        Section("Curves", _curves(begun)),
        Section("Settings", settings_grids(begun or groups)),
        Section("Samples over training", _samples(groups), "Always the same latents, drawn by the averaged generator."),
        Section("Traversals and effects", _traversals(groups)),
        Section("Spectrum of the treated weight", _spectra(begun)),
        Section("Failures and warnings", _warnings(groups)),
        Section("How to reproduce it", _reproduce(groups)),
    ]
    title, text = _title(trainings, groups)
    return Page(title, text, verdict(groups), next_steps(groups, _explorer(trainings, out)), sections)


def _title(trainings: Sequence[Training], groups: Sequence[Group]) -> tuple[str, str]:
    first = trainings[0]
    config = first.config
    presets = list(dict.fromkeys(str(t.config.get("preset", "")) for t in trainings))
    what = ", ".join(filter(None, presets[:3]))
    if len(trainings) == 1:
        method = f"method {first.method}" if first.method else ""
        parts = [what, f"scale {config['scale']}" if "scale" in config else "", method]
        seed = f"seed {config['seed']}" if "seed" in config else ""
        return first.name, ", ".join(filter(None, [*parts, seed]))
    labels = f"{counted(len(groups), 'setting')}" if len(groups) > 1 else groups[0].label
    title = " against ".join(g.label for g in groups) if len(groups) == 2 else what or "Several runs"
    return title, f"{counted(len(trainings), 'training')}, {labels}" + (
        f", of {what}" if len(groups) == 2 and what else ""
    )


# Numbers


def _numbers(groups: Sequence[Group], total: int) -> Grid:
    """State, outcome, difference and the facts of the last quarter of each group: a row each, a column if few."""
    trainings = [t for g in groups for t in g.trainings]
    quantity = outcome(trainings)
    rows, base = compare(groups, quantity)
    facts = [q for q in quantities(trainings) if q.key in _FACTS]
    head = ["", "Seeds", "State"]
    if quantity is not None:
        head.append(quantity.title)
        if len(groups) > 1:
            head += [f"Difference from {base.label} [95 %]", "How sure"]
    cells = []
    for row in rows:
        line = [row.group.label, str(len(row.group.trainings)), _state(row.group.trainings)]
        if quantity is not None:
            line.append(_spread(quantity, list(row.values.values())))
            if len(groups) > 1:
                factor = 100 if quantity.style == "part" else 1
                sure = "baseline" if row.group is base else how_sure(row.p, row.count)
                if unequal_length([*row.group.trainings, *base.trainings]):
                    sure = "not comparable: unequal length"
                line += [interval(row.difference, row.low, row.high, factor), sure]
        cells.append(line + [_late(row.group, fact) for fact in facts])
    head += [q.title for q in facts]
    notes = ["Condition numbers, rank and times are medians of the last quarter of each training, averaged over seeds."]
    notes = notes if facts else []
    if len(groups) < total:
        left = total - len(groups)
        be = "is" if left == 1 else "are"
        notes.append(f"{counted(left, 'setting')} of which no training has begun {be} left out.")
    if len(groups) <= _COLUMNS_UP_TO:
        head, *cells = map(list, zip(head, *cells, strict=True))
    return Grid(head, cells, note=" ".join(notes))


def _state(trainings: Sequence[Training]) -> str:
    if len(trainings) == 1:
        return progress(trainings[0])
    states = [t.state for t in trainings]
    return ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states))


def _spread(quantity: Quantity, values: Sequence[float]) -> str:
    if not values:
        return "–"
    if len(values) == 1:
        return quantity.write(values[0])
    return f"{quantity.write(fmean(values))} ({quantity.write(min(values))} to {quantity.write(max(values))})"


def _late(group: Group, quantity: Quantity) -> str:
    values = [v for t in group.trainings if (v := late(t, quantity.key)) is not None]
    return quantity.write(fmean(values)) if values else "–"


_KEY_AND_WORD = "recalibrated", "refreshed"  # the key of old records, and what people read everywhere


def _evaluation(groups: Sequence[Group]) -> list[Grid]:
    """Every single number of the evaluations, beside each other."""
    measured = [(g.label, t) for g in groups for t in g.trainings if t.evaluation]
    paths = list(dict.fromkeys(path for _, t in measured for path, _ in _numbers_in(t.evaluation)))
    if not paths:
        return []
    shown = measured[:12]
    head = ["", *(f"{label}, seed {t.config.get('seed', '–')}" if len(shown) > 1 else "value" for label, t in shown)]
    rows = [[path.replace(*_KEY_AND_WORD), *(number(t.number(path), 4) for _, t in shown)] for path in paths]
    left = f" The first {len(shown)} of {len(measured)} are shown." if len(shown) < len(measured) else ""
    key, word = _KEY_AND_WORD
    also = f", where {word} is {key}" if any(key in path for path in paths) else ""
    note = f"As in evaluation.json{also}.{left}"
    return [Grid(head, rows, "Everything that the evaluation measured", note, folded=True)]


def _numbers_in(values: Any, prefix: str = "") -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for key, value in values.items():
        if isinstance(value, dict):
            found += _numbers_in(value, f"{prefix}{key}.")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found.append((prefix + key, float(value)))
    return found


def _curves(groups: Sequence[Group]) -> Sequence[Block]:
    """A chart for each quantity that changes; one sentence for those that do not."""
    names = [g.label for g in groups]
    trainings = [t for g in groups for t in g.trainings]
    found: list[Chart] = []
    still = []
    for quantity in quantities(trainings):
        if (chart := charts.curves(groups, quantity, names)) is not None:
            found.append(chart)
        elif len(values := {v for t in trainings for _, v in t.series(quantity.key)}) == 1:
            still.append(f"{quantity.title}: {quantity.write(values.pop())} in every line.")
    points = max((len(t.metrics) for t in trainings), default=0)
    legend = [Legend(names if len(names) > 1 else [], points)] if found else []
    return [*legend, *found, *([Items(still)] if still else [])]


# Settings


def settings_grids(groups: Sequence[Group]) -> list[Grid]:
    """The settings that differ between groups, and those that all have in common."""
    trainings = [t for g in groups for t in g.trainings]
    grids = []
    if len(groups) > 1:
        paths = differing([g.first for g in groups], seeds=False)
        settings = [g.first.settings for g in groups]
        if len(groups) <= 4:
            head = ["setting", *(g.label for g in groups)]
            rows = [[path, *(text_of(each.get(path)) for each in settings)] for path in paths]
        else:
            head = ["", *paths]
            rows = [[g.label, *(text_of(s.get(p)) for p in paths)] for g, s in zip(groups, settings, strict=True)]
        note = "" if paths else "No setting differs but the seed."
        grids.append(Grid(head, rows if paths else [], "What differs", note, words=True))
    common = [p for p in trainings[0].settings if p not in differing(trainings)]
    rows = [[path, text_of(trainings[0].settings[path])] for path in common]
    title = "All settings" if len(trainings) == 1 else "What all have in common"
    return [*grids, Grid(["setting", "value"], rows, title, folded=True, words=True)]


# Pictures


def _shown(groups: Sequence[Group]) -> list[tuple[str, Training]]:
    """The first training of each group that has a folder; pictures of all would be too many."""
    found = [(g.label, t) for g in groups for t in g.trainings[:1] if t.folder is not None]
    return found[:_SHOWN]


def _samples(groups: Sequence[Group]) -> list[Picture]:
    pictures = []
    shown = _shown(groups)
    for label, training in shown:
        files = sorted((training.folder / "figures").glob("samples-*.png")) if training.folder else []
        places = sorted({round(i * (len(files) - 1) / (_SAMPLES - 1)) for i in range(_SAMPLES)}) if files else []
        for file in (files[place] for place in places):
            step = int(file.stem.partition("-")[2] or 0) if file.stem.partition("-")[2].isdecimal() else 0
            caption = f"step {step:,}" if len(shown) == 1 else f"{label}, step {step:,}"
            pictures.append(Picture(file.read_bytes(), caption, f"Images that {label} generates at step {step:,}."))
    return pictures


def _traversals(groups: Sequence[Group]) -> list[Picture]:
    pictures = []
    words = {
        "traversal": "traversal: each row moves one latent direction, everything else stays",
        "effects": "effect of each direction on each true factor",
    }
    for label, training in _shown(groups):
        for kind, meaning in words.items():
            for file in sorted((training.folder / "figures").glob(f"{kind}-*.png")) if training.folder else []:
                caption = f"{label}: {file.stem.removeprefix(f'{kind}-')}, {meaning}."
                pictures.append(Picture(file.read_bytes(), caption, caption, wide=True))
    return pictures


# Spectra


def _spectra(groups: Sequence[Group]) -> Sequence[Block]:
    """Singular values at the end where they are known, and the ends of the spectrum at the start and at the end."""
    rows = [row for g in groups for row in _ends(g)]
    known = {g.label: values for g in groups if (values := singular_values(g.first))}
    initial = {g.label: values for g in groups if g.label in known and (values := initial_singular_values(g.first))}
    names = [g.label for g in groups]
    chart = charts.spectra(initial, known, names)
    head = ["", "κ(W) first", "κ(W) last", "largest, first → last", "smallest, first → last"]
    before = [Grid(head[: max(map(len, rows))], rows, "First and last line of the metrics")] if rows else []
    if chart is None:
        return before
    unknown = [name for name in names if name not in known]
    missing = [Items([f"The singular values of {listed(unknown)} are not stored."])] if unknown else []
    return [*before, *([Legend(names)] if len(names) > 1 else []), chart, *missing]


def _ends(group: Group) -> list[list[str]]:
    """A row for each layer of the first training of a group."""
    if values := group.first.series("weight_condition"):
        return [[group.label, number(values[0][1]), number(values[-1][1])]]
    lines = [layers for line in group.first.metrics if (layers := layers_of(line))]
    if not lines:
        return []
    several = len(lines[0]) > 1
    rows = []
    for i, (first, last) in enumerate(zip(lines[0], lines[-1], strict=False), 1):
        conditions, largest, smallest = ([number(a), number(b)] for a, b in zip(first, last, strict=True))
        label = f"{group.label}, layer {i}" if several else group.label
        rows.append([label, *conditions, " → ".join(largest), " → ".join(smallest)])
    return rows


# The rest


def _warnings(groups: Sequence[Group]) -> list[Items]:
    several = sum(len(g.trainings) for g in groups) > 1
    texts, logs = [], []
    for each in groups:
        for training in each.trainings:
            name = f"{each.label}, seed {training.config.get('seed', '–')}: " if several else ""
            texts += [name + text for text in problems(training)] if training.state != "created" or not several else []
            if training.log:
                logs.append(Items(training.log[-_LOG:], f"Log of {training.name}", folded=True, plain=True))
    trainings = [t for g in groups for t in g.trainings]
    if any(t.metrics for t in trainings) and (why := why_nothing(trainings)):
        what = "from these trainings" if several else "from this training"
        what = "about which is better" if len(groups) > 1 else what
        texts.append(f"Nothing can be told {what}: {why}.")
    waiting = sum(t.state == "created" for g in groups for t in g.trainings)
    texts += (
        [f"{counted(waiting, 'training')} {'has' if waiting == 1 else 'have'} not begun."]
        if waiting and several
        else []
    )
    return [
        Items(texts or ["None: every training finished, all numbers are finite, no solver failed."]),
        *logs[:_SHOWN],
    ]


def _reproduce(groups: Sequence[Group]) -> list[Code]:
    commands = [c for g in groups if (c := train_command(g.first)) is not None]
    seeds = max(len(g.trainings) for g in groups)
    text = "The same training again:" if len(groups) == 1 else "The same trainings again:"
    text += " (with the other values of `--seed` too)" if seeds > 1 else ""
    folders = [str(t.folder) for g in groups for t in g.trainings if t.folder]
    if len(folders) > 4:
        folders = sorted({str(Path(folder).parent) for folder in folders})
    again = [Code("This page again:", f"orthocond report {' '.join(folders)}")]
    if not commands:
        return [Code("The settings of this run are in its `config.json`; it is not of a preset of orthocond."), *again]
    return [Code(text, "\n".join(commands)), *again]


def _explorer(trainings: Sequence[Training], out: Path) -> Code | None:
    """The explorer of a GAN, if it has been written; else the command that writes it."""
    gans = [t for t in trainings if t.is_gan and t.folder is not None and (t.metrics or t.state == "finished")]
    for training in gans:
        file = training.folder / "explore.html"  # type: ignore[operator]
        if file.is_file():
            link = Path(os.path.relpath(file.resolve(), out.resolve().parent)).as_posix()
            return Code(f"Walk through the latents of {training.name} in your browser:", link=link)
    names = " ".join(str(t.folder) for t in gans[:4])
    return Code("Walk through the latents in your browser:", f"orthocond explore {names}") if gans else None
