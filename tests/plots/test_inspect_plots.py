"""The inspector's figures: what is drawn, in which unit and hue, the one line of text, and updates in place."""

import numpy as np
import pytest

pytest.importorskip("plotly")
import plotly.graph_objects as go

from kvlab.measure.inspect import Channel, Channels, LayerErrors, Token
from kvlab.plots import inspect, style

EXACT, BACK = np.array([1.0, -3.0]), np.array([1.5, -3.0])
TOKEN = Token(7, " the\n", EXACT, BACK, BACK - EXACT, np.array([3, 0]), np.array([1.5, 1.5]), np.array([-3.0, -3.0]), False)
PLAIN = Token(8, "a", EXACT, EXACT, 0 * EXACT, None, None, None, True)
SIZES = Channels(np.array([-1.0, -8.0, 0.0]), np.array([2.0, -1.0, 1.0]), np.array([2.0, 8.0, 1.0]), None)
ONE = Channel(5, 7, np.array([1, 3]), np.array([0.0, 2.0, 4.0]), np.array([-1.0, 1.0, 3.0, 5.0]), 3.5)
ERRORS = LayerErrors(np.array([0.02, 0.04]), np.array([0.1, 0.05]))
ROWS = {"keys": {"codes": 4.0, "scales": 0.5}, "values": {"codes": 4.0, "scales": 0.5}, "both": {"codes": 4.0, "scales": 0.5}}


def y(fig: go.Figure, name: str) -> list[float]:
    return list(style.trace(fig, name).y)


def shown(fig: go.Figure) -> set[str]:
    return {trace.name for trace in fig.data if trace.visible is not False}


def test_one_token() -> None:
    fig = inspect.token(TOKEN, 1)
    assert y(fig, inspect.EXACT)[1:-1] == [1, -3]
    assert y(fig, inspect.BACK)[1:-1] == [1.5, -3]
    assert y(fig, inspect.ERROR)[1:-1] == [0.5, 0]
    assert style.trace(fig, inspect.ERROR).yaxis == "y2"
    assert style.trace(fig, inspect.ERROR).line.color == style.DANGER
    assert style.trace(fig, inspect.EXACT).line.color == style.FULL
    assert style.trace(fig, inspect.BACK).line.color == style.STORE
    assert (list(style.trace(fig, inspect.CHOSEN).x), y(fig, inspect.CHOSEN)) == ([1], [-3])
    assert fig.layout.xaxis.title.text == "channel"
    assert list(fig.layout.xaxis.range) == [-0.5, 1.5]
    assert (
        inspect.token_summary(TOKEN, 2, 0, "keys", 0)
        == "Layer 2, KV head 0, keys of token 7 “ the↵”: relative error 16%. Channel 0: 1 came back as 1.5: code 3 × 1.5 − 3."
    )
    assert inspect.token_summary(PLAIN, 2, 0, "values", 1).endswith("Channel 1: −3 came back as −3: this token is plain.")
    live = go.FigureWidget(fig)
    inspect.update_token(live, PLAIN, 0)
    assert y(live, inspect.ERROR) == [0, 0, 0, 0]
    assert len(live.data) == 4


def test_sizes_of_channels() -> None:
    fig = inspect.channels(SIZES, 1)
    assert y(fig, inspect.SIZE)[1:-1] == [2, 8, 1]
    assert y(fig, inspect.RANGE)[1:-1] == [2, -1, 1]
    assert style.trace(fig, inspect.WRITTEN) is None
    assert inspect.channels_summary(SIZES, "keys") == "Keys: channel 1 reaches 8, 4.0 times the median channel."
    turned = Channels(SIZES.low, SIZES.high, SIZES.size, np.array([3.0, 2.0, 1.0]), "once rotated")
    inspect.update_channels(fig, turned, 1)
    assert y(fig, inspect.WRITTEN)[1:-1] == [3, 2, 1]
    assert inspect.channels_summary(turned, "keys").endswith("Once rotated, the largest is 3.")
    inspect.update_channels(fig, SIZES, 1)
    assert inspect.WRITTEN not in shown(fig)


def test_the_steps_of_a_channel() -> None:
    fig = inspect.channel(ONE)
    assert (list(style.trace(fig, inspect.COUNT).x), y(fig, inspect.COUNT)) == ([1, 3], [1, 3])
    assert [x for x in style.trace(fig, inspect.LEVELS).x if x is not None] == [1, 1, 3, 3]  # those within 0 to 4
    assert inspect.channel_summary(ONE) == (
        "Channel 5: 4 numbers from 0 to 4. Of the 4 numbers that token 7's codes can say there, 2 lie in that range."
    )
    many = Channel(5, 7, ONE.counts, ONE.edges, np.linspace(0, 4, 200), 3.5)
    inspect.update_channel(fig, many)
    assert inspect.LEVELS not in shown(fig)
    assert inspect.channel_summary(many).endswith("200 lie in that range, too many to draw.")
    turned = Channel(5, 7, ONE.counts, ONE.edges, None, 3.5, "once rotated")
    inspect.update_channel(fig, turned)
    assert fig.layout.xaxis.title.text == "number, once rotated"
    assert (
        inspect.channel_summary(turned)
        == "Channel 5 (once rotated): 4 numbers from 0 to 4. Token 7 is plain: nothing is rounded."
    )


def test_errors_by_layer() -> None:
    fig = inspect.layer_errors(ERRORS, 1)
    assert y(fig, "keys") == pytest.approx([2, 4])
    assert y(fig, "values") == pytest.approx([10, 5])
    assert y(fig, "chosen layer") == pytest.approx([4, 5])
    assert fig.layout.yaxis.title.text == "relative error (%)"
    assert (
        inspect.layer_errors_summary(ERRORS)
        == "Relative error of keys 3% on average, most in layer 1 (4%); of values 7.5%, most in layer 0 (10%)."
    )


def test_bits_a_number() -> None:
    fig = inspect.bits(ROWS, {"keys": 4, "values": 4})
    assert list(style.trace(fig, "codes").x) == [4, 4, 4]
    assert list(style.trace(fig, "scales").x) == [0.5, 0.5, 0.5]
    assert style.trace(fig, "scales").marker.color == style.PARTS["scales"]
    assert shown(fig) == {"codes", "scales", inspect.PROMISED}
    assert {x for x in style.trace(fig, inspect.PROMISED).x if x is not None} == {4}
    assert [label.text for label in fig.layout.annotations] == ["4.50"] * 3
    assert fig.layout.xaxis.title.text == "bits a number"
    assert inspect.bits_summary(ROWS, {"keys": 4, "values": 4}) == (
        "4.50 bits a number where 4 are promised: codes 4.00, scales 0.50. 16 / 4.50 = 3.56 times smaller than 16 bits."
    )
    dense = {"keys": {"keys": 32.0}, "values": {"values": 32.0}, "both": {"keys": 16.0, "values": 16.0}}
    inspect.update_bits(fig, dense, {})
    assert shown(fig) == {"keys", "values"}
    assert inspect.bits_summary(dense, {}, 32).endswith("A plain number takes 32 bits here.")
    assert "4/2 are promised" in inspect.bits_summary(ROWS, {"keys": 4, "values": 2})


def test_empty_figures_wait_for_a_panel() -> None:
    for fig in (inspect.token(None, 0), inspect.channels(None, 0), inspect.channel(None), inspect.layer_errors(None)):
        assert all(not trace.x for trace in fig.data)
