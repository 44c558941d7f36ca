"""Figures of single numbers: one token and what came back of it, the channels, one channel's steps, errors by layer, bits a number.

Numbers in (`kvlab.measure.inspect`), Figure out. Each figure has an `update_...` that changes it in place and a companion
`..._summary` with its one line of text. Given None, a figure is empty, for a panel to fill.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from kvlab.plots import style

if TYPE_CHECKING:
    from kvlab.measure.inspect import Channel, Channels, LayerErrors, Token

STEPS = 64  # more of them would be no lines but a surface
EXACT, BACK, ERROR, CHOSEN = "the model's number", "what came back", "error", "chosen channel"
PALE = "rgba(110, 110, 110, 0.4)"  # style.FULL behind a line

# --- one token


def token(made: "Token | None", channel: int, *, title: str = "One token") -> go.Figure:
    """One token's numbers (grey) and what came back (orange) over the channels; below, the error (vermilion) on a scale of its own."""
    fig = style.layout(go.Figure(), title, "channel", "number", height=400)
    fig.update_layout(
        yaxis={"domain": [0.4, 1.0], "rangemode": "normal", "zeroline": True, "zerolinecolor": style.FAINT},
        yaxis2={
            **fig.layout.yaxis.to_plotly_json(),
            "domain": [0.0, 0.28],
            "title": {"text": "error", "font": {"size": 13}},
            "rangemode": "normal",
            "anchor": "x",
            "nticks": 5,
        },
        xaxis={"anchor": "y2"},
    )
    return fig if made is None else update_token(fig, made, channel)


def update_token(fig: go.Figure, made: "Token", channel: int, *, title: str | None = None) -> go.Figure:
    """Change a figure of `token` in place; arguments as there."""
    at = list(range(len(made.exact)))
    code = [""] * len(at) if made.codes is None else [f" (code {int(value)})" for value in made.codes]
    traces: dict[str, dict[str, Any]] = {
        EXACT: _step(at, made.exact, style.FULL) | {"line": {"color": style.FULL, "width": 3, "shape": "hvh"}},
        BACK: _step(at, made.back, style.STORE) | {"customdata": code, "hovertemplate": "%{y:.4g}%{customdata}"},
        ERROR: _step(at, made.error, style.DANGER) | {"yaxis": "y2", "fill": "tozeroy", "fillcolor": style.DANGER},
        CHOSEN: _dot(channel, made.exact[channel]),
    }
    return style.apply(fig, traces, {"xaxis.range": [-0.5, len(at) - 0.5]} | _title(title))


def token_summary(made: "Token", layer: int, head: int, what: str, channel: int) -> str:
    """`Layer 12, KV head 0, keys of token 128 “ the”: relative error 4.1%. Channel 5: 1.31 came back as 1.25, code 9 × 0.133 + 0.05.`"""
    word = made.word.replace("\n", "↵")
    line = f"Layer {layer}, KV head {head}, {what} of token {made.token:,} “{word}”: relative error {_percent(made.relative)}"
    line += f". Channel {channel}: {_signed(made.exact[channel])} came back as {_signed(made.back[channel])}"
    if made.plain:
        return f"{line}: this token is plain."
    if made.codes is None or made.scale is None:
        return f"{line}; its codes belong to other channels, or to none."
    code, scale = int(made.codes[channel]), float(made.scale[channel])
    if made.zero is None:
        return f"{line}, code {code} with a scale of {scale:.3g}."
    zero = float(made.zero[channel])
    return f"{line}: code {code} × {scale:.3g} {'−' if zero < 0 else '+'} {abs(zero):.3g}."


# --- the channels of a head


RANGE, SIZE, WRITTEN = "from smallest to largest number", "largest |x|", "largest |x| as it is written"


def channels(made: "Channels | None", channel: int, *, title: str = "How large each channel is") -> go.Figure:
    """For each channel over all tokens: the range of its numbers (grey), its largest |x| (black), and that as it is written down (orange)."""
    fig = style.layout(go.Figure(), title, "channel", "number", height=340)
    fig.update_yaxes(rangemode="normal", zeroline=True, zerolinecolor="#999999")
    return fig if made is None else update_channels(fig, made, channel)


def update_channels(fig: go.Figure, made: "Channels", channel: int, *, title: str | None = None) -> go.Figure:
    """Change a figure of `channels` in place; arguments as there."""
    at = list(range(len(made.size)))
    bare = {"line": {"color": style.FULL, "width": 0, "shape": "hvh"}}
    traces = {
        "smallest": _step(at, made.low, style.FULL) | bare | {"showlegend": False},
        RANGE: _step(at, made.high, style.FULL) | bare | {"fill": "tonexty", "fillcolor": PALE},
        SIZE: _step(at, made.size, style.INK),
    }
    if made.written is not None:
        traces[WRITTEN] = _step(at, made.written, style.STORE)
    traces[CHOSEN] = _dot(channel, made.size[channel])
    return style.apply(fig, traces, {"xaxis.range": [-0.5, len(at) - 0.5]} | _title(title))


