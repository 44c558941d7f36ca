"""The growth figure with what a run is compared with: the full cache at 16 bits, and a pinned run."""

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from kvlab.plots import memory, style

SIXTEEN, PINNED = "full cache at 16 bits", "A, pinned"


def update_growth(
    fig: go.Figure,
    tokens: Sequence[float],
    full: Sequence[float],
    parts: Mapping[str, Sequence[float]],
    *,
    full16: Sequence[float] | None = None,
    pinned: memory.Points | None = None,
    measured: memory.Points | None = None,
    high_water: float | None = None,
) -> go.Figure:
    """`kvlab.plots.memory.update_growth` with two lines more, in place. full16 [n], in bytes: drawn where it differs from full;
    pinned: (tokens, bytes) of another run's total."""
    memory.update_growth(fig, tokens, full, parts, measured=measured, high_water=high_water)
    totals = [sum(column) for column in zip(*parts.values(), strict=True)]
    top = max([*full, *totals, high_water or 0, *(measured[1] if measured else ())], default=0)
    size, _ = style.unit(top)  # the unit that the other lines are drawn in
    lines = {
        SIXTEEN: (tokens, full16, {"color": style.FULL, "width": 2, "dash": "dash"})
        if full16 and list(full16) != list(full)
        else None,
        PINNED: (*pinned, {"color": style.INK, "width": 2, "dash": "dashdot"}) if pinned else None,
    }
    for name in lines:
        if style.trace(fig, name) is None:
            fig.add_trace(go.Scatter(name=name, x=[], y=[], mode="lines", visible=False))
    with fig.batch_update():
        for name, line in lines.items():
            if line is not None:
                style.trace(fig, name).update(x=list(line[0]), y=[value / size for value in line[1]], line=line[2], visible=True)
        if pinned:
            fig.layout.yaxis.range = [0, 1.05 * max(top, *pinned[1]) / size]
    return fig
