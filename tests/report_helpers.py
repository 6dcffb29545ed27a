"""Runs in every state, made by hand, for the tests of reports."""

import json
from html.parser import HTMLParser

from orthocond.lab import experiments
from orthocond.lab.config import to_json
from orthocond.lab.report import write_report
from orthocond.lab.report.sources import (
    group,
    read,
)
from orthocond.lab.report.verdict import verdict
from orthocond.lab.runs import Run

PIXEL = (
    b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x00\x01\x00\x00\x00\x01\x08\x06\x00\x00\x00\x1f\x15\xc4\x89"
    b"\x00\x00\x00\nIDATx\x9cc\x00\x01\x00\x00\x05\x00\x01\r\n-\xb4\x00\x00\x00\x00IEND\xaeB`\x82"
)


def config(method="svd", seed=0, preset="dbn-sprites-small", **changes):
    values = to_json(experiments.preset(preset))
    values["method"]["name"] = method
    values["seed"] = seed
    for path, value in changes.items():
        branch, _, leaf = path.partition("__")
        values[branch][leaf] = value
    return values


def classifier(
    root, method="svd", seed=0, *, error=20.0, state="finished", kappa=100.0, failures=0, pace=50, **changes
):
    run = Run.create(root, f"dbn-sprites-small-{method}-seed{seed}", config(method, seed, **changes))
    for step in range(1, 9):
        facts = {"condition": kappa * step, "weight_condition": 4.0, "rank": 27, "solver_failures": failures}
        run.log(pace * step, 0, loss=3.0 / step, lr=0.1, timing={"step_seconds": 0.5}, **facts)
    end = {"finished": True} if state == "finished" else {}
    run.log(8 * pace, 1, error=error, val_loss=0.7, solver_failures=failures, **end)
    run.set_status(state, 8 * pace, "The loss is nan at step 401" if state == "diverged" else "")
    return run.path


def gan(root, discriminator=lambda step: 1.0 + 0.1 * (step % 3), evaluation=None, **signs):
    run = Run.create(root, "gan-sprites-none-seed0", config("none", preset="gan-sprites"))
    for step in range(1, 25):
        facts = {"condition": 1.0 + step, "conditions": [1.0 + step], "largest": [1.0 + step], "smallest": [1.0]}
        run.log(10 * step, 0, discriminator_loss=discriminator(step), generator_loss=0.7, **facts, **signs)
    run.set_status("finished", 240)
    for step in (5, 10):
        (run.figures / f"samples-{step:07d}.png").write_bytes(PIXEL)
    (run.figures / "traversal-axes.png").write_bytes(PIXEL)
    if evaluation is not None:
        (run.path / "evaluation.json").write_text(json.dumps(evaluation))
    return run.path


class Page(HTMLParser):
    """What a browser would fetch, and the text that it would show."""

    def __init__(self, text):
        super().__init__()
        self.addresses, self.tags, self.words, self.raw = [], [], [], False
        self.feed(text)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.raw = tag in ("script", "style")
        self.addresses += [value for name, value in attributes if name in ("src", "href", "srcset", "data", "action")]

    def handle_endtag(self, tag):
        self.raw = False

    def handle_data(self, data):
        if not self.raw:
            self.words.append(data)


def opened(*paths, out=None):
    return Page(write_report(*paths, out=out).read_text(encoding="utf-8"))


def words(*paths):
    return verdict(group(read(paths)))
