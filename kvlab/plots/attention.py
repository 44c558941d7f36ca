"""Heat maps of one head: where its queries looked, and how far the keys it keeps are from the exact ones.

Numbers in, Figure out. Both kinds of picture are drawn by the same traces, so an `update_...` can turn one into the other in
place. Pictures travel as bytes: what is drawn is the logarithm, in 255 steps over the range that the colour bar names; 0 is "no
number here" and stays clear. Evicted keys are hatched, a pattern that no value has.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from kvlab.plots import style

Array = np.ndarray

LOW, HIGH = 1e-4, 1.0  # the shares of attention that the scale spans; smaller ones are drawn as the smallest
BLUES = ["#eaf2f9", "#b3d3ea", "#6fb0d8", "#2d86bd", "#005a8f", "#002a47"]  # light to dark around the keep's blue
ORANGES = ["#fdf3df", "#f8d68f", "#efb23c", "#c98500", "#8a5a00", "#452c00"]  # the store's
VALUE, EVICTED = "value", "evicted"


def attention_map(
    weights: Array, evicted: Array, *, tokens: int, first_query: int = 0, queries: int | None = None, title: str = "Attention"
) -> go.Figure:
    """Where a head looked. weights ``[rows, bins]``: share of a query's attention (NaN: none); evicted: bool, the same shape.

    tokens: keys that the columns span; first_query, queries: tokens that the rows span (all of them unless given), so a picture
    of the decode steps is a rectangle. Raises `ValueError` on shapes that differ.
    """
    return update_attention(_empty(), weights, evicted, tokens=tokens, first_query=first_query, queries=queries, title=title)


def update_attention(
    fig: go.Figure,
    weights: Array,
    evicted: Array,
    *,
    tokens: int,
    first_query: int = 0,
    queries: int | None = None,
    title: str | None = None,
) -> go.Figure:
    """Change a figure of this file in place; arguments as in `attention_map`."""
    _same_shape(weights, evicted)
    queries = tokens if queries is None else queries
    width = tokens / max(1, weights.shape[1])
    unit = "share of a query's attention" + (f", in {width:.2g} keys" if width > 1 else "")
    return _update(
        fig,
        encode(weights, LOW, HIGH),
        evicted,
        colours=BLUES,
        bar=_ticks(LOW, HIGH, _percent) | {"title": {"text": unit, "side": "right", "font": {"size": 12}}},
        columns=(0, tokens),
        rows=(first_query, queries),
        x="key (token)",
        y="query (token)",
        down=True,
        title=title,
    )


def error_map(error: Array, *, tokens: int, what: str = "keys", title: str = "Quantization error") -> go.Figure:
    """How far a head's kept keys are from the exact ones: mean |kept - exact| ``[channels, bins]``, NaN: evicted."""
    return update_error(_empty(), error, tokens=tokens, what=what, title=title)


def update_error(fig: go.Figure, error: Array, *, tokens: int, what: str = "keys", title: str | None = None) -> go.Figure:
    """Change a figure of this file in place; arguments as in `error_map`."""
    if error.ndim != 2:
        raise ValueError(f"error has the shape {error.shape}; allowed: [channels, bins]")
    known = error[np.isfinite(error)]
    high = 10.0 ** math.ceil(math.log10(known.max())) if known.size and known.max() > 0 else 1.0
    return _update(
        fig,
        encode(error, high / 1e3, high),
        np.isnan(error),
        colours=ORANGES,
        bar=_ticks(high / 1e3, high, lambda value: f"{value:.3g}")
        | {"title": {"text": f"|kept − exact|, in units of the {what}", "side": "right", "font": {"size": 12}}},
        columns=(0, tokens),
        rows=(0, error.shape[0]),
        x=f"{what[:-1]} (token)",
        y="channel of the head",
        down=False,
        title=title,
    )


def attention_summary(layer: int, head: int, sinks: int, sink_share: float, evicted: float) -> str:
    """`Layer 12, head 3: the first 4 tokens take 61% of its attention; 45% of the keys were evicted.`"""
    gone = "no key was evicted" if not evicted else f"{_percent(evicted)} of the earlier keys were evicted"
    return f"Layer {layer}, head {head}: the first {sinks} tokens take {_percent(sink_share)} of its attention; {gone}."


def error_summary(layer: int, head: int, what: str, share: float, evicted: float) -> str:
    """`Layer 12, KV head 1: what is kept of the keys is off by 5.5% of their size; 45% of the tokens were evicted.`"""
    off = "exact" if share == 0 else f"off by {_percent(share)} of their mean size"
    gone = "no token was evicted" if not evicted else f"{_percent(evicted)} of the tokens were evicted"
    return f"Layer {layer}, KV head {head}: the {what} that are kept are {off}; {gone}."


