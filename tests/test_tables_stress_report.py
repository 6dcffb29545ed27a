"""What the table of solvers under stress says, from made-up cells."""

import itertools

import pytest

from orthocond.lab.classification import stress_report
from orthocond.lab.classification.stress_report import AUTOGRAD, KINDS, LAYER, POOLING, STEM

_SVD, _EIGH = AUTOGRAD["svd"], AUTOGRAD["eigh"]


def _made_up():
    """The content of a table in which nothing goes wrong with the ten covariances of each cell."""
    cells = []
    for place, dtype, eps, solver in itertools.product(
        (STEM, POOLING), stress_report.DTYPES, stress_report.RIDGES, (_SVD, _EIGH, LAYER)
    ):
        for treatment in stress_report._TREATMENTS[place]:
            cell = {"place": place, "treatment": treatment, "features": dtype, "eps": eps, "solver": solver}
            cells.append(cell | dict.fromkeys((*KINDS, "bad"), 0) | {"count": 10, "largest": 5.0, "not_converged": 0})
            cells[-1]["median_gradient_error"] = 1e-3
    content = {"title": "T", "text": "X", "images": "CIFAR-10, 32x32", "cells": cells}
    return content | {"decompositions": 1440, "iterations": 120, "not_converged": 3, "expected": 1440 * 5 / 77e6}


def _markdown(content):
    return stress_report.markdown(content | {"verdict": stress_report.verdict(content["cells"])})


def _fail(content, count, kind, **settings):
    chosen = stress_report._select(content["cells"], **settings)
    assert chosen
    for cell in chosen:
        cell[kind] += count
        cell["bad"] += count


def _sentence(content, start):
    (line,) = (line for line in stress_report.verdict(content["cells"]) if line.startswith(start))
    return line


# The verdict


def test_the_verdict_has_a_sentence_for_each_place_and_ridge():
    lines = stress_report.verdict(_made_up()["cells"])
    starts = [f"{place}, ε = {eps}" for place in ("Stem", "Covariance pooling") for eps in ("0.01", "1e-05", "0")]
    assert [line.partition(", float32:")[0] for line in lines[:6]] == starts
    assert all("svd for none, whatever the weight; through eigh for none, wh" in line for line in lines[:6])
    assert lines[-1] == (
        "The layer's own solver: with float32 features nothing goes wrong in 420 cases; "
        "with bfloat16 features nothing goes wrong in 420 cases."
    )


def test_the_verdict_of_a_ridge_is_not_that_of_the_others():
    content = _made_up()
    for count, treatment in ((4, "svd"), (9, "sn"), (9, "wi"), (4, "trained NOG")):
        _fail(content, count, "gradient", place=STEM, eps=1e-2, solver=_SVD, features="float32", treatment=treatment)
    _fail(content, 10, "root", place=STEM, eps=0.0, solver=_EIGH, features="float32")
    _fail(content, 10, "gradient", place=STEM, eps=1e-2, solver=_SVD, features="bfloat16")
    line = _sentence(content, "Stem, ε = 0.01")
    assert (
        "through svd for 90 % (fresh: SN; fresh: WI), 40 % (fresh: none; trained: NOG) and none of the others" in line
    )
    assert line.endswith("others – gradient not finite; through eigh for none, whatever the weight.")
    assert "svd for none" in _sentence(content, "Stem, ε = 1e-05")
    assert _sentence(content, "Stem, ε = 0,").endswith(
        "eigh for all covariances, whatever the weight – root not finite."
    )


def test_pairs_are_no_treatment():
    content = _made_up()
    _fail(content, 10, "gradient", treatment=stress_report.PAIRS, solver=_SVD)
    assert "svd for none, whatever the weight" in _sentence(content, "Stem, ε = 0.01")


def test_the_verdict_says_which_kinds_there_are_and_how_many_of_each():
    content = _made_up()
    _fail(content, 6, "gradient", place=POOLING, eps=0.0, solver=_SVD, features="float32")
    _fail(content, 2, "wrong_gradient", place=POOLING, eps=0.0, solver=_SVD, features="float32")
    line = _sentence(content, "Covariance pooling, ε = 0,")
    assert "svd for 80 %, whatever the weight – gradient not finite 75 %, gradient wrong 25 %;" in line


