"""Figures of an offloaded cache: one decode step as it passed, where its time went, and what the same bytes would take over other links.

`kvlab.measure.moving.Moved` in, Figure out. Each figure has an `update_...` that changes it in place and a companion `..._summary` with its
line of text.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from kvlab.plots import style

if TYPE_CHECKING:
    from kvlab.measure.moving import Moved
    from kvlab.timeline import Timeline

LANES = {
    "fetch": ("on its way", style.PLACE, 0.22),
    "compute": ("computes", style.FULL, -0.18),
    "stall": ("waits", style.DANGER, -0.18),
    "write": ("written", style.SKY, 0.22),
}
"""Kind of a span -> its name, hue and how far above a layer's line its bar lies."""

MEASURED, PREDICTED, EMULATED = "measured here", "predicted (full rate of the link)", "emulated"

# --- one step


def step(line: "Timeline | None", number: int = 1, *, title: str = "One decode step") -> go.Figure:
    """What each layer did in step `number`: its bytes on their way (green), its computing (grey), its waiting (vermilion), over milliseconds."""
    fig = style.layout(go.Figure(), title, "ms since the step began", "layer", height=560)
    for name, hue, _ in LANES.values():
        fig.add_trace(go.Bar(name=name, orientation="h", marker={"color": hue, "line": {"width": 0}}, width=0.42))
    fig.update_layout(barmode="overlay", hovermode="closest", bargap=0)
    fig.update_yaxes(autorange="reversed", rangemode="normal", showgrid=False)
    return fig if line is None else update_step(fig, line, number)


def update_step(fig: go.Figure, line: "Timeline", number: int = 1, *, title: str | None = None) -> go.Figure:
    """Change a figure of `step` in place; arguments as there."""
    spans = line.steps(number, number).spans
    own = [span for span in spans if span.kind in ("compute", "stall")]
    zero = min((span.start for span in own), default=0.0)
    bars: dict[str, dict[str, Any]] = {}
    for kind, (name, _, above) in LANES.items():
        # what was begun in the step before, for this one's first layers, has its place left of zero
        mine = [span for span in spans if span.kind == kind and (span.seconds > 0)]
        bars[name] = {
            "x": [1e3 * span.seconds for span in mine],
            "base": [1e3 * (span.start - zero) for span in mine],
            "y": [span.layer - above for span in mine],
            "customdata": [[span.layer, span.bytes / 1e6, _rate(span.bytes, span.seconds)] for span in mine],
            "hovertemplate": "layer %{customdata[0]}: %{x:.2f} ms"
            + (", %{customdata[1]:.2f} MB at %{customdata[2]:.2f} GB/s" if kind in ("fetch", "write") else ""),
        }
    return style.apply(fig, bars, {} if title is None else {"title.text": title})


def step_summary(made: "Moved", resident: float | None = None) -> str:
    """`A step takes 151 ms, 112 ms with all bytes here: it computes 115 ms and waits 36 ms for 47.2 MB. 62% of the fetching passes ...`

    resident: median seconds of a step of the same cache that stays on the device, where it is known.
    """
    line, steps = made.line, len(made.seconds)
    words = f"A step takes {_ms(made.step)}" + ("" if resident is None else f", {_ms(resident)} with all bytes here")
    if not made.bytes:
        return f"{words}. Nothing is fetched."
    waits = f"waits {_ms(line.seconds('stall') / steps)} for {_size(made.bytes)}"
    if made.strategy.keep.looks:  # it waits in the middle of its computing
        return f"{words}: it {waits}. Which pages a query needs is known only when it is there, so nothing is fetched ahead."
    return (
        f"{words}: it computes {_ms(line.seconds('compute') / steps)} and {waits}. {100 * line.hidden:.0f}% of the fetching passes beside computing; {100 * line.hideable:.0f}% could, "
        "since no more can be hidden than there is computing."
    )


# --- where the bytes are


def held(made: "Moved | None", full: int = 0, *, title: str = "Bytes on the device") -> go.Figure:
    """Bars: the whole cache, what of it is on the device between two steps, the most there ever was in a step, and `full`, bytes of the full cache."""
    fig = style.layout(go.Figure(), title, "MB", "", height=230)
    fig.add_trace(go.Bar(name="bytes", orientation="h", textposition="outside", cliponaxis=False, width=0.6, showlegend=False))
    fig.update_layout(showlegend=False, hovermode="closest")
    fig.update_yaxes(autorange="reversed", showgrid=False, rangemode="normal")
    return fig if made is None else update_held(fig, made, full)


def update_held(fig: go.Figure, made: "Moved", full: int, *, title: str | None = None) -> go.Figure:
    """Change a figure of `held` in place; arguments as there."""
    names = ["full cache, 16-bit", "this cache, everywhere", "most at a time here", "here between steps"]
    sizes = [full, made.cache, made.high_water, made.resident]
    bars = {
        "bytes": {
            "y": names,
            "x": [size / 1e6 for size in sizes],
            "text": [_size(size) for size in sizes],
            "marker": {"color": [style.FULL, style.STORE, style.PLACE, style.PLACE]},
            "hovertemplate": "%{y}: %{x:.2f} MB<extra></extra>",
        }
    }
    changes: dict[str, Any] = {"xaxis.range": [0, 1.5 * max(sizes) / 1e6]}  # room for the numbers beside the bars
    return style.apply(fig, bars, changes if title is None else changes | {"title.text": title})


