"""What a notebook shows: small tables that need nothing from outside, with every name escaped."""

from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import orthocond as oc
from orthocond._html import paragraph, table
from orthocond.directions import JointDirections


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


def test_joint_directions_say_how_far_from_orthogonal_they_are():
    vectors, names = torch.eye(2), ("a", "b")
    found = JointDirections(
        vectors, torch.ones(2), names, "joint", energies={"axes": 0.5, "joint": 0.25}, agreement=0.9
    )
    text = read(found._repr_html_())
    assert text[0] == "joint: 2 directions of 2 dimensions"
    assert text[-1] == "off the diagonal: axes 0.500, joint 0.250; agreement of the starts 0.900"


def test_spectrum():
    text = read(oc.spectrum(torch.diag(torch.tensor([4.0, 2.0, 0.0])), eps=1.0)._repr_html_())
    pairs = dict(zip(text[::2], text[1::2], strict=True))
    assert pairs["matrices"] == "1 of size 3"
    assert pairs["condition (+1)"] == "5"  # (4 + 1) / (0 + 1)
    assert pairs["condition on the range"] == "2"
    assert pairs["largest eigenvalue"] == "4"


def test_history():
    text = read(history()._repr_html_())
    assert text[:2] == ["layer", "steps"]
    assert "rank" in text
    row = text[text.index("1") :]  # the name of the layer in the model
    assert row[1] == "0 to 0"
    assert read(oc.monitor.History()._repr_html_()) == ["No records."]


def test_diagnosis():
    model = nn.Sequential(nn.Conv2d(3, 64, 3), oc.DecorrelatedBatchNorm2d(64))
    found = oc.diagnose(model, torch.randn(8, 3, 8, 8))
    text = read(found._repr_html_())
    assert text[0] == "layer"
    assert "1" in text  # the SVD layer by its name in the model
    assert any("27 of 64" in cell for cell in text)
    assert any("Rank 27 of 64 by construction" in cell for cell in text)


def test_cells_and_code_are_escaped():
    assert "&lt;script&gt;" in table(("a",), (("<script>",),))
    assert read(paragraph("a & b:\n    x < y\nc")) == ["a & b:", "x < y", "c"]
    assert 'a<pre style="font-family: monospace">x &lt; y</pre>c' in paragraph("a\n    x < y\nc")
