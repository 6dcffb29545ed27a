"""The page of the explorer in a real browser, from disk with the network cut: every control does what it says."""

import json
import re
from dataclasses import replace

import pytest
import torch
from browser_helpers import chromium, needs_chromium  # noqa: F401, a fixture
from explorer_helpers import Quadrants, corners, known_exhibit, pages, pixels, place_of, settled, slide  # noqa: F401, two fixtures
from PIL import Image

import orthocond as oc
from orthocond.directions import Directions
from orthocond.lab.explorer.page import Kind

pytestmark = needs_chromium


def test_pictures_are_those_of_the_generator(opened, quadrants):
    tab = opened([quadrants])
    z = torch.tensor(tab.evaluate("[...latent(0, 0, 4, 'normal')]"))
    expected = (255 * (torch.tanh(z) + 1) / 2).tolist()
    assert corners(tab) == pytest.approx(expected, abs=1)
    assert tab.title() == "Test <of> the page — orthocond explorer"
    assert tab.problems == []


def test_normal_latents_have_mean_0_and_deviation_1(opened, quadrants):
    tab = opened([quadrants])
    z = torch.tensor(tab.evaluate("[...Array(2000).keys()].map(i => [...latent(i, 0, 8, 'normal')])"))
    assert float(z.mean()) == pytest.approx(0, abs=0.03)
    assert float(z.std()) == pytest.approx(1, abs=0.03)
    u = torch.tensor(tab.evaluate("[...Array(500).keys()].map(i => [...latent(i, 0, 8, 'uniform')])"))
    assert float(u.min()) > -1
    assert float(u.std()) == pytest.approx(3**-0.5, abs=0.03)


def test_a_slider_moves_its_direction_alone_and_undo_takes_it_back(opened, quadrants):
    tab = opened([quadrants])
    order = [place_of(tab, f".direction input[type=text] >> nth={i}") for i in range(4)]
    before = corners(tab)
    slide(tab, 0, 3)
    after = corners(tab)
    assert after[order[0]] > before[order[0]] + 10
    assert [after[i] for i in order[1:]] == pytest.approx([before[i] for i in order[1:]], abs=1)
    settled(tab, lambda: tab.click("#undo"))
    assert corners(tab) == pytest.approx(before, abs=1)


def test_set_fixes_the_coordinate_whatever_the_seed(opened, quadrants):
    tab = opened([quadrants])
    settled(tab, lambda: tab.select_option("#mode", "set"))
    place = place_of(tab, ".direction input[type=text] >> nth=0")
    slide(tab, 0, 0.5)
    found = []
    for seed in ("3", "4"):
        settled(tab, lambda seed=seed: (tab.fill("#seed", seed), tab.press("#seed", "Enter")))
        found.append(corners(tab))
    expected = 255 * (torch.tanh(torch.tensor(0.5)).item() + 1) / 2
    assert [c[place] for c in found] == pytest.approx([expected] * 2, abs=1)
    assert found[0] != found[1]


def test_seed_random_truncation_samples_reset(opened, quadrants):
    tab = opened([quadrants])
    first = corners(tab)
    settled(tab, lambda: tab.click("#random"))
    assert corners(tab) != first
    settled(tab, lambda: tab.evaluate(
        "(() => { const t = document.getElementById('truncation'); t.value = 0; t.dispatchEvent(new Event('input')); "
        "t.dispatchEvent(new Event('change')); })()"))  # fmt: skip
    assert corners(tab) == pytest.approx([127.5] * 4, abs=1)
    settled(tab, lambda: tab.select_option("#samples", "4"))
    settled(tab, lambda: tab.click("#reset"))
    assert corners(tab) == pytest.approx(first, abs=1)
    settled(tab, lambda: tab.select_option("#samples", "9"))
    assert tab.evaluate("shown[0].count") == 9


