"""The cards of the live lab: each a head, figures that are updated in place, and one line of text that says the same in words.

A card shows numbers that it is given; it knows no model and does no sums. `state` says whether what it shows belongs to the
controls as they stand: "fresh", "waiting" (being measured) or "stale" (left behind by an error or a cancelled run).
"""

import html
from collections.abc import Sequence
from typing import Any

import ipywidgets as widgets
import numpy as np
import plotly.graph_objects as go

from kvlab import geometry, hardware
from kvlab.measure.scale import DEVICES, Prediction, Scaled, devices_for
from kvlab.measure.session import Ran, Row, Scores
from kvlab.measure.tasks import Needle
from kvlab.panels.memory import widget
from kvlab.plots import attention, compare, memory, quality, style

A, B = "A", "B"
THIS = "this"


class Card(widgets.VBox):
    """A titled box. `summary` is its line of text; `state` as in this file's head."""

    def __init__(self, title: str, body: Sequence[widgets.Widget], foot: widgets.Widget | None = None) -> None:
        self.title = title
        self.state = "fresh"
        self.recorded = ""  # from when and where, while the card still shows a recording
        self.top, self.summary = widgets.HTML(), line()
        box = widgets.VBox(list(body)).add_class("kvlab-body")
        super().__init__([self.top, box, self.summary, *([foot] if foot else [])])
        self.add_class("kvlab-card")
        self.mark("fresh")

    def mark(self, state: str, note: str = "") -> None:
        """Set the state; `note` stands beside the title. What is stale is dimmed."""
        self.state = state
        self.recorded = "" if state == "fresh" else self.recorded
        said = "; ".join(filter(None, (self.recorded, note)))
        self.top.value = f'<div class="kvlab-head"><b>{html.escape(self.title)}</b><span class="kvlab-badge {state}">{html.escape(said)}</span></div>'
        (self.add_class if state == "stale" or (state == "waiting" and not note) else self.remove_class)("kvlab-dim")

    @property
    def text(self) -> str:
        """The line of text, as a person reads it."""
        return html.unescape(self.summary.value)

    def say(self, words: str) -> None:
        self.summary.value = html.escape(words, quote=False)


