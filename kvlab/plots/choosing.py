"""Figures for choosing a strategy: what binds, what each option takes, the roofline of a step, a recipe layer by layer, waiting times."""

import itertools
from collections.abc import Mapping, Sequence
from math import comb
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from kvlab.geometry import text as size_text
from kvlab.plots import style

if TYPE_CHECKING:
    from kvlab.advise import Advice, Constraint
    from kvlab.measure.experiment import Evidence
    from kvlab.measure.recipe import Step
    from kvlab.measure.roofline import Point


def constraints(found: Sequence["Constraint"], *, title: str = "What binds the full cache") -> go.Figure:
    """Each need in percent of its limit; what passes 100% binds."""
    fig = style.layout(go.Figure(), title, "need (% of the limit)", "", height=110 + 40 * max(1, len(found)))
    fig.add_trace(go.Bar(name="need", orientation="h", showlegend=False))
    fig.add_vline(x=100, line={"color": style.INK, "dash": "dot"})
    fig.update_yaxes(autorange="reversed", automargin=True)
    return update_constraints(fig.update_layout(hovermode="closest", showlegend=False), found)


def update_constraints(fig: go.Figure, found: Sequence["Constraint"]) -> go.Figure:
    shares = [100 * one.ratio for one in found]
    with fig.batch_update():
        style.trace(fig, "need").update(
            x=shares,
            y=[one.name for one in found],
            text=[f"{share:.0f}%" for share in shares],
            marker={"color": [style.DANGER if one.binds else style.FULL for one in found]},
            hovertext=[str(one) for one in found],
            hoverinfo="text",
        )
        fig.update_layout(
            xaxis={"range": [0, 1.15 * max([120, *shares])]}
        )  # a height that changes would lose the width of its place
    return fig


def options(made: "Advice | None", *, title: str = "What each option takes") -> go.Figure:
    """Bytes on the devices for each sequence, in the order to try; what meets the limits in the hue of store, keep or place, what fails pale."""
    fig = style.layout(go.Figure(), title, "cache of one sequence (GB)", "", height=420)
    fig.add_trace(go.Bar(name="bytes", orientation="h", showlegend=False))
    fig.update_yaxes(autorange="reversed", automargin=True)
    fig.update_layout(hovermode="closest", showlegend=False)
    return fig if made is None else update_options(fig, made)


HUE = {0: style.FULL, 1: style.STORE, 2: style.KEEP, 3: style.PLACE, 4: style.INK}


def update_options(fig: go.Figure, made: "Advice") -> go.Figure:
    rows = made.options
    size, unit = style.unit(max(row.bytes for row in rows))
    largest = max(row.bytes for row in rows) / size
    with fig.batch_update():
        style.trace(fig, "bytes").update(
            x=[row.bytes / size for row in rows],
            y=[str(number) for number in range(1, len(rows) + 1)],
            text=[
                f"{size_text(row.bytes)}, {1e3 * row.step:.1f} ms{'' if row.meets else ', fails'}: {_short(str(row.strategy))}"
                for row in rows
            ],
            textposition="outside",
            cliponaxis=False,
            marker={"color": [HUE[row.stage] for row in rows], "opacity": [1.0 if row.meets else 0.35 for row in rows]},
            hovertext=["<br>".join([str(row.strategy), *row.fails, row.danger]) for row in rows],
            hoverinfo="text",
        )
        fig.update_layout(
            xaxis={"title": {"text": f"cache of one sequence ({unit})"}, "range": [0, 3.2 * largest]},
            yaxis={"type": "category", "autorange": False, "range": [len(rows) - 0.5, -0.5]},  # a browser turns "reversed" back
        )
    return fig


def _short(name: str) -> str:
    """As much as a label beside a bar has room for; the whole name comes up under the pointer."""
    return name if len(name) <= 26 else f"{name[:25]}…"


def options_summary(made: "Advice") -> str:
    """The first that meets the limits, or the nearest and why it fails."""
    if made.best is None:
        return f"Nothing meets the limits; nearest is {made.nearest.strategy}: {'; '.join(made.nearest.fails)}."
    best = made.best
    meets = sum(row.meets for row in made.options)
    return f"{meets} of {len(made.options)} meet the limits. First: {best.strategy}, {size_text(best.bytes)} a sequence, at most {best.most} at once, {1e3 * best.step:.1f} ms a step ({best.bound}); predicted."


def roofline(points: Sequence["Point"], bandwidth: float, peak: float, *, title: str = "Where a step stands") -> go.Figure:
    """FLOP a second over FLOP a byte, both logarithmic, under the roof of ``bandwidth`` (bytes/s) and ``peak`` (FLOP/s)."""
    fig = style.layout(go.Figure(), title, "FLOP a byte", "FLOP a second", height=380)
    for name in ("roof", "prefill", "decode"):
        fig.add_trace(go.Scatter(name=name))
    fig.update_xaxes(type="log", exponentformat="power", dtick=1).update_yaxes(type="log", exponentformat="power", dtick=1)
    return update_roofline(fig.update_layout(hovermode="closest"), points, bandwidth, peak)


