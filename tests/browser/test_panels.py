"""The panels of notebooks 03, 06 and 07 and the token river in JupyterLab, in a real browser: they can be read, in the dark and in a narrow window, too, and moved by keyboard."""

import os
import re
from typing import Any

import pytest

from tests.browser.conftest import MARKS, Opened, Panel, theme
from tests.browser.lab import pale, serious

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
    "07_offloading": ("one decode step", "bytes on the device", "the same bytes over other links"),
    "advisor": ("1 profile", "2 what binds", "3 what to try, in order", "4 measure quality", "5 where a step stands"),
    "blocks": ("block table", "prefix tree", "who runs in which step", "blocks in use"),
    "traffic": (
        "static batching",
        "continuous batching",
        "how full the blocks are",
        "reserved, or in blocks",
        "prompt tokens",
        "block size",
    ),
    "river": ("token river", "attention on what is gone", "what each head still sees", "which layers hold alike"),
}
MOVES = {
    "river": ("token", r"Token \d+ “"),
    "07_offloading": ("tokens", "A step takes"),
    "advisor": ("context", "A token takes"),
    "blocks": ("step", r"Step \d+: \d+ of \d+ blocks"),
    "traffic": ("shared beginning", "tokens a second"),
}  # the slider that is moved, and what the first card then says
BOXES = {"advisor": "load", "traffic": "requests"}  # where it stands, if not among what is looked at


def opened(open_notebook: Opened, name: str) -> Any:
    """The notebook's page, its cells running down to the panel.

    One notebook at a time, and the panel only once the first cell has run: ipywidgets asks a kernel what widgets it has and waits 4 s for the answer;
    where that comes later, figures that were made in the meantime may stay empty.
    """
    page = open_notebook(name)
    cells = page.locator(".jp-CodeCell")
    for number in range(cells.count()):  # imports, an example (or none), the panel
        start(page, cells.nth(number))
        if number == 0:
            page.wait_for_selector(".jp-InputPrompt:has-text('[1]:')")
    return page


def start(page: Any, cell: Any) -> None:
    """Run the cell; again where nothing came of it: JupyterLab loses a key that is pressed while it is still setting up."""
    for _ in range(10):
        cell.locator(".cm-content").click()
        page.keyboard.press("Shift+Enter")
        for _ in range(20):
            page.wait_for_timeout(500)
            if cell.locator(".jp-InputPrompt").inner_text().strip() not in ("", "[ ]:"):
                return
    raise AssertionError(f"the cell did not start: {cell.inner_text()}")


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
    assert pale(panel.page) == []


ALL = os.environ.get("KVLAB_ALL") == "1"  # the panels are of one build: every run looks at one of them, `make nightly` at all


@pytest.mark.parametrize("name", [name for name in CARDS if ALL or name == "river"])
def test_it_can_be_read_and_moved(open_notebook: Opened, name: str) -> None:
    page, titles = opened(open_notebook, name), CARDS[name]
    page.wait_for_selector(".kvlab")
    panel = Panel(page)
    panel.done()
    assert panel.box.locator(".kvlab-error").count() == 0
    readable(panel, titles)
    assert serious(page, ".kvlab") == []
    before = panel.text(titles[0])
    label, said = MOVES.get(name, ("layer", "ayer 11"))
    panel.press(panel.handle(BOXES.get(name, "look-at"), label), "ArrowLeft")
    panel.done()
    assert panel.text(titles[0]) != before
    assert re.search(said, panel.text(titles[0]))
    panel.shot(f"{name.partition('_')[0]}-moved")
    theme(page, "Dark")
    ink = panel.card(titles[0]).locator(".js-plotly-plot text").first.evaluate("x => getComputedStyle(x).fill")
    assert min(map(int, re.findall(r"\d+", ink)[:3])) > 150, ink  # light on dark
    panel.shot(f"{name.partition('_')[0]}-dark")
    page.set_viewport_size({"width": 800, "height": 3000})
    page.wait_for_timeout(1000)
    readable(panel, titles)
    assert len({round(panel.card(title).bounding_box()["x"]) for title in titles}) == 1  # one column
    panel.shot(f"{name.partition('_')[0]}-narrow-dark")
    assert page.faults == []
    page.close()


