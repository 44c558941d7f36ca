"""JupyterLab and Chromium for the browser's tests and for whoever times panels: a server on a free port with a token, pages that collect their faults."""

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvlab.jupyter import SERVER

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
LONG = 900_000  # ms: for a busy machine; a quiet one needs a tenth

SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false"},  # else a question lies over the pictures
    "notebook-extension/tracker": {"windowingMode": "none"},  # every cell is in the page, not only those in sight
}


def source(path: Path, until: str = "") -> tuple[str, ...]:
    """The code cells of a notebook, down to the first with a line that begins so. Raises ``ValueError`` where none does."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    sources = tuple("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    if not until:
        return sources
    last = [number for number, one in enumerate(sources) if f"\n{until}" in f"\n{one}"]
    if not last:
        raise ValueError(f"{path.name} has no line that begins with {until!r}")
    return sources[: last[0] + 1]


def write(path: Path, sources: Sequence[str]) -> None:
    """A notebook of code and nothing else: a saved number or picture tells nothing about this run."""
    empty = {"cell_type": "code", "metadata": {}, "execution_count": None, "outputs": []}
    cells = [empty | {"id": f"cell-{number}", "source": one} for number, one in enumerate(sources)]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    path.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": kernel, "cells": cells}))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.contextmanager
def served(line: Sequence[str], address: str, log: Path, env: Mapping[str, str] | None = None) -> Iterator[None]:
    """A server that answers at ``address`` before the block begins; it ends, with its kernels, after it. Raises ``RuntimeError`` with its log if it never does."""
    with log.open("wb") as file, subprocess.Popen(line, env=env, stdout=file, stderr=subprocess.STDOUT) as server:
        try:
            for _ in range(120):
                if server.poll() is not None:
                    break
                with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=60):
                    yield
                    return
                time.sleep(1)
            raise RuntimeError(f"{line[2]} did not start:\n" + log.read_text(errors="replace")[-3000:])
        finally:
            server.terminate()


@contextlib.contextmanager
def jupyter(home: Path, notebooks: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """JupyterLab with ``notebooks`` (name -> sources of its cells): the address of one, with `{0}` for its name. Nothing of the person's own settings is read."""
    (home / "notebooks").mkdir()
    for name, sources in notebooks.items():
        write(home / "notebooks" / f"{name}.ipynb", sources)
    for name, setting in SETTINGS.items():
        path = home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(setting))
    port, token = free_port(), secrets.token_hex(16)
    line = [sys.executable, "-m", "jupyterlab", *SERVER, "--no-browser", f"--ServerApp.root_dir={home / 'notebooks'}"]
    line += [f"--ServerApp.port={port}", "--ServerApp.port_retries=0", f"--IdentityProvider.token={token}"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        line.append("--allow-root")
    folders = {
        "JUPYTER_CONFIG_DIR": home / "config",
        "JUPYTERLAB_SETTINGS_DIR": home / "settings",
        "JUPYTERLAB_WORKSPACES_DIR": home / "spaces",
    }
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    env = (
        os.environ | {name: str(folder) for name, folder in folders.items()} | {"PYTHONPATH": path, "OMP_WAIT_POLICY": "PASSIVE"}
    )
    base = f"http://127.0.0.1:{port}"
    with served(line, f"{base}/api?token={token}", home / "log", env):
        yield f"{base}/lab/workspaces/{{0}}/tree/{{0}}.ipynb?token={token}"  # each with a layout of its own


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


def page_of(browser: Any) -> Any:
    """A new page of 1280 × 1720 pixels, which collects its faults in `page.faults`: what threw, and errors on the console."""
    page = browser.new_page(viewport={"width": 1280, "height": 1720})
    page.faults = []
    page.on("pageerror", lambda error: page.faults.append(str(error)))
    page.on("console", lambda said: page.faults.append(said.text) if said.type == "error" else None)
    page.set_default_timeout(120_000)
    return page


def open_page(browser: Any, address: str) -> Any:
    """A notebook's page, its cells in sight, the file browser closed."""
    page = page_of(browser)
    page.goto(address)
    page.wait_for_selector(".jp-Notebook .jp-Cell")
    page.wait_for_timeout(2000)
    if page.locator("#jp-left-stack:visible").count():
        page.keyboard.press("Control+b")  # the file browser takes a quarter of the window
    return page


def menu(page: Any, *labels: str) -> None:
    """Choose from the menu bar: menu, then an entry (and the entry of its submenu)."""
    page.click(f".lm-MenuBar-itemLabel:text-is('{labels[0]}')")
    for label in labels[1:-1]:
        page.hover(f".lm-Menu-itemLabel:text-is('{label}')")
    page.click(f".lm-Menu-itemLabel:text-is('{labels[-1]}')")


def run_all(page: Any) -> None:
    """Start all cells; again where nothing came of it: JupyterLab may lose the order while the kernel is still starting."""
    for _ in range(5):
        menu(page, "Run", "Run All Cells")
        for _ in range(60):
            page.wait_for_timeout(500)
            if page.locator(".jp-CodeCell .jp-InputPrompt").first.inner_text().strip() not in ("", "[ ]:"):
                return
    raise AssertionError("the cells did not start")


def ran(page: Any, timeout: float = LONG) -> None:
    """Until every code cell that is not empty has a number."""
    page.wait_for_function(
        """() => [...document.querySelectorAll('.jp-Notebook .jp-CodeCell')].every(cell =>
            !cell.querySelector('.cm-content').innerText.trim() || /^\\[\\d+\\]:$/.test(cell.querySelector('.jp-InputPrompt').innerText.trim()))""",
        polling=500,
        timeout=timeout,
    )


def serious(page: Any, *inside: str) -> list[str]:
    """What axe-core calls serious or critical within these selectors, a line each."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page, context={"include": [[one] for one in inside]}).response["violations"]
    return [
        f"{fault['id']}: {node['html'][:200]} ({node['failureSummary']})"
        for fault in found
        if fault["impact"] in ("serious", "critical")
        for node in fault["nodes"]
    ]


PALE = r"""() => {
    const numbers = text => (text.match(/[\d.]+/g) || []).map(Number);
    const part = x => (x /= 255) <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
    const light = rgb => 0.2126 * part(rgb[0]) + 0.7152 * part(rgb[1]) + 0.0722 * part(rgb[2]);
    const found = new Set();
    for (const text of document.querySelectorAll('.js-plotly-plot .main-svg text')) {
        const look = getComputedStyle(text), box = text.getBoundingClientRect();
        if (!text.textContent.trim() || !box.width || look.visibility === 'hidden' || text.closest('.bartext, .heatmaplayer, .hm, .modebar, .barlayer')) continue;
        let node = text, shown = Number(look.fillOpacity), brighter = 1;
        for (; node && node.classList; node = node.parentNode) {
            const style = getComputedStyle(node);
            shown *= Number(style.opacity);
            brighter *= Number((style.filter.match(/brightness\(([\d.]+)\)/) || [1, 1])[1]);
            if (node.classList.contains('js-plotly-plot')) break;
        }
        if (!shown) continue;
        let paper = [255, 255, 255];
        for (let up = text.closest('.js-plotly-plot').querySelector('.main-svg'); up; up = up.parentElement) {
            const of = numbers(getComputedStyle(up).backgroundColor);
            if (of.length && (of[3] ?? 1) > 0.9) { paper = of; break; }
        }
        const ink = numbers(look.fill).slice(0, 3).map((x, at) => shown * Math.min(255, brighter * x) + (1 - shown) * paper[at]);
        const [dark, bright] = [light(ink), light(paper)].sort((a, b) => a - b);
        const contrast = (bright + 0.05) / (dark + 0.05);
        if (contrast < 4.5) found.add(`${text.textContent.slice(0, 40)}: ${contrast.toFixed(1)} (${look.fill} on ${paper.slice(0, 3)})`);
    }
    return [...found];
}"""


def pale(page: Any) -> list[str]:
    """Words in figures, where axe does not look, with less contrast to the page than WCAG's 4.5:1, a line each. Those on bars and maps are left out."""
    return [str(line) for line in page.evaluate(PALE)]
