"""Figures of the token river: which heads still hold each token as the text is read, which layers choose alike, and what is lost with what is gone.

A `kvlab.measure.river.River` in, Figure out. Each figure has an `update_...` that changes it in place and a companion `..._summary` with its one line
of text. Given None, a figure is empty, for a panel to fill.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import plotly.graph_objects as go

from kvlab.plots import style
from kvlab.plots.attention import BLUES

if TYPE_CHECKING:
    from kvlab.measure.river import River

Array = np.ndarray

FIRST = 4  # tokens, the attention sinks: each has a row of its own, drawn tall
BAND = 0.09  # the share of the height that these rows take, at least
ROWS, COLUMNS = 512, 256  # at most so many cells of the other tokens, and of time
HALO = "white"  # around a line that must be seen on every blue, in the light and in the dark
MAP, CHOSEN, AROUND, PREFILL = "heads", "chosen token", "around the chosen token", "end of the prefill"
BREAK = "below the first tokens"
HOLDERS = "holds the chosen token"
GONE, SINKS = "on tokens that are gone", f"on the first {FIRST} tokens"

# --- the river


class Cells(NamedTuple):
    """The river as drawn: ``share`` of the heads that hold a token, float32 ``[rows, columns]``, NaN before a token is read.

    ``tokens``: the first token of each row and, last, one past the end; ``times``: tokens read at the left edge of each column and, last, where the
    newest column ends. A column shows what was held from its time on until the next.
    """

    share: Array
    tokens: Array
    times: Array

    @property
    def edges(self) -> Array:
        """Where the rows begin on the axis, and where the last ends: as in the text, but the first rows are tall."""
        return np.array([place(int(token), int(self.tokens[-1])) for token in self.tokens])


def place(token: float, tokens: int) -> float:
    """Where on the axis of a text of so many tokens one begins."""
    tall = max(1.0, BAND * tokens / FIRST)
    return float(token * tall if token < FIRST else FIRST * tall + token - FIRST)


def cells(river: "River", rows: int = ROWS, columns: int = COLUMNS) -> Cells:
    """The share of the heads that hold each token over the time, from the first token on; while the prefill reads, in steps of the river's own.

    Tokens from the fifth on are pooled to at most ``rows``; of the times at most ``columns`` are taken.
    """
    n = river.tokens
    times = np.array(sorted({*range(river.step, river.prefill, river.step), *river.times.tolist()}))
    times = times[np.unique(np.linspace(0, len(times) - 1, min(columns, len(times))).round().astype(int))]
    alone = min(FIRST, n)
    rest = np.unique(np.linspace(alone, n, min(rows, n - alone) + 1).round().astype(int))
    starts = np.unique([*range(alone), *rest[:-1]]).astype(int)
    share = np.full((len(starts), len(times)), np.nan, np.float32)
    for at, time in enumerate(times.tolist()):
        read = starts < time
        held = river.held(time).float().mean((0, 1)).numpy()
        share[read, at] = np.add.reduceat(held, starts)[read] / (np.minimum([*starts[1:], n], time) - starts)[read]
    return Cells(share, np.array([*starts, n]), np.array([*times, n + river.step]))


def shades(share: Array) -> Array:
    """Shares as bytes, as they travel to a browser: 1 for 0, 255 for 1, and 0, which stays clear, for NaN. ``uint8``."""
    return np.where(np.isnan(share), 0, np.round(1 + 254 * np.nan_to_num(share))).astype(np.uint8)


def flow(river: "River | None", token: int | None = None, *, title: str = "The token river") -> go.Figure:
    """Tokens (down) over the tokens read (right): the bluer, the more heads hold the token; before it is read there is nothing.

    The first four tokens have tall rows of their own. A line at the chosen token, from where it is read, and a dashed one where the prefill ends.
    """
    fig = style.layout(go.Figure(), title, "tokens read", f"token (the first {FIRST} are drawn taller)", height=520)
    _add_map(fig, "share of the heads that hold it", ("none", "all"), clear=True)
    return fig if river is None else update_flow(fig, river, token)


def update_flow(fig: go.Figure, river: "River", token: int | None = None, *, title: str | None = None) -> go.Figure:
    """Change a figure of `flow` in place; arguments as there."""
    n, made = river.tokens, cells(river)
    edges, end = made.edges, float(made.times[-1])
    traces: dict[str, dict[str, Any]] = {MAP: {"z": shades(made.share), "x": made.times, "y": edges, "zmin": 0, "zmax": 255}}
    traces[PREFILL] = {
        "x": [river.prefill] * 2,
        "y": [0.0, edges[-1]],
        "mode": "lines",
        "line": {"color": style.FULL, "width": 1.5, "dash": "dash"},
        "hoverinfo": "skip",
    }
    traces[BREAK] = {
        "x": [0, end],
        "y": [place(FIRST, n)] * 2,
        "mode": "lines",
        "line": {"color": style.FULL, "width": 1},
        "showlegend": False,
        "hoverinfo": "skip",
    }
    if token is not None:
        middle = (place(token, n) + place(token + 1, n)) / 2
        traces |= _line([float(token + 1), end], [middle, middle])
    shown = [at for at in style.token_ticks(n)["tickvals"] if at > FIRST]
    few = min(FIRST, n)
    ticks = {
        "tickvals": [place(few, n) / 2, *(place(at, n) for at in shown)],
        "ticktext": [f"0–{few - 1}", *map(style.tokens, shown)],
    }
    return style.apply(
        fig,
        traces,
        {"xaxis.range": [0, end], "yaxis": {"range": [edges[-1], 0], **ticks}} | _title(title),
    )


def flow_summary(river: "River") -> str:
    """`After 509 tokens a head holds 128 of them (25%, mean of 90 heads). 100% of the heads hold the first 4 tokens; tokens that no head holds: 19.`"""
    n, keep = river.tokens, river.strategy.keep
    if not bool(river.gone.any()):
        why = " A query reads only some of them, and chooses anew each time." if keep.looks else ""
        return f"Nothing leaves: all {river.heads} heads hold all {n:,} tokens in the end.{why}"
    held = river.held(n).float()
    first = _percent(float(held[..., :FIRST].mean()))
    count = float(held.sum(2).mean())
    words = (
        f"After {n:,} tokens a head holds {count:,.0f} of them ({_percent(count / n)}, mean of {river.heads} heads). "
        f"{first} of the heads hold the first {min(FIRST, n)} tokens; tokens that no head holds: {int((held.sum((0, 1)) == 0).sum()):,}."
    )
    return f"{words} What left was folded into what stayed." if keep.merges else words


def why(river: "River", token: int) -> str:
    """Why the heads that no longer hold ``token`` let it go: a few lines, of the first, the middle and the last of them.

    Raises ``ValueError`` for a token that is not in the text.
    """
    left = river.left(token)
    layers, heads = river.gone.shape[:2]
    name = f"Token {token:,} “{word(river, token)}”"
    if not left:
        return f"{name}: all {river.heads} heads still hold it."
    first, last = left[0][2], left[-1][2]
    when = f"after {first:,} tokens" if first == last else f"between {first:,} and {last:,} tokens"
    who = "all" if len(left) == river.heads else f"{len(left)} of the"
    lines = [f"{name}: {who} {river.heads} heads ({layers} layers × {heads} KV heads) let it go, {when}."]
    if len({one[2:] for one in left}) == 1:
        lines.append(f"Each of them: {_evidence(*left[0][3:])}.")
    else:
        for at in sorted({0, len(left) // 2, len(left) - 1}):
            layer, head, time, worth, floor = left[at]
            lines.append(f"Layer {layer}, head {head} let it go after {time:,} tokens: {_evidence(worth, floor)}.")
    lines.append(f"Worth is in {type(river.strategy.keep).__name__}'s own measure.")
    return "\n".join(lines)


def word(river: "River", token: int) -> str:
    """The token's text, on one line."""
    return river.words[token].replace("\n", "↵")


