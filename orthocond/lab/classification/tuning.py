"""The rates of the arms of `cifar10-claims`, chosen on a seed and on images that its table does not use.

``tuning.json`` holds what was tried and what was chosen. To make it anew from kept records:
``python -m orthocond.lab.classification.tuning results``.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from orthocond.lab.classification.config import Method
from orthocond.lab.runs.files import write_atomically
from orthocond.lab.tables.records import Record, read_kept

SEED, VALIDATION = 100, 5000
"""The seed of all trainings that choose, and how many training images they are judged by."""

TUNED: dict[str, Method] = {
    **{name: Method(name) for name in ("svd", "bn", "bn+wi", "nog", "nog+ow", "nog+ow+olr", "olr", "ow", "mow")},
    "ns": Method("svd", solver="ns"),
    "nog@all": Method("nog@all"),
    "nog@all, update": Method("nog@all", nog_of="update"),
    "nog@all, fixed norm": Method("nog@all", nog_scale="spectral"),
    "muon": Method("nog@inner", nog_of="update", nog_scale="spectral"),
    "stiefel": Method("stiefel"),
}
"""The arms that have a rate of their own, before it is chosen."""

_PATH = Path(__file__).with_name("tuning.json")
_PRESET = "dbn-cifar10-convnet"


@cache
def read_tuning() -> dict[str, dict[str, Any]]:
    """What was chosen, by the name of an arm: ``stem_lr``, ``scope_lr``, and ``tried``.

    Methods with OLR have ``short``, too: the occurrence and the factor of random steps that are shortened equally often
    and equally much.
    """
    found: dict[str, dict[str, Any]] = json.loads(_PATH.read_text())
    return found


def choose(records: Iterable[Record]) -> dict[str, dict[str, Any]]:
    """For each arm of `TUNED` the rate with the lowest error as trained, the larger one of equals.

    Args:
        records: Trainings; those of other presets, seeds and splits do not count.
    """
    usable = [r for r in records if _counts(r)]
    chosen: dict[str, dict[str, Any]] = {}
    for name, method in TUNED.items():
        tried = [r for r in usable if replace(r.config.method, stem_lr=1.0, scope_lr=1.0) == method]
        if tried:
            tried.sort(key=lambda r: (-r.config.method.stem_lr, -r.config.method.scope_lr))
            chosen[name] = _choice(tried)
    return chosen


def _counts(record: Record) -> bool:
    config = record.config
    if (config.preset, config.scale, config.seed) != (_PRESET, "laptop", SEED) or config.data.validation != VALIDATION:
        return False
    return record.finished and record.evaluation is not None


def _choice(tried: Sequence[Record]) -> dict[str, Any]:
    best = min(tried, key=_error)
    found: dict[str, Any] = {
        "stem_lr": best.config.method.stem_lr,
        "scope_lr": best.config.method.scope_lr,
        "tried": [
            {"stem_lr": r.config.method.stem_lr, "scope_lr": r.config.method.scope_lr, "error": _error(r)}
            for r in tried
        ],
    }
    if "olr" in best.config.method.parts:
        found["short"] = _shortening(best)
    return found


def _error(record: Record) -> float:
    assert record.evaluation is not None  # as `_counts` sees to
    return float(record.evaluation["error"])


def _shortening(record: Record) -> list[float]:
    """Occurrence of shortened steps, and the factor with which random ones are equally long in the mean."""
    occurrence = record.series("olr_occurrence")[1][-1]
    rates = [line["eta"] / line["lr"] for line in record.metrics if line.get("eta") is not None]
    mean = fmean(rates) / record.config.method.stem_lr
    factor = 1 - (1 - mean) / occurrence if occurrence else 1.0
    return [round(occurrence, 2), round(min(max(factor, 0.0), 1.0), 2)]


def write_tuning(out: str | Path, path: Path = _PATH) -> None:
    """Write ``tuning.json`` from the records that a folder of results keeps."""
    text = json.dumps(choose(read_kept(out)), indent=1, ensure_ascii=False) + "\n"
    write_atomically(path, text.encode())


if __name__ == "__main__":
    write_tuning(sys.argv[1])