class MemoryCard(Card):
    """Bytes over the tokens as predicted and as measured, and the same strategy on a big model.

    `figure`, `scale_figure`; `model`, `hardware`, `devices`, `requests` choose what it is scaled to, `scale_summary` says it.
    """

    def __init__(self) -> None:
        self.figure = figure(style.layout(go.Figure(), "", "tokens in the sequence", "cache (bytes)"), 300)
        self.scale_figure = figure(style.layout(go.Figure(), "", "tokens in each request", "memory (bytes)"), 300)
        self.legend, self.scale_legend, self.scale_summary = line(), line(), line()
        self.model = _dropdown("scale to", geometry.names(), "Llama-3.1-8B", "the big model that the same strategy is put on")
        self.hardware = _dropdown("×", hardware.names("gpu", "cpu"), "H100 SXM 80GB", "the devices it runs on")
        self.devices = _dropdown("on", DEVICES, 1, "how many devices")
        self.requests = _dropdown("requests", (1, 2, 4, 8, 16, 32, 64, 128, 256), 16, "requests at once, all of the same length")
        row = widgets.HBox([self.model, self.requests, self.devices, self.hardware]).add_class("kvlab-row")
        below = widgets.VBox([row, self.scale_figure, self.scale_legend, self.scale_summary]).add_class("kvlab-body")
        super().__init__("memory", [self.figure, self.legend], below)

    def fit_devices(self) -> None:
        """As many devices as the model asks for."""
        self.devices.value = devices_for(self.model.value, self.hardware.value)

    def show(self, made: Prediction, ran: Ran | None = None, pinned: Prediction | None = None) -> None:
        """The predicted curve, with the measured points of `ran` once there are any, and the total of a pinned run."""
        growth = ran.generation.growth if ran else ()
        points = ([seen for seen, _ in growth], [held.allocated for _, held in growth])
        water = ran.generation.memory.high_water if ran else None
        line = (pinned.tokens, [sum(column) for column in zip(*pinned.parts.values(), strict=True)]) if pinned else None
        compare.update_growth(
            self.figure,
            made.tokens,
            made.full,
            made.parts,
            full16=made.full16,
            measured=points if ran else None,
            high_water=water,
            pinned=line,
        )
        self.legend.value = legend(self.figure)
        if ran is None:
            words = memory.growth_summary(made.full[-1], made.total, made.tokens[-1], sixteen_bit=made.full16[-1])
            self.say(f"Predicted: {words}.")
            return
        held, full = ran.generation.memory, ran.full.memory
        words = memory.growth_summary(
            full.allocated, held.allocated, held.seen, sixteen_bit=held.reference, high_water=water, repacked=held.repacked
        )
        away = [f"{geometry.text(size)} of it on {place}" for place, size in held.by_device().items() if place == "disk"]
        self.say(f"Measured: {'; '.join([words, *away])}.")

    def show_scale(self, made: Scaled) -> None:
        memory.update_scale_up(
            self.scale_figure, made.tokens, made.predicted, made.capacity, full=made.full, fits=made.fits, here=made.here
        )
        self.scale_legend.value = legend(self.scale_figure)
        words = memory.scale_up_summary(made.at(made.here), made.capacity, made.here, made.requests, fits=made.fits)
        full = "no limit" if made.fits_full is None else f"{made.fits_full:,} tokens"
        line = f"{made.model} on {made.devices} × {made.hardware}, {words} (full cache: {full})."
        if made.elsewhere:
            moved = "" if made.moved is None else f", and streaming them takes {_time(made.moved)} a step"
            line += f" {geometry.text(made.elsewhere)} of KV wait elsewhere{moved}."
        self.scale_summary.value = html.escape(line, quote=False)

    def fail_scale(self, words: str) -> None:
        """The strategy does not fit the big model: say so, and leave no figure that seems to answer."""
        with self.scale_figure.batch_update():
            for trace in self.scale_figure.data:
                trace.visible = False
            self.scale_figure.layout.annotations = []
        self.scale_legend.value = ""
        self.scale_summary.value = f'<span class="kvlab-lost">{html.escape(words)}</span>'


VIEWS = {
    "steps": "continuation",
    "whole": "whole run",
    "keys": "error of keys",
    "values": "error of values",
}


class AttentionCard(Card):
    """Where one head of one layer looked, or what quantization did to what it keeps. `layer`, `head`, `view` choose."""

    def __init__(self) -> None:
        none = np.zeros((1, 1), np.float32)
        self.figure = figure(attention.attention_map(none, none > 1, tokens=1, title=""), 520)
        self.layer = _dropdown("layer", (0,), 0, "the layer that is looked into; another one needs another run")
        self.head = _dropdown("head", (0,), 0, "the query head; its KV head is what the error views show")
        self.view = _dropdown("view", [(words, name) for name, words in VIEWS.items()], "steps", "what is drawn")
        self._ran: Ran | None = None
        row = widgets.HBox([self.layer, self.head, self.view]).add_class("kvlab-row")
        self.legend = line()
        super().__init__("attention", [row, self.figure, self.legend])

    def offer(self, layers: int, heads: int) -> None:
        """Let a person choose among these; what was chosen stays, where it can."""
        for choice, count, start in ((self.layer, layers, min(12, layers - 1)), (self.head, heads, min(8, heads - 1))):
            if len(choice.options) != count:
                choice.options = range(count)
                choice.value = start

    def show(self, ran: Ran) -> None:
        self._ran = ran
        self.redraw()

    def redraw(self) -> None:
        ran, head, view = self._ran, self.head.value, self.view.value
        if ran is None or head >= ran.attention.heads:
            return
        made, off = ran.attention, ran.error
        self.legend.value = legend(self.figure)
        if view in ("steps", "whole"):
            steps = view == "steps" and made.steps.shape[1] > 0
            weights, gone = (made.steps, made.steps_evicted) if steps else (made.whole, made.whole_evicted)
            rows = {"first_query": made.first_step, "queries": made.steps.shape[1]} if steps else {}
            attention.update_attention(self.figure, weights[head], gone[head], tokens=made.tokens, **rows)
            share = (made.sink_share_steps if steps else made.sink_share)[head]
            self.say(
                attention.attention_summary(made.layer, head, made.sinks, float(share), evicted_share(weights[head], gone[head]))
            )
        else:
            heads = len(off.keys)
            kv = head * heads // made.heads
            picture, share = (off.keys, off.key_share) if view == "keys" else (off.values, off.value_share)
            attention.update_error(self.figure, picture[kv], tokens=off.tokens, what=view)
            gone_share = float(np.isnan(picture[kv][0]).mean())
            self.say(attention.error_summary(made.layer, kv, view, float(share[kv]), gone_share))