# --- the heads


def survival(river: "River | None", token: int | None = None, *, title: str = "What each head still sees") -> go.Figure:
    """KV heads (up) and layers (right) in the end: how old what a head holds is on average or, where heads hold different numbers, how much it holds.

    Dots: the heads that still hold the chosen token.
    """
    fig = style.layout(go.Figure(), title, "layer", "KV head", height=220)
    _add_map(fig, "", None)
    fig.update_yaxes(showgrid=False, rangemode="normal")
    return fig if river is None else update_survival(fig, river, token)


def update_survival(fig: go.Figure, river: "River", token: int | None = None, *, title: str | None = None) -> go.Figure:
    """Change a figure of `survival` in place; arguments as there."""
    z, unit = (100 * river.survival(), "tokens held (%)") if _differ(river) else (river.reach(), "mean age (tokens)")
    layers, heads = z.shape
    low, high = float(z.min()), float(z.max())
    if high - low < 1e-6:
        low, high = 0.0, max(high, 1.0)
    ticks = [low, (low + high) / 2, high]
    bar = {"title": {"text": unit}, "tickvals": ticks, "ticktext": [f"{tick:,.0f}" for tick in ticks]}
    traces: dict[str, dict[str, Any]] = {
        MAP: {
            "z": z.T.numpy(),
            "x": np.arange(layers),
            "y": np.arange(heads),
            "zmin": low,
            "zmax": high,
            "colorbar": bar,
            "xgap": 1,
            "ygap": 1,
        }
    }
    if token is not None:
        at = river.held(river.tokens)[:, :, token].nonzero()
        marker = {"color": style.INK, "size": 6, "line": {"color": "white", "width": 1}}
        traces[HOLDERS] = {
            "x": at[:, 0].tolist(),
            "y": at[:, 1].tolist(),
            "mode": "markers",
            "marker": marker,
            "hoverinfo": "skip",
        }
    changes = {"xaxis.range": [-0.5, layers - 0.5], "yaxis": {"range": [-0.5, heads - 0.5], "dtick": 1 if heads <= 8 else None}}
    return style.apply(fig, traces, changes | _title(title))


