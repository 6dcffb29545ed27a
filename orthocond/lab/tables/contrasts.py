"""Claims and the contrasts that settle them: paired over seeds, corrected together, each with a verdict."""

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from orthocond.lab.config import Config, Scale, change, flatten, to_json
from orthocond.lab.presets import command_of
from orthocond.lab.runs.files import write_atomically
from orthocond.lab.tables import statistics
from orthocond.lab.tables.comparison import Experiment, FigurePlan, Measure, Outcome, label
from orthocond.lab.tables.drawing import save
from orthocond.lab.tables.figures import verdicts
from orthocond.lab.tables.records import Record
from orthocond.lab.tables.table import Material, Table
from orthocond.lab.tables.text import grid, interval, lowered, number, p_value, spread, write_json

_NOTES = (
    "A contrast is a sum of arms with weights, seed by seed: arms of equal seed start from the same random numbers "
    "and see the same images in the same order. Brackets are 95 % intervals of Student's t. The p-values are "
    "corrected by Holm for all contrasts of the table that have two seeds or more; those of the other outcomes are "
    "corrected measure by measure.",
    "Holds: significantly {better}, as is claimed. Fails: significantly {worse}; for a claim of no difference, "
    "significant on either side and not equivalent. Equivalent: the 90 % interval lies within the margin (two "
    "one-sided tests at 5 %, not corrected), and the difference is not significant or none is claimed. Cannot tell: "
    "none of these, or one seed. Not trained: no seed has all arms yet. The verdict goes by {which} alone.",
)


@dataclass(frozen=True)
class Arm:
    """One side of a contrast.

    Attributes:
        label: What it is called.
        config: Gives its configuration at a scale, with a seed.
        view: What of its evaluation is meant: it stands for ``*`` in the key of a measure.
    """

    label: str
    config: Callable[[Scale, int], Any]
    view: str = ""

    def of(self, measure: Measure, record: Record) -> float | None:
        """The measure of a training of this arm."""
        return replace(measure, key=measure.key.replace("*", self.view)).of(record)


