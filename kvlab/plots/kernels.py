"""Figures of kernels: which bytes each program reads."""

from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from kvlab.plots import style

if TYPE_CHECKING:
    from kvlab.measure.kernels import Place, Reads

HUES = (style.SKY, style.STORE, style.PLACE, style.ACTIVATIONS, style.KEEP, "#F0E442", style.WEIGHTS, style.STATE)
NOBODY, SEVERAL = style.FAINT, style.DANGER


def reads(made: "Reads", *, title: str = "Which program reads which byte") -> go.Figure:
    """One cell a byte, rows as they lie in memory; a hue a program (up to eight, then they repeat), light grey where nobody reads, vermilion where several do."""
    picture = made.rows()
    count = len(made.programs)
    colours = [SEVERAL, NOBODY, *(HUES[i % len(HUES)] for i in range(count))]
    steps = len(colours)
    scale: list[list[Any]] = []
    for i, colour in enumerate(colours):
        scale += [[i / steps, colour], [(i + 1) / steps, colour]]
    fig = style.layout(go.Figure(), title, "byte of a row", "row of the tensor", height=420)
    fig.add_trace(
        go.Heatmap(
            z=picture + 2,
            zmin=-0.5,
            zmax=steps - 0.5,
            colorscale=scale,
            showscale=False,
            customdata=[[_who(made, int(x)) for x in row] for row in picture],
            hovertemplate="row %{y}, byte %{x}: %{customdata}<extra></extra>",
        )
    )
    for i, program in enumerate(made.programs):
        name = f"program {program[:2]}"
        fig.add_trace(
            go.Scatter(
                x=[None],
                y=[None],
                mode="markers",
                marker={"color": HUES[i % len(HUES)], "symbol": "square", "size": 11},
                name=name,
            )
        )
    fig.update_yaxes(autorange="reversed", rangemode="normal")
    return fig.update_layout(hovermode="closest")


def reads_summary(made: "Reads") -> str:
    """`4 programs read 8,192 of 8,192 bytes, each byte once.`"""
    read = int((made.counts.sum(0) > 0).sum())
    most = int(made.counts.sum(0).max()) if made.counts.size else 0
    often = "each byte once" if most == 1 else f"some bytes {most} times"
    return f"{len(made.programs)} programs read {read:,} of {made.counts.shape[1]:,} bytes, {often}."


def roofline(points: list["Place"], bandwidth: float, peak: float, *, title: str = "Where the kernels stand") -> go.Figure:
    """Speed over intensity, both logarithmic; the roof is what memory (left) and tensor cores (right) allow. ``bandwidth``: bytes a second; ``peak``: products."""
    fig = style.layout(go.Figure(), title, "products a byte of cache", "TFLOP/s", height=380)
    edge = peak / bandwidth
    low, high = min([p.intensity for p in points] + [edge]) / 2, 4 * edge
    fig.add_trace(
        go.Scatter(
            x=[low, edge, high],
            y=[low * bandwidth / 1e12, peak / 1e12, peak / 1e12],
            mode="lines",
            line={"color": style.FAINT, "width": 3},
            name="what the device allows",
            hoverinfo="skip",
        )
    )
    for i, name in enumerate(dict.fromkeys(p.name for p in points)):
        own = [p for p in points if p.name == name]
        fig.add_trace(
            go.Scatter(
                x=[p.intensity for p in own],
                y=[p.speed / 1e12 for p in own],
                mode="markers",
                marker={"color": HUES[i % len(HUES)], "size": 9},
                name=name,
                customdata=[
                    f"{p.model}, {p.context:,} tokens x {p.batch}: {100 * p.share(bandwidth, peak):.0f}% of the roof" for p in own
                ],
                hovertemplate="%{customdata}<extra>" + name + "</extra>",
            )
        )
    fig.update_xaxes(type="log")
    fig.update_yaxes(type="log", rangemode="normal")
    return fig.update_layout(hovermode="closest")


def roofline_summary(points: list["Place"], bandwidth: float, peak: float) -> str:
    """`All are bound by memory. Nearest the roof: dense 102%, int8 83%, ...`"""
    best: dict[str, float] = {}
    for p in points:
        best[p.name] = max(best.get(p.name, 0.0), p.share(bandwidth, peak))
    bound = sum(p.intensity * bandwidth < peak for p in points)
    who = "All are" if bound == len(points) else f"{bound} of {len(points)} are"
    return (
        f"{who} bound by memory. Nearest the roof: "
        + ", ".join(f"{name} {100 * share:.0f}%" for name, share in best.items())
        + "."
    )


def _who(made: "Reads", number: int) -> str:
    if number < 0:
        return "read by nobody" if number == -1 else "read by several programs"
    return f"read by program {made.programs[number][:2]}"
