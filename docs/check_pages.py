"""Opens every page of the built documentation in Chromium, wide and as on a phone, and says what is wrong with it.

    python docs/check_pages.py [FOLDER] [--shots FOLDER]

A page must not scroll sideways, must ask for nothing outside its folder, and must have all its pictures. Its snippets
have no prompts and a copy button. The search for NaN finds the tutorial.
"""

import argparse
import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

WIDTHS = (1500, 390)
TROUBLE = """() => ({
    overflow: document.documentElement.scrollWidth - innerWidth,
    pictures: [...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.getAttribute("src")),
    prompts: [...document.querySelectorAll("article pre")].filter(p => /^(>>>|\\$) /m.test(p.textContent)).length,
    buttons: document.querySelectorAll("div.highlight").length - document.querySelectorAll("button.copy").length,
})"""


def check(page: Page, path: Path, width: int) -> list[str]:
    outside: list[str] = []
    page.on(
        "request", lambda request: None if request.url.startswith(("file:", "data:")) else outside.append(request.url)
    )
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(path.as_uri())
    found = page.evaluate(TROUBLE)
    said = [f"asks for {url}" for url in outside]
    if found["overflow"] > 0:
        said.append(f"scrolls sideways by {found['overflow']} pixels")
    said += [f"lacks the picture {name}" for name in found["pictures"]]
    said += [f"has {found['prompts']} snippets with prompts"] if found["prompts"] else []
    said += [f"lacks {found['buttons']} copy buttons"] if found["buttons"] > 0 else []
    return [f"{path.name} at {width} pixels {words}" for words in said]


def search(page: Page, folder: Path) -> list[str]:
    page.goto((folder / "search.html").as_uri() + "?q=NaN")
    page.wait_for_selector("#search-results li a", timeout=10_000)
    first = page.eval_on_selector_all("#search-results li a", "links => links.slice(0, 3).map(a => a.href)")
    return [] if any("nan" in link or "troubleshooting" in link for link in first) else [f"NaN finds {first} first"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("docs/_build"))
    parser.add_argument("--shots", type=Path, help="keep a picture of each page there")
    settings = parser.parse_args()
    folder = settings.folder.resolve()
    pages = [p for p in sorted(folder.rglob("*.html")) if "_static" not in p.parts and "_modules" not in p.parts]
    if not pages:
        parser.error(f"{folder} has no pages; `make docs` builds them")
    wrong: list[str] = []
    with sync_playwright() as playwright:
        program = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=program)
        for width in WIDTHS:
            context = browser.new_context()
            for path in pages:
                page = context.new_page()
                wrong += check(page, path, width)
                if settings.shots:
                    settings.shots.mkdir(parents=True, exist_ok=True)
                    page.screenshot(path=settings.shots / f"{path.stem}-{width}.png")
                page.close()
            context.close()
        page = browser.new_page()
        wrong += search(page, folder)
        browser.close()
    print(*wrong, sep="\n")
    print(f"{len(pages)} pages at {WIDTHS} pixels: {len(wrong)} faults")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
