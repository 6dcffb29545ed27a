"""What a monitor recorded: a list of records that can be saved, read back and handed to others."""

import csv
import json
import math
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

from orthocond._html import paragraph, table

Path_ = str | PathLike[str]
Record = dict[str, Any]

QUANTITIES = ("rank", "largest", "smallest", "condition", "condition_on_range")
KEYS = (
    *("step", "layer", "size", "matrices"),
    *QUANTITIES,
    *(f"{quantity}_worst" for quantity in QUANTITIES),
    "pre_svd",
    *(f"weight_{quantity}" for quantity in QUANTITIES),
    *(f"gradient_{quantity}" for quantity in QUANTITIES),
    *("eta", "olr_occurrence", "solver_failures"),
)


# What a notebook shows of each layer.
_SHOWN = {
    "rank": "rank",
    "condition": "κ(+eps)",
    "condition_on_range": "κ on range",
    "weight_condition": "κ weight",
    "gradient_condition": "κ gradient",
}


class ScalarWriter(Protocol):
    """Anything with TensorBoard's ``add_scalar``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Log one number."""


class History(list[Record]):
    """The records of a `ConditionMonitor`: a list with a dictionary for each recorded step and layer.

    ======================  ==========================================================================================
    key                     value
    ======================  ==========================================================================================
    ``step``                Steps of the optimizer since the start, from 0
    ``layer``               Name of the watched layer
    ``size``                Dimension d of its covariance P
    ``matrices``            How many covariances the values below summarize: groups, images, parts of a batch
    ``rank``                Rank of P
    ``largest``             Largest eigenvalue of P
    ``smallest``            Smallest eigenvalue of P; 0 if singular
    ``condition``           κ(P + eps I)
    ``condition_on_range``  κ of P on its range
    ``pre_svd``             Name of the weight that feeds the layer
    ``weight_…``            The same five of the singular values of that weight, without ridge
    ``gradient_…``          The same five of the gradient that the optimizer's step finds, before NOG
    ``eta``                 Step length that OLR chose
    ``olr_occurrence``      Fraction of the steps so far at which OLR chose a step other than the learning rate
    ``solver_failures``     Decompositions that did not converge since the start
    ======================  ==========================================================================================

    The first five are medians (the lower one of two) where there are several matrices. With ``_worst`` appended they
    are the least favorable: the least rank and smallest eigenvalue, the most of the others. What does not apply is
    None.
    """

    def _repr_html_(self) -> str:
        """The first and last record of each layer, for notebooks."""
        if not self:
            return paragraph("No records.")
        rows = []
        for layer in self.layers():
            columns = self.columns(layer)
            steps = columns["step"]
            rows.append([layer, f"{steps[0]} to {steps[-1]}", *(_first_and_last(columns[key]) for key in _SHOWN)])
        return table(["layer", "steps", *_SHOWN.values()], rows, right=range(1, len(_SHOWN) + 2))

    def layers(self) -> list[str]:
        """Names of the layers in it."""
        return list(dict.fromkeys(record["layer"] for record in self))

    def columns(self, layer: str | None = None) -> dict[str, list[Any]]:
        """The values of each key as a list, for one layer or all.

        Raises:
            ValueError: If there is no such layer.
        """
        if layer is not None and layer not in self.layers():
            raise ValueError(f"The history has no layer {layer!r}; it has {', '.join(map(repr, self.layers()))}.")
        records = [r for r in self if layer is None or r["layer"] == layer]
        return {key: [record[key] for record in records] for key in KEYS}

    def to_json(self, path: Path_) -> None:
        """Write it as JSON, with "inf" and "nan" as strings, since JSON has no numbers for them."""
        records = [{key: _to_json(value) for key, value in record.items()} for record in self]
        Path(path).write_text(json.dumps({"records": records}, indent=1, allow_nan=False) + "\n", encoding="utf-8")

    @classmethod
    def from_json(cls, path: Path_) -> "History":
        """Read what `to_json` wrote.

        Raises:
            ValueError: If the file is not such a history.
        """
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(content, dict) or not isinstance(content.get("records"), list):
            raise ValueError(f"{path} is not a history written by to_json; it has no list of records.")
        return cls({key: _from_json(key, record.get(key)) for key in KEYS} for record in content["records"])

    def to_csv(self, path: Path_) -> None:
        """Write it as a table with a row for each record; what does not apply is empty."""
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, KEYS)
            writer.writeheader()
            writer.writerows(self)

    def to_tensorboard(self, writer: ScalarWriter, prefix: str = "conditioning") -> None:
        """Give every number to ``writer.add_scalar`` as ``prefix/layer/key``; NaN is left out."""
        for record in self:
            for key, value in record.items():
                if key != "step" and isinstance(value, (int, float)) and not math.isnan(value):
                    writer.add_scalar(f"{prefix}/{record['layer']}/{key}", value, record["step"])


def _first_and_last(values: list[Any]) -> str:
    known = [f"{value:.4g}" for value in values if value is not None]
    return " → ".join(dict.fromkeys((known[0], known[-1]))) if known else ""


def _to_json(value: Any) -> Any:
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def _from_json(key: str, value: Any) -> Any:
    return float(value) if isinstance(value, str) and key not in ("layer", "pre_svd") else value
