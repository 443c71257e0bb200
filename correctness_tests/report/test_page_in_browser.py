"""The page in a real browser: on a phone and on a desktop, in light and in dark.

Each check of what a reader sees is itself checked, on a page that is broken in that respect.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from correctness_tests.support.sample_records import record, sample_records, sample_targets, steps
from tinyllama.harness.page import NEEDS, render
from tinyllama.harness.records.results import Record

PLOTS = all(importlib.util.find_spec(name) for name in NEEDS)
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
SCREENS = {"phone": (360, 740), "desktop": (1280, 900)}
MEASURE = Path(__file__).parents[1] / "support" / "page_measure.js"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if not importlib.util.find_spec("playwright"):
        pytest.skip("needs the package playwright")
    if BROWSER is None:
        pytest.skip("needs chromium or google-chrome")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield found
        found.close()


def look(browser: Any, path: Path, screen: str, scheme: str) -> dict[str, Any]:
    """What a reader with that screen sees of a file, as ``page_measure.js`` measures it."""
    width, height = SCREENS[screen]
    size = {"width": width, "height": height}
    page = browser.new_page(viewport=size, color_scheme=scheme)
    requests: list[str] = []
    console: list[str] = []

    def meet(route: Any) -> None:
        if route.request.url == path.as_uri():
            route.continue_()
        else:
            requests.append(route.request.url)
            route.abort()

    page.route("**/*", meet)
    page.on("console", lambda message: console.append(message.text))
    page.on("pageerror", lambda error: console.append(str(error)))
    try:
        page.goto(path.as_uri())
        seen: dict[str, Any] = page.evaluate(MEASURE.read_text())
    finally:
        page.close()
    return {**seen, "requests": requests, "console": console}


def overflow(seen: dict[str, Any]) -> list[str]:
    return [f"{seen['width']} > {seen['room']}"] if seen["width"] > seen["room"] else []


def loads(seen: dict[str, Any]) -> list[str]:
    return [*seen["requests"], *seen["console"]]


def small(seen: dict[str, Any]) -> list[str]:
    """Text of a plot below 11 CSS pixels."""
    return [f"{t['text']}: {t['size']:.1f} px" for t in seen["plotted"] if t["size"] < 10.95]


def overlaps(seen: dict[str, Any]) -> list[str]:
    return list(seen["overlaps"])


def cut(seen: dict[str, Any]) -> list[str]:
    """Text of a plot that leaves the figure."""
    return list(seen["cut"])


def faint(seen: dict[str, Any]) -> list[str]:
    """Text with a contrast below 4.5 to what lies behind it (WCAG 2.1, AA)."""
    return [f"{t['text']}: {t['contrast']:.2f}" for t in seen["texts"] if t["contrast"] < 4.5]


def pale(seen: dict[str, Any]) -> list[str]:
    """Marks and lines with a contrast below 3 to the card (WCAG 2.1, AA)."""
    return [f"{name}: {value:.2f}" for name, value in seen["colours"].items() if value < 3]


CHECKS: list[Callable[[dict[str, Any]], list[str]]] = [
    overflow,
    loads,
    small,
    overlaps,
    cut,
    faint,
    pale,
]


def page_of(records: list[Record], folder: Path) -> Path:
    if not PLOTS:
        pytest.skip("needs the extra 'report'")
    path = folder / "page.html"
    path.write_text(render(records, sample_targets()))
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return page_of(sample_records(), tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def small_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One group of one device, for what needs no more."""
    few = [record("small-bf16", steps("small-bf16"))]
    return page_of(few, tmp_path_factory.mktemp("page"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("screen", SCREENS)
def test_it_can_be_read(browser: Any, saved: Path, screen: str, scheme: str) -> None:
    seen = look(browser, saved, screen, scheme)
    assert len(seen["plotted"]) > 100
    assert len(seen["texts"]) > 500
    assert {check.__name__: check(seen) for check in CHECKS} == {c.__name__: [] for c in CHECKS}


def test_light_and_dark_differ(browser: Any, small_page: Path) -> None:
    light, dark = (look(browser, small_page, "phone", scheme) for scheme in ("light", "dark"))
    assert light["background"] != dark["background"]
    assert light["plotted"][0]["fill"] != dark["plotted"][0]["fill"]


CSP = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
BROKEN: dict[str, tuple[Callable[[dict[str, Any]], list[str]], Callable[[str], str]]] = {
    "a wide table": (
        overflow,
        lambda text: text.replace(".scroll { overflow-x: auto;", ".scroll {"),
    ),
    "an image": (
        loads,
        lambda text: CSP.sub("", text).replace("</h1>", '</h1><img src="http://x.invalid/a.png">'),
    ),
    "an image that the policy stops": (
        loads,
        lambda text: text.replace("</h1>", '</h1><img src="http://x.invalid/a.png">'),
    ),
    "small print in plots": (small, lambda text: text.replace("font-size: 11px", "font-size: 9px")),
    "large print in plots": (
        overlaps,
        lambda text: text.replace("font-size: 11px", "font-size: 26px"),
    ),
    "plots that leave their figure": (
        cut,
        lambda text: text.replace("text-anchor: end", "text-anchor: start"),
    ),
    "grey on grey": (faint, lambda text: re.sub(r"--muted: #\w+", "--muted: #9a9a9a", text)),
    "text of plots that stays black": (
        faint,
        lambda text: re.sub(r"fill: var\(--(fg|muted)\)", "fill: #000", text),
    ),
    "yellow on white": (
        pale,
        lambda text: re.sub(r"--series-1: #\w+", "--series-1: #f0e442", text),
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_check_sees_a_broken_page(
    name: str, browser: Any, small_page: Path, tmp_path: Path
) -> None:
    check, damage = BROKEN[name]
    text = small_page.read_text()
    broken = damage(text)
    assert broken != text
    path = tmp_path / "broken.html"
    path.write_text(broken)
    scheme = "dark" if name == "text of plots that stays black" else "light"
    assert check(look(browser, path, "phone", scheme))
