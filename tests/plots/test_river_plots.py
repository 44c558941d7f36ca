"""The figures of the token river: what is drawn, in which unit and hue, the lines of text, and updates in place."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("plotly")
import plotly.graph_objects as go
import torch

from kvlab import Strategy, keep
from kvlab.measure.river import River
from kvlab.plots import river, style

NAN, INF = float("nan"), float("inf")


def rows(*lines: list[float]) -> torch.Tensor:
    """float32 ``[L, 1, n]``: a line for each layer of one head."""
    return torch.tensor(lines)[:, None]


# two layers of one head; six tokens, two read at once and then two by two. In the end the first holds 0, 3, 4, 5, the second 0, 2, 4, 5
ONE = River(
    strategy=Strategy(keep=keep.HeavyHitter(budget=4, recent=0, sinks=0)),
    words=("a", " b", "\n", "d", "e", "f"),
    prefill=2,
    step=2,
    gone=rows([0, 4, 6, 0, 0, 0], [0, 6, 0, 6, 0, 0]).int(),
    worth=rows([NAN, 1.316, 2, NAN, NAN, NAN], [NAN, 0.25, NAN, 2048, NAN, NAN]),
    floor=rows([NAN, 3.5, INF, NAN, NAN, NAN], [NAN, 0.5, NAN, 4096, NAN, NAN]),
    lost=rows([0, 0, 0, 0, 0.2, 0.4], [0, 0, 0, 0, 0, 0.2]),
    sinks=torch.tensor([[0.5], [0.3]]),
)
FULL = replace(ONE, strategy=Strategy(), gone=torch.zeros_like(ONE.gone), lost=torch.zeros_like(ONE.lost))
UNEVEN = replace(ONE, gone=rows([0, 0, 0, 0, 0, 0], [0, 6, 0, 6, 0, 0]).int())


def z(fig: go.Figure) -> np.ndarray:
    return np.array(style.trace(fig, river.MAP).z, dtype=float)


def test_the_river_is_the_share_of_heads_that_hold_a_token() -> None:
    fig = river.flow(ONE)
    expected = np.array([[1, 1, 1], [1, 0.5, 0], [NAN, 1, 0.5], [NAN, 1, 0.5], [NAN, NAN, 1], [NAN, NAN, 1]])
    assert river.cells(ONE).share == pytest.approx(expected, nan_ok=True)
    assert z(fig).tolist() == [[255, 255, 255], [255, 128, 1], [0, 255, 128], [0, 255, 128], [0, 0, 255], [0, 0, 255]]
    drawn = style.trace(fig, river.MAP)
    assert list(drawn.x) == [2, 4, 6, 8]  # each column until the next
    assert list(drawn.y) == [0, 1, 2, 3, 4, 5, 6]
    assert (drawn.zmin, drawn.zmax) == (0, 255)
    assert (drawn.colorbar.tickvals[0], drawn.colorbar.ticktext[0]) == (1, "none")
    assert drawn.colorscale[:3] == ((0, "rgba(0,0,0,0)"), (0.5 / 255, "rgba(0,0,0,0)"), (0.5 / 255, drawn.colorscale[2][1]))
    assert np.array(drawn.z).dtype == np.uint8  # a NaN would not travel
    assert drawn.colorbar.title.text == "share of the heads that hold it"
    assert list(style.trace(fig, river.PREFILL).x) == [2, 2]
    assert style.trace(fig, river.PREFILL).line.color == style.FULL
    assert (fig.layout.xaxis.title.text, fig.layout.yaxis.title.text) == ("tokens read", "token (the first 4 are drawn taller)")
    assert list(fig.layout.yaxis.range) == [6, 0]  # from the text's start down
    assert river.flow_summary(ONE) == (
        "After 6 tokens a head holds 4 of them (67%, mean of 2 heads). 50% of the heads hold the first 4 tokens; tokens that no head holds: 1."
    )


def test_while_the_prefill_reads_every_token_is_held() -> None:
    late = replace(ONE, prefill=6, gone=torch.where(ONE.gone > 0, 6, 0).int())
    made = river.cells(late)
    assert made.times.tolist() == [2, 4, 6, 8]
    assert made.share[:, 1] == pytest.approx([1, 1, 1, 1, NAN, NAN], nan_ok=True)
    assert made.share[:, 2] == pytest.approx([1, 0, 0.5, 0.5, 1, 1])


def test_the_first_tokens_stay_alone_and_tall_however_long_the_text() -> None:
    assert [river.place(token, 400) for token in (0, 1, 4, 10, 400)] == [0, 9, 36, 42, 432]
    n = 404
    gone = torch.zeros(1, 1, n)
    gone[0, 0, 4:6] = 404
    long = replace(ONE, words=("x",) * n, prefill=2, step=2, gone=gone.int())
    made = river.cells(long, rows=100, columns=3)
    assert made.share.shape == (104, 3)
    assert made.tokens.tolist() == [0, 1, 2, 3, *range(4, 405, 4)]
    assert made.times.tolist() == [2, 202, 404, 406]
    assert made.share[:6, 2] == pytest.approx([1, 1, 1, 1, 0.5, 1])  # two of tokens 4 to 7 are gone
    assert made.share[53, 1] == 1  # tokens 200 and 201: just read; 202 and 203 do not count yet
    assert np.isnan(made.share[54, 1])
    assert style.trace(river.flow(long), river.BREAK).y[0] == river.place(4, n)
    assert river.flow(long).layout.yaxis.ticktext[0] == "0–3"


def test_a_line_marks_the_chosen_token_from_where_it_is_read() -> None:
    fig = river.flow(ONE, 3)
    drawn = style.trace(fig, river.CHOSEN)
    assert (list(drawn.x), list(drawn.y)) == ([4, 8], [3.5, 3.5])
    assert not style.trace(fig, river.AROUND).showlegend
    river.update_flow(fig, ONE)
    assert not style.trace(fig, river.CHOSEN).visible


def test_why_a_token_left() -> None:
    assert river.why(ONE, 1) == (
        "Token 1 “ b”: all 2 heads (2 layers × 1 KV heads) let it go, between 4 and 6 tokens.\n"
        "Layer 0, head 0 let it go after 4 tokens: worth 1.32, the least that stayed 3.50.\n"
        "Layer 1, head 0 let it go after 6 tokens: worth 0.250, the least that stayed 0.500.\n"
        "Worth is in HeavyHitter's own measure."
    )
    assert river.why(ONE, 2) == (
        "Token 2 “↵”: 1 of the 2 heads (2 layers × 1 KV heads) let it go, after 6 tokens.\n"
        "Each of them: worth 2.00, all others were protected.\n"
        "Worth is in HeavyHitter's own measure."
    )
    assert "worth 2,048, the least that stayed 4,096" in river.why(ONE, 3)
    assert river.why(ONE, 5) == "Token 5 “f”: all 2 heads still hold it."
    with pytest.raises(ValueError, match=r"token=6 is out of range \(allowed: 0 to 5\)"):
        river.why(ONE, 6)


def test_of_many_heads_the_first_the_middle_and_the_last_are_named() -> None:
    heads = replace(
        ONE,
        gone=torch.tensor([[[2], [3], [4]], [[5], [6], [7]]]).int(),
        worth=torch.zeros(2, 3, 1),
        floor=torch.arange(6.0).reshape(2, 3, 1),
        words=("a",),
    )
    lines = river.why(heads, 0).splitlines()
    assert lines[0].endswith("all 6 heads (2 layers × 3 KV heads) let it go, between 2 and 7 tokens.")
    assert [line.partition(" let")[0] for line in lines[1:-1]] == ["Layer 0, head 0", "Layer 1, head 0", "Layer 1, head 2"]
    assert lines[1].endswith("worth 0, the least that stayed 0.")


def test_a_head_s_reach_where_all_hold_the_same_number() -> None:
    fig = river.survival(ONE, 3)
    assert z(fig) == pytest.approx(np.array([[2.0, 2.25]]))  # ages 5, 2, 1, 0 and 5, 3, 1, 0
    assert style.trace(fig, river.MAP).colorbar.title.text == "mean age (tokens)"
    dots = style.trace(fig, river.HOLDERS)
    assert (list(dots.x), list(dots.y)) == ([0], [0])
    assert (fig.layout.xaxis.title.text, fig.layout.yaxis.title.text) == ("layer", "KV head")
    assert river.survival_summary(ONE) == (
        "Every head holds 4 tokens in the end, on average 2 (layer 0, head 0) to 2 tokens old (layer 1, head 0): colour is that age."
    )
    assert river.survival_summary(FULL) == "Every head holds 6 tokens in the end, all of them alike: 2 tokens old on average."


def test_how_much_a_head_holds_where_that_differs() -> None:
    fig = river.survival(ONE, 3)
    river.update_survival(fig, UNEVEN, 5)
    assert z(fig) == pytest.approx(np.array([[100, 100 * 4 / 6]]))
    bar = style.trace(fig, river.MAP).colorbar
    assert (bar.title.text, bar.ticktext) == ("tokens held (%)", ("67", "83", "100"))
    assert list(style.trace(fig, river.HOLDERS).x) == [0, 1]
    assert river.survival_summary(UNEVEN) == (
        "In the end a head holds 4 (layer 1, head 0) to 6 of the 6 tokens (layer 0, head 0): colour is how many."
    )


def test_layers_that_hold_alike() -> None:
    fig = river.overlap(ONE)
    assert z(fig) == pytest.approx(np.array([[1, 0.6], [0.6, 1]]))  # 0, 4 and 5 of five tokens
    assert list(fig.layout.yaxis.range) == [1.5, -0.5]
    assert river.overlap_summary(ONE) == (
        "Two layers have 60% of what either holds in common, on average; most layers 0 and 1 (60%), least layers 0 and 1 (60%)."
    )
    assert river.overlap_summary(FULL) == "All layers hold the same tokens."
    assert river.overlap_summary(replace(ONE, gone=ONE.gone[:1])).startswith("The model has one layer")


def test_attention_on_what_is_gone() -> None:
    fig = river.lost(ONE)
    assert list(style.trace(fig, river.GONE).y) == pytest.approx([0, 0, 0, 0, 10, 30])
    assert list(style.trace(fig, river.SINKS).y) == pytest.approx([40, 40])
    assert (style.trace(fig, river.GONE).line.color, style.trace(fig, river.SINKS).line.color) == (style.DANGER, style.FULL)
    assert (fig.layout.xaxis.title.text, fig.layout.yaxis.title.text) == ("query (token)", "attention (%)")
    assert fig.layout.yaxis.range[1] > 40
    assert river.lost_summary(ONE) == (
        "After the prefill 10% of the full cache's attention falls on tokens that are gone, at most 30% (query 5); the first 4 tokens alone get 40%."
    )
    assert river.lost_summary(FULL) == (
        "None of the full cache's attention falls on tokens that are gone; the first 4 tokens alone get 40%."
    )


def test_what_never_leaves_is_said() -> None:
    assert river.flow_summary(FULL) == "Nothing leaves: all 2 heads hold all 6 tokens in the end."
    quest = replace(FULL, strategy=Strategy(keep=keep.Quest()))
    assert river.flow_summary(quest).endswith("A query reads only some of them, and chooses anew each time.")
    merged = replace(ONE, strategy=Strategy(keep=keep.Merge()))
    assert river.flow_summary(merged).endswith("What left was folded into what stayed.")


def test_figures_are_updated_in_place() -> None:
    live = go.FigureWidget(river.flow(ONE, 3))
    traces = len(live.data)
    river.update_flow(live, FULL, 0)
    assert set(z(live).flatten()) == {0, 255}
    assert len(live.data) == traces


def test_empty_figures_wait_for_a_panel() -> None:
    for fig in (river.flow(None), river.survival(None), river.overlap(None), river.lost(None)):
        assert not [one for one in fig.data if one.visible is not False]
