"""Figures of spectra: the share of the variance that a rank keeps, and the rank that a share needs, layer by layer.

Numbers in (`kvlab.measure.spectra`), Figure out. Each figure has an `update_...` that changes it in place and a companion `..._summary` with its one
line of text. Given None, a figure is empty, for a panel to fill.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from kvlab.plots import style

if TYPE_CHECKING:
    from kvlab.measure.spectra import Ranks, Spectra

NAMES = {"before": "keys before RoPE", "after": "keys as they come", "values": "values"}
LINES = {
    "before": {"color": style.STORE, "width": 2.5, "dash": "solid"},
    "after": {"color": style.FULL, "width": 2, "dash": "solid"},
    "values": {"color": style.PARTS["residual"], "width": 2.5, "dash": "dot"},
}
CHOSEN, WANTED, CHOSEN_LAYER = "chosen rank", "wanted share", "chosen layer"

# --- one layer


def kept(
    made: "Spectra | None", rank: int = 0, share: float | None = None, *, title: str = "What the first directions keep"
) -> go.Figure:
    """The share of the variance (%) kept over the rank: keys before RoPE (orange), as they come (grey), values (brown, dotted).

    Dots at the chosen rank; a dashed line at the wanted share (0 to 1), if there is one.
    """
    fig = style.layout(go.Figure(), title, "rank (directions a head keeps)", "variance kept (%)", height=400)
    return fig if made is None else update_kept(fig, made, rank, share)


def update_kept(
    fig: go.Figure, made: "Spectra", rank: int = 0, share: float | None = None, *, title: str | None = None
) -> go.Figure:
    """Change a figure of `kept` in place; arguments as there."""
    traces: dict[str, dict[str, Any]] = {}
    last = max(made.dim("after"), made.dim("values"))
    if share is not None:
        traces[WANTED] = {
            "x": [0, last],
            "y": [100 * share] * 2,
            "mode": "lines",
            "line": {"color": "#999999", "width": 1, "dash": "dash"},
            "hoverinfo": "skip",
        }
    for kind, name in NAMES.items():
        traces[name] = {
            "x": list(range(made.dim(kind) + 1)),
            "y": [100 * float(x) for x in made.kind(kind)],
            "mode": "lines",
            "line": LINES[kind],
            "hovertemplate": "%{y:.1f}%",
        }
    at = {kind: min(rank, made.dim(kind)) for kind in NAMES}
    traces[CHOSEN] = _dots(list(at.values()), [100 * made.share(kind, own) for kind, own in at.items()])
    return style.apply(fig, traces, {"xaxis.range": [0, last], "yaxis.range": [0, 102]} | _title(title))


def kept_summary(made: "Spectra", rank: int) -> str:
    """`In layer 12 the first 32 directions keep 91.7% of the variance of keys before RoPE, 89.2% of keys as they come, 84.5% of values.`"""
    parts = [f"{100 * made.share(kind, min(rank, made.dim(kind))):.1f}% of {_of(kind)}" for kind in NAMES]
    return f"In layer {made.layer} the first {rank} directions keep {', '.join(parts)}."


# --- every layer


def needed(made: "Ranks | None", layer: int | None = None, *, title: str = "The rank that a share needs") -> go.Figure:
    """The rank needed over the layers, in the hues of `kept`; the chosen layer is marked."""
    fig = style.layout(go.Figure(), title, "layer", "rank (directions)", height=340)
    return fig if made is None else update_needed(fig, made, layer)


def update_needed(fig: go.Figure, made: "Ranks", layer: int | None = None, *, title: str | None = None) -> go.Figure:
    """Change a figure of `needed` in place; arguments as there."""
    rows = {"before": made.before, "after": made.after, "values": made.values}
    traces: dict[str, dict[str, Any]] = {}
    for kind, name in NAMES.items():
        traces[name] = {
            "x": list(range(len(made.before))),
            "y": [int(x) for x in rows[kind]],
            "mode": "lines",
            "line": LINES[kind],
            "hovertemplate": "%{y}",
        }
    if layer is not None:
        traces[CHOSEN_LAYER] = _dots([layer] * 3, [int(rows[kind][layer]) for kind in NAMES])
    return style.apply(fig, traces, {"yaxis.range": [0, 1.03 * max(made.dims)]} | _title(title))


def needed_summary(made: "Ranks") -> str:
    """`Of 64 directions, 95% of the variance takes 34 for keys before RoPE, 40 for keys as they come, 46 for values (mean of the layers).`"""
    keys, values = made.dims
    of = f"{keys}" if keys == values else f"{keys} (values: {values})"
    counts = ", ".join(f"{made.mean(kind):.0f} for {name}" for kind, name in NAMES.items())
    return f"Of {of} directions, {100 * made.share:.3g}% of the variance takes {counts} (mean of the layers)."


# --- bits


def bits_summary(here: Mapping[str, float], tokens: int, there: Mapping[str, float], later: int) -> str:
    """`12.12 bits a number at 256 tokens (coefficients 8.00, basis 4.12), 8.06 at 16,384.` Each: part -> bits a number, at so many tokens."""
    parts = ", ".join(f"{part} {size:.2f}" for part, size in sorted(here.items(), key=lambda item: -item[1]))
    line = f"{sum(here.values()):.2f} bits a number at {tokens:,} tokens ({parts}), {sum(there.values()):.2f} at {later:,}."
    return line if "basis" in here else f"Nothing is written yet: too few tokens for a basis. {line}"


# --- helpers


def _dots(x: list[int], y: list[float]) -> dict[str, Any]:
    marker = {"color": style.INK, "size": 8, "line": {"color": "white", "width": 1}}
    return {"x": x, "y": y, "mode": "markers", "marker": marker, "hoverinfo": "skip"}


def _of(kind: str) -> str:
    return f"the variance of {NAMES[kind]}" if kind == "before" else NAMES[kind]


def _title(title: str | None) -> dict[str, Any]:
    return {} if title is None else {"title.text": title}
