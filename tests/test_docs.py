"""The documentation: links lead somewhere, and the method that is added there is found by everything."""

import json
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[01]*.ipynb"))
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "notebooks").rglob("*.ipynb"))]


def words(path: Path) -> str:
    if path.suffix != ".ipynb":
        return path.read_text(encoding="utf-8")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


@pytest.mark.parametrize("path", [path for path in PAGES if ".ipynb_checkpoints" not in path.parts], ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    """Files that are linked or named are there; anchors are of the page."""
    text = words(path)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://", "mailto:", "#")):
            continue
        assert (path.parent / target.partition("#")[0]).exists(), target
    for target in re.findall(r"`((?:solutions|notebooks|kvlab|docs|data)/[\w/.-]+\.(?:py|ipynb|md|csv|json|jsonl))`", text):
        here = path.parent / target
        assert here.exists() or (ROOT / target).exists() or target == "kvlab/keep/value_norm.py", target


ADDED = """
import importlib.util, sys
import torch
import kvlab
from kvlab import keep
from kvlab.cache import forward
from kvlab.cli import read_strategy
from kvlab.panels.widgets import StrategyControls
from kvlab.strategy import methods
from tests import zoo
spec = importlib.util.spec_from_file_location("kvlab.keep.value_norm", "docs/examples/value_norm.py")
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
assert methods("keep")["ValueNorm"] is module.ValueNorm
strategy = kvlab.Strategy(keep=module.ValueNorm(budget=8, recent=2, sinks=1))
assert kvlab.Strategy.from_dict(strategy.to_dict()) == strategy == read_strategy(strategy.to_code())
controls = StrategyControls(strategy, lambda: None)
assert controls.keep.choice.value == "ValueNorm" and controls.keep.settings["budget"].value == 8
model = zoo.model("llama")
ids = torch.randint(3, 90, (1, 24), generator=torch.Generator().manual_seed(0))
small, full = kvlab.KVCache(model, strategy), kvlab.KVCache(model, kvlab.Strategy())
with torch.no_grad():
    forward(model, ids, small, last=True), forward(model, ids, full, last=True)
values = full.layers[1].dense()[1]
columns = small.layers[1].dense()[2]
for head in range(values.shape[1]):
    longest = values[0, head, 1:22].norm(dim=-1).topk(5).indices + 1
    assert sorted(columns[0, head].tolist()) == sorted([0, *longest.tolist(), 22, 23])
print("ok")
"""


def test_the_method_that_is_added_there_is_found_by_everything() -> None:
    """In a process of its own: a method that is registered stays."""
    source = (ROOT / "docs" / "examples" / "value_norm.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) < 40
    done = subprocess.run([sys.executable, "-c", ADDED], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == "ok", done.stderr


def test_the_site_is_built_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    """Course, reading and API as one site; a warning is an error. Every link within it is followed, and every picture."""
    pytest.importorskip("myst_nb")
    build = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", "-d", str(tmp_path / "trees")]
    done = subprocess.run([*build, ".", str(tmp_path / "site")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    pages = [
        path
        for path in (tmp_path / "site").rglob("*.html")
        if "_static" not in path.parts and path.name not in ("search.html", "genindex.html")
    ]
    assert {f"{path.stem}.html" for path in NOTEBOOKS} <= {page.name for page in pages}
    dead = set()
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert "widget-view+json" not in text and "Loading widget" not in text, page.name  # nothing that only a kernel could show
        for target in re.findall(r'(?:href|src)="([^"#?]+)[#?"]', text):
            if not re.match(r"[a-z]+:|//", target) and not (page.parent / unquote(target)).exists():
                dead.add((page.name, target))
    assert not dead