def test_the_verdict_sets_nog_beside_a_weight_that_is_only_larger():
    content = _made_up()
    found = (("svd", 9, 15.0), ("large", 5, 60.0), ("trained SVD", 9, 18.0), ("trained NOG", 6, 61.0))
    for treatment, count, size in found:
        cells = {"place": STEM, "eps": 1e-2, "treatment": treatment}
        _fail(content, count, "gradient", solver=_SVD, features="float32", **cells)
        for cell in stress_report._select(content["cells"], **cells):
            cell["largest"] = size
    assert _sentence(content, "The same by the largest eigenvalue").endswith(
        "svd, 90 % (fresh: none, 15), 50 % (fresh: none, twice as large, 60), 90 % (trained: none, 18), "
        "60 % (trained: NOG, 61)."
    )


def test_the_verdict_of_the_layer_says_where_it_fails():
    content = _made_up()
    _fail(content, 1, "wrong_gradient", place=STEM, eps=0.0, solver=LAYER, features="bfloat16", treatment="sn")
    line = _sentence(content, "The layer's own solver")
    assert "float32 features nothing goes wrong in 420 cases;" in line
    assert "with bfloat16 features it fails for 0.2 % of 420, all with ε = 0: gradient wrong." in line


# Grids and notes


def test_grids_have_a_column_of_what_goes_wrong():
    content = _made_up()
    _fail(content, 10, "root", place=POOLING, eps=0.0, solver=_EIGH, features="float32")
    _fail(content, 5, "unsolved", place=POOLING, eps=0.0, solver=_SVD, features="float32", treatment="sn")
    text = _markdown(content)
    section = text.partition("## Covariance pooling: float32 features, ε = 0\n")[2].partition("##")[0]
    assert "| solver | fresh: none | fresh: SN | fresh: OW | what goes wrong |" in section
    assert "| largest eigenvalue, median | 5 | 5 | 5 |  |" in section
    assert f"| {_EIGH} | 100 %, 1.0e-3 | 100 %, 1.0e-3 | 100 %, 1.0e-3 | root not finite |" in section
    assert f"| {_SVD} | 0 %, 1.0e-3 | 50 %, 1.0e-3 | 0 %, 1.0e-3 | no convergence |" in section


def test_notes_count_what_was_decomposed_and_what_did_not_converge():
    text = _markdown(_made_up())
    assert (
        "1,440 roots were taken by a decomposition, and 3 of these did not converge at first; torch's own are" in text
    )
    assert (
        "Newton-Schulz took 120 more without one. At the paper's rate, 5 in about 77 million, 9.4e-5 were to be" in text
    )
    assert "Shares are of 10 covariances in a stem, 10 in pooling: chance moves them by up to 31 and 31 points" in text


@pytest.mark.parametrize(
    ("share", "text"), [(0, "0 %"), (0.004, "0.4 %"), (0.5, "50 %"), (0.997, "99.7 %"), (1, "100 %")]
)
def test_only_none_is_0_and_only_all_is_100_percent(share, text):
    assert stress_report.percent(share) == text


# The figure


def test_the_figure_has_a_bar_for_each_treatment_ridge_and_solver():
    content = _made_up()
    _fail(content, 9, "gradient", place=STEM, eps=1e-2, solver=_SVD, features="float32", treatment="sn")
    _fail(content, 1, "wrong_gradient", place=STEM, eps=1e-2, solver=_SVD, features="float32", treatment="sn")
    _fail(content, 7, "gradient", features="bfloat16")
    figure = stress_report.figure(content)
    panels = figure.axes
    assert [axes.get_title(loc="left") for axes in panels] == ["ε = 0.01", "ε = 1e-05", "ε = 0"] * 2
    treatments = list(stress_report._TREATMENTS[STEM].values())
    assert [label.get_text() for label in panels[0].get_yticklabels()] == treatments
    broken, wrong = panels[0].containers[:2]  # of autograd through svd
    place = treatments.index("fresh: SN")
    assert [bar.get_width() for bar in broken] == [90.0 if i == place else 0.0 for i in range(len(treatments))]
    assert (wrong[place].get_x(), wrong[place].get_width()) == (90.0, 10.0)
    assert all(bar.get_width() == 0 for axes in panels[1:] for bars in axes.containers for bar in bars)
    said = " ".join(text.get_text() for text in figure.texts)
    assert "CIFAR-10, 32x32, float32 features" in said
    assert "the stem of the small plain ConvNet" in said
    assert "a small ResNet-18 that is not trained" in said
