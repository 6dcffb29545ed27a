"""``orthocond demo``: both halves of the package in two minutes, without any data."""

import webbrowser
from pathlib import Path


def demo(*, out: Path = Path("runs/demo"), short: bool = False, quiet: bool = False, open: bool = True) -> int:
    """See what treatments do to the conditioning of an SVD layer, in two minutes on two cores.

    The demo trains a small ResNet with decorrelated batch normalization on rendered sprites, without treatment, with
    the nearest orthogonal gradient, and with all three treatments of the paper, side by side. It ends with a table, a
    figure, a report, and the explorer of a small generator.

    Args:
        out: Folder for runs, figure, report and explorer. Trainings that are already there are not repeated.
        short: Take only a few steps, to check that everything works.
        quiet: Show no progress.
        open: Whether to open the report in a browser; it links to the explorer.
    """
    from orthocond.lab import demo as lab

    code = lab.demo(out, short=short, quiet=quiet)
    if open:
        webbrowser.open((out / "report.html").resolve().as_uri())
    return code
