"""Figures of quality: what a strategy loses along a text, and two continuations beside one another.

Numbers in, Figure (or HTML) out; each has its one line of text.
"""

import html
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvlab.plots import style

FLOOR = 1e-6  # nats: smaller divergences, zero too, are drawn here
WORSE, BETTER, KL, MEAN, EVICTED, OTHER = "worse", "better", "KL", "KL, mean of 16", "evicted", "A: KL, mean of 16"
KL_TICKS = {"tickvals": [1e-6, 1e-4, 1e-2, 1, 100], "ticktext": ["≤ 10⁻⁶", "10⁻⁴", "0.01", "1", "100"]}
Numbers = Sequence[float] | np.ndarray


def along(
    first: int,
    loss_change: Numbers,
    kl: Numbers,
    evicted: Numbers,
    *,
    other_kl: Numbers | None = None,
    title: str = "Quality along the text",
) -> go.Figure:
    """Three strips over the scored tokens: loss minus the full cache's (nats), KL divergence (nats, log), tokens evicted so far.

    first: the column of the first scored token; the rest ``[n]``; other_kl: a pinned run's, for comparing. Raises `ValueError`
    on lengths that differ.
    """
    fig = make_subplots(rows=3, cols=1, shared_xaxes=True, row_heights=[0.4, 0.38, 0.22], vertical_spacing=0.04)
    style.layout(fig, title, "", "", height=420)
    axis = {"showline": True, "linecolor": "#999999", "gridcolor": style.FAINT, "zeroline": False, "ticks": "outside"}
    fig.update_xaxes(**axis, tickfont={"size": 12}, title={"font": {"size": 13}})
    fig.update_yaxes(**axis, tickfont={"size": 11}, title={"font": {"size": 12}})
    empty: dict[str, Any] = {"x": [], "y": [], "mode": "lines"}
    for name, row, look in (
        (WORSE, 1, {"line": {"width": 0, "shape": "hvh"}, "fill": "tozeroy", "fillcolor": style.DANGER}),
        (BETTER, 1, {"line": {"width": 0, "shape": "hvh"}, "fill": "tozeroy", "fillcolor": style.INK}),
        (KL, 2, {"mode": "markers", "marker": {"size": 4, "color": style.INK, "opacity": 0.35}}),
        (MEAN, 2, {"line": {"width": 2, "color": style.INK}}),
        (OTHER, 2, {"line": {"width": 2, "color": style.INK, "dash": "dot"}}),
        (EVICTED, 3, {"line": {"width": 1, "color": style.KEEP, "shape": "hv"}, "fill": "tozeroy", "fillcolor": style.KEEP}),
    ):
        fig.add_trace(go.Scatter(name=name, **empty | look), row=row, col=1)
    fig.update_yaxes(title_text="loss − full<br>(nats)", row=1, col=1, zeroline=True, zerolinecolor="#999999")
    fig.update_yaxes(title_text="KL to full<br>(nats)", row=2, col=1, type="log", rangemode="normal", **KL_TICKS)
    fig.update_yaxes(title_text="evicted<br>(tokens)", row=3, col=1, rangemode="tozero", nticks=3)
    fig.update_xaxes(title_text="token of the text", row=3, col=1)
    fig.update_layout(hovermode=False)
    return update_along(fig, first, loss_change, kl, evicted, other_kl=other_kl)


def update_along(
    fig: go.Figure,
    first: int,
    loss_change: Numbers,
    kl: Numbers,
    evicted: Numbers,
    *,
    other_kl: Numbers | None = None,
    title: str | None = None,
) -> go.Figure:
    """Change a figure of `along` in place; arguments as there."""
    change, divergence, gone = (np.asarray(column, dtype=float) for column in (loss_change, kl, evicted))
    if not len(change) == len(divergence) == len(gone):
        raise ValueError(f"columns of different length: loss {len(change)}, KL {len(divergence)}, evicted {len(gone)}")
    x = np.arange(first, first + len(change))
    other = None if other_kl is None else running_mean(np.asarray(other_kl, dtype=float))
    most = max([1e-2, *np.ravel(divergence), *(np.ravel(other) if other is not None else [])])
    reach = [1.1 * change.min(initial=-0.5), 1.1 * change.max(initial=0.5)]
    drawn: dict[str, Any] = {
        WORSE: change.clip(min=0),
        BETTER: change.clip(max=0),
        KL: divergence.clip(min=FLOOR),
        MEAN: running_mean(divergence).clip(min=FLOOR),
        OTHER: None if other is None else other.clip(min=FLOOR),
        EVICTED: gone,
    }
    with fig.batch_update():
        for name, y in drawn.items():
            shown = y is not None and not (name == EVICTED and not gone.any())
            at: Any = x[: len(y)] if y is not None else []
            style.trace(fig, name).update(
                x=at, y=y if y is not None else [], visible=True if shown else "legendonly" if name == EVICTED else False
            )
        span = [first - 1, first + max(1, len(change))]
        fig.update_layout(
            xaxis={"range": span},
            xaxis2={"range": span},
            xaxis3={"range": span},
            yaxis={"range": reach},
            yaxis2={"range": [np.log10(FLOOR) - 0.3, np.log10(most) + 0.4]},
            yaxis3={"range": [0, max(8.0, 1.15 * gone.max(initial=0))]},
        )
        if title is not None:
            fig.layout.title.text = title
    return fig