class QualityCard(Card):
    """Loss and KL divergence along the text, against the full cache."""

    def __init__(self) -> None:
        self.figure = figure(quality.along(0, [], [], [], title=""), 400)
        self.legend = line()
        super().__init__("quality along the text", [self.figure, self.legend])

    def show(self, scores: Scores | None, pinned: Scores | None = None) -> None:
        if scores is None:
            quality.update_along(self.figure, 0, [], [], [])
            self.say("A prompt of one token leaves nothing to score; take a longer one.")
            return
        own = scores.quality
        change = (own.loss - own.full_loss).numpy()
        same_text = pinned is not None and len(pinned.quality.kl) == len(own.kl)
        other = pinned.quality.kl.numpy() if pinned is not None and same_text else None
        quality.update_along(self.figure, own.first, change, own.kl.numpy(), scores.evicted.numpy(), other_kl=other)
        self.legend.value = legend(self.figure)
        self.say(
            quality.along_summary(
                own.perplexity, own.full_perplexity, own.mean_kl, own.agreement, scores.words, change, own.first
            )
        )


class SaysCard(Card):
    """What the model says with the full cache and with this one, and whether a hidden fact is `found` (True, False or None)."""

    def __init__(self) -> None:
        self.lines, self.needle = widgets.HTML(), widgets.HTML()
        self.depth = _dropdown(
            "needle hidden at",
            [(f"{d}% of the text", d / 100) for d in (10, 25, 50, 75, 90)],
            0.25,
            "where in 512 tokens the fact is hidden",
        )
        self.found: bool | None = None
        row = widgets.HBox([self.depth, self.needle]).add_class("kvlab-row")
        super().__init__("what it says", [self.lines], row)

    def show(self, prompt: str, ran: Ran, pinned: Ran | None = None) -> None:
        runs = [(A, "inherit", pinned.generation.text)] if pinned else []
        runs.append((B if pinned else THIS, "inherit", ran.generation.text))
        self.found, self.needle.value = None, "needle: not looked for yet"
        self.lines.value = quality.continuations(prompt, ran.full.text, runs)
        self.say(quality.continuations_summary(ran.full.text, ran.generation.text))

    def show_needle(self, hidden: Needle | None) -> None:
        self.found = hidden.found if hidden else None
        if hidden is None:
            self.needle.value = "needle: the model's context is too short for it"
            return
        said = html.escape(" ".join(hidden.said.split()) or "nothing")
        verdict = "<b>needle found</b> ✓" if hidden.found else '<b class="kvlab-lost">needle lost ✗</b>'
        self.needle.value = f"{verdict} &nbsp;“The secret pass key for Alice is” → “{said}” (key: {hidden.key})"


HEADS = ("cache", "of 16-bit", "high water", "first token", "per token", "perplexity", "KL (nats)", "agreement", "needle")


class TableCard(Card):
    """The numbers: the full cache, a pinned run, and this one. `rows` holds what is on show, by label."""

    def __init__(self) -> None:
        self.body = widgets.HTML()
        self.rows: dict[str, Row] = {}
        super().__init__("numbers", [self.body])

    @property
    def lines(self) -> list[str]:
        """The rows as text."""
        return [
            f"{label}: " + ", ".join(f"{head} {cell}" for head, cell in zip(HEADS, _cells(label, row), strict=True))
            for label, row in self.rows.items()
        ]

    def show(self, full: Row, own: Row, pinned: Row | None = None) -> None:
        self.rows = {"full": full} | ({A: pinned} if pinned else {}) | {B if pinned else THIS: own}
        rows = "".join(_table_row(label, row) for label, row in self.rows.items())
        head = "".join(f"<th>{words}</th>" for words in ("", *HEADS))
        self.body.value = f'<div class="kvlab-table"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        wide = " This run computes in 32 bits, so a plain number takes twice that." if full.memory.ratio > 1.5 else ""
        cold = ", ".join(label for label, row in self.rows.items() if row.cold)
        note = f" The first token of {cold} was this process's first run: cold." if cold else ""
        self.say(
            f"Bytes as allocated at {own.tokens:,} tokens; ratios against a full cache of 16 bits.{wide}"
            f" Times of one run on this machine.{note}"
        )


