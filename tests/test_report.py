"""Reports: their words follow from the numbers, they need no network, and they work for runs in every state."""

import json
import re
import shlex
from dataclasses import replace

import pytest
import torch
from report_helpers import PIXEL, Page, classifier, config, gan, opened, words
from scipy.stats import binomtest

from orthocond.cli import main
from orthocond.lab import experiments
from orthocond.lab.generation import truth
from orthocond.lab.report import write, write_report
from orthocond.lab.report.charts import curves
from orthocond.lab.report.problems import problems
from orthocond.lab.report.quantities import Quantity
from orthocond.lab.report.sources import (
    group,
    initial_singular_values,
    read,
    read_run,
    singular_values,
    train_command,
)
from orthocond.lab.report.verdict import next_steps, verdict
from orthocond.lab.runs import Run

pytestmark = pytest.mark.usefixtures("without_vega")


# Words follow from the numbers


def test_verdict_of_one_run(tmp_path):
    lines = words(classifier(tmp_path))
    assert len(lines) == 3
    assert lines[0] == "This training finished after 400 steps, with 20.00 % error on held-out images."
    # The last two of eight lines are 700 and 800.
    assert "κ(P + εI) is 750 in the last quarter, 7.5 times larger than at the start" in lines[1]
    assert "κ(W) is 4 in the last quarter, about the same as at the start" in lines[1]
    assert lines[2].startswith("Nothing went wrong")


def test_another_error_is_another_verdict(tmp_path):
    a = classifier(tmp_path, "svd", error=20.0)
    better = classifier(tmp_path / "x", "nog", error=18.0)
    worse = classifier(tmp_path / "y", "nog", error=22.0)
    assert words(a, better)[0].startswith(
        "nog has the lowest error on held-out images, 18.00 %, against 20.00 % of svd"
    )
    assert words(a, worse)[0].startswith("svd has the lowest error on held-out images, 20.00 %, against 22.00 % of nog")
    assert "there is one seed, so the difference may be chance" in words(a, better)[0]


def test_one_seed_asks_for_another(tmp_path):
    a, b = classifier(tmp_path, "svd"), classifier(tmp_path, "nog", error=18.0)
    asked = "One seed cannot tell a difference from chance"
    step = next_steps(group(read([a, b])), None)[-2]
    assert step.text.startswith(asked)
    assert [line.split("--seed ")[1] for line in step.code.splitlines()] == ["1", "1"]
    assert ["--method svd" in step.code, "--method nog" in step.code] == [True, True]
    two = [a, b, classifier(tmp_path, "svd", 1), classifier(tmp_path, "nog", 1)]
    short = [classifier(tmp_path / "short", method, pace=5) for method in ("svd", "nog")]
    for paths in ([a], two, short):
        assert not any(step.text.startswith(asked) for step in next_steps(group(read(paths)), None))


@pytest.mark.parametrize(("gains", "sure"), [((2.0, 2.1, 1.9, 2.0), True), ((2.0, -3.0, 4.0, -1.0), False)])
def test_seeds_decide_whether_a_difference_is_chance(tmp_path, gains, sure):
    paths = [classifier(tmp_path, "svd", seed, error=20.0 + seed) for seed in range(4)]
    paths += [classifier(tmp_path, "nog+olr", s, error=20.0 + s - g) for s, g in enumerate(gains)]
    groups = group(read(paths))
    first = verdict(groups)[0]
    assert ("more than chance can explain" in first) == sure
    assert ("may be chance" in first) != sure
    code = next_steps(groups, None)[-1]
    assert ("gradient=oc.NearestOrthogonal(), lr=oc.OptimalLR()" in code.code) == sure
    compile(code.code, "snippet", "exec")


def test_unfinished_runs_are_not_compared(tmp_path):
    a = classifier(tmp_path, "svd", error=20.0)
    b = classifier(tmp_path, "nog", error=90.0, state="running")
    line, _, last = words(a, b)
    assert "90" not in line
    assert "no other was measured" in line
    assert last == "Not all is done: of 2 trainings 1 unfinished; see the warnings below."