def along_summary(
    perplexity: float, full: float, kl: float, agreement: float, words: Sequence[str], loss_change: Numbers, first: int
) -> str:
    """`KL 0.012 nats, 96% agree; perplexity 13.9, +2.1% on the full cache's; hardest hit: " Paris", token 412, +3.2 nats.`"""
    line = f"KL {kl:.2g} nats, {100 * agreement:.0f}% agree; perplexity {perplexity:.1f}"
    line += f", {_signed(perplexity / full - 1)} on the full cache's"
    change = np.asarray(loss_change, dtype=float)
    if not len(change) or change.max() < 0.05:
        return line + "."
    worst = int(change.argmax())
    return f"{line}; hardest hit: {_quoted(words[worst])}, token {first + worst:,}, {change[worst]:+.1f} nats."


def running_mean(values: np.ndarray, width: int = 16) -> np.ndarray:
    """The mean of each value and up to ``width - 1`` before it."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(sums))
    starts = np.maximum(0, ends - width)
    return (sums[ends] - sums[starts]) / (ends - starts)


# --- what it says


def first_difference(one: str, other: str) -> int | None:
    """Where two texts part, moved back to the start of a word; None where they do not."""
    at = next((i for i, (a, b) in enumerate(itertools.zip_longest(one, other)) if a != b), None)
    if at is None:
        return None
    between = all(at in (0, len(text)) or text[at].isspace() or text[at - 1].isspace() for text in (one, other))
    return at if between or not one[:at].split() else at - len(one[:at].split()[-1])


def continuations(prompt: str, full: str, runs: Sequence[tuple[str, str, str]]) -> str:
    """The end of the prompt and the texts that follow it, as HTML; in each of `runs` the first word that the full cache does not
    say is marked. runs: (label, hue, text)."""
    rows = [
        _line("prompt", "inherit", f"… {html.escape(_tail(prompt))}", faint=True),
        _line("full", style.FULL, html.escape(full)),
    ]
    for label, hue, text in runs:
        at = first_difference(full, text)
        if at is None:
            words = html.escape(text)
        else:
            lead = len(text[at:]) - len(text[at:].lstrip())
            start = at + lead
            end = next((i for i in range(start, len(text)) if text[i].isspace()), len(text))
            marked = html.escape(text[start:end]) or "(ends here)"
            words = (
                f"{html.escape(text[:start])}"
                f'<mark style="background:#fbe3d4;color:#7a3300;border-bottom:2px solid {style.DANGER};padding:0 2px" '
                f'title="the first difference">▸{marked}</mark>{html.escape(text[end:])}'
            )
        rows.append(_line(label, hue, words))
    return f'<div class="kvlab-says">{"".join(rows)}</div>'


def continuations_summary(full: str, text: str) -> str:
    """`They say the same.` or `They part after 31 characters: "…a subclass" against "…special-cased".`"""
    at = first_difference(full, text)
    if at is None:
        return "It says the same as the full cache."
    words = [rest.split()[0] if (rest := one[at:]).split() else "the end" for one in (full, text)]
    after = len(text[:at].split())
    return f"It parts from the full cache after {after:,} words: {_quoted(words[1])} instead of {_quoted(words[0])}."


def _line(label: str, hue: str, words: str, *, faint: bool = False) -> str:
    look = "opacity:.65;" if faint else ""
    return (
        f'<div style="display:flex;gap:10px;margin:3px 0;{look}"><b style="flex:0 0 64px;color:{hue}">{html.escape(label)}</b>'
        f'<span style="white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.45">{words}</span></div>'
    )


def _tail(prompt: str, length: int = 90) -> str:
    return prompt if len(prompt) <= length else prompt[-length:].partition(" ")[2]


def _quoted(word: str) -> str:
    return f"“{word.strip() or repr(word)[1:-1]}”"


def _signed(share: float) -> str:
    return f"{100 * share:+.2g}%" if abs(share) < 0.1 else f"{100 * share:+.0f}%"
