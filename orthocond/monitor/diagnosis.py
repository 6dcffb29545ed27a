"""The result of `diagnose`: rows of facts and advice, as text, Markdown and data."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from orthocond._html import paragraph, table


@dataclass(frozen=True)
class Advice:
    """What was found, in plain words, and the code that would help; None where none does."""

    text: str
    code: str | None = None

    def __str__(self) -> str:
        return "\n    ".join([self.text, *(self.code or "").splitlines()])


@dataclass(frozen=True)
class Failure:
    """Where one forward and backward first went wrong.

    Attributes:
        what: ``"NaN"``, ``"infinity"``, or the text of the error that was raised.
        stage: ``"batch"`` or ``"parameter"`` if it was there before, ``"forward"`` or ``"backward"``.
        operation: The torch function, or the tensor of the batch or parameter.
        layer: Name of the layer whose forward called the function, "" for the model itself; None for the loss.
        location: File and line of the call.
        source: That line.
    """

    what: str
    stage: str
    operation: str
    layer: str | None = None
    location: str | None = None
    source: str | None = None

    def __str__(self) -> str:
        if self.stage == "batch":
            return f"The batch itself holds {self.what}, in {self.operation}. Look at the data."
        if self.stage == "parameter":
            return f"{self.operation} already holds {self.what} before the forward. Load an earlier state."
        caller = "the loss" if self.layer is None else f"layer {self.layer!r}" if self.layer else "the model"
        where = f"called in {caller}" + (f" ({self.location}):" if self.location else ".")
        where += f"\n    {self.source}" if self.source else ""
        if self.what not in ("NaN", "infinity"):
            return f"The {self.stage} ended at {self.operation}, {where}\n{self.what}"
        of = "forward, at" if self.stage == "forward" else "backward of"
        return f"{self.what[0].upper()}{self.what[1:]} begins in the {of} {self.operation}, {where}"


@dataclass(frozen=True)
class Decomposition:
    """A call of ``eigh`` or ``svd`` through which autograd differentiates.

    Attributes:
        operation: The torch function.
        layer: Name of the layer whose forward calls it, "" for the model itself; None for the loss.
        location: File and line of the call.
        source: That line.
        shape: Shape of the matrices.
        matrices: How many there are.
        ties: How many of them have eigenvalues or singular values that are equal up to rounding.
        advice: What replaces it.
    """

    operation: str
    layer: str | None
    location: str | None
    source: str | None
    shape: tuple[int, ...]
    matrices: int
    ties: int
    advice: tuple[Advice, ...] = ()


@dataclass(frozen=True)
class LayerDiagnosis:
    """The facts of one layer; None where they do not apply. Groups and images are summarized by their median.

    Attributes:
        name: Name of the layer in the model, and of the weight if that is not its ``weight``.
        kind: Its class.
        weight_shape: Shape of its weight.
        weight_rank: Rank of the weight as a matrix.
        weight_condition: Condition number of the weight; infinite if it does not have full rank.
        size: Dimension of the covariance: output channels; for an SVD layer, the covariance that it decomposes.
        samples: Samples in each covariance.
        rank: Rank of the covariance.
        condition: Condition number of the covariance with the ridge.
        condition_on_range: Condition number of the covariance on its range.
        eps: The ridge.
        gradient_rank: Rank of the gradient of the weight; for a parametrized weight, that of its raw parameter.
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
    """What `diagnose` found: ``print`` it, or use ``rows``, `to_markdown` or `to_json`.

    Attributes:
        rows: A `LayerDiagnosis` for each layer, in the order of the model.
        loss: The loss of the batch; NaN if the forward did not reach it.
        failures: Where values first are not finite, or the error that ended the forward; empty if all went well.
        decompositions: Calls of ``eigh`` and ``svd`` in the model that could be replaced.
        checked: What was looked at and what was not, in words; "" if nothing was left out.
    """

    rows: tuple[LayerDiagnosis, ...]
    loss: float
    failures: tuple[Failure, ...] = ()
    decompositions: tuple[Decomposition, ...] = ()
    checked: str = ""

    def __getitem__(self, name: str) -> LayerDiagnosis:
        """The row of a layer, by its name."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"no layer {name!r}; there are {', '.join(row.name for row in self.rows)}")

    def __str__(self) -> str:
        cells = [_HEADER, *map(_cells, self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        aligned = [
            [c.rjust(w) if i in _RIGHT else c.ljust(w) for i, (c, w) in enumerate(pairs)]
            for pairs in (zip(row, widths, strict=True) for row in cells)
        ]
        lines = ["  ".join(row).rstrip() for row in aligned]
        lines.insert(1, "─" * max(map(len, lines)))
        failures, notes = map(str, self.failures), (f"{name}: {advice}" for name, advice in self._advice())
        return self._join("\n".join(failures), "\n".join(lines if self.rows else []), "\n".join(notes))

    def to_markdown(self) -> str:
        """The same as Markdown: failures, a table, and a list of what would help."""
        rule = ["---:" if i in _RIGHT else "---" for i in range(len(_HEADER))]
        cells = [_HEADER, rule, *map(_cells, self.rows)] if self.rows else []
        lines = ["| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in cells]
        failures = [f"- {_with_code(str(failure))}" for failure in self.failures]
        notes = [f"- **{name}**: {_with_code(str(advice))}" for name, advice in self._advice()]
        return self._join("\n".join(failures), "\n".join(lines), "\n".join(notes))

    def _repr_html_(self) -> str:
        """The same as HTML, for notebooks."""
        rows = table(_HEADER, list(map(_cells, self.rows)), right=_RIGHT) if self.rows else ""
        notes = "".join(paragraph(f"{name}: {advice}") for name, advice in self._advice())
        failures = "".join(paragraph(f"⚠ {failure}") for failure in self.failures)
        return "".join([failures, rows, notes, *map(paragraph, self._remarks())])

    def _advice(self) -> list[tuple[str, Advice]]:
        """Each piece of advice and the layer that it is about, decompositions first."""
        calls = [(d.layer or ("the loss" if d.layer is None else "the model"), d.advice) for d in self.decompositions]
        layers = [(row.name or "the model", row.advice) for row in self.rows]
        return [(name, advice) for name, several in calls + layers for advice in several]

    def _remarks(self) -> list[str]:
        """What to say at the end."""
        nothing = "" if self.failures or self._advice() else "Nothing to improve was found."
        return [text for text in (nothing, self.checked) if text]

    def _join(self, *blocks: str) -> str:
        return "\n\n".join(filter(None, [*blocks, *self._remarks()]))

    def to_json(self, path: str | PathLike[str] | None = None) -> str:
        """All of it as JSON, with "inf" and "nan" as strings; also written to ``path`` if given."""
        text = json.dumps(_plain(asdict(self)), indent=1, allow_nan=False, ensure_ascii=False)
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text


def _with_code(text: str) -> str:
    """Indented lines, which are code, as code inside the line."""
    lines = text.split("\n")
    return " ".join(f"`{line.strip()}`" if line.startswith("    ") else line for line in lines)


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
    """The condition number; where that is none, the rank is what there is to say, if there is one."""
    return number(condition) if rank is None or condition is None or math.isfinite(condition) else f"rank {rank}"


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
