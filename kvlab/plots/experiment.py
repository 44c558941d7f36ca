"""Figures of experiments: which strategy stands which task, and what quality costs in bytes. Rows of evidence in, Figure out."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from kvlab.plots import style

if TYPE_CHECKING:
    from kvlab.measure.experiment import Evidence

Shown = Callable[["Evidence"], str]


def _task(row: "Evidence") -> str:
    return str(row.task["task"])


def _strategy(row: "Evidence") -> str:
    return row.strategy


def heat(
    rows: Sequence["Evidence"], *, task: Shown = _task, name: Shown = _strategy, title: str = "Which strategy stands which task"
) -> go.Figure:
    """Strategies by tasks: the score, its number in the cell. Cells that say nothing about a cache, or failed, are empty and say why when pointed at."""
    strategies, tasks = list(dict.fromkeys(map(name, rows))), list(dict.fromkeys(map(task, rows)))
    cells = {(name(row), task(row)): row for row in rows}

    def score(strategy: str, asked: str) -> float | None:
        row = cells.get((strategy, asked))
        return row.score if row is not None and row.counts else None

    def said(strategy: str, asked: str) -> str:
        row = cells.get((strategy, asked))
        return "not measured" if row is None else row.why or f"{row.score:.2f}, the full cache {row.control:.2f}"

    numbers = [[score(one, asked) for asked in tasks] for one in strategies]
    fig = style.layout(go.Figure(), title, "", "", height=110 + 30 * len(strategies))
    fig.add_trace(
        go.Heatmap(
            name="score",
            x=tasks,
            y=strategies,
            z=numbers,
            zmin=0,
            zmax=1,
            colorscale=[[0, style.DANGER], [0.5, style.FAINT], [1, style.KEEP]],
            showscale=False,
            text=[["" if value is None else f"{value:.2f}" for value in line] for line in numbers],
            texttemplate="%{text}",
            customdata=[[said(one, asked) for asked in tasks] for one in strategies],
            hovertemplate="%{y}<br>%{x}: %{customdata}<extra></extra>",
            xgap=2,
            ygap=2,
        )
    )
    fig.update_yaxes(autorange="reversed", rangemode="normal", automargin=True)
    return fig.update_layout(hovermode="closest", showlegend=False)


def heat_summary(rows: Sequence["Evidence"], *, task: Shown = _task, name: Shown = _strategy) -> str:
    """The strategy that stands every task best, and the worst cell."""
    counted = [row for row in rows if row.counts and row.score is not None]
    silent = sorted({task(row) for row in rows} - {task(row) for row in counted})
    if not counted:
        return "No task says anything about a cache on this model."
    by: dict[str, list[float]] = {}
    for row in counted:
        by.setdefault(name(row), []).append((row.score or 0.0) / (row.control or 1.0))
    best = max((one for one in by if one != "full cache"), key=lambda one: min(by[one]), default="full cache")
    worst = min(counted, key=lambda row: row.score or 0.0)
    text = f"{best} keeps at least {100 * min(by[best]):.0f}% of the full cache's score everywhere; the lowest is {name(worst)} at {task(worst)}: {worst.score:.2f}."
    return text + (f" Silent on this model: {', '.join(silent)}." if silent else "")


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Which ``(cost, worth)`` points no other beats: none costs less and is worth as much, or costs the same and is worth more. In order of cost."""
    order = sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1]))
    found, most = [], float("-inf")
    for i in order:
        if points[i][1] > most:
            found.append(i)
            most = points[i][1]
    return found


def pareto(rows: Sequence["Evidence"], *, name: Shown = _strategy, title: str = "Quality against bytes") -> go.Figure:
    """One task's score over the allocated bytes, in percent of a 16-bit cache; the line joins those that no other beats."""
    own = [row for row in rows if row.score is not None and row.ratio is not None]
    fig = style.layout(go.Figure(), title, "bytes (% of a 16-bit cache)", "score", height=380)
    points = [(100 * (row.ratio or 0.0), row.score or 0.0) for row in own]
    best = front(points)
    fig.add_trace(
        go.Scatter(
            name="nothing beats these",
            x=[points[i][0] for i in best],
            y=[points[i][1] for i in best],
            mode="lines",
            line={"color": style.FULL, "shape": "hv", "width": 2},
            hoverinfo="skip",
        )
    )
    for kind, colour, names in _kinds(own):
        fig.add_trace(
            go.Scatter(
                name=kind,
                x=[points[i][0] for i in names],
                y=[points[i][1] for i in names],
                mode="markers+text" if len(own) <= 12 else "markers",
                text=[name(own[i]) for i in names],
                textposition="bottom center",
                cliponaxis=False,
                marker={"color": colour, "size": 10},
                hovertemplate="%{text}<br>%{x:.1f}% of 16-bit, score %{y:.3f}<extra></extra>",
            )
        )
    return fig.update_layout(hovermode="closest")


def _kinds(rows: Sequence["Evidence"]) -> list[tuple[str, str, list[int]]]:
    """By what a strategy changes: the hue of its axis, the full cache grey, compositions dark."""
    kinds: dict[str, tuple[str, list[int]]] = {}
    for i, row in enumerate(rows):
        plain = {"keep": "Everything", "store": "Dense", "place": "Resident"}
        changed = [axis for axis, method in plain.items() if row.settings[axis]["method"] != method]
        kind = {(): "full cache", ("keep",): "keep", ("store",): "store", ("place",): "place"}.get(tuple(changed), "several")
        colour = {"full cache": style.FULL, "keep": style.KEEP, "store": style.STORE, "place": style.PLACE, "several": style.INK}[
            kind
        ]
        kinds.setdefault(kind, (colour, []))[1].append(i)
    return [(kind, colour, names) for kind, (colour, names) in kinds.items()]


def pareto_summary(rows: Sequence["Evidence"], *, name: Shown = _strategy) -> str:
    """Who is on the front, the smallest first; and that a run in 32 bits shows more than 100%."""
    own = [row for row in rows if row.score is not None and row.ratio is not None]
    if not own:
        return "Nothing was measured."
    wide = (
        " Rows were run in float32, whose full cache takes twice the bytes of the 16 bits that percents are of."
        if own[0].dtype == "float32"
        else ""
    )
    best = [own[i] for i in front([(row.ratio or 0.0, row.score or 0.0) for row in own])]
    return (
        "On the front: "
        + ", ".join(f"{name(row)} ({100 * (row.ratio or 0.0):.0f}%, {row.score:.2f})" for row in best)
        + "."
        + wide
    )
