"""``orthocond train``: a preset, at a scale, with a method, and any setting changed."""

import contextlib
import inspect
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from orthocond.cli import settings
from orthocond.cli.report import add_report
from orthocond.cli.runs import find_run, last_run_with
from orthocond.lab import presets
from orthocond.lab.config import Config, Scale, config_diff
from orthocond.lab.errors import UsageError
from orthocond.lab.factories import check_import, is_factory
from orthocond.lab.text import printable

if TYPE_CHECKING:
    from orthocond.lab.runs import Run

LAST = "last"  # what --resume without a run stands for
OWN_IMAGES = "images"  # the source of presets for images of one's own


def complete(tokens: Sequence[str]) -> list[str]:
    """The tokens with a value for a ``--resume`` that has none, and with lists that are empty spelled as such."""
    if tokens[:1] != ["train"]:
        return list(tokens)
    result = []
    for token, following in zip(tokens, [*tokens[1:], "-"], strict=False):
        alone = token == "--resume" and (following.startswith("-") or following in presets.names())
        result.append(f"--resume={LAST}" if alone else token)
    start = _start(result[1:])
    return result if start is None else settings.empty_lists(start, result)


def command(tokens: Sequence[str]) -> Callable[..., int]:
    """The command with every setting of the preset or run that its tokens tell as an option.

    Raises:
        UsageError: If they tell none and do not ask for help.
    """
    helps = bool({"--help", "-h"} & set(tokens))
    if os.environ.get("WORLD_SIZE", "1") != "1" and not helps:  # else nothing heavy is needed yet
        from orthocond.lab.devices import join_processes

        join_processes()
    start = _start(complete(["train", *tokens])[1:])
    if start is None and not helps:
        raise UsageError(_no_preset("--resume" in tokens))

    def chosen(preset: str | None = None, /, **options: Any) -> int:
        return train(cast(Config, start), preset, **options)

    own = inspect.signature(train).parameters
    parameters = [p for name, p in own.items() if name != "start" and p.kind is not p.VAR_KEYWORD]
    chosen.__doc__ = train.__doc__
    chosen.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        parameters + (settings.options(start) if start is not None else []), return_annotation=int
    )
    chosen.__annotations__ = {p.name: p.annotation for p in parameters}
    return chosen


def _start(tokens: Sequence[str]) -> Config | None:
    """The configuration that the options change: of the preset, with the file, or of the run to resume."""
    file = settings.value_of(tokens, "--config")
    values = settings.read_file(file) if file is not None else {}
    names = presets.names()
    if tokens and not tokens[0].startswith("-"):
        name: Any = tokens[0]
    else:
        name = next((token for token in tokens if token in names), values.get("preset"))
    if name is not None:
        scale = settings.value_of(tokens, "--scale") or values.get("scale", "laptop")
        config = settings.find_preset(name, scale)
        return settings.apply_file(config, values, file) if file is not None else config
    resume = settings.value_of(tokens, "--resume")
    if resume is not None and resume != LAST:
        return presets.read_config(find_run(resume, settings.value_of(tokens, "--runs") or "runs").config)
    return None


def train(
    start: Config,
    preset: str | None = None,
    /,
    *,
    scale: Scale = "laptop",
    config: Path | None = None,
    runs: Path = Path("runs"),
    resume: str | None = None,
    data_root: Path | None = None,
    tracker: str | None = None,
    evaluate: bool = True,
    report: bool = True,
    allow_import: str | None = None,
    dry_run: bool = False,
    quiet: bool = False,
    **options: Any,
) -> int:
    """Train a preset with a method, evaluate the result, and write the report of the run, all into a run folder.

    `orthocond list` shows presets, methods and data sets; `orthocond train PRESET --help` shows every setting of a
    preset with its default. Ctrl-C saves and ends; `--resume` continues, bit for bit. Under torchrun
    (`torchrun --nproc-per-node 2 -m orthocond train ...`) the batches are divided among the processes.

    Args:
        start: What the options change.
        preset: Name of the preset; not needed with `--resume RUN` or a file that names it.
        scale: The size of the experiment: `laptop` takes minutes, `workstation` half an hour on one core, `paper` is
            the setting of the paper.
        config: TOML or JSON file with settings, in tables as in config.json of a run. Options override it.
        runs: Folder of the runs.
        resume: Resume this run, by folder or number; without a value, the last run with the same settings, or start one
            if there is none.
        data_root: Folder of data sets; by default the environment variable ORTHOCOND_DATA, else `data`.
        tracker: Accelerate tracker that also receives the metrics, for example tensorboard.
        evaluate: Whether to evaluate at the end, as `orthocond evaluate` does. For a GAN that can take minutes.
        report: Whether to write report.html into the run folder at the end; for a GAN also explore.html.
        allow_import: Function of a network that a run to resume may import and call, as its configuration names it.
        dry_run: Train nothing: print configuration, size of the model, steps, and an estimate of the time.
        quiet: Print only the paths of run and report, and the result.
        options: Settings that were set by options.
    """
    chosen = settings.apply_options(start, options)
    root = None if data_root is None else str(data_root)
    if resume is None or resume == LAST:
        _check_writable(runs)
    else:
        found = find_run(resume, runs)
        if changes := config_diff(presets.read_config(found.config), chosen):
            raise UsageError(f"A run resumes with its own settings; start a new run to change\n{changes}")
        check_import(chosen.model.name, allow_import or options.get("model__name"), found.path)
    if dry_run:
        from orthocond.lab.runs import ranks

        if ranks.world_size() > 1:
            raise UsageError("--dry-run needs one process; run it without torchrun.")
        from orthocond.cli.plan import show

        return show(chosen, root, tracker)
    if chosen.data.source == OWN_IMAGES and not _is_there(OWN_IMAGES, root):
        classes = ", with a subfolder for each class" if presets.KINDS[chosen.kind].labeled else ""
        raise UsageError(f"{chosen.preset} trains on images of your own: pass --data FOLDER{classes}.")
    return _train(chosen, runs, resume, root, tracker, evaluate, report, quiet)


