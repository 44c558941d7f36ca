"""Figures of what a cache saves: time for one more token, the speed-up, prefill beside decode, and the cold first run.

Rows in (`kvlab.measure.speed.Row`, seconds), Figure out. Each figure has an `update_...` that changes it in place and a companion
`..._summary` with its one line of text. Recorded rows are dashed, measured ones solid.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from kvlab.plots import style

if TYPE_CHECKING:
    from kvlab.measure.speed import Row

RECORDED = "recorded"
"""The label of rows that were not measured just now."""

CLAIMED = (10.0, 50.0)
"""The famous claim: a cache makes generation 10 to 50 times faster."""

ANSWER = 100
"""Tokens of the answer whose speed-up is predicted beside that of a single token."""

READ, WRITE = "prefill: a token read", "decode: a token written"

# --- time for one more token


def per_token(series: Mapping[str, Sequence["Row"]], *, title: str = "Time for one more token") -> go.Figure:
    """Milliseconds for one more token over the context, with a cache (grey) and without (vermilion), both axes logarithmic.

    series: label -> rows by rising context; the label `RECORDED` is dashed.
    """
    return update_per_token(_logarithmic(title, "time per token (ms)"), series)


def update_per_token(fig: go.Figure, series: Mapping[str, Sequence["Row"]], *, title: str | None = None) -> go.Figure:
    """Change a figure of `per_token` in place; arguments as there."""
    traces = {}
    for label, rows in series.items():
        context = [row.context for row in rows]
        for name, hue, seconds in (
            ("without a cache", style.DANGER, [row.without for row in rows]),
            ("with a cache", style.FULL, [row.cached for row in rows]),
        ):
            traces[f"{name}, {label}"] = _line(context, [1e3 * t for t in seconds], hue, label, "%{y:,.0f} ms")
    return style.apply(fig, traces, _frame(traces, title))


def per_token_summary(rows: Sequence["Row"]) -> str:
    """`At 16 tokens of context 84 ms without a cache and 62 ms with one; at 2,048 tokens 4,510 ms and 71 ms.`"""
    if not rows:
        return "Nothing has been measured yet."
    first, last = rows[0], rows[-1]
    line = f"At {first.context:,} tokens of context {_ms(first.without)} without a cache and {_ms(first.cached)} with one"
    if last is first:
        return f"{line}."
    return f"{line}; at {last.context:,} tokens {_ms(last.without)} and {_ms(last.cached)}."


# --- the speed-up, beside the famous claim


def speedup(series: Mapping[str, Sequence["Row"]], *, title: str = "How many times faster with a cache") -> go.Figure:
    """The ratio of the two times over the context, with the band of the famous claim; both axes logarithmic.

    For the first series also the ratio for a whole answer of `ANSWER` tokens, prefill included, predicted from the same times.
    """
    fig = _logarithmic(title, "ratio of times per token")
    low, high = CLAIMED
    fig.add_hrect(y0=low, y1=high, fillcolor=style.ACTIVATIONS, opacity=0.18, line_width=0, layer="below")
    fig.add_annotation(
        text=f"the famous claim: {low:.0f} to {high:.0f} times", x=0, xref="paper", xanchor="left", xshift=8,
        y=math.log10(high), yanchor="top", showarrow=False, font={"size": 12},
    )  # fmt: skip
    return update_speedup(fig, series)


def update_speedup(fig: go.Figure, series: Mapping[str, Sequence["Row"]], *, title: str | None = None) -> go.Figure:
    """Change a figure of `speedup` in place; arguments as there."""
    traces = {}
    for number, (label, rows) in enumerate(series.items()):
        context = [row.context for row in rows]
        traces[f"one more token, {label}"] = _line(context, [row.ratio for row in rows], style.INK, label, "%{y:.1f} times")
        if number == 0:
            whole = _line(context, [row.answer(ANSWER) for row in rows], style.SKY, label, "%{y:.1f} times")
            traces[f"{ANSWER}-token answer (predicted), {label}"] = whole
    return style.apply(fig, traces, _frame(traces, title, least=1.0, most=2 * CLAIMED[1]))


def speedup_summary(rows: Sequence["Row"], passes: Mapping[float, float | None]) -> str:
    """`One more token: 1.4 times faster at 16 tokens, 63 at 2,048; passes 10 times at about 300 tokens, 50 at about 1,600.`

    passes: ratio, rising -> the context (tokens) where it is passed, or None.
    """
    if not rows:
        return "Nothing has been measured yet."
    first, last = rows[0], rows[-1]
    line = f"One more token: {_times(first.ratio)} times faster at {first.context:,} tokens"
    if last is not first:
        line += f", {_times(last.ratio)} at {last.context:,}"
    for ratio, context in passes.items():
        if context is not None:
            line += f"; passes {ratio:g} times at about {_round(context):,} tokens"
        elif last.ratio >= ratio:
            line += f"; above {ratio:g} times from the start"
        else:
            line += f"; stays below {ratio:g} times"
            break
    return f"{line}."


# --- prefill and decode


def phases(rows: Sequence["Row"], *, title: str = "A token read, a token written") -> go.Figure:
    """Bars for each context: milliseconds a token in prefill, where all are read at once, and in decode, one after the other."""
    fig = style.layout(go.Figure(), title, "tokens of context", "time per token, with a cache (ms)")
    for name, hue in ((READ, style.SKY), (WRITE, style.FULL)):
        fig.add_trace(
            go.Bar(name=name, marker={"color": hue}, texttemplate="%{y:.3~r}", textposition="outside", cliponaxis=False)
        )
    fig.update_xaxes(type="category", showgrid=False)
    fig.update_layout(barmode="group", bargap=0.3)
    return update_phases(fig, rows)


def update_phases(fig: go.Figure, rows: Sequence["Row"], *, title: str | None = None) -> go.Figure:
    """Change a figure of `phases` in place; arguments as there."""
    context = [f"{row.context:,}" for row in rows]
    bars = {
        name: {"x": context, "y": [1e3 * t for t in seconds], "hovertemplate": "%{y:.3~r} ms"}
        for name, seconds in ((READ, [row.read for row in rows]), (WRITE, [row.cached for row in rows]))
    }
    return style.apply(fig, bars, {} if title is None else {"title.text": title})


def phases_summary(rows: Sequence["Row"]) -> str:
    """`At 1,024 tokens: prefill takes 2.1 ms for each token read, decode 64 ms for each one written, 30 times as long.`"""
    if not rows:
        return "Nothing has been measured yet."
    row = rows[-1]
    return (
        f"At {row.context:,} tokens: prefill takes {_ms(row.read)} for each token read, decode {_ms(row.cached)} for each one "
        f"written, {_times(row.cached / row.read)} times as long."
    )


# --- the first run


def first_runs(times: Sequence[float], cold: bool, *, title: str = "The same run, several times over") -> go.Figure:
    """One bar a run: milliseconds to its first token. The first is vermilion if the model was `cold`; later ones are grey."""
    fig = style.layout(go.Figure(), title, "run", "time to first token (ms)", height=320)
    names = [f"{number}" + (" (cold)" if cold and number == 1 else "") for number in range(1, len(times) + 1)]
    hues = [style.DANGER if cold and number == 0 else style.FULL for number in range(len(times))]
    fig.add_trace(
        go.Bar(
            x=names,
            y=[1e3 * t for t in times],
            marker={"color": hues},
            texttemplate="%{y:.3~r}",
            textposition="outside",
            cliponaxis=False,
            hovertemplate="%{y:.3~r} ms<extra></extra>",
        )
    )
    fig.update_xaxes(type="category", showgrid=False)
    return fig.update_layout(showlegend=False, bargap=0.4)


def first_runs_summary(times: Sequence[float], later: float, cold: bool) -> str:
    """`The first run took 143 ms, the later ones 71 ms: 2.0 times as long.` later: their median, seconds."""
    line = f"The first run took {_ms(times[0])}, the later ones {_ms(later)}: {_times(times[0] / later)} times as long"
    return f"{line}." if cold else f"{line}. The model had been run before."


# --- helpers


def _logarithmic(title: str, y: str) -> go.Figure:
    fig = style.layout(go.Figure(), title, "tokens of context", y, height=400)
    fig.update_xaxes(type="log")
    fig.update_yaxes(type="log", rangemode="normal", tickformat=",~r")
    return fig


def _line(x: Sequence[float], y: Sequence[float], hue: str, label: str, hover: str) -> dict[str, Any]:
    old = label == RECORDED
    return {
        "x": list(x),
        "y": list(y),
        "mode": "lines+markers",
        "line": {"color": hue, "width": 2, "dash": "dash" if old else "solid"},
        "marker": {"color": hue, "size": 8, "symbol": "circle-open" if old else "circle"},
        "hovertemplate": hover,
    }


def _frame(
    traces: Mapping[str, Mapping[str, Any]], title: str | None, *, least: float = math.inf, most: float = 0.0
) -> dict[str, Any]:
    """Ticks at the contexts that were measured, and a range of y that holds every point, at least from `least` to `most`."""
    contexts = sorted({x for values in traces.values() for x in values["x"]})
    heights = [y for values in traces.values() for y in values["y"]]
    changes: dict[str, Any] = {"xaxis.tickvals": contexts, "xaxis.ticktext": [style.tokens(x) for x in contexts]}
    if contexts:
        low, high = min([least, *heights]), max([most, *heights])
        changes["xaxis.range"] = [math.log10(contexts[0]) - 0.1, math.log10(contexts[-1]) + 0.1]
        changes["yaxis.range"] = [math.log10(low) - 0.1, math.log10(high) + 0.1]
        steps = (1,) if high > 300 * low else (1, 2, 5)
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        changes["yaxis.tickvals"] = [step * 10.0**power for power in powers for step in steps]
    return changes if title is None else changes | {"title.text": title}


def _ms(seconds: float) -> str:
    return f"{_times(1e3 * seconds)} ms"


def _times(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _round(value: float) -> int:
    """To two digits, which is as much as an interpolated context is worth."""
    digits = max(0, len(str(int(value))) - 2)
    return round(value / 10**digits) * 10**digits
