"""Figures of serving: the block table, the prefix tree, who runs when, how full the memory is, and what a reservation sets aside.

`kvlab.serving` in, Figure out. Figures that live in panels have an `update_...` that changes them in place; each has its `..._summary` in words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from kvlab import geometry
from kvlab.plots import style
from kvlab.serving.frames import Frame, Leaf
from kvlab.serving.request import Request
from kvlab.serving.reservation import Reservation
from kvlab.serving.served import Served

HUES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8A6D3B", "#6A51A3")
NAMES = "ABCDEFGHIJKLMNOPQRSTUVWX"  # of requests, in the order of their arrival
SHARED, KEPT, EMPTY = "read by several", "kept for later", "no token there"
HATCH = {"shape": "/", "size": 5, "fgcolor": "#9a9a9a", "bgcolor": "rgba(0,0,0,0)", "solidity": 0.3}
FREE, COPIED = "free", "copied in this step"

# --- the block table


def block_table(now: Frame | None = None, *, title: str = "The block table") -> go.Figure:
    """Each block a cell, filled as far as it has tokens, in the hue of who reads it; places without a token hatched."""
    fig = style.layout(go.Figure(), title, "", "", height=420)
    fig.add_trace(_cells(FREE, "rgba(128,128,128,0.13)", line="rgba(128,128,128,0.5)"))
    for number, name in enumerate(NAMES):
        fig.add_trace(_cells(name, HUES[number % len(HUES)]))
    fig.add_trace(_cells(SHARED, "#4d5b66"))
    fig.add_trace(_cells(KEPT, style.WEIGHTS))
    fig.add_trace(_cells(EMPTY, "rgba(0,0,0,0)", pattern="/", line="#9a9a9a"))
    text = {"color": "#ffffff", "size": 11, "family": style.FONT}
    fig.add_trace(go.Scatter(name="readers", mode="text", textfont=text, hoverinfo="skip", showlegend=False))
    square = {"symbol": "square-open", "size": 18, "color": style.DANGER, "line": {"width": 3}}
    fig.add_trace(go.Scatter(name=COPIED, mode="markers", marker=square, hoverinfo="skip"))
    fig.update_layout(barmode="overlay", bargap=0, hovermode="closest")
    fig.update_xaxes(visible=False)
    fig.update_yaxes(visible=False, rangemode="normal")
    return fig if now is None else update_block_table(fig, now)


def _cells(name: str, hue: str, *, pattern: str = "", line: str = "#ffffff") -> go.Bar:
    look: dict[str, Any] = {"color": hue, "line": {"width": 1, "color": line}}
    if pattern:
        look["pattern"] = HATCH
    return go.Bar(name=name, marker=look, width=0.9)


def update_block_table(fig: go.Figure, now: Frame, *, title: str | None = None) -> go.Figure:
    """Change a figure of `block_table` in place. Requests are named by the letters of `letters`."""
    count = len(now.blocks)
    columns = next(wide for wide in (8, 12, 16, 24, 32, 48, 64, 96) if wide * wide >= 2.2 * count or wide == 96)
    cells: dict[str, list[tuple[float, float, float, str]]] = {}
    text: list[tuple[float, float, str]] = []
    marks: list[tuple[float, float]] = []
    for number, block in enumerate(now.blocks):
        x, y = number % columns, -(number // columns)
        if not block.readers and not block.cached:
            cells.setdefault(FREE, []).append((x, y, 0.86, f"block {number}: free"))
            continue
        share = block.filled / now.block_size
        names = "".join(block.readers)
        kind = SHARED if len(block.readers) > 1 else names if block.readers else KEPT
        who = f"read by {', '.join(block.readers)}" if block.readers else "read by nobody, kept by the prefix tree"
        said = f"block {number}: {who}; {block.filled} of {now.block_size} tokens" + (
            ", in the prefix tree" if block.cached else ""
        )
        cells.setdefault(kind, []).append((x, y, 0.86 * share, said))
        if share < 1:
            cells.setdefault(EMPTY, []).append((x, y + 0.86 * share, 0.86 * (1 - share), said))
        if block.readers:
            text.append((x, y + 0.43, names if len(names) <= 2 else f"×{len(names)}"))
        if block.copied is not None:
            marks.append((x, y + 0.43))
    traces: dict[str, Mapping[str, Any]] = {
        name: {
            "x": [x for x, *_ in own],
            "base": [y for _, y, *_ in own],
            "y": [high for *_, high, _ in own],
            "customdata": [said for *_, said in own],
            "hovertemplate": "%{customdata}<extra></extra>",
        }
        for name, own in cells.items()
    }
    size = 12 if columns <= 24 else 9 if columns <= 48 else 7
    traces["readers"] = {
        "x": [x for x, *_ in text],
        "y": [y for _, y, _ in text],
        "text": [t for *_, t in text],
        "textfont.size": size,
    }
    if marks:
        traces[COPIED] = {"x": [x for x, _ in marks], "y": [y for _, y in marks], "marker.size": max(8, round(480 / columns))}
    rows = -(-count // columns)
    changes: dict[str, Any] = {"xaxis.range": [-0.6, columns - 0.4], "yaxis.range": [-rows + 0.9, 1.0]}
    return style.apply(fig, traces, changes if title is None else changes | {"title.text": title})


def block_table_summary(now: Frame) -> str:
    """`Step 12: 30 of 64 blocks in use, 4 of them read by several, 6 kept for later; 21 of 480 places have no token. ...`"""
    kept = sum(block.cached and not block.readers for block in now.blocks)
    places = now.block_size * sum(bool(block.readers) for block in now.blocks)
    words = f"Step {now.number}: {now.used} of {len(now.blocks)} blocks in use, {now.shared} of them read by several, {kept} kept for later"
    if places:
        words += f"; {now.waste} of {places:,} places of the requests' blocks have no token ({100 * now.waste / places:.0f}%)"
    words += "."
    if now.copies:
        words += (
            " Copied before it is written: " + ", ".join(f"block {source} to {target}" for source, target in now.copies) + "."
        )
    states = [
        ("run", now.running),
        ("wait", now.waiting),
        ("put away", now.away),
        ("done with this step", now.finished),
    ]
    return words + " " + "; ".join(f"{', '.join(names)} {what}" for what, names in states if names) + "."


# --- the prefix tree


def prefix_tree(nodes: Sequence[Leaf] = (), *, title: str = "The prefix tree") -> go.Figure:
    """A dot for each block that the tree knows, at the place of its tokens in the texts that begin so; large where requests read it now."""
    fig = style.layout(go.Figure(), title, "tokens from the beginning", "", height=300)
    fig.add_trace(go.Scatter(name="goes on as", mode="lines", line={"color": "#b0b0b0", "width": 1.5}, hoverinfo="skip"))
    fig.add_trace(
        go.Scatter(
            name=KEPT, mode="markers", marker={"color": style.WEIGHTS, "size": 9, "line": {"width": 1, "color": "#8a8371"}}
        )
    )
    fig.add_trace(
        go.Scatter(
            name="read now", mode="markers", marker={"color": style.KEEP, "size": 13, "line": {"width": 1, "color": "#ffffff"}}
        )
    )
    fig.update_layout(hovermode="closest")
    fig.update_yaxes(visible=False, rangemode="normal")
    return update_prefix_tree(fig, nodes, lambda tokens: str(list(tokens)))


def update_prefix_tree(
    fig: go.Figure, nodes: Sequence[Leaf], text: Callable[[Sequence[int]], str], *, title: str | None = None
) -> go.Figure:
    """Change a figure of `prefix_tree` in place; ``text``: tokens as a person reads them."""
    places = _places(nodes)
    edges: tuple[list[Any], list[Any]] = ([], [])
    dots: dict[str, list[tuple[float, float, str]]] = {KEPT: [], "read now": []}
    for node in nodes:
        x, y = places[node.block]
        before, above = places.get(node.parent, (0.0, y)) if node.parent >= 0 else (0.0, y)
        edges[0].extend([before, x, None])
        edges[1].extend([above, y, None])
        said = f"block {node.block}: “{text(node.tokens)[:60]}”, read by {node.readers}, met {node.times} times"
        dots["read now" if node.readers else KEPT].append((x, y, said))
    traces: dict[str, Mapping[str, Any]] = {"goes on as": {"x": edges[0], "y": edges[1]}} if nodes else {}
    traces |= {
        name: {
            "x": [x for x, *_ in own],
            "y": [y for _, y, _ in own],
            "customdata": [said for *_, said in own],
            "hovertemplate": "%{customdata}<extra></extra>",
        }
        for name, own in dots.items()
        if own
    }
    width = max((x for x, _ in places.values()), default=1.0)
    height = max((y for _, y in places.values()), default=1.0)
    changes: dict[str, Any] = {"xaxis.range": [-0.03 * width, 1.05 * width], "yaxis.range": [-0.7, height + 0.7]}
    return style.apply(fig, traces, changes if title is None else changes | {"title.text": title})


def _places(nodes: Sequence[Leaf]) -> dict[int, tuple[float, float]]:
    """Of each block: tokens up to its end, and a height at which no two branches meet."""
    children: dict[int, list[Leaf]] = {}
    for node in nodes:
        children.setdefault(node.parent, []).append(node)
    places: dict[int, tuple[float, float]] = {}
    free = 0.0
    stack: list[tuple[Leaf, float, bool]] = [(node, 0.0, False) for node in reversed(children.get(-1, []))]
    while stack:
        node, before, again = stack.pop()
        x, own = before + len(node.tokens), children.get(node.block, [])
        if again:
            places[node.block] = (x, sum(places[one.block][1] for one in own) / len(own))
        elif own:
            stack.append((node, before, True))
            stack.extend((one, x, False) for one in reversed(own))
        else:
            places[node.block], free = (x, free), free + 1.0
    return places


def prefix_tree_summary(nodes: Sequence[Leaf], block_size: int) -> str:
    """`The tree knows 40 blocks, 640 tokens, in 6 branches; 12 are read now. ...`"""
    if not nodes:
        return "The tree knows nothing yet: a text is remembered once its prompt has been read."
    parents = {node.parent for node in nodes}
    leaves = sum(node.block not in parents for node in nodes)
    most = max(nodes, key=lambda node: node.times)
    return (
        f"The tree knows {len(nodes)} block{'s' * (len(nodes) > 1)}, {len(nodes) * block_size:,} tokens, in {leaves} {'branches' if leaves > 1 else 'branch'}; "
        f"{sum(bool(node.readers) for node in nodes)} of them are read now. Block {most.block} was met most often, {most.times} {'times' if most.times > 1 else 'time'}."
    )


# --- who runs when


@dataclass(frozen=True)
class Span:
    """What became of a request ``name`` from ``start`` to ``end`` (seconds or steps): a name of `STATES`."""

    name: str
    state: str
    start: float
    end: float


STATES = {
    "waits": (style.FULL, ""),
    "reads its prompt": (style.STORE, ""),
    "answers": (style.KEEP, ""),
    "put away": ("rgba(0,0,0,0)", "/"),
    "held up": ("#b9b9b9", ""),
}


def spans_of_requests(requests: Sequence[Request], begin: float = 0.0) -> list[Span]:
    """By the clock, seconds from ``begin``: from arrival to admission, to the first token, to the last."""
    spans = []
    for request in requests:
        if request.admitted is None:
            continue
        first = request.times[0] if request.times else request.admitted
        last = request.times[-1] if request.times else first
        for state, start, end in (
            ("waits", request.arrival, request.admitted),
            ("reads its prompt", request.admitted, first),
            ("answers", first, last),
        ):
            if end > start:
                spans.append(Span(request.id, state, start - begin, end - begin))
    return spans


def spans_of_frames(frames: Sequence[Frame]) -> list[Span]:
    """By steps: what each request did in each of them."""
    spans: list[Span] = []
    last: dict[str, int] = {}
    for now in frames:
        states = dict.fromkeys(now.waiting, "waits") | dict.fromkeys(now.away, "put away")
        states |= {name: "held up" for name in now.running if name not in now.work}
        states |= {name: "reads its prompt" if name in now.prompts else "answers" for name in now.work}
        for name, state in states.items():
            at = last.get(name)
            if at is not None and spans[at].state == state and spans[at].end == now.number - 1:
                spans[at] = Span(name, state, spans[at].start, now.number)
            else:
                last[name] = len(spans)
                spans.append(Span(name, state, now.number - 1, now.number))
    return spans


def timeline(spans: Sequence[Span] = (), *, unit: str = "s", title: str = "Who runs when", height: int = 320) -> go.Figure:
    """A line for each request: waiting grey, reading its prompt orange, answering blue, put away hatched."""
    fig = style.layout(go.Figure(), title, unit, "", height=height)
    for name, (hue, pattern) in STATES.items():
        look: dict[str, Any] = {"color": hue, "line": {"width": 0}}
        if pattern:
            look["pattern"] = HATCH
        fig.add_trace(go.Bar(name=name, orientation="h", marker=look, width=0.8))
    fig.update_layout(barmode="overlay", bargap=0, hovermode="closest")
    fig.update_yaxes(autorange="reversed", rangemode="normal", showgrid=False, type="category")
    return update_timeline(fig, spans)


def update_timeline(
    fig: go.Figure, spans: Sequence[Span], *, most: float | None = None, now: float | None = None, title: str | None = None
) -> go.Figure:
    """Change a figure of `timeline` in place. ``most``: where the axis ends; ``now``: where a line stands."""
    order = list(dict.fromkeys(span.name for span in sorted(spans, key=lambda one: one.start)))
    bars: dict[str, Mapping[str, Any]] = {}
    for state in STATES:
        own = [span for span in spans if span.state == state]
        if own:
            bars[state] = {
                "y": [span.name for span in own],
                "base": [span.start for span in own],
                "x": [span.end - span.start for span in own],
                "hovertemplate": f"%{{y}} {state}: %{{x:.4~r}}<extra></extra>",
            }
    end = most or max((span.end for span in spans), default=1.0)
    line = [
        {"type": "line", "x0": now, "x1": now, "y0": 0, "y1": 1, "yref": "paper", "line": {"color": style.DANGER, "width": 2}}
    ]
    changes: dict[str, Any] = {
        "xaxis.range": [0, 1.02 * end],
        "yaxis.categoryorder": "array",
        "yaxis.categoryarray": order,
        "shapes": [] if now is None else line,
    }
    return style.apply(fig, bars, changes if title is None else changes | {"title.text": title})


def steps_summary(frames: Sequence[Frame]) -> str:
    """`A: waits 0 steps, answers from step 2 to step 22; ...`: a line for each request."""
    lines = []
    spans = spans_of_frames(frames)
    for name in sorted({span.name for span in spans}):
        own = [span for span in spans if span.name == name]
        steps = {state: sum(span.end - span.start for span in own if span.state == state) for state in STATES}
        said = [f"{state} {count:.0f} {'step' if count == 1 else 'steps'}" for state, count in steps.items() if count]
        lines.append(f"{name} {', '.join(said)}")
    return "; ".join(lines) + ("." if lines else "")


def timeline_summary(static: Served, continuous: Served) -> str:
    """`In static batches 40 requests take 12.1 s (...); batched continuously 6.0 s, ...: 2.0 times the throughput.`"""
    return (
        f"In static batches {static.served} requests take {seconds(static.seconds)}, {static.concurrent:.1f} at once; batched continuously "
        f"{seconds(continuous.seconds)}, {continuous.concurrent:.1f} at once: {continuous.throughput / static.throughput:.2f} times the throughput. "
        f"Half of the first tokens come within {seconds(static.first_token)} and {seconds(continuous.first_token)}."
    )


# --- how full the memory is

PARTS = ("read by one", SHARED, KEPT)


def filling(frames: Sequence[Frame] = (), *, title: str = "Blocks in use") -> go.Figure:
    """Areas over the steps: blocks that one request reads, that several read, that are kept for later; a line at all that there are."""
    fig = style.layout(go.Figure(), title, "step", "blocks", height=240)
    return update_filling(fig, frames)


def update_filling(fig: go.Figure, frames: Sequence[Frame], now: int = 0, *, title: str | None = None) -> go.Figure:
    """Change a figure of `filling` in place; ``now``: the step where a line stands."""
    counts = [
        [sum(len(block.readers) == 1 for block in one.blocks) for one in frames],
        [one.shared for one in frames],
        [sum(block.cached and not block.readers for block in one.blocks) for one in frames],
    ]
    steps = [one.number for one in frames]
    traces: dict[str, Mapping[str, Any]] = {}
    for name, own, hue in zip(PARTS, counts, (style.KEEP, "#4d5b66", style.WEIGHTS), strict=True):
        traces[name] = {
            "x": steps,
            "y": own,
            "mode": "lines",
            "line": {"color": hue, "width": 0.5, "shape": "hv"},
            "fillcolor": hue,
            "stackgroup": "blocks",
            "hovertemplate": "%{y}",
        }
    most = len(frames[0].blocks) if frames else 1
    traces["all"] = {
        "x": [0, steps[-1] if steps else 1],
        "y": [most, most],
        "mode": "lines",
        "line": {"color": style.INK, "dash": "dot", "width": 1},
        "hoverinfo": "skip",
    }
    line = [
        {"type": "line", "x0": now, "x1": now, "y0": 0, "y1": 1, "yref": "paper", "line": {"color": style.DANGER, "width": 2}}
    ]
    changes: dict[str, Any] = {
        "xaxis.range": [0, max(steps, default=1)],
        "yaxis.range": [0, 1.08 * most],
        "shapes": line if now else [],
    }
    return style.apply(fig, traces, changes if title is None else changes | {"title.text": title})


def filling_summary(frames: Sequence[Frame]) -> str:
    """`In 40 steps at most 48 of 48 blocks are in use and 6 requests run at once; 5 copies were made before writing.`"""
    if not frames:
        return ""
    most, together = max(one.used for one in frames), max(len(one.running) for one in frames)
    copies, shared = sum(len(one.copies) for one in frames), max(one.shared for one in frames)
    held = sum(one.block_size * sum(bool(block.readers) for block in one.blocks) for one in frames)
    words = f"In {len(frames)} steps at most {most} of {len(frames[0].blocks)} blocks are in use, {shared} of them read by several, and {together} request{' runs alone' if together == 1 else 's run at once'}"
    if held:
        words += f"; on average {100 * sum(one.waste for one in frames) / held:.0f}% of the requests' places have no token"
    return words + f"; {copies} {'copy was' if copies == 1 else 'copies were'} made before writing."


def usage(runs: Mapping[str, Served] | None = None, *, title: str = "How full the blocks are") -> go.Figure:
    """Share of all blocks in use over time (lines), for each run, and of the first one what of it has tokens (area)."""
    fig = style.layout(go.Figure(), title, "s", "share of the blocks (%)", height=260)
    fig.update_yaxes(range=[0, 105])
    return update_usage(fig, runs or {})


def update_usage(fig: go.Figure, runs: Mapping[str, Served], *, title: str | None = None) -> go.Figure:
    """Change a figure of `usage` in place."""
    traces: dict[str, Mapping[str, Any]] = {}
    for (name, run), (hue, dash) in zip(runs.items(), ((style.DANGER, "dot"), (style.KEEP, "solid")), strict=False):
        times, moments = _thin([moment.time for moment in run.moments]), run.moments
        traces[name] = {
            "x": [moments[at].time - run.requests[0].arrival for at in times],
            "y": [100 * moments[at].usage for at in times],
            "mode": "lines",
            "line": {"color": hue, "width": 2, "dash": dash},
            "hovertemplate": "%{y:.0f}%",
        }
    end = max((run.moments[-1].time - run.requests[0].arrival for run in runs.values()), default=1.0)
    changes: dict[str, Any] = {"xaxis.range": [0, end]}
    return style.apply(fig, traces, changes if title is None else changes | {"title.text": title})


def _thin(values: Sequence[float], most: int = 400) -> list[int]:
    """Places of up to ``most`` of the values, evenly."""
    step = max(1, len(values) // most)
    return list(range(0, len(values), step))


def usage_summary(runs: Mapping[str, Served]) -> str:
    """`the worst case reserved: 8.0 at once, 81% of the held places empty; ...`"""
    return (
        "; ".join(
            f"{name}: {run.concurrent:.1f} at once on average, {run.together} at most, {100 * run.waste:.1f}% of the held places empty"
            + (f", {run.preemptions} times somebody had to make room" if run.preemptions else "")
            for name, run in runs.items()
        )
        + "."
    )


# --- what is set aside


def reservation(
    made: Reservation | None = None, capacity: float = 0.0, *, title: str = "What is set aside for the same requests"
) -> go.Figure:
    """Bars: bytes with tokens in them (blue), set aside and empty (hatched), if the worst case is reserved and if blocks are taken as texts grow."""
    fig = style.layout(go.Figure(), title, "GB", "", height=230)
    fig.add_trace(go.Bar(name="with tokens", orientation="h", marker={"color": style.KEEP}, width=0.6))
    look = {
        "color": "rgba(0,0,0,0)",
        "line": {"width": 1, "color": "#9a9a9a"},
        "pattern": HATCH,
    }
    fig.add_trace(go.Bar(name="set aside, empty", orientation="h", marker=look, width=0.6))
    fig.update_layout(barmode="stack", hovermode="closest")
    fig.update_yaxes(autorange="reversed", showgrid=False, rangemode="normal")
    return fig if made is None else update_reservation(fig, made, capacity)


def update_reservation(fig: go.Figure, made: Reservation, capacity: float = 0.0, *, title: str | None = None) -> go.Figure:
    """Change a figure of `reservation` in place; ``capacity``: bytes that there are for the cache, a line."""
    names = ["the worst case", "in blocks"]
    filled = [made.filled / 1e9] * 2
    empty = [(made.worst - made.filled) / 1e9, (made.blocks - made.filled) / 1e9]
    bars: dict[str, Mapping[str, Any]] = {
        "with tokens": {"y": names, "x": filled, "hovertemplate": "%{x:.3~r} GB"},
        "set aside, empty": {"y": names, "x": empty, "hovertemplate": "%{x:.3~r} GB"},
    }
    line = {
        "type": "line",
        "x0": capacity / 1e9,
        "x1": capacity / 1e9,
        "y0": 0,
        "y1": 1,
        "yref": "paper",
        "line": {"color": style.DANGER, "width": 2, "dash": "dash"},
    }
    changes: dict[str, Any] = {
        "xaxis.range": [0, 1.08 * max(made.worst, capacity) / 1e9],
        "shapes": [line] if capacity else [],
    }
    return style.apply(fig, bars, changes if title is None else changes | {"title.text": title})


def reservation_summary(made: Reservation, capacity: float = 0.0) -> str:
    """`Reserved for the worst case 430 GB, of which 12 GB are ever filled (3%); in blocks 12.1 GB, 1% of it empty.`"""
    words = (
        f"Reserved for the worst case {geometry.text(round(made.worst))}, of which {geometry.text(round(made.filled))} are ever filled "
        f"({100 * (1 - made.worst_waste):.0f}%); in blocks {geometry.text(round(made.blocks))}, {100 * made.waste:.1f}% of it empty."
    )
    if capacity:
        words += f" There are {geometry.text(round(capacity))}: room for {capacity / made.worst:.1f} times these requests reserved so, {capacity / made.blocks:.1f} times in blocks."
    return words


# --- what was read before


def prompts(run: Served | None = None, *, title: str = "Prompt tokens") -> go.Figure:
    """One bar: prompt tokens that the tree had (blue), and those that were computed (orange)."""
    fig = style.layout(go.Figure(), title, "tokens", "", height=150)
    fig.add_trace(go.Bar(name="known from before", orientation="h", marker={"color": style.KEEP}, width=0.6))
    fig.add_trace(go.Bar(name="computed", orientation="h", marker={"color": style.STORE}, width=0.6))
    fig.update_layout(barmode="stack", hovermode="closest")
    fig.update_yaxes(showgrid=False, rangemode="normal", visible=False)
    return fig if run is None else update_prompts(fig, run)


def update_prompts(fig: go.Figure, run: Served) -> go.Figure:
    """Change a figure of `prompts` in place."""
    counts = {"known from before": run.cached, "computed": run.prompt_tokens - run.cached}
    bars = {name: {"y": ["prompts"], "x": [count], "hovertemplate": "%{x:,}"} for name, count in counts.items()}
    return style.apply(fig, bars, {"xaxis.range": [0, 1.05 * run.prompt_tokens]})


def prompts_summary(run: Served) -> str:
    """`Of 206,400 prompt tokens the tree had 198,000 (96%): 8,400 were computed.`"""
    more = run.computed - (run.prompt_tokens - run.cached) - (run.made - run.served)
    again = f", and {more:,} tokens once more for requests that had made room" if run.preemptions and more > 0 else ""
    return (
        f"Of {run.prompt_tokens:,} prompt tokens the tree had {run.cached:,} ({100 * run.hit_rate:.0f}%): {run.prompt_tokens - run.cached:,} were computed{again}. "
        f"Half of the first tokens come within {seconds(run.first_token)}, 95% within {seconds(run.first_token_p95)}."
    )


# --- the size of a block


def block_sizes(
    waste: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]], here: int = 0, *, title: str = "The size of a block"
) -> go.Figure:
    """Recorded rows of the studies "paging" (waste, counted) and "blocks" (a decode step, measured, against blocks of 16), over the tokens of a block; ``here``:
    where a line stands.
    """
    fig = style.layout(go.Figure(), title, "tokens of a block", "", height=260)
    own = sorted(
        (int(row["name"].rsplit(" ", 1)[1]), row["waste"])
        for row in waste
        if row["name"].startswith("blocks of ") and row["name"][10:].isdigit()
    )
    timed = sorted((row["block_size"], row["times"]) for row in steps)
    fig.add_trace(
        go.Scatter(
            name="places without a token (%)",
            x=[x for x, _ in own],
            y=[100 * y for _, y in own],
            mode="lines+markers",
            line={"color": style.FULL, "width": 2},
        )
    )
    fig.add_trace(
        go.Scatter(
            name="time of a step (% of blocks of 16)",
            x=[x for x, _ in timed],
            y=[100 * y for _, y in timed],
            mode="lines+markers",
            line={"color": style.KEEP, "width": 2, "dash": "dash"},
        )
    )
    fig.update_xaxes(type="log", tickvals=[x for x, _ in timed] or None, ticktext=[str(x) for x, _ in timed] or None)
    return update_block_sizes(fig, here)


def update_block_sizes(fig: go.Figure, here: int) -> go.Figure:
    """Move the line of a figure of `block_sizes`."""
    line = {
        "type": "line",
        "x0": here,
        "x1": here,
        "y0": 0,
        "y1": 1,
        "yref": "paper",
        "line": {"color": style.DANGER, "width": 2, "dash": "dot"},
    }
    return fig.update_layout(shapes=[line] if here else [])


def block_sizes_summary(waste: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]) -> str:
    """`Blocks of 1: 0.0% empty, a step takes 1.31 of its time at 16; ...`"""
    empty = {row["name"]: row["waste"] for row in waste}
    return (
        "; ".join(
            f"{'b' if number else 'B'}locks of {row['block_size']}: {100 * empty[row['name']]:.1f}% empty, a step takes {row['times']:.2f}"
            for number, row in enumerate(sorted(steps, key=lambda one: one["block_size"]))
            if row["name"] in empty
        )
        + " (of its time with blocks of 16)."
    )


def seconds(seconds: float) -> str:
    """As a person says it."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
