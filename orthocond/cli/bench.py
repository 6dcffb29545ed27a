"""``orthocond bench``: what the methods cost."""

import json
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from orthocond.cli.settings import UsageError, check, find_preset
from orthocond.lab.config import replace_at
from orthocond.lab.gan_presets import Generation
from orthocond.lab.methods import NAMES


def bench(
    *,
    preset: str = "dbn-cifar100-resnet50",
    scale: Literal["paper", "laptop"] = "laptop",
    methods: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative_iterable=())] = NAMES,
    repeats: int = 20,
    batch_size: int | None = None,
    out: Path | None = None,
    quiet: bool = False,
) -> None:
    """Time forward pass, backward pass and step of each method.

    The methods take turns on the network of a preset; medians are printed in milliseconds, with the ratio of the whole
    step to that of `svd` and of `bn`. No data is needed: the images are sprites of the preset's size.

    Args:
        preset: Whose network.
        scale: That of the paper, or of a laptop.
        methods: Which methods; all if not given.
        repeats: Steps of each method.
        batch_size: Images of a step; those of the preset if not given.
        out: JSON file for the numbers.
        quiet: Show no progress.
    """
    from orthocond.lab import bench as lab
    from orthocond.lab.display import Display
    from orthocond.lab.progress import Progress

    config = find_preset(preset, scale)
    if isinstance(config, Generation):
        raise UsageError(f"bench times classifiers; {preset} is a GAN.")
    for name in methods:
        check(replace_at(config, "method.name", name))
    wanted = dict.fromkeys((*methods, "svd", "bn"))
    with Display(["bench"], quiet=quiet) as display:
        times = lab.bench(
            config,
            wanted,
            repeats=repeats,
            batch_size=batch_size,
            progress=lambda count, rounds: display(0, Progress(count, rounds, {})),
        )
    print(f"\n{'ms':14s}{'forward':>10s}{'backward':>10s}{'step':>10s}{'total':>10s}{'/ svd':>8s}{'/ bn':>8s}")
    for name, t in times.items():
        cells = "".join(f"{value:10.2f}" for value in (*t, t.total))
        print(f"{name:14s}{cells}{t.total / times['svd'].total:8.2f}{t.total / times['bn'].total:8.2f}")
    if out is not None:
        images = batch_size or config.schedule.batch_size
        values = {"preset": preset, "scale": scale, "batch_size": images, "repeats": repeats}
        rows = {name: t._asdict() | {"total": t.total} for name, t in times.items()}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(values | {"milliseconds": rows}, indent=1) + "\n", encoding="utf-8")
        print(f"Written to {out}")
