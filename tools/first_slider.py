"""From `git clone` to the first moved slider, on this machine: clone, `make lab`, open the notebook, run it, move a slider by keyboard.

Usage: python -m tools.first_slider [data/results/first_slider.jsonl]      (KVLAB_CACHE set to an empty folder, the model is fetched, too)

Prints and writes one JSON line: seconds after which JupyterLab answered (`served`), a figure showed numbers (`first`), and a slider had changed one (`moved`).
"""

import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kvlab.measure.machine import machine
from tests.browser.lab import ROOT, chromium, open_page
from tools.panel_times import FIGURES, SHOWN, seconds


def main(out: str = "data/results/first_slider.jsonl") -> int:
    with tempfile.TemporaryDirectory() as home, chromium() as browser:
        start = time.perf_counter()
        subprocess.run(["git", "clone", "-q", str(ROOT), f"{home}/kvlab"], check=True)
        log = Path(home, "log")
        env = os.environ | {"JUPYTER_CONFIG_DIR": f"{home}/config", "JUPYTERLAB_WORKSPACES_DIR": f"{home}/spaces"}
        with log.open("wb") as file:
            line = ["make", "lab", "LAB_FLAGS=--no-browser --ServerApp.port=0"]
            server = subprocess.Popen(
                line, cwd=f"{home}/kvlab", env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            while not (found := re.search(r"http://127\.0\.0\.1:\d+/lab\S*token=\w+", log.read_text(errors="replace"))):
                if server.poll() is not None or time.perf_counter() - start > 1200:
                    raise SystemExit(log.read_text(errors="replace")[-2000:])
                time.sleep(0.5)
            row = {"served": round(time.perf_counter() - start, 1)}
            page = open_page(browser, found[0])
            cells = page.locator(".jp-CodeCell")
            for number in (0, 1):
                cells.nth(number).locator(".cm-content").click()
                page.keyboard.press("Shift+Enter")
            row["first"] = seconds(page, SHOWN, start, 1)
            before = page.evaluate(FIGURES)
            page.locator(".kvlab-keep .noUi-handle").first.focus()
            page.keyboard.press("ArrowLeft")
            row["moved"] = seconds(page, f"x => ({FIGURES})() !== x", start, before)
        finally:
            os.killpg(server.pid, 15)
    made = row | {"machine": machine(), "date": datetime.date.today().isoformat(), "command": "python -m tools.first_slider"}
    print(json.dumps(made))
    Path(out).write_text(json.dumps(made) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
