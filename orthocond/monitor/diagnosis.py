"""The result of `diagnose`: rows of facts and advice, as text, Markdown and data."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Advice:
    """What was found, in plain words, and the line of code that would help; None where none does."""

    text: str
    code: str | None = None

    def __str__(self) -> str:
        return self.text if self.code is None else f"{self.text}\n    {self.code}"


@dataclass(frozen=True)
class LayerDiagnosis:
    """The facts of one layer; None where they do not apply. Of groups and images the median.

    Attributes:
        name: Name of the layer in the model.
        kind: Its class.
        weight_shape: Shape of its weight.
        weight_rank: Rank of the weight as a matrix.
        weight_condition: Condition number of the weight; infinite if it has not full rank.
        size: Dimension of the covariance: output channels; for an SVD layer, the covariance that it decomposes.
        samples: Samples in each covariance.
        rank: Rank of the covariance.
        condition: Condition number of the covariance with the ridge.
        condition_on_range: Condition number of the covariance on its range.
        eps: The ridge.
        gradient_rank: Rank of the gradient of the weight; of a parametrized weight, of its raw parameter.
        gradient_condition: Condition number of that gradient.
        feeds: SVD layers whose Pre-SVD layer it is.
        fed_by: Pre-SVD layers of this SVD layer.
        advice: What would help.
    """

    name: str
    kind: str
    weight_shape: tuple[int, ...] | None = None
    weight_rank: int | None = None
    weight_condition: float | None = None
    size: int | None = None
    samples: int | None = None
    rank: int | None = None
    condition: float | None = None
    condition_on_range: float | None = None
    eps: float | None = None
    gradient_rank: int | None = None
    gradient_condition: float | None = None
    feeds: tuple[str, ...] = ()
    fed_by: tuple[str, ...] = ()
    advice: tuple[Advice, ...] = ()


_HEADER = ("layer", "kind", "weight", "κ weight", "cov. rank", "κ(+eps)", "κ on range", "κ gradient", "SVD layer")
_RIGHT = (3, 4, 5, 6, 7)


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found: ``print`` it, or take ``rows``, `to_markdown` or `to_json`.

    Attributes:
        rows: A `LayerDiagnosis` for each layer, in the order of the model.
        loss: The loss of the batch.
    """

    rows: tuple[LayerDiagnosis, ...]
    loss: float

    def __getitem__(self, name: str) -> LayerDiagnosis:
        """The row of a layer, by its name."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"no layer {name!r}; there are {', '.join(row.name for row in self.rows)}")

    def __str__(self) -> str:
        table = [_HEADER, *map(_cells, self.rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        aligned = [
            [c.rjust(w) if i in _RIGHT else c.ljust(w) for i, (c, w) in enumerate(pairs)]
            for pairs in (zip(cells, widths, strict=True) for cells in table)
        ]
        lines = ["  ".join(cells).rstrip() for cells in aligned]
        lines.insert(1, "─" * max(map(len, lines)))
        notes = [f"{row.name}: {advice}" for row in self.rows for advice in row.advice]
        return "\n".join([*lines, "", *(notes or ["Nothing to improve was found."])])

    def to_markdown(self) -> str:
        """The same as Markdown: a table, and a list of what would help."""
        rule = ["---:" if i in _RIGHT else "---" for i in range(len(_HEADER))]
        table = [_HEADER, rule, *map(_cells, self.rows)]
        lines = ["| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |" for cells in table]
        notes = [
            f"- **{row.name}**: {advice.text}" + (f" `{advice.code}`" if advice.code else "")
            for row in self.rows
            for advice in row.advice
        ]
        return "\n".join([*lines, "", *(notes or ["Nothing to improve was found."])])

    def to_json(self, path: str | PathLike[str] | None = None) -> str:
        """The rows and the loss as JSON, with "inf" and "nan" as strings; also written to ``path`` if given."""
        text = json.dumps(_plain(asdict(self)), indent=1, allow_nan=False, ensure_ascii=False)
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text


def _cells(row: LayerDiagnosis) -> Sequence[str]:
    rank = "" if row.rank is None else f"{row.rank} of {row.size}"
    relation = f"feeds {', '.join(row.feeds)}" if row.feeds else ""
    return (
        row.name or "(model)",
        row.kind,
        "×".join(map(str, row.weight_shape or ())),
        _or_rank(row.weight_condition, row.weight_rank),
        rank,
        number(row.condition),
        number(row.condition_on_range),
        _or_rank(row.gradient_condition, row.gradient_rank),
        f"fed by {', '.join(row.fed_by)}" if row.fed_by else relation,
    )


def _or_rank(condition: float | None, rank: int | None) -> str:
    """The condition number; where that is none, the rank is what there is to say."""
    return number(condition) if condition is None or math.isfinite(condition) else f"rank {rank}"


def number(value: float | None) -> str:
    """A condition number in three digits; "∞" and "-" for those that are none."""
    if value is None:
        return ""
    if math.isinf(value):
        return "∞"
    return "-" if math.isnan(value) else f"{value:.3g}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
