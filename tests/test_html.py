"""What a notebook shows: small tables that need nothing from outside, with every name escaped."""

from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import orthocond as oc
from orthocond._html import paragraph, table


class Checker(HTMLParser):
    """Every tag is closed in order, and none loads or runs anything."""

    allowed = frozenset({"table", "thead", "tbody", "tr", "th", "td", "div", "pre", "br"})

    def __init__(self):
        super().__init__()
        self.open = []
        self.text = []

    def handle_starttag(self, tag, attributes):
        assert tag in self.allowed
        assert all(name == "style" for name, _ in attributes)
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read(html):
    """The texts of cells and paragraphs of valid HTML."""
    checker = Checker()
    checker.feed(html)
    assert not checker.open
    return checker.text


def treatment():
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = oc.treat(model, optimizer, gradient=oc.NearestOrthogonal(), lr=oc.OptimalLR())
    model(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    return handle


def directions():
    return oc.directions.Directions(torch.eye(3), torch.tensor([2.0, 1.0, 1.0]), ("<b>", "b", "c"), "axes", 0.01)


def history():
    model = nn.Sequential(nn.Linear(4, 3), oc.DecorrelatedBatchNorm1d(3))
    with oc.ConditionMonitor(model) as monitor:
        model(torch.randn(9, 4)).sum().backward()
        monitor.step()
    return monitor.history


RESULTS = {
    "treatment": treatment,
    "directions": directions,
    "history": history,
    "spectrum": lambda: oc.spectrum(torch.eye(3)),
    "diagnosis": lambda: oc.diagnose(nn.Linear(4, 3), torch.randn(9, 4)),
}


@pytest.mark.parametrize("name", RESULTS)
def test_html_is_valid_and_needs_nothing(name):
    assert read(RESULTS[name]()._repr_html_())


def test_treatment():
    text = read(treatment()._repr_html_())
    assert text[0].startswith("Treatment of Linear.weight (3, 4) under SGD, 1 step")
    assert "last η" in text
    row = text[text.index("last η") + 1 :]
    assert row[:3] == ["Linear.weight (3, 4)", "1", "0"]


def test_directions():
    text = read(directions()._repr_html_())
    assert text[0] == "axes: 3 directions of 3 dimensions"
    assert "<b>" in text  # as a name, not as a tag, which the checker would refuse
    assert "50.0%" in text
    assert "tied with 2" in text


def test_cells_and_code_are_escaped():
    assert "&lt;script&gt;" in table(("a",), (("<script>",),))
    assert read(paragraph("a & b:\n    x < y\nc")) == ["a & b:", "x < y", "c"]
    assert "<pre>x &lt; y</pre>c" in paragraph("a\n    x < y\nc")
