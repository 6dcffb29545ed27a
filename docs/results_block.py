"""What did and did not reproduce, from the kept tables: `python docs/results_block.py` writes it into the README."""

import json
from pathlib import Path
from typing import Any

from orthocond.lab.tables.statistics import LEVEL, holm

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "README.md"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
_PADE = "SVD, Padé (stand-in at ties), ε 1e-2"
_CIFAR10 = ("cifar10-claims", "cifar10-conditioning", "cifar10-pade")
_LOGARITHMS = ("range", "ridged", "condition")
# Tables, their measures and what these are called here, and contrasts with the claims that they settle.
_SHOWN = (
    (
        "cifar10-conditioning",
        "range",
        "κ on the range",
        {
            "NOG − SVD": "NOG improves the conditioning",
            "NOG − SVD, stem rate x0.4": "… more than a smaller rate does",
            "NOG + OW − SVD": "NOG + OW does (as OW alone)",
            "OLR − SVD": "OLR does",
            "OLR − steps shortened at random as by OLR": "… more than steps that are as short, at random",
        },
    ),
    (
        "cifar10-conditioning",
        "ridged",
        "κ(P + εI)",
        {"NOG − SVD": "NOG improves it, where it also counts how large features are"},
    ),
    (
        "cifar10-claims",
        "error",
        "error, points",
        {
            "NOG − SVD": "NOG lowers the error",
            "NOG + OW − SVD": "NOG + OW does",
            "NOG + OW + OLR − SVD": "NOG + OW + OLR does",
            "OLR − SVD": "OLR does",
            "OLR − steps shortened at random as by OLR": "… more than steps that are as short, at random",
            "SVD − BN": "the SVD layer beats BN (implied)",
            "SVD − BN, workstation": "… in the medium network",
            "SVD − BN with more steps": "… in equal time",
            "BN + WI − SVD": "beyond it: BN with `whitening_init_` is as good",
        },
    ),
    (
        "cifar10-pade",
        "ridged",
        "κ(P + εI)",
        {f"SVD, exact, ε 1e-2 − {_PADE}": "beyond it: exact gradients keep κ lower than our stand-in for Padé"},
    ),
    (
        "cifar10-pade",
        "error",
        "error, points",
        {
            f"SVD, exact, ε 1e-2 − {_PADE}": "… and the error",
        },
    ),
    (
        "gan-claims",
        "disentanglement",
        "DCI of sprites, points",
        {
            "axes of NOG + OLR (exact η) − axes of no treatment": "NOG + OLR disentangle the latents of a GAN",
            "joint of no treatment − axes of no treatment": "beyond it: joint directions do, after training",
            "joint of no treatment − axes of OroJaR": "… better than the rival OroJaR does in training",
        },
    ),
    (
        "gan-faces",
        "condition",
        "κ of the first projection, CelebA",
        {
            "CelebA: NOG + OLR (exact η) − no treatment": "NOG + OLR improve the condition of a GAN of faces",
            "CelebA: NOG + OLR (exact η) − steps shortened at random": "… more than steps that are as short, at random",
        },
    ),
    (
        "gan-faces",
        "condition",
        "κ of the subspaces, AnimeFace",
        {"EigenGAN, AnimeFace: NOG + OLR (exact η) − EigenGAN (OL)": "… and of an EigenGAN"},
    ),
    (
        "gan-faces",
        "vp",
        "VP of CelebA, points",
        {
            "CelebA: axes of NOG + OLR (exact η) − axes of no treatment": "… and make its directions more predictable",
        },
    ),
)


def block() -> str:
    """The table in Markdown, a row for each claim, and what a wider correction would change."""
    lines = ["| claim of the paper | measured | difference [95 %] | seeds | verdict |", "|---|---|---|---|---|"]
    lost, count = _lost()
    shown = set()
    for name, measure, measured, claims in _SHOWN:
        every = _contrasts(name)
        found = [row for row in every if row["measure"] == measure] or every  # else it is a secondary outcome
        rows = {f"{row['contrast']}, {row['scale']}": row for row in found}
        rows |= {row["contrast"]: row for row in reversed(found)}  # of two scales the first
        for contrast, claim in claims.items():
            row = rows[contrast]
            p = lost.get((name, row["contrast"], row["scale"], measure))
            shown |= {f"{p:.2f}"} if p else set()
            lines.append(f"| {claim} | {measured} | {_cells(row, measure)}{'*' if p else ''} |")
    if shown:
        words = f"\\* not significant if all {count} contrasts of the three tables of CIFAR-10 are corrected together"
        lines += ["", f"{words}: p = {' and '.join(sorted(shown))}."]
    return "\n".join(lines)


def _contrasts(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((ROOT / "results" / name / "table.json").read_text())["contrasts"]
    return found


def _lost() -> tuple[dict[tuple[str, str, str, str], float], int]:
    """What is significant in its table, but not among all contrasts on CIFAR-10; and how many these are."""
    rows = [(name, row) for name in _CIFAR10 for row in _contrasts(name)]
    tested = [(name, row, d) for name, row in rows if (d := _difference(row)) and d["p"] is not None]
    corrected = holm([d["p"] for _, _, d in tested])
    lost = {
        (name, row["contrast"], row["scale"], row["measure"]): p
        for (name, row, d), p in zip(tested, corrected, strict=True)
        if d["p_holm"] < LEVEL <= p
    }
    return lost, len(tested)


def _difference(row: dict[str, Any]) -> dict[str, Any] | None:
    found: dict[str, Any] | None = row["measures"][row["measure"]]["difference"]
    return found


def _cells(row: dict[str, Any], measure: str) -> str:
    seeds = f"{len(row['measures'][measure]['seeds'])} of {row['planned']}"
    difference = row["measures"][measure]["difference"]
    verdict = row["verdict"] if measure == row["measure"] else _secondary(difference)
    return f"{_interval(difference, ratio=measure in _LOGARITHMS)} | {seeds} | {verdict}"


def _secondary(difference: dict[str, Any]) -> str:
    """What an outcome says that the verdict does not go by."""
    if difference["p_holm"] >= LEVEL:
        return "cannot tell"
    return f"{'higher' if difference['mean'] > 0 else 'lower'} (secondary outcome)"


def _interval(found: dict[str, Any] | None, *, ratio: bool) -> str:
    """Differences of logarithms are shown as ratios."""
    if found is None:
        return "–"
    ends = [found[end] for end in ("mean", "low", "high") if found[end] is not None]
    mean, *rest = (
        _ratio(10**end) if ratio else f"{end:+z.1f}".replace("-", "−").replace("+0.0", "0.0") for end in ends
    )
    return f"{'×' if ratio else ''}{mean}" + (f" [{', '.join(rest)}]" if rest else "")


def _ratio(value: float) -> str:
    return f"{value:.2f}" if 0.1 <= value < 10 else f"{value:.2g}"


def page() -> str:
    """The README with the table as it is now."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n\n{block()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page())
