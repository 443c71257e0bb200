"""The page in a real browser: 400, 800 and 1400 pixels wide, in light and in dark.

Each check of what a reader sees is itself checked, on a page that is broken in that respect.
"""

import importlib.util
import re
import shutil
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from correctness_tests.support.sample_records import (
    ops,
    record,
    sample_records,
    sample_targets,
    steps,
)
from tinyllama.harness.page import NEEDS, render
from tinyllama.harness.records.results import Record

PLOTS = all(importlib.util.find_spec(name) for name in NEEDS)
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
SCREENS = {"phone": (400, 740), "tablet": (800, 1100), "desktop": (1400, 900)}
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


def hidden(seen: dict[str, Any]) -> list[str]:
    """What is wider than its room, and cannot be scrolled to."""
    return list(seen["hidden"])


def uncued(seen: dict[str, Any]) -> list[str]:
    """What scrolls, without a shadow that says so."""
    return list(seen["uncued"])


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
    hidden,
    uncued,
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
    """One group and the ops of one device, for what needs no more."""
    few = [record("small-bf16", steps("small-bf16")), record("ops-bf16", ops())]
    return page_of(few, tmp_path_factory.mktemp("page"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("screen", SCREENS)
def test_it_can_be_read(browser: Any, saved: Path, screen: str, scheme: str) -> None:
    seen = look(browser, saved, screen, scheme)
    assert len(seen["plotted"]) > 100
    assert len(seen["texts"]) > 500
    assert {check.__name__: check(seen) for check in CHECKS} == {c.__name__: [] for c in CHECKS}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("over", [0, 12, 300])
def test_a_shadow_is_seen_where_a_table_has_more(
    browser: Any, small_page: Path, over: int, scheme: str
) -> None:
    """Also of a few pixels, which may be the end of a figure. Without the table's own ink."""
    from matplotlib.image import imread

    page = browser.new_page(viewport={"width": 800, "height": 900}, color_scheme=scheme)
    page.goto(small_page.as_uri())
    scroll = page.locator("#d0-ladder .scroll").first
    scroll.evaluate(
        """(one, over) => {
          one.closest("details")?.setAttribute("open", "");
          const ink = document.createElement("div");
          ink.style.cssText = `height: 40px; width: ${one.clientWidth + over}px`;
          one.replaceChildren(ink);
        }""",
        over,
    )
    for end in ("right", "left"):
        row = imread(BytesIO(scroll.screenshot()))[20, :, :3].sum(-1)
        seen = {"left": row[0] < row[20] - 0.03, "right": row[-1] < row[-20] - 0.03}
        assert seen == {one: one == end and over > 0 for one in seen}
        scroll.evaluate("(one) => { one.scrollLeft = 9999; }")
    page.close()


def test_light_and_dark_differ(browser: Any, small_page: Path) -> None:
    light, dark = (look(browser, small_page, "phone", scheme) for scheme in ("light", "dark"))
    assert light["background"] != dark["background"]
    assert light["plotted"][0]["fill"] != dark["plotted"][0]["fill"]


CSP = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
BROKEN: dict[str, tuple[Callable[[dict[str, Any]], list[str]], Callable[[str], str]]] = {
    "a wide table": (overflow, lambda text: text.replace("overflow-x: auto;", "")),
    "a table whose end is out of reach": (
        hidden,
        lambda text: text.replace("overflow-x: auto;", "overflow-x: hidden;"),
    ),
    "a table without a shadow": (uncued, lambda text: text.replace("100% local", "100% scroll")),
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
        lambda text: text.replace('viewBox="0 0 312', 'viewBox="60 0 312'),
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


def opened(browser: Any, path: Path, anchor: str = "") -> Any:
    page = browser.new_page(viewport={"width": 800, "height": 900}, reduced_motion="reduce")
    page.goto(path.as_uri() + anchor)
    return page


def unfold(page: Any) -> None:
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")


def test_a_click_on_a_header_sorts_and_a_second_one_turns_it_round(
    browser: Any, small_page: Path
) -> None:
    page = opened(browser, small_page)
    unfold(page)
    table = page.locator("#d0-ladder table").first
    names = table.locator("tbody th").all_inner_texts()
    header = table.locator("thead th", has_text="ms / step").first
    times: list[list[str]] = []
    for direction in ("ascending", "descending"):
        header.locator("button").click()
        assert header.get_attribute("aria-sort") == direction
        cells = table.locator("tbody tr td:nth-child(2)").all_inner_texts()
        times.append([cell.split("\n")[0] for cell in cells])
    up, down = ([float(text) for text in each if text[0].isdigit()] for each in times)
    assert up == sorted(up) == down[::-1]
    assert len(up) == len(set(up)) == len(names) - 1
    assert all(each[-1].startswith("cannot run") for each in times)
    page.close()


def test_words_filter_the_rows_of_a_table(browser: Any, small_page: Path) -> None:
    page = opened(browser, small_page)
    unfold(page)
    section = page.locator("#d0-benchmarks")
    rows, words = section.locator("tbody tr:visible"), section.locator("input[type=search]")
    every = rows.count()
    words.fill("/ROPE-triton b=8,")
    names = rows.locator("th").all_inner_texts()
    assert len(names) == 2  # both passes
    assert all("op/rope-triton-B=8" in name for name in names)
    words.fill("")
    assert rows.count() == every > 100
    page.close()


def test_an_address_opens_the_row_that_it_names(browser: Any, small_page: Path) -> None:
    page = opened(browser, small_page, "#d0-step/small-bf16/v3")
    row = page.locator("[id='d0-step/small-bf16/v3']")
    row.wait_for(state="visible", timeout=5000)
    assert 0 <= row.bounding_box()["y"] < 900
    page.close()


def test_without_the_script_everything_is_there(browser: Any, small_page: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(small_page.as_uri())
    assert page.locator("input").count() == page.locator("thead button").count() == 0
    assert page.locator("#d0-benchmarks tbody tr").count() > 100
    context.close()