def survival_summary(river: "River") -> str:
    """`Every head holds 128 tokens in the end, on average 201 (layer 29, head 0) to 341 tokens old (layer 0, head 2).`"""
    if _differ(river):
        counts = river.held(river.tokens).sum(2)
        return f"In the end a head holds {_span(counts, f'of the {river.tokens:,} tokens')}: colour is how many."
    ages, count = river.reach(), int(river.held(river.tokens)[0, 0].sum())
    if float(ages.max() - ages.min()) < 0.05:
        return (
            f"Every head holds {count:,} tokens in the end, all of them alike: {float(ages.mean()):,.0f} tokens old on average."
        )
    return f"Every head holds {count:,} tokens in the end, on average {_span(ages, 'tokens old')}: colour is that age."


# --- the layers


def overlap(river: "River | None", *, title: str = "Which layers hold alike") -> go.Figure:
    """Layers and layers: of the tokens that either holds in the end, the share that both hold."""
    fig = style.layout(go.Figure(), title, "layer", "layer", height=360)
    _add_map(fig, "share held by both", ("0", "1: the same"))
    fig.update_yaxes(showgrid=False, rangemode="normal")
    return fig if river is None else update_overlap(fig, river)


def update_overlap(fig: go.Figure, river: "River", *, title: str | None = None) -> go.Figure:
    """Change a figure of `overlap` in place; arguments as there."""
    z = river.overlap().numpy()
    at = np.arange(len(z))
    ends = [-0.5, len(z) - 0.5]
    traces = {MAP: {"z": z, "x": at, "y": at, "zmin": 0.0, "zmax": 1.0}}
    return style.apply(fig, traces, {"xaxis.range": ends, "yaxis.range": ends[::-1]} | _title(title))


def overlap_summary(river: "River") -> str:
    """`Two layers have 38% of what either holds in common, on average; most layers 3 and 4 (61%), least layers 0 and 29 (22%).`"""
    z = river.overlap().numpy()
    if len(z) == 1:
        return "The model has one layer: there is no other to compare it with."
    pairs = np.stack(np.triu_indices(len(z), 1), 1)
    values = z[pairs[:, 0], pairs[:, 1]]
    if values.min() > 1 - 1e-6:
        return "All layers hold the same tokens."
    most, least = pairs[values.argmax()], pairs[values.argmin()]
    return (
        f"Two layers have {_percent(values.mean())} of what either holds in common, on average; "
        f"most layers {most[0]} and {most[1]} ({_percent(values.max())}), least layers {least[0]} and {least[1]} ({_percent(values.min())})."
    )


# --- what is lost


def lost(river: "River | None", *, title: str = "Attention on what is gone") -> go.Figure:
    """Of the full cache's attention, the share (%) on tokens that are gone, query by query; in grey what the first four tokens get of it all."""
    fig = style.layout(go.Figure(), title, "query (token)", "attention (%)", height=260)
    return fig if river is None else update_lost(fig, river)


