"""The look that all figures share: hues with a fixed meaning, one layout, and updating in place.

Hues are Okabe and Ito's, which colour-blind readers tell apart. Blue, orange and green mean the three axes of a strategy
everywhere; grey is the full cache, vermilion is danger. No hue says alone what is said: every figure has its legend, and a line
of text beneath it (orange and sky blue are pale on white, 2.3:1).
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import plotly.graph_objects as go
import plotly.io as pio

KEEP = "#0072B2"
STORE = "#E69F00"
PLACE = "#009E73"
FULL = "#6e6e6e"
DANGER = "#D55E00"

INK = "#222222"
FAINT = "#e6e6e6"
WEIGHTS = "#cdc5b4"  # sand: neither an axis nor the full cache
ACTIVATIONS = "#CC79A7"
STATE = "#000000"
SKY = "#56B4E9"

PARTS = {
    "keys": STORE,
    "values": "#F3C15A",
    "codes": STORE,
    "scales": "#F8DDA0",
    "residual": "#B37B00",
    "coefficients": STORE,
    "basis": "#D9A441",
    "tables": "#8A6D3B",
    "columns": "#C9B99A",
    "evidence": KEEP,
    "pages": "#4A9BCB",
    "counts": "#8DC1E0",
    "scratch": PLACE,
}
"""Parts of `Memory.by_part()`: the store's in the orange family, what a keep remembers in the blue, the place's scratch green."""

KIND_LINES = {
    "MHA": (FULL, "solid"),
    "GQA": (SKY, "solid"),
    "MQA": (SKY, "dot"),
    "sliding": (SKY, "dash"),
    "MLA": (ACTIVATIONS, "solid"),
    "hybrid": (STATE, "dot"),
    "state space": (STATE, "solid"),
}
"""How a kind of attention is drawn: colour and dash (`Geometry.kind`)."""

FONT = "system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif"


@cache
def template() -> go.layout.Template:
    """Of plotly's "plotly_white" what these figures use: every figure copies its template a few times, and the whole takes three times as long."""
    whole = pio.templates["plotly_white"].to_plotly_json()
    wanted = (
        "autotypenumbers",
        "colorway",
        "font",
        "hoverlabel",
        "paper_bgcolor",
        "plot_bgcolor",
        "xaxis",
        "yaxis",
        "title",
        "shapedefaults",
        "annotationdefaults",
    )
    return go.layout.Template(
        layout={key: whole["layout"][key] for key in wanted},
        data={key: whole["data"][key] for key in ("heatmap", "bar", "scatter")},
    )


def layout(fig: go.Figure, title: str, x: str, y: str, *, height: int = 360) -> go.Figure:
    """Give `fig` the common layout. x, y: axis labels, units included."""
    axis = {"showline": True, "linecolor": "#999999", "gridcolor": FAINT, "zeroline": False, "ticks": "outside"}
    return fig.update_layout(
        template=template(),
        font={"family": FONT, "size": 13, "color": INK},
        title={
            "text": title,
            "font": {"size": 15},
            "x": 0,
            "xref": "paper",
            "xanchor": "left",
            "y": 1,
            "yref": "paper",
            "yanchor": "bottom",
            "pad": {"b": 12},
        },
        margin={"l": 64, "r": 24, "t": 44, "b": 48},
        height=height,
        legend={
            "orientation": "h",
            "traceorder": "normal",
            "x": 0,
            "xanchor": "left",
            "y": 0.01,
            "yref": "container",
            "yanchor": "bottom",
            "font": {"size": 12},
        },
        hovermode="x unified",
        xaxis={"title": {"text": x, "font": {"size": 13}}, **axis},
        yaxis={"title": {"text": y, "font": {"size": 13}}, "rangemode": "tozero", **axis},
    )


def unit(largest: float) -> tuple[float, str]:
    """(divisor, name) of the power-of-ten unit that suits values up to `largest` bytes; GB up to ten thousand, like devices."""
    for least, size, name in ((1e13, 1e12, "TB"), (1e9, 1e9, "GB"), (1e6, 1e6, "MB"), (1e3, 1e3, "kB")):
        if largest >= least:
            return size, name
    return 1.0, "B"


def tokens(count: float) -> str:
    """A token count as people say it: 512, 8K, 128K, 1M (K = 1,024), or with commas where that is not exact."""
    count = round(count)
    for size, name in ((1 << 20, "M"), (1 << 10, "K")):
        if count >= size and count % size == 0:
            return f"{count // size}{name}"
    return f"{count:,}"


def trace(fig: go.Figure, name: str) -> Any:
    """The trace of `fig` called `name`, or None. (By name: a `FigureWidget` replaces the `uid`s of the figure it copies.)"""
    return next((found for found in fig.data if found.name == name), None)


def apply(fig: go.Figure, traces: Mapping[str, Mapping[str, Any]], changes: Mapping[str, Any]) -> go.Figure:
    """Bring `fig` to a new state in place: update the traces of these names, hide those left out, add what is missing.

    On a `FigureWidget` everything but a new trace travels in one message.
    """
    for name, values in traces.items():
        if trace(fig, name) is None:
            fig.add_trace(go.Scatter(name=name, **values))
    with fig.batch_update():
        for found in fig.data:
            if found.name in traces:
                found.update(visible=True, **traces[found.name])
            else:
                found.visible = False
        changes = dict(changes)
        if "annotations" in changes:  # `update_layout` would merge a shorter list into the longer one
            fig.layout.annotations = changes.pop("annotations")
        fig.update_layout(**changes)
    return fig


def become(fig: go.Figure, other: go.Figure) -> go.Figure:
    """Let `fig` show what `other` shows, in place: its traces by name, all scatters, and its axes."""
    traces = {
        made.name: {key: value for key, value in made.to_plotly_json().items() if key not in ("name", "type")}
        for made in other.data
    }
    axes = {name: getattr(other.layout, name).to_plotly_json() for name in ("xaxis", "yaxis")}
    return apply(fig, traces, axes)


def token_ticks(last: int) -> dict[str, Sequence[Any]]:
    """Ticks of a linear token axis from 0 to `last` at round powers of two."""
    step = 1
    while last / step > 6:
        step *= 2
    values = list(range(0, last + 1, step))
    return {"tickvals": values, "ticktext": [tokens(value) for value in values]}
