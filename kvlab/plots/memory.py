"""Figures of memory: how a cache grows, whether it fits, how models compare, what reserving costs.

Numbers in, Figure out. Each figure has a companion `..._summary` with its one line of text; `growth` and `scale_up` also have an
`update_...` that changes an existing figure in place (by the names of its traces).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from kvlab.geometry import Breakdown, text
from kvlab.plots import style

Points = tuple[Sequence[float], Sequence[float]]
"""(tokens, bytes), equally long."""

# --- growth: one sequence's cache over the tokens


def growth(
    tokens: Sequence[float],
    full: Sequence[float],
    parts: Mapping[str, Sequence[float]],
    *,
    measured: Points | None = None,
    measured_full: Points | None = None,
    high_water: float | None = None,
    title: str = "KV cache over the tokens",
) -> go.Figure:
    """Cache bytes over tokens: the full cache in grey, a strategy stacked by part, measured points on it, the high-water line.

    tokens [n]; full [n] bytes; parts: name -> [n] bytes (names of `style.PARTS` get their hue). Raises `ValueError` on lengths
    that differ.
    """
    fig = style.layout(go.Figure(), title, "tokens in the sequence", "cache (bytes)")
    return update_growth(fig, tokens, full, parts, measured=measured, measured_full=measured_full, high_water=high_water)


def update_growth(
    fig: go.Figure,
    tokens: Sequence[float],
    full: Sequence[float],
    parts: Mapping[str, Sequence[float]],
    *,
    measured: Points | None = None,
    measured_full: Points | None = None,
    high_water: float | None = None,
    title: str | None = None,
) -> go.Figure:
    """Change a figure of `growth` in place; arguments as there."""
    _same_length(tokens=tokens, full=full, **parts)
    totals = [sum(column) for column in zip(*parts.values(), strict=True)] or [0.0] * len(tokens)
    points = [pair for pair in (measured, measured_full) if pair is not None]
    top = max([*full, *totals, high_water or 0, *(value for pair in points for value in pair[1])], default=0)
    size, unit = style.unit(top)
    traces: dict[str, dict[str, Any]] = {}
    for part, values in parts.items():
        traces[part] = {
            "x": list(tokens),
            "y": [value / size for value in values],
            "stackgroup": "strategy",
            "mode": "lines",
            "line": {"width": 0.5, "color": style.PARTS.get(part, style.STORE)},
            "fillcolor": style.PARTS.get(part, style.STORE),
            "hovertemplate": f"%{{y:.3f}} {unit}",
        }
    traces["full cache"] = _line(tokens, full, size, unit, style.FULL)
    for name, pair, hue in (("measured, full cache", measured_full, style.FULL), ("measured", measured, style.INK)):
        if pair is not None:
            _same_length(tokens=pair[0], bytes=pair[1])
            marker = {"color": hue, "size": 7, "line": {"color": "white", "width": 1}}
            traces[name] = _line(*pair, size, unit, hue) | {"mode": "markers", "marker": marker}
    if high_water is not None and len(tokens):
        ends = [min(tokens), max(tokens)]
        traces["high-water mark"] = _line(ends, [high_water] * 2, size, unit, style.INK, dash="dot")
    changes = {"yaxis.title.text": f"cache ({unit})", "yaxis.range": [0, 1.05 * (top or 1) / size]}
    return style.apply(fig, traces, changes | _frame(max(tokens, default=0), title))


def growth_summary(
    full: float,
    strategy: float,
    tokens: int,
    *,
    sixteen_bit: float | None = None,
    high_water: float | None = None,
    repacked: int = 0,
) -> str:
    """`31.2% of 16-bit at 2,048 tokens: 14.7 MB, the full cache 47.2 MB; high-water mark 16.0 MB`. Bytes in.

    sixteen_bit: bytes of the 16-bit dense cache where `full` is stored in another width. repacked: tokens of a head that were written again.
    """
    reference = full if sixteen_bit is None else sixteen_bit
    line = f"{_percent(strategy, reference)} of 16-bit at {tokens:,} tokens: {text(strategy)}, the full cache {text(full)}"
    line += f"; high-water mark {text(high_water)}" if high_water is not None else ""
    return line + (f"; {repacked:,} times a head's token was written again" if repacked else "")


# --- scale_up: the same on a big model, hardware and many requests


def scale_up(
    tokens: Sequence[int],
    predicted: Sequence[Breakdown],
    capacity: float,
    *,
    full: Sequence[Breakdown] | None = None,
    fits: int | None = None,
    here: int | None = None,
    title: str = "Does it fit?",
) -> go.Figure:
    """Predicted memory of a model over the tokens of each request, stacked, against the capacity.

    tokens [n]; predicted [n] (`kvlab.geometry.curve`); capacity: bytes; full [n]: the same with the full cache, in grey; fits:
    the most tokens that fit (`max_tokens`; None: no limit), marked, and all beyond it in vermilion; here: a chosen length.
    """
    fig = style.layout(go.Figure(), title, "tokens in each request", "memory (bytes)")
    return update_scale_up(fig, tokens, predicted, capacity, full=full, fits=fits, here=here)


def update_scale_up(
    fig: go.Figure,
    tokens: Sequence[int],
    predicted: Sequence[Breakdown],
    capacity: float,
    *,
    full: Sequence[Breakdown] | None = None,
    fits: int | None = None,
    here: int | None = None,
    title: str | None = None,
) -> go.Figure:
    """Change a figure of `scale_up` in place; arguments as there."""
    _same_length(tokens=tokens, predicted=predicted, **({} if full is None else {"full": full}))
    totals = [point.total for point in predicted]
    last = max(tokens, default=0)
    top = max([capacity, *totals, *(point.total for point in full or ())])
    size, unit = style.unit(top)
    traces: dict[str, dict[str, Any]] = {}
    for name, hue, values in (
        ("weights", style.WEIGHTS, [point.weights for point in predicted]),
        ("state", style.STATE, [point.state for point in predicted]),
        ("KV cache", style.STORE, [point.kv for point in predicted]),
        ("activations (estimate)", style.ACTIVATIONS, [point.activations for point in predicted]),
    ):
        if name != "state" or any(values):
            traces[name] = {
                "x": list(tokens),
                "y": [value / size for value in values],
                "stackgroup": "memory",
                "mode": "lines",
                "line": {"width": 0.5, "color": hue},
                "fillcolor": hue,
                "hovertemplate": f"%{{y:.2f}} {unit}",
            }
    if full is not None:
        traces["with the full cache"] = _line(tokens, [point.total for point in full], size, unit, style.FULL, dash="dash")
    traces["capacity"] = _line([0, last], [capacity] * 2, size, unit, style.INK)
    notes = [_note(f"capacity {text(capacity)}", 0, capacity / size, style.INK, "left") | {"yanchor": "bottom"}]
    if fits is not None and fits < last:
        beyond = [(fits, capacity), *((n, total) for n, total in zip(tokens, totals, strict=True) if n > fits)]
        if not fits and beyond[1:]:
            beyond = beyond[1:]  # not even the weights: all of it is too much
        over = _line([n for n, _ in beyond], [total for _, total in beyond], size, unit, style.DANGER)
        traces["does not fit"] = over | {"line": {"color": style.DANGER, "width": 4}}
        traces["limit"] = _line([fits, fits], [0, top], size, unit, style.DANGER, dash="dot") | {"showlegend": False}
        words = f"fits up to {fits:,} tokens" if fits else "does not fit at all"
        side = "left" if fits < last / 2 else "right"
        notes.append(_note(words, fits, top / size, style.DANGER, side))
    if here is not None:
        total = next((point.total for n, point in zip(tokens, predicted, strict=True) if n == here), None)
        if total is not None:
            hue = style.DANGER if total > capacity else style.INK
            marker = {"color": hue, "size": 10, "line": {"color": "white", "width": 1.5}}
            traces["chosen"] = _line([here], [total], size, unit, hue) | {"mode": "markers", "marker": marker}
    changes: dict[str, Any] = {
        "yaxis.title.text": f"memory ({unit}, predicted)",
        "yaxis.range": [0, 1.08 * top / size],
        "annotations": notes,
    }
    return style.apply(fig, traces, changes | _frame(last, title))


def scale_up_summary(predicted: Breakdown, capacity: float, tokens: int, requests: int = 1, *, fits: int | None = None) -> str:
    """`predicted 61.2 GB of 80.0 GB: weights 16.1, KV 42.9, ...: fits; the limit is 139,000 tokens`, in one line."""
    parts = [f"weights {text(predicted.weights)}", f"KV {text(predicted.kv)}"]
    parts += [f"state {text(predicted.state)}"] if predicted.state else []
    parts += [f"activations about {text(predicted.activations)}"]
    verdict = "fits" if predicted.total <= capacity else "does not fit"
    if predicted.weights > capacity:
        limit = "the weights alone are too much"
    elif fits is None:
        limit = "no length is too long"
    else:
        limit = f"the limit is {fits:,} tokens"
    many = "1 request" if requests == 1 else f"{requests:,} requests"
    total = f"{text(predicted.total)} of {text(capacity)} ({', '.join(parts)})"
    return f"{many} of {tokens:,} tokens, predicted: {total}: {verdict}; {limit}"


# --- models: many models beside one another


def models(
    tokens: Sequence[int],
    series: Mapping[str, Sequence[float]],
    kinds: Mapping[str, str],
    *,
    title: str = "What one sequence keeps, by model",
) -> go.Figure:
    """Cache bytes (KV and state) of several models over the context, both axes logarithmic, each line named at its end.

    tokens [n], above 0; series: model -> [n] bytes above 0; kinds: model -> `Geometry.kind`, which sets hue and dash.
    """
    _same_length(tokens=tokens, **series)
    top = max((max(values) for values in series.values()), default=1)
    size, unit = style.unit(top)
    fig = style.layout(go.Figure(), title, "tokens in the sequence", f"cache at 16 bits a number ({unit}, predicted)", height=460)
    seen: set[str] = set()
    for name, values in series.items():
        kind = kinds.get(name, "GQA")
        hue, dash = style.KIND_LINES.get(kind, (style.INK, "solid"))
        line = _line(tokens, values, size, unit, hue, dash=dash)
        fig.add_trace(go.Scatter(name=kind, meta=name, legendgroup=kind, showlegend=kind not in seen, **line))
        fig.data[-1].hovertemplate = f"{name}: %{{y:.3f}} {unit}<extra></extra>"
        seen.add(kind)
    low = min((value for values in series.values() for value in values if value > 0), default=1) / size
    span = [math.log10(low) - 0.15, math.log10(top / size) + 0.2]
    ends = sorted(((math.log10(max(values[-1] / size, low)), name) for name, values in series.items()), reverse=True)
    gap = (span[1] - span[0]) * 0.047  # keep the names apart
    place = float("inf")
    for at, name in ends:
        place = min(at, place - gap)
        fig.add_annotation(
            text=name, x=math.log10(max(tokens)), y=place, xanchor="left", xshift=8, showarrow=False, font={"size": 12},
        )  # fmt: skip
    marks = [2**power for power in range(max(tokens).bit_length() - 1, 0, -2) if 2**power >= min(tokens)]
    ends_at = [math.log10(min(tokens)), math.log10(max(tokens))]
    fig.update_xaxes(type="log", tickvals=marks, ticktext=[style.tokens(mark) for mark in marks], range=ends_at)
    fig.update_yaxes(type="log", range=span, rangemode="normal", dtick=1, minor={"ticks": "outside", "showgrid": False})
    return fig.update_layout(margin={"r": 130}, hovermode="closest")


def models_summary(tokens: int, series: Mapping[str, float]) -> str:
    """`At 131,072 tokens a sequence keeps from 13.1 MB (Mamba-2.8B) to 68.7 GB (Llama-2-7B).` series: model -> bytes."""
    least, most = min(series, key=series.__getitem__), max(series, key=series.__getitem__)
    return f"At {tokens:,} tokens a sequence keeps from {text(series[least])} ({least}) to {text(series[most])} ({most})."


# --- reserved against used


def reserved_vs_used(reserved: float, used: Sequence[float], *, title: str = "Reserved at worst case, and used") -> go.Figure:
    """One bar a request: what is reserved for it (bytes, the same for all), and the part it uses [n] bytes.

    Raises `ValueError` if a request uses more than is reserved.
    """
    if any(not 0 <= value <= reserved for value in used):
        raise ValueError(f"used={max(used, key=abs):,.0f}; allowed: 0 to the {reserved:,.0f} bytes reserved")
    size, unit = style.unit(reserved)
    fig = style.layout(go.Figure(), title, f"KV cache ({unit}, predicted)", "request", height=90 + 30 * max(len(used), 4))
    rows = [str(number) for number in range(1, len(used) + 1)]
    shared: dict[str, Any] = {"y": rows, "orientation": "h", "hovertemplate": f"%{{x:.2f}} {unit}"}
    fig.add_trace(go.Bar(name="used", x=[value / size for value in used], marker={"color": style.STORE}, **shared))
    hatch = {"shape": "/", "fgcolor": style.FULL, "size": 6}
    empty = {"color": "white", "line": {"color": style.FULL, "width": 1}, "pattern": hatch}
    left = [(reserved - value) / size for value in used]
    fig.add_trace(go.Bar(name="reserved, never used", x=left, marker=empty, **shared))
    fig.update_yaxes(autorange="reversed", type="category", rangemode="normal")
    return fig.update_layout(barmode="stack", bargap=0.25, hovermode="y unified")


def reserved_vs_used_summary(reserved: float, used: Sequence[float]) -> str:
    """`10 requests: reserved 429 GB, used 13.1 GB (3.1%)`."""
    total = reserved * len(used)
    return f"{len(used)} requests: reserved {text(total)}, used {text(sum(used))} ({_percent(sum(used), total)})"


# --- helpers


def _frame(last: float, title: str | None) -> dict[str, Any]:
    """Layout that follows the data: ticks up to `last` tokens, and the title if there is a new one."""
    ticks = style.token_ticks(round(last)) if last else {"tickvals": [], "ticktext": []}
    changes = {f"xaxis.{key}": value for key, value in ticks.items()}
    return changes if title is None else changes | {"title.text": title}


def _line(x: Sequence[float], y: Sequence[float], size: float, unit: str, hue: str, *, dash: str = "solid") -> dict[str, Any]:
    return {
        "x": list(x),
        "y": [value / size for value in y],
        "mode": "lines",
        "line": {"color": hue, "width": 2, "dash": dash},
        "hovertemplate": f"%{{y:.3f}} {unit}",
    }


def _note(words: str, x: float, y: float, hue: str, anchor: str) -> dict[str, Any]:
    return {
        "text": words,
        "x": x,
        "y": y,
        "xanchor": anchor,
        "xshift": 6 if anchor == "left" else -6,
        "showarrow": False,
        "font": {"color": hue, "size": 13},
        "bgcolor": "rgba(255,255,255,0.85)",
    }


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "0.0%"


def _same_length(**columns: Sequence[Any]) -> None:
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"columns of different length: {lengths}")
