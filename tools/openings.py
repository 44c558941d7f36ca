"""Record how each slow panel of the course opens, into `data/openings/` (see `kvlab/panels/opening.py`).

Usage: python tools/openings.py

The cells of each notebook run up to its panel; what the panel shows when it is done is written down, and files that no panel asks for any more go.
"""

import json
import os
import sys
from pathlib import Path

from kvlab.panels import opening
from kvlab.panels.bench import Bench
from kvlab.panels.live_lab import LiveLab

ROOT = Path(__file__).parents[1]
PANELS = {
    "00_live_lab": ("panel",),
    "03_quantization": ("panel",),
    "04_windows_and_sinks": ("panel",),
    "05_eviction": ("panel",),
    "06_low_rank_and_merging": ("panel",),
    "07_offloading": ("panel",),
    "08_paged_attention": ("panel", "traffic"),
    "09_prefix_caching": ("panel",),
}


def panels(notebook: str, names: tuple[str, ...]) -> list[Bench | LiveLab]:
    """The panels of these names, after their first run."""
    room: dict[str, object] = {}
    left = list(names)
    found: list[Bench | LiveLab] = []
    for cell in json.loads((ROOT / "notebooks" / f"{notebook}.ipynb").read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] != "code" or not left:
            continue
        if not found or f"\n{left[0]} = " in f"\n{text}":
            exec(compile(text, notebook, "exec"), room)  # a notebook's own cells
        if left[0] in room:
            panel = room[left.pop(0)]
            assert isinstance(panel, Bench | LiveLab) and panel.wait() and not panel.error.value
            found.append(panel)
    return found


def main() -> int:
    os.chdir(ROOT / "notebooks")
    folder = ROOT / "data" / opening.FOLDER
    folder.mkdir(exist_ok=True)
    written = set()
    for notebook, names in PANELS.items():
        for panel in panels(notebook, names):
            cards = panel.cards.values() if isinstance(panel, Bench) else panel.cards
            text = json.dumps(opening.take(cards, "python tools/openings.py"), ensure_ascii=False)
            (folder / panel.opened).write_text(text + "\n", encoding="utf-8")
            written.add(panel.opened)
            print(f"{notebook}: {panel.opened}, {len(text) / 1e3:.0f} kB", flush=True)
    for old in folder.glob("*.json"):
        if old.name not in written:
            old.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
