"""Heat maps: bytes on a log scale, evicted keys in a pattern of their own, rectangles, and updates in place."""

import numpy as np
import pytest

pytest.importorskip("plotly")
import plotly.graph_objects as go

from kvlab.plots import attention, style


def picture(rows: int = 8, bins: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """A causal picture whose keys 2 and 3 were evicted after half of the rows."""
    weights = np.full((rows, bins), np.nan, np.float32)
    evicted = np.zeros((rows, bins), bool)
    for row in range(rows):
        weights[row, : row + 1] = 1 / (row + 1)
    evicted[rows // 2 :, 2:4] = True
    weights[evicted] = 0
    return weights, evicted


def test_numbers_become_bytes_on_a_log_scale() -> None:
    codes = attention.encode(np.array([np.nan, 0.0, 1e-9, 1e-4, 1e-2, 1.0, 7.0]), 1e-4, 1.0)
    assert codes.dtype == np.uint8
    assert codes.tolist() == [0, 1, 1, 1, 128, 255, 255]


def test_the_colour_bar_names_what_the_bytes_mean() -> None:
    fig = attention.attention_map(*picture(), tokens=8)
    bar = style.trace(fig, "value").colorbar
    assert list(bar.ticktext) == ["≤ 0.01%", "0.1%", "1%", "10%", "100%"]
    assert list(bar.tickvals) == pytest.approx([1, 64.5, 128, 191.5, 255])
    assert "attention" in bar.title.text


def test_evicted_cells_are_hatched_and_nothing_else_is() -> None:
    weights, evicted = picture()
    fig = attention.attention_map(weights, evicted, tokens=8)
    stripes = np.asarray(style.trace(fig, "evicted").z)
    assert set(np.unique(stripes)) == {0, 1, 2}
    fine = evicted.repeat(16, 0).repeat(16, 1)
    assert ((stripes > 0) == fine).all()
    assert [trace.name for trace in fig.data if trace.type == "bar"] == ["evicted: hatched"]  # the legend says it
    assert fig.data[2].marker.pattern.shape


def test_the_scale_is_one_hue_from_light_to_dark() -> None:
    for colours in (attention.BLUES, attention.ORANGES):
        light = [sum(int(c[i : i + 2], 16) for i in (1, 3, 5)) for c in colours]
        assert light == sorted(light, reverse=True)


def test_tokens_lie_on_their_numbers() -> None:
    weights, evicted = picture(4, 16)
    fig = attention.attention_map(weights, evicted, tokens=32, first_query=28, queries=4)
    value, hatch = style.trace(fig, "value"), style.trace(fig, "evicted")
    assert (value.x0, value.dx) == (0.5, 2.0)  # a bin of two tokens, centred between them
    assert (value.y0, value.dy) == (28.0, 1.0)
    assert list(fig.layout.yaxis.range) == [31.5, 27.5]  # downwards: a rectangle of four queries
    assert hatch.y0 - hatch.dy / 2 == value.y0 - value.dy / 2 == 27.5
    assert hatch.dy * len(hatch.z) == 4
    assert fig.layout.xaxis.title.text == "key (token)"
    assert fig.layout.yaxis.title.text == "query (token)"


def test_one_figure_turns_from_view_to_view_in_place() -> None:
    fig = go.FigureWidget(attention.attention_map(*picture(), tokens=8))
    traces = list(fig.data)
    error = np.abs(np.random.default_rng(0).normal(size=(16, 8))).astype(np.float32) * 0.05
    error[:, 2] = np.nan
    attention.update_error(fig, error, tokens=8, what="values", title="error")
    value = style.trace(fig, "value")
    assert value.z.shape == (16, 8)
    assert value.colorscale[-1][1] == attention.ORANGES[-1]
    assert fig.layout.xaxis.title.text == "value (token)"
    assert fig.layout.yaxis.range[0] < fig.layout.yaxis.range[1]
    assert (np.asarray(style.trace(fig, "evicted").z) > 0).any()
    assert fig.layout.title.text == "error"
    attention.update_attention(fig, *picture(), tokens=8)
    assert value.colorscale[-1][1] == attention.BLUES[-1]
    assert fig.layout.yaxis.range[0] > fig.layout.yaxis.range[1]
    assert list(fig.data) == traces


def test_error_of_nothing_lost() -> None:
    fig = attention.error_map(np.zeros((4, 4), np.float32), tokens=4)
    assert np.unique(style.trace(fig, "value").z).tolist() == [1]
    attention.update_error(fig, np.full((4, 4), np.nan, np.float32), tokens=4)
    assert np.unique(style.trace(fig, "value").z).tolist() == [0]


def test_a_full_picture_is_light() -> None:
    weights = np.random.default_rng(0).random((256, 256)).astype(np.float32)
    fig = attention.attention_map(weights, weights > 0.5, tokens=8192)
    assert sum(np.asarray(trace.z).nbytes for trace in fig.data if trace.type == "heatmap") == 2 * 256 * 256


def test_shapes_that_differ() -> None:
    with pytest.raises(ValueError, match=r"\(8, 8\), evicted \(8, 7\)"):
        attention.attention_map(picture()[0], picture()[1][:, :7], tokens=8)
    with pytest.raises(ValueError, match="channels, bins"):
        attention.error_map(np.zeros(4), tokens=4)


def test_summaries() -> None:
    assert attention.attention_summary(12, 3, 4, 0.613, 0.45) == (
        "Layer 12, head 3: the first 4 tokens take 61% of its attention; 45% of the earlier keys were evicted."
    )
    assert attention.attention_summary(0, 0, 4, 0.999, 0).endswith("100% of its attention; no key was evicted.")
    assert attention.error_summary(12, 1, "keys", 0.0547, 0) == (
        "Layer 12, KV head 1: the keys that are kept are off by 5.5% of their mean size; no token was evicted."
    )
    assert "are exact" in attention.error_summary(0, 0, "values", 0, 0.5)
