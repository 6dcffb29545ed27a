"""``orthocond bench``: what the methods cost."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from orthocond.cli.settings import PositiveInt, apply, find_preset
from orthocond.lab.config import Scale
from orthocond.lab.presets import KINDS


def bench(
    preset: str = "dbn-cifar100-resnet50",
    *,
    scale: Scale = "laptop",
    methods: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative_iterable=())] = (),
    repeats: PositiveInt = 10,
    batch_size: PositiveInt | None = None,
    device: str | None = None,
    out: Path | None = None,
    quiet: bool = False,
) -> None:
    """Time a training step of each method.

    The methods take turns on the networks of a preset, on one thread. The medians of the parts of a step are printed in
    milliseconds, with the ratio of the whole step to that of the baseline (`svd` for classifiers, `none` for GANs) and
    its 95 % interval. NOG, OLR and Stiefel steps affect only one optimizer: for them the last column has the ratio if
    nothing else differs. No data is needed: the images are sprites of the preset's size.

    Args:
        preset: The preset whose network is timed.
        scale: The size of the network and its images: `laptop`, `workstation` or `paper`.
        methods: Which methods to time; by default those of the paper.
        repeats: How often networks are created and timed; with fewer than 6, the interval is that of all ratios.
        batch_size: Images per step; by default as in the preset.
        device: Device that must be used, such as cuda or cpu; it is an error if torch uses another one.
        out: JSON file for the numbers.
        quiet: Show no progress.
    """
    from orthocond.lab import bench as lab
    from orthocond.lab.devices import device_kind
    from orthocond.lab.display import Display
    from orthocond.lab.experiments import task_of
    from orthocond.lab.progress import Progress

    device = device_kind(device)
    config = find_preset(preset, scale)
    methods = methods or KINDS[config.kind].grammar.names
    for name in methods:
        apply(config, {"method.name": name})  # says what is wrong with it
    with Display(["bench"], quiet=quiet) as display:

        def progress(count: int, rounds: int) -> None:
            display(0, Progress(count, rounds, {}))

        found = lab.bench(task_of(config), config, methods, repeats=repeats, batch_size=batch_size, progress=progress)
    rows = {name: asdict(cost) for name, cost in found.items()}
    _print(rows, task_of(config).baselines, "95 %" if repeats >= 6 else "all ratios")
    if out is not None:
        images = batch_size or config.schedule.batch_size
        values = {"preset": preset, "scale": scale, "batch_size": images, "repeats": repeats, "device": device}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(values | {"milliseconds": rows}, indent=1) + "\n", encoding="utf-8")
        print(f"Written to {out}")


def _print(rows: dict[str, dict[str, Any]], baselines: tuple[str, ...], interval: str) -> None:
    first, *others = baselines
    parts = list(rows[first]["parts"])
    head = "".join(f"{part:>14s}" for part in (*parts, "total", f"/ {first}"))
    print(
        f"\n{'ms':14s}{head}  {interval:16s}" + "".join(f"{f'/ {other}':>8s}" for other in others) + "   by optimizer"
    )
    for name, row in rows.items():
        numbers = "".join(f"{row['parts'][part]:14.2f}" for part in parts)
        ratios = "".join(f"{row['total'] / rows[other]['total']:8.2f}" for other in others)
        print(f"{name:14s}{numbers}{row['total']:14.2f}{_cell(row['relative'])}{ratios}", end="")
        print(f" {_cell(row['by_optimizer'])}".rstrip() if row["by_optimizer"] else "")


def _cell(ratio: dict[str, float]) -> str:
    interval = f"[{ratio['low']:.3f}, {ratio['high']:.3f}]"
    return f"{ratio['median']:14.3f}  {interval:16s}"