@pytest.mark.parametrize("images", [20, 1000])
def test_an_error_has_the_interval_of_its_images(tmp_path, images):
    run = classifier(tmp_path)
    facts = {"step": 400, "error": 20.0, "recalibrated_error": 20.0, "classes": 12, "images": images}
    (run / "evaluation.json").write_text(json.dumps(facts))
    ends = binomtest(images // 5, images).proportion_ci(method="wilson")
    interval = f"95 % interval {100 * ends.low:.1f} to {100 * ends.high:.1f} %, from {images:,} images of one"
    assert f"20.00 % error on held-out images ({interval}" in words(run)[0]


@pytest.mark.parametrize(("mig", "chance"), [(0.25, True), (0.45, False)])
def test_scores_of_axes_stand_beside_those_of_rotated_ones(tmp_path, mig, chance):
    z = torch.randn(60, 2)
    made = truth.chance(z, z.clone(), [2], rotations=2)
    for key, value in (("mean", 0.2), ("std", 0.05)):
        assert "mig" in made[key]  # an evaluation has it there
        made[key]["mig"] = value
    found = {"step": 240, "directions": {"axes": {"mig": mig}}, "chance": made}
    line = words(gan(tmp_path, evaluation=found))[0]
    assert f"{100 * mig:.0f} % MIG of the axes (axes rotated at random have 20 ± 5 %" in line
    assert ("so this may be chance" in line) == chance


def test_distances_stand_beside_those_of_real_images(tmp_path):
    found = {"step": 240, "frechet_alexnet": {"value": 31.5, "floor": {"value": 4.4}}}
    line = words(gan(tmp_path, evaluation=found))[0]
    assert "a Fréchet distance to the training images (AlexNet) of 31.5 (two sets of real images have 4.4)" in line


def test_too_few_steps_tell_nothing(tmp_path):
    a, b = (classifier(tmp_path, method, error=e, pace=5) for method, e in (("svd", 20.0), ("nog", 10.0)))
    assert words(a)[0].endswith("Nothing can be told from that: 40 steps are too few.")
    assert words(a, b)[0] == (
        "Nothing can be told about which is better: 40 steps are too few. Error on held-out images: svd 20.00 % and "
        "nog 10.00 %."
    )
    assert "Nothing can be told from this training: 40 steps are too few." in opened(a).text
    assert "too few" not in opened(classifier(tmp_path)).text


@pytest.mark.parametrize(("error", "told"), [(91.0, True), (89.9, False)])
def test_an_error_of_guessing_tells_nothing(tmp_path, error, told):
    # Guessing among 12 classes gives 91.67 %, and with 1,000 images 90.23 or less in 5 % of the cases.
    run = classifier(tmp_path, error=error)
    facts = {"step": 400, "error": error, "recalibrated_error": error, "classes": 12, "images": 1000}
    (run / "evaluation.json").write_text(json.dumps(facts))
    assert ("no error is better than that of guessing, 91.7 %" in words(run)[0]) == told


def test_conditions_that_do_not_differ_are_not_ranked(tmp_path):
    line = words(classifier(tmp_path, "svd"), classifier(tmp_path, "nog", kappa=105.0))[1]
    assert line == "κ(P + εI) ends about the same everywhere, at 750; κ(W) ends about the same everywhere, at 4."


def test_trainings_of_unequal_length_have_no_winner(tmp_path):
    a = classifier(tmp_path, "svd", error=20.0)
    b = classifier(tmp_path, "nog", error=10.0, pace=100)
    told = "Nothing can be told about which is better: the trainings are of unequal length, 400 and 800 steps."
    assert words(a, b)[0] == f"{told} Error on held-out images: svd 20.00 % and nog 10.00 %."
    page = opened(a, b, out=tmp_path / "both.html").text
    assert page.count(told) == 2  # verdict and warnings
    assert "not comparable: unequal length" in page
    assert "10.00" not in page.partition("Difference from svd")[2].partition("How sure")[0]
    assert "one seed only" not in page


def test_a_classifier_and_a_gan_are_not_compared(tmp_path):
    """The condition that one logs is of a covariance, that of the other of a weight."""
    paths = (classifier(tmp_path, kappa=100.0), gan(tmp_path))
    came_out, conditions, _ = words(*paths)
    assert "Nothing can be told about which is better: classifiers and GANs have no measure in common." in came_out
    assert conditions == "Classifiers: κ(P + εI) ends at 750; κ(W) ends at 4. GANs: κ(W) ends at 22.5."
    text = opened(*paths, out=tmp_path / "report.html").text
    assert "κ(P + εI) of classifiers, κ(W) of GANs 750 22.5" in text
    assert "Error on held-out images: 20.00 % in every line." in text


def test_trainings_that_saw_the_same_images_are_compared(tmp_path):
    a = classifier(tmp_path, "svd", error=20.0, schedule__batch_size=64)
    b = classifier(tmp_path, "nog", error=10.0, pace=100, schedule__batch_size=32)
    assert "has the lowest error on held-out images, 10.00 %" in words(a, b)[0]


def test_many_short_seeds_are_not_called_sure(tmp_path):
    paths = [classifier(tmp_path, "svd", seed, error=20.0 + seed, pace=5) for seed in range(4)]
    paths += [classifier(tmp_path, "nog", seed, error=18.0 + seed, pace=5) for seed in range(4)]
    groups = group(read(paths))
    assert "chance can explain" not in verdict(groups)[0]
    assert "NearestOrthogonal" not in next_steps(groups, None)[-1].code


def test_conditions_name_both_ends(tmp_path):
    line = words(classifier(tmp_path, "svd", kappa=100.0), classifier(tmp_path, "nog", kappa=1000.0))[1]
    assert "κ(P + εI) ends lowest with svd (750) and highest with nog (7,500, 10 times larger)" in line


# Problems


@pytest.mark.parametrize("state", ["created", "running", "stopped", "diverged", "failed"])
def test_every_state_has_its_sentence(tmp_path, state):
    run = classifier(tmp_path, state=state)
    page = opened(run)
    assert problems(read_run(run))[0] in page.text
    assert "no solver failed" not in page.text


def test_empty_run(tmp_path):
    run = Run.create(tmp_path, "new", config())
    page = opened(run.path)
    assert "This training has not begun, and has logged nothing yet." in page.text
    assert f"orthocond train --resume {run.path}" in page.text


def test_run_of_another_program(tmp_path):
    run = Run.create(tmp_path, "mine", {"lr": 0.1})
    run.log(1, accuracy=0.5)
    run.log(2, accuracy=0.75)
    page = opened(run.path)
    assert "accuracy" in page.text
    assert "not of a preset of orthocond" in page.text


def test_solver_failures_are_told(tmp_path):
    assert "The decomposition failed for 3 matrices." in problems(read_run(classifier(tmp_path, failures=3)))


def test_infinite_conditions_are_told_and_not_drawn(tmp_path):
    page = opened(classifier(tmp_path, kappa=float("inf")))
    assert "κ(P + εI) is not finite in 8 of 8 lines; the matrix is singular there." in page.text


def test_a_dead_discriminator_is_found(tmp_path):
    dead = gan(tmp_path, lambda step: 1.0 if step < 10 else 1.3863)
    alive = gan(tmp_path / "b", lambda step: 1.3863 if step % 2 else 1.2)
    assert any("discriminator looks dead" in text for text in problems(read_run(dead)))
    assert not any("discriminator" in text for text in problems(read_run(alive)))


@pytest.mark.parametrize(
    ("signs", "text"),
    [
        ({"cannot_tell": 0.9}, "The discriminator is dead: in 90 % of the steps"),
        ({"cannot_tell": 0.1, "sample_spread": 0.04}, "The samples have collapsed"),
        ({"olr_at_floor": 0.96}, "OLR took its floor in 96 % of the steps"),
    ],
)
def test_signs_that_were_logged_are_told(tmp_path, signs, text):
    run = gan(tmp_path, **signs)
    assert any(problem.startswith(text) for problem in problems(read_run(run)))
    assert text in opened(run).text
    healthy = {"cannot_tell": 0.2, "sample_spread": 0.8, "olr_at_floor": 0.3}
    assert problems(read_run(gan(tmp_path / "healthy", **healthy))) == []


def test_a_broken_game_is_not_compared(tmp_path):
    found = {"directions": {"axes": {"mig": 0.25}}, "step": 240}
    a = gan(tmp_path, evaluation=found, cannot_tell=1.0)
    b = gan(tmp_path, evaluation=found | {"directions": {"axes": {"mig": 0.5}}}, cannot_tell=0.0)
    line = words(a, b)[0]
    assert line.startswith("Nothing can be told about which is better: the game of 1 of 2 trainings")


def test_stale_statistics_are_told(tmp_path):
    run = classifier(tmp_path)
    (run / "evaluation.json").write_text(json.dumps({"step": 400, "error": 20.0, "recalibrated_error": 15.0}))
    assert any("20.0 % as trained and 15.0 % with refreshed statistics" in text for text in problems(read_run(run)))
    text = opened(run).text
    assert "refreshed_error 15" in text
    assert "As in evaluation.json, where refreshed is recalibrated." in text
    assert text.count("recalibrated") == 1


def test_an_evaluation_of_an_earlier_step_is_left_out_and_told(tmp_path):
    run = gan(tmp_path, lambda step: 1.0, evaluation={"step": 5, "condition": 2.0})
    training = read_run(run)
    assert training.evaluation is None
    assert any("is of step 5 and the run ended at step 240" in text for text in training.trouble)


def test_log_lines_that_alarm(tmp_path):
    path = classifier(tmp_path)
    Run.open(path).note("Checkpoint 7 is damaged and was not used")
    assert any("Checkpoint 7 is damaged" in text for text in problems(read_run(path)))


# The page


def test_the_file_needs_nothing_else(tmp_path):
    page = opened(gan(tmp_path))
    assert all(address.startswith(("#", "data:image/png;base64,")) for address in page.addresses)
    assert not {"link", "iframe", "object"} & set(page.tags)
    css = (write._STATIC / "report.css").read_text()
    assert not re.search(r"url\(|@import|https?:", css)


def test_texts_of_others_are_escaped(tmp_path):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    run = Run.create(tmp_path, "run", {"note": evil, "preset": evil, "method": {"name": evil}})
    run.log(1, **{"loss": 1.0, evil: 1.0})
    run.log(2, **{"loss": 2.0, evil: 3.0})
    run.note(f"error {evil}")
    run.set_status("failed", 2, evil)
    other = Run.create(tmp_path, "other", {"note": "", "preset": evil, "method": {"name": "b"}})
    other.log(1, loss=1.0)
    text = write_report(run.path, other.path, out=tmp_path / "r.html").read_text(encoding="utf-8")
    assert "<script>alert" not in text
    assert "<img src=x" not in text
    assert text.count("<script") == 2
    assert text.count("</script>") == 2


def test_back_ticks_become_code(tmp_path):
    page = write_report(classifier(tmp_path), classifier(tmp_path, seed=1), out=tmp_path / "r.html").read_text()
    assert "<code>--seed</code>" in page
    assert "`" not in Page(page).text


def test_pictures_spectra_and_the_explorer_of_a_gan(tmp_path):
    evaluation = {"step": 240, "singular_values": [[3.0, 2.0, 1.5]], "directions": {"axes": {"mig": 0.25}}}
    run = gan(tmp_path, evaluation=evaluation)
    text = write_report(run).read_text(encoding="utf-8")
    page = Page(text)
    assert text.count("data:image/png;base64,") == 3
    assert "step 5" in page.text
    assert "κ = 2" in page.text
    assert "25 % MIG of the axes" in page.text
    assert f"orthocond explore {run}" in page.text
    (run / "explore.html").write_text("")
    assert "explore.html" in opened(run).addresses
    assert f"{run.name}/explore.html" in opened(run, out=tmp_path / "r.html").addresses


def test_singular_values_of_the_stem_in_the_checkpoint(tmp_path):
    path = classifier(tmp_path)
    weight = torch.randn(8, 3, 3, 3, generator=torch.Generator().manual_seed(0))
    Run.open(path).save({"model": {"conv1.weight": weight}}, 9)
    (found,) = singular_values(read_run(path))
    torch.testing.assert_close(torch.tensor(found), torch.linalg.svdvals(weight.flatten(1)))


def test_spectra_before_and_after(tmp_path):
    run = classifier(tmp_path)
    facts = {"singular_values": [[3.0, 1.5]], "initial_singular_values": [[5.0, 1.0]]}
    (run / "evaluation.json").write_text(json.dumps({"step": 400, "error": 20.0, "recalibrated_error": 20.0} | facts))
    page = opened(run)
    assert "Singular values of the treated weight before and after the training" in page.text
    assert "svd, before: from 1 to 5, κ = 5 and svd, after: from 1.5 to 3, κ = 2" in page.text


def test_the_weight_of_a_gan_before_its_training_is_that_of_its_seed(tmp_path):
    from orthocond.lab.generation.networks import prepare
    from orthocond.lab.presets import read_config

    training = read_run(gan(tmp_path))
    before = torch.get_rng_state()
    (found,) = initial_singular_values(training)
    assert torch.equal(torch.get_rng_state(), before)
    weight = prepare(read_config(training.config)).generator.first_projection.weight
    torch.testing.assert_close(torch.tensor(found), torch.linalg.svdvals(weight.detach().flatten(1)))
    changed = {**training.config, "model": {**training.config["model"], "name": "package.module:function"}}
    assert initial_singular_values(replace(training, config=changed)) == []


def test_traversals_come_before_what_they_do_to_factors(tmp_path):
    run = gan(tmp_path)
    for name in ("effects-axes", "traversal-joint"):
        (run / "figures" / f"{name}.png").write_bytes(PIXEL)
    places = [opened(run).text.index(words) for words in ("axes, traversal", "joint, traversal", "axes, effect")]
    assert places == sorted(places)


def test_quantities_can_be_left_out(tmp_path):
    run = classifier(tmp_path)
    assert "Time of a step" in opened(run).text
    text = write_report(run, leave_out=["step_seconds"]).read_text(encoding="utf-8")
    assert "Time of a step" not in text


def test_a_parametrized_stem_is_not_taken_for_a_weight(tmp_path):
    path = classifier(tmp_path)
    state = {"conv1.parametrizations.weight.original": torch.randn(8, 3, 3, 3), "conv2.weight": torch.randn(8, 8, 3, 3)}
    Run.open(path).save({"model": state}, 9)
    assert singular_values(read_run(path)) == []


def test_each_chart_has_a_title_a_sentence_and_a_table(tmp_path):
    text = write_report(classifier(tmp_path)).read_text(encoding="utf-8")
    charts = re.findall(r'<figure class="chart.*?</figure>', text, re.DOTALL)
    specs = json.loads(re.search(r'id="specs">(.*?)</script>', text, re.DOTALL)[1])
    assert len(charts) == len(specs) > 0
    for chart in charts:
        assert re.search(r"<h3 id=\"t\d+\">[^<]+</h3>", chart)
        assert re.search(r"<figcaption id=\"d\d+\">[^<]+ends at [^<]+</figcaption>", chart)
        assert "<table>" in chart


def test_single_points_are_seen_and_short_ranges_have_ticks(tmp_path):
    groups = group(read([classifier(tmp_path), classifier(tmp_path, "nog", error=19.0, kappa=400.0)]))
    names = [g.label for g in groups]
    error = curves(groups, Quantity("error", "Error"), names)  # one point for each training: no line
    assert error.spec["layer"][1]["encoding"]["opacity"]["value"] > 0.5
    kappa = Quantity("condition", "κ", style="log")
    assert curves(groups, kappa, names).spec["layer"][0]["encoding"]["y"]["scale"]["type"] == "log"  # 100 to 3,200
    short = Run.create(tmp_path, "short", config())
    for step in range(1, 30):
        short.log(step, 0, condition=3.2 + 0.04 * step)
    narrow = curves(group(read([short.path])), kappa, ["svd"]).spec["layer"]
    assert "type" not in narrow[0]["encoding"]["y"]["scale"]
    assert narrow[1]["encoding"]["opacity"]["value"] == 0


def test_settings_that_differ(tmp_path):
    page = opened(
        classifier(tmp_path, schedule__lr=0.1), classifier(tmp_path, schedule__lr=0.5), out=tmp_path / "r.html"
    )
    assert "What differs setting lr 0.1 lr 0.5 schedule.lr 0.1 0.5" in page.text


def test_equal_runs_are_told_apart_by_their_numbers(tmp_path):
    labels = [g.label for g in group(read([classifier(tmp_path), classifier(tmp_path)]))]
    assert labels == ["svd (00000)", "svd (00001)"]


def test_the_command_makes_the_same_configuration(tmp_path, monkeypatch):
    changed = config(
        "nog+olr", 3, schedule__lr=0.05, data__flip=False, schedule__milestones=[2, 3], method__olr="paper"
    )
    run = Run.create(tmp_path, "run", changed)
    command = train_command(read_run(run.path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(experiments, "train", lambda *args, **kwargs: 130)  # as if stopped at once
    assert main([*shlex.split(command)[1:], "--quiet"]) == 130
    (made,) = (tmp_path / "runs").glob("*/config.json")
    assert json.loads(made.read_bytes()) == changed


def test_the_same_runs_give_the_same_bytes(tmp_path):
    run = classifier(tmp_path)
    assert write_report(run).read_bytes() == write_report(run, out=tmp_path / "other.html").read_bytes()


def test_many_runs_are_drawn_as_means(tmp_path):
    for method in ("svd", "nog", "olr"):
        for seed in range(5):
            classifier(tmp_path, method, seed, error=20.0 + seed)
    page = opened(tmp_path)
    assert "Training loss, mean over seeds" in page.text
    assert "All 15 trainings" not in page.text
    assert "15 trainings, 3 settings" in page.text
