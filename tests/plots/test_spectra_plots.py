"""The figures of spectra: what is drawn, in which unit and hue, the one line of text, and updates in place."""

import numpy as np
import pytest

pytest.importorskip("plotly")
import plotly.graph_objects as go

from kvlab.measure.spectra import Ranks, Spectra
from kvlab.plots import spectra, style

ONE = Spectra(3, np.array([0, 0.9, 1.0]), np.array([0, 0.7, 1.0]), np.array([0, 0.6, 0.8, 1.0]))
OTHER = Spectra(0, np.array([0, 0.5, 1.0]), np.array([0, 0.5, 1.0]), np.array([0, 0.5, 0.75, 1.0]))
RANKS = Ranks(0.95, np.array([1, 2]), np.array([2, 2]), np.array([3, 2]), (2, 3))
BEFORE, AFTER, VALUES = spectra.NAMES.values()


def y(fig: go.Figure, name: str) -> list[float]:
    return list(style.trace(fig, name).y)


def test_what_a_rank_keeps() -> None:
    fig = spectra.kept(ONE, 1, 0.95)
    assert y(fig, BEFORE) == pytest.approx([0, 90, 100])
    assert y(fig, AFTER) == pytest.approx([0, 70, 100])
    assert y(fig, VALUES) == pytest.approx([0, 60, 80, 100])
    assert (list(style.trace(fig, spectra.CHOSEN).x), y(fig, spectra.CHOSEN)) == ([1, 1, 1], pytest.approx([90, 70, 60]))
    assert y(fig, spectra.WANTED) == pytest.approx([95, 95])
    assert fig.layout.xaxis.title.text == "rank (directions a head keeps)"
    assert fig.layout.yaxis.title.text == "variance kept (%)"
    assert list(fig.layout.xaxis.range) == [0, 3]
    assert spectra.kept_summary(ONE, 1) == (
        "In layer 3 the first 1 directions keep 90.0% of the variance of keys before RoPE, 70.0% of keys as they come, 60.0% of values."
    )


def test_hues_have_their_meaning_and_no_two_lines_are_told_apart_by_hue_alone() -> None:
    fig = spectra.kept(ONE, 1)
    lines = {name: style.trace(fig, name).line for name in (BEFORE, AFTER, VALUES)}
    assert lines[BEFORE].color == style.STORE
    assert lines[AFTER].color == style.FULL
    assert lines[VALUES].color in style.PARTS.values()
    assert lines[VALUES].dash == "dot"
    assert len({line.width for line in (lines[BEFORE], lines[AFTER])}) == 2


def test_a_rank_above_a_side_s_directions_stands_at_its_end() -> None:
    fig = spectra.kept(ONE, 3)
    assert (list(style.trace(fig, spectra.CHOSEN).x), y(fig, spectra.CHOSEN)) == ([2, 2, 3], [100, 100, 100])
    assert "100.0% of values" in spectra.kept_summary(ONE, 3)


def test_it_is_updated_in_place() -> None:
    live = go.FigureWidget(spectra.kept(ONE, 1, 0.95))
    traces = len(live.data)
    spectra.update_kept(live, OTHER, 2)
    assert y(live, BEFORE) == [0, 50, 100]
    assert not style.trace(live, spectra.WANTED).visible
    assert len(live.data) == traces


def test_ranks_by_layer() -> None:
    fig = spectra.needed(RANKS, 1)
    assert [y(fig, name) for name in (BEFORE, AFTER, VALUES)] == [[1, 2], [2, 2], [3, 2]]
    assert (list(style.trace(fig, spectra.CHOSEN_LAYER).x), y(fig, spectra.CHOSEN_LAYER)) == ([1, 1, 1], [2, 2, 2])
    assert (fig.layout.xaxis.title.text, fig.layout.yaxis.title.text) == ("layer", "rank (directions)")
    assert fig.layout.yaxis.range[1] > 3
    assert spectra.needed_summary(RANKS) == (
        "Of 2 (values: 3) directions, 95% of the variance takes 2 for keys before RoPE, 2 for keys as they come, 2 for values (mean of the layers)."
    )
    spectra.update_needed(fig, RANKS)
    assert not style.trace(fig, spectra.CHOSEN_LAYER).visible


def test_bits() -> None:
    here, there = {"basis": 4.125, "coefficients": 8.0}, {"coefficients": 8.0, "basis": 0.0625}
    words = spectra.bits_summary(here, 256, there, 16_384)
    assert words == "12.12 bits a number at 256 tokens (coefficients 8.00, basis 4.12), 8.06 at 16,384."
    assert spectra.bits_summary({"residual": 32.0}, 100, there, 16_384).startswith(
        "Nothing is written yet: too few tokens for a basis. 32.00 bits a number at 100 tokens (residual 32.00)"
    )


def test_empty_figures_wait_for_a_panel() -> None:
    for fig in (spectra.kept(None), spectra.needed(None)):
        assert not fig.data
