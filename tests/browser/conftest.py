"""JupyterLab in a real browser, started once for all tests of this folder; pictures of each state are left in `tests/browser/shots/`."""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvlab.jupyter import SERVER

ROOT = Path(__file__).parents[2]
SHOTS = Path(__file__).parent / "shots"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
LONG = 900_000  # ms: for a busy machine; a quiet one needs a tenth

MARKS = [
    pytest.mark.browser,
    pytest.mark.model,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found (sudo apt install chromium)"),
]
Opened = Callable[[str], Any]

WRITTEN = {
    "live": (
        "from kvlab import texts\nfrom kvlab.panels.live_lab import LiveLab",
        "LiveLab(None, texts.reference_text()[:1000])",
    ),
    "river": (
        "from kvlab import Strategy, keep, texts\nfrom kvlab.panels.river import TokenRiver",
        "TokenRiver(None, texts.reference_text()[:400], Strategy(keep=keep.HeavyHitter(budget=32, recent=8)))",
    ),
    "advisor": ("from kvlab.panels.advisor import Advisor", "Advisor()"),
    "blocks": (
        "from kvlab.panels.block_table import BlockTable",
        "BlockTable(requests=4, new=12, answers=2)",
    ),
    "traffic": ("from kvlab.panels.traffic import Traffic", "Traffic(requests=50, kind='one system prompt')"),
    "blind": (
        "from kvlab import texts\nfrom kvlab.panels.blind import BlindTest",
        "BlindTest(None, None, texts.reference_text()[:8000], out='votes.jsonl', seed=1)",
    ),
}
"""Notebooks with one panel on a short text: name -> cells."""

SHIPPED = {"03_quantization": 3, "06_low_rank_and_merging": 3, "07_offloading": 3}
"""The project's notebooks of which the cells down to the panel are opened: name -> how many code cells these are."""


def written() -> dict[str, tuple[str, ...]]:
    """Each notebook of the browser's tests: name -> sources of its cells. Nothing is taken over but code: a saved number or picture tells nothing about this run."""
    found = dict(WRITTEN)
    for name, count in SHIPPED.items():
        cells = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
        found[name] = tuple("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")[:count]
    return found


@pytest.fixture(scope="session")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """JupyterLab on a free port of this machine, with a token, with the notebooks of `written()`: the address of a notebook, with `{0}` for its name."""
    pytest.importorskip("jupyterlab")
    home = tmp_path_factory.mktemp("jupyter")
    (home / "notebooks").mkdir()
    for name, sources in written().items():
        empty = {"cell_type": "code", "metadata": {}, "execution_count": None, "outputs": []}
        cells = [empty | {"id": f"{name}-{number}", "source": source} for number, source in enumerate(sources)]
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        book = {"nbformat": 4, "nbformat_minor": 5, "metadata": kernel, "cells": cells}
        (home / "notebooks" / f"{name}.ipynb").write_text(json.dumps(book))
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
                        yield f"{base}/lab/workspaces/{{0}}/tree/{{0}}.ipynb?token={token}"  # each with a layout of its own
                        return
                except OSError:
                    time.sleep(1)
            pytest.fail("JupyterLab did not start:\n" + (home / "log").read_text(errors="replace")[-3000:])
        finally:
            server.terminate()  # it takes its kernels along


@pytest.fixture(scope="session")
def open_notebook(address: str) -> Iterator[Opened]:
    """Opens a notebook by name -> its page, which collects its faults in `page.faults`."""
    api = pytest.importorskip("playwright.sync_api")

    def opened(name: str) -> Any:
        page = browser.new_page(viewport={"width": 1280, "height": 1720})
        page.faults = []
        page.on("pageerror", lambda error: page.faults.append(str(error)))
        page.set_default_timeout(120_000)
        page.goto(address.format(name))
        page.wait_for_selector(".jp-Notebook .jp-Cell")
        page.wait_for_timeout(2000)
        if page.locator("#jp-left-stack:visible").count():
            page.keyboard.press("Control+b")  # the file browser takes a quarter of the window
        return page

    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield opened
        browser.close()


def theme(page: Any, name: str) -> None:
    """Switch to it: "Light" or "Dark"."""
    if page.locator(f"body[data-jp-theme-name='JupyterLab {name}']").count():
        return
    page.click(".lm-MenuBar-itemLabel:text-is('Settings')")
    page.hover(".lm-Menu-itemLabel:text-is('Theme')")
    page.click(f".lm-Menu-itemLabel:text-is('JupyterLab {name}')")
    page.wait_for_selector(f"body[data-jp-theme-light='{str(name == 'Light').lower()}']", state="attached")
    page.wait_for_timeout(2500)


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
