"""The course as a reader meets it: notebooks run from the first cell to the last in JupyterLab, restarted and run again, two at once; a panel as a page without code."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import COURSE, MARKS, SHOTS, Opened, Panel, theme
from tests.browser.lab import LONG, free_port, menu, page_of, pale, ran, run_all, serious, served

pytestmark = MARKS
ALL = os.environ.get("KVLAB_ALL") == "1"
nightly = pytest.mark.skipif(not ALL, reason="make nightly runs it")


def whole(page: Any) -> None:
    """Nothing in it failed, on the page, on its console, in a cell or in a panel."""
    assert (
        page.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr']:has-text('Traceback')").count() == 0
    )
    assert page.locator(".jp-RenderedText[data-mime-type='application/vnd.jupyter.error']").count() == 0
    assert page.locator("text=/Error displaying widget|Error creating widget|Loading widget/").count() == 0
    assert page.locator(".kvlab-error").count() == 0
    for figure in page.locator(".js-plotly-plot").all():
        assert figure.locator(".main-svg").count()
    assert page.faults == []


def panels_done(page: Any) -> None:
    """Every panel that has a progress bar has come to its end."""
    page.wait_for_function(
        """() => [...document.querySelectorAll('.kvlab .kvlab-grow')].every(bar => bar.innerText.includes('done'))""",
        polling=500,
        timeout=LONG,
    )


@nightly
def test_a_prediction_then_restarted_and_run_again(open_notebook: Opened) -> None:
    page = open_notebook("course-02")
    run_all(page)
    ran(page)
    first = page.locator(".kvlab-predict").first
    assert first.get_by_role("radio").first.is_disabled()  # what was seen can no longer be foreseen
    page.locator(".jp-CodeCell:has-text('guess1 = Predict(') .cm-content").first.click()
    page.keyboard.press("Shift+Enter")
    page.wait_for_function("() => !document.querySelector('.kvlab-predict input').disabled")
    first.get_by_role("radio").nth(1).focus()
    page.keyboard.press("Space")
    heard = page.locator(".jp-CodeCell:has-text('guess1.seen(') .cm-content").first
    heard.click()
    page.keyboard.press("Shift+Enter")
    page.wait_for_selector("text=Predicted 40 GiB: right.")
    assert first.get_by_role("radio").nth(1).is_disabled()
    page.locator(".noUi-handle").first.focus()
    before = page.locator(".jp-OutputArea-output:has(.noUi-handle)").first.inner_text()
    page.keyboard.press("ArrowLeft")
    page.wait_for_function(
        "x => document.querySelector('.jp-OutputArea-output:has(.noUi-handle)').innerText !== x", arg=before, polling=200
    )
    whole(page)
    menu(page, "Kernel", "Restart Kernel and Run All Cells…")
    page.locator(".jp-Dialog .jp-mod-accept").click()
    page.wait_for_selector("text=Predicted 40 GiB: right.", state="detached")
    ran(page)
    page.wait_for_selector("text=/Nothing predicted. Llama-3.1-70B, 131,072 tokens: about 40 GiB/")
    whole(page)
    assert serious(page, ".kvlab-predict") == []
    page.close()


@nightly
@pytest.mark.parametrize("name", [path.name[:2] for path in COURSE])
def test_every_notebook_from_first_cell_to_last(open_notebook: Opened, name: str) -> None:
    page = open_notebook(f"course-{name}")
    run_all(page)
    ran(page)
    panels_done(page)
    page.wait_for_timeout(2000)
    whole(page)
    inside = [one for one in (".kvlab", ".kvlab-predict") if page.locator(one).count()]
    assert serious(page, *inside) == []
    assert pale(page) == []
    theme(page, "Dark")
    assert pale(page) == []
    SHOTS.mkdir(exist_ok=True)
    page.set_viewport_size({"width": 1280, "height": 12_000})  # all of it, from the top
    page.evaluate("document.querySelectorAll('.jp-WindowedPanel-outer').forEach(one => one.scrollTop = 0)")
    page.wait_for_timeout(3000)
    page.screenshot(path=SHOTS / f"course-{name}-dark.png")
    theme(page, "Light")
    page.close()


@nightly
def test_two_at_once(open_notebook: Opened) -> None:
    """Each its own kernel; both come to their end, and both still answer."""
    pages = [open_notebook(name) for name in ("live", "course-09")]
    for page in pages:
        run_all(page)
    for page in pages:
        ran(page)
        panels_done(page)
        whole(page)
    panel = Panel(pages[0])
    panel.press(panel.handle("keep", "budget"), "ArrowLeft", 3)
    panel.done()
    assert "HeavyHitter(budget=208)" in panel.text("numbers")
    for page in pages:
        page.close()


@nightly
@pytest.mark.parametrize(("name", "said"), [("memory", "the limit is"), ("live-lab", "agree; perplexity")])
def test_a_panel_as_a_page_without_code(browser: Any, tmp_path: Path, name: str, said: str) -> None:
    pytest.importorskip("voila")
    port = free_port()
    line = [str(Path(sys.executable).parent / "kvlab"), "app", name, "--no-browser", f"--port={port}"]
    key = f"key{port}"
    with served(line, f"http://127.0.0.1:{port}/", tmp_path / "log", os.environ | {"JUPYTER_TOKEN": key}):
        page = page_of(browser)
        page.goto(f"http://127.0.0.1:{port}/")
        assert page.locator("input[type=password]").count()  # not without its token
        page.goto(f"http://127.0.0.1:{port}/?token={key}")
        page.wait_for_selector(f"text=/{re.escape(said)}/", timeout=LONG)
        page.wait_for_selector(".js-plotly-plot .trace", state="attached")  # what was drawn before the page was there, too
        assert page.locator(".cm-content, .jp-InputArea").count() == 0
        page.locator(".noUi-handle").first.focus()
        page.keyboard.press("ArrowLeft")
        page.wait_for_timeout(2000)
        # Voilà's own page asks for letters from afar, and does without them
        assert [fault for fault in page.faults if "Failed to load resource" not in fault] == []
        page.screenshot(path=SHOTS / f"app-{name}.png")
        page.close()