def update_roofline(fig: go.Figure, points: Sequence["Point"], bandwidth: float, peak: float) -> go.Figure:
    ridge = peak / bandwidth
    ends = [
        min([0.3, *(0.5 * point.intensity for point in points)]),
        ridge,
        max([30 * ridge, *(2 * point.intensity for point in points)]),
    ]
    groups = {
        "prefill": [p for p in points if p.name.startswith("prefill")],
        "decode": [p for p in points if not p.name.startswith("prefill")],
    }
    with fig.batch_update():
        style.trace(fig, "roof").update(
            x=ends,
            y=[min(peak, bandwidth * x) for x in ends],
            mode="lines",
            line={"color": style.INK, "width": 2},
            hoverinfo="skip",
        )
        for (name, own), hue in zip(groups.items(), (style.KEEP, style.STORE), strict=True):
            style.trace(fig, name).update(
                x=[point.intensity for point in own],
                y=[point.rate for point in own],
                mode="markers",
                marker={"color": hue, "size": 10, "line": {"color": style.INK, "width": 1}},
                hovertext=[f"{point.name}<br>{1e3 * point.seconds:.2f} ms, bound by {point.bound}" for point in own],
                hoverinfo="text",
            )
    return fig


def roofline_summary(points: Sequence["Point"], bandwidth: float, peak: float) -> str:
    """Where the ridge is, and each point's intensity, the farthest left and right of the decode steps by name."""
    steps = [point for point in points if not point.name.startswith("prefill")]
    if not steps:
        return "No step is shown."
    first, fastest = steps[0], min(steps, key=lambda point: point.seconds)
    words = f"The ridge is at {peak / bandwidth:.0f} FLOP a byte. {first.name}: {first.intensity:.1f} FLOP a byte, {1e3 * first.seconds:.2f} ms, bound by {first.bound}"
    words += f"; fastest: {fastest.name}, {fastest.intensity:.1f} FLOP a byte, {1e3 * fastest.seconds:.2f} ms, bound by {fastest.bound}."
    for point in points:
        if point.name.startswith("prefill"):
            words += f" {point.name} tokens: {point.intensity:.0f} FLOP a byte, bound by {point.bound}."
    return words + " Predicted."


def waterfall(steps: Sequence["Step"], *, title: str = "A recipe, layer by layer") -> go.Figure:
    """Bytes on the compute device, in percent of a 16-bit cache: what each layer of the recipe takes away, and what it costs written beside it."""
    share = [100 * step.device / step.reference for step in steps]
    falls = [share[0], *(after - before for before, after in itertools.pairwise(share)), share[-1]]
    fig = style.layout(go.Figure(), title, "", "on the device (% of a 16-bit cache)", height=400)
    costs = [f"{step.name}<br>KL {step.kl:.3f}<br>{1e3 * step.per_token:.0f} ms a token" for step in steps]
    fig.add_trace(
        go.Waterfall(
            name="bytes",
            x=[*costs, "what is left"],
            y=falls,
            measure=["absolute", *["relative"] * (len(steps) - 1), "total"],
            text=[f"{share[0]:.0f}%", *(f"{fall:+.0f}%" for fall in falls[1:-1]), f"{share[-1]:.1f}%"],
            textposition="outside",
            cliponaxis=False,
            increasing={"marker": {"color": style.DANGER}},
            decreasing={"marker": {"color": style.STORE}},
            totals={"marker": {"color": style.FULL}},
            connector={"line": {"color": style.FULL, "dash": "dot"}},
        )
    )
    return fig.update_layout(hovermode="closest", showlegend=False, yaxis={"range": [-0.1 * max(share), 1.15 * max(share)]})


def waterfall_summary(steps: Sequence["Step"]) -> str:
    """Each layer's saving and cost, and what is left."""
    words = [
        f"{step.name}: {100 * before.device / before.reference:.0f}% to {100 * step.device / step.reference:.0f}% on the device, KL {before.kl:.3f} to {step.kl:.3f} nats, "
        f"{100 * step.agreement:.0f}% same next token, {1e3 * step.per_token:.0f} ms a token"
        for before, step in itertools.pairwise(steps)
    ]
    return (
        f"Full cache {100 * steps[0].device / steps[0].reference:.0f}%, {1e3 * steps[0].per_token:.0f} ms a token. "
        + "; ".join(words)
        + "."
    )