def encode(values: Array, low: float, high: float) -> Array:
    """Positive numbers as bytes on a log scale: 1 for `low` and less (0 too), 255 for `high` and more, 0 for NaN. ``uint8``."""
    known = np.nan_to_num(values, nan=low)
    steps = 1 + 254 * np.log(np.clip(known, low, high) / low) / math.log(high / low)
    return np.where(np.isnan(values), 0, np.round(steps)).astype(np.uint8)


def hatch(evicted: Array) -> Array:
    """Diagonal stripes where `evicted` (bool) is True: 1 and 2 in turn, 0 elsewhere; few cells become many. ``uint8``."""
    fine = evicted
    for side in (0, 1):
        fine = fine.repeat(max(1, -(-128 // max(1, fine.shape[side]))), side)
    rows, columns = np.indices(fine.shape)
    period = max(4, max(fine.shape) // 32)
    return np.where(fine, 1 + ((rows + columns) % period < period / 2), 0).astype(np.uint8)


# --- helpers


def _empty() -> go.Figure:
    fig = style.layout(go.Figure(), "", "", "", height=420)
    fig.add_trace(go.Heatmap(name=VALUE, z=np.zeros((1, 1), np.uint8), zmin=0, zmax=255, hoverinfo="skip"))
    fig.add_trace(
        go.Heatmap(
            name=EVICTED,
            z=np.zeros((1, 1), np.uint8),
            zmin=0,
            zmax=2,
            colorscale=[[0, "rgba(0,0,0,0)"], [0.25, "rgba(0,0,0,0)"], [0.5, "#f1f1f1"], [1, "#b0b0b0"]],
            showscale=False,
            hoverinfo="skip",
        )
    )
    pattern = {"shape": "\\", "fgcolor": "#b0b0b0", "bgcolor": "#f1f1f1", "size": 5, "solidity": 0.5}
    fig.add_trace(go.Bar(name="evicted: hatched", x=[None], y=[None], marker={"color": "#f3f3f3", "pattern": pattern}))
    fig.update_xaxes(showgrid=False, constrain="domain")
    fig.update_yaxes(showgrid=False, rangemode="normal")
    return fig.update_layout(hovermode=False, showlegend=True)


def _update(
    fig: go.Figure,
    codes: Array,
    evicted: Array,
    *,
    colours: Sequence[str],
    bar: dict[str, Any],
    columns: tuple[int, int],
    rows: tuple[int, int],
    x: str,
    y: str,
    down: bool,
    title: str | None,
) -> go.Figure:
    scale = [[0, "rgba(0,0,0,0)"], [0.5 / 255, "rgba(0,0,0,0)"]]
    scale += [[max(0.5, 255 * i / (len(colours) - 1)) / 255, colour] for i, colour in enumerate(colours)]
    span = [rows[0] - 0.5, rows[0] + max(1, rows[1]) - 0.5]
    stripes = hatch(evicted)
    bar = {"thickness": 12, "outlinewidth": 0, "len": 1} | bar
    with fig.batch_update():
        style.trace(fig, VALUE).update(z=codes, colorscale=scale, colorbar=bar, **_grid(columns, rows, codes.shape))
        style.trace(fig, EVICTED).update(z=stripes, **_grid(columns, rows, stripes.shape))
        fig.update_layout(
            xaxis={"title": {"text": x}, "range": [columns[0] - 0.5, columns[0] + max(1, columns[1]) - 0.5]},
            yaxis={"title": {"text": y}, "range": span[::-1] if down else span},
        )
        if title is not None:
            fig.layout.title.text = title
    return fig


def _grid(columns: tuple[int, int], rows: tuple[int, int], shape: tuple[int, ...]) -> dict[str, float]:
    """Where the cells of a picture of `shape` lie, to fill (first, number) of columns and rows; token n is centred on n."""
    dx, dy = columns[1] / max(1, shape[1]), rows[1] / max(1, shape[0])
    return {"x0": columns[0] + dx / 2 - 0.5, "dx": dx, "y0": rows[0] + dy / 2 - 0.5, "dy": dy}


def _ticks(low: float, high: float, words: Any) -> dict[str, Any]:
    powers = range(round(math.log10(low)), round(math.log10(high)) + 1)
    values = [10.0**power for power in powers]
    at = [1 + 254 * math.log(value / low) / math.log(high / low) for value in values]
    texts = [words(value) for value in values]
    texts[0] = f"≤ {texts[0]}"
    return {"tickvals": at, "ticktext": texts}


def _percent(share: float) -> str:
    """Two digits, at most: 61%, 5.5%, 0.01%."""
    return f"{100 * share:.2g}%" if share < 0.995 else f"{100 * share:.0f}%"


def _same_shape(weights: Array, evicted: Array) -> None:
    if weights.ndim != 2 or weights.shape != evicted.shape:
        raise ValueError(f"weights have the shape {weights.shape}, evicted {evicted.shape}; allowed: [rows, bins] for both")
