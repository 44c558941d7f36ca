"""Start JupyterLab on the live lab. Also a script, which starts without importing kvlab, and so without waiting for torch."""

import os
import sys
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


def start(options: list[str]) -> NoReturn:
    """Become the server (this process is replaced)."""
    sys.stdout.flush()
    line = command(options)
    os.execv(line[0], line)


if __name__ == "__main__":
    start(sys.argv[1:])
