"""Figures of a panel: small on the wire, and whole for a page that is opened later."""

import pytest

pytest.importorskip("anywidget")
import plotly.graph_objects as go

from kvlab.panels.drawing import Figure, library
from kvlab.panels.memory import captioned


def test_the_library_travels_once() -> None:
    box = captioned(go.Figure(go.Scatter(x=[1, 2], y=[3, 4])), "words")
    assert library() in box.children and library() is library()
    assert "kvlab-figure" in box._dom_classes and ".kvlab-figure" in library()._css  # it has the look of panels, in the dark, too
    assert len(box.figure.get_state()["_esm"]) < 3_000 < 1_000_000 < len(library().source)


def test_a_page_opened_later_is_told_what_is_shown_now() -> None:
    figure = Figure(go.Figure(go.Scatter(x=[1, 2], y=[3, 4])))
    figure.data[0].y = [5, 6]
    figure.add_trace(go.Bar(y=[7]))
    figure.layout.title.text = "now"
    state = figure.get_state()
    assert [list(trace["y"]) for trace in state["_widget_data"]] == [[5, 6], [7]]
    assert state["_widget_layout"]["title"]["text"] == "now"