def _cells(label: str, row: Row) -> list[str]:
    """The numbers of a row as people read them, in the order of `HEADS`."""
    none = "–"
    change = "" if row.perplexity_change is None or label == "full" else f" ({100 * row.perplexity_change:+.2g}%)"
    return [
        geometry.text(row.memory.allocated),
        f"{100 * row.memory.ratio:.1f}%",
        geometry.text(row.memory.high_water),
        _time(row.first_token),
        none if row.per_token is None else _time(row.per_token),
        none if row.perplexity is None else f"{row.perplexity:.2f}{change}",
        none if row.kl is None else f"{row.kl:.2g}",
        none if row.agreement is None else f"{100 * row.agreement:.1f}%",
        none if row.found is None else "found" if row.found else "lost",
    ]


def _table_row(label: str, row: Row) -> str:
    name = "cache" if label == "full" else html.escape(str(row.strategy))
    numbers = [
        cell.replace(" ", "\u00a0").replace("\u00a0(", " (") for cell in _cells(label, row)
    ]  # a unit stays with its number
    cells = [f'<td class="kvlab-lost">{cell}</td>' if cell == "lost" else f"<td>{cell}</td>" for cell in numbers]
    return f"<tr><td><b>{label}</b> {name}</td>{''.join(cells)}</tr>"


def evicted_share(weights: np.ndarray, gone: np.ndarray) -> float:
    """Share of the cells of the last row, up to its own token, that are hatched."""
    known = ~np.isnan(weights[-1]) | gone[-1]
    return float(gone[-1].sum() / max(1, known.sum()))


def legend(fig: go.Figure) -> str:
    """The names of what a figure shows, beside a patch, line or dot as it is drawn there; HTML, so that it takes little room."""
    items: dict[str, list[str]] = {"kvlab-patch": [], "kvlab-line": [], "kvlab-dot": [], "kvlab-hatch": []}
    for trace in fig.data:
        if trace.visible in (False, "legendonly") or trace.showlegend is False or trace.type == "heatmap":
            continue
        if trace.type == "bar":
            plain = not trace.marker.pattern.shape  # None, or empty once a browser has filled it in
            look = ("kvlab-patch", f"background:{trace.marker.color}") if plain else ("kvlab-hatch", "")
        elif trace.mode == "markers":
            look = "kvlab-dot", f"background:{trace.marker.color}"
        elif trace.fillcolor:
            look = "kvlab-patch", f"background:{trace.fillcolor}"
        else:
            kind = {"dash": "dashed", "dot": "dotted", "dashdot": "dashed"}.get(trace.line.dash, "solid")
            look = "kvlab-line", f"border-top:2px {kind} {trace.line.color}"
        items[look[0]].append(f'<span><i class="{look[0]}" style="{look[1]}"></i>{html.escape(trace.name)}</span>')
    return f'<div class="kvlab-legend">{"".join(item for kind in items.values() for item in kind)}</div>'


def line() -> widgets.HTML:
    """An empty line of text under a figure."""
    return widgets.HTML().add_class("kvlab-summary")


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.2g} ms"


def figure(fig: go.Figure, height: int) -> go.FigureWidget:
    """A figure as a card holds it: no title of its own, and its legend apart (`legend`). `height` in pixels."""
    fig.update_layout(height=height, margin={"l": 60, "r": 10, "t": 14, "b": 44}, showlegend=False)
    return widget(fig)


def _dropdown(label: str, options: Any, value: Any, help: str) -> widgets.Dropdown:
    return widgets.Dropdown(
        description=label,
        options=options,
        value=value,
        tooltip=help,
        style={"description_width": "initial"},
        layout={"width": "auto", "max_width": "100%"},
    )
