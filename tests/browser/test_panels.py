"""The panels of notebooks 03 and 06 in JupyterLab, in a real browser: they can be read, in the dark and in a narrow window, too, and moved by keyboard."""

import re
from typing import Any

import pytest

from tests.browser.conftest import MARKS, Opened, Panel, theme

pytestmark = MARKS

CARDS = {
    "03_quantization": (
        "one token",
        "how large each channel is",
        "one channel over the tokens",
        "error by layer",
        "bits a number",
    ),
    "06_low_rank_and_merging": ("what the first directions keep", "rank needed by layer", "what is lost"),
}


@pytest.fixture(scope="module")
def pages(open_notebook: Opened) -> dict[str, Any]:
    """Both notebooks, open, their cells running down to the panel: one kernel starts while the other notebook is opened."""
    found = {}
    for name in CARDS:
        page = found[name] = open_notebook(name)
        cells = page.locator(".jp-CodeCell")
        for number in range(3):  # imports, an example, the panel
            cells.nth(number).locator(".cm-content").click()
            page.keyboard.press("Shift+Enter")
    return found


INSIDE = """() => dispatchEvent(new Event('resize')) && [...document.querySelectorAll('.kvlab-card')].every(card => {
    const box = card.getBoundingClientRect();
    return box.right <= innerWidth && [...card.querySelectorAll('.js-plotly-plot .main-svg')].every(drawn =>
        drawn.getBoundingClientRect().left >= box.left && drawn.getBoundingClientRect().right <= box.right); })"""


def readable(panel: Panel, titles: tuple[str, ...]) -> None:
    """Every card is there with its line of text, inside the window, and no figure reaches out of its card once it is drawn."""
    for title in titles:
        assert len(panel.card(title).locator(".kvlab-summary").last.inner_text()) > 20, title
        assert panel.card(title).locator(".js-plotly-plot .main-svg").count()
    panel.page.wait_for_function(INSIDE, polling=500, timeout=60_000)  # not once a frame: a page behind another draws none


@pytest.mark.parametrize("name", CARDS)
def test_it_can_be_read_and_moved(pages: dict[str, Any], name: str) -> None:
    page, titles = pages[name], CARDS[name]
    page.bring_to_front()
    page.wait_for_selector(".kvlab")
    panel = Panel(page)
    panel.done()
    assert panel.box.locator(".kvlab-error").count() == 0
    readable(panel, titles)
    before = panel.text(titles[0])
    panel.press(panel.handle("look-at", "layer"), "ArrowLeft")
    panel.done()
    assert panel.text(titles[0]) != before
    assert "ayer 11" in panel.text(titles[0])
    panel.shot(f"{name[:2]}-moved")
    theme(page, "Dark")
    ink = panel.card(titles[0]).locator(".js-plotly-plot text").first.evaluate("x => getComputedStyle(x).fill")
    assert min(map(int, re.findall(r"\d+", ink)[:3])) > 150, ink  # light on dark
    panel.shot(f"{name[:2]}-dark")
    page.set_viewport_size({"width": 800, "height": 3000})
    page.wait_for_timeout(1000)
    readable(panel, titles)
    assert len({round(panel.card(title).bounding_box()["x"]) for title in titles}) == 1  # one column
    panel.shot(f"{name[:2]}-narrow-dark")
    assert page.faults == []
    page.close()
