"""Reports of runs whose files are damaged: the page says so, and what is left is right."""

import json

import pytest
from report_helpers import classifier, gan, opened, words

from orthocond.lab.report.problems import problems
from orthocond.lab.report.sources import read_run

pytestmark = pytest.mark.usefixtures("without_vega")


@pytest.mark.parametrize("file", ["metrics.jsonl", "status.json", "evaluation.json"])
def test_a_damaged_file_is_a_warning(tmp_path, file):
    run = classifier(tmp_path)
    (run / file).write_text("{broken\n")
    page = opened(run)
    assert file in page.text
    assert "damaged" in page.text or "not a JSON object" in page.text


@pytest.mark.parametrize(
    ("file", "value"),
    [
        ("metrics.jsonl", {"largest": 3.0}),
        ("metrics.jsonl", {"smallest": ["x"]}),
        ("metrics.jsonl", {"conditions": [1.0, 2.0]}),
        ("metrics.jsonl", {"step": 10**400}),
        ("evaluation.json", {"singular_values": [1.0]}),
        ("evaluation.json", {"initial_singular_values": [[None]]}),
        ("status.json", {"message": 3}),
    ],
    ids=str,
)
def test_a_value_of_the_wrong_kind_is_a_warning_that_names_the_file(tmp_path, file, value):
    assert read_run(gan(tmp_path / "whole", evaluation={"step": 240, "huge": 10**400})).trouble == ()
    run = gan(tmp_path, evaluation={"step": 240, "huge": 10**400})
    *lines, last = (run / file).read_text().splitlines() if file.endswith("jsonl") else [(run / file).read_text()]
    (run / file).write_text("\n".join([*lines, json.dumps(json.loads(last) | value), ""]))
    assert any(str(run / file) in text for text in read_run(run).trouble)
    assert file in opened(run).text


@pytest.mark.parametrize(("state", "told"), [("finished", True), ("diverged", True), ("running", False)])
def test_a_last_line_that_is_cut_off_is_told_unless_it_is_being_written(tmp_path, state, told):
    file = classifier(tmp_path, state=state) / "metrics.jsonl"
    assert read_run(file.parent).trouble == ()
    file.write_bytes(file.read_bytes()[:-20])
    text = f"{file} ends in the middle of a line: the last values are lost."
    assert (text in problems(read_run(file.parent))) == told


@pytest.mark.parametrize(
    ("error", "images"), [(float("nan"), 1000), (150.0, 1000), (-5.0, 1000), (20.0, -3), (20.0, float("inf"))]
)
def test_an_error_or_a_number_of_images_that_cannot_be_has_no_interval(tmp_path, error, images):
    run = classifier(tmp_path, error=error)
    evaluation = {"step": 400, "error": error, "images": images, "classes": 12}
    (run / "evaluation.json").write_text(json.dumps(evaluation))
    first = words(run)[0]
    assert "interval" not in first
    assert ("with no finite error on held-out images" in first) == (error != error)


def test_a_seed_without_a_finite_error_is_left_out_of_the_mean(tmp_path):
    classifier(tmp_path, seed=0, error=float("nan"))
    classifier(tmp_path, seed=1, error=20.0)
    assert "20.00 % error on held-out images, between 20.00 % and 20.00 %" in words(tmp_path)[0]