def channels_summary(made: "Channels", what: str) -> str:
    """`Keys: channel 25 reaches 12.3, 8.1 times the median channel. Once rotated, the largest is 4.4.`"""
    largest = int(made.size.argmax())
    line = f"{what.capitalize()}: channel {largest} reaches {made.size[largest]:.3g}, {_times(made.outlier)} times the median channel."
    return line if made.written is None else f"{line} {_upper(made.form)}, the largest is {made.written.max():.3g}."


# --- one channel


COUNT, LEVELS, NUMBER = "numbers of the channel", "what the token's codes can say", "chosen token"


def channel(made: "Channel | None", *, title: str = "One channel over the tokens") -> go.Figure:
    """A histogram of a channel's numbers (grey), with a line (orange) at each number that the chosen token's codes can say."""
    fig = style.layout(go.Figure(), title, "number", "tokens", height=340)
    fig.add_trace(go.Bar(name=COUNT, marker={"color": style.FULL, "opacity": 0.6}, hovertemplate="%{y} tokens"))
    fig.update_layout(bargap=0.03, hovermode="closest")
    return fig if made is None else update_channel(fig, made)


def update_channel(fig: go.Figure, made: "Channel", *, title: str | None = None) -> go.Figure:
    """Change a figure of `channel` in place; arguments as there."""
    low, high = float(made.edges[0]), float(made.edges[-1])
    top = 1.15 * max(1, int(made.counts.max()))
    wide = [float(b - a) for a, b in zip(made.edges[:-1], made.edges[1:], strict=True)]
    middles = [float(a + b) / 2 for a, b in zip(made.edges[:-1], made.edges[1:], strict=True)]
    traces: dict[str, dict[str, Any]] = {COUNT: {"x": middles, "y": made.counts.tolist(), "width": wide}}
    if made.levels is not None:
        inside = [float(level) for level in made.levels if low <= level <= high]
        if len(inside) <= STEPS:
            traces[LEVELS] = {
                "x": [x for level in inside for x in (level, level, None)],
                "y": [y for _ in inside for y in (0, top, None)],
                "mode": "lines",
                "line": {"color": style.STORE, "width": 1.5},
                "hovertemplate": "%{x:.4g}",
            }
    traces[NUMBER] = _dot(made.number, top / 2) | {"hovertemplate": "%{x:.4g}"}
    room = 0.03 * (high - low)
    words = f"number, {made.form}" if made.form else "number"
    changes = {"xaxis.range": [low - room, high + room], "yaxis.range": [0, top], "xaxis.title.text": words}
    return style.apply(fig, traces, changes | _title(title))


def channel_summary(made: "Channel") -> str:
    """`Channel 5: 256 numbers from −1.2 to 3.4. Of the 16 numbers that token 128's codes can say there, 12 lie in that range.`"""
    which = f" ({made.form})" if made.form else ""
    line = f"Channel {made.channel}{which}: {made.tokens:,} numbers from {_signed(made.edges[0])} to {_signed(made.edges[-1])}."
    if made.levels is None:
        return f"{line} Token {made.token:,} is plain: nothing is rounded."
    line += f" Of the {len(made.levels)} numbers that token {made.token:,}'s codes can say there, {made.inside} lie in that range"
    return f"{line}, too many to draw." if made.inside > STEPS else f"{line}."


# --- by layer


def layer_errors(made: "LayerErrors | None", layer: int | None = None, *, title: str = "Error by layer") -> go.Figure:
    """The relative error (%) of keys and of values over the layers; the chosen layer is marked."""
    fig = style.layout(go.Figure(), title, "layer", "relative error (%)", height=300)
    return fig if made is None else update_layer_errors(fig, made, layer)


def update_layer_errors(fig: go.Figure, made: "LayerErrors", layer: int | None = None, *, title: str | None = None) -> go.Figure:
    """Change a figure of `layer_errors` in place; arguments as there."""
    traces = {}
    at = list(range(len(made.keys)))
    for what, share, dash in (("keys", made.keys, "solid"), ("values", made.values, "dot")):
        traces[what] = {
            "x": at,
            "y": [100 * float(x) for x in share],
            "mode": "lines",
            "line": {"color": style.STORE, "width": 2, "dash": dash},
            "hovertemplate": "%{y:.3~g}%",
        }
    if layer is not None:
        traces["chosen layer"] = {
            "x": [layer, layer],
            "y": [100 * float(made.keys[layer]), 100 * float(made.values[layer])],
            "mode": "markers",
            "marker": {"color": style.INK, "size": 8},
            "hoverinfo": "skip",
        }
    return style.apply(fig, traces, _title(title))


