"""``orthocond bench``: what the methods cost."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from orthocond.cli.settings import check, find_preset
from orthocond.lab.config import replace_at
from orthocond.lab.experiments import method_names
from orthocond.lab.generation.config import Generation


def bench(
    preset: str = "dbn-cifar100-resnet50",
    *,
    scale: Literal["paper", "workstation", "laptop"] = "laptop",
    methods: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative_iterable=())] = (),
    repeats: int = 20,
    batch_size: int | None = None,
    out: Path | None = None,
    quiet: bool = False,
) -> None:
    """Time a training step of each method.

    The methods take turns on the network of a preset; medians are printed in milliseconds. Of a classifier: forward
    pass, backward pass and step of the optimizer, with the ratio of the whole to that of `svd` and of `bn`. Of a GAN:
    the whole step of both networks on one thread, with the ratio to `none` and its 95 % interval, and the part of it in
    the generator's optimizer; of NOG and OLR, which act there alone, also the ratio if nothing else differs. No data is
    needed: the images are sprites of the preset's size.

    Args:
        preset: Whose network.
        scale: That of the paper, or of a laptop.
        methods: Which methods; all if not given.
        repeats: Steps of each method; of a GAN networks that are made and timed.
        batch_size: Images of a step; those of the preset if not given.
        out: JSON file for the numbers.
        quiet: Show no progress.
    """
    from orthocond.lab import bench as lab
    from orthocond.lab.display import Display
    from orthocond.lab.progress import Progress

    config = find_preset(preset, scale)
    methods = methods or method_names(config)
    for name in methods:
        check(replace_at(config, "method.name", name))
    rows: dict[str, Any]
    with Display(["bench"], quiet=quiet) as display:

        def progress(count: int, rounds: int) -> None:
            display(0, Progress(count, rounds, {}))

        if isinstance(config, Generation):
            found = lab.bench_gan(config, methods, repeats=repeats, batch_size=batch_size, progress=progress)
            rows = {name: asdict(t) for name, t in found.items()}
        else:
            wanted = dict.fromkeys((*methods, "svd", "bn"))
            times = lab.bench(config, wanted, repeats=repeats, batch_size=batch_size, progress=progress)
            rows = {name: t._asdict() | {"total": t.total} for name, t in times.items()}
    (_print_gan if isinstance(config, Generation) else _print_classifier)(rows)
    if out is not None:
        images = batch_size or config.schedule.batch_size
        values = {"preset": preset, "scale": scale, "batch_size": images, "repeats": repeats}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(values | {"milliseconds": rows}, indent=1) + "\n", encoding="utf-8")
        print(f"Written to {out}")


def _print_classifier(rows: dict[str, dict[str, float]]) -> None:
    print(f"\n{'ms':14s}{'forward':>10s}{'backward':>10s}{'step':>10s}{'total':>10s}{'/ svd':>8s}{'/ bn':>8s}")
    for name, row in rows.items():
        cells = "".join(f"{value:10.2f}" for value in row.values())
        print(f"{name:14s}{cells}{row['total'] / rows['svd']['total']:8.2f}{row['total'] / rows['bn']['total']:8.2f}")


def _print_gan(rows: dict[str, dict[str, Any]]) -> None:
    print(f"\n{'':14s}{'ms':>10s}{'/ none':>10s}  {'95 %':18s}{'optimizer ms':>12s}{'/ none':>10s}  95 %")
    for name, row in rows.items():
        print(f"{name:14s}{row['milliseconds']:10.2f}{_cell(row['relative'])}{row['optimizer']:12.2f}", end="")
        print(_cell(row["by_optimizer"]).rstrip() if row["by_optimizer"] else "")


def _cell(ratio: dict[str, float]) -> str:
    interval = f"[{ratio['low']:.3f}, {ratio['high']:.3f}]"
    return f"{ratio['median']:10.3f}  {interval:18s}"
