"""``orthocond evaluate`` and ``orthocond diagnose``: what a trained model can do, and how well conditioned it is."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console

from orthocond.cli.report import add_report
from orthocond.cli.runs import find_run
from orthocond.cli.terminal import make_table
from orthocond.lab.config import read_config
from orthocond.lab.text import printable

if TYPE_CHECKING:
    from orthocond.lab.runs import Run

Names = Annotated[tuple[str, ...], Parameter(consume_multiple=True)]


def evaluate(
    run: Path,
    /,
    *,
    runs: Path = Path("runs"),
    data_root: Path | None = None,
    only: Names = (),
    skip: Names = (),
    allow_import: str | None = None,
    report: bool = True,
    quiet: bool = False,
) -> None:
    """Evaluate the newest checkpoint of a run, and write what comes out to evaluation.json in its folder.

    A classifier gets its error and top-5 error on held-out images, as trained and with refreshed statistics of
    its normalization layers, and rank and condition of the covariance in the SVD layer on a batch of training images.
    A GAN gets the condition of the weights that meet the latents. Its axes, SeFa's, the Jacobian's and joint directions
    get predictability, activeness, off-diagonal energy, traversals, and scores against the true factors of sprites.
    Other images get distances to the training images.

    Args:
        run: The run, by folder or number.
        runs: Folder of the runs.
        data_root: Folder of data sets; the environment variable ORTHOCOND_DATA, else `data`, if not given.
        only: What to measure of a GAN: `condition`, `frechet`, `fid`, `factors`, `chance`, `vp`, `activeness`,
            `energy`, `pictures`, and of which directions: `axes`, `sefa`, `jacobian`, `joint`, `eigengan`. What was
            measured before stays.
        skip: What not to measure.
        allow_import: Function of a network that the run may import and call, as its configuration names it.
        report: Whether to write the report of the run.
        quiet: Show no progress.
    """
    from orthocond.lab.display import Display
    from orthocond.lab.experiments import evaluate_run
    from orthocond.lab.task import EVALUATION

    found = find_run(run, runs)
    with Display(["evaluate"], quiet=quiet) as display:
        evaluate_run(
            found,
            root=data_root,
            only=only,
            skip=skip,
            allow_import=allow_import,
            progress=lambda state: display(0, state),
        )
    show_scores(found)
    print(f"Written to {printable(found.path / EVALUATION)}")
    if report:
        add_report(found.path, allow_import)


def show_scores(run: "Run") -> None:
    """Print what the evaluation of a run has found, with what each number means."""
    from orthocond.lab.experiments import task_of
    from orthocond.lab.runs.metrics import from_json_safe
    from orthocond.lab.task import EVALUATION

    values = from_json_safe(json.loads((run.path / EVALUATION).read_bytes()))
    scores = task_of(read_config(run.config)).scores(values)
    title = f"{printable(run.path)}, step {values['step']}"
    Console(highlight=False).print(make_table(title, ("measure", "value", "what it says"), scores))
    if run.status.state == "finished" and values["step"] != run.status.step:
        print(
            f"This is not the end of the training: its last step is {run.status.step}, and the newest checkpoint that "
            f"is good is of step {values['step']}. Tables leave this evaluation out.",
            file=sys.stderr,
        )


def diagnose(
    run: Path,
    /,
    *,
    runs: Path = Path("runs"),
    data_root: Path | None = None,
    allow_import: str | None = None,
) -> None:
    """Look at every layer of a trained model: what is ill-conditioned, and what would help.

    Args:
        run: The run of a classifier, by folder or number.
        runs: Folder of the runs.
        data_root: Folder of data sets; the environment variable ORTHOCOND_DATA, else `data`, if not given.
        allow_import: Function of a network that the run may import and call, as its configuration names it.
    """
    from torch.nn import functional as F

    from orthocond import diagnose
    from orthocond.lab.classification.data import pipeline
    from orthocond.lab.classification.networks.prepare import load_model

    root = None if data_root is None else str(data_root)
    restored = load_model(find_run(run, runs), root=root, allow_import=allow_import)
    batch = next(iter(pipeline(restored.config, restored.pair.train, train=True).batches()))
    print(diagnose(restored.model, (batch.images, batch.labels), F.cross_entropy))