def layer_errors_summary(made: "LayerErrors") -> str:
    """`Relative error of keys 8.1% on average, most in layer 0 (14%); of values 11%, most in layer 29 (13%).`"""
    parts = []
    for what, share in (("keys", made.keys), ("values", made.values)):
        worst = int(share.argmax())
        average = " on average" if what == "keys" else ""
        parts.append(f"of {what} {_percent(made.mean(what))}{average}, most in layer {worst} ({_percent(float(share[worst]))})")
    return f"Relative error {'; '.join(parts)}."


# --- bits a number


PROMISED = "promised"


def bits(rows: Mapping[str, Mapping[str, float]], promised: Mapping[str, float], *, title: str = "Bits a number") -> go.Figure:
    """Stacked bars: bits a number by part, for keys, values and both; a line at the bits that the codes promise.

    rows: "keys", "values", "both" -> part -> bits; promised: "keys", "values" -> bits, empty for a store without codes.
    """
    fig = style.layout(go.Figure(), title, "bits a number", "", height=260)
    fig.update_layout(barmode="stack", bargap=0.35, hovermode="closest")
    fig.update_xaxes(rangemode="tozero")
    fig.update_yaxes(tickvals=[0, 1, 2], ticktext=["both", "values", "keys"], range=[-0.6, 2.6], showgrid=False, ticks="")
    for part in ("codes", "scales", "residual", "tables", "keys", "values"):
        hue = style.PARTS[part]
        fig.add_trace(go.Bar(name=part, orientation="h", marker={"color": hue}, hovertemplate="%{x:.2f} bits"))
    return update_bits(fig, rows, promised)


def update_bits(
    fig: go.Figure,
    rows: Mapping[str, Mapping[str, float]],
    promised: Mapping[str, float],
    *,
    title: str | None = None,
) -> go.Figure:
    """Change a figure of `bits` in place; arguments as there."""
    place = {"both": 0, "values": 1, "keys": 2}
    traces: dict[str, dict[str, Any]] = {}
    for part in dict.fromkeys(part for parts in rows.values() for part in parts):
        traces[part] = {"x": [parts.get(part, 0.0) for parts in rows.values()], "y": [place[row] for row in rows]}
    if promised:
        lines = [(bits, place[row]) for row, bits in promised.items()]
        traces[PROMISED] = {
            "x": [x for bits, _ in lines for x in (bits, bits, None)],
            "y": [y for _, at in lines for y in (at - 0.42, at + 0.42, None)],
            "mode": "lines",
            "line": {"color": style.INK, "width": 2, "dash": "dot"},
            "hovertemplate": "promised: %{x} bits",
        }
    totals = {row: sum(parts.values()) for row, parts in rows.items()}
    most = max([*totals.values(), *promised.values(), 1.0])
    labels = [
        {"x": total, "y": place[row], "text": f"{total:.2f}", "showarrow": False, "xanchor": "left", "xshift": 5}
        for row, total in totals.items()
    ]
    return style.apply(fig, traces, {"xaxis.range": [0, 1.15 * most], "annotations": labels} | _title(title))


def bits_summary(rows: Mapping[str, Mapping[str, float]], promised: Mapping[str, float], plain: int = 16) -> str:
    """`4.50 bits a number where 4 are promised: codes 4.00, scales 0.50. 16 / 4.50 = 3.56 times smaller than 16 bits.`

    plain: bits of a number that is not coded; told where there are such numbers and it is not 16.
    """
    both = rows["both"]
    total = sum(both.values())
    said = "/".join(f"{bits:g}" for bits in dict.fromkeys(promised.values()))
    line = f"{total:.2f} bits a number" + (f" where {said} are promised" if said else "")
    line += ": " + ", ".join(f"{part} {bits:.2f}" for part, bits in both.items())
    if not total:
        return "Nothing is written yet."
    wide = (
        f" A plain number takes {plain} bits here." if plain != 16 and not {"residual", "keys", "values"}.isdisjoint(both) else ""
    )
    return f"{line}. 16 / {total:.2f} = {16 / total:.2f} times smaller than 16 bits.{wide}"


# --- helpers


def _step(x: Any, y: Any, hue: str) -> dict[str, Any]:
    """One flat step for each channel; the outer two are whole, so a point stands at either end."""
    y = [float(value) for value in y]
    return {
        "x": [x[0] - 0.5, *x, x[-1] + 0.5],
        "y": [y[0], *y, y[-1]],
        "mode": "lines",
        "line": {"color": hue, "width": 1.5, "shape": "hvh"},
        "hovertemplate": "%{y:.4g}",
    }


def _dot(x: float, y: float) -> dict[str, Any]:
    marker = {"color": style.INK, "size": 9, "line": {"color": "white", "width": 1}}
    return {"x": [x], "y": [float(y)], "mode": "markers", "marker": marker, "hoverinfo": "skip"}


def _title(title: str | None) -> dict[str, Any]:
    return {} if title is None else {"title.text": title}


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%" if share < 0.995 else f"{100 * share:.0f}%"


def _times(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _signed(value: float) -> str:
    return f"{value:.3g}".replace("-", "−")


def _upper(words: str) -> str:
    return words[:1].upper() + words[1:]
