"""Figures of the recorded studies: loss along an endless text, what each method costs at one budget, what is still recalled.

Rows of ``data/results/keep.jsonl`` in, Figure out; each has its one line of text.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from kvlab.plots import style

Row = Mapping[str, Any]
LINES = [(style.KEEP, "solid"), (style.SKY, "dash"), (style.DANGER, "dot"), (style.INK, "dashdot")]


def endless(rows: Sequence[Row], context: int, *, title: str = "Loss along one long text") -> go.Figure:
    """Mean loss (nats a token) of each stretch of ``window`` tokens; ``context``: where the model's own ends. Rows of the study "stream"."""
    fig = style.layout(go.Figure(), title, "tokens read", "loss (nats a token)", height=380)
    for row, (colour, dash) in zip(rows, LINES, strict=False):
        window = row["window"]
        at = [window * (i + 0.5) for i in range(len(row["loss"]))]
        fig.add_trace(
            go.Scatter(
                name=row["name"], x=at, y=list(row["loss"]), mode="lines", line={"color": colour, "dash": dash, "width": 2}
            )
        )
    fig.add_vline(x=context, line={"color": style.FULL, "dash": "dash"})
    fig.add_annotation(
        x=context, y=1, yref="paper", text="the model's context", showarrow=False, xanchor="left", yanchor="top", xshift=4
    )
    return fig.update_layout(margin={"b": 110})


def endless_summary(rows: Sequence[Row]) -> str:
    """Loss of each way at the start and at the end of the text."""

    def ends(row: Row) -> str:
        loss = row["loss"]
        return f"{row['name']}: {_mean(loss[1:4]):.2f} nats after the first {row['window']} tokens, {_mean(loss[-4:]):.2f} at the end"

    return "; ".join(map(ends, rows)) + "."


def costs(rows: Sequence[Row], *, title: str = "What a fifth of the tokens costs") -> go.Figure:
    """Change of perplexity (percent, log scale) of each method, the least first. Rows of the study "compress"."""
    own = sorted((row for row in rows if row["kl"] > 1e-6), key=lambda row: -row["perplexity_change"])
    fig = style.layout(go.Figure(), title, "perplexity above the full cache's (%, log)", "", height=90 + 26 * len(own))
    colours = [style.DANGER if row["name"] in ("random", "window") else style.KEEP for row in own]
    percent = [max(100 * row["perplexity_change"], 0.1) for row in own]
    text = [f"{100 * row['perplexity_change']:+.1f}%" for row in own]
    fig.add_trace(
        go.Bar(
            x=percent,
            y=[row["name"] for row in own],
            orientation="h",
            marker={"color": colours},
            text=text,
            textposition="outside",
            cliponaxis=False,
        )
    )
    fig.update_xaxes(type="log", rangemode="normal")
    return fig.update_layout(showlegend=False, hovermode=False, margin={"l": 200, "r": 70})


def costs_summary(rows: Sequence[Row]) -> str:
    """The least and the most, controls named."""
    own = sorted((row for row in rows if row["kl"] > 1e-6), key=lambda row: row["perplexity_change"])
    if not own:
        return "Nothing was lost."
    best, worst = own[0], own[-1]
    return (
        f"{best['name']} costs least ({100 * best['perplexity_change']:+.1f}% perplexity), {worst['name']} most "
        f"({100 * worst['perplexity_change']:+.0f}%)."
    )


def recalled(rows: Sequence[Row], *, title: str = "Two pass keys in a text, asked for after it was read") -> go.Figure:
    """Share of the questions answered (percent), all seeds together, first and second question apart. Rows of the study "recall"."""
    own = list(rows)[::-1]
    names = [f"{row['name']} ({_device(row)})" for row in own]
    fig = style.layout(go.Figure(), title, "questions answered (%)", "", height=110 + 34 * len(own))
    for name, key, colour in (("first question", "first", style.KEEP), ("second question", "second", style.SKY)):
        fig.add_trace(
            go.Bar(
                name=name,
                y=names,
                x=[100 * sum(row[key]) / sum(row["asked"]) for row in own],
                orientation="h",
                marker={"color": colour},
            )
        )
    fig.update_xaxes(range=[0, 100])
    return fig.update_layout(barmode="stack", hovermode=False, margin={"l": 330, "b": 90})


def recalled_summary(rows: Sequence[Row]) -> str:
    return "; ".join(f"{row['name']}: {sum(row['found'])} of {sum(row['asked'])}" for row in rows) + "."


def _device(row: Row) -> str:
    """How much lies on the compute device, and where the rest is."""
    where = {name: size / row["reference"] for name, size in row["devices"].items()}
    return ", ".join(f"{100 * share:.0f}% on {name}" for name, share in where.items())


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / max(1, len(numbers))
