"""The live lab in JupyterLab, in a real browser: it runs, a slider is moved with the keyboard, an error is said and got over."""

import re
import time
from typing import Any

import pytest

from tests.browser.conftest import MARKS, Opened, Panel, theme
from tests.browser.lab import LONG, pale, serious

pytestmark = MARKS


@pytest.fixture(scope="module")
def panel(open_notebook: Opened) -> Panel:
    """The panel after its first run. (All cells of notebook 00 are run, as those of the others, by nbval.)"""
    page: Any = open_notebook("live")
    for number in range(2):
        page.locator(".jp-CodeCell").nth(number).locator(".cm-content").click()
        page.keyboard.press("Shift+Enter")
        page.wait_for_selector(f".jp-InputPrompt:has-text('[{number + 1}]:')", timeout=LONG)
    panel = Panel(page)
    panel.done()
    return panel


def test_it_runs_and_the_figures_are_there(panel: Panel) -> None:
    assert (
        panel.page.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr'] >> text=Traceback").count()
        == 0
    )
    assert panel.box.locator(".kvlab-error").count() == 0
    for title, figures in (("memory", 2), ("attention", 1), ("quality along the text", 1)):
        drawn = panel.card(title).locator(".js-plotly-plot .main-svg")
        assert drawn.count() >= figures, title
    assert "of 16-bit at" in panel.text("memory")
    assert "% of its attention" in panel.text("attention")
    assert "agree; perplexity" in panel.text("quality along the text")
    assert "full" in panel.text("what it says")
    assert "HeavyHitter()" in panel.text("numbers")
    assert serious(panel.page, ".kvlab") == [] and pale(panel.page) == []
    panel.shot("1-start")


def test_a_slider_moved_with_the_keyboard_changes_figures_and_table(panel: Panel) -> None:
    before = {title: panel.text(title) for title in ("memory", "quality along the text", "numbers")}
    start = time.monotonic()
    for key, times in (("ArrowLeft", 10), ("ArrowRight", 5), ("ArrowLeft", 5)):  # 20 changes, from 256 to 96 tokens
        panel.press(panel.handle("keep", "budget"), key, times)
    panel.card("memory").locator("text=/^Predicted: /").wait_for()
    predicted = time.monotonic() - start
    panel.done()
    print(f"prediction after {predicted:.2f} s, everything after {time.monotonic() - start:.1f} s")
    after = {title: panel.text(title) for title in before}
    assert all(after[title] != before[title] for title in before)
    assert "HeavyHitter(budget=96)" in after["numbers"]
    panel.shot("2-slider")


def test_an_error_is_said_and_got_over(panel: Panel) -> None:
    handle = panel.handle("keep", "budget")
    panel.press(handle, "ArrowLeft", 4)  # 32: below recent + sinks
    error = panel.box.locator(".kvlab-error")
    error.wait_for()
    assert "HeavyHitter: budget=32 is below recent + sinks = 68" in error.inner_text()
    assert panel.box.locator(".kvlab-badge.stale").count() == 5
    error.locator("summary").click()
    assert "ValueError" in error.locator("pre").inner_text()
    panel.page.wait_for_timeout(500)
    panel.shot("3-error")
    panel.press(handle, "ArrowRight", 4)
    error.wait_for(state="detached")
    panel.done()
    assert panel.box.locator(".kvlab-badge.stale").count() == 0
    assert "HeavyHitter(budget=96)" in panel.text("numbers")


def test_pinned_scaled_looked_into_and_copied(panel: Panel) -> None:
    panel.button("pin as A").click()
    panel.box.locator(".kvlab-keep label:has-text('everything')").click()
    panel.done()
    panel.choose("scale to", "Llama-3.1-70B")
    panel.choose("view", "error of keys")
    panel.button("code").click()
    panel.card("memory").locator("text=/Llama-3.1-70B on 4 × H100/").wait_for()
    panel.card("attention").locator("text=/off by/").wait_for()
    code = panel.box.locator("textarea").last
    panel.page.wait_for_function("x => x.value.includes('kvlab.Strategy(store=store.Int(bits=4))')", arg=code.element_handle())
    rows = panel.card("numbers").locator("tbody tr")
    assert [row.split()[0] for row in rows.all_inner_texts()] == ["full", "A", "B"]
    panel.shot("4-pinned")


def test_it_can_be_read_in_the_dark_and_in_a_narrow_window(panel: Panel) -> None:
    page = panel.page
    theme(page, "Dark")
    ink = panel.card("memory").locator(".js-plotly-plot text").first.evaluate("x => getComputedStyle(x).fill")
    assert min(map(int, re.findall(r"\d+", ink)[:3])) > 150, ink  # light on dark
    assert pale(page) == []
    panel.shot("5-dark")
    page.set_viewport_size({"width": 800, "height": 3300})
    page.wait_for_timeout(2500)
    boxes = [panel.card(title).bounding_box() for title in ("memory", "attention", "quality along the text", "numbers")]
    assert len({round(box["x"]) for box in boxes}) == 1  # one column
    assert all(box["x"] + box["width"] <= 800 for box in boxes)
    last = panel.card("numbers").locator("th").last.bounding_box()
    assert last["x"] + last["width"] <= boxes[-1]["x"] + boxes[-1]["width"]  # the table is not cut off
    panel.shot("6-narrow")


def test_reset_brings_back_the_start(panel: Panel) -> None:
    panel.button("reset").focus()
    panel.page.keyboard.press("Enter")
    panel.done()
    assert "HeavyHitter()" in panel.text("numbers") and "HeavyHitter(budget" not in panel.text("numbers")
    assert panel.handle("keep", "budget").get_attribute("aria-valuenow") == "256.0"
    assert panel.page.faults == []