def held_summary(made: "Moved") -> str:
    """`Of 47.2 MB at most 3.6 MB are on the device at a time, 2.3 layers' worth; 0.4 MB between two steps.`"""
    return (
        f"Of {_size(made.cache)} at most {_size(made.high_water)} are on the device at a time, {made.high_water / max(1, made.layer):.1f} layers' worth, new "
        f"tokens and scores included; {_size(made.resident)} between two steps."
    )


# --- the same bytes over other links


def links(
    count: int,
    predicted: Mapping[str, float],
    measured: float,
    emulated: float = 0.0,
    *,
    title: str = "One step's bytes over a link",
) -> go.Figure:
    """Bars, logarithmic: milliseconds for `count` bytes over each link by its datasheet (hatched), and as measured here.

    predicted: link -> seconds. measured: bytes a second, NaN where nothing was fetched; emulated: bytes a second of the emulated link, 0 for none.
    """
    fig = style.layout(go.Figure(), title, "ms", "", height=300)
    for name, hue, pattern in ((PREDICTED, style.SKY, "/"), (MEASURED, style.PLACE, ""), (EMULATED, style.ACTIVATIONS, "x")):
        fig.add_trace(
            go.Bar(
                name=name,
                orientation="h",
                marker={"color": hue, "pattern": {"shape": pattern}},
                texttemplate="%{x:.3~r}",
                textposition="outside",
                cliponaxis=False,
            )
        )
    fig.update_xaxes(type="log", tickformat=",~r", rangemode="normal")
    fig.update_yaxes(autorange="reversed", showgrid=False, rangemode="normal")
    fig.update_layout(hovermode="closest", barmode="overlay")
    return update_links(fig, count, predicted, measured, emulated)


def update_links(
    fig: go.Figure,
    count: int,
    predicted: Mapping[str, float],
    measured: float,
    emulated: float = 0.0,
    *,
    title: str | None = None,
) -> go.Figure:
    """Change a figure of `links` in place; arguments as there."""
    own = "the emulated link" if emulated else "this disk, or its cache"
    found = measured == measured and count > 0
    bars: dict[str, dict[str, Any]] = {
        PREDICTED: {"y": list(predicted), "x": [1e3 * seconds for seconds in predicted.values()]},
        EMULATED if emulated else MEASURED: {"y": [own] if found else [], "x": [1e3 * count / measured] if found else []},
    }
    for values in bars.values():
        values["hovertemplate"] = "%{y}: %{x:.3~r} ms"
    times = [x for values in bars.values() for x in values["x"] if x > 0]
    changes: dict[str, Any] = {"xaxis.range": [math.log10(min(times) / 2), math.log10(max(times) * 4)]} if times else {}
    return style.apply(fig, bars, changes if title is None else changes | {"title.text": title})


def links_summary(count: int, predicted: Mapping[str, float], measured: float, emulated: float = 0.0) -> str:
    """`47.2 MB a step: at least 3.0 ms over PCIe 3.0 x16, 0.7 ms over PCIe 5.0 x16 (predicted); here 41 ms, at 1.15 GB/s.`"""
    if not count or measured != measured:
        return "Nothing is fetched."
    slow, fast = max(predicted, key=lambda name: predicted[name]), min(predicted, key=lambda name: predicted[name])
    return (
        f"{_size(count)} a step: at least {_ms(predicted[slow])} over {slow}, {_ms(predicted[fast])} over {fast} (predicted); here {_ms(count / measured)}, at "
        f"{measured / 1e9:.2f} GB/s" + (f" of a link emulated at {emulated / 1e9:g} GB/s." if emulated else ".")
    )


# --- the recorded study


def hiding(rows: Sequence[Mapping[str, Any]], *, title: str = "What prefetch hides") -> go.Figure:
    """Bars for each recorded run: milliseconds of a step that compute, and that wait; a line where the resident step ends."""
    fig = style.layout(go.Figure(), title, "", "ms a step", height=360)
    names = [row["name"] for row in rows]
    for name, hue, kind in (("computes", style.FULL, "compute"), ("waits", style.DANGER, "stall")):
        fig.add_trace(
            go.Bar(name=name, x=names, y=[1e3 * row[kind] for row in rows], marker={"color": hue}, hovertemplate="%{y:.0f} ms")
        )
    if rows:
        fig.add_hline(y=1e3 * rows[0]["resident_step"], line={"color": style.INK, "dash": "dot", "width": 1})
    fig.update_layout(barmode="stack", bargap=0.4)
    return fig


def hiding_summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """`disk, 1 ahead: waits 30 ms of 151; 62% of the fetching hidden, 70% of what could be.`, a line for each run."""
    return "\n".join(
        f"{row['name']}: waits {1e3 * row['stall']:.0f} ms of {1e3 * row['step']:.0f}; {100 * row['hidden']:.0f}% of the fetching hidden"
        + (f", {100 * row['hidden'] / row['hideable']:.0f}% of what could be." if row["hideable"] else ".")
        for row in rows
    )


# --- helpers


def _rate(count: int, seconds: float) -> float:
    return count / seconds / 1e9 if seconds else 0.0


def _size(count: float) -> str:
    size, name = style.unit(count)
    return f"{count / size:.3g} {name}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"