@pytest.mark.skipif(not ALL, reason="make nightly runs it")
def test_a_vote_by_keyboard(open_notebook: Opened) -> None:
    page = opened(open_notebook, "blind")
    page.wait_for_selector(".kvlab")
    panel = Panel(page)
    panel.done()
    before = panel.text("which is the full cache?")
    assert "One of the two" in before or "nothing to tell apart" in before
    name = "A is the full cache" if "One of the two" in before else "Next text"
    panel.button(name).focus()
    page.keyboard.press("Enter")
    panel.done()
    assert panel.text("which is the full cache?") != before
    assert name == "Next text" or "1 of 1 votes" in panel.text("told apart?") or "0 of 1 votes" in panel.text("told apart?")
    panel.shot("blind-voted")
    assert page.faults == []
    page.close()


CONTROLS = (
    ".kvlab-side .noUi-handle",
    ".kvlab-side select",
    ".kvlab-side input[type=checkbox]",
    ".kvlab-side .widget-radio-box",
    ".kvlab-side .widget-toggle-buttons",
)
SHOWN = "() => [...document.querySelectorAll('.kvlab-card, .kvlab-side .widget-html')].map(one => one.innerHTML).join('')"


def nudge(page: Any, control: Any) -> tuple[str, ...]:
    """Move it by one with the keyboard alone -> the keys that take it back."""
    kind = control.evaluate(
        "x => x.matches('.noUi-handle') ? 'slider' : x.matches('select') ? 'select' : x.matches('input') ? 'check' : 'group'"
    )
    there: tuple[str, ...]
    if kind == "slider":
        control.focus()
        low, now = (control.get_attribute(name) for name in ("aria-valuemin", "aria-valuenow"))
        there, back = (("ArrowRight",), ("ArrowLeft",)) if low == now else (("ArrowLeft",), ("ArrowRight",))
    elif kind == "select":
        control.focus()
        last = control.evaluate("x => x.selectedIndex === x.options.length - 1")
        there, back = (("ArrowUp",), ("ArrowDown",)) if last else (("ArrowDown",), ("ArrowUp",))
    elif kind == "check":
        control.focus()
        there = back = ("Space",)
    else:  # a row or a column of choices, each of which the tabulator key reaches
        control.locator("input:checked, button.mod-active").first.focus()
        last = control.evaluate("x => [...x.querySelectorAll('input, button')].at(-1) === document.activeElement")
        there, back = (("Shift+Tab", "Space"), ("Tab", "Space")) if last else (("Tab", "Space"), ("Shift+Tab", "Space"))
    for key in there:
        page.keyboard.press(key)
    return back


@pytest.mark.skipif(not ALL, reason="make nightly runs it")
@pytest.mark.parametrize("name", ["live", *CARDS])
def test_every_control_by_keyboard(open_notebook: Opened, name: str) -> None:
    """Each control alone: what it changes is shown, or said in one line and got over; nothing hangs, nothing fails on the console."""
    page = opened(open_notebook, name)
    page.wait_for_selector(".kvlab")
    panel = Panel(page)
    panel.done()
    idle = []
    for kind in CONTROLS:
        for number in range(page.locator(kind).count()):
            control = page.locator(kind).nth(number)
            if not control.count() or not control.is_visible() or not control.is_enabled():
                continue
            before = page.evaluate(SHOWN)
            back = nudge(page, control)
            panel.done()
            if panel.box.locator(".kvlab-error").count():
                said = panel.box.locator(".kvlab-error b").inner_text()
                assert not re.match(r"\w+(Error|Exception): ", said), said  # a person's mistake, said to a person
                for key in back:
                    page.keyboard.press(key)
                panel.box.locator(".kvlab-error").wait_for(state="detached")
                panel.done()
            elif page.evaluate(SHOWN) == before:
                idle.append(f"{kind} {number}")
    print(name, "nothing changed for", idle)
    assert len(idle) <= 3
    assert page.faults == []
    page.close()
