"""Notebook 00 in JupyterLab, in a real browser: it runs, a slider is moved with the keyboard, an error is said and got over.

Pictures of each state are left in `tests/browser/shots/`.
"""

import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvlab.jupyter import SERVER

ROOT = Path(__file__).parents[2]
SHOTS = Path(__file__).parent / "shots"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
LONG = 900_000  # ms: for a busy machine; a quiet one needs a tenth

pytestmark = [
    pytest.mark.browser,
    pytest.mark.model,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found (sudo apt install chromium)"),
]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """JupyterLab on a free port of this machine, with a token, in a copy of the notebooks."""
    pytest.importorskip("jupyterlab")
    home = tmp_path_factory.mktemp("jupyter")
    shutil.copytree(ROOT / "notebooks", home / "notebooks", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    notices = home / "settings" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    notices.parent.mkdir(parents=True)
    notices.write_text('{"fetchNews": "false"}')  # else a question lies over the pictures
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    line = [sys.executable, "-m", "jupyterlab", *SERVER, "--no-browser", f"--ServerApp.root_dir={home / 'notebooks'}"]
    line += [f"--ServerApp.port={port}", "--ServerApp.port_retries=0", f"--IdentityProvider.token={token}"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        line.append("--allow-root")
    settings = {
        "JUPYTER_CONFIG_DIR": home / "config",
        "JUPYTERLAB_SETTINGS_DIR": home / "settings",
        "JUPYTERLAB_WORKSPACES_DIR": home / "spaces",
    }
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    env = (
        os.environ | {name: str(folder) for name, folder in settings.items()} | {"PYTHONPATH": path, "OMP_WAIT_POLICY": "PASSIVE"}
    )
    with open(home / "log", "wb") as log, subprocess.Popen(line, env=env, stdout=log, stderr=subprocess.STDOUT) as server:
        try:
            base = f"http://127.0.0.1:{port}"
            for _ in range(120):
                if server.poll() is not None:
                    break
                try:
                    with urllib.request.urlopen(f"{base}/api?token={token}", timeout=5):
                        yield f"{base}/lab/tree/00_live_lab.ipynb?token={token}"
                        return
                except OSError:
                    time.sleep(1)
            pytest.fail("JupyterLab did not start:\n" + (home / "log").read_text(errors="replace")[-3000:])
        finally:
            server.terminate()  # it takes its kernels along


@pytest.fixture(scope="module")
def page(address: str) -> Iterator[Any]:
    """The notebook, open; its faults are collected in `page.faults`."""
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 1720})
        page.faults = []
        page.on("pageerror", lambda error: page.faults.append(str(error)))
        page.set_default_timeout(120_000)
        page.goto(address)
        page.wait_for_selector(".jp-Notebook .jp-Cell")
        page.wait_for_timeout(2000)
        if page.locator("#jp-left-stack:visible").count():
            page.keyboard.press("Control+b")  # the file browser takes a quarter of the window
        yield page
        browser.close()


class Panel:
    """What a person sees of it."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.box = page.locator(".kvlab").first

    def card(self, title: str) -> Any:
        return self.box.locator(f".kvlab-card:has(.kvlab-head b:text-is('{title}'))")

    def text(self, title: str) -> str:
        return self.card(title).inner_text()

    def handle(self, axis: str, label: str) -> Any:
        return self.box.locator(f".kvlab-{axis} .kvlab-setting:has(label:text('{label}')) .noUi-handle")

    def choose(self, label: str, option: str) -> None:
        self.box.locator(f".widget-dropdown:has(label:text-is('{label}')) select").select_option(label=option)

    def button(self, name: str) -> Any:
        return self.box.locator(f"button:text-is('{name}')")

    def press(self, handle: Any, key: str, times: int = 1) -> None:
        handle.focus()
        for _ in range(times):
            self.page.keyboard.press(key)

    def done(self) -> None:
        """Until the run that a change has started is over."""
        self.page.wait_for_timeout(600)
        over = self.box.locator(".kvlab-grow .widget-html:has-text('done'), .kvlab-error")
        over.first.wait_for(timeout=LONG)
        self.page.wait_for_timeout(1500)  # plotly draws on

    def shot(self, name: str) -> None:
        SHOTS.mkdir(exist_ok=True)
        self.box.scroll_into_view_if_needed()
        self.page.mouse.move(5, 5)
        self.page.screenshot(path=SHOTS / f"{name}.png")


@pytest.fixture(scope="module")
def panel(page: Any) -> Panel:
    """The panel after all cells of the notebook have run (the last one resets it)."""
    page.click(".lm-MenuBar-itemLabel:text-is('Run')")
    page.click(".lm-Menu-itemLabel:text-is('Run All Cells')")
    cells = page.locator(".jp-CodeCell .jp-InputArea-prompt")
    page.wait_for_function(
        "() => { const all = [...document.querySelectorAll('.jp-CodeCell .jp-InputArea-prompt')];"
        " return all.length > 5 && all.every(x => /\\[\\d+\\]/.test(x.innerText)); }",
        timeout=LONG,
    )
    assert cells.count() >= 6
    page.locator(".jp-Notebook .jp-Cell").first.scroll_into_view_if_needed()
    panel = Panel(page)
    panel.done()
    return panel


def test_all_cells_run_and_the_figures_are_there(panel: Panel) -> None:
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
    panel.shot("1-start")


def test_a_slider_moved_with_the_keyboard_changes_figures_and_table(panel: Panel) -> None:
    before = {title: panel.text(title) for title in ("memory", "quality along the text", "numbers")}
    start = time.monotonic()
    panel.press(panel.handle("keep", "budget"), "ArrowLeft", 10)  # 256 to 96 tokens
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
    page.click(".lm-MenuBar-itemLabel:text-is('Settings')")
    page.hover(".lm-Menu-itemLabel:text-is('Theme')")
    page.click(".lm-Menu-itemLabel:text-is('JupyterLab Dark')")
    page.wait_for_selector("body[data-jp-theme-light='false']", state="attached")
    page.wait_for_timeout(2500)
    ink = panel.card("memory").locator(".js-plotly-plot text").first.evaluate("x => getComputedStyle(x).fill")
    assert min(map(int, re.findall(r"\d+", ink)[:3])) > 150, ink  # light on dark
    panel.shot("5-dark")
    page.set_viewport_size({"width": 800, "height": 3300})
    page.wait_for_timeout(2500)
    boxes = [panel.card(title).bounding_box() for title in ("memory", "attention", "quality along the text", "numbers")]
    assert len({round(box["x"]) for box in boxes}) == 1  # one column
    assert all(box["x"] + box["width"] <= 800 for box in boxes)
    last = panel.card("numbers").locator("th").last.bounding_box()
    assert last["x"] + last["width"] <= boxes[-1]["x"] + boxes[-1]["width"]  # the table is not cut off
    panel.shot("6-narrow")
    assert page.faults == []
