"""Start JupyterLab on the live lab, or a panel alone as a page without code (Voilà). Also a script, which starts without importing kvlab, and so without waiting for torch."""

import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

HOME = Path(__file__).resolve().parents[1]  # the checkout, where there is one
NOTEBOOK = "notebooks/00_live_lab.ipynb"

# Reached from this machine only, with its token, and silent towards the outside: no news, no question about news,
# no look for updates, no catalogue of extensions, no search for language servers.
SERVER = (
    "--ServerApp.ip=127.0.0.1",
    "--LabApp.news_url=None",
    "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    "--LabApp.extension_manager=readonly",
    "--LanguageServerManager.autodetect=False",
)


def command(options: list[str]) -> list[str]:
    """The command line: on the live lab in a checkout, else in the current folder. `options` go to JupyterLab and win."""
    line = [sys.executable, "-m", "jupyterlab", *SERVER]
    if hasattr(os, "geteuid") and os.geteuid() == 0:  # a container: JupyterLab refuses to run as root unless told
        line.append("--allow-root")
    if (HOME / NOTEBOOK).is_file():
        line += [f"--ServerApp.root_dir={HOME}", f"--LabApp.default_url=/lab/tree/{NOTEBOOK}"]
    return [*line, *options]


PANELS = {
    "live-lab": ("live_lab", "LiveLab"),
    "memory": ("memory", "MemoryCalculator"),
    "river": ("river", "TokenRiver"),
    "offloading": ("offloading", "Offloading"),
    "block-table": ("block_table", "BlockTable"),
    "traffic": ("traffic", "Traffic"),
    "advisor": ("advisor", "Advisor"),
}
"""What can be opened alone: name -> its file in ``kvlab/panels`` and its class."""


def page(panel: str, folder: Path) -> Path:
    """Write the notebook that shows ``panel`` and nothing else -> its path. Raises ``ValueError`` for a panel that is not one of :data:`PANELS`."""
    if panel not in PANELS:
        raise ValueError(f"panel={panel!r} is not one of {', '.join(PANELS)}")
    module, name = PANELS[panel]
    cell: dict[str, object] = {
        "cell_type": "code",
        "id": "panel",
        "metadata": {},
        "source": f"from kvlab.panels.{module} import {name}\n\n{name}()",
        "outputs": [],
        "execution_count": None,
    }
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    path = folder / f"{panel}.ipynb"
    path.write_text(json.dumps({"cells": [cell], "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}), encoding="utf-8")
    return path


def app(panel: str, options: list[str]) -> NoReturn:
    """Become a server that shows ``panel`` as a page without code, to this machine only, with a token. ``options`` go to Voilà and win.

    Raises ``ValueError`` where Voilà is not installed, or for a panel that is not there.
    """
    path = page(panel, Path(tempfile.mkdtemp(prefix="kvlab-")))
    if importlib.util.find_spec("voila") is None:
        raise ValueError("a page without code needs Voilà: pip install 'kvlab[app]', or make app in a checkout")
    sys.stdout.flush()
    line = [sys.executable, "-m", "voila", str(path), "--Voila.ip=127.0.0.1", "--token", "--show_tracebacks=True", *options]
    os.execv(line[0], line)


def start(options: list[str]) -> NoReturn:
    """Become the server (this process is replaced)."""
    sys.stdout.flush()
    line = command(options)
    os.execv(line[0], line)


if __name__ == "__main__":
    start(sys.argv[1:])