def test_dragging_and_arrow_keys_walk_along_two_directions(opened, quadrants):
    tab = opened([quadrants])
    box = tab.locator("#panels canvas").first.bounding_box()
    middle = (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)

    def drag():
        tab.mouse.move(*middle)
        tab.mouse.down()
        tab.mouse.move(middle[0] + box["width"] / 4, middle[1] - box["width"] / 8, steps=4)
        tab.mouse.up()

    settled(tab, drag)
    assert tab.evaluate("state.values.axes.slice(0, 2)") == pytest.approx([1.5, -0.75], abs=0.05)
    settled(tab, lambda: tab.keyboard.press("ArrowRight"))
    settled(tab, lambda: tab.keyboard.press("ArrowDown"))
    assert tab.evaluate("state.values.axes.slice(0, 2)") == pytest.approx([1.75, -0.5], abs=0.05)


def test_the_strip_walks_the_chosen_direction(opened, quadrants):
    tab = opened([quadrants])
    settled(tab, lambda: tab.check(".direction input[type=radio] >> nth=1"))
    tab.wait_for_function("!busy")
    place = place_of(tab, ".direction input[type=text] >> nth=1")
    strip = pixels(tab, "#strips canvas").mean(2)
    side = strip.shape[1] // 7
    y = side // 4 if place < 2 else 3 * side // 4
    x = side // 4 if place % 2 == 0 else 3 * side // 4
    brightness = [float(strip[y, i * side + x]) for i in range(7)]
    assert brightness == sorted(brightness)
    assert brightness[-1] - brightness[0] > 150


def test_the_heat_map_shows_where_a_direction_acts(opened, quadrants):
    tab = opened([quadrants])
    settled(tab, lambda: tab.check("#heat"))
    place = place_of(tab, ".direction input[type=text] >> nth=0")
    found = tab.evaluate(
        "(() => { const c = document.querySelector('canvas.over'), d = c.getContext('2d'); "
        "return [[.25, .25], [.75, .25], [.25, .75], [.75, .75]].map("
        "([x, y]) => d.getImageData(x * c.width, y * c.height, 1, 1).data[3]); })()"
    )
    assert found[place] > 200
    assert [v for i, v in enumerate(found) if i != place] == [0, 0, 0]
    filters = "[...document.querySelectorAll('.picture canvas')].map(c => getComputedStyle(c).filter)"
    assert tab.evaluate(filters) == ["grayscale(1) brightness(0.6)", "none"]  # so that the map's colors are its own
    settled(tab, lambda: tab.uncheck("#heat"))
    assert tab.evaluate(filters) == ["none", "none"]


def test_a_rectangle_finds_the_direction_that_acts_in_it(opened, quadrants):
    tab = opened([quadrants])
    settled(tab, lambda: tab.select_option("#tool", "region"))
    box = tab.locator("#panels canvas").first.bounding_box()

    def draw():
        tab.mouse.move(box["x"] + 0.55 * box["width"], box["y"] + 0.05 * box["height"])
        tab.mouse.down()
        tab.mouse.move(box["x"] + 0.95 * box["width"], box["y"] + 0.45 * box["height"], steps=4)
        tab.mouse.up()

    draw()
    tab.wait_for_function("active().kind === 'region' && !busy")
    vector = tab.evaluate("kindOf(active()).directions[0].vector")
    assert abs(vector[1]) == pytest.approx(1, abs=1e-3)  # the quadrant at the top right
    first = tab.evaluate("kindOf(active()).directions[0]")
    assert first["importance"] > 0.6
    expected = oc.directions.effect_sizes(Quadrants(), torch.eye(4)[1:2], 512, step=0.25).item()
    assert first["effect"] == pytest.approx(expected, rel=0.4)  # of eight latents
    link = tab.evaluate("location.hash")[1:]
    again = opened([quadrants], state=link)
    assert again.evaluate("active().kind") == "region"
    assert abs(again.evaluate("kindOf(active()).directions[0].vector")[1]) == pytest.approx(1, abs=1e-3)


