"""The paper's table of times: forward and backward pass of each method."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from orthocond.lab.bench import ROUNDS, bench
from orthocond.lab.classification import paper
from orthocond.lab.classification.config import Method
from orthocond.lab.classification.presets import PRESETS
from orthocond.lab.classification.tables import heading
from orthocond.lab.classification.task import ClassificationTask
from orthocond.lab.progress import Progress
from orthocond.lab.tables.comparison import label
from orthocond.lab.tables.drawing import dress, new_figure, save, title
from orthocond.lab.tables.measured import Measured
from orthocond.lab.tables.table import Material, Table
from orthocond.lab.tables.text import grid, number

_PRESET = "dbn-cifar100-resnet50"
_PARTS = {"forward": "#56B4E9", "backward": "#0072B2", "step": "#E69F00"}
_NOTES = (
    "Ours are medians of steps in which the methods take turns, on sprites of the same size.",
    "NOG and OLR act in the step of the optimizer, which the paper counts as backward pass: compare its backward pass "
    "with our backward pass and step together.",
    "The paper's times are of an RTX A6000; compare ratios to SVD, not milliseconds.",
)


@dataclass(frozen=True)
class Timing(Measured):
    """Milliseconds of the parts of a training step."""

    def measure(self, material: Material) -> dict[str, Any]:
        """Medians of steps in which the methods take turns."""
        config = PRESETS[_PRESET][material.scale]
        device = torch.accelerator.current_accelerator() or torch.device("cpu")
        # A step at the paper's scale takes a CPU many seconds.
        repeats = 1 if material.scale == "paper" and device.type == "cpu" else 10

        def progress(done: int, rounds: int) -> None:
            if material.progress is not None:
                material.progress(0, Progress(done, rounds, {}))

        times = bench(ClassificationTask, config, list(paper.MILLISECONDS), repeats=repeats, progress=progress)
        rows: list[dict[str, Any]] = []
        for name, (forward, backward) in paper.MILLISECONDS.items():
            found = times[name]
            ours = found.parts | {"total": found.total}
            theirs = {"forward": forward, "backward": backward, "total": forward + backward}
            rows.append({"method": name, "label": label(Method(name)), "ours": ours, "paper": theirs})
        for side in ("ours", "paper"):
            base = next(row[side]["total"] for row in rows if row["method"] == "svd")
            for row in rows:
                row[side]["relative"] = row[side]["total"] / base
        return self.header(material) | {
            "device": device.type,
            "threads": 1,
            "batch_size": config.schedule.batch_size,
            "repeats": ROUNDS * repeats,
            "rows": rows,
        }

    def lines(self, content: Mapping[str, Any]) -> list[dict[str, Any]]:
        """A line for each method."""
        return [
            {"method": row["method"], "label": row["label"]}
            | {f"{side}_{key}": value for side in ("ours", "paper") for key, value in row[side].items()}
            for row in content["rows"]
        ]

    def markdown(self, content: Mapping[str, Any]) -> str:
        """The methods, the paper's times beside ours."""
        return _markdown(content)

    def draw(self, content: Mapping[str, Any], folder: Path) -> None:
        """Draw the parts of a step as bars."""
        save(_figure(content), folder / "time")


def _settings(content: Mapping[str, Any]) -> dict[str, str]:
    """The network and images of each side: ours are sprites in the place of the data set."""
    ours, theirs = (heading(PRESETS[_PRESET][scale]).split(", ") for scale in (content["scale"], "paper"))
    return {"ours": f"{ours[0]}, sprites, {ours[-1]}", "paper": ", ".join(theirs)}


def _markdown(content: Mapping[str, Any]) -> str:
    head = ["method", "paper FP", "paper BP", "paper / SVD", "FP", "BP", "step", "FP + BP + step", "ours / SVD"]
    rows = []
    for row in content["rows"]:
        ours, theirs = row["ours"], row["paper"]
        milliseconds = [number(ours[key], 1) for key in ("forward", "backward", "step", "total")]
        paper_side = [number(theirs["forward"], 0), number(theirs["backward"], 0), number(theirs["relative"])]
        rows.append([row["label"], *paper_side, *milliseconds, number(ours["relative"])])
    where = (
        f"Scale {content['scale']}, batches of {content['batch_size']} images, {content['device']}, "
        f"{content['threads']} thread(s), {content['repeats']} steps of each method."
    )
    notes = "\n".join(f"- {note}" for note in (where, *_NOTES))
    settings = _settings(content)
    about = f"Network and data: ours {settings['ours']}; the paper's {settings['paper']}."
    return "\n\n".join(
        [
            f"# {content['title']}",
            f"{content['text']} {about}",
            grid(head, rows),
            "![time](time.png)",
            "## Notes",
            notes + "\n",
        ]
    )


def _figure(content: Mapping[str, Any]) -> Any:
    """Bars of the parts of a step, ours and the paper's; a line marks the total of SVD."""
    rows = content["rows"]
    figure = new_figure(9.2, 0.32 * len(rows) + 1.4)
    for place, (side, where) in enumerate(_settings(content).items()):
        axes = figure.add_axes((0.27 + 0.37 * place, 0.13, 0.34, 0.65))
        dress(axes)
        start = [0.0] * len(rows)
        for part, tint in _PARTS.items():
            lengths = [row[side].get(part, 0.0) for row in rows]
            axes.barh(range(len(rows)), lengths, left=start, color=tint, height=0.62, label=part)
            start = [a + b for a, b in zip(start, lengths, strict=True)]
        for y, (end, row) in enumerate(zip(start, rows, strict=True)):
            text = f"×{row[side]['relative']:.2f}"
            axes.annotate(text, (end, y), xytext=(3, 0), textcoords="offset points", va="center", size=8)
        axes.axvline(next(row[side]["total"] for row in rows if row["method"] == "svd"), color="0.35", linewidth=0.8)
        axes.set_xlim(0, 1.17 * max(start))
        axes.set_yticks(range(len(rows)), [row["label"] for row in rows] if place == 0 else [""] * len(rows))
        axes.invert_yaxis()
        axes.grid(False, axis="y")
        axes.set_xlabel("milliseconds")
        title(axes, f"{side}\n{where}" + (", RTX A6000" if side == "paper" else ""), pad=20)
        if place == 0:
            legend = {"ncols": 3, "frameon": False, "fontsize": 8, "handlelength": 1.2, "columnspacing": 0.9}
            axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 0.98), **legend)
    return figure


TABLES: tuple[Table, ...] = (
    Timing("time", "Time of a training step", "Milliseconds of forward pass, backward pass and step of the optimizer."),
)
