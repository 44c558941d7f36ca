"""The speed figures: what is drawn, in which hue and unit, how recorded rows differ, and updates in place."""

import pytest

pytest.importorskip("plotly")
import plotly.graph_objects as go

from kvlab.measure.speed import Row
from kvlab.plots import speed, style

ROWS = [
    Row(16, 4, 3, without=0.060, cached=0.050, prefill=0.064),
    Row(1024, 4, 3, without=2.0, cached=0.100, prefill=2.048),
]
SHORT = [Row(64, 3, 1, without=0.2, cached=0.05, prefill=0.2)]


def y(fig: go.Figure, name: str) -> list[float]:
    return list(style.trace(fig, name).y)


def test_time_per_token_on_logarithmic_axes() -> None:
    fig = speed.per_token({speed.RECORDED: ROWS, "measured here": SHORT})
    assert y(fig, "without a cache, recorded") == pytest.approx([60, 2000])
    assert y(fig, "with a cache, recorded") == pytest.approx([50, 100])
    assert y(fig, "without a cache, measured here") == pytest.approx([200])
    assert style.trace(fig, "with a cache, recorded").line.color == style.FULL
    assert style.trace(fig, "without a cache, recorded").line.color == style.DANGER
    assert style.trace(fig, "without a cache, recorded").line.dash == "dash"
    assert style.trace(fig, "without a cache, measured here").line.dash == "solid"
    assert (fig.layout.xaxis.type, fig.layout.yaxis.type) == ("log", "log")
    assert list(fig.layout.xaxis.ticktext) == ["16", "64", "1K"]
    assert "ms" in fig.layout.yaxis.title.text
    low, high = (10**end for end in fig.layout.yaxis.range)
    assert low < 50
    assert high > 2000
    assert sum(low <= tick <= high for tick in fig.layout.yaxis.tickvals) >= 3


def test_an_update_changes_the_figure_in_place() -> None:
    fig = go.FigureWidget(speed.per_token({speed.RECORDED: ROWS}))
    old = style.trace(fig, "without a cache, recorded")
    speed.update_per_token(fig, {"measured here": SHORT}, title="now")
    assert style.trace(fig, "without a cache, recorded") is old
    assert old.visible is False
    assert style.trace(fig, "with a cache, measured here").visible is True
    assert list(fig.layout.xaxis.ticktext) == ["64"]
    assert fig.layout.title.text == "now"
    speed.update_per_token(fig, {speed.RECORDED: ROWS})
    assert old.visible is True
    assert len(fig.data) == 4


def test_the_speed_up_beside_the_famous_claim() -> None:
    fig = speed.speedup({speed.RECORDED: ROWS, "measured here": SHORT})
    assert y(fig, "one more token, recorded") == pytest.approx([1.2, 20])
    answer = 100 * 2.0 / (2.048 + 99 * 0.1)
    assert y(fig, "100-token answer (predicted), recorded")[1] == pytest.approx(answer)
    assert style.trace(fig, "100-token answer (predicted), measured here") is None
    (band,) = fig.layout.shapes
    assert (band.y0, band.y1) == (10, 50)
    assert fig.layout.annotations[0].text == "the famous claim: 10 to 50 times"
    low, high = (10**end for end in fig.layout.yaxis.range)
    assert low < 1
    assert high > 50


def test_bars_of_prefill_and_decode() -> None:
    fig = go.FigureWidget(speed.phases(ROWS))
    assert y(fig, speed.READ) == pytest.approx([4, 2])
    assert y(fig, speed.WRITE) == pytest.approx([50, 100])
    assert list(style.trace(fig, speed.READ).x) == ["16", "1,024"]
    speed.update_phases(fig, SHORT)
    assert y(fig, speed.WRITE) == pytest.approx([50])
    assert len(fig.data) == 2


def test_the_first_run_is_marked_where_it_was_cold() -> None:
    fig = speed.first_runs((0.2, 0.1, 0.1), True)
    assert list(fig.data[0].y) == pytest.approx([200, 100, 100])
    assert list(fig.data[0].x) == ["1 (cold)", "2", "3"]
    assert fig.data[0].marker.color == (style.DANGER, style.FULL, style.FULL)
    assert speed.first_runs((0.1, 0.1), False).data[0].marker.color == (style.FULL, style.FULL)


def test_summaries_say_the_same_in_words() -> None:
    assert speed.per_token_summary(ROWS) == (
        "At 16 tokens of context 60 ms without a cache and 50 ms with one; at 1,024 tokens 2,000 ms and 100 ms."
    )
    assert speed.per_token_summary(SHORT) == "At 64 tokens of context 200 ms without a cache and 50 ms with one."
    assert speed.speedup_summary(ROWS, {1.0: None, 10.0: 318.4, 50.0: None}) == (
        "One more token: 1.2 times faster at 16 tokens, 20 at 1,024; above 1 times from the start; "
        "passes 10 times at about 320 tokens; stays below 50 times."
    )
    assert speed.phases_summary(ROWS) == (
        "At 1,024 tokens: prefill takes 2.0 ms for each token read, decode 100 ms for each one written, 50 times as long."
    )
    assert speed.first_runs_summary((0.2, 0.1), 0.1, True) == (
        "The first run took 200 ms, the later ones 100 ms: 2.0 times as long."
    )
    assert speed.first_runs_summary((0.1, 0.1), 0.1, False).endswith("The model had been run before.")


def test_nothing_measured_yet() -> None:
    assert len(speed.per_token({}).data) == 0
    assert len(speed.speedup({}).layout.shapes) == 1
    assert y(speed.phases([]), speed.READ) == []
    assert {speed.per_token_summary([]), speed.speedup_summary([], {}), speed.phases_summary([])} == {
        "Nothing has been measured yet."
    }