def test_names_belong_to_their_directions(opened, quadrants, tmp_path):
    """Those of another region, or of another file of the same name, are new ones."""
    tab = opened([quadrants])

    def rename(text):
        tab.fill(".direction input[type=text] >> nth=0", text)
        settled(tab, lambda: tab.press(".direction input[type=text] >> nth=0", "Enter"))

    for box in ([0.5, 0, 1, 0.5], [0, 0.5, 0.5, 1]):
        settled(tab, lambda box=box: tab.evaluate("box => takeRegion(box)", box))
        assert tab.input_value(".direction input[type=text] >> nth=0") == "region 0"
        rename("corner")
        settled(tab, lambda box=box: tab.evaluate("box => takeRegion(box)", box))  # the same again
        assert tab.input_value(".direction input[type=text] >> nth=0") == "corner"
    for names in (("one", "two"), ("three", "")):
        Directions(torch.eye(4)[:2], torch.tensor([2.0, 1.0]), names).save(tmp_path / "mine.json")
        settled(tab, lambda: tab.set_input_files("#load-json", str(tmp_path / "mine.json")))
        assert tab.input_value(".direction input[type=text] >> nth=0") == names[0]
        assert tab.input_value(".direction input[type=text] >> nth=1") == (names[1] or "1")
        assert tab.evaluate("state.values['file:mine.json']") is None
        rename("corner")
        slide(tab, 0, 2)


def test_a_rectangle_between_pixels_has_no_directions(opened, quadrants):
    tab = opened([quadrants])  # of 8 x 8 pixels
    settled(tab, lambda: tab.evaluate("takeRegion([0.01, 0.01, 0.05, 0.05])"))
    assert tab.inner_text("#status") == "The rectangle is too small."
    assert tab.evaluate("state.region") is None


def test_a_file_that_python_refuses_is_refused(opened, quadrants, tmp_path):
    tab = opened([quadrants])
    row = {"name": "a", "vector": [1, 0, 0, 0], "importance": 1, "effect": 1}
    changes = (
        {"importance": -1},
        {"effect": -1},
        {"importance": "much"},
        {"vector": [2, 0, 0, 0]},
        {"vector": [1, 0, 0]},
    )
    files = {f"{i}.json": [row | change] for i, change in enumerate(changes)} | {"many.json": [row] * 5}
    for name, rows in files.items():
        (tmp_path / name).write_text(json.dumps({"z_dim": 4, "kind": "mine", "directions": rows}))
        with pytest.raises(ValueError, match=r"irections|vectors"):
            Directions.load(tmp_path / name)
        tab.set_input_files("#load-json", str(tmp_path / name))
        tab.wait_for_function(f"$('status').textContent.includes('{name} needs at most 4 directions of length 1')")
    assert tab.evaluate("state.loaded") == []


def test_ties_of_a_file_that_are_no_groups_follow_from_importances(opened, quadrants, tmp_path):
    rows = [{"name": str(i), "vector": [float(i == j) for j in range(4)], "importance": 1} for i in range(2)]
    content = {"z_dim": 4, "kind": "mine", "tie_tol": 0.01, "ties": [[0, 0], [1]], "directions": rows}
    (tmp_path / "mine.json").write_text(json.dumps(content))
    tab = opened([quadrants])
    settled(tab, lambda: tab.set_input_files("#load-json", str(tmp_path / "mine.json")))
    assert tab.evaluate("kindOf(active()).ties") == [[0, 1]]


def test_the_address_restores_everything(opened, quadrants):
    tab = opened([quadrants])
    settled(tab, lambda: (tab.fill("#seed", "17"), tab.press("#seed", "Enter")))
    slide(tab, 2, -1.5)
    settled(tab, lambda: tab.select_option("#samples", "4"))
    tab.fill(".direction input[type=text] >> nth=0", "light é")
    settled(tab, lambda: tab.press(".direction input[type=text] >> nth=0", "Enter"))
    again = opened([quadrants], state=tab.evaluate("location.hash")[1:])
    assert again.evaluate("state") == tab.evaluate("state")
    assert torch.equal(pixels(again), pixels(tab))
    assert again.input_value(".direction input[type=text] >> nth=0") == "light é"
    assert opened([quadrants], state="%%%nonsense").evaluate("state.seed") == 0


