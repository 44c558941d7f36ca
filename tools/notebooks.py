"""Run notebooks and save them as they should be read on the web: with pictures and text, without widget state.

Usage: python tools/notebooks.py notebooks [more files or folders …]

The kernel sees KVLAB_PICTURES=1: then a panel adds an `image/png` of itself to what it displays. Live parts, which a page
that does not run cannot show, are left out. Exits 1 if a cell fails or a saved file is larger than 500 kB.
"""

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

LIMIT = 500_000  # bytes
LIVE = ("application/vnd.jupyter.widget-view+json", "application/vnd.plotly.v1+json", "application/javascript")


def run(path: Path) -> str:
    """Run and save one notebook; the fault in one line, or ""."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        store_widget_state=False,
        record_timing=False,
    )
    try:
        client.execute()
    except CellExecutionError as error:
        return str(error).strip().rpartition("\n")[2]
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            for kind in LIVE:
                output.get("data", {}).pop(kind, None)
        if "outputs" in cell:
            cell.outputs = [output for output in cell.outputs if output.output_type == "stream" or output.get("data")]
    nbformat.write(notebook, path)
    size = path.stat().st_size
    return f"{size:,} bytes, more than {LIMIT:,}" if size > LIMIT else ""


def main(names: list[str]) -> int:
    os.environ["KVLAB_PICTURES"] = "1"
    failed = 0
    for name in map(Path, names):
        for path in sorted(name.rglob("*.ipynb")) if name.is_dir() else [name]:
            if ".ipynb_checkpoints" in path.parts:
                continue
            fault = run(path)
            failed += bool(fault)
            print(f"{path}: {fault or f'{path.stat().st_size / 1000:.0f} kB'}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["notebooks"]))
