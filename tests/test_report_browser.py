"""The page of a report in a real browser, from disk with the network cut: drawn, with hover, and nothing overflows."""

import json
import re
from pathlib import Path

import pytest
from browser_helpers import chromium, needs_chromium  # noqa: F401, a fixture

from orthocond.lab import experiments
from orthocond.lab.config import to_json
from orthocond.lab.report import write_report
from orthocond.lab.runs import Run

pytestmark = needs_chromium
RESULTS = Path(__file__).parent.parent / "results"
PIXEL = (
    b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x00\x01\x00\x00\x00\x01\x08\x06\x00\x00\x00\x1f\x15\xc4\x89"
    b"\x00\x00\x00\nIDATx\x9cc\x00\x01\x00\x00\x05\x00\x01\r\n-\xb4\x00\x00\x00\x00IEND\xaeB`\x82"
)


@pytest.fixture(scope="module")
def runs_page(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for method, slope in (("svd", 3.0), ("nog+ow+olr", 1.0)):
        values = to_json(experiments.preset("dbn-sprites-small"))
        values["method"]["name"] = method
        run = Run.create(root, f"dbn-{method}", values)
        for step in range(1, 41):
            jump = 0.5 * (step % 2)
            run.log(step, 0, loss=3.0 / step + jump, condition=10.0 * slope * step, weight_condition=1.0 + slope * step)
        (run.figures / "samples-20.png").write_bytes(PIXEL)
        spectra = {"singular_values": [[slope, 1.0]], "initial_singular_values": [[2 * slope, 1.0]]}
        (run.path / "evaluation.json").write_text(json.dumps({"step": 40, "error": 10.0 * slope} | spectra))
        run.log(20, 0, error=50.0)
        run.log(40, 1, error=10.0 * slope, finished=True)
        run.set_status("finished", 40)
    return write_report(root)


@pytest.fixture(scope="module")
def table_page(tmp_path_factory):
    return write_report(RESULTS / "gan-sprites", out=tmp_path_factory.mktemp("table") / "report.html")


@pytest.fixture
def opened(browser):
    contexts = []

    def go(file, width=1500, scheme="light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, offline=True, color_scheme=scheme)
        contexts.append(context)
        tab = context.new_page()
        tab.problems = []
        tab.on("pageerror", lambda error: tab.problems.append(str(error)))
        tab.on("console", lambda m: tab.problems.append(m.text) if m.type in ("error", "warning") else None)
        tab.on("request", lambda r: tab.problems.append(r.url) if not r.url.startswith(("file:", "data:")) else None)
        tab.goto(file.as_uri())
        tab.wait_for_function("document.body.dataset.ready === 'true'", timeout=60_000)
        return tab

    yield go
    for context in contexts:
        context.close()


def _specs(file):
    return json.loads(re.search(r'id="specs">(.*?)</script>', file.read_text(encoding="utf-8"), re.DOTALL)[1])


@pytest.mark.parametrize("width", [390, 1500])
@pytest.mark.parametrize("name", ["runs_page", "table_page"])
def test_drawn_without_errors_or_overflow(opened, request, name, width):
    file = request.getfixturevalue(name)
    tab = opened(file, width)
    assert tab.problems == []
    assert tab.locator(".vega svg").count() == len(_specs(file)) > 0
    for chart in tab.locator(".vega").all():
        assert chart.get_attribute("role") == "img"
        assert len(chart.get_attribute("aria-label").split()) > 5  # title and sentence, not "Vega visualization"
        assert chart.locator("path[stroke], path[fill]").count() > 0
        assert chart.bounding_box()["width"] > 200
    overflow = tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert overflow <= 0
    tab.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true))")
    assert tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0


def test_hover_shows_the_values(opened, runs_page):
    tab = opened(runs_page)
    chart = tab.locator(".vega").first
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tab.mouse.move(box["x"] + box["width"] / 2 + 4, box["y"] + box["height"] / 2)
    tab.wait_for_selector("#vg-tooltip-element.visible")
    text = tab.locator("#vg-tooltip-element").inner_text()
    assert re.search(r"line\s+(svd|nog\+ow\+olr)\s+of\s+seed 0\s+step\s+\d+\s+value\s+[\d.]+", text)
    assert tab.problems == []


def test_a_line_can_be_switched_off_and_smoothed(opened, runs_page):
    tab = opened(runs_page)

    def lines():
        return (
            tab.locator(".vega")
            .nth(1)
            .locator(".mark-line path")
            .evaluate_all("l => l.map((e) => e.getAttribute('d'))")
        )

    before = lines()
    assert len(before) == 2
    button = tab.get_by_role("button", name="svd").first
    button.click()
    tab.wait_for_function("document.querySelectorAll('.vega')[1].querySelectorAll('.mark-line path').length === 1")
    assert button.get_attribute("aria-pressed") == "false"
    button.click()
    tab.wait_for_function("document.querySelectorAll('.vega')[1].querySelectorAll('.mark-line path').length === 2")
    assert sorted(lines()) == sorted(before)
    tab.locator(".smooth input").fill("5")
    first = "document.querySelectorAll('.vega')[1].querySelector('.mark-line path').getAttribute('d')"
    tab.wait_for_function(f"(old) => !old.includes({first})", arg=before, timeout=10_000)
    assert tab.problems == []


def test_dark_and_print(opened, runs_page):
    def color(tab):
        return tab.evaluate("getComputedStyle(document.body).backgroundColor")

    light, dark = opened(runs_page), opened(runs_page, scheme="dark")
    assert color(light) == "rgb(255, 255, 255)"
    assert color(dark) != color(light)
    ink = "getComputedStyle(document.querySelector('.vega svg text')).fill"
    assert dark.evaluate(ink) == dark.evaluate("getComputedStyle(document.body).color")
    # Nobody has scrolled to the pictures, and they are there to be printed.
    assert light.locator(".picture img").evaluate_all("l => l.map((i) => i.complete && i.naturalWidth)") == [1, 1]
    spectrum = light.locator(".vega[aria-label^='Singular values of the treated weight before and after']")
    assert spectrum.locator(".mark-line path").count() == 4  # two runs, before and after
    dark.emulate_media(media="print")
    assert color(dark) == "rgb(255, 255, 255)"
    assert dark.locator(".copy").first.is_hidden()