def update_lost(fig: go.Figure, river: "River", *, title: str | None = None) -> go.Figure:
    """Change a figure of `lost` in place; arguments as there."""
    share, first = 100 * river.lost_by_time().numpy(), 100 * float(river.sinks.mean())
    last = river.tokens - 1
    traces: dict[str, dict[str, Any]] = {
        SINKS: {
            "x": [0, last],
            "y": [first, first],
            "mode": "lines",
            "line": {"color": style.FULL, "width": 1.5, "dash": "dash"},
            "hoverinfo": "skip",
        },
        GONE: {
            "x": list(range(river.tokens)),
            "y": share,
            "mode": "lines",
            "line": {"color": style.DANGER, "width": 1.5},
            "hovertemplate": "%{y:.1f}%",
        },
    }
    high = 1.08 * max(float(share.max()), first, 1.0)
    return style.apply(fig, traces, {"xaxis.range": [0, last], "yaxis.range": [0, high]} | _title(title))


def lost_summary(river: "River") -> str:
    """`After the prefill 7.7% of the full cache's attention falls on tokens that are gone, at most 18% (query 402); the first 4 tokens alone get 35%.`"""
    share = river.lost_by_time()[river.prefill :]
    first = f"the first {min(FIRST, river.tokens)} tokens alone get {_percent(float(river.sinks.mean()))}"
    if float(share.max()) == 0:
        return f"None of the full cache's attention falls on tokens that are gone; {first}."
    worst = int(share.argmax())
    return (
        f"After the prefill {_percent(float(share.mean()))} of the full cache's attention falls on tokens that are gone, "
        f"at most {_percent(float(share[worst]))} (query {river.prefill + worst:,}); {first}."
    )


# --- helpers


def _add_map(fig: go.Figure, unit: str, ends: tuple[str, str] | None, clear: bool = False) -> None:
    """An empty heat map in the keep's blue. ends: what the scale's 0 and 1 are called; None leaves its ticks to plotly. clear: of `shades`."""
    bar: dict[str, Any] = {"thickness": 12, "outlinewidth": 0, "len": 1, "title": {"text": unit, "side": "right"}}
    bar["title"]["font"] = {"size": 12}
    if ends is not None:
        at = [0, 0.25, 0.5, 0.75, 1]
        bar |= {"tickvals": [1 + 254 * x for x in at] if clear else at, "ticktext": [ends[0], "¼", "½", "¾", ends[1]]}
    blues = BLUES[:-1]  # the darkest would not stand out from a dark page
    scale: list[list[Any]] = [[at / (len(blues) - 1), colour] for at, colour in enumerate(blues)]
    if clear:
        scale = [[0, "rgba(0,0,0,0)"], [0.5 / 255, "rgba(0,0,0,0)"], [0.5 / 255, blues[0]], *scale[1:]]
    fig.add_trace(
        go.Heatmap(name=MAP, z=np.zeros((1, 1), np.uint8), visible=False, colorscale=scale, colorbar=bar, hoverinfo="skip")
    )
    fig.update_layout(hovermode=False)
    fig.update_xaxes(showgrid=False)


def _line(x: list[float], y: list[float]) -> dict[str, dict[str, Any]]:
    """A black line in a white halo, which the dark theme leaves as it is."""
    common = {"x": x, "y": y, "mode": "lines", "hoverinfo": "skip"}
    around = {"line": {"color": HALO, "width": 4}, "showlegend": False}
    return {AROUND: common | around, CHOSEN: common | {"line": {"color": style.STATE, "width": 1.5}}}


def _evidence(worth: float, floor: float) -> str:
    stayed = f"the least that stayed {_number(floor)}" if floor < float("inf") else "all others were protected"
    return f"worth {_number(worth)}, {stayed}"


def _differ(river: "River") -> bool:
    """Whether heads hold different numbers of tokens in the end."""
    counts = river.held(river.tokens).sum(2)
    return int(counts.max()) > int(counts.min())


def _span(values: Any, unit: str) -> str:
    """`200 (layer 29, head 0) to 341 tokens old (layer 0, head 2)`; values ``[L, H]``."""
    heads = values.shape[1]
    (low, at), (high, to) = ((values.flatten()[i], divmod(int(i), heads)) for i in (values.argmin(), values.argmax()))
    return f"{float(low):,.0f} (layer {at[0]}, head {at[1]}) to {float(high):,.0f} {unit} (layer {to[0]}, head {to[1]})"


def _number(value: float) -> str:
    """Three digits: 0.0123, 1.32, 3.50, 131, 2,048."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}" if value else "0"


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%" if share < 0.995 else f"{100 * share:.0f}%"


def _title(title: str | None) -> dict[str, Any]:
    return {} if title is None else {"title.text": title}
