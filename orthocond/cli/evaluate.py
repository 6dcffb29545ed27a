"""``orthocond evaluate`` and ``orthocond diagnose``: what a trained model can do, and how well conditioned it is."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from orthocond.cli.runs import find_run


def evaluate(run: Path, /, *, runs: Path = Path("runs"), data_root: Path | None = None) -> None:
    """Evaluate the newest checkpoint of a run on held-out images.

    Prints error, top-5 error, and rank and condition of the covariance in the SVD layer on a batch of training images,
    and writes them to evaluation.json in the run's folder.

    Args:
        run: The run, by folder or number.
        runs: Folder of the runs.
        data_root: Folder of data sets; the environment variable ORTHOCOND_DATA, else `data`, if not given.
    """
    from orthocond.lab.classify import evaluate as score
    from orthocond.lab.classify import pipeline
    from orthocond.lab.restore import load_model
    from orthocond.lab.runs.files import write_atomically
    from orthocond.lab.runs.metrics import json_safe

    found = find_run(run, runs)
    restored = load_model(found, root=None if data_root is None else str(data_root))
    # As in training: normalised by the statistics of the training images.
    batches = replace(
        pipeline(restored.config, restored.pair.train, train=True), data=restored.pair.held_out, train=False
    )
    values: dict[str, Any] = {"step": restored.step} | score(restored.model, batches)._asdict()
    if restored.network.svd_layer is not None:
        row = _diagnosis(restored)[restored.network.svd_layer]
        values |= {key: getattr(row, key) for key in ("size", "rank", "condition", "condition_on_range", "eps")}
    write_atomically(
        found.path / "evaluation.json", (json.dumps(json_safe(values, "values"), indent=1) + "\n").encode()
    )
    print(f"{found.path}, step {restored.step}")
    print(f"error {values['error']:.2f} %, top-5 error {values['top5_error']:.2f} %, loss {values['loss']:.4f}")
    if "rank" in values:
        print(
            f"SVD layer {restored.network.svd_layer}: rank {values['rank']} of {values['size']}, "
            f"κ(P + {values['eps']:g} I) {values['condition']:.3g}, κ on the range {values['condition_on_range']:.3g}"
        )
    print(f"Written to {found.path / 'evaluation.json'}")


def diagnose(run: Path, /, *, runs: Path = Path("runs"), data_root: Path | None = None) -> None:
    """Look at every layer of a trained model: what is ill-conditioned, and what would help.

    Args:
        run: The run, by folder or number.
        runs: Folder of the runs.
        data_root: Folder of data sets; the environment variable ORTHOCOND_DATA, else `data`, if not given.
    """
    from orthocond.lab.restore import load_model

    print(_diagnosis(load_model(find_run(run, runs), root=None if data_root is None else str(data_root))))


def _diagnosis(restored: Any) -> Any:
    from torch.nn import functional as F

    from orthocond import diagnose
    from orthocond.lab.classify import pipeline

    batch = next(iter(pipeline(restored.config, restored.pair.train, train=True).batches()))
    return diagnose(restored.model, (batch.images, batch.labels), F.cross_entropy)