def test_ties_are_told(opened, quadrants, tmp_path):
    tab = opened([quadrants])
    settled(tab, lambda: tab.select_option("#kind", "tied"))
    assert "1, 2: these 2 are arbitrary up to rotation" in tab.inner_text("#ties")
    assert tab.locator(".facts .tie").count() == 2
    with tab.expect_download() as waiting:
        tab.click("#save-json")
    waiting.value.save_as(tmp_path / "tied.json")
    found = Directions.load(tmp_path / "tied.json")
    assert len(found.ties) == 1
    content = json.loads((tmp_path / "tied.json").read_text())
    (tmp_path / "told.json").write_text(json.dumps(content | {"ties": [[0, 2]]}))  # what importances do not say
    tab.set_input_files("#load-json", str(tmp_path / "told.json"))
    tab.wait_for_function("active().kind.startsWith('file:')")
    assert tab.evaluate("kindOf(active()).ties") == [[0, 2]]


def test_downloads_are_what_they_say(opened, quadrants, tmp_path):
    tab = opened([quadrants])
    tab.fill(".direction input[type=text] >> nth=0", "corner")
    settled(tab, lambda: tab.press(".direction input[type=text] >> nth=0", "Enter"))
    files = {}
    for button in ("save-png", "save-strip", "save-gif", "save-json"):
        with tab.expect_download() as waiting:
            tab.click(f"#{button}")
        files[button] = tmp_path / waiting.value.suggested_filename
        waiting.value.save_as(files[button])
    with Image.open(files["save-png"]) as picture, Image.open(files["save-strip"]) as strip:
        assert picture.width >= 400
        assert strip.width == 7 * strip.height
    with Image.open(files["save-gif"]) as animation:
        assert (animation.format, animation.n_frames) == ("GIF", 30)
    found = Directions.load(files["save-json"])
    assert found.names[0] == "corner"
    order = [int(name.removeprefix("z")) for name in tab.evaluate("kindOf(active()).directions.map(d => d.name)")]
    assert torch.equal(found.vectors, torch.eye(4)[order])
    torch.testing.assert_close(found.effect, quadrants.kinds[0].directions.effect[order], rtol=1e-3, atol=0)
    assert found.ties == ()
    tab.set_input_files("#load-json", str(files["save-json"]))
    tab.wait_for_function("active().kind.startsWith('file:')")
    assert tab.input_value(".direction input[type=text] >> nth=0") == "corner"
    again = opened([quadrants], state=tab.evaluate("location.hash")[1:])  # the link holds what was loaded
    assert again.evaluate("kindOf(active()).title") == f"from {files['save-json'].name}"
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps({"directions": [{"vector": [1, 2]}]}))
    tab.set_input_files("#load-json", str(wrong))
    tab.wait_for_function("document.getElementById('status').textContent.includes('4 numbers each')")
    tab.click("#copy-link")
    tab.wait_for_function("document.getElementById('status').textContent.includes('copied')")
    assert tab.evaluate("navigator.clipboard.readText()") == tab.url


def test_keyboard_and_screen_reader_reach_everything(opened, quadrants):
    tab = opened([quadrants])
    unnamed = tab.evaluate(
        """[...document.querySelectorAll('button, input, select, [tabindex]')].filter(e => !(
        e.getAttribute('aria-label') || e.textContent.trim() || e.labels?.length)).map(e => e.outerHTML)"""
    )
    assert unnamed == []
    assert tab.get_attribute("#status", "aria-live") == "polite"
    tab.focus(".direction input[type=range] >> nth=0")
    settled(tab, lambda: tab.keyboard.press("ArrowRight"))
    assert tab.evaluate("state.values.axes[0]") == pytest.approx(0.05)
    assert tab.get_attribute(".direction input[type=range] >> nth=0", "aria-valuetext") == "0.05 sigma"
    assert "seed 0" in tab.get_attribute("#panels canvas", "aria-label")
    order = tab.evaluate(
        "[...document.querySelectorAll('button, input, select, summary, [tabindex]')].map(e => e.tabIndex)"
    )
    assert set(order) == {0}
    settled(tab, lambda: tab.keyboard.press("Control+z"))
    assert tab.evaluate("state.values") == {}
    assert tab.inner_text("#status") == "Undone."