class Term(NamedTuple):
    """An arm with its weight in a contrast."""

    weight: float
    arm: Arm


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of arms that should be on the better side of 0, or 0, if a claim holds.

    Attributes:
        claim: The claim, for people.
        label: What is subtracted from what.
        terms: The arms with their weights.
        seeds: How many seeds are planned at each scale, from 0.
        margin: Differences within ± this do not matter; None where the claim has none.
        same: Whether the claim is that there is no difference.
        measure: Name of the measure by which it is judged; none is the first of the table.
    """

    claim: str
    label: str
    terms: tuple[Term, ...]
    seeds: Mapping[Scale, int]
    margin: float | None = None
    same: bool = False
    measure: str = ""


@dataclass(frozen=True)
class Claims(Table):
    """A table whose rows are contrasts, each with a verdict.

    At scale laptop it has the contrasts at all scales for which seeds are planned; at another scale all contrasts at
    that one. It takes at most as many of the planned seeds as are asked for.

    Attributes:
        contrasts: The rows.
        measures: What counts; the verdict goes by the first, unless a contrast names another.
        setting: What a scale is called, and in parentheses its network and data.
        figures: What is drawn of arms, by their methods; `FigurePlan.rows` says of which.
        notes: What a reader has to know.
    """

    contrasts: tuple[Contrast, ...]
    measures: tuple[Measure, ...]
    setting: Mapping[Scale, str]
    figures: tuple[FigurePlan, ...] = ()
    notes: tuple[str, ...] = ()

    label = staticmethod(label)

    def rows(self, scale: Scale, seeds: int) -> Iterator[tuple[Contrast, Scale, int]]:
        """The contrasts with the scale and the number of seeds of each."""
        for contrast in self.contrasts:
            planned = dict(contrast.seeds) if scale == "laptop" else {scale: max(contrast.seeds.values())}
            for where, count in planned.items():
                yield contrast, where, min(count, seeds)

    def configs(self, scale: Scale, seeds: int) -> list[Config]:
        """All arms of a seed before those of the next, none twice."""
        return list(dict.fromkeys(config for _, config in self.named(scale, seeds)))

    def named(self, scale: Scale, seeds: int) -> Iterator[tuple[str, Config]]:
        """By claim, contrast and the name of the setting; all arms of a seed before those of the next."""
        for seed in range(seeds):
            for contrast, where, count in self.rows(scale, seeds):
                if seed < count:
                    words = f"{contrast.claim}: {contrast.label}, {self.setting.get(where, where).partition(' (')[0]}"
                    yield from ((words, term.arm.config(where, seed)) for term in contrast.terms)

    def write(self, folder: Path, material: Material) -> None:
        """Write table.md, table.json, table.csv and the figures."""
        rows = [self._row(*each, material) for each in self.rows(material.scale, material.seeds)]
        _add_verdicts(rows, self.measures)
        figures = []
        for name, figure in self._draw(rows, material):
            save(figure, folder / name)
            figures.append(name)
        content = {
            "table": self.name,
            "title": self.title,
            "text": self.text,
            "scale": material.scale,
            "seeds": material.seeds,
            "measures": [asdict(measure) for measure in self.measures],
            "contrasts": rows,
            "arms": self._arms(material),
            "verdict": _sentences(rows, self.measures),
            "figures": figures,
            "notes": [*_settings(rows), *self.notes, *_notes(rows, self.measures), *material.remarks],
        }
        write_json(content, folder / "table.json")
        write_atomically(folder / "table.csv", _csv(content).encode())
        write_atomically(folder / "table.md", self._markdown(content).encode())

    def _row(self, contrast: Contrast, scale: Scale, count: int, material: Material) -> dict[str, Any]:
        measures: dict[str, Any] = {}
        for measure in self.measures:
            values = {s: v for s in range(count) if (v := _value(contrast, scale, s, measure, material)) is not None}
            measures[measure.name] = {"seeds": list(values), "values": list(values.values())}
        return {
            "claim": contrast.claim,
            "contrast": contrast.label,
            "scale": scale,
            "setting": self.setting.get(scale, scale),
            "planned": contrast.seeds.get(scale, count),
            "margin": contrast.margin,
            "same": contrast.same,
            "measure": contrast.measure or self.measures[0].name,
            "arms": [{"weight": term.weight, "label": term.arm.label} for term in contrast.terms],
            "measures": measures,
        }

    def _arms(self, material: Material) -> list[dict[str, Any]]:
        """What each arm reached by itself, and how to train it."""
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for contrast, scale, count in self.rows(material.scale, material.seeds):
            for term in contrast.terms:
                configs = [term.arm.config(scale, seed) for seed in range(count)]
                records = [r for c in configs if (r := material.records.get(c)) is not None and r.finished]
                row: dict[str, Any] = {
                    "label": term.arm.label,
                    "scale": scale,
                    "seeds": [record.config.seed for record in records],
                    "stopped": [c.seed for c in configs if c in material.records and not material.records[c].finished],
                    "measures": {
                        m.name: _center([term.arm.of(m, record) for record in records]) for m in self.measures
                    },
                    "cpu_seconds": _center([cpu_seconds(record) for record in records]),
                    "command": command_of(flatten(to_json(configs[0]))),
                }
                key = row["command"], term.arm.view
                known = found.setdefault(key, row)
                if len(row["seeds"]) > len(known["seeds"]):  # other contrasts may have more seeds of it
                    found[key] = row
        return list(found.values())

    def _draw(self, rows: Sequence[dict[str, Any]], material: Material) -> Iterator[tuple[str, Any]]:
        for measure in self.measures:
            own = [row for row in rows if row["measure"] == measure.name]
            if own and (figure := verdicts(own, measure)) is not None:
                yield "claims" if measure is self.measures[0] else f"claims-{measure.name}", figure
        if not self.figures:
            return
        outcomes = []
        for scale in dict.fromkeys(row["scale"] for row in rows):
            records: dict[Any, list[Record]] = {}
            settings: dict[Any, Config] = {}  # arms of one method may differ in schedule or ridge: the first is drawn
            for config in (c for c in self.configs(material.scale, material.seeds) if c.scale == scale):
                first = change(config, {"seed": 0})
                same = settings.setdefault(config.method, first) == first
                if same and (record := material.records.get(config)) is not None:
                    records.setdefault(config.method, []).append(record)
            outcomes.append(Outcome(self, Experiment(self.setting.get(scale, scale), "", {}), records, {}))
        for plan in self.figures:
            shown = [o for o in outcomes if any(o.records.get(row) for row in plan.rows or ())]
            if shown and (figure := plan.draw(shown, plan.rows or ())) is not None:
                yield plan.name, figure

    def _markdown(self, content: dict[str, Any]) -> str:
        named = {measure.name: measure for measure in self.measures}
        judging = _judging(content["contrasts"], self.measures)
        title = f"{judging[0].title} [95 %]" if len(judging) == 1 else "measure [95 %]"
        head = [
            "claim",
            "contrast",
            "verdict",
            title,
            "p (Holm)",
            "within the margin?",
            "seeds",
            "scale",
        ]
        rows = [
            [
                row["claim"],
                row["contrast"],
                f"**{row['verdict']}**",
                ("" if len(judging) == 1 else f"{named[row['measure']].title}: ")
                + interval(found := row["measures"][row["measure"]].get("difference")),
                p_value((found or {}).get("p_holm")),
                _within(row, row["measure"]),
                _seeds(row, row["measure"]),
                row["setting"].partition(" (")[0],
            ]
            for row in content["contrasts"]
        ]
        parts = [f"# {content['title']}", content["text"], grid(head, rows)]
        if others := [measure for measure in self.measures if measure not in judging or len(judging) > 1]:
            parts += ["## The other outcomes", _others(content, others)]
        parts += ["## Arms", _arm_grid(content, self.measures)]
        parts += [f"![{name}]({name}.png)" for name in content["figures"]]
        parts += ["## Notes", "\n".join(f"- {note}" for note in content["notes"])]
        return "\n\n".join(parts) + "\n"


def cpu_seconds(record: Record) -> float | None:
    """Seconds of the processor in all steps of a training; lines of metrics have the mean since the line before.

    Steps after the last line that has a time count like those before it.
    """
    steps, means = record.series("step_cpu_seconds")
    if not steps:
        return None
    starts = [0, *steps[:-1]]
    total = sum(mean * (end - start) for start, end, mean in zip(starts, steps, means, strict=True))
    return total + (record.metrics[-1]["step"] - steps[-1]) * means[-1]


def _value(contrast: Contrast, scale: Scale, seed: int, measure: Measure, material: Material) -> float | None:
    """The contrast of one seed.

    None if an arm is missing, stopped or not measured, or if all arms are views of one training, on which the measure
    does not depend: the difference is then 0 whatever was trained.
    """
    trainings = {arm.config(scale, seed) for _, arm in contrast.terms}
    if len(contrast.terms) > 1 and len(trainings) == 1 and "*" not in measure.key:
        return None
    total = 0.0
    for weight, arm in contrast.terms:
        record = material.records.get(arm.config(scale, seed))
        value = arm.of(measure, record) if record is not None and record.finished else None
        if value is None:
            return None
        total += weight * value
    return total


def _add_verdicts(rows: Sequence[dict[str, Any]], measures: Sequence[Measure]) -> None:
    """Add differences, equivalence, corrected p-values, and verdicts.

    The p-values by which contrasts are judged are corrected together, those of each other measure among themselves. The
    same differences have one p-value: where a contrast is judged by a measure, that is its p-value in all rows.
    """
    for row in rows:
        for cell in row["measures"].values():
            values = cell["values"]
            cell["difference"] = asdict(statistics.paired(values, [0.0] * len(values))) if values else None
            found = statistics.equivalence(values, row["margin"]) if values and row["margin"] else None
            cell["equivalence"] = None if found is None else asdict(found)
    _correct([row["measures"][row["measure"]] for row in rows])
    for measure in measures:
        _correct_others(rows, measure.name)
    higher = {measure.name: measure.higher for measure in measures}
    for row in rows:
        cell = row["measures"][row["measure"]]
        settings = {"same": row["same"], "higher": higher[row["measure"]]}
        row["verdict"] = _verdict(cell["difference"], cell["equivalence"], **settings)


def _correct_others(rows: Sequence[dict[str, Any]], measure: str) -> None:
    """Correct the p-values of a measure where contrasts are judged by another one."""
    decisive = [row["measures"][measure] for row in rows if row["measure"] == measure]
    known = {tuple(cell["values"]): cell["difference"] for cell in decisive}
    others = [row["measures"][measure] for row in rows if row["measure"] != measure]
    _correct(list({key: cell for cell in others if (key := tuple(cell["values"])) not in known}.values()))
    for cell in reversed(others):  # the last cell of equal ones was corrected
        cell["difference"] = known.setdefault(tuple(cell["values"]), cell["difference"])


def _correct(cells: Sequence[dict[str, Any]]) -> None:
    """Add p-values that are corrected by Holm for their number."""
    tested = [d for cell in cells if (d := cell["difference"]) and d["p"] is not None]
    for difference, p in zip(tested, statistics.holm([d["p"] for d in tested]), strict=True):
        difference["p_holm"] = p


def _verdict(
    difference: Mapping[str, Any] | None,
    equivalence: Mapping[str, Any] | None,
    *,
    same: bool,
    higher: bool = False,
) -> str:
    if difference is None:
        return "not trained"
    if difference["p"] is None:
        return "cannot tell"
    within = equivalence is not None and equivalence["p"] < statistics.LEVEL
    significant = difference["p_holm"] < statistics.LEVEL
    if within and (same or not significant):
        return "equivalent within the margin"
    if not significant:
        return "cannot tell"
    return "holds" if (difference["mean"] > 0) == higher and not same else "fails"


def _judging(rows: Sequence[Mapping[str, Any]], measures: Sequence[Measure]) -> list[Measure]:
    """The measures by which contrasts are judged."""
    used = {row["measure"] for row in rows}
    return [measure for measure in measures if measure.name in used]


def _notes(rows: Sequence[Mapping[str, Any]], measures: Sequence[Measure]) -> list[str]:
    judging = _judging(rows, measures)
    above = {measure.higher for measure in judging}
    below = {True: ("above 0", "below 0"), False: ("below 0", "above 0")}
    better, worse = below[above.pop()] if len(above) == 1 else ("on the better side of 0", "on the worse side of 0")
    which = "the first measure" if judging == [measures[0]] else "the measure that it names"
    return [note.format(better=better, worse=worse, which=which) for note in _NOTES]


def _sentences(rows: Sequence[Mapping[str, Any]], measures: Sequence[Measure]) -> list[str]:
    """The verdicts in words, a sentence for each kind and measure."""
    words = {
        "holds": "These hold",
        "fails": "These fail",
        "equivalent within the margin": "No difference that matters",
        "cannot tell": "Not settled",
    }
    found = []
    for verdict, start in words.items():
        for measure in _judging(rows, measures):
            names = dict.fromkeys(
                f"{r['claim']} ({r['contrast']}, {r['setting'].partition(' (')[0]})"
                for r in rows
                if r["verdict"] == verdict and r["measure"] == measure.name
            )
            if names:
                found.append(f"{start}, by {lowered(measure.title)}: {'; '.join(names)}.")
    return found


def _settings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"{text[0].upper()}{text[1:]}." for text in dict.fromkeys(row["setting"] for row in rows)]


def _center(values: Sequence[float | None]) -> dict[str, Any]:
    known = [value for value in values if value is not None]
    if not known:
        return {"mean": None, "std": None, "median": None}
    return {"mean": fmean(known), "std": statistics.std(known), "median": median(known)}


def _digits(measure: Measure) -> int:
    return 2 if "%" in measure.title else 4


def _within(row: Mapping[str, Any], name: str) -> str:
    found = row["measures"][name]["equivalence"]
    if found is None:
        return "–"
    ends = f"[{number(found['low'], sign=True)}, {number(found['high'], sign=True)}]"
    return f"{'yes' if found['p'] < statistics.LEVEL else 'no'}: {ends} in ±{row['margin']:g}"


def _seeds(row: Mapping[str, Any], name: str) -> str:
    count = len(row["measures"][name]["seeds"])
    return str(count) if count == row["planned"] else f"{count} of {row['planned']}"


def _others(content: Mapping[str, Any], measures: Sequence[Measure]) -> str:
    head = ["contrast", "scale"]
    for measure in measures:
        head += [f"{measure.title} [95 %]", "p (Holm)"]
    rows: dict[tuple[str, ...], list[str]] = {}  # a contrast that settles two claims has one line
    for row in content["contrasts"]:
        line = [row["contrast"], row["setting"].partition(" (")[0]]
        for measure in measures:
            found = row["measures"][measure.name]["difference"]
            line += [interval(found, digits=_digits(measure)), p_value((found or {}).get("p_holm"))]
        rows.setdefault(tuple(line[:2]), line)
    return grid(head, list(rows.values()))


def _arm_grid(content: Mapping[str, Any], measures: Sequence[Measure]) -> str:
    head = ["arm", *(m.title for m in measures), "CPU seconds", "seeds", "command"]
    rows = []
    for arm in content["arms"]:
        seeds = str(len(arm["seeds"])) + (f", {len(arm['stopped'])} stopped" if arm["stopped"] else "")
        cells = [spread(arm["measures"][m.name], digits=_digits(m)) for m in measures]
        seconds = number(arm["cpu_seconds"]["median"], 0)
        rows.append([arm["label"], *cells, seconds, seeds, f"`{arm['command']}`"])
    return grid(head, rows)


def _csv(content: Mapping[str, Any]) -> str:
    """A line for each contrast, numbers in full."""
    lines: list[dict[str, Any]] = []
    for row in content["contrasts"]:
        line = {key: row[key] for key in ("claim", "contrast", "scale", "verdict", "measure", "planned", "margin")}
        for name, cell in row["measures"].items():
            found, near = cell["difference"] or {}, cell["equivalence"] or {}
            line[f"{name}_seeds"] = len(cell["seeds"])
            line |= {f"{name}_{key}": found.get(key) for key in ("mean", "low", "high", "p", "p_holm", "p_exact")}
            line |= {f"{name}_equivalence_{key}": near.get(key) for key in ("low", "high", "p")}
        lines.append(line)
    file = io.StringIO()
    writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return file.getvalue()
