"""``orthocond list``: what there is to train."""

from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from orthocond.lab import experiments, methods
from orthocond.lab.experiments import Config
from orthocond.lab.generation import methods as gan_methods
from orthocond.lab.generation.config import Generation


def list_(what: Literal["presets", "methods", "data", "all"] = "all", /, *, data_root: Path | None = None) -> None:
    """Show presets, methods and data sets.

    Args:
        what: One of the three tables, or all.
        data_root: Folder of data sets; the environment variable ORTHOCOND_DATA, else `data`, if not given.
    """
    console = Console()
    if what in ("presets", "all"):
        rows = [
            (name, *(describe(experiments.preset(name, scale)) for scale in ("laptop", "paper")))
            for name in experiments.names()
        ]
        console.print(_table("Presets", ("name", "--scale laptop", "--scale paper"), rows))
    if what in ("methods", "all"):
        parts = methods.BASES | methods.WEIGHTS | methods.STEPS
        rows = [*parts.items(), _combined(methods.NAMES)]
        console.print(_table("\nMethods of classifiers", ("name", "what it does"), rows))
        rivals = {"none": "no treatment"} | gan_methods.WEIGHTS | gan_methods.STEPS | gan_methods.RIVALS
        rows = [*rivals.items(), _combined(gan_methods.NAMES)]
        console.print(_table("\nMethods of GANs", ("name", "what it does"), rows))
    if what in ("data", "all"):
        from orthocond.lab import data

        rows = list(data.names(data_root).items())
        console.print(_table("\nData sets", ("name", "where it is, or what it needs"), rows))
        console.print("Also a path to a folder, zip or tar of images, and hf:NAME of a Hugging Face data set.")


def describe(config: Config) -> str:
    """A configuration in one line.

    Example:
        >>> from orthocond.lab.classification.presets import preset
        >>> describe(preset("dbn-cifar100-resnet50", "paper"))
        'resnet50, decorrelated BN, cifar100 32 px, 350 epochs of 128'
    """
    images = f"{config.data.source} {config.data.size} px"
    batch = config.schedule.batch_size
    if isinstance(config, Generation):
        return f"{config.model.name}, {images}, {config.schedule.steps} steps of {batch}"
    layer = {"dbn": "decorrelated BN", "gcp": "covariance pooling"}[config.model.application]
    network = f"{'small ' if config.model.depths else ''}{config.model.name}"
    return f"{network}, {layer}, {images}, {config.schedule.epochs} epochs of {batch}"


def _combined(names: tuple[str, ...]) -> tuple[str, str]:
    return "a+b", "several at once; in the paper: " + ", ".join(name for name in names if "+" in name)


def _table(title: str, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for place, column in enumerate(header):
        table.add_column(column, no_wrap=place == 0, style="cyan" if place == 0 else None)
    for row in rows:
        table.add_row(*row)
    return table
