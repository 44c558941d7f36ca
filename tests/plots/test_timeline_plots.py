"""Figures of an offloaded cache: what is drawn is what passed."""

import pytest

pytest.importorskip("plotly")

from types import SimpleNamespace

from kvlab.plots import style
from kvlab.plots import timeline as plots
from kvlab.timeline import Timeline
from tests.test_timeline import TWO

NO_KEEP = SimpleNamespace(keep=SimpleNamespace(looks=False))
MADE = SimpleNamespace(
    line=TWO, seconds=(3.5, 3.5), step=3.5, bytes=1000, cache=4000, resident=100, high_water=2200, layer=1000, strategy=NO_KEEP
)


def test_a_step_lies_where_it_passed():
    fig = plots.step(TWO, 0)
    way, computes, waits = (style.trace(fig, plots.LANES[kind][0]) for kind in ("fetch", "compute", "stall"))
    assert list(way.x) == [2000, 2000, 2500] and list(way.base) == [0, 2000, 3000]
    assert list(computes.x) == [3000, 500] and list(computes.base) == [2000, 5500]
    assert list(waits.x) == [2000, 500]
    assert [round(y) for y in way.y] == [0, 1, 1] and all(abs(a - b) > 0.1 for a, b in zip(way.y, computes.y, strict=False))
    assert way.marker.color == style.PLACE and waits.marker.color == style.DANGER
    assert way.customdata[2][1] == 200 / 1e6
    plots.update_step(fig, TWO, 1)
    assert list(way.x) == [3000] and list(waits.x) == [] and len(fig.data) == 4
    assert "ms" in fig.layout.xaxis.title.text and "layer" in fig.layout.yaxis.title.text
    assert plots.step(None).data[0].x is None


def test_words_of_a_step():
    said = plots.step_summary(MADE, 2.0)
    assert said.startswith("A step takes 3.50 s, 2.00 s with all bytes here: it computes 2.25 s and waits 1.25 s for 1 kB.")
    assert f"{100 * TWO.hidden:.0f}% of the fetching" in said and f"{100 * TWO.hideable:.0f}% could" in said
    assert "Nothing is fetched" in plots.step_summary(SimpleNamespace(**vars(MADE) | {"bytes": 0}), 2.0)
    looks = SimpleNamespace(**vars(MADE) | {"strategy": SimpleNamespace(keep=SimpleNamespace(looks=True))})
    assert "nothing is fetched ahead" in plots.step_summary(looks, 2.0)


def test_bytes_held():
    fig = plots.held(MADE, 8000)
    assert list(fig.data[0].x) == [0.008, 0.004, 0.0022, 0.0001]
    assert "Of 4 kB at most 2.2 kB are on the device at a time, 2.2 layers' worth" in plots.held_summary(MADE)
    plots.update_held(fig, MADE, 16000)
    assert fig.data[0].x[0] == 0.016


def test_links():
    predicted = {"slow": 0.02, "fast": 0.001}
    fig = plots.links(10_000_000, predicted, 2e8)
    assert list(style.trace(fig, plots.PREDICTED).x) == [20, 1]
    assert list(style.trace(fig, plots.MEASURED).x) == [50]
    said = plots.links_summary(10_000_000, predicted, 2e8)
    assert said == "10 MB a step: at least 20 ms over slow, 1 ms over fast (predicted); here 50 ms, at 0.20 GB/s."
    plots.update_links(fig, 10_000_000, predicted, 1e8, 1e8)
    assert style.trace(fig, plots.MEASURED).visible is False and list(style.trace(fig, plots.EMULATED).x) == [100]
    assert "of a link emulated at 0.1 GB/s" in plots.links_summary(10_000_000, predicted, 1e8, 1e8)
    assert plots.links_summary(0, predicted, float("nan")) == "Nothing is fetched."
    plots.update_links(fig, 0, predicted, float("nan"))
    assert list(style.trace(fig, plots.MEASURED).x) == []


def test_the_recorded_study():
    row = {
        "name": "disk, 1 ahead",
        "compute": 0.1,
        "stall": 0.02,
        "step": 0.12,
        "resident_step": 0.08,
        "hidden": 0.8,
        "hideable": 1.0,
    }
    fig = plots.hiding([row])
    assert [list(bar.y) for bar in fig.data] == [[100], [20]] and fig.layout.shapes[0].y0 == 80
    assert plots.hiding_summary([row]) == "disk, 1 ahead: waits 20 ms of 120; 80% of the fetching hidden, 80% of what could be."


def test_a_running_timeline_can_be_drawn():
    assert plots.step(Timeline(), 0).data[0].x is not None
