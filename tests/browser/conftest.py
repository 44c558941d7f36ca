"""JupyterLab in a real browser, started once for all tests of this folder; pictures of each state are left in `tests/browser/shots/`."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.lab import CHROMIUM, LONG, ROOT, chromium, jupyter, menu, open_page, source

SHOTS = Path(__file__).parent / "shots"

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

SHIPPED = ("03_quantization", "06_low_rank_and_merging", "07_offloading")
"""The project's notebooks of which the cells down to the panel are opened."""

COURSE = sorted((ROOT / "notebooks").glob("[01]*.ipynb"))


def written() -> dict[str, tuple[str, ...]]:
    """Each notebook of the browser's tests: name -> sources of its cells. The whole course is there as `course-00` to `course-11`."""
    shipped = {name: source(ROOT / "notebooks" / f"{name}.ipynb", "panel = ") for name in SHIPPED}
    return WRITTEN | shipped | {f"course-{path.name[:2]}": source(path) for path in COURSE}


@pytest.fixture(scope="session")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """JupyterLab with the notebooks of `written()`: the address of a notebook, with `{0}` for its name."""
    pytest.importorskip("jupyterlab")
    with jupyter(tmp_path_factory.mktemp("jupyter"), written()) as made:
        yield made


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    pytest.importorskip("playwright.sync_api")
    with chromium() as made:
        yield made


@pytest.fixture(scope="session")
def open_notebook(address: str, browser: Any) -> Opened:
    """Opens a notebook by name -> its page, which collects its faults in `page.faults`."""
    return lambda name: open_page(browser, address.format(name))


def theme(page: Any, name: str) -> None:
    """Switch to it: "Light" or "Dark"."""
    if page.locator(f"body[data-jp-theme-name='JupyterLab {name}']").count():
        return
    menu(page, "Settings", "Theme", f"JupyterLab {name}")
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
