"""A generator whose directions are known, and its page in a browser."""

import base64
import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from browser_helpers import chromium, needs_chromium  # noqa: F401, a fixture
from PIL import Image
from torch import nn

from orthocond.directions import Directions, axes
from orthocond.lab.explorer.page import Kind, write_page
from orthocond.lab.explorer.sources import from_module


class Quadrants(nn.Module):
    """Four latents, each of which lights one quadrant of 8 x 8 pixels: what a direction does is known."""

    z_dim = 4

    def forward(self, z):
        corner = torch.zeros(4, 8, 8)
        for i in range(4):
            corner[i, 4 * (i // 2) : 4 * (i // 2) + 4, 4 * (i % 2) : 4 * (i % 2) + 4] = 1
        return torch.tanh(torch.einsum("ni,ihw->nhw", z, corner))[:, None].expand(-1, 3, -1, -1)


@pytest.fixture(scope="module", name="quadrants")
def known_exhibit():
    tied = Directions(torch.eye(4)[:3], torch.tensor([2.0, 1.0, 1.0]), method="sefa")
    found = from_module(Quadrants(), "quadrants")
    kinds = (
        Kind("axes", "axes", "One latent each.", axes(4).measure(Quadrants())),
        Kind("tied", "tied", "Two tie.", tied),
    )
    return replace(found, kinds=kinds)


@pytest.fixture(name="opened")
def pages(browser, tmp_path):
    """Open a page and wait until it has drawn; messages of the console are errors."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, accept_downloads=True, offline=True)
    context.set_default_timeout(120_000)  # milliseconds: what is waited for is a state, however busy the machine is
    context.grant_permissions(["clipboard-read", "clipboard-write"])

    def go(exhibits, state=None, width=1280):
        file = tmp_path / "page.html"
        file.write_text(write_page(exhibits, "Test <of> the page"), encoding="utf-8")
        tab = context.new_page()
        tab.set_viewport_size({"width": width, "height": 900})
        tab.problems = []
        tab.on("pageerror", lambda error: tab.problems.append(str(error)))
        tab.on("request", lambda request: tab.problems.append(request.url) if request.url.startswith("http") else None)
        tab.goto(file.as_uri() + (f"#{state}" if state else ""))
        tab.wait_for_function("document.body.dataset.ready === 'true' || !document.getElementById('problem').hidden")
        return tab

    yield go
    context.close()


def settled(tab, action):
    """Do something and wait for the pictures that follow."""
    before = int(tab.evaluate("document.body.dataset.updates"))
    action()
    tab.wait_for_function(f"Number(document.body.dataset.updates) > {before} && !busy && !again")


def pixels(tab, selector="#panels canvas"):
    url = tab.evaluate(f"document.querySelector('{selector}').toDataURL()")
    image = Image.open(io.BytesIO(base64.b64decode(url.split(",")[1]))).convert("RGB")
    return torch.from_numpy(np.array(image, dtype=np.float32))


def corners(tab, selector="#panels canvas"):
    """Brightness of the four quadrants."""
    image = pixels(tab, selector).mean(2)
    h, w = image.shape
    spots = ((h // 4, w // 4), (h // 4, 3 * w // 4), (3 * h // 4, w // 4), (3 * h // 4, 3 * w // 4))
    return [float(image[y, x]) for y, x in spots]


def place_of(tab, selector):
    """The latent of a direction that is called z3."""
    return int(tab.input_value(selector).removeprefix("z"))


def slide(tab, index, value):
    settled(tab, lambda: tab.evaluate(
        """([i, v]) => { const s = document.querySelectorAll('.direction input[type=range]')[i]; s.value = v;
        s.dispatchEvent(new Event('input')); s.dispatchEvent(new Event('change')); }""", [index, value]))  # fmt: skip
