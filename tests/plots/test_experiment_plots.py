"""Figures of experiments: the front by hand, empty cells where nothing can be said."""

import pytest

from kvlab import Strategy, keep, store
from kvlab.measure.experiment import Evidence
from kvlab.plots import experiment as plots
from kvlab.plots import style


def row(strategy: Strategy, task: str, score: float | None, ratio: float = 1.0, counts: bool = True, why: str = "") -> Evidence:
    return Evidence(str(strategy), strategy.to_dict(), {"task": task}, "tiny", score, 1.0, counts, why, ratio=ratio)


INT, WINDOW = Strategy(store=store.Int(bits=4)), Strategy(keep.Window(size=60, sinks=4))
ROWS = [
    row(Strategy(), "PassKeys", 1.0),
    row(INT, "PassKeys", 0.9, 0.3),
    row(WINDOW, "PassKeys", 0.2, 0.5),
    row(Strategy(), "Variables", 0.3, counts=False, why="the full cache itself gets 0.30"),
    row(INT, "Variables", 0.3, counts=False, why="the full cache itself gets 0.30"),
    row(WINDOW, "Text", 0.8, 0.5),
]


@pytest.mark.parametrize(
    "points, want",
    [
        ([(1, 1)], [0]),
        ([(1, 0.5), (2, 0.4), (3, 0.9), (3, 0.95)], [0, 3]),
        ([(2, 1.0), (1, 1.0)], [1]),
        ([(1, 0.1), (1, 0.2)], [1]),
        ([], []),
    ],
)
def test_the_front(points, want):
    assert plots.front(points) == want


def test_heat():
    fig = plots.heat(ROWS)
    cells = style.trace(fig, "score")
    assert list(cells.y) == ["full cache", str(INT), str(WINDOW)] and list(cells.x) == ["PassKeys", "Variables", "Text"]
    assert [list(line) for line in cells.z] == [[1.0, None, None], [0.9, None, None], [0.2, None, 0.8]]
    assert cells.customdata[1][1] == "the full cache itself gets 0.30" and cells.customdata[0][2] == "not measured"
    text = plots.heat_summary(ROWS)
    assert text.startswith("Int(bits=4) keeps at least 90%") and "0.20" in text and "Silent on this model: Variables." in text
    assert plots.heat_summary(ROWS[3:5]) == "No task says anything about a cache on this model."


def test_pareto():
    own = ROWS[:3]
    fig = plots.pareto(own)
    assert list(style.trace(fig, "nothing beats these").x) == [30.0, 100.0]
    assert style.trace(fig, "keep").marker.color == style.KEEP and list(style.trace(fig, "store").y) == [0.9]
    assert plots.pareto_summary(own) == f"On the front: {INT} (30%, 0.90), full cache (100%, 1.00)."
    assert plots.pareto_summary([]) == "Nothing was measured."