def _check_writable(runs: Path) -> None:
    """Whether a folder of runs can be made or written to, without doing so."""
    nearest = next(path for path in (runs.absolute(), *runs.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        problem = "cannot be written to" if nearest.is_dir() else "is a file"
        raise UsageError(f"--runs needs a folder that can be created and written to; {printable(nearest)} {problem}.")


def _is_there(source: str, root: str | None) -> bool:
    from orthocond.lab import data

    return Path(source).exists() or source in data.names(root)


def _no_preset(resume: bool) -> str:
    names = ", ".join(presets.names())
    if resume:
        return f"--resume without a run needs the preset whose last run goes on: {names}."
    return f"Which preset? There are: {names}. For example: orthocond train dbn-sprites-small --method nog+ow+olr"


def _train(
    config: Config,
    runs: Path,
    resume: str | None,
    root: str | None,
    tracker: str | None,
    evaluate: bool,
    report: bool,
    quiet: bool,
) -> int:
    from orthocond.cli.evaluate import show_scores
    from orthocond.lab import experiments
    from orthocond.lab.devices import part_processes
    from orthocond.lab.display import Display
    from orthocond.lab.progress import Progress
    from orthocond.lab.runs import Run, ranks
    from orthocond.lab.runs.finding import name_of

    run, made = None, False
    if resume == LAST:
        run = last_run_with(config, runs)
    elif resume is not None:
        run = find_run(resume, runs)
    if run is None:
        run, made = Run.create(runs, name_of(config), config), True
    speaks = ranks.rank() == 0
    code, announced = 0, False
    with Display([config.method.name], quiet=quiet or not speaks) as display, _removed_if_empty(run, made):

        def show(state: Progress) -> None:
            nonlocal announced
            if not announced:  # not before the first step: without data there is none, and the folder is removed
                print(_announcement(run, tracker), flush=True)
                announced = True
            display(0, state)

        if not ranks.from_rank_0(_result(run).encode):  # else it has finished before
            with _reported_if_diverged(run, config, report and speaks):
                code = experiments.train(config, run, root=root, progress=show, tracker=tracker, evaluate=False)
        elif speaks:
            print(_announcement(run, None), flush=True)
            announced = True
        part_processes()
        if evaluate and speaks and code == 0 and not experiments.is_evaluated(run):
            _evaluate(run, config, root, show, quiet)
    if speaks:
        if evaluate and code == 0 and not quiet:
            show_scores(run)
        again = f"orthocond train --resume {printable(run.path)}"
        if is_factory(config.model.name):
            again += f" --allow-import {config.model.name}"
        print(_result(run) or f"Stopped. To go on: {again}", flush=True)
        if report and code == 0:
            if not quiet and presets.has_generator(run.config):
                print("Writing explorer and report: up to a minute …", flush=True)
            add_report(run.path, config.model.name)
    return code


def _announcement(run: "Run", tracker: str | None) -> str:
    text = f"Run: {printable(run.path)}"
    return text + (f"\nWatch it: tensorboard --logdir {printable(run.path)}" if tracker == "tensorboard" else "")


def _evaluate(run: "Run", config: Config, root: str | None, show: Callable[[Any], None], quiet: bool) -> None:
    """Evaluate what was trained; Ctrl-C ends that alone."""
    from orthocond.lab import experiments

    if presets.KINDS[config.kind].slow_evaluation and not quiet:
        print(
            "Trained. The evaluation can take longer than that; Ctrl-C leaves it out, and so does --no-evaluate.",
            flush=True,
        )
    try:
        experiments.evaluate_run(run, root=root, allow_import=config.model.name, progress=show)
    except KeyboardInterrupt:
        print(f"The training is complete. To evaluate it later: orthocond evaluate {printable(run.path)}", flush=True)
        raise


@contextlib.contextmanager
def _reported_if_diverged(run: "Run", config: Config, report: bool) -> Iterator[None]:
    """Write the report of a training that diverged, too: it shows what went wrong before."""
    from orthocond.lab.runs import ranks

    try:
        yield
    except FloatingPointError:
        if report and ranks.world_size() == 1:  # processes of a group have to open a run together
            add_report(run.path, config.model.name)
        raise


@contextlib.contextmanager
def _removed_if_empty(run: "Run", made: bool) -> Iterator[None]:
    """Where data, network or package are missing, nothing is trained: leave no folder behind that was made for it."""
    from orthocond.lab.runs import ranks

    try:
        yield
    except (ImportError, OSError, TypeError, ValueError, MemoryError):
        if made and ranks.rank() == 0 and not run.metrics() and not any(run.checkpoints.iterdir()):
            shutil.rmtree(run.path)
        raise


def _result(run: "Run") -> str:
    """The numbers of the last line of a training that has finished; nothing before."""
    lines = run.metrics()
    if not (lines and lines[-1].get("finished")):
        return ""
    numbers = {k: v for k, v in lines[-1].items() if k not in ("step", "epoch", "finished")}
    shown = (
        f"{name.replace('_', ' ')} {value:.4g}" for name, value in numbers.items() if isinstance(value, (int, float))
    )
    return f"Result after {lines[-1]['step']} steps: {', '.join(shown)}"