def bytes_by_context(
    tokens: Sequence[int], sizes: Mapping[str, Sequence[float]], *, title: str = "Bytes against context"
) -> go.Figure:
    """A line for each strategy (name -> bytes at each of ``tokens``), predicted."""
    size, unit = style.unit(max(max(values) for values in sizes.values()))
    fig = style.layout(go.Figure(), title, "tokens in the sequence", f"cache ({unit})", height=380)
    hues = [style.FULL, style.STORE, style.KEEP, style.PLACE, style.ACTIVATIONS, style.SKY, style.INK, style.DANGER]
    for number, (name, values) in enumerate(sizes.items()):
        line = {"color": hues[number % len(hues)], "dash": ("solid", "dash", "dot")[number // len(hues) % 3]}
        fig.add_trace(go.Scatter(name=name, x=list(tokens), y=[value / size for value in values], mode="lines", line=line))
    return fig.update_xaxes(**style.token_ticks(max(tokens)))


def bytes_by_context_summary(tokens: Sequence[int], sizes: Mapping[str, Sequence[float]]) -> str:
    """What each strategy takes at the longest context."""
    at = ", ".join(f"{name} {size_text(values[-1])}" for name, values in sizes.items())
    return f"At {max(tokens):,} tokens, predicted: {at}."


def waits(rows: Sequence["Evidence"], names: Sequence[str], *, title: str = "How long a reader waits") -> go.Figure:
    """Rows of the task ``Speed``: time to the first token (to the slowest run) and per token (to the 95th percentile), in milliseconds."""
    fig = style.layout(go.Figure(), title, "milliseconds", "", height=140 + 44 * len(rows))
    for name, key, most, hue in (
        ("first token", "first_token", "first_token_most", style.FULL),
        ("one more token", "per_token", "per_token_p95", style.STORE),
    ):
        middle = [1e3 * row.more[key] for row in rows]
        spread = [1e3 * (row.more[most] - row.more[key]) for row in rows]
        fig.add_trace(
            go.Bar(
                name=name,
                orientation="h",
                x=middle,
                y=list(names),
                marker={"color": hue},
                text=[f"{value:,.0f}" for value in middle],
                error_x={"type": "data", "array": spread, "arrayminus": [0] * len(rows), "color": style.INK},
            )
        )
    fig.update_xaxes(type="log", rangemode="normal").update_yaxes(autorange="reversed", automargin=True)
    return fig.update_layout(hovermode="closest", barmode="group")


def waits_summary(rows: Sequence["Evidence"], names: Sequence[str]) -> str:
    """Both times of each, with their spread."""
    said = [
        f"{name}: first token {1e3 * row.more['first_token']:,.0f} ms (slowest {1e3 * row.more['first_token_most']:,.0f}), then {1e3 * row.more['per_token']:.0f} ms "
        f"(95% within {1e3 * row.more['per_token_p95']:.0f})"
        for name, row in zip(names, rows, strict=True)
    ]
    return "; ".join(said) + "."


def votes(right: int, count: int, *, title: str = "Told apart?") -> go.Figure:
    """The share of right votes with the range that guessing would give in 95 of 100 cases."""
    fig = style.layout(go.Figure(), title, "", "right votes (%)", height=240)
    fig.add_trace(go.Scatter(name="guessing", mode="none", fill="toself", fillcolor="rgba(127,127,127,0.3)", hoverinfo="skip"))
    fig.add_trace(go.Scatter(name="votes", mode="markers", marker={"color": style.KEEP, "size": 14}))
    fig.add_hline(y=50, line={"color": style.FULL, "dash": "dot"})
    fig.update_xaxes(visible=False, range=[0, 1]).update_yaxes(range=[0, 100])
    return update_votes(fig.update_layout(hovermode="closest"), right, count)


def update_votes(fig: go.Figure, right: int, count: int) -> go.Figure:
    low, high = guessing(count)
    with fig.batch_update():
        style.trace(fig, "guessing").update(x=[0, 1, 1, 0], y=[low, low, high, high])
        style.trace(fig, "votes").update(x=[0.5] if count else [], y=[100 * right / count] if count else [])
    return fig


def guessing(count: int) -> tuple[float, float]:
    """The per cent of right votes between which a guesser of ``count`` votes stays in 95 of 100 cases: the binomial's quantiles."""
    if not count:
        return 0.0, 100.0
    below, low, high = 0.0, 0, count
    for right in range(count + 1):
        at = comb(count, right) / 2**count
        if below <= 0.025 < below + at:
            low = right
        if below < 0.975 <= below + at:
            high = right
        below += at
    return 100 * low / count, 100 * high / count


def votes_summary(right: int, count: int) -> str:
    """What the votes say, against guessing."""
    if not count:
        return "No votes yet. Guessing is right half of the time."
    low, high = guessing(count)
    told = (
        "more often than guessing: the two can be told apart"
        if 100 * right / count > high
        else "as guessing would be: they were not told apart"
    )
    return f"{right} of {count} votes were right ({100 * right / count:.0f}%; a guesser stays between {low:.0f}% and {high:.0f}%), {told}."
