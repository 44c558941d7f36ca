"""Time the panels of the course in JupyterLab and Chromium: how long until a figure shows numbers, and after a slider was released until one changes.

Usage: python -m tools.panel_times [data/results/panels.jsonl]

Cells before a panel's have run, as they have for a reader; the kernel is warm and the model's file in the system's cache. One JSON line for each panel: seconds
`first` (its cell started, until a figure with its line of words is there), `done` (until all are), `moved` (a slider released, until the first changes), and `settled`.
"""

import datetime
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kvlab.measure.machine import machine
from tests.browser.lab import LONG, ROOT, chromium, jupyter, open_page, source

# notebook -> what its panel's cell contains, and the slider that is moved: where it stands, its label, the key
PANELS = {
    "00_live_lab": ("LiveLab(", "keep", "budget", "ArrowLeft"),
    "01_why_a_cache": ("CacheOrNot(", "", "", ""),
    "02_memory": ("MemoryCalculator(", "", "context", "ArrowLeft"),
    "03_quantization": ("Inspector(", "look-at", "layer", "ArrowLeft"),
    "04_windows_and_sinks": ("TokenRiver(", "keep", "window", "ArrowLeft"),
    "05_eviction": ("TokenRiver(", "keep", "budget", "ArrowLeft"),
    "06_low_rank_and_merging": ("Spectrum(", "look-at", "layer", "ArrowLeft"),
    "07_offloading": ("Offloading(", "look-at", "tokens", "ArrowLeft"),
    "08_paged_attention": ("BlockTable(", "", "shared beginning", "ArrowLeft"),
    "08_paged_attention traffic": ("Traffic(", "requests", "shared beginning", "ArrowLeft"),
    "11_choose_a_strategy": ("Advisor(", "load", "context", "ArrowLeft"),
}

SHOWN = """n => [...document.querySelectorAll('.jp-CodeCell')[n].querySelectorAll('.js-plotly-plot')].some(plot => {
    const card = plot.closest('.kvlab-card') || plot.closest('.lm-Widget.widget-vbox');
    const words = card && [...card.querySelectorAll('.kvlab-summary, .widget-html-content')].some(line => line.innerText.length > 20);
    return words && plot.querySelector('.trace, .hm, .bars, .scatterlayer .points, .heatmaplayer image'); })"""
FIGURES = "() => [...document.querySelectorAll('.js-plotly-plot .main-svg')].map(drawn => drawn.innerHTML).join('')"
DONE = "() => [...document.querySelectorAll('.kvlab .kvlab-grow')].every(bar => bar.innerText.includes('done'))"


def seconds(page: Any, until: str, start: float, arg: object = None) -> float:
    page.wait_for_function(until, arg=arg, polling=50, timeout=LONG)
    return round(time.perf_counter() - start, 2)


def timed(page: Any, what: tuple[str, str, str, str]) -> dict[str, float]:
    piece, box, label, key = what
    cells = page.locator(".jp-CodeCell")
    for number in range(cells.count()):
        cell = cells.nth(number)
        text = cell.locator(".cm-content").inner_text()
        cell.locator(".cm-content").click()
        start = time.perf_counter()
        page.keyboard.press("Shift+Enter")
        if piece in text and "import" not in text:
            break
        page.wait_for_function(
            "n => /^\\[\\d+\\]:$/.test(document.querySelectorAll('.jp-CodeCell')[n].querySelector('.jp-InputPrompt').innerText.trim())",
            arg=number,
            timeout=LONG,
        )
    else:
        raise SystemExit(f"no cell with {piece}")
    row = {"first": seconds(page, SHOWN, start, number), "done": seconds(page, DONE, start)}
    if label:
        page.wait_for_timeout(3000)
        inside = f".kvlab-{box} " if box else ""
        handle = page.locator(f"{inside}.widget-inline-hbox:has(label:text('{label}')) .noUi-handle").first
        handle.focus(timeout=10_000)
        before = page.evaluate(FIGURES)
        start = time.perf_counter()
        page.keyboard.press(key)
        row["moved"] = seconds(page, f"x => ({FIGURES})() !== x", start, before)
        page.wait_for_timeout(600)
        row["settled"] = seconds(page, DONE, start)
    return row


def main(out: str = "data/results/panels.jsonl") -> int:
    names = {name.partition(" ")[0] for name in PANELS}
    books = {name: source(ROOT / "notebooks" / f"{name}.ipynb") for name in names}
    with tempfile.TemporaryDirectory() as home, chromium() as browser, jupyter(Path(home), books) as address:
        rows = []
        for name, what in PANELS.items():
            page = open_page(browser, address.format(name.partition(" ")[0]))
            panel = what[0].rstrip("(")
            row = {"panel": panel, "notebook": name.partition(" ")[0], **timed(page, what)}
            print(json.dumps(row), flush=True)
            rows.append(
                row | {"machine": machine(), "date": datetime.date.today().isoformat(), "command": "python -m tools.panel_times"}
            )
            page.close()
    Path(out).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