def test_a_screen_reader_hears_events_and_not_every_update(opened, quadrants):
    tab = opened([quadrants])
    assert tab.inner_text("#status") == "Ready."
    slide(tab, 0, 1)
    assert tab.inner_text("#status") == "Ready."
    settled(tab, lambda: (tab.fill("#seed", "5"), tab.press("#seed", "Enter")))
    assert tab.inner_text("#status") == "Seed 5."
    tab.focus("#panels canvas")
    settled(tab, lambda: tab.keyboard.press("ArrowRight"))
    assert re.match(r"quadrants, seed 5, z\d 1.3", tab.inner_text("#status"))
    facts = tab.get_attribute(".direction input[type=range] >> nth=0", "aria-describedby")
    assert tab.inner_text(f"#{facts}").startswith("effect")


def test_a_region_is_drawn_by_keyboard_and_removed_and_undone(opened, quadrants):
    tab = opened([quadrants])
    settled(tab, lambda: tab.select_option("#tool", "region"))
    tab.focus("#panels canvas")
    for key in ("ArrowLeft", "ArrowUp", "Shift+ArrowLeft", "Shift+ArrowUp"):
        for _ in range(6):
            settled(tab, lambda key=key: tab.keyboard.press(key))
    assert "0 to 10 percent across" in tab.inner_text("#status")
    for _ in range(5):
        settled(tab, lambda: tab.keyboard.press("Shift+ArrowRight"))
        settled(tab, lambda: tab.keyboard.press("Shift+ArrowDown"))
    settled(tab, lambda: tab.keyboard.press("Enter"))
    tab.wait_for_function("active().kind === 'region' && !busy")
    assert abs(tab.evaluate("kindOf(active()).directions[0].vector")[0]) == pytest.approx(1, abs=1e-3)
    settled(tab, lambda: tab.click("#clear-region"))
    assert tab.evaluate("[state.region, active().kind]") == [None, "axes"]
    assert "region" not in tab.eval_on_selector_all("#kind option", "options => options.map(o => o.value)")
    settled(tab, lambda: tab.click("#undo"))
    assert tab.evaluate("active().kind") == "region"


def test_two_sliders_that_are_not_orthogonal_set_both_coordinates(opened, quadrants):
    skew = torch.tensor([[1.0, 0, 0, 0], [0.6, 0.8, 0, 0]])
    kind = Kind("skew", "skew", "", Directions(skew, torch.tensor([2.0, 1.0])))
    tab = opened([replace(quadrants, kinds=(kind,))])
    settled(tab, lambda: tab.select_option("#mode", "set"))
    slide(tab, 0, 0.5)
    slide(tab, 1, -1)
    z = torch.tensor(tab.evaluate("[...latentOf(active(), 0)]"))
    assert (skew @ z).tolist() == pytest.approx([0.5, -1], abs=1e-4)
    assert z[2:].tolist() == pytest.approx(tab.evaluate("[...latent(0, 0, 4, 'normal')]")[2:], abs=1e-6)


def test_on_a_phone_sliders_follow_the_picture_and_keep_it_in_sight(opened, quadrants):
    tab = opened([quadrants], width=390)
    places = [tab.locator(f"#{name}").bounding_box()["y"] for name in ("panels", "directions", "tools", "exports")]
    assert places == sorted(places)
    tab.evaluate("scrollTo(0, document.getElementById('directions').offsetTop)")
    box = tab.locator("#panels canvas").first.bounding_box()
    assert 0 <= box["y"] < box["y"] + box["height"] < 500
