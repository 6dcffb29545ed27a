"""Metrics as lines of JSON, in which numbers that JSON does not know are texts."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from orthocond.lab.runs.packing import dump_json

_TO_TEXT = {math.inf: "Infinity", -math.inf: "-Infinity"}
_FROM_TEXT = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def encode_line(record: dict[str, Any]) -> bytes:
    r"""A record as one line of JSON: always the same bytes for the same values.

    Tensors and NumPy arrays become numbers and lists; NaN, inf and -inf the texts "NaN", "Infinity", "-Infinity".

    Raises:
        TypeError: If a value is neither a number, a text, None, nor a list, tuple or dict of them.

    Example:
        >>> encode_line({"step": 1, "loss": torch.tensor(0.5), "condition": float("inf")})
        b'{"step":1,"loss":0.5,"condition":"Infinity"}\n'
    """
    return dump_json({name: json_safe(value, name) for name, value in record.items()}) + b"\n"


def json_safe(value: Any, name: str) -> Any:
    """The value with what JSON has no word for as texts or lists."""
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        value = value.tolist()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else _TO_TEXT.get(value, "NaN")
    if isinstance(value, (list, tuple)):
        return [json_safe(v, f"{name}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: json_safe(v, f"{name}.{key}") for key, v in value.items()}
    raise TypeError(
        f"JSON holds numbers, texts, lists and dicts with text keys; {name} is a {type(value).__name__}: {value!r}."
    )


def from_json_safe(value: Any) -> Any:
    """The value with the texts for NaN and infinity as numbers again; integers beyond all floats are infinite, too."""
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        return math.inf if value > 0 else -math.inf
    if isinstance(value, str):
        return _FROM_TEXT.get(value, value)
    if isinstance(value, list):
        return [from_json_safe(v) for v in value]
    if isinstance(value, dict):
        return {key: from_json_safe(v) for key, v in value.items()}
    return value


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file, without a last line that was not finished; none if there is no file.

    Raises:
        ValueError: If another line is not a JSON object with an integer step; the text names it.
    """
    if not path.exists():
        return []
    records = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], 1):  # after the last end of line: nothing, or half a line
        try:
            record = from_json_safe(json.loads(line))
            if not isinstance(record, dict) or not isinstance(record.get("step", 0), int):
                raise ValueError("no object, or no step")
            records.append(record)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{path}, line {number} is not a JSON object with an integer step: {line[:80]!r}. Restore the file, or "
                "resume the run, which cuts what follows the last checkpoint."
            ) from error
    return records
